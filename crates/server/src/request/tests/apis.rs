//! Requests of every API, by path and shape.

use super::*;

fn estimate(path: &str, body: &str) -> (u64, Reason) {
    match preprocessor_without_tokenizer(ClientsConfig::default())
        .preprocess_blocking(None, path, &|_| None, body.as_bytes())
        .route_request
        .prompt
    {
        RoutePrompt::Estimated { tokens, reason } => (tokens, reason),
        prompt => panic!("{prompt:?}"),
    }
}

#[test]
fn estimates_ignore_media_bytes_and_are_capped() {
    let image = "A".repeat(3_000_000);
    let content_parts = format!(
        r#"[{{"type":"text","text":"{}"}},{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{image}"}}}}]"#,
        "word".repeat(10)
    );
    let chat = |content: &str| {
        format!(r#"{{"model":"base","messages":[{{"role":"user","content":{content}}}]}}"#)
    };
    let path = "/v1/chat/completions";
    assert_eq!(estimate(path, &chat(&content_parts)).0, 10);
    assert_eq!(
        estimate(path, &chat(&format!("\"{image}\""))),
        (MAX_ESTIMATED_TOKENS, Reason::NoTokenizer)
    );
}

#[test]
fn too_many_prompts_are_routed_by_load() {
    let body = format!(
        r#"{{"model":"base","prompt":[{}]}}"#,
        vec!["[1]"; 5000].join(",")
    );
    assert_eq!(estimate("/v1/completions", &body).1, Reason::TooManyPrompts);
}

fn preprocess(path: &str, content_type: &'static str, body: &str) -> PreprocessedRequest {
    let headers = move |name: &str| (name == "content-type").then_some(content_type.into());
    preprocessor_without_tokenizer(ClientsConfig::default()).preprocess_blocking(
        None,
        path,
        &headers,
        body.as_bytes(),
    )
}

const JSON: &str = "application/json";
const FORM: &str = "multipart/form-data; boundary=B";

/// Returns the form of a transcription request with a file and a model.
fn form(model: &str) -> String {
    let file = format!(
        "--B\r\ncontent-disposition: form-data; name=file; filename=f\r\n\r\n{}\r\n",
        "z".repeat(9999)
    );
    file + &format!("--B\r\ncontent-disposition: form-data; name=model\r\n\r\n{model}\r\n--B--\r\n")
}

/// Path, content type and body of a request, with the reason and the model of its estimated prompt.
type EstimatedCase = (
    &'static str,
    &'static str,
    String,
    Reason,
    Option<&'static str>,
);

/// Returns requests that an engine computes.
fn inference_cases() -> Vec<EstimatedCase> {
    let served = Some("base");
    vec![
        (
            "/v1/chat/completions",
            JSON,
            r#"{"model":"alias","messages":[]}"#.into(),
            Reason::Unparseable,
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
            Reason::EngineSideState,
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
            "/v1/embeddings",
            JSON,
            r#"{"model":"other","input":"x"}"#.into(),
            Reason::UnknownModel,
            None,
        ),
    ]
}

/// Returns requests that no engine computes, as far as warmroute knows.
fn other_cases() -> Vec<EstimatedCase> {
    let served = Some("base");
    vec![
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
            "/unknown",
            JSON,
            r#"{"model":"base"}"#.into(),
            Reason::NotInference,
            None,
        ),
    ]
}

#[test]
fn each_api_is_routed_by_its_shape() {
    for (path, content_type, body, expected_reason, model) in
        inference_cases().into_iter().chain(other_cases())
    {
        let preprocessed = preprocess(path, content_type, &body);
        let RoutePrompt::Estimated { tokens, reason } = preprocessed.route_request.prompt else {
            panic!("{path} {body}")
        };
        assert_eq!(
            (
                reason,
                preprocessed
                    .route_request
                    .model
                    .as_ref()
                    .map(ModelName::as_str)
            ),
            (expected_reason, model),
            "{path} {body}"
        );
        let expected = match reason {
            Reason::UnknownPrompt if path == "/v1/rerank" => 2,
            Reason::EngineSideState => 2,
            Reason::Unparseable => body.len() as u64 / 4,
            Reason::UnknownModel if path == "/v1/embeddings" => body.len() as u64 / 4,
            _ => 0,
        };
        assert_eq!(tokens, expected, "{path} {body}");
        assert_eq!(
            preprocessed.route_request.computes,
            path == "/unknown" || reason != Reason::NotInference,
            "{path}"
        );
        let has_prompt = !matches!(reason, Reason::NotInference);
        assert_eq!(
            RouteRequest::new(None, RoutePrompt::Estimated { tokens, reason }).has_prompt(),
            has_prompt,
            "{path}"
        );
    }
}

