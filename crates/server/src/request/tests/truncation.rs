//! Conversations whose body is truncated.

use serde_json::{Value, json};

use super::*;

/// Returns a preprocessor with this chat template.
fn preprocessor_with_template(template: &str) -> Arc<RequestPreprocessor> {
    preprocessor_with_template_for(template, ClientsConfig::default())
}

fn preprocessor_with_template_for(
    template: &str,
    clients: ClientsConfig,
) -> Arc<RequestPreprocessor> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("template.jinja");
    std::fs::write(&file, template).unwrap();
    let files = prompt::Config {
        tokenizer: format!("{REPOSITORY}/examples/models/qwen2.5/tokenizer.json.gz").into(),
        tokenizer_config: None,
        chat_template: Some(file),
    };
    let model = ConfiguredModel {
        name: "m".into(),
        block_size: BlockSize::new(4).unwrap(),
        windows: BlockWindows::Plain,
        media: MediaTokens::default(),
        encoder: Some(Arc::new(Encoder::load(&files).unwrap())),
    };
    let mut models = ModelRegistry::default();
    models.add(model, &[], &[]);
    let limits = EncodeLimits {
        inline: 1 << 20,
        queue: 1,
        deadline: Duration::from_secs(60),
    };
    RequestPreprocessor::new(preprocessor_parts(models, clients, limits))
}

const PLAIN_TEMPLATE: &str =
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}";

/// Renders contents as strings, reasoning only in the last response, and tools before the last
/// question.
const REASONING_TEMPLATE: &str = "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}\
    {% endfor %}{% for m in messages %}<|im_start|>{{ m.role }} {% if m.reasoning and loop.index0 > ns.last %}{{ m.reasoning }}\
    {% endif %}{% if tools and loop.index0 == ns.last %}{{ tools }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}";

/// Renders contents as lists of parts, with the images of a message before its texts.
const PARTS_TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}\
    {% for c in m.content %}{% if c.type == 'image' %}<|image_pad|>{% endif %}{% endfor %}\
    {% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}";

/// Omits the text before `</think>` in all but the last turn.
const THINKING_TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'assistant' and not loop.last %}\
    {{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}";

/// Renders tool calls after the text, with their arguments one by one.
const TOOL_CALL_TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content %}{{ m.content }}{% endif %}\
    {% for call in m.tool_calls or [] %}<call>{{ call.function.name }}{% for key, value in call.function.arguments | items %}\
    <argument={{ key }}>{{ value }}\n</argument of this call and of no other>\n{% endfor %}\n</call that was made>\n{% endfor %}\
    <|im_end|>{% endfor %}";

/// Returns the known blocks of a prompt.
fn known_blocks(prompt: RoutePrompt) -> Vec<warmroute_core::block::LocalHash> {
    match prompt {
        RoutePrompt::Hashed(prompts) => prompts[0].locals().to_vec(),
        RoutePrompt::Truncated { known, .. } => known.locals().to_vec(),
        RoutePrompt::Estimated { .. } => Vec::new(),
    }
}

/// Returns 40 words, the first of which is `w<from>`.
fn words(from: usize) -> String {
    (from..from + 40).map(|n| format!("w{n} ")).collect()
}

fn message(role: &str, content: impl Into<Value>) -> Value {
    json!({"role": role, "content": content.into()})
}

fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// Returns a user message with two text parts.
fn parts() -> Value {
    message("user", vec![text_part(&words(500)), text_part(&words(600))])
}

/// Returns a user message with a text and an image.
fn text_and_image() -> Value {
    let image = json!({"type": "image_url", "image_url": {"url": png_data_url(2)}});
    message("user", vec![text_part(&words(500)), image])
}

fn conversation(messages: &[&Value]) -> String {
    json!({"model": "m", "messages": messages}).to_string()
}

fn conversation_with_tools(messages: &[&Value]) -> String {
    let tool = json!({"type": "function", "function": {"name": "f"}});
    json!({"model": "m", "tools": [tool], "messages": messages}).to_string()
}

