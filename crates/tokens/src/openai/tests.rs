mod apis;
mod forms;
mod paths;

use proptest::prelude::*;
use serde_json::json;

use super::*;

#[test]
fn unreadable_body_error_names_the_problem() {
    let deep = format!("{{\"messages\": {}", "[".repeat(10_000));
    let text = ApiKind::Completions;
    let chat = ApiKind::ChatCompletions;
    let bodies: &[(ApiKind, &[u8], &str)] = &[
        (text, b"\xff", "not UTF-8 (byte 0)"),
        (text, b"", "EOF"),
        (text, b"[\"m\", false]", "not a JSON object"),
        (text, b"null", "not a JSON object"),
        (text, b"{}", "no `prompt`"),
        (text, br#"{"prompt": null}"#, "no `prompt`"),
        (text, br#"{"prompt": []}"#, "`prompt` is empty"),
        (text, br#"{"prompt": ["a", 1]}"#, "entries of one kind"),
        (text, br#"{"prompt": [[1], "a"]}"#, "expected"),
        (text, br#"{"prompt": [-1]}"#, "a token"),
        (text, br#"{"prompt": [4294967296]}"#, "expected a token"),
        (text, br#"{"prompt": [1.5]}"#, "a token"),
        (text, br#"{"prompt": {"a": 1}}"#, "a text, a list of texts"),
        (text, br#"{"prompt": "a", "prompt": {"b": 1}}"#, "duplicate"),
        (chat, b"{}", "no `messages`"),
        (chat, br#"{"messages": []}"#, "`messages` is empty"),
        (chat, br#"{"messages": [{"content": "x"}]}"#, "role"),
        (
            chat,
            br#"{"messages": [{"role": "user", "content": "\ud800"}]}"#,
            "invalid",
        ),
        (chat, br#"{"messages": [{"role": "user"}]} x"#, "trailing"),
        (chat, deep.as_bytes(), "invalid"),
    ];
    for (api, body, words) in bodies {
        let error = parse(*api, body).unwrap_err().to_string();
        assert!(
            error.contains(words),
            "{}: {error}",
            String::from_utf8_lossy(&body[..body.len().min(60)])
        );
    }
}

#[test]
fn invalid_encoding_is_an_error() {
    let bodies: [&[u8]; 4] = [
        b"\xff\xfe{\0}",
        b"\xff\xfe{\0\x00\xd8}\0",
        b"\0\0\0{\0\0\0",
        b"\0\0\0{\0\x11\0\0",
    ];
    for body in bodies {
        let error = parse(ApiKind::Completions, body).unwrap_err().to_string();
        assert!(error.contains("UTF-"), "{error}");
        assert_eq!(read_model(body), None);
    }
}

#[test]
fn model_of_any_encoding_is_read() {
    let text = r#"{"model": "x", "model": "m"}"#;
    let utf16: Vec<u8> = text.encode_utf16().flat_map(u16::to_be_bytes).collect();
    let marked = format!("\u{feff}{text}");
    for body in [text.as_bytes(), marked.as_bytes(), &utf16] {
        assert_eq!(read_model(body).as_deref(), Some("m"));
    }
    let start = "\u{feff}{\"model\": \"m\", \"prompt";
    assert_eq!(
        read_model_from_prefix(start.as_bytes()).as_deref(),
        Some("m")
    );
}

#[test]
fn prompts_above_limit_are_dropped() {
    for entry in ["[1]", "[]", "\"a\""] {
        let body = |count: usize| {
            format!(
                r#"{{"prompt":[{}],"model":"m"}}"#,
                vec![entry; count].join(",")
            )
        };
        let read = |count| parse(ApiKind::Completions, body(count).as_bytes()).unwrap();
        let (PromptInput::Texts(_) | PromptInput::Tokens(_)) = read(1024).prompt else {
            panic!("{entry}")
        };
        assert_eq!(
            (read(1025).prompt, read(100_000).model.as_deref()),
            (PromptInput::OverLimit, Some("m")),
            "{entry}"
        );
    }
    let one = format!(r#"{{"prompt":[{}]}}"#, vec!["7"; 5000].join(","));
    assert_eq!(
        parse(ApiKind::Completions, one.as_bytes()).unwrap().prompt,
        PromptInput::Tokens(vec![vec![7; 5000]])
    );
}

#[test]
fn four_prompt_forms_are_distinguished() {
    for (prompt, expected) in [
        (json!("a"), PromptInput::Texts(vec!["a".to_owned()])),
        (
            json!(["a", "b"]),
            PromptInput::Texts(vec!["a".to_owned(), "b".to_owned()]),
        ),
        (json!([1, 2]), PromptInput::Tokens(vec![vec![1, 2]])),
        (
            json!([[1], [2, 3], []]),
            PromptInput::Tokens(vec![vec![1], vec![2, 3], vec![]]),
        ),
    ] {
        let body = json!({"prompt": prompt}).to_string();
        assert_eq!(
            parse(ApiKind::Completions, body.as_bytes()).unwrap().prompt,
            expected
        );
    }
}

#[test]
fn routing_fields_are_read_and_unknown_ignored() {
    let body = json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": [{"type": "text",
        "text": "x", "new": 1}], "new": {}}], "cache_salt": "s", "max_tokens": 5, "max_completion_tokens": 7,
        "tools": [{"b": 1, "a": 2}], "truncate_prompt_tokens": -1, "truncation_side": "right", "new": [[[]]]});
    let request = parse(ApiKind::ChatCompletions, body.to_string().as_bytes()).unwrap();
    assert_eq!(request.model.as_deref(), Some("m"));
    assert!(request.stream);
    assert_eq!(request.cache_salt.as_deref(), Some("s"));
    assert_eq!(request.max_output_tokens, Some(7));
    let tokenization = TokenizationOptions {
        truncate_prompt_tokens: Some(-1),
        truncation_side: Some(TruncationSide::Right),
        ..TokenizationOptions::default()
    };
    assert_eq!(request.tokenization, tokenization);
    let PromptInput::Chat(chat) = request.prompt else {
        panic!()
    };
    assert!(chat.add_generation_prompt);
    let tools = chat.tools.unwrap();
    let keys: Vec<_> = tools[0].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["b", "a"], "the order of keys stays");
}

proptest! {
    #[test]
    fn parsing_any_bytes_never_panics(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ignored = (parse(ApiKind::Completions, &body), parse(ApiKind::ChatCompletions, &body));
    }

    #[test]
    fn truncated_valid_body_never_panics(start in 0_usize..100, end in 0_usize..200, flip in any::<u8>()) {
        let mut body = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "\u{e9}"}]}],
            "prompt": [1, "a", [2]], "tools": [{"type": "function"}]}).to_string().into_bytes();
        let end = end.min(body.len());
        let start = start.min(end);
        body[start] ^= flip;
        let _ignored = (parse(ApiKind::Completions, &body[start..end]), parse(ApiKind::ChatCompletions, &body));
    }
}

