use super::encoded::MOST_ESTIMATED;
use super::*;
use crate::block::{MediaTokens, Windows};
use crate::parity::Foretold;
use crate::prompt;
use crate::prompt::Encoder;
use crate::worker::BlockSize;
use crate::worker::ModelName;
use std::sync::atomic::Ordering;

mod bounds;

fn parts(models: Models, clients: ClientsConfig, limits: Limits) -> Parts {
    Parts {
        models,
        paths: Paths::default(),
        clients,
        confine: Default::default(),
        rewrites: Default::default(),
        rewrite_headers: Vec::new(),
        cluster: Default::default(),
        limits,
        tracking: TrackingHash::Public,
        sessions: None,
        shared: None,
        remote: None,
        tokens: Default::default(),
    }
}

/// A way in with the shipped tokenizer and next to no time.
fn hurried() -> Arc<Intake> {
    with_tokenizer(Limits {
        inline: 4096,
        queue: 256,
        deadline: Duration::from_millis(1),
    })
}

fn with_tokenizer(limits: Limits) -> Arc<Intake> {
    let files = prompt::Config {
        tokenizer: "examples/models/qwen2.5/tokenizer.json.gz".into(),
        tokenizer_config: None,
        chat_template: None,
    };
    let model = Model {
        name: "m".into(),
        block_size: BlockSize::new(16).unwrap(),
        windows: Windows::Plain,
        media: MediaTokens::default(),
        encoder: Some(Arc::new(Encoder::load(&files).unwrap())),
    };
    let mut models = Models::default();
    models.add(model, &[], &[]);
    Intake::new(parts(models, ClientsConfig::default(), limits))
}

#[tokio::test]
async fn beyond_the_queue_and_beyond_the_deadline_each_has_its_reason() {
    let limits = Limits {
        inline: 4096,
        queue: 4,
        deadline: Duration::from_millis(50),
    };
    let intake = with_tokenizer(limits);
    let prompt = "a prompt that takes longer than its deadline ".repeat(100_000);
    let body = Body::Whole(
        serde_json::json!({"model": "m", "prompt": prompt})
            .to_string()
            .into(),
    );
    let because = async || match intake
        .take("/v1/completions", &|_| None, &body)
        .await
        .request
        .prompt
    {
        Prompt::Estimated { because, .. } | Prompt::Beginning { because, .. } => because,
        prompt => panic!("{prompt:?}"),
    };
    // One thread runs all of this: it is free for the others while the work goes on elsewhere.
    let reasons = tokio::join!(because(), because(), because(), because());
    assert_eq!(
        reasons,
        (
            Reason::Deadline,
            Reason::Deadline,
            Reason::TokenizerBusy,
            Reason::TokenizerBusy
        )
    );
    assert_eq!(
        (Reason::Deadline.as_str(), Reason::TokenizerBusy.as_str()),
        ("deadline", "tokenizer_busy")
    );
    assert_eq!(
        intake.queued.load(Ordering::Relaxed),
        0,
        "nobody waits any more"
    );
}

#[tokio::test]
async fn an_encoder_that_missed_its_deadline_keeps_its_place_until_it_is_done() {
    let intake = hurried();
    let places = intake.encoders.available_permits();
    // Its JSON alone takes hundreds of milliseconds, far longer than this thread may wait for a core.
    let prompt = "a prompt that takes longer than a millisecond ".repeat(1_000_000);
    let body = serde_json::json!({"model": "m", "prompt": prompt}).to_string();
    let taken = intake
        .take("/v1/completions", &|_| None, &Body::Whole(body.into()))
        .await;
    assert!(matches!(
        taken.request.prompt,
        Prompt::Estimated {
            because: Reason::Deadline,
            ..
        }
    ));
    assert_eq!(
        intake.encoders.available_permits(),
        places - 1,
        "the work goes on"
    );
    let done = tokio::time::timeout(
        Duration::from_secs(60),
        intake.encoders.acquire_many(places as u32),
    )
    .await;
    assert!(done.is_ok(), "the place is given back");
}

/// A way in for token prompts only.
fn tokens_only(clients: ClientsConfig) -> Arc<Intake> {
    let mut models = Models::default();
    let size = BlockSize::new(4).unwrap();
    let model = Model {
        name: "base".into(),
        block_size: size,
        windows: Windows::Plain,
        media: MediaTokens::default(),
        encoder: None,
    };
    models.add(model, &["alias".into()], &["tuned".into()]);
    let limits = Limits {
        inline: 4096,
        queue: 1,
        deadline: Duration::from_secs(1),
    };
    Intake::new(parts(models, clients, limits))
}

