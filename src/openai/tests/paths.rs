use std::borrow::Cow;

use super::super::paths::{Paths, PathsConfig};
use super::super::{Api, Shape};

#[test]
fn an_api_is_told_by_how_its_path_ends() {
    for (path, api) in [
        ("/v1/chat/completions", Some(Api::ChatCompletions)),
        ("/my/v1/chat/completions/", Some(Api::ChatCompletions)),
        ("/v1/chat/completion%73", Some(Api::ChatCompletions)),
        ("/%761/chat%2Fcompletions%2f", Some(Api::ChatCompletions)),
        ("/v1/chat/completions%3Fx", None),
        ("/v1/chat/completions%", None),
        ("/v1/chat/completions%2", None),
        (
            "/v1/chat/completions//?x=/v1/embeddings",
            Some(Api::ChatCompletions),
        ),
        ("/v1/completions?timeout=3", Some(Api::Completions)),
        ("completions", Some(Api::Completions)),
        ("/v1/xcompletions", None),
        ("/v1/completions/x", None),
        ("/v1/chat-completions", None),
        ("/v1/Completions", None),
        ("/v1/chat/completions/render", Some(Api::Render)),
        ("/v1/completions/render", Some(Api::Render)),
        ("/v1/render", None),
        ("/v1/messages", Some(Api::Messages)),
        ("/v1/messages/count_tokens", Some(Api::CountTokens)),
        ("/messages", None),
        ("/openai/v1/embeddings", Some(Api::Embeddings)),
        ("/pooling", Some(Api::Pooling)),
        ("/classify", Some(Api::Classify)),
        ("/v1/responses", Some(Api::Responses)),
        ("/v1/responses/resp_1", None),
        ("/v1/score", Some(Api::Score)),
        ("/rerank", Some(Api::Rerank)),
        ("/v2/rerank", Some(Api::Rerank)),
        ("/tokenize", Some(Api::Tokenize)),
        ("/detokenize", Some(Api::Detokenize)),
        ("/v1/models", Some(Api::Models)),
        ("/v1/models/m", None),
        ("/v1/audio/transcriptions", Some(Api::Transcriptions)),
        ("/v1/audio/translations", Some(Api::Translations)),
        ("/v1/audio/speech", Some(Api::Speech)),
        ("/v1/images/generations", Some(Api::ImageGenerations)),
        ("/v1/images/edits", Some(Api::ImageEdits)),
        ("/v1/images/variations", Some(Api::ImageVariations)),
        ("/generate", Some(Api::SglangGenerate)),
        ("/inference/v1/generate", Some(Api::VllmGenerate)),
        ("/v1/conversations", Some(Api::Conversations)),
        ("/health", None),
        ("/", None),
        ("", None),
        ("?", None),
    ] {
        assert_eq!(Api::of_path(path), api, "{path}");
    }
}

#[test]
fn operators_name_paths_and_switch_apis_off() {
    let config = PathsConfig {
        chat_completions: vec!["/talk/".into(), "x/talk/more".into()],
        completions: vec![],
        models: vec!["more".into()],
        ..PathsConfig::default()
    };
    assert!(config.problems().is_empty());
    let paths = Paths::new(&config);
    for (path, api) in [
        ("/talk", Some(Api::ChatCompletions)),
        ("/x/talk/more", Some(Api::ChatCompletions)),
        ("/talk/more", Some(Api::Models)),
        ("/v1/chat/completions", None),
        ("/v1/completions", None),
        ("/v1/models", None),
        ("/v1/embeddings", Some(Api::Embeddings)),
    ] {
        assert_eq!(paths.find(path), api, "{path}");
    }
    let nothing = PathsConfig {
        chat_completions: vec!["/".into()],
        ..PathsConfig::default()
    };
    assert_eq!(
        Paths::new(&nothing).find("/"),
        None,
        "an empty ending is a mistake, and no ending of every path"
    );
}

#[test]
fn headers_tell_the_path_only_where_it_is_unknown_and_the_operator_lists_them() {
    let header = |name: &str| match name {
        "x-original-path" => Some(Cow::Borrowed("/nothing")),
        "x-forwarded-path" => Some(Cow::Borrowed(" /v1/embeddings?x ")),
        _ => None,
    };
    let listed = PathsConfig {
        headers: vec![
            "x-missing".into(),
            "x-original-path".into(),
            "X-Forwarded-Path".into(),
        ],
        ..PathsConfig::default()
    };
    let paths = Paths::new(&listed);
    assert_eq!(paths.of("/rewritten", header), Some(Api::Embeddings));
    assert_eq!(paths.of("/v1/completions", header), Some(Api::Completions));
    assert_eq!(Paths::default().of("/rewritten", header), None);
}

#[test]
fn only_bodies_that_say_something_are_wanted() {
    let wanted = |path: &str| Api::of_path(path).is_some_and(Api::wants_body);
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
    assert_eq!(Api::Classify.shape(), Shape::Prompt);
    assert_eq!(Api::Score.shape(), Shape::LoadOnly);
    assert_eq!(Api::CountTokens.shape(), Shape::NoPrompt);
}

#[test]
fn a_model_is_found_quickly_and_a_name_that_was_cut_is_none() {
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
            crate::openai::model_quickly(body.as_bytes()).as_deref(),
            expected,
            "{}",
            &body[..body.len().min(40)]
        );
    }
}
