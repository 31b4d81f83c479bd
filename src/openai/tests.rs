mod apis;
mod forms;
mod paths;

use proptest::prelude::*;
use serde_json::json;

use super::*;

#[test]
fn a_body_that_cannot_be_read_is_explained() {
    let deep = format!("{{\"messages\": {}", "[".repeat(10_000));
    let bodies: &[(Api, &[u8], &str)] = &[
        (Api::Completions, b"\xff", "not UTF-8 (byte 0)"),
        (Api::Completions, b"", "EOF"),
        (Api::Completions, b"[\"m\", false]", "not a JSON object"),
        (Api::Completions, b"null", "not a JSON object"),
        (Api::Completions, b"{}", "no `prompt`"),
        (Api::Completions, br#"{"prompt": null}"#, "no `prompt`"),
        (Api::Completions, br#"{"prompt": []}"#, "`prompt` is empty"),
        (
            Api::Completions,
            br#"{"prompt": ["a", 1]}"#,
            "entries of one kind",
        ),
        (Api::Completions, br#"{"prompt": [[1], "a"]}"#, "expected"),
        (Api::Completions, br#"{"prompt": [-1]}"#, "a token"),
        (
            Api::Completions,
            br#"{"prompt": [4294967296]}"#,
            "expected a token",
        ),
        (Api::Completions, br#"{"prompt": [1.5]}"#, "a token"),
        (
            Api::Completions,
            br#"{"prompt": {"a": 1}}"#,
            "a text, a list of texts",
        ),
        (
            Api::Completions,
            br#"{"prompt": "a", "prompt": "b"}"#,
            "duplicate",
        ),
        (Api::ChatCompletions, b"{}", "no `messages`"),
        (
            Api::ChatCompletions,
            br#"{"messages": []}"#,
            "`messages` is empty",
        ),
        (
            Api::ChatCompletions,
            br#"{"messages": [{"content": "x"}]}"#,
            "role",
        ),
        (
            Api::ChatCompletions,
            br#"{"messages": [{"role": "user", "content": "\ud800"}]}"#,
            "not understood",
        ),
        (
            Api::ChatCompletions,
            br#"{"messages": [{"role": "user"}]} x"#,
            "trailing",
        ),
        (Api::ChatCompletions, deep.as_bytes(), "not understood"),
    ];
    for (api, body, words) in bodies {
        let text = parse(*api, body).unwrap_err().to_string();
        assert!(
            text.contains(words),
            "{}: {text}",
            String::from_utf8_lossy(&body[..body.len().min(60)])
        );
    }
}

#[test]
fn of_more_prompts_than_are_looked_at_none_is_kept() {
    for entry in ["[1]", "[]", "\"a\""] {
        let body = |count: usize| {
            format!(
                r#"{{"prompt":[{}],"model":"m"}}"#,
                vec![entry; count].join(",")
            )
        };
        let read = |count| parse(Api::Completions, body(count).as_bytes()).unwrap();
        let (Prompt::Texts(_) | Prompt::Tokens(_)) = read(1024).prompt else {
            panic!("{entry}")
        };
        assert_eq!(
            (read(1025).prompt, read(100_000).model.as_deref()),
            (Prompt::TooMany, Some("m")),
            "{entry}"
        );
    }
    let one = format!(r#"{{"prompt":[{}]}}"#, vec!["7"; 5000].join(","));
    assert_eq!(
        parse(Api::Completions, one.as_bytes()).unwrap().prompt,
        Prompt::Tokens(vec![vec![7; 5000]])
    );
}

#[test]
fn the_four_shapes_of_a_prompt_are_told_apart() {
    for (prompt, expected) in [
        (json!("a"), Prompt::Texts(vec!["a".to_owned()])),
        (
            json!(["a", "b"]),
            Prompt::Texts(vec!["a".to_owned(), "b".to_owned()]),
        ),
        (json!([1, 2]), Prompt::Tokens(vec![vec![1, 2]])),
        (
            json!([[1], [2, 3], []]),
            Prompt::Tokens(vec![vec![1], vec![2, 3], vec![]]),
        ),
    ] {
        let body = json!({"prompt": prompt}).to_string();
        assert_eq!(
            parse(Api::Completions, body.as_bytes()).unwrap().prompt,
            expected
        );
    }
}

#[test]
fn fields_that_routing_needs_are_read_and_unknown_ones_ignored() {
    let body = json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": [{"type": "text",
        "text": "x", "new": 1}], "new": {}}], "cache_salt": "s", "max_tokens": 5, "max_completion_tokens": 7,
        "tools": [{"b": 1, "a": 2}], "truncate_prompt_tokens": -1, "truncation_side": "right", "new": [[[]]]});
    let request = parse(Api::ChatCompletions, body.to_string().as_bytes()).unwrap();
    assert_eq!(request.model.as_deref(), Some("m"));
    assert!(request.stream);
    assert_eq!(request.cache_salt.as_deref(), Some("s"));
    assert_eq!(request.max_output_tokens, Some(7));
    let tokenization = Tokenization {
        truncate_prompt_tokens: Some(-1),
        truncation_side: Some(Side::Right),
        ..Tokenization::default()
    };
    assert_eq!(request.tokenization, tokenization);
    let Prompt::Chat(chat) = request.prompt else {
        panic!()
    };
    assert!(chat.add_generation_prompt);
    let tools = chat.tools.unwrap();
    let keys: Vec<_> = tools[0].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["b", "a"], "the order of keys stays");
}