fn taken(clients: &ClientsConfig, tenant: Option<&'static str>, model: &str, nvext: &str) -> Taken {
    let body = format!(r#"{{"model":"{model}","prompt":"x","cache_salt":"own","nvext":{nvext}}}"#);
    let headers = move |name: &str| {
        (name == "x-tenant-id")
            .then_some(tenant)
            .flatten()
            .map(Into::into)
    };
    tokens_only(clients.clone()).take_now(None, "/v1/completions", &headers, body.as_bytes())
}

fn locals_of(salt: &Salt) -> Vec<crate::block::LocalHash> {
    crate::block::hash::locals(
        &[1, 2, 3, 4, 5, 6, 7, 8],
        BlockSize::new(4).unwrap(),
        salt,
        Windows::Plain,
        &[],
    )
}

#[test]
fn adapter_and_tenant_reach_the_hashes_and_only_trusted_clients_bring_tokens() {
    let data = r#"{"token_data":[1,2,3,4,5,6,7,8,9]}"#;
    let salted = r#"{"token_data":[1,2,3,4,5,6,7,8,9],"cache_salt":"inner"}"#;
    let trusting = ClientsConfig {
        trusted: true,
        tenant_header: Some("x-tenant-id".into()),
        ..ClientsConfig::default()
    };
    let with = |lora: Option<&str>, cache: &str| Salt {
        lora: lora.map(Into::into),
        cache: Some(cache.into()),
    };
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
        let [blocks] = taken.request.prompt.blocks() else {
            panic!("{model} {nvext}: {:?}", taken.request.prompt)
        };
        assert_eq!(
            blocks.locals(),
            locals_of(&salt),
            "{model} {tenant:?} {nvext}"
        );
        assert_eq!(
            taken.request.constraints.adapter.as_deref(),
            (model == "tuned").then_some("tuned")
        );
    }
    let distrusted = taken(&ClientsConfig::default(), Some("t1"), "base", data);
    assert!(matches!(
        distrusted.request.prompt,
        Prompt::Estimated {
            because: Reason::NoTokenizer,
            ..
        }
    ));
}

