use axum::Router as Routes;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::*;
use crate::block::Windows;
use crate::engine_client::config::EnginesConfig;
use crate::prompt;
use crate::worker::Endpoint;

const SOON: Duration = Duration::from_secs(30);

/// What an engine does.
#[derive(Clone, Copy, PartialEq)]
enum Engine {
    Right,
    /// It has no `/tokenize`.
    RendersOnly,
    /// It does not render, and reads no documents, efforts and thoughts where it tokenises.
    TokenizesOnly,
    /// It forgets thoughts.
    Thoughtless,
    /// It takes no tools.
    NoTools,
    Denies,
    KnowsNoModel,
    /// The last token of long prompts is another.
    Wrong,
    /// Long prompts lack their last token.
    Short,
}

/// A template that shows thoughts.
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}\
                        {{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

fn encoder() -> Arc<Encoder> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tinyllama");
    let template = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(template.path(), TEMPLATE).unwrap();
    let files =
        json!({"tokenizer": folder.join("tokenizer.json.gz"), "chat_template": template.path()});
    let files: prompt::Config = serde_json::from_value(files).unwrap();
    Arc::new(Encoder::load(&files).unwrap())
}

async fn answer(
    State((engine, encoder)): State<(Engine, Arc<Encoder>)>,
    uri: Uri,
    body: String,
) -> (StatusCode, String) {
    let mut request: Value = serde_json::from_str(&body).unwrap();
    if matches!(engine, Engine::Thoughtless | Engine::TokenizesOnly)
        && !request["messages"].is_null()
    {
        let messages = request["messages"].as_array_mut().unwrap();
        messages
            .iter_mut()
            .for_each(|message| _ = message.as_object_mut().unwrap().remove("reasoning_content"));
    }
    let body = request.to_string();
    match engine {
        Engine::Denies => return (StatusCode::UNAUTHORIZED, String::new()),
        Engine::KnowsNoModel => {
            let said = json!({"error": {"message": "The model `m` does not exist."}});
            return (StatusCode::NOT_FOUND, said.to_string());
        }
        Engine::RendersOnly if uri.path() == "/tokenize" => {
            return (StatusCode::NOT_FOUND, String::new());
        }
        Engine::TokenizesOnly if uri.path() != "/tokenize" => {
            return (StatusCode::NOT_FOUND, String::new());
        }
        Engine::NoTools if !request["tools"].is_null() => {
            return (
                StatusCode::BAD_REQUEST,
                json!({"message": "no tools here"}).to_string(),
            );
        }
        _ => {}
    }
    let api = if request["messages"].is_null() {
        Api::Completions
    } else {
        Api::ChatCompletions
    };
    let mut tokens = encoder
        .encode(&openai::parse(api, body.as_bytes()).unwrap())
        .unwrap()
        .prompts
        .remove(0);
    if tokens.len() > 1000 {
        match engine {
            Engine::Wrong => *tokens.last_mut().unwrap() = 5,
            Engine::Short => _ = tokens.pop(),
            _ => {}
        }
    }
    let said = match uri.path() {
        "/tokenize" => json!({"tokens": tokens}),
        "/v1/completions/render" => json!([{"token_ids": tokens}]),
        _ => json!({"token_ids": tokens}),
    };
    (StatusCode::OK, said.to_string())
}

async fn verdict(engine: Engine) -> Verdict {
    let encoder = encoder();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = EngineUrl::http(Endpoint(listener.local_addr().unwrap()));
    let routes = Routes::new()
        .fallback(answer)
        .with_state((engine, encoder.clone()));
    let server = tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    let model = Model {
        name: "m".into(),
        block_size: BlockSize::new(16).unwrap(),
        windows: Windows::Plain,
        media: Default::default(),
        encoder: Some(encoder),
    };
    let client = EngineClient::new(&EnginesConfig::default()).unwrap();
    let verdict = Subject::new(&model)
        .unwrap()
        .test(&client, &url, SOON)
        .await;
    server.abort();
    verdict
}

#[tokio::test]
async fn an_engine_with_the_same_tokens_agrees_by_either_way() {
    for engine in [Engine::Right, Engine::RendersOnly, Engine::TokenizesOnly] {
        let Verdict::Agrees { compared, skipped } = verdict(engine).await else {
            panic!("it differs")
        };
        assert!(compared >= 10, "{compared}");
        // What `/tokenize` does not read is compared by rendering or not at all.
        let unread = skipped.values().filter(|why| *why == NOT_READ).count();
        assert_eq!(
            unread,
            if engine == Engine::TokenizesOnly {
                3
            } else {
                0
            },
            "{skipped:?}"
        );
    }
}

#[tokio::test]
async fn an_engine_that_forgets_thoughts_is_found_out_where_it_renders() {
    let Verdict::Differs { difference } = verdict(Engine::Thoughtless).await else {
        panic!("it is not found")
    };
    assert_eq!(difference.canary.as_deref(), Some("chat_thoughts"));
}

#[tokio::test]
async fn what_an_engine_refuses_is_left_out_by_name() {
    let (
        Verdict::Agrees {
            compared: all,
            skipped: before,
        },
        Verdict::Agrees { compared, skipped },
    ) = (verdict(Engine::Right).await, verdict(Engine::NoTools).await)
    else {
        panic!("it differs")
    };
    let tools: Vec<_> = skipped
        .iter()
        .filter(|(_, why)| why.contains("no tools here"))
        .map(|(name, _)| name)
        .collect();
    // What we cannot render ourselves was left out before.
    assert!(
        tools
            .iter()
            .all(|name| name.starts_with("chat_tool") && !before.contains_key(*name)),
        "{skipped:?}"
    );
    assert_eq!(compared + tools.len(), all);
}

#[tokio::test]
async fn one_other_token_at_the_very_end_is_found_and_shown_with_its_surroundings() {
    for (engine, what) in [(Engine::Wrong, What::Tokens), (Engine::Short, What::Length)] {
        let Verdict::Differs { difference } = verdict(engine).await else {
            panic!("it is not found")
        };
        assert_eq!(
            (difference.what, difference.block),
            (what, difference.at / 16)
        );
        assert!(
            difference.at >= 1000 && difference.canary.as_ref().unwrap().contains("long"),
            "{difference:?}"
        );
        assert_eq!(difference.theirs, (engine == Engine::Wrong).then_some(5));
        assert_ne!(difference.our_text, difference.their_text);
    }
}

#[tokio::test]
async fn who_cannot_be_asked_is_not_punished_and_the_mend_is_named() {
    for (engine, words) in [
        (Engine::Denies, "engines.token_file"),
        (Engine::KnowsNoModel, "does not exist"),
    ] {
        let Verdict::CannotTest { why, passes } = verdict(engine).await else {
            panic!("{words}")
        };
        assert!(
            why.contains(words) && !passes,
            "asking often helps nobody: {why}"
        );
    }
}