proptest! {
    #[test]
    fn no_bytes_make_parsing_panic(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ignored = (parse(Api::Completions, &body), parse(Api::ChatCompletions, &body));
    }

    #[test]
    fn no_cut_of_a_good_body_makes_parsing_panic(start in 0_usize..100, end in 0_usize..200, flip in any::<u8>()) {
        let mut body = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "\u{e9}"}]}],
            "prompt": [1, "a", [2]], "tools": [{"type": "function"}]}).to_string().into_bytes();
        let end = end.min(body.len());
        let start = start.min(end);
        body[start] ^= flip;
        let _ignored = (parse(Api::Completions, &body[start..end]), parse(Api::ChatCompletions, &body));
    }
}

#[test]
fn what_is_wrong_with_a_body_is_said_without_quoting_it() {
    let cases = [
        (
            Api::ChatCompletions,
            r#"{"messages":"CANARY"}"#,
            "expected a sequence at line 1 column 20",
        ),
        (
            Api::ChatCompletions,
            r#"{"messages":"a, expected CANARY"}"#,
            "expected a sequence at line 1 column 32",
        ),
        (
            Api::ChatCompletions,
            r#"{"messages":[{"content":"CANARY"}]}"#,
            "missing field `role` at line 1 column 33",
        ),
        (
            Api::Completions,
            r#"{"prompt":"x","truncation_side":"CANARY"}"#,
            "expected `left` or `right` at line 1",
        ),
        (
            Api::Completions,
            r#"{"prompt":["CANARY", 1]}"#,
            "entries of one kind at line 1",
        ),
        (
            Api::Completions,
            r#"{"prompt":"CANARY"#,
            "EOF while parsing a string at line 1 column 17",
        ),
        (
            Api::Completions,
            r#"{"prompt":CANARY}"#,
            "expected value at line 1 column 11",
        ),
    ];
    for (api, body, expected) in cases {
        let error = parse(api, body.as_bytes()).unwrap_err();
        let (said, debugged) = (error.to_string(), format!("{error:?}"));
        assert!(said.contains(expected), "{said}");
        assert!(
            !said.contains("CANARY") && !debugged.contains("CANARY"),
            "{debugged}"
        );
    }
}

#[test]
fn a_list_names_no_model() {
    assert_eq!(
        model_of(br#" {"model":"m","prompt":1}"#).as_deref(),
        Some("m")
    );
    for body in [&br#"["m"]"#[..], br#" ["m", 1]"#, b"\"m\"", b"{}", b""] {
        assert_eq!(model_of(body), None);
    }
}
