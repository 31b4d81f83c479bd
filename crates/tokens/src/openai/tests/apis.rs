use serde_json::{Value, json};

use super::super::{
    ApiKind, ApiRequest, ParseError, PromptInput, TruncationSide, UnknownPrompt,
    UnknownPromptReason, parse, parse_body,
};

const ALL: [ApiKind; 23] = [
    ApiKind::ChatCompletions,
    ApiKind::Completions,
    ApiKind::Embeddings,
    ApiKind::Pooling,
    ApiKind::Classify,
    ApiKind::Responses,
    ApiKind::Messages,
    ApiKind::CountTokens,
    ApiKind::Conversations,
    ApiKind::Score,
    ApiKind::Rerank,
    ApiKind::Tokenize,
    ApiKind::Detokenize,
    ApiKind::Render,
    ApiKind::Models,
    ApiKind::Transcriptions,
    ApiKind::Translations,
    ApiKind::Speech,
    ApiKind::ImageGenerations,
    ApiKind::ImageEdits,
    ApiKind::ImageVariations,
    ApiKind::SglangGenerate,
    ApiKind::VllmGenerate,
];

fn read(api: ApiKind, body: &Value) -> ApiRequest {
    parse(api, body.to_string().as_bytes())
        .unwrap_or_else(|error| panic!("{api:?} {body}: {error}"))
}

fn unknown_prompt(text_bytes: usize, reason: UnknownPromptReason) -> PromptInput {
    PromptInput::Unknown(UnknownPrompt { text_bytes, reason })
}

fn tokens(lists: &[&[u32]]) -> PromptInput {
    PromptInput::Tokens(lists.iter().map(|list| list.to_vec()).collect())
}

fn texts(texts: &[&str]) -> PromptInput {
    PromptInput::Texts(texts.iter().map(|text| (*text).to_owned()).collect())
}

#[test]
fn prompts_of_pooling_apis_are_read() {
    assert_prompts(vec![
        (ApiKind::Embeddings, json!({"input": "a"}), texts(&["a"])),
        (
            ApiKind::Embeddings,
            json!({"input": ["a", "b"]}),
            texts(&["a", "b"]),
        ),
        (
            ApiKind::Pooling,
            json!({"input": [1, 2], "padding": "do_not_pad"}),
            tokens(&[&[1, 2]]),
        ),
        (
            ApiKind::Classify,
            json!({"input": [[1], [2]]}),
            tokens(&[&[1], &[2]]),
        ),
        (
            ApiKind::Pooling,
            json!({"data": {"x": "y"}, "n": 1}),
            unknown_prompt(22, UnknownPromptReason::BuiltByEngine),
        ),
        (
            ApiKind::Embeddings,
            json!({"input": vec!["a"; 5000]}),
            PromptInput::OverLimit,
        ),
    ]);
}

#[test]
fn prompts_of_sglang_are_read() {
    let unknown = unknown_prompt(3, UnknownPromptReason::BuiltByEngine);
    let cases = [
        (json!({"text": "a"}), texts(&["a"])),
        (json!({"text": ["a", "b"]}), texts(&["a", "b"])),
        (json!({"input_ids": [1, 2]}), tokens(&[&[1, 2]])),
        (json!({"input_ids": [[1], [2]]}), tokens(&[&[1], &[2]])),
        (json!({"input_embeds": [[0.5]]}), PromptInput::Embeddings),
        (json!({"text": "abc", "image_data": "x"}), unknown.clone()),
        (json!({"text": "abc", "extra_key": "x"}), unknown),
    ];
    let cases = cases.map(|(body, prompt)| (ApiKind::SglangGenerate, body, prompt));
    assert_prompts(cases.into());
}

