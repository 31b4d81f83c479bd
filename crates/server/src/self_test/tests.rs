use axum::Router as Routes;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use warmroute_core::block::BlockWindows;
use warmroute_core::worker::WorkerEndpoint;
use warmroute_engines::engine_client::config::EnginesConfig;
use warmroute_tokens::prompt::{self, ModelTraits, RenderOptions};

use super::*;
use crate::REPOSITORY;

const TIMEOUT: Duration = Duration::from_secs(30);

/// Behavior of a simulated engine.
#[derive(Clone, Copy, PartialEq)]
enum Engine {
    Correct,
    /// Has no `/tokenize`.
    RendersOnly,
    /// Does not render, and its `/tokenize` ignores documents, effort and reasoning.
    TokenizesOnly,
    /// Ignores the reasoning in the history.
    OmitsReasoning,
    /// Rejects tools.
    NoTools,
    RequiresToken,
    UnknownModel,
    /// Returns another last token for long prompts.
    WrongToken,
    /// Omits the last token of long prompts.
    MissingToken,
}

/// A template that renders reasoning.
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ \
m.reasoning_content }}){% endif %}\
                        {{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

fn encoder() -> Arc<Encoder> {
    encoder_with(TEMPLATE, RenderOptions::default())
}

fn encoder_with(template: &str, render: RenderOptions) -> Arc<Encoder> {
    let directory = std::path::Path::new(REPOSITORY).join("examples/models/tinyllama");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), template).unwrap();
    let files =
        json!({"tokenizer": directory.join("tokenizer.json.gz"), "chat_template": file.path()});
    let files: prompt::Config = serde_json::from_value(files).unwrap();
    let traits = ModelTraits {
        render,
        ..ModelTraits::default()
    };
    Arc::new(Encoder::load_with_traits(&files, &traits).unwrap())
}

