//! Tokens from a render server.

use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use axum::Router as Routes;
use axum::http::StatusCode;
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use warmroute_core::block::{BlockWindows, CacheSalt};
use warmroute_core::engine_settings::CommonSettings;
use warmroute_core::index::PrefixIndex;
use warmroute_core::load::LoadTracker;
use warmroute_core::router::{Router, RouterSettings};
use warmroute_core::worker::BlockSize;
use warmroute_engines::engine_client::EngineClient;
use warmroute_engines::engine_client::config::EnginesConfig;
use warmroute_engines::kv_events::{ConvertedEvent, EventNormalizer, MediaTokens, wire};
use warmroute_metrics::{Metrics, ModelOutcomeLabels};
use warmroute_settings::DurationSetting;
use warmroute_tokens::openai::ApiKind;

use super::*;
use crate::REPOSITORY;
use crate::request::engine_tokens::config::EngineTokensConfig;
use crate::request::engine_tokens::{EngineTokensClient, TokenSource};
use crate::request::{
    ConfiguredModel, EncodeLimits, ModelRegistry, PreprocessorParts, RequestBody,
    RequestPreprocessor,
};

mod large_bodies;

const PATH: &str = "/v1/chat/completions";

/// Returns a render server with a response delay, and the number of its calls.
async fn server(status: u16, text: String, delay: Duration) -> (String, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let count = calls.clone();
    let handler = move || {
        let count = count.clone();
        let text = text.clone();
        async move {
            count.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(delay).await;
            (StatusCode::from_u16(status).unwrap(), text)
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        axum::serve(listener, Routes::new().fallback(handler))
            .await
            .unwrap()
    });
    (url, calls)
}

/// Returns a preprocessor that does not hedge calls.
fn new_preprocessor(
    config: &EngineTokensConfig,
    media: MediaTokens,
) -> (Arc<RequestPreprocessor>, Arc<Metrics>) {
    new_hedging_preprocessor(config, media, Duration::MAX)
}

fn new_hedging_preprocessor(
    config: &EngineTokensConfig,
    media: MediaTokens,
    hedge_delay: Duration,
) -> (Arc<RequestPreprocessor>, Arc<Metrics>) {
    let router = Router::new(
        PrefixIndex::new(),
        LoadTracker::new(Instant::now),
        RouterSettings::default(),
        1,
    );
    let metrics = Arc::new(Metrics::new());
    let engines = EnginesConfig::default();
    let client = EngineClient::new(&engines).unwrap();
    let mut engine =
        EngineTokensClient::new(config, &engines, &client, Arc::new(router), metrics.clone());
    engine.hedge_delay = hedge_delay;
    let source = TokenSource {
        parity: Arc::default(),
        engine_tokens: Some(Arc::new(engine)),
        engine_settings: Default::default(),
    };
    let block_size = BlockSize::new(32).unwrap();
    let mut models = ModelRegistry::default();
    let model = ConfiguredModel {
        name: "m".into(),
        block_size,
        windows: BlockWindows::Plain,
        media,
        encoder: None,
    };
    models.add(model, &[], &[]);
    let limits = EncodeLimits {
        inline: 4096,
        queue: 1,
        deadline: Duration::from_secs(30),
    };
    let parts = PreprocessorParts {
        models,
        message_cache: None,
        paths: openai::ApiPaths::default(),
        clients: crate::request::config::ClientsConfig::default(),
        nvext: Default::default(),
        pool_routes: Default::default(),
        rewrites: Default::default(),
        rewrite_headers: Vec::new(),
        cluster: Default::default(),
        limits,
        tracking_hash: crate::tracking_hash::TrackingHash::Public,
        sessions: None,
        shared_cache: None,
        index_client: None,
        token_sources: [("m".into(), source)].into(),
    };
    (RequestPreprocessor::new(parts), metrics)
}

fn config_with_long_timeout(urls: Vec<String>) -> EngineTokensConfig {
    EngineTokensConfig {
        urls,
        timeout: DurationSetting::seconds(30),
        ..EngineTokensConfig::default()
    }
}