#[test]
fn prompts_of_other_apis_are_read() {
    let built = UnknownPromptReason::BuiltByEngine;
    assert_prompts(vec![
        (
            ApiKind::VllmGenerate,
            json!({"token_ids": [1, 2]}),
            tokens(&[&[1, 2]]),
        ),
        (
            ApiKind::VllmGenerate,
            json!({"token_ids": [1, 2], "features": {}}),
            unknown_prompt(8, built),
        ),
        (
            ApiKind::Speech,
            json!({"input": "say this", "voice": "x"}),
            unknown_prompt(8, built),
        ),
        (
            ApiKind::ImageGenerations,
            json!({"prompt": "a cat"}),
            unknown_prompt(5, built),
        ),
        (
            ApiKind::Score,
            json!({"text_1": "ab", "text_2": ["c", "d"]}),
            unknown_prompt(4, built),
        ),
        (
            ApiKind::Score,
            json!({"queries": [[1, 2]], "documents": "d"}),
            unknown_prompt(9, built),
        ),
        (
            ApiKind::Rerank,
            json!({"query": "ab", "documents": ["c", {"text": "d"}, {"content": [{"type": "text", "text": "e"},
                {"type": "image_url", "image_url": {"url": "data:long"}}]}], "top_n": 1}),
            unknown_prompt(5, built),
        ),
        (
            ApiKind::Tokenize,
            json!({"prompt": "a"}),
            PromptInput::NoPrompt,
        ),
        (
            ApiKind::CountTokens,
            json!({"messages": 7}),
            PromptInput::NoPrompt,
        ),
    ]);
}

/// Checks the prompt of each body.
fn assert_prompts(cases: Vec<(ApiKind, Value, PromptInput)>) {
    for (api, mut body, expected) in cases {
        body["model"] = json!("m");
        let request = read(api, &body);
        let expected = match expected {
            // If the body has plugin data, all its bytes count as text.
            PromptInput::Unknown(known) if body.get("data").is_some() => {
                unknown_prompt(known.text_bytes + 14, known.reason)
            }
            expected => expected,
        };
        assert_eq!(
            (request.prompt, request.model.as_deref()),
            (expected, Some("m")),
            "{api:?} {body}"
        );
    }
}

#[test]
fn pooled_conversations_truncate_right_without_generation_prompt() {
    let body = json!({"messages": [{"role": "user", "content": "x"}], "truncate_prompt_tokens": 5, "cache_salt": "s"});
    let request = read(ApiKind::Embeddings, &body);
    assert_eq!(request.tokenization.tokenizer_side, TruncationSide::Right);
    assert_eq!(
        (
            request.tokenization.truncate_prompt_tokens,
            request.cache_salt.as_deref()
        ),
        (Some(5), Some("s"))
    );
    let PromptInput::Chat(chat) = request.prompt else {
        panic!()
    };
    assert!(!chat.add_generation_prompt);
}

#[test]
fn native_generation_reads_output_length_and_adapter() {
    let body = json!({"text": "a", "stream": true, "lora_path": "tuned", "sampling_params": {"max_new_tokens": 7}});
    let request = read(ApiKind::SglangGenerate, &body);
    assert_eq!(
        (
            request.max_output_tokens,
            request.stream,
            request.model.as_deref()
        ),
        (Some(7), true, Some("tuned"))
    );
    let several = json!({"text": ["a", "b"], "lora_path": ["x", null], "sampling_params": [{"max_new_tokens": 7}, {}]});
    let request = read(ApiKind::SglangGenerate, &several);
    assert_eq!((request.model, request.prompt), (None, texts(&["a", "b"])));
    let body = json!({"token_ids": [1], "sampling_params": {"max_tokens": 9}, "cache_salt": "s"});
    let request = read(ApiKind::VllmGenerate, &body);
    assert_eq!(
        (request.max_output_tokens, request.cache_salt.as_deref()),
        (Some(9), Some("s"))
    );
}