/// Checks a conversation that is truncated after the marker: its prompt begins with the known
/// blocks, which cover at least `min_tokens`.
async fn assert_known_blocks_stay(template: &str, body: &str, marker: &str, min_tokens: usize) {
    let preprocessor = preprocessor_with_template(template);
    let cut = body.find(marker).unwrap() + marker.len();
    let truncated = RequestBody::Truncated {
        received: Bytes::copy_from_slice(&body.as_bytes()[..cut]),
        length: Some(body.len() as u64),
    };
    let path = "/v1/chat/completions";
    let preprocessed = preprocessor.preprocess(path, &|_| None, &truncated).await;
    let known = known_blocks(preprocessed.route_request.prompt);
    assert!(
        known.len() * 4 >= min_tokens,
        "{marker}: {} tokens are known",
        known.len() * 4
    );
    // In a conversation with an image, only the part before the image is known.
    let preprocessed = preprocessor.preprocess_blocking(None, path, &|_| None, body.as_bytes());
    let locals = known_blocks(preprocessed.route_request.prompt);
    assert!(min_tokens == 0 || !locals.is_empty(), "{marker}");
    assert!(
        locals.starts_with(&known),
        "{marker}: {} of {} blocks",
        known.len(),
        locals.len()
    );
}

#[tokio::test]
async fn text_after_truncation_keeps_known_blocks() {
    let system = message("system", words(0));
    let user = message("user", words(100));
    let answer = message("assistant", words(400));
    let developer = message("developer", "be brief");
    let cases = [
        (conversation(&[&system, &user, &answer, &user]), "w430 ", 60),
        (
            conversation(&[&system, &user, &answer, &parts()]),
            "w530 ",
            60,
        ),
        (
            conversation(&[&system, &user, &answer, &text_and_image()]),
            "w530 ",
            60,
        ),
        (
            conversation(&[&developer, &user, &answer, &developer]),
            "w430 ",
            0,
        ),
        (conversation(&[&text_and_image()]), "w530 ", 0),
    ];
    for (body, marker, min_tokens) in cases {
        assert_known_blocks_stay(PLAIN_TEMPLATE, &body, marker, min_tokens).await;
    }
    let cases = [
        (conversation(&[&system, &user, &answer, &parts()]), "w630 "),
        (
            conversation(&[&system, &user, &answer, &text_and_image()]),
            "w530 ",
        ),
    ];
    for (body, marker) in cases {
        assert_known_blocks_stay(PARTS_TEMPLATE, &body, marker, 60).await;
    }
}

#[tokio::test]
async fn reasoning_after_truncation_keeps_known_blocks() {
    let system = message("system", words(0));
    let user = message("user", words(100));
    let answer = message("assistant", words(400));
    let mut reasoning = message("assistant", words(200));
    reasoning["reasoning"] = words(300).into();
    let long = conversation_with_tools(&[&system, &user, &reasoning, &user, &answer]);
    let cases = [
        (
            conversation(&[&system, &user, &reasoning, &user]),
            "w230 ",
            40,
        ),
        (long.clone(), "w130 ", 20),
        (long, "\"reasoning\":\"w300 ", 40),
    ];
    for (body, marker, min_tokens) in cases {
        assert_known_blocks_stay(REASONING_TEMPLATE, &body, marker, min_tokens).await;
    }
    let thinking = message("assistant", format!("{}</think>{}", words(200), words(400)));
    let thought = conversation(&[&system, &user, &thinking, &user]);
    let cases = [
        (thought.clone(), "w230 "),
        (thought, "w430 "),
        (
            conversation(&[&system, &user, &answer, &user]),
            "\"role\":\"assist",
        ),
    ];
    for (body, marker) in cases {
        assert_known_blocks_stay(THINKING_TEMPLATE, &body, marker, 60).await;
    }
}

#[tokio::test]
async fn tool_calls_after_truncation_keep_known_blocks() {
    let system = message("system", words(0));
    let user = message("user", words(100));
    let answer = message("assistant", words(400));
    let arguments = json!({"content": words(200), "path": words(300)}).to_string();
    let function = json!({"name": "f", "arguments": arguments});
    let tool_calls = json!({
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
        "content": words(400),
    });
    let content_before_role = json!({"content": words(100), "role": "user"});
    let cases = [
        (
            conversation_with_tools(&[&system, &user, &tool_calls, &user]),
            "w339 \\\"}\"}}]",
            60,
        ),
        (
            conversation(&[&system, &content_before_role, &answer]),
            "\"role\":\"us",
            20,
        ),
    ];
    for (body, marker, min_tokens) in cases {
        assert_known_blocks_stay(TOOL_CALL_TEMPLATE, &body, marker, min_tokens).await;
    }
}

