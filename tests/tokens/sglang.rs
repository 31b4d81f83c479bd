//! Tokens of SGLang.

use super::*;

fn sglang_encoder() -> Encoder {
    let traits = ModelTraits {
        engine: EngineKind::Sglang,
        ..ModelTraits::default()
    };
    Encoder::load_with_traits(&files("qwen2.5"), &traits).unwrap()
}

fn user_message(content: &Value) -> Value {
    json!({"messages": [{"role": "user", "content": content}]})
}

#[test]
fn sglang_renders_messages_differently() {
    let sglang = sglang_encoder();
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    assert_eq!(
        chat(&sglang, &user_message(&parts)),
        chat(&QWEN, &user_message(&json!("a b"))),
        "parts are joined by a space"
    );
    let tools = json!([{"type": "function", "function": {"parameters": {"type": "object"}, "name": "f", "description": "d"}}]);
    let mut with = user_message(&json!("hello"));
    with["tools"] = tools;
    let text = sglang
        .render(
            &openai::parse(
                ApiKind::ChatCompletions,
                &serde_json::to_vec(&with).unwrap(),
            )
            .unwrap(),
        )
        .unwrap()
        .texts()[0]
        .to_string();
    let expected = r#"{"type": "function", "function": {"parameters": {"type": "object"}, "name": "f", "description": "d"}, "defer_loading": null}"#;
    assert!(text.contains(expected), "{text}");
    with["tool_choice"] = json!("none");
    assert_eq!(
        chat(&sglang, &with),
        chat(&QWEN, &user_message(&json!("hello"))),
        "tools are omitted if tool_choice is none"
    );
    let mut ignored = user_message(&json!("hello"));
    ignored["add_generation_prompt"] = json!(false);
    ignored["truncate_prompt_tokens"] = json!(3);
    assert_eq!(
        chat(&sglang, &ignored),
        chat(&QWEN, &user_message(&json!("hello"))),
        "SGLang ignores these fields"
    );
    let last = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
    let as_user =
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]});
    assert_eq!(
        chat(&sglang, &last),
        chat(&QWEN, &as_user),
        "a last assistant message is rendered as the user's"
    );
    let developer = json!({"messages": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]});
    assert_ne!(
        chat(&sglang, &developer),
        chat(&QWEN, &developer),
        "the role developer is not renamed"
    );
}

#[test]
fn uncertain_sglang_requests_are_rejected() {
    let sglang = sglang_encoder();
    for (key, value) in [
        ("continue_final_message", json!(true)),
        ("input_ids", json!([1])),
        ("chat_template_kwargs", json!({"reasoning_effort": "low"})),
    ] {
        let mut request = user_message(&json!("hello"));
        request[key] = value;
        assert!(chat(&sglang, &request).is_err(), "{key}");
    }
    assert!(encode(&sglang, ApiKind::Messages, &user_message(&json!("hello"))).is_err());
    let picture = user_message(&json!([{"type": "image_url", "image_url": {"url": "data:,"}}]));
    assert!(matches!(
        chat(&sglang, &picture),
        Err(EncodeError::Multimodal(_))
    ));
}