#[test]
fn responses_and_messages_read_common_fields() {
    let body = json!({"model": "m", "input": "x", "stream": true, "max_output_tokens": 5, "cache_salt": "s",
        "nvext": {"a": 1}, "truncation": "auto", "reasoning": {"effort": "high"}});
    let request = read(ApiKind::Responses, &body);
    assert_eq!((request.stream, request.max_output_tokens), (true, Some(5)));
    assert_eq!(
        (request.cache_salt.as_deref(), request.nvext.as_deref()),
        (Some("s"), Some(r#"{"a":1}"#))
    );
    assert_eq!(request.tokenization.truncate_prompt_tokens, Some(-1));
    assert_eq!(request.tokenization.add_special_tokens, Some(true));
    let PromptInput::Chat(chat) = request.prompt else {
        panic!()
    };
    assert_eq!(chat.reasoning_effort.as_deref(), Some("high"));
    let absent = read(ApiKind::Responses, &json!({"input": "x"})).tokenization;
    let null = read(
        ApiKind::Responses,
        &json!({"input": "x", "truncation": null}),
    )
    .tokenization;
    assert_eq!(
        (absent.truncate_prompt_tokens, null.truncate_prompt_tokens),
        (None, Some(-1))
    );

    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stream": true,
        "cache_salt": "s", "output_config": {"effort": "low"}, "thinking": {"type": "enabled"}, "metadata": {"user_id": "u"}});
    let request = read(ApiKind::Messages, &body);
    assert_eq!((request.stream, request.max_output_tokens), (true, Some(5)));
    assert_eq!(request.cache_salt.as_deref(), Some("s"));
    let PromptInput::Chat(chat) = request.prompt else {
        panic!()
    };
    assert_eq!(
        (chat.reasoning_effort.as_deref(), chat.add_generation_prompt),
        (Some("low"), true)
    );
}

#[test]
fn engine_only_responses_prompts_are_unknown() {
    let item = |item: Value| json!({"input": [{"role": "user", "content": "four"}, item]});
    let stored = UnknownPromptReason::StoredInEngine;
    let built = UnknownPromptReason::BuiltByEngine;
    let cases = [
        (
            json!({"input": "four", "previous_response_id": "r"}),
            4,
            stored,
        ),
        (json!({"input": "four", "conversation": "c"}), 4, stored),
        (
            json!({"input": "four", "instructions": "six.ty", "prompt": {"id": "p"}}),
            10,
            stored,
        ),
        (
            item(json!({"type": "item_reference", "id": "x"})),
            4,
            stored,
        ),
        (
            item(json!({"type": "web_search_call", "action": {}})),
            4,
            built,
        ),
        (
            item(json!({"type": "reasoning", "summary": [], "encrypted_content": "x"})),
            4,
            built,
        ),
        (item(json!({"role": "tool", "content": "x"})), 5, built),
        (item(json!({})), 4, built),
        (item(json!({"role": "assistant", "content": []})), 4, built),
        (
            item(
                json!({"type": "function_call_output", "call_id": "c", "output": [
                {"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]}),
            ),
            6,
            built,
        ),
    ];
    for (body, text_bytes, reason) in cases {
        assert_eq!(
            read(ApiKind::Responses, &body).prompt,
            unknown_prompt(text_bytes, reason),
            "{body}"
        );
    }
}

#[test]
fn engine_only_messages_prompts_are_unknown() {
    let message = |role: &str, content: Value| json!({"messages": [{"role": "user", "content": "four"}, {"role": role, "content": content}]});
    let built = UnknownPromptReason::BuiltByEngine;
    let cases = [
        (ApiKind::Messages, message("critic", json!("x")), 5, built),
        (
            ApiKind::Messages,
            message("user", json!([{"type": "document", "source": {}}])),
            4,
            built,
        ),
        (
            ApiKind::Messages,
            message(
                "user",
                json!([{"type": "tool_result", "content": [{"type": "tool_reference", "name": "f"}]}]),
            ),
            4,
            built,
        ),
        (
            ApiKind::Messages,
            message(
                "assistant",
                json!([{"type": "tool_result", "content": "x"}]),
            ),
            5,
            built,
        ),
    ];
    for (api, body, text_bytes, reason) in cases {
        assert_eq!(
            read(api, &body).prompt,
            unknown_prompt(text_bytes, reason),
            "{api:?} {body}"
        );
    }
}

#[test]
fn load_estimate_counts_tools_calls_and_reasoning() {
    let long = "x".repeat(1000);
    let parameters = json!({"type": "object", "properties": {long.clone(): {"type": "string"}}});
    let function = json!({"type": "function", "name": "f", "parameters": parameters});
    let namespace = json!({"type": "namespace", "name": "n", "description": "d", "tools": [function.clone(), function]});
    let tool = json!({"name": "f", "input_schema": parameters});
    let chat_tool =
        json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let image =
        json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]});
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": long}});
    for (api, body, at_least) in [
        (
            ApiKind::Responses,
            json!({"input": "x", "previous_response_id": "r", "tools": [namespace]}),
            2000,
        ),
        (
            ApiKind::Responses,
            json!({"previous_response_id": "r", "input": [
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": long}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": long},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": long}]},
                {"type": "custom_tool_call", "call_id": "c", "name": "g", "input": long}]}),
            4000,
        ),
        (
            ApiKind::Messages,
            json!({"messages": [{"role": "critic", "content": "x"}], "tools": [tool]}),
            1000,
        ),
        (
            ApiKind::ChatCompletions,
            json!({"messages": [image], "tools": [chat_tool]}),
            1000,
        ),
        (
            ApiKind::ChatCompletions,
            json!({"messages": [image, {"role": "assistant", "reasoning": long, "tool_calls": [call]}]}),
            2000,
        ),
        (
            ApiKind::VllmGenerate,
            json!({"token_ids": vec![7; 250], "features": {}}),
            1000,
        ),
    ] {
        let found = read(api, &body).prompt.text_bytes();
        assert!(
            (at_least..at_least + 500).contains(&found),
            "{found} instead of about {at_least}: {api:?}"
        );
    }
}