#[test]
fn form_names_model_and_adapter() {
    let preprocessed = preprocess("/v1/audio/transcriptions", FORM, &form("tuned"));
    assert_eq!(
        preprocessed.route_request.constraints.adapter.as_deref(),
        Some("tuned")
    );
    assert_eq!(
        (preprocessed.api, preprocessed.requested_model.as_deref()),
        (Some(ApiKind::Transcriptions), Some("tuned"))
    );
    let unknown = preprocess("/v1/embeddings", JSON, r#"{"model":"other","input":"x"}"#);
    assert_eq!(unknown.requested_model.as_deref(), Some("other"));
}

#[test]
fn tokens_of_every_api_are_hashed() {
    let preprocessor = preprocessor_with_short_deadline();
    let tokens: Vec<u32> = (1..=32).collect();
    for (path, key) in [
        ("/inference/v1/generate", "token_ids"),
        ("/v1/embeddings", "input"),
        ("/generate", "input_ids"),
        ("/v1/completions", "prompt"),
    ] {
        let body = serde_json::json!({ key: tokens }).to_string();
        let preprocessed = preprocessor.preprocess_blocking(None, path, &|_| None, body.as_bytes());
        let [blocks] = preprocessed.route_request.prompt.blocks() else {
            panic!("{path}: {:?}", preprocessed.route_request.prompt)
        };
        assert_eq!(
            (blocks.len(), preprocessed.tokens),
            (2, vec![tokens.clone()]),
            "{path}"
        );
    }
}

#[tokio::test]
async fn request_without_prompt_never_counts_as_load() {
    let preprocessor = preprocessor_without_tokenizer(ClientsConfig::default());
    let estimate = async |path: &str, body: RequestBody| match preprocessor
        .preprocess(path, &|_| None, &body)
        .await
        .route_request
        .prompt
    {
        RoutePrompt::Estimated { tokens, reason } => (tokens, reason),
        prompt => panic!("{prompt:?}"),
    };
    for body in [
        RequestBody::Absent,
        RequestBody::NotReceived,
        RequestBody::TooLarge {
            received: Bytes::new(),
            bytes: 1 << 30,
        },
    ] {
        assert_eq!(
            estimate("/tokenize", body.clone()).await,
            (0, Reason::NotInference),
            "{body:?}"
        );
    }
    assert_eq!(
        estimate(
            "/v1/audio/translations",
            RequestBody::TooLarge {
                received: Bytes::new(),
                bytes: 1 << 30
            }
        )
        .await,
        (0, Reason::BodyTooLarge)
    );
    assert_eq!(
        estimate(
            "/v1/score",
            RequestBody::TooLarge {
                received: Bytes::new(),
                bytes: 400
            }
        )
        .await,
        (100, Reason::BodyTooLarge)
    );
    assert_eq!(
        estimate("/v1/score", RequestBody::Absent).await,
        (0, Reason::NoBody)
    );
}

/// Returns a truncated body and a body above the size limit, of which the same bytes were received.
fn incomplete_bodies(received: &Bytes) -> [(RequestBody, Reason); 2] {
    let truncated = RequestBody::Truncated {
        received: received.clone(),
        length: Some(400),
    };
    let too_large = RequestBody::TooLarge {
        received: received.clone(),
        bytes: 400,
    };
    [
        (truncated, Reason::BodyTruncated),
        (too_large, Reason::BodyTooLarge),
    ]
}

#[tokio::test]
async fn incomplete_body_is_routed_by_load_to_its_model() {
    let preprocessor = RequestPreprocessor::new(PreprocessorParts {
        sessions: Some(SessionsConfig {
            body_field: Some("metadata.session".into()),
            ..SessionsConfig::default()
        }),
        ..parts_without_tokenizer(ClientsConfig::default())
    });
    let form = form("base");
    let cases = [
        (
            "/v1/responses",
            JSON,
            r#"{"model":"alias","previous_response_id":"r","metadata":{"session":"s"},"input":"x"#,
            (Some("base"), Some("r"), Some("s")),
        ),
        (
            "/v1/completions",
            JSON,
            r#"{"prompt":"x","model":"ba"#,
            (None, None, None),
        ),
        (
            "/v1/chat/completions",
            JSON,
            "\u{feff}{\"model\":\"base\",\"metadata\":{\"session\":\"s",
            (Some("base"), None, None),
        ),
        (
            "/v1/audio/transcriptions",
            FORM,
            form.as_str(),
            (Some("base"), None, None),
        ),
    ];
    for (path, content_type, received, expected) in cases {
        let headers = |name: &str| (name == "content-type").then(|| content_type.into());
        let received = Bytes::copy_from_slice(received.as_bytes());
        for (body, reason) in incomplete_bodies(&received) {
            let preprocessed = preprocessor.preprocess(path, &headers, &body).await;
            let session = preprocessed.session.as_ref().map(|session| &*session.id);
            let model = preprocessed
                .route_request
                .model
                .as_ref()
                .map(ModelName::as_str);
            let response = preprocessed.response_reference.id.as_deref();
            assert_eq!((model, response, session), expected, "{path}");
            let prompt = preprocessed.route_request.prompt;
            let tokens = if content_type == FORM { 0 } else { 100 };
            assert!(
                matches!(prompt, RoutePrompt::Estimated { .. }) && prompt.tokens() == tokens,
                "{path}: {prompt:?}"
            );
            assert_eq!(prompt.reason(), Some(reason), "{path}");
        }
    }
}
