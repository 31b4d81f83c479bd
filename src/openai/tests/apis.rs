use serde_json::{Value, json};

use super::super::{Api, Hidden, Opaque, ParseError, Prompt, Request, Side, parse, parse_body};

const ALL: [Api; 23] = [
    Api::ChatCompletions,
    Api::Completions,
    Api::Embeddings,
    Api::Pooling,
    Api::Classify,
    Api::Responses,
    Api::Messages,
    Api::CountTokens,
    Api::Conversations,
    Api::Score,
    Api::Rerank,
    Api::Tokenize,
    Api::Detokenize,
    Api::Render,
    Api::Models,
    Api::Transcriptions,
    Api::Translations,
    Api::Speech,
    Api::ImageGenerations,
    Api::ImageEdits,
    Api::ImageVariations,
    Api::SglangGenerate,
    Api::VllmGenerate,
];

fn read(api: Api, body: &Value) -> Request {
    parse(api, body.to_string().as_bytes())
        .unwrap_or_else(|error| panic!("{api:?} {body}: {error}"))
}

fn opaque(text_bytes: usize, because: Hidden) -> Prompt {
    Prompt::Opaque(Opaque {
        text_bytes,
        because,
    })
}

fn texts(texts: &[&str]) -> Prompt {
    Prompt::Texts(texts.iter().map(|text| (*text).to_owned()).collect())
}