#[test]
fn non_text_parts_make_prompt_unknown() {
    let body = |parts: Value| json!({"token_ids": [1, 2], "content_parts": parts});
    let known = tokens(&[&[1, 2]]);
    for (parts, expected) in [
        (Value::Null, known.clone()),
        (json!([]), known.clone()),
        (json!([{"type": "text", "text": "a"}]), known),
        (
            json!([{"type": "text"}, {"type": "image_url", "url": "data:,"}]),
            unknown_prompt(8, UnknownPromptReason::BuiltByEngine),
        ),
        (
            json!([{"url": "data:,"}]),
            unknown_prompt(8, UnknownPromptReason::BuiltByEngine),
        ),
    ] {
        assert_eq!(
            read(ApiKind::VllmGenerate, &body(parts.clone())).prompt,
            expected,
            "{parts}"
        );
    }
}

#[test]
fn images_in_responses_and_messages_are_media() {
    let image = json!({"type": "image", "source": {"type": "base64", "data": "AAAA"}});
    for (api, body) in [
        (
            ApiKind::Responses,
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ),
        (
            ApiKind::Messages,
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]}),
        ),
        (
            ApiKind::Messages,
            json!({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [image]}]}]}),
        ),
    ] {
        let PromptInput::Chat(chat) = read(api, &body).prompt else {
            panic!("{body}")
        };
        assert!(chat.has_media(), "{body}");
    }
}

#[test]
fn forms_are_read_only_for_form_apis() {
    let form = b"--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--B--\r\n";
    let request = parse_body(ApiKind::Transcriptions, Some("B"), form).unwrap();
    assert_eq!(
        (request.model.as_deref(), request.prompt),
        (
            Some("whisper"),
            unknown_prompt(0, UnknownPromptReason::BuiltByEngine)
        )
    );
    assert!(matches!(
        parse_body(ApiKind::Completions, Some("B"), form),
        Err(ParseError::NotAnObject)
    ));
    let json = parse_body(
        ApiKind::ImageEdits,
        None,
        br#"{"model": "m", "prompt": "abc"}"#,
    )
    .unwrap();
    assert_eq!(
        (json.model.as_deref(), json.prompt),
        (
            Some("m"),
            unknown_prompt(3, UnknownPromptReason::BuiltByEngine)
        )
    );
}