async fn fetch_tokens(preprocessor: &Arc<RequestPreprocessor>) -> Result<Vec<Vec<u32>>, Reason> {
    let body = Bytes::from(
        json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string(),
    );
    let preprocessed = preprocessor
        .preprocess(PATH, &|_| None, &RequestBody::Whole(body))
        .await;
    match preprocessed.route_request.prompt {
        RoutePrompt::Estimated { reason, .. } => Err(reason),
        _ => Ok(preprocessed.tokens),
    }
}

fn count_outcomes(metrics: &Metrics, outcome: &'static str) -> u64 {
    metrics
        .tokens
        .remote_tokenizer_requests
        .get_or_create(&ModelOutcomeLabels::new(&"m".into(), outcome))
        .get()
}

const TOKENS: &str = r#"{"token_ids":[1,2,3]}"#;

#[tokio::test]
async fn slow_or_failed_server_is_hedged() {
    let (slow, _) = server(200, TOKENS.into(), Duration::from_secs(60)).await;
    let (quick, calls) = server(200, TOKENS.into(), Duration::ZERO).await;
    let (broken, _) = server(500, String::new(), Duration::ZERO).await;
    for first in [slow, broken] {
        let config = config_with_long_timeout(vec![first, quick.clone()]);
        let hedge_delay = Duration::from_millis(5);
        let (preprocessor, metrics) =
            new_hedging_preprocessor(&config, MediaTokens::default(), hedge_delay);
        // Either server may be first.
        for _ in 0..4 {
            assert_eq!(fetch_tokens(&preprocessor).await, Ok(vec![vec![1, 2, 3]]));
        }
        assert_eq!(count_outcomes(&metrics, "ok"), 4);
    }
    assert!(calls.load(Ordering::SeqCst) >= 8);
}

