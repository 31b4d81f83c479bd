mod apis;
mod forms;
mod paths;

use proptest::prelude::*;
use serde_json::json;

use super::usage::{Usage, UsageScanner};
use super::*;

#[test]
fn a_body_that_cannot_be_read_is_explained() {
    let deep = format!("{{\"messages\": {}", "[".repeat(10_000));
    let tools = format!(r#"{{"messages":[{{"role":"user"}}],"tools":[{}]}}"#, "[".repeat(200) + &"]".repeat(200));
    let bodies: &[(Api, &[u8], &str)] = &[
        (Api::Completions, b"\xff", "not UTF-8 (byte 0)"),
        (Api::Completions, b"", "EOF"),
        (Api::Completions, b"[\"m\", false]", "not a JSON object"),
        (Api::Completions, b"null", "not a JSON object"),
        (Api::Completions, b"{}", "no `prompt`"),
        (Api::Completions, br#"{"prompt": null}"#, "no `prompt`"),
        (Api::Completions, br#"{"prompt": []}"#, "`prompt` is empty"),
        (Api::Completions, br#"{"prompt": ["a", 1]}"#, "different kinds"),
        (Api::Completions, br#"{"prompt": [[1], "a"]}"#, "expected"),
        (Api::Completions, br#"{"prompt": [-1]}"#, "a token"),
        (Api::Completions, br#"{"prompt": [4294967296]}"#, "4294967296 is not a token"),
        (Api::Completions, br#"{"prompt": [1.5]}"#, "a token"),
        (Api::Completions, br#"{"prompt": {"a": 1}}"#, "a text, a list of texts"),
        (Api::Completions, br#"{"prompt": "a", "prompt": "b"}"#, "duplicate"),
        (Api::ChatCompletions, b"{}", "no `messages`"),
        (Api::ChatCompletions, br#"{"messages": []}"#, "`messages` is empty"),
        (Api::ChatCompletions, br#"{"messages": [{"content": "x"}]}"#, "role"),
        (Api::ChatCompletions, br#"{"messages": [{"role": "user", "content": "\ud800"}]}"#, "not understood"),
        (Api::ChatCompletions, br#"{"messages": [{"role": "user"}]} x"#, "trailing"),
        (Api::ChatCompletions, deep.as_bytes(), "not understood"),
        (Api::ChatCompletions, tools.as_bytes(), "recursion"),
    ];
    for (api, body, words) in bodies {
        let text = parse(*api, body).unwrap_err().to_string();
        assert!(text.contains(words), "{}: {text}", String::from_utf8_lossy(&body[..body.len().min(60)]));
    }
}

#[test]
fn of_more_prompts_than_are_looked_at_none_is_kept() {
    for entry in ["[1]", "[]", "\"a\""] {
        let body = |count: usize| format!(r#"{{"prompt":[{}],"model":"m"}}"#, vec![entry; count].join(","));
        let read = |count| parse(Api::Completions, body(count).as_bytes()).unwrap();
        let (Prompt::Texts(_) | Prompt::Tokens(_)) = read(1024).prompt else { panic!("{entry}") };
        assert_eq!((read(1025).prompt, read(100_000).model.as_deref()), (Prompt::TooMany, Some("m")), "{entry}");
    }
    let one = format!(r#"{{"prompt":[{}]}}"#, vec!["7"; 5000].join(","));
    assert_eq!(parse(Api::Completions, one.as_bytes()).unwrap().prompt, Prompt::Tokens(vec![vec![7; 5000]]));
}

#[test]
fn the_four_shapes_of_a_prompt_are_told_apart() {
    for (prompt, expected) in [
        (json!("a"), Prompt::Texts(vec!["a".to_owned()])),
        (json!(["a", "b"]), Prompt::Texts(vec!["a".to_owned(), "b".to_owned()])),
        (json!([1, 2]), Prompt::Tokens(vec![vec![1, 2]])),
        (json!([[1], [2, 3], []]), Prompt::Tokens(vec![vec![1], vec![2, 3], vec![]])),
    ] {
        let body = json!({"prompt": prompt}).to_string();
        assert_eq!(parse(Api::Completions, body.as_bytes()).unwrap().prompt, expected);
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
    let tokenization =
        Tokenization { add_special_tokens: None, truncate_prompt_tokens: Some(-1), truncation_side: Some(Side::Right) };
    assert_eq!(request.tokenization, tokenization);
    let Prompt::Chat(chat) = request.prompt else { panic!() };
    assert!(chat.add_generation_prompt);
    assert_eq!(serde_json::to_string(&chat.tools).unwrap(), r#"[{"b":1,"a":2}]"#, "the order of keys stays");
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

/// A stream as vLLM sends it: role first, content, tool calls, a last event with usage and no choices.
const STREAM: &str = concat!(
    ": a comment\n\n",
    "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}],\"usage\":null}\n\n",
    "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\u{4e2d}\"}}]}\n\n",
    "event: message\nid: 7\ndata:{\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"reasoning\":\"hm\"}}]}\n\n",
    "data: {\"id\":\"c\",\ndata: \"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0}]}}]}\n\n",
    "data: {\"id\":\"c\",\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
    "data: {\"id\":\"c\",\"choices\":[],\"usage\":{\"prompt_tokens\":419,\"total_tokens\":422,\"completion_tokens\":3,",
    "\"prompt_tokens_details\":{\"cached_tokens\":416}}}\n\n",
    "data: [DONE]\n\n",
);

const TOLD: Usage = Usage { prompt_tokens: 419, completion_tokens: 3, cached_tokens: Some(416) };

fn check(scanner: &UsageScanner) {
    assert_eq!(scanner.usage(), Some(TOLD));
    assert_eq!(scanner.content_events(), 3);
    assert_eq!(scanner.skipped(), 0);
    assert!(scanner.is_done());
}

#[test]
fn a_stream_is_read_the_same_however_it_is_cut() {
    for newline in ["\n", "\r\n", "\r"] {
        let stream = STREAM.replace('\n', newline).into_bytes();
        for cut in 0..=stream.len() {
            let mut scanner = UsageScanner::default();
            scanner.push(&stream[..cut]);
            scanner.push(&[]);
            scanner.push(&stream[cut..]);
            scanner.finish();
            check(&scanner);
        }
        let mut scanner = UsageScanner::default();
        stream.chunks(1).for_each(|byte| scanner.push(byte));
        check(&scanner);
    }
}

#[test]
fn an_event_that_the_stream_ends_in_counts() {
    let mut scanner = UsageScanner::default();
    scanner.push(b"data: {\"choices\":[{\"text\":\"a\"}]}");
    assert_eq!(scanner.content_events(), 0);
    scanner.finish();
    scanner.finish();
    assert_eq!(scanner.content_events(), 1);
    assert!(!scanner.is_done());
}

#[test]
fn the_last_usage_counts_and_null_does_not_erase_it() {
    let mut scanner = UsageScanner::default();
    for usage in
        [r#"{"prompt_tokens":1,"completion_tokens":1}"#, r#"{"prompt_tokens":1,"completion_tokens":2}"#, "null"]
    {
        scanner.push(format!("data: {{\"choices\":[],\"usage\":{usage}}}\n\n").as_bytes());
    }
    assert_eq!(scanner.usage(), Some(Usage { prompt_tokens: 1, completion_tokens: 2, cached_tokens: None }));
}

#[test]
fn what_is_too_long_or_not_understood_is_skipped_and_counted() {
    let mut scanner = UsageScanner::default();
    let long = vec![b'x'; 700_000];
    scanner.push(b"data: ");
    scanner.push(&long);
    scanner.push(&long);
    scanner.push(b"\n\n");
    assert_eq!(scanner.skipped(), 1);
    for _ in 0..2 {
        scanner.push(b"data: ");
        scanner.push(&long);
        scanner.push(b"\n");
    }
    scanner.push(b"\n");
    assert_eq!(scanner.skipped(), 2, "lines that are short enough but make too long an event");
    scanner.push(b"data: {broken\n\n");
    assert_eq!(scanner.skipped(), 3);
    scanner.push(STREAM.as_bytes());
    assert_eq!(scanner.usage(), Some(TOLD), "the stream goes on");
}

#[test]
fn a_whole_answer_is_read_at_once() {
    for (choice, content) in [
        (json!({"message": {"role": "assistant", "content": "hi"}}), 1),
        (json!({"message": {"content": null, "tool_calls": [{"id": "c"}]}}), 1),
        (json!({"text": ""}), 0),
    ] {
        let usage =
            json!({"prompt_tokens": 419, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 416}});
        let mut scanner = UsageScanner::default();
        scanner.finish_unary(json!({"choices": [choice], "usage": usage}).to_string().as_bytes());
        assert_eq!((scanner.usage(), scanner.content_events()), (Some(TOLD), content));
    }
    let mut scanner = UsageScanner::default();
    scanner.finish_unary(br#"{"error": {"message": "no"}}"#);
    assert_eq!((scanner.usage(), scanner.content_events(), scanner.skipped()), (None, 0, 0));
}