/// Each body is accepted or rejected in bounded time, and without a panic.
#[test]
fn hostile_bodies_are_processed_in_bounded_time() {
    let deep = |key: &str| format!("{{\"{key}\":{}{}}}", "[".repeat(5000), "]".repeat(5000));
    let deep_maps = |key: &str| {
        format!(
            "{{\"{key}\":{}1{}}}",
            "{\"content\":".repeat(5000),
            "}".repeat(5000)
        )
    };
    let many = |key: &str, entry: &str| {
        format!(
            "{{\"model\":\"m\",\"{key}\":[{}]}}",
            vec![entry; 20_000].join(",")
        )
    };
    let mut bodies = Vec::new();
    for key in [
        "messages",
        "input",
        "tools",
        "documents",
        "text",
        "token_ids",
        "input_ids",
        "system",
        "prompt",
        "model",
    ] {
        bodies.extend([deep(key), deep_maps(key)]);
        for value in [
            "null", "7", "-1.5", "true", "\"x\"", "[]", "{}", "[null]", "[[]]", "[{}]", "[\"\"]",
            "[1e400]",
        ] {
            bodies.push(format!("{{\"{key}\":{value}}}"));
        }
    }
    bodies
        .extend(["messages", "input", "documents", "text", "token_ids"].map(|key| many(key, "{}")));
    bodies.extend(["input", "documents", "text", "token_ids"].map(|key| many(key, "[]")));
    bodies.push(many("input", r#"{"role":"user","content":""}"#));
    bodies.push(format!(
        r#"{{"messages":[{{"role":"user","content":[{}]}}]}}"#,
        vec![r#"{"type":"redacted_thinking"}"#; 20_000].join(",")
    ));
    for body in &bodies {
        for api in ALL {
            let _read = parse(api, body.as_bytes());
        }
    }
}

#[test]
fn ignored_items_are_not_stored() {
    let items = vec!["{}"; 60_000].join(",");
    let body = format!(r#"{{"model":"m","input":[{items}]}}"#);
    let request = parse(ApiKind::Responses, body.as_bytes()).unwrap();
    assert_eq!(
        request.prompt,
        unknown_prompt(0, UnknownPromptReason::BuiltByEngine)
    );
    let blocks = vec![r#"{"type":"x"}"#; 60_000].join(",");
    let body = format!(r#"{{"messages":[{{"role":"user","content":[{blocks}]}}]}}"#);
    assert_eq!(
        parse(ApiKind::Messages, body.as_bytes()).unwrap().prompt,
        unknown_prompt(0, UnknownPromptReason::BuiltByEngine)
    );
}

#[test]
fn prompt_logprobs_of_each_api_are_detected() {
    let chat = |more: &str| {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "a"}}]{more}}}"#);
        parse(ApiKind::ChatCompletions, body.as_bytes()).unwrap()
    };
    let text = |more: &str| {
        let body = format!(r#"{{"prompt": "a"{more}}}"#);
        parse(ApiKind::Completions, body.as_bytes()).unwrap()
    };
    let generate = |sampling: &str| {
        let body = format!(r#"{{"token_ids": [1], "sampling_params": {sampling}}}"#);
        parse(ApiKind::VllmGenerate, body.as_bytes()).unwrap()
    };
    let with = [
        chat(r#", "prompt_logprobs": 0"#),
        chat(r#", "echo": true"#),
        text(r#", "prompt_logprobs": 1"#),
        text(r#", "echo": true, "logprobs": 0"#),
        generate(r#"{"prompt_logprobs": 1}"#),
    ];
    let without = [
        chat(r#", "prompt_logprobs": null, "top_logprobs": 3, "logprobs": true"#),
        chat(r#", "echo": true, "top_logprobs": null"#),
        text(r#", "echo": true"#),
        text(r#", "logprobs": 1"#),
        generate(r#"{"prompt_logprobs": null}"#),
    ];
    assert!(with.iter().all(|request| request.returns_prompt_logprobs));
    assert!(
        without
            .iter()
            .all(|request| !request.returns_prompt_logprobs)
    );
}
