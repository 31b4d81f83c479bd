use std::borrow::Cow;

use super::super::paths::{ApiPaths, ApiPathsConfig};
use super::super::{ApiKind, ApiWorkload};

#[test]
fn path_suffix_selects_api() {
    for (path, api) in [
        ("/v1/chat/completions", Some(ApiKind::ChatCompletions)),
        ("/my/v1/chat/completions/", Some(ApiKind::ChatCompletions)),
        ("/v1/chat/completion%73", Some(ApiKind::ChatCompletions)),
        (
            "/%761/chat%2Fcompletions%2f",
            Some(ApiKind::ChatCompletions),
        ),
        ("/v1/chat/completions%3Fx", None),
        ("/v1/chat/completions%", None),
        ("/v1/chat/completions%2", None),
        (
            "/v1/chat/completions//?x=/v1/embeddings",
            Some(ApiKind::ChatCompletions),
        ),
        ("/v1/completions?timeout=3", Some(ApiKind::Completions)),
        ("completions", Some(ApiKind::Completions)),
        ("/v1/xcompletions", None),
        ("/v1/completions/x", None),
        ("/v1/chat-completions", None),
        ("/v1/Completions", None),
        ("/v1/chat/completions/render", Some(ApiKind::Render)),
        ("/v1/completions/render", Some(ApiKind::Render)),
        ("/v1/render", None),
        ("/v1/messages", Some(ApiKind::Messages)),
        ("/v1/messages/count_tokens", Some(ApiKind::CountTokens)),
        ("/messages", None),
        ("/openai/v1/embeddings", Some(ApiKind::Embeddings)),
        ("/pooling", Some(ApiKind::Pooling)),
        ("/classify", Some(ApiKind::Classify)),
        ("/v1/responses", Some(ApiKind::Responses)),
        ("/v1/responses/resp_1", None),
        ("/v1/score", Some(ApiKind::Score)),
        ("/v1/decisions", Some(ApiKind::Score)),
        ("/v1/systemone", Some(ApiKind::Score)),
        ("/rerank", Some(ApiKind::Rerank)),
        ("/v2/rerank", Some(ApiKind::Rerank)),
        ("/tokenize", Some(ApiKind::Tokenize)),
        ("/detokenize", Some(ApiKind::Detokenize)),
        ("/v1/models", Some(ApiKind::Models)),
        ("/v1/models/m", None),
        ("/v1/audio/transcriptions", Some(ApiKind::Transcriptions)),
        ("/v1/audio/translations", Some(ApiKind::Translations)),
        ("/v1/audio/speech", Some(ApiKind::Speech)),
        ("/v1/images/generations", Some(ApiKind::ImageGenerations)),
        ("/v1/images/edits", Some(ApiKind::ImageEdits)),
        ("/v1/images/variations", Some(ApiKind::ImageVariations)),
        ("/generate", Some(ApiKind::SglangGenerate)),
        ("/inference/v1/generate", Some(ApiKind::VllmGenerate)),
        ("/v1/conversations", Some(ApiKind::Conversations)),
        ("/health", None),
        ("/", None),
        ("", None),
        ("?", None),
    ] {
        assert_eq!(ApiKind::from_path(path), api, "{path}");
    }
}

#[test]
fn stored_response_is_named_by_path() {
    for (path, id) in [
        ("/v1/responses/resp_1", Some("resp_1")),
        ("/v1/responses/resp_1/cancel?x=/y", Some("resp_1")),
        ("/gateway/v1/responses/resp_1/input_items/", Some("resp_1")),
        ("/v1/responses/resp%5f1?stream=true", Some("resp_1")),
        ("/v1/responses", None),
        ("/v1/responses/", None),
        ("/v1/responses/render", None),
        ("/v1/responses/resp_1/a/b", None),
        ("/v1/models/resp_1", None),
        ("/v1/chat/completions/chatcmpl-1", None),
        ("/health", None),
        ("", None),
    ] {
        let found = ApiPaths::default().stored_response_id(path);
        assert_eq!(found.as_deref(), id, "{path}");
    }
}

#[test]
fn configured_paths_extend_and_override_defaults() {
    let config = [
        ("/talk/", Some(ApiKind::ChatCompletions)),
        ("talk/more", Some(ApiKind::Models)),
        ("score", Some(ApiKind::Rerank)),
        ("chat/completions", None),
    ]
    .map(|(suffix, api)| (suffix.to_owned(), api));
    let paths = ApiPaths::new(&config.into(), &[]);
    for (path, api) in [
        ("/v1/talk", Some(ApiKind::ChatCompletions)),
        ("/talk/more", Some(ApiKind::Models)),
        ("/v1/score", Some(ApiKind::Rerank)),
        ("/v1/chat/completions", None),
        ("/v1/completions", Some(ApiKind::Completions)),
    ] {
        assert_eq!(paths.find_api(path), api, "{path}");
    }
}

#[test]
fn configured_headers_resolve_unknown_paths() {
    let header = |name: &str| match name {
        "x-original-path" => Some(Cow::Borrowed("/nothing")),
        "x-forwarded-path" => Some(Cow::Borrowed(" /v1/embeddings?x ")),
        _ => None,
    };
    let headers = ["x-missing", "x-original-path", "X-Forwarded-Path"].map(str::to_owned);
    let paths = ApiPaths::new(&ApiPathsConfig::default(), &headers);
    assert_eq!(
        paths.api_of_request("/rewritten", header),
        Some(ApiKind::Embeddings)
    );
    assert_eq!(
        paths.api_of_request("/v1/completions", header),
        Some(ApiKind::Completions)
    );
    assert_eq!(
        ApiPaths::default().api_of_request("/rewritten", header),
        None
    );
}

#[test]
fn only_relevant_bodies_are_read() {
    let wanted = |path: &str| ApiKind::from_path(path).is_some_and(ApiKind::wants_body);
    for path in [
        "/v1/chat/completions",
        "/v1/rerank",
        "/tokenize",
        "/v1/audio/transcriptions",
    ] {
        assert!(wanted(path), "{path}");
    }
    for path in ["/v1/models", "/v1/conversations", "/metrics"] {
        assert!(!wanted(path), "{path}");
    }
    assert_eq!(ApiKind::Classify.workload(), ApiWorkload::Prompt);
    assert_eq!(ApiKind::Score.workload(), ApiWorkload::LoadOnly);
    assert_eq!(ApiKind::CountTokens.workload(), ApiWorkload::None);
}

#[test]
fn model_of_prefix_ignores_truncated_name() {
    let long = "x".repeat(2 << 20);
    let cases = [
        (r#"{"model":"m","prompt":"x"}"#.to_owned(), Some("m")),
        (format!(r#"{{"model":"m","prompt":"{long}"}}"#), Some("m")),
        (format!(r#"{{"prompt":"{long}","model":"m"}}"#), None),
        (r#"{"model":"llama-3-8"#.to_owned(), None),
        (r#"{"a":1,"model":"m","prompt":"x"#.to_owned(), Some("m")),
        ("no json".to_owned(), None),
    ];
    for (body, expected) in cases {
        assert_eq!(
            crate::openai::read_model_from_prefix(body.as_bytes()).as_deref(),
            expected,
            "{}",
            &body[..body.len().min(40)]
        );
    }
}