#[test]
fn parse_error_does_not_quote_body() {
    let cases = [
        (
            ApiKind::ChatCompletions,
            r#"{"messages":"CANARY"}"#,
            "expected a sequence at line 1 column 20",
        ),
        (
            ApiKind::ChatCompletions,
            r#"{"messages":"a, expected CANARY"}"#,
            "expected a sequence at line 1 column 32",
        ),
        (
            ApiKind::ChatCompletions,
            r#"{"messages":[{"content":"CANARY"}]}"#,
            "missing field `role` at line 1 column 33",
        ),
        (
            ApiKind::Completions,
            r#"{"prompt":"x","truncation_side":"CANARY"}"#,
            "expected `left` or `right` at line 1",
        ),
        (
            ApiKind::Completions,
            r#"{"prompt":["CANARY", 1]}"#,
            "entries of one kind at line 1",
        ),
        (
            ApiKind::Completions,
            r#"{"prompt":"CANARY"#,
            "EOF while parsing a string at line 1 column 17",
        ),
        (
            ApiKind::Completions,
            r#"{"prompt":CANARY}"#,
            "expected value at line 1 column 11",
        ),
    ];
    for (api, body, expected) in cases {
        let error = parse(api, body.as_bytes()).unwrap_err();
        let message = error.to_string();
        let debugged = format!("{error:?}");
        assert!(message.contains(expected), "{message}");
        assert!(
            !message.contains("CANARY") && !debugged.contains("CANARY"),
            "{debugged}"
        );
    }
}

#[test]
fn list_body_has_no_model() {
    assert_eq!(
        read_model(br#" {"model":"m","prompt":1}"#).as_deref(),
        Some("m")
    );
    for body in [&br#"["m"]"#[..], br#" ["m", 1]"#, b"\"m\"", b"{}", b""] {
        assert_eq!(read_model(body), None);
    }
}
