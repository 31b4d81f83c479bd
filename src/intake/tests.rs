use super::*;
use crate::block::Windows;
use crate::prompt;
use crate::worker::BlockSize;

fn parts(models: Models, clients: ClientsConfig, limits: Limits) -> Parts {
    Parts {
        models,
        paths: Paths::default(),
        clients,
        limits,
        tracking: TrackingHash::Public,
        sessions: None,
        shared: None,
    }
}

/// A way in with the shipped tokenizer and next to no time.
fn hurried() -> Arc<Intake> {
    let files = prompt::Config {
        tokenizer: "examples/models/qwen2.5/tokenizer.json.gz".into(),
        tokenizer_config: None,
        chat_template: None,
    };
    let model = Model {
        name: "m".into(),
        block_size: BlockSize::new(16).unwrap(),
        windows: Windows::Plain,
        encoder: Some(Arc::new(Encoder::load(&files).unwrap())),
    };
    let mut models = Models::default();
    models.add(model, &[], &[]);
    let limits = Limits { inline: 4096, queue: 256, deadline: Duration::from_millis(1) };
    Intake::new(parts(models, ClientsConfig::default(), limits))
}

#[tokio::test]
async fn an_encoder_that_missed_its_deadline_keeps_its_place_until_it_is_done() {
    let intake = hurried();
    let places = intake.encoders.available_permits();
    let prompt = "a prompt that takes longer than a millisecond ".repeat(20_000);
    let body = serde_json::json!({"model": "m", "prompt": prompt}).to_string();
    let taken = intake.take("/v1/completions", &|_| None, &Body::Whole(body.into())).await;
    assert!(matches!(taken.request.prompt, Prompt::Estimated { because: Reason::Deadline, .. }));
    assert_eq!(intake.encoders.available_permits(), places - 1, "the work goes on");
    let done = tokio::time::timeout(Duration::from_secs(60), intake.encoders.acquire_many(places as u32)).await;
    assert!(done.is_ok(), "the place is given back");
}

/// A way in for token prompts only.
fn tokens_only(clients: ClientsConfig) -> Arc<Intake> {
    let mut models = Models::default();
    let size = BlockSize::new(4).unwrap();
    let model = Model { name: "base".into(), block_size: size, windows: Windows::Plain, encoder: None };
    models.add(model, &["alias".into()], &["tuned".into()]);
    let limits = Limits { inline: 4096, queue: 1, deadline: Duration::from_secs(1) };
    Intake::new(parts(models, clients, limits))
}

fn taken(clients: &ClientsConfig, tenant: Option<&'static str>, model: &str, nvext: &str) -> Taken {
    let body = format!(r#"{{"model":"{model}","prompt":"x","cache_salt":"own","nvext":{nvext}}}"#);
    let headers = move |name: &str| (name == "x-tenant-id").then_some(tenant).flatten().map(Into::into);
    tokens_only(clients.clone()).take_now("/v1/completions", &headers, body.as_bytes())
}

fn locals_of(salt: &Salt) -> Vec<crate::block::LocalHash> {
    crate::block::hash::locals(&[1, 2, 3, 4, 5, 6, 7, 8], BlockSize::new(4).unwrap(), salt, Windows::Plain, &[])
}

#[test]
fn adapter_and_tenant_reach_the_hashes_and_only_trusted_clients_bring_tokens() {
    let data = r#"{"token_data":[1,2,3,4,5,6,7,8,9]}"#;
    let salted = r#"{"token_data":[1,2,3,4,5,6,7,8,9],"cache_salt":"inner"}"#;
    let trusting = ClientsConfig { trusted: true, tenant_header: Some("x-tenant-id".into()) };
    let with = |lora: Option<&str>, cache: &str| Salt { lora: lora.map(Into::into), cache: Some(cache.into()) };
    let cases = [
        ("base", None, data, with(None, "own")),
        ("tuned", None, data, with(Some("tuned"), "own")),
        ("alias", None, salted, with(None, "inner")),
        ("base", Some(" t1 "), salted, with(None, "t1")),
        ("base", Some("  "), salted, with(None, "inner")),
    ];
    for (model, tenant, nvext, salt) in cases {
        let taken = taken(&trusting, tenant, model, nvext);
        assert_eq!(taken.request.model, Some("base".into()), "{model}");
        let [blocks] = taken.request.prompt.blocks() else { panic!("{model} {nvext}: {:?}", taken.request.prompt) };
        assert_eq!(blocks.locals(), locals_of(&salt), "{model} {tenant:?} {nvext}");
        assert_eq!(taken.request.constraints.adapter.as_deref(), (model == "tuned").then_some("tuned"));
    }
    let distrusted = taken(&ClientsConfig::default(), Some("t1"), "base", data);
    assert!(matches!(distrusted.request.prompt, Prompt::Estimated { because: Reason::NoTokenizer, .. }));
}

fn estimated(path: &str, body: &str) -> (u64, Reason) {
    match tokens_only(ClientsConfig::default()).take_now(path, &|_| None, body.as_bytes()).request.prompt {
        Prompt::Estimated { tokens, because } => (tokens, because),
        prompt => panic!("{prompt:?}"),
    }
}

#[test]
fn bytes_of_media_are_no_tokens_and_no_estimate_is_larger_than_a_prompt_can_be() {
    let image = "A".repeat(3_000_000);
    let parts = format!(
        r#"[{{"type":"text","text":"{}"}},{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{image}"}}}}]"#,
        "word".repeat(10)
    );
    let chat = |content: &str| format!(r#"{{"model":"base","messages":[{{"role":"user","content":{content}}}]}}"#);
    let path = "/v1/chat/completions";
    assert_eq!(estimated(path, &chat(&parts)).0, 10);
    assert_eq!(estimated(path, &chat(&format!("\"{image}\""))), (MOST_ESTIMATED, Reason::NoTokenizer));
}

#[test]
fn a_request_with_too_many_prompts_is_routed_by_load() {
    let body = format!(r#"{{"model":"base","prompt":[{}]}}"#, vec!["[1]"; 5000].join(","));
    assert_eq!(estimated("/v1/completions", &body).1, Reason::TooManyPrompts);
}