/// Code agents send requests to `/v1/messages` whose tool arguments are objects. One argument is
/// named `content`.
#[tokio::test]
async fn truncated_tool_argument_is_unknown() {
    use serde_json::json;
    let words = |from: usize| {
        (from..from + 40)
            .map(|n| format!("w{n} "))
            .collect::<String>()
    };
    let tool_use = json!({"type": "tool_use", "id": "c", "name": "f", "input": {"path": words(200), "content": words(300)}});
    let body = json!({"model": "m", "system": words(0), "tools": [{"name": "f", "input_schema": {}}], "messages": [
        {"role": "user", "content": words(100)}, {"role": "assistant", "content": [tool_use]}]});
    let body = body.to_string();
    let preprocessor = preprocessor_with_template(TOOL_CALL_TEMPLATE);
    let whole = preprocessor
        .preprocess_blocking(None, "/v1/messages", &|_| None, body.as_bytes())
        .route_request
        .prompt;
    let RoutePrompt::Hashed(whole) = whole else {
        panic!("{whole:?}")
    };
    for marker in ["w230 ", "w330 "] {
        let cut = body.find(marker).unwrap() + marker.len();
        let received = RequestBody::Truncated {
            received: Bytes::copy_from_slice(&body.as_bytes()[..cut]),
            length: None,
        };
        let prompt = preprocessor
            .preprocess("/v1/messages", &|_| None, &received)
            .await
            .route_request
            .prompt;
        let RoutePrompt::Truncated { known, .. } = prompt else {
            panic!("{marker}: {prompt:?}")
        };
        assert!(whole[0].locals().starts_with(known.locals()), "{marker}");
        assert!(
            known.locals().len() * 4 >= 60,
            "{marker}: {}",
            known.locals().len()
        );
    }
}

#[tokio::test]
async fn truncated_conversation_has_same_salt() {
    let words = (0..40).map(|n| format!("w{n} ")).collect::<String>();
    let trusted = preprocessor_with_template_for(
        PLAIN_TEMPLATE,
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
        let complete = |body: &str| match trusted
            .preprocess_blocking(None, "/v1/chat/completions", &|_| None, body.as_bytes())
            .route_request
            .prompt
        {
            RoutePrompt::Hashed(prompts) => prompts[0].locals().to_vec(),
            prompt => panic!("{prompt:?}"),
        };
        let salted = complete(&body(salt));
        let plain = complete(&body(""));
        assert!(!plain.starts_with(&salted[..1]), "{salt}");
        let cut = body(salt).find("w35 ").unwrap();
        let received = RequestBody::Truncated {
            received: Bytes::copy_from_slice(&body(salt).as_bytes()[..cut]),
            length: None,
        };
        let prompt = trusted
            .preprocess("/v1/chat/completions", &|_| None, &received)
            .await
            .route_request
            .prompt;
        let RoutePrompt::Truncated { known, .. } = prompt else {
            panic!("{salt}: {prompt:?}")
        };
        assert!(
            !known.is_empty() && salted.starts_with(known.locals()),
            "{salt}"
        );
    }
}

#[tokio::test]
async fn truncated_conversation_with_uncertain_beginning_is_estimated() {
    let preprocessor = preprocessor_with_template(PLAIN_TEMPLATE);
    let words = "one two three four five six seven eight nine ten ".repeat(4);
    for (path, message, expected) in [
        (
            "/v1/chat/completions",
            serde_json::json!({"role": "user", "content": words}),
            true,
        ),
        // Tool results imply that tools were offered.
        (
            "/v1/chat/completions",
            serde_json::json!({"role": "tool", "tool_call_id": "a", "content": words}),
            false,
        ),
        // The system prompt is a field that may follow.
        (
            "/v1/messages",
            serde_json::json!({"role": "user", "content": words}),
            false,
        ),
    ] {
        let body = serde_json::json!({"model": "m", "messages": [message]}).to_string();
        let cut = RequestBody::Truncated {
            received: Bytes::copy_from_slice(&body.as_bytes()[..body.len() - 9]),
            length: None,
        };
        let prompt = preprocessor
            .preprocess(path, &|_| None, &cut)
            .await
            .route_request
            .prompt;
        assert_eq!(
            matches!(prompt, RoutePrompt::Truncated { .. }),
            expected,
            "{path}: {prompt:?}"
        );
    }
}