fn estimated(path: &str, body: &str) -> (u64, Reason) {
    match tokens_only(ClientsConfig::default())
        .take_now(None, path, &|_| None, body.as_bytes())
        .request
        .prompt
    {
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
    let chat = |content: &str| {
        format!(r#"{{"model":"base","messages":[{{"role":"user","content":{content}}}]}}"#)
    };
    let path = "/v1/chat/completions";
    assert_eq!(estimated(path, &chat(&parts)).0, 10);
    assert_eq!(
        estimated(path, &chat(&format!("\"{image}\""))),
        (MOST_ESTIMATED, Reason::NoTokenizer)
    );
}

#[test]
fn a_request_with_too_many_prompts_is_routed_by_load() {
    let body = format!(
        r#"{{"model":"base","prompt":[{}]}}"#,
        vec!["[1]"; 5000].join(",")
    );
    assert_eq!(
        estimated("/v1/completions", &body).1,
        Reason::TooManyPrompts
    );
}

fn read(path: &str, content_type: &'static str, body: &str) -> Taken {
    let headers = move |name: &str| (name == "content-type").then_some(content_type.into());
    tokens_only(ClientsConfig::default()).take_now(None, path, &headers, body.as_bytes())
}

#[test]
fn each_api_is_routed_as_its_shape_wants_and_to_who_serves_its_model() {
    const JSON: &str = "application/json";
    const FORM: &str = "multipart/form-data; boundary=B";
    let form = |model: &str| {
        let file = format!(
            "--B\r\ncontent-disposition: form-data; name=file; filename=f\r\n\r\n{}\r\n",
            "z".repeat(9999)
        );
        file + &format!(
            "--B\r\ncontent-disposition: form-data; name=model\r\n\r\n{model}\r\n--B--\r\n"
        )
    };
    let served = Some("base");
    let cases = [
        (
            "/v1/chat/completions",
            JSON,
            r#"{"model":"alias","messages":[]}"#.into(),
            Reason::Unreadable,
            served,
        ),
        (
            "/v1/rerank",
            JSON,
            r#"{"model":"alias","query":"12345678"}"#.into(),
            Reason::UnknownPrompt,
            served,
        ),
        (
            "/v1/responses",
            JSON,
            r#"{"model":"base","input":"12345678","previous_response_id":"r"}"#.into(),
            Reason::EngineState,
            served,
        ),
        (
            "/v1/audio/transcriptions",
            FORM,
            form("tuned"),
            Reason::UnknownPrompt,
            served,
        ),
        (
            "/v1/audio/transcriptions",
            FORM,
            form("other"),
            Reason::UnknownModel,
            None,
        ),
        (
            "/v1/audio/transcriptions",
            FORM,
            "nothing".into(),
            Reason::UnknownPrompt,
            served,
        ),
        (
            "/tokenize",
            JSON,
            r#"{"model":"alias","prompt":"x"}"#.into(),
            Reason::NotInference,
            served,
        ),
        (
            "/tokenize",
            JSON,
            r#"{"model":"other","prompt":"x"}"#.into(),
            Reason::NotInference,
            None,
        ),
        (
            "/tokenize",
            JSON,
            "garbage".into(),
            Reason::NotInference,
            served,
        ),
        (
            "/v1/models",
            JSON,
            String::new(),
            Reason::NotInference,
            served,
        ),
        (
            "/v1/embeddings",
            JSON,
            r#"{"model":"other","input":"x"}"#.into(),
            Reason::UnknownModel,
            None,
        ),
        (
            "/unknown",
            JSON,
            r#"{"model":"base"}"#.into(),
            Reason::NotInference,
            None,
        ),
    ];
    for (path, content_type, body, reason, model) in cases {
        let taken = read(path, content_type, &body);
        let Prompt::Estimated { tokens, because } = taken.request.prompt else {
            panic!("{path} {body}")
        };
        assert_eq!(
            (because, taken.request.model.as_ref().map(ModelName::as_str)),
            (reason, model),
            "{path} {body}"
        );
        let expected = match because {
            Reason::UnknownPrompt if path == "/v1/rerank" => 2,
            Reason::EngineState => 2,
            Reason::Unreadable => body.len() as u64 / 4,
            Reason::UnknownModel if path == "/v1/embeddings" => body.len() as u64 / 4,
            _ => 0,
        };
        assert_eq!(tokens, expected, "{path} {body}");
        assert_eq!(
            taken.request.computes,
            path == "/unknown" || because != Reason::NotInference,
            "{path}"
        );
        let work = !matches!(because, Reason::NotInference);
        assert_eq!(
            RouteRequest::new(None, Prompt::Estimated { tokens, because }).has_prompt(),
            work,
            "{path}"
        );
    }
    let taken = read("/v1/audio/transcriptions", FORM, &form("tuned"));
    assert_eq!(taken.request.constraints.adapter.as_deref(), Some("tuned"));
    assert_eq!(
        (taken.api, taken.asked_model.as_deref()),
        (Some(Api::Transcriptions), Some("tuned"))
    );
    let unknown = read("/v1/embeddings", JSON, r#"{"model":"other","input":"x"}"#);
    assert_eq!(unknown.asked_model.as_deref(), Some("other"));
}

#[test]
fn tokens_are_hashed_whichever_api_brings_them() {
    let intake = hurried();
    let tokens: Vec<u32> = (1..=32).collect();
    for (path, key) in [
        ("/inference/v1/generate", "token_ids"),
        ("/v1/embeddings", "input"),
        ("/generate", "input_ids"),
        ("/v1/completions", "prompt"),
    ] {
        let body = serde_json::json!({ key: tokens }).to_string();
        let taken = intake.take_now(None, path, &|_| None, body.as_bytes());
        let [blocks] = taken.request.prompt.blocks() else {
            panic!("{path}: {:?}", taken.request.prompt)
        };
        assert_eq!(
            (blocks.len(), taken.tokens),
            (2, vec![tokens.clone()]),
            "{path}"
        );
    }
}

#[tokio::test]
async fn no_trouble_with_the_body_makes_work_of_what_is_none() {
    let intake = tokens_only(ClientsConfig::default());
    let because = async |path: &str, body: Body| match intake
        .take(path, &|_| None, &body)
        .await
        .request
        .prompt
    {
        Prompt::Estimated { tokens, because } => (tokens, because),
        prompt => panic!("{prompt:?}"),
    };
    for body in [
        Body::Absent,
        Body::Unseen,
        Body::TooLarge {
            shown: Bytes::new(),
            bytes: 1 << 30,
        },
    ] {
        assert_eq!(
            because("/tokenize", body.clone()).await,
            (0, Reason::NotInference),
            "{body:?}"
        );
    }
    assert_eq!(
        because(
            "/v1/audio/translations",
            Body::TooLarge {
                shown: Bytes::new(),
                bytes: 1 << 30
            }
        )
        .await,
        (0, Reason::BodyTooLarge)
    );
    assert_eq!(
        because(
            "/v1/score",
            Body::TooLarge {
                shown: Bytes::new(),
                bytes: 400
            }
        )
        .await,
        (100, Reason::BodyTooLarge)
    );
    assert_eq!(
        because("/v1/score", Body::Absent).await,
        (0, Reason::NoBody)
    );
}

#[test]
fn only_wanted_bodies_are_asked_for() {
    let intake = tokens_only(ClientsConfig::default());
    for (path, wanted) in [
        ("/v1/completions", true),
        ("/v1/models", false),
        ("/favicon.ico", false),
    ] {
        assert_eq!(intake.wants_body(path, &|_| None), wanted, "{path}");
    }
}

/// A way in for a model that sees, with a system prompt before every image so that some blocks come before it.
fn seeing() -> Arc<Intake> {
    seeing_with(|encoder| encoder, MediaTokens::default(), Windows::Plain)
}

fn seeing_with(
    change: impl Fn(Encoder) -> Encoder,
    media_tokens: MediaTokens,
    windows: Windows,
) -> Arc<Intake> {
    let files = prompt::Config {
        tokenizer: "examples/models/qwen2.5/tokenizer.json.gz".into(),
        tokenizer_config: Some("tests/data/tokens/qwen2-vl/tokenizer_config.json".into()),
        chat_template: None,
    };
    let image = r#"{"token":"<|image_pad|>","rule":"qwen2_vl","preprocessor":"tests/data/tokens/qwen2-vl/preprocessor_config.json"}"#;
    let image = Some(serde_json::from_str(image).unwrap());
    let media = Some(prompt::MediaConfig {
        image,
        ..prompt::MediaConfig::default()
    });
    let traits = prompt::Traits {
        name: "m".into(),
        media,
        ..prompt::Traits::default()
    };
    let model = Model {
        name: "m".into(),
        block_size: BlockSize::new(4).unwrap(),
        windows,
        media: media_tokens,
        encoder: Some(Arc::new(change(Encoder::load_as(&files, &traits).unwrap()))),
    };
    let mut models = Models::default();
    models.add(model, &[], &[]);
    let limits = Limits {
        inline: 1 << 20,
        queue: 1,
        deadline: Duration::from_secs(60),
    };
    let source = engine_tokens::TokenSource {
        standing: Arc::default(),
        engine: None,
        agreed: Default::default(),
    };
    let tokens = TokenSources::from([("m".into(), source)]);
    Intake::new(Parts {
        tokens,
        ..parts(models, ClientsConfig::default(), limits)
    })
}

/// The beginning of a PNG of 56 by 56 pixels, as a data URL; its colours are these.
fn picture(colour: u8) -> String {
    use base64::Engine as _;
    let mut bytes = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x38\0\0\0\x38\x08".to_vec();
    bytes.extend([colour, 0, 0, 0, 1, 2, 3, 4]);
    format!(
        "data:image/png;base64,{}",
        base64::engine::general_purpose::STANDARD.encode(bytes)
    )
}

fn conversation(url: &str, after: &str) -> String {
    serde_json::json!({"model": "m", "messages": [
        {"role": "system", "content": "one two three four five six seven eight nine ten"},
        {"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": after}]}]})
    .to_string()
}

#[test]
fn images_tell_prompts_apart_and_what_comes_before_them_is_shared() {
    let intake = seeing();
    let path = "/v1/chat/completions";
    let take = |body: &str| {
        intake
            .take_now(None, path, &|_| None, body.as_bytes())
            .request
            .prompt
    };
    let whole = |url: &str| match take(&conversation(url, "what is it?")) {
        Prompt::Hashed(prompts) => prompts[0].locals().to_vec(),
        prompt => panic!("{prompt:?}"),
    };
    let (one, same, other) = (whole(&picture(2)), whole(&picture(2)), whole(&picture(0)));
    assert_eq!(one, same);
    let shared = one
        .iter()
        .zip(&other)
        .take_while(|(one, other)| one == other)
        .count();
    assert!(
        shared > 0 && shared < one.len(),
        "{shared} of {}",
        one.len()
    );
    // An image that lies elsewhere: as much is known as comes before it.
    let Prompt::Beginning {
        known,
        tokens,
        because,
    } = take(&conversation("https://a/b.png", "what is it?"))
    else {
        panic!()
    };
    assert_eq!(
        (because, known.locals()),
        (Reason::Multimodal, &one[..known.len()])
    );
    assert!(
        known.len() == shared && tokens > known.tokens() as u64,
        "{} of {shared} blocks",
        known.len()
    );
}

#[test]
fn illustrated_prompts_prove_nothing_of_tokens_and_are_doubted_with_them() {
    let intake = seeing();
    let take = |body: &str| {
        intake
            .take_now(None, "/v1/chat/completions", &|_| None, body.as_bytes())
            .request
    };
    let shown = conversation(&picture(2), "what is it?");
    let text = r#"{"model": "m", "messages": [{"role": "user", "content": "one two three four five six seven"}]}"#;
    assert!(matches!(take(text).foretold, Foretold::Prompt));
    assert!(matches!(take(&shown).foretold, Foretold::Illustrated));
    let differs = crate::parity::Evidence::Unconfirmed { block: 0 };
    let (_, standing) = intake.standings().next().unwrap();
    (0..8).for_each(|_| _ = standing.seen(crate::worker::WorkerId(1), differs));
    assert!(matches!(take(text).foretold, Foretold::Shadow(_)));
    let doubted = take(&shown);
    assert!(
        matches!(doubted.foretold, Foretold::Nothing),
        "{:?}",
        doubted.foretold
    );
    assert_eq!(doubted.prompt.because(), Some(Reason::ParityMismatch));
}

#[test]
fn what_is_left_to_the_engines_is_as_they_say_alike() {
    let intake = seeing();
    let take = |path: &str, body: &str| intake.take_now(None, path, &|_| None, body.as_bytes());
    let locals = |taken: Taken| match taken.request.prompt {
        Prompt::Hashed(prompts) => prompts[0].locals().to_vec(),
        prompt => panic!("{prompt:?}"),
    };
    let image = conversation(&picture(2), "what is it?");
    let by_name = locals(take("/v1/chat/completions", &image));
    let text =
        |more: &str| format!(r#"{{"model": "m", "prompt": "one two three four five six"{more}}}"#);
    let cut = text(r#", "truncate_prompt_tokens": -1"#);
    assert_eq!(
        take("/v1/completions", &cut).request.prompt.because(),
        Some(Reason::EncodeFailed)
    );

    use crate::learned::Agreed;
    let agree = |says: Agreed| {
        intake.parts.tokens[&"m".into()]
            .agreed
            .store(Arc::new([("m".into(), says)].into()))
    };
    agree(Agreed {
        roots_differ: true,
        ..Agreed::default()
    });
    match take("/v1/chat/completions", &image).request.prompt {
        Prompt::Beginning {
            known,
            because: Reason::Multimodal,
            ..
        } => {
            assert!(known.locals().len() < by_name.len() && by_name.starts_with(known.locals()));
        }
        prompt => panic!("one image has several names, and is none that is known: {prompt:?}"),
    }
    let named = image.replace(r#""image_url":{"#, r#""uuid":"mine","image_url":{"#);
    assert!(
        matches!(
            take("/v1/chat/completions", &named).request.prompt,
            Prompt::Hashed(_)
        ),
        "{named}"
    );
    agree(Agreed {
        root: Some("org/m".to_owned()),
        ..Agreed::default()
    });
    assert_ne!(
        locals(take("/v1/chat/completions", &image)),
        by_name,
        "images are named by what was started"
    );
    let whole = take("/v1/completions", &text("")).tokens[0].clone();
    assert_eq!(whole.len(), 6);
    let chat = |more: &str| {
        format!(r#"{{"model": "m", "messages": [{{"role": "user", "content": "one two"}}]{more}}}"#)
    };
    let whole_chat = take("/v1/chat/completions", &chat("")).tokens[0].clone();
    agree(Agreed {
        root: Some("org/m".to_owned()),
        max_model_len: Some(5),
        ..Agreed::default()
    });
    for (more, kept) in [
        ("", 4),
        (r#", "max_tokens": null"#, 4),
        (r#", "max_tokens": 2"#, 4),
        (r#", "max_tokens": 0"#, 5),
    ] {
        let taken = take(
            "/v1/completions",
            &text(&format!(r#", "truncate_prompt_tokens": -1{more}"#)),
        );
        assert_eq!(taken.tokens, [&whole[6 - kept..]], "{more}");
    }
    // A chat may be as long as the model takes, where it does not say how long the answer is to be.
    let whole = whole_chat;
    for (more, kept) in [
        ("", 5),
        (r#", "max_tokens": 0"#, 5),
        (r#", "max_completion_tokens": 2"#, 4),
    ] {
        let taken = take(
            "/v1/chat/completions",
            &chat(&format!(r#", "truncate_prompt_tokens": -1{more}"#)),
        );
        assert_eq!(taken.tokens, [&whole[whole.len() - kept..]], "{more}");
    }
}

#[tokio::test]
async fn an_image_that_was_shown_in_part_is_no_image_yet() {
    let intake = seeing();
    let body = conversation(&picture(2), "what is it?");
    let cut = body.find("base64,").unwrap() + 20;
    let shown = Body::Cut {
        shown: Bytes::copy_from_slice(&body.as_bytes()[..cut]),
        length: Some(body.len() as u64),
    };
    let taken = intake.take("/v1/chat/completions", &|_| None, &shown).await;
    let Prompt::Beginning { known, .. } = taken.request.prompt else {
        panic!("{:?}", taken.request.prompt)
    };
    let Prompt::Hashed(whole) = intake
        .take_now(None, "/v1/chat/completions", &|_| None, body.as_bytes())
        .request
        .prompt
    else {
        panic!()
    };
    assert!(!known.is_empty() && whole[0].locals().starts_with(known.locals()));
}

/// A way in with this template, given as text.
fn with_template(template: &str) -> Arc<Intake> {
    with_template_for(template, ClientsConfig::default())
}

fn with_template_for(template: &str, clients: ClientsConfig) -> Arc<Intake> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("template.jinja");
    std::fs::write(&file, template).unwrap();
    let files = prompt::Config {
        tokenizer: "examples/models/qwen2.5/tokenizer.json.gz".into(),
        tokenizer_config: None,
        chat_template: Some(file),
    };
    let model = Model {
        name: "m".into(),
        block_size: BlockSize::new(4).unwrap(),
        windows: Windows::Plain,
        media: MediaTokens::default(),
        encoder: Some(Arc::new(Encoder::load(&files).unwrap())),
    };
    let mut models = Models::default();
    models.add(model, &[], &[]);
    let limits = Limits {
        inline: 1 << 20,
        queue: 1,
        deadline: Duration::from_secs(60),
    };
    Intake::new(parts(models, clients, limits))
}

const STRINGS: &str =
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}";

/// As strings, without the thoughts of all but the last answer, and with tools before the last question.
const LATE: &str = "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}\
    {% endfor %}{% for m in messages %}<|im_start|>{{ m.role }} {% if m.reasoning and loop.index0 > ns.last %}{{ m.reasoning }}\
    {% endif %}{% if tools and loop.index0 == ns.last %}{{ tools }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}";

/// As lists of parts, the images of a message before its texts.
const PARTS: &str = "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}\
    {% for c in m.content %}{% if c.type == 'image' %}<|image_pad|>{% endif %}{% endfor %}\
    {% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}";

/// Without what comes before `</think>` in all but the last turn.
const THOUGHTS: &str = "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'assistant' and not loop.last %}\
    {{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}";

/// Calls with their arguments one by one, behind the text.
const CALLS: &str = "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content %}{{ m.content }}{% endif %}\
    {% for call in m.tool_calls or [] %}<call>{{ call.function.name }}{% for key, value in call.function.arguments | items %}\
    <argument={{ key }}>{{ value }}\n</argument of this call and of no other>\n{% endfor %}\n</call that was made>\n{% endfor %}\
    <|im_end|>{% endfor %}";

/// The blocks of a prompt, as far as they are known.
fn known_of(prompt: Prompt) -> Vec<crate::block::LocalHash> {
    match prompt {
        Prompt::Hashed(prompts) => prompts[0].locals().to_vec(),
        Prompt::Beginning { known, .. } => known.locals().to_vec(),
        Prompt::Estimated { .. } => Vec::new(),
    }
}

/// However a conversation goes on behind the cut, its prompt begins with the blocks that are known.
#[tokio::test]
async fn what_follows_a_cut_does_not_change_what_is_known() {
    use serde_json::{Value, json};
    let words = |from: usize| {
        (from..from + 40)
            .map(|n| format!("w{n} "))
            .collect::<String>()
    };
    let system = json!({"role": "system", "content": words(0)});
    let text = |text: String| json!({"type": "text", "text": text});
    let image = json!({"type": "image_url", "image_url": {"url": picture(2)}});
    let developer = json!({"role": "developer", "content": "be brief"});
    let user = json!({"role": "user", "content": words(100)});
    let thought = json!({"role": "assistant", "content": words(200), "reasoning": words(300)});
    let answer = json!({"role": "assistant", "content": words(400)});
    let shown = json!({"role": "user", "content": [text(words(500)), image]});
    let parts = json!({"role": "user", "content": [text(words(500)), text(words(600))]});
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let of = |messages: &[&Value], tools: bool| {
        let mut body = json!({"model": "m"});
        if tools {
            body["tools"] = json!([tool]);
        }
        body["messages"] = json!(messages);
        body.to_string()
    };
    let thinks =
        json!({"role": "assistant", "content": format!("{}</think>{}", words(200), words(400))});
    let call = |arguments: Value| json!([{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]);
    let arguments = json!({"content": words(200), "path": words(300)});
    let calls = json!({"role": "assistant", "tool_calls": call(arguments.to_string().into()), "content": words(400)});
    let turned = json!({"content": words(100), "role": "user"});
    // The conversation, a place behind which it is cut, and how much is known at least.
    let cases = [
        (
            STRINGS,
            of(&[&system, &user, &answer, &user], false),
            "w430 ",
            60,
        ),
        (
            STRINGS,
            of(&[&system, &user, &answer, &parts], false),
            "w530 ",
            60,
        ),
        (
            STRINGS,
            of(&[&system, &user, &answer, &shown], false),
            "w530 ",
            60,
        ),
        (
            STRINGS,
            of(&[&developer, &user, &answer, &developer], false),
            "w430 ",
            0,
        ),
        (STRINGS, of(&[&shown], false), "w530 ", 0),
        (
            LATE,
            of(&[&system, &user, &thought, &user], false),
            "w230 ",
            40,
        ),
        (
            LATE,
            of(&[&system, &user, &thought, &user, &answer], true),
            "w130 ",
            20,
        ),
        (
            LATE,
            of(&[&system, &user, &thought, &user, &answer], true),
            "\"reasoning\":\"w300 ",
            40,
        ),
        (
            THOUGHTS,
            of(&[&system, &user, &thinks, &user], false),
            "w230 ",
            60,
        ),
        (
            THOUGHTS,
            of(&[&system, &user, &thinks, &user], false),
            "w430 ",
            60,
        ),
        (
            THOUGHTS,
            of(&[&system, &user, &answer, &user], false),
            "\"role\":\"assist",
            60,
        ),
        (
            CALLS,
            of(&[&system, &user, &calls, &user], true),
            "w339 \\\"}\"}}]",
            60,
        ),
        (
            CALLS,
            of(&[&system, &turned, &answer], false),
            "\"role\":\"us",
            20,
        ),
        (
            PARTS,
            of(&[&system, &user, &answer, &parts], false),
            "w630 ",
            60,
        ),
        (
            PARTS,
            of(&[&system, &user, &answer, &shown], false),
            "w530 ",
            60,
        ),
    ];
    for (at, (template, body, behind, least)) in cases.into_iter().enumerate() {
        let intake = with_template(template);
        let cut = body.find(behind).unwrap() + behind.len();
        let cut_body = Body::Cut {
            shown: Bytes::copy_from_slice(&body.as_bytes()[..cut]),
            length: Some(body.len() as u64),
        };
        let known = known_of(
            intake
                .take("/v1/chat/completions", &|_| None, &cut_body)
                .await
                .request
                .prompt,
        );
        assert!(
            known.len() * 4 >= least,
            "{at}: {} tokens are known",
            known.len() * 4
        );
        // Of one with an image as much is known as comes before it.
        let locals = known_of(
            intake
                .take_now(None, "/v1/chat/completions", &|_| None, body.as_bytes())
                .request
                .prompt,
        );
        assert!(least == 0 || !locals.is_empty(), "{at}");
        assert!(
            locals.starts_with(&known),
            "{at}: {} of {} blocks",
            known.len(),
            locals.len()
        );
    }
}

/// What code agents write with `/v1/messages`: arguments are objects, and one of them is called content.
#[tokio::test]
async fn a_cut_argument_of_a_call_is_not_known() {
    use serde_json::json;
    let words = |from: usize| {
        (from..from + 40)
            .map(|n| format!("w{n} "))
            .collect::<String>()
    };
    let uses = json!({"type": "tool_use", "id": "c", "name": "f", "input": {"path": words(200), "content": words(300)}});
    let body = json!({"model": "m", "system": words(0), "tools": [{"name": "f", "input_schema": {}}], "messages": [
        {"role": "user", "content": words(100)}, {"role": "assistant", "content": [uses]}]});
    let body = body.to_string();
    let intake = with_template(CALLS);
    let whole = intake
        .take_now(None, "/v1/messages", &|_| None, body.as_bytes())
        .request
        .prompt;
    let Prompt::Hashed(whole) = whole else {
        panic!("{whole:?}")
    };
    for behind in ["w230 ", "w330 "] {
        let cut = body.find(behind).unwrap() + behind.len();
        let shown = Body::Cut {
            shown: Bytes::copy_from_slice(&body.as_bytes()[..cut]),
            length: None,
        };
        let prompt = intake
            .take("/v1/messages", &|_| None, &shown)
            .await
            .request
            .prompt;
        let Prompt::Beginning { known, .. } = prompt else {
            panic!("{behind}: {prompt:?}")
        };
        assert!(whole[0].locals().starts_with(known.locals()), "{behind}");
        assert!(
            known.locals().len() * 4 >= 60,
            "{behind}: {}",
            known.locals().len()
        );
    }
}

#[tokio::test]
async fn a_cut_conversation_is_salted_as_the_whole_one() {
    let words = (0..40).map(|n| format!("w{n} ")).collect::<String>();
    let trusting = with_template_for(
        STRINGS,
        ClientsConfig {
            trusted: true,
            ..ClientsConfig::default()
        },
    );
    for salt in [
        r#""cache_salt": "a", "#,
        r#""nvext": {"cache_salt": "b"}, "#,
    ] {
        let body = |salt: &str| {
            format!(
                r#"{{"model": "m", {salt}"messages": [{{"role": "user", "content": "{words}"}}]}}"#
            )
        };
        let whole = |body: &str| match trusting
            .take_now(None, "/v1/chat/completions", &|_| None, body.as_bytes())
            .request
            .prompt
        {
            Prompt::Hashed(prompts) => prompts[0].locals().to_vec(),
            prompt => panic!("{prompt:?}"),
        };
        let (salted, plain) = (whole(&body(salt)), whole(&body("")));
        assert!(!plain.starts_with(&salted[..1]), "{salt}");
        let cut = body(salt).find("w35 ").unwrap();
        let shown = Body::Cut {
            shown: Bytes::copy_from_slice(&body(salt).as_bytes()[..cut]),
            length: None,
        };
        let prompt = trusting
            .take("/v1/chat/completions", &|_| None, &shown)
            .await
            .request
            .prompt;
        let Prompt::Beginning { known, .. } = prompt else {
            panic!("{salt}: {prompt:?}")
        };
        assert!(
            !known.is_empty() && salted.starts_with(known.locals()),
            "{salt}"
        );
    }
}

#[tokio::test]
async fn a_cut_conversation_that_lets_one_expect_more_before_it_goes_by_load() {
    let intake = with_template(STRINGS);
    let words = "one two three four five six seven eight nine ten ".repeat(4);
    for (path, message, expected) in [
        (
            "/v1/chat/completions",
            serde_json::json!({"role": "user", "content": words}),
            true,
        ),
        // Who answers calls was offered tools.
        (
            "/v1/chat/completions",
            serde_json::json!({"role": "tool", "tool_call_id": "a", "content": words}),
            false,
        ),
        // And the system prompt is a field that may come later.
        (
            "/v1/messages",
            serde_json::json!({"role": "user", "content": words}),
            false,
        ),
    ] {
        let body = serde_json::json!({"model": "m", "messages": [message]}).to_string();
        let cut = Body::Cut {
            shown: Bytes::copy_from_slice(&body.as_bytes()[..body.len() - 9]),
            length: None,
        };
        let prompt = intake.take(path, &|_| None, &cut).await.request.prompt;
        assert_eq!(
            matches!(prompt, Prompt::Beginning { .. }),
            expected,
            "{path}: {prompt:?}"
        );
    }
}

#[test]
fn conversations_with_images_go_on_from_earlier_ones() {
    use serde_json::json;
    let words = |from: usize| {
        (from..from + 40)
            .map(|n| format!("w{n} "))
            .collect::<String>()
    };
    let image = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
    let mut messages = vec![
        json!({"role": "system", "content": words(0)}),
        json!({"role": "user", "content": words(100)}),
        json!({"role": "assistant", "content": words(200)}),
        json!({"role": "user", "content": [{"type": "text", "text": words(300)}, image(&picture(2))]}),
    ];
    for (pads, windows) in [
        (None, Windows::Plain),
        (Some(151_655), Windows::Plain),
        (None, Windows::Eagle),
    ] {
        let media = MediaTokens {
            image: pads,
            video: None,
        };
        let metrics = Arc::new(crate::metrics::Metrics::new());
        let cache = prompt::PromptCache::new(1 << 20, metrics.clone());
        let resuming = seeing_with(|encoder| encoder.resuming(cache.clone()).0, media, windows);
        let plain = seeing_with(|encoder| encoder, media, windows);
        let both = |messages: &[serde_json::Value]| {
            let body = json!({"model": "m", "messages": messages}).to_string();
            let take = |intake: &Arc<Intake>| {
                intake.take_now(None, "/v1/chat/completions", &|_| None, body.as_bytes())
            };
            let (ours, theirs) = (take(&resuming), take(&plain));
            assert_eq!(ours.tokens, theirs.tokens);
            assert_eq!(
                ours.request.prompt.blocks(),
                theirs.request.prompt.blocks(),
                "{pads:?} {windows:?}"
            );
            assert!(!ours.request.prompt.blocks()[0].is_empty());
        };
        let resumed = || metrics.prompt_cache_resumed_tokens.get();
        // Text alone, then an image that is known, then one that is not.
        both(&messages[..2]);
        assert_eq!(resumed(), 0);
        let mut before = 0;
        for upto in [4, 4] {
            both(&messages[..upto]);
            assert!(
                resumed() > before + 100,
                "{} tokens taken over",
                resumed() - before
            );
            before = resumed();
        }
        messages.push(json!({"role": "user", "content": [image("https://a/b.png")]}));
        both(&messages);
        assert!(
            resumed() > before + 200,
            "{} tokens taken over",
            resumed() - before
        );
        messages.pop();
    }
}

#[test]
fn an_objective_gives_its_priority_and_a_pool_its_own() {
    let confine = r#"{"rules": [{"pool": "q", "paths": ["/q"]}]}"#;
    let objectives = [("p", "gold", 5), ("q", "gold", -9), ("p", "none", 0)];
    let cluster = Cluster::new(
        objectives.map(|(pool, name, priority)| (pool.into(), name.to_owned(), priority)),
        [],
    );
    let limits = Limits {
        inline: 4096,
        queue: 256,
        deadline: Duration::from_secs(30),
    };
    let trusting = ClientsConfig {
        trusted: true,
        ..ClientsConfig::default()
    };
    let of = |clients: &ClientsConfig, path: &str, headers: &[(&str, &str)]| {
        let intake = Intake::new(Parts {
            confine: serde_json::from_str(confine).unwrap(),
            cluster: Arc::new(arc_swap::ArcSwap::from_pointee(cluster.clone())),
            ..parts(Models::default(), clients.clone(), limits)
        });
        let find = |name: &str| {
            headers
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).into())
        };
        let request = intake
            .take_now(
                intake.pool_of(path, &find),
                path,
                &find,
                br#"{"model":"m","prompt":"x"}"#,
            )
            .request;
        (
            request.priority.strict,
            request.constraints.pool.as_deref().map(str::to_owned),
        )
    };
    let (new, old, strict) = (
        "x-llm-d-inference-objective",
        "x-gateway-inference-objective",
        "x-dynamo-request-strict-priority",
    );
    let plain = ClientsConfig::default();
    let q = || Some("q".to_owned());
    for (clients, path, headers, expected) in [
        (&plain, "/v1/completions", vec![], (0, None)),
        (&plain, "/v1/completions", vec![(new, " gold ")], (5, None)),
        (&plain, "/v1/completions", vec![(old, "gold")], (5, None)),
        (
            &plain,
            "/v1/completions",
            vec![(old, "gold"), (new, "unknown")],
            (0, None),
        ),
        (&plain, "/q/v1/completions", vec![(new, "gold")], (-9, q())),
        (&plain, "/q/v1/completions", vec![(new, "none")], (0, q())),
        (&plain, "/v1/completions", vec![(strict, "7")], (0, None)),
        (
            &trusting,
            "/v1/completions",
            vec![(strict, "7"), (new, "gold")],
            (7, None),
        ),
        (&trusting, "/v1/completions", vec![(new, "gold")], (5, None)),
        (
            &ClientsConfig {
                objective_headers: vec![],
                ..plain.clone()
            },
            "/v1/completions",
            vec![(new, "gold")],
            (0, None),
        ),
    ] {
        assert_eq!(of(clients, path, &headers), expected, "{path} {headers:?}");
    }
}