async fn answer(
    State((engine, encoder)): State<(Engine, Arc<Encoder>)>,
    uri: Uri,
    body: String,
) -> (StatusCode, String) {
    let mut request: Value = serde_json::from_str(&body).unwrap();
    if matches!(engine, Engine::OmitsReasoning | Engine::TokenizesOnly)
        && !request["messages"].is_null()
    {
        let messages = request["messages"].as_array_mut().unwrap();
        messages
            .iter_mut()
            .for_each(|message| _ = message.as_object_mut().unwrap().remove("reasoning_content"));
    }
    let body = request.to_string();
    match engine {
        Engine::RequiresToken => return (StatusCode::UNAUTHORIZED, String::new()),
        Engine::UnknownModel => {
            let response = json!({"error": {"message": "The model `m` does not exist."}});
            return (StatusCode::NOT_FOUND, response.to_string());
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
        ApiKind::Completions
    } else {
        ApiKind::ChatCompletions
    };
    let mut tokens = encoder
        .encode(&openai::parse(api, body.as_bytes()).unwrap())
        .unwrap()
        .prompts
        .remove(0);
    if tokens.len() > 1000 {
        match engine {
            Engine::WrongToken => *tokens.last_mut().unwrap() = 5,
            Engine::MissingToken => _ = tokens.pop(),
            _ => {}
        }
    }
    let response = match uri.path() {
        "/tokenize" => json!({"tokens": tokens}),
        "/v1/completions/render" => json!([{"token_ids": tokens}]),
        _ => json!({"token_ids": tokens}),
    };
    (StatusCode::OK, response.to_string())
}

async fn verdict(engine: Engine) -> CanaryVerdict {
    let encoder = encoder();
    compare(engine, encoder.clone(), encoder).await
}

/// Compares the canaries of an encoder with an engine.
async fn compare(
    engine: Engine,
    engine_encoder: Arc<Encoder>,
    encoder: Arc<Encoder>,
) -> CanaryVerdict {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = EngineUrl::http(WorkerEndpoint(listener.local_addr().unwrap()));
    let routes = Routes::new()
        .fallback(answer)
        .with_state((engine, engine_encoder));
    let server = tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    let model = ConfiguredModel {
        name: "m".into(),
        block_size: BlockSize::new(16).unwrap(),
        windows: BlockWindows::Plain,
        media: Default::default(),
        encoder: Some(encoder),
    };
    let client = EngineClient::new(&EnginesConfig::default()).unwrap();
    let verdict = CanarySuite::new(&model)
        .unwrap()
        .compare(&client, &url, TIMEOUT)
        .await;
    server.abort();
    verdict
}

#[tokio::test]
async fn equal_tokens_agree_by_render_and_tokenize() {
    for engine in [Engine::Correct, Engine::RendersOnly, Engine::TokenizesOnly] {
        let CanaryVerdict::Agrees { compared, skipped } = verdict(engine).await else {
            panic!("the tokens differ")
        };
        assert!(compared >= 10, "{compared}");
        // Features that `/tokenize` ignores are compared by rendering or not at all.
        let render_only = skipped
            .values()
            .filter(|reason| *reason == RENDER_ONLY_REASON)
            .count();
        assert_eq!(
            render_only,
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
async fn omitted_reasoning_is_found_by_rendering() {
    let CanaryVerdict::Differs { difference } = verdict(Engine::OmitsReasoning).await else {
        panic!("no difference was found")
    };
    assert_eq!(difference.canary.as_deref(), Some("chat_thoughts"));
}

#[tokio::test]
async fn rejected_canaries_are_skipped_by_name() {
    let (
        CanaryVerdict::Agrees {
            compared: all,
            skipped: before,
        },
        CanaryVerdict::Agrees { compared, skipped },
    ) = (
        verdict(Engine::Correct).await,
        verdict(Engine::NoTools).await,
    )
    else {
        panic!("the tokens differ")
    };
    let tools: Vec<_> = skipped
        .iter()
        .filter(|(_, reason)| reason.contains("no tools here"))
        .map(|(name, _)| name)
        .collect();
    // Canaries that warmroute cannot render are skipped before the engine is queried.
    assert!(
        tools
            .iter()
            .all(|name| name.starts_with("chat_tool") && !before.contains_key(*name)),
        "{skipped:?}"
    );
    assert_eq!(compared + tools.len(), all);
}

#[tokio::test]
async fn differing_last_token_is_reported_with_context() {
    for (engine, what) in [
        (Engine::WrongToken, ComparedItem::Tokens),
        (Engine::MissingToken, ComparedItem::Length),
    ] {
        let CanaryVerdict::Differs { difference } = verdict(engine).await else {
            panic!("no difference was found")
        };
        assert_eq!(
            (difference.compared, difference.block),
            (what, difference.position / 16)
        );
        assert!(
            difference.position >= 1000 && difference.canary.as_ref().unwrap().contains("long"),
            "{difference:?}"
        );
        assert_eq!(
            difference.engine_token,
            (engine == Engine::WrongToken).then_some(5)
        );
        assert_ne!(difference.warmroute_text, difference.engine_text);
    }
}

#[tokio::test]
async fn unavailable_engine_is_untested_with_fix() {
    for (engine, text) in [
        (Engine::RequiresToken, "engines.http.token_file"),
        (Engine::UnknownModel, "does not exist"),
    ] {
        let CanaryVerdict::CannotTest {
            reason,
            is_transient,
        } = verdict(engine).await
        else {
            panic!("{text}")
        };
        assert!(reason.contains(text) && !is_transient, "{reason}");
    }
}

/// A template that renders tools and has a switch for reasoning.
const SWITCH_TEMPLATE: &str = "{% if language is defined %}{{ language }}{% endif %}{% for t in tools or [] \
%}<tool>{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking \
%}<think></think>{% endif %}{% endif %}";

fn render_options(defaults: &Value, excludes_tools: bool) -> RenderOptions {
    RenderOptions {
        default_chat_template_kwargs: defaults.as_object().unwrap().clone(),
        exclude_tools_when_tool_choice_none: excludes_tools,
        ..RenderOptions::default()
    }
}

#[tokio::test]
async fn matching_settings_of_differing_engine_are_found() {
    let none = || render_options(&json!({}), false);
    let no_thinking = || render_options(&json!({"enable_thinking": false}), false);
    let kwargs = r#"default_chat_template_kwargs: {"enable_thinking":false}"#;
    let tools = "exclude_tools_when_tool_choice_none: true";
    // Options of the engine and of warmroute, the settings, and whether only ends differ.
    let cases = [
        (no_thinking(), none(), Some(kwargs.to_owned()), true),
        (
            none(),
            no_thinking(),
            Some("default_chat_template_kwargs: {}".to_owned()),
            true,
        ),
        (
            render_options(&json!({}), true),
            none(),
            Some(tools.to_owned()),
            false,
        ),
        (
            render_options(&json!({"enable_thinking": false}), true),
            none(),
            Some(format!("{kwargs}, {tools}")),
            false,
        ),
        (
            render_options(&json!({"language": "en"}), false),
            none(),
            None,
            false,
        ),
    ];
    for (engine, ours, settings, only_ends) in cases {
        let engine = encoder_with(SWITCH_TEMPLATE, engine);
        let ours = encoder_with(SWITCH_TEMPLATE, ours);
        let (difference, has_same_conversation) = match compare(Engine::Correct, engine, ours).await
        {
            CanaryVerdict::Differs { difference } => (difference, false),
            CanaryVerdict::GenerationPromptDiffers {
                difference,
                end_tokens,
            } => {
                assert!((1..20).contains(&end_tokens), "{end_tokens}");
                (difference, true)
            }
            verdict => panic!("{verdict:?}"),
        };
        assert_eq!(difference.matching_settings, settings);
        assert_eq!(has_same_conversation, only_ends, "{settings:?}");
    }
}

#[tokio::test]
async fn excluded_tools_are_compared_by_rendering_only() {
    let encoder = || encoder_with(SWITCH_TEMPLATE, render_options(&json!({}), true));
    let CanaryVerdict::Agrees { skipped, .. } =
        compare(Engine::TokenizesOnly, encoder(), encoder()).await
    else {
        panic!("the tokens differ")
    };
    assert_eq!(
        skipped.get("chat_tools").map(String::as_str),
        Some(RENDER_ONLY_REASON)
    );
}