#[test]
fn prompts_of_the_smaller_apis_are_read() {
    for (api, body, expected) in [
        (Api::Embeddings, json!({"input": "a"}), texts(&["a"])),
        (
            Api::Embeddings,
            json!({"input": ["a", "b"]}),
            texts(&["a", "b"]),
        ),
        (
            Api::Pooling,
            json!({"input": [1, 2], "padding": "do_not_pad"}),
            Prompt::Tokens(vec![vec![1, 2]]),
        ),
        (
            Api::Classify,
            json!({"input": [[1], [2]]}),
            Prompt::Tokens(vec![vec![1], vec![2]]),
        ),
        (
            Api::Pooling,
            json!({"data": {"x": "y"}, "n": 1}),
            opaque(22, Hidden::Assembled),
        ),
        (
            Api::Embeddings,
            json!({"input": vec!["a"; 5000]}),
            Prompt::TooMany,
        ),
        (Api::SglangGenerate, json!({"text": "a"}), texts(&["a"])),
        (
            Api::SglangGenerate,
            json!({"text": ["a", "b"]}),
            texts(&["a", "b"]),
        ),
        (
            Api::SglangGenerate,
            json!({"input_ids": [1, 2]}),
            Prompt::Tokens(vec![vec![1, 2]]),
        ),
        (
            Api::SglangGenerate,
            json!({"input_ids": [[1], [2]]}),
            Prompt::Tokens(vec![vec![1], vec![2]]),
        ),
        (
            Api::SglangGenerate,
            json!({"input_embeds": [[0.5]]}),
            Prompt::Embeddings,
        ),
        (
            Api::SglangGenerate,
            json!({"text": "abc", "image_data": "x"}),
            opaque(3, Hidden::Assembled),
        ),
        (
            Api::SglangGenerate,
            json!({"text": "abc", "extra_key": "x"}),
            opaque(3, Hidden::Assembled),
        ),
        (
            Api::VllmGenerate,
            json!({"token_ids": [1, 2]}),
            Prompt::Tokens(vec![vec![1, 2]]),
        ),
        (
            Api::VllmGenerate,
            json!({"token_ids": [1, 2], "features": {}}),
            opaque(8, Hidden::Assembled),
        ),
        (
            Api::Speech,
            json!({"input": "say this", "voice": "x"}),
            opaque(8, Hidden::Assembled),
        ),
        (
            Api::ImageGenerations,
            json!({"prompt": "a cat"}),
            opaque(5, Hidden::Assembled),
        ),
        (
            Api::Score,
            json!({"text_1": "ab", "text_2": ["c", "d"]}),
            opaque(4, Hidden::Assembled),
        ),
        (
            Api::Score,
            json!({"queries": [[1, 2]], "documents": "d"}),
            opaque(9, Hidden::Assembled),
        ),
        (
            Api::Rerank,
            json!({"query": "ab", "documents": ["c", {"text": "d"}, {"content": [{"type": "text", "text": "e"},
                {"type": "image_url", "image_url": {"url": "data:long"}}]}], "top_n": 1}),
            opaque(5, Hidden::Assembled),
        ),
        (Api::Tokenize, json!({"prompt": "a"}), Prompt::Nothing),
        (Api::CountTokens, json!({"messages": 7}), Prompt::Nothing),
    ] {
        let mut body = body;
        body["model"] = json!("m");
        let request = read(api, &body);
        let expected = match expected {
            // Of what a plugin reads, the whole body counts.
            Prompt::Opaque(known) if body.get("data").is_some() => {
                opaque(known.text_bytes + 14, known.because)
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
fn conversations_to_be_pooled_begin_no_answer_and_are_cut_on_the_right() {
    let body = json!({"messages": [{"role": "user", "content": "x"}], "truncate_prompt_tokens": 5, "cache_salt": "s"});
    let request = read(Api::Embeddings, &body);
    assert_eq!(request.tokenization.tokenizer_side, Side::Right);
    assert_eq!(
        (
            request.tokenization.truncate_prompt_tokens,
            request.cache_salt.as_deref()
        ),
        (Some(5), Some("s"))
    );
    let Prompt::Chat(chat) = request.prompt else {
        panic!()
    };
    assert!(!chat.add_generation_prompt);
}

#[test]
fn engines_own_generation_says_how_long_the_answer_may_be_and_names_adapters() {
    let body = json!({"text": "a", "stream": true, "lora_path": "tuned", "sampling_params": {"max_new_tokens": 7}});
    let request = read(Api::SglangGenerate, &body);
    assert_eq!(
        (
            request.max_output_tokens,
            request.stream,
            request.model.as_deref()
        ),
        (Some(7), true, Some("tuned"))
    );
    let several = json!({"text": ["a", "b"], "lora_path": ["x", null], "sampling_params": [{"max_new_tokens": 7}, {}]});
    let request = read(Api::SglangGenerate, &several);
    assert_eq!((request.model, request.prompt), (None, texts(&["a", "b"])));
    let body = json!({"token_ids": [1], "sampling_params": {"max_tokens": 9}, "cache_salt": "s"});
    let request = read(Api::VllmGenerate, &body);
    assert_eq!(
        (request.max_output_tokens, request.cache_salt.as_deref()),
        (Some(9), Some("s"))
    );
}

#[test]
fn responses_and_messages_say_what_chats_say_beside_their_prompts() {
    let body = json!({"model": "m", "input": "x", "stream": true, "max_output_tokens": 5, "cache_salt": "s",
        "nvext": {"a": 1}, "truncation": "auto", "reasoning": {"effort": "high"}});
    let request = read(Api::Responses, &body);
    assert_eq!((request.stream, request.max_output_tokens), (true, Some(5)));
    assert_eq!(
        (request.cache_salt.as_deref(), request.extension.as_deref()),
        (Some("s"), Some(r#"{"a":1}"#))
    );
    assert_eq!(request.tokenization.truncate_prompt_tokens, Some(-1));
    assert_eq!(request.tokenization.add_special_tokens, Some(true));
    let Prompt::Chat(chat) = request.prompt else {
        panic!()
    };
    assert_eq!(chat.reasoning_effort.as_deref(), Some("high"));
    let absent = read(Api::Responses, &json!({"input": "x"})).tokenization;
    let null = read(Api::Responses, &json!({"input": "x", "truncation": null})).tokenization;
    assert_eq!(
        (absent.truncate_prompt_tokens, null.truncate_prompt_tokens),
        (None, Some(-1))
    );

    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stream": true,
        "output_config": {"effort": "low"}, "thinking": {"type": "enabled"}, "metadata": {"user_id": "u"}});
    let request = read(Api::Messages, &body);
    assert_eq!((request.stream, request.max_output_tokens), (true, Some(5)));
    let Prompt::Chat(chat) = request.prompt else {
        panic!()
    };
    assert_eq!(
        (chat.reasoning_effort.as_deref(), chat.add_generation_prompt),
        (Some("low"), true)
    );
}

#[test]
fn what_only_the_engine_knows_is_not_guessed() {
    let item = |item: Value| json!({"input": [{"role": "user", "content": "four"}, item]});
    let message = |role: &str, content: Value| json!({"messages": [{"role": "user", "content": "four"}, {"role": role, "content": content}]});
    let cases = [
        (
            Api::Responses,
            json!({"input": "four", "previous_response_id": "r"}),
            4,
            Hidden::Remembered,
        ),
        (
            Api::Responses,
            json!({"input": "four", "conversation": "c"}),
            4,
            Hidden::Remembered,
        ),
        (
            Api::Responses,
            json!({"input": "four", "instructions": "six.ty", "prompt": {"id": "p"}}),
            10,
            Hidden::Remembered,
        ),
        (
            Api::Responses,
            item(json!({"type": "item_reference", "id": "x"})),
            4,
            Hidden::Remembered,
        ),
        (
            Api::Responses,
            item(json!({"type": "web_search_call", "action": {}})),
            4,
            Hidden::Assembled,
        ),
        (
            Api::Responses,
            item(json!({"type": "reasoning", "summary": [], "encrypted_content": "x"})),
            4,
            Hidden::Assembled,
        ),
        (
            Api::Responses,
            item(json!({"role": "tool", "content": "x"})),
            5,
            Hidden::Assembled,
        ),
        (Api::Responses, item(json!({})), 4, Hidden::Assembled),
        (
            Api::Responses,
            item(json!({"role": "assistant", "content": []})),
            4,
            Hidden::Assembled,
        ),
        (
            Api::Responses,
            item(
                json!({"type": "function_call_output", "call_id": "c", "output": [
                {"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]}),
            ),
            6,
            Hidden::Assembled,
        ),
        (
            Api::Messages,
            message("critic", json!("x")),
            5,
            Hidden::Assembled,
        ),
        (
            Api::Messages,
            message("user", json!([{"type": "document", "source": {}}])),
            4,
            Hidden::Assembled,
        ),
        (
            Api::Messages,
            message(
                "user",
                json!([{"type": "tool_result", "content": [{"type": "tool_reference", "name": "f"}]}]),
            ),
            4,
            Hidden::Assembled,
        ),
        (
            Api::Messages,
            message(
                "assistant",
                json!([{"type": "tool_result", "content": "x"}]),
            ),
            5,
            Hidden::Assembled,
        ),
    ];
    for (api, body, text_bytes, because) in cases {
        assert_eq!(
            read(api, &body).prompt,
            opaque(text_bytes, because),
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
            Api::Responses,
            json!({"input": "x", "previous_response_id": "r", "tools": [namespace]}),
            2000,
        ),
        (
            Api::Responses,
            json!({"previous_response_id": "r", "input": [
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": long}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": long},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": long}]},
                {"type": "custom_tool_call", "call_id": "c", "name": "g", "input": long}]}),
            4000,
        ),
        (
            Api::Messages,
            json!({"messages": [{"role": "critic", "content": "x"}], "tools": [tool]}),
            1000,
        ),
        (
            Api::ChatCompletions,
            json!({"messages": [image], "tools": [chat_tool]}),
            1000,
        ),
        (
            Api::ChatCompletions,
            json!({"messages": [image, {"role": "assistant", "reasoning": long, "tool_calls": [call]}]}),
            2000,
        ),
        (
            Api::VllmGenerate,
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
fn content_parts_other_than_text_make_prompt_unknown() {
    let body = |parts: Value| json!({"token_ids": [1, 2], "content_parts": parts});
    let known = Prompt::Tokens(vec![vec![1, 2]]);
    for (parts, expected) in [
        (Value::Null, known.clone()),
        (json!([]), known.clone()),
        (json!([{"type": "text", "text": "a"}]), known),
        (
            json!([{"type": "text"}, {"type": "image_url", "url": "data:,"}]),
            opaque(8, Hidden::Assembled),
        ),
        (json!([{"url": "data:,"}]), opaque(8, Hidden::Assembled)),
    ] {
        assert_eq!(
            read(Api::VllmGenerate, &body(parts.clone())).prompt,
            expected,
            "{parts}"
        );
    }
}

#[test]
fn messages_request_keeps_cache_salt() {
    let body = json!({"messages": [{"role": "user", "content": "x"}], "cache_salt": "s"});
    assert_eq!(read(Api::Messages, &body).cache_salt.as_deref(), Some("s"));
}

#[test]
fn images_in_responses_and_messages_are_media() {
    let image = json!({"type": "image", "source": {"type": "base64", "data": "AAAA"}});
    for (api, body) in [
        (
            Api::Responses,
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ),
        (
            Api::Messages,
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]}),
        ),
        (
            Api::Messages,
            json!({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [image]}]}]}),
        ),
    ] {
        let Prompt::Chat(chat) = read(api, &body).prompt else {
            panic!("{body}")
        };
        assert!(chat.has_media(), "{body}");
    }
}

#[test]
fn a_form_is_read_for_its_model_only_where_the_api_takes_forms() {
    let form = b"--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--B--\r\n";
    let request = parse_body(Api::Transcriptions, Some("B"), form).unwrap();
    assert_eq!(
        (request.model.as_deref(), request.prompt),
        (Some("whisper"), opaque(0, Hidden::Assembled))
    );
    assert!(matches!(
        parse_body(Api::Completions, Some("B"), form),
        Err(ParseError::NotAnObject)
    ));
    let json = parse_body(Api::ImageEdits, None, br#"{"model": "m", "prompt": "abc"}"#).unwrap();
    assert_eq!(
        (json.model.as_deref(), json.prompt),
        (Some("m"), opaque(3, Hidden::Assembled))
    );
}

/// Bodies meant to hurt, for every API; each is read or refused, in a bounded time.
#[test]
fn no_body_hurts() {
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
fn of_many_items_that_mean_nothing_none_is_kept() {
    let items = vec!["{}"; 60_000].join(",");
    let body = format!(r#"{{"model":"m","input":[{items}]}}"#);
    let request = parse(Api::Responses, body.as_bytes()).unwrap();
    assert_eq!(request.prompt, opaque(0, Hidden::Assembled));
    let blocks = vec![r#"{"type":"x"}"#; 60_000].join(",");
    let body = format!(r#"{{"messages":[{{"role":"user","content":[{blocks}]}}]}}"#);
    assert_eq!(
        parse(Api::Messages, body.as_bytes()).unwrap().prompt,
        opaque(0, Hidden::Assembled)
    );
}