#[tokio::test]
async fn refusal_is_final_and_failures_open_breaker() {
    let (refusing, refused_calls) = server(400, r#"{"message":"no"}"#.into(), Duration::ZERO).await;
    let (other, other_calls) = server(400, String::new(), Duration::ZERO).await;
    let (preprocessor, metrics) = new_preprocessor(
        &config_with_long_timeout(vec![refusing, other]),
        MediaTokens::default(),
    );
    assert_eq!(
        fetch_tokens(&preprocessor).await,
        Err(Reason::RemoteTokenizerFailed)
    );
    let calls = refused_calls.load(Ordering::SeqCst) + other_calls.load(Ordering::SeqCst);
    assert_eq!(
        (calls, count_outcomes(&metrics, "refused")),
        (1, 1),
        "a refusal is not retried"
    );
    let (broken, calls) = server(503, String::new(), Duration::ZERO).await;
    let config = config_with_long_timeout(vec![broken]);
    let (preprocessor, metrics) = new_preprocessor(&config, MediaTokens::default());
    for _ in 0..5 {
        assert_eq!(
            fetch_tokens(&preprocessor).await,
            Err(Reason::RemoteTokenizerFailed)
        );
    }
    assert_eq!(
        (
            calls.load(Ordering::SeqCst),
            count_outcomes(&metrics, "status"),
            count_outcomes(&metrics, "no_engine")
        ),
        (3, 3, 2)
    );
}

#[tokio::test]
async fn engine_tokens_respect_the_deadline() {
    let (slow, _) = server(200, TOKENS.into(), Duration::from_secs(60)).await;
    let config = EngineTokensConfig {
        timeout: DurationSetting::millis(50),
        ..config_with_long_timeout(vec![slow.clone(), slow])
    };
    let (preprocessor, metrics) = new_preprocessor(&config, MediaTokens::default());
    let started = Instant::now();
    assert_eq!(
        fetch_tokens(&preprocessor).await,
        Err(Reason::RemoteTokenizerFailed)
    );
    assert!(started.elapsed() < Duration::from_secs(20));
    assert_eq!(count_outcomes(&metrics, "timeout"), 1);
}

/// Returns the local hashes in the first event of a real engine that computed the same image.
fn event_blocks(media: MediaTokens) -> Vec<warmroute_core::block::LocalHash> {
    let capture: Value = serde_json::from_str(include_str!(
        "../../../../../../tests/data/kv_events/e02-image.json"
    ))
    .unwrap();
    let frame = capture["frames"][0][2].as_str().unwrap();
    let digit = |at: usize| u8::from_str_radix(&frame[at..at + 2], 16).unwrap();
    let payload: Vec<u8> = (0..frame.len()).step_by(2).map(digit).collect();
    let batch = wire::decode(&payload).unwrap();
    let mut normalizer = EventNormalizer::new(BlockSize::new(32).unwrap(), media);
    match normalizer.convert(&batch.events[0]) {
        ConvertedEvent::Event(warmroute_core::index::KvEvent::Stored { blocks, .. }) => {
            blocks.iter().map(|block| block.local).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn rendered_image_blocks_match_engine_events() {
    let rendered = include_str!("../../../../../../tests/data/engines/render-image.json");
    let (url, _) = server(200, rendered.to_owned(), Duration::ZERO).await;
    for image in [None, Some(151_655)] {
        let media = MediaTokens { image, video: None };
        let (preprocessor, _) =
            new_preprocessor(&config_with_long_timeout(vec![url.clone()]), media);
        let body = json!({"model": "m", "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
            {"type": "text", "text": "What is this?"}]}]});
        let preprocessed = preprocessor
            .preprocess(
                PATH,
                &|_| None,
                &RequestBody::Whole(body.to_string().into()),
            )
            .await;
        let [blocks] = preprocessed.route_request.prompt.blocks() else {
            panic!("{:?}", preprocessed.route_request.prompt)
        };
        assert_eq!((blocks.tokens(), blocks.len()), (124, 3));
        assert_eq!(blocks.locals(), event_blocks(media), "{image:?}");
    }
}

/// Returns the same preprocessor, with engines that report this context length.
fn with_model_length(
    preprocessor: Arc<RequestPreprocessor>,
    max_model_len: u64,
) -> Arc<RequestPreprocessor> {
    let mut preprocessor = Arc::into_inner(preprocessor).unwrap();
    let settings = CommonSettings {
        max_model_len: Some(max_model_len),
        ..CommonSettings::default()
    };
    let source = preprocessor
        .parts
        .token_sources
        .get_mut(&"m".into())
        .unwrap();
    source.engine_settings = Arc::new(arc_swap::ArcSwap::from_pointee(
        [("m".into(), settings)].into(),
    ));
    Arc::new(preprocessor)
}

#[tokio::test]
async fn engine_tokens_are_truncated_to_model_length() {
    let tokens: Vec<u32> = (1..=200).collect();
    let (url, _) = server(
        200,
        json!({"token_ids": tokens}).to_string(),
        Duration::ZERO,
    )
    .await;
    let body =
        json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string();
    for (max_length, reason, blocks) in [(200, None, 6), (100, Some(Reason::PromptTooLong), 3)] {
        let preprocessor = with_model_length(
            new_preprocessor(
                &config_with_long_timeout(vec![url.clone()]),
                MediaTokens::default(),
            )
            .0,
            max_length,
        );
        let prompt = preprocessor
            .preprocess(PATH, &|_| None, &RequestBody::Whole(body.clone().into()))
            .await
            .route_request
            .prompt;
        assert_eq!(prompt.reason(), reason);
        let known = match &prompt {
            RoutePrompt::Truncated { known, .. } => known,
            prompt => &prompt.blocks()[0],
        };
        assert_eq!(
            known.locals(),
            &local_hashes(&tokens)[..blocks],
            "{max_length}"
        );
    }
}

fn local_hashes(tokens: &[u32]) -> Vec<warmroute_core::block::LocalHash> {
    warmroute_core::block::hash::local_hashes(
        tokens,
        BlockSize::new(32).unwrap(),
        &CacheSalt::default(),
        BlockWindows::Plain,
        &[],
    )
}

#[tokio::test]
async fn shadow_tokenization_has_the_limits_of_prompts() {
    let (preprocessor, _) = new_preprocessor(
        &config_with_long_timeout(vec!["http://127.0.0.1:1".to_owned()]),
        MediaTokens::default(),
    );
    let mut preprocessor = Arc::into_inner(with_model_length(preprocessor, 1000)).unwrap();
    let files = warmroute_tokens::prompt::Config {
        tokenizer: format!("{REPOSITORY}/examples/models/qwen2.5/tokenizer.json.gz").into(),
        tokenizer_config: None,
        chat_template: None,
    };
    let encoder = Some(Arc::new(
        warmroute_tokens::prompt::Encoder::load(&files).unwrap(),
    ));
    let block_size = BlockSize::new(32).unwrap();
    let windows = BlockWindows::Plain;
    let media = MediaTokens::default();
    preprocessor.parts.models = ModelRegistry::default();
    preprocessor.parts.models.add(
        ConfiguredModel {
            name: "m".into(),
            block_size,
            windows,
            media,
            encoder,
        },
        &[],
        &[],
    );
    let resolved = preprocessor.parts.models.resolve(Some("m")).unwrap();
    let encoder = PromptEncoder::new(&preprocessor.parts, &resolved, None);
    let is_compared = |repeats: usize, deadline: Option<Instant>| {
        let body =
            json!({"model": "m", "prompt": "one two three four ".repeat(repeats)}).to_string();
        let request = openai::parse(ApiKind::Completions, body.as_bytes()).unwrap();
        let expectation = encoder.shadow_expectation(deadline, &request);
        matches!(expectation, ParityExpectation::Shadow(_))
    };
    assert!(is_compared(100, None));
    assert!(
        !is_compared(1000, None),
        "the prompt exceeds the length of the model"
    );
    assert!(
        !is_compared(200_000, Some(Instant::now())),
        "the deadline has passed"
    );
}

#[tokio::test]
async fn tokenize_is_not_queried_with_refused_tools() {
    let (url, calls) = server(
        200,
        r#"{"tokens":[1,2,3],"count":3,"max_model_len":9}"#.into(),
        Duration::ZERO,
    )
    .await;
    let config = EngineTokensConfig {
        endpoint: RenderPath::Tokenize,
        ..config_with_long_timeout(vec![url])
    };
    let (preprocessor, _) = new_preprocessor(&config, MediaTokens::default());
    let tool = json!({"type": "function", "function": {"name": "f"}});
    for (fields, is_queried) in [
        (json!({}), true),
        (json!({"tool_choice": "none"}), true),
        (json!({"tool_choice": "none", "tools": []}), true),
        (json!({"tool_choice": "none", "tools": null}), true),
        (json!({"tool_choice": "auto", "tools": [tool]}), true),
        (json!({"tool_choice": "none", "tools": [tool]}), false),
    ] {
        let before = calls.load(Ordering::SeqCst);
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]});
        body.as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        let preprocessed = preprocessor
            .preprocess(
                PATH,
                &|_| None,
                &RequestBody::Whole(body.to_string().into()),
            )
            .await;
        assert_eq!(preprocessed.tokens == [[1, 2, 3]], is_queried, "{fields}");
        assert_eq!(
            calls.load(Ordering::SeqCst) - before,
            usize::from(is_queried),
            "{fields}"
        );
    }
}

#[tokio::test]
async fn too_many_prompts_are_not_rendered() {
    let (url, calls) = server(200, r#"[{"token_ids":[1,2,3]}]"#.into(), Duration::ZERO).await;
    let (preprocessor, _) =
        new_preprocessor(&config_with_long_timeout(vec![url]), MediaTokens::default());
    for (prompts, expected) in [(1024, 1), (1025, 0)] {
        for prompt in [json!(vec!["x"; prompts]), json!(vec![[7]; prompts])] {
            let before = calls.load(Ordering::SeqCst);
            let body = Bytes::from(json!({"model": "m", "prompt": prompt}).to_string());
            let preprocessed = preprocessor
                .preprocess("/v1/completions", &|_| None, &RequestBody::Whole(body))
                .await;
            assert_eq!(calls.load(Ordering::SeqCst) - before, expected, "{prompts}");
            let reason = preprocessed.route_request.prompt.reason();
            assert_eq!(
                reason == Some(Reason::TooManyPrompts),
                expected == 0,
                "{prompts}: {reason:?}"
            );
        }
    }
}
