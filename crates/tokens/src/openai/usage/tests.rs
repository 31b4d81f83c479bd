use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};
use warmroute_property_tests::property_config;

use super::*;

/// A stream from vLLM: the role, content, tool calls, and a last event with usage and no choices.
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

const REPORTED_USAGE: TokenUsage = TokenUsage {
    prompt_tokens: 419,
    completion_tokens: 3,
    cached_tokens: Some(416),
};

fn check(scanner: &UsageScanner) {
    assert_eq!(scanner.usage(), Some(REPORTED_USAGE));
    assert_eq!(scanner.content_events(), 3);
    assert!(scanner.is_complete());
}

#[test]
fn stream_usage_is_independent_of_chunks() {
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
fn unterminated_last_event_counts() {
    let mut scanner = UsageScanner::default();
    scanner.push(b"data: {\"choices\":[{\"text\":\"a\"}]}");
    assert_eq!(scanner.content_events(), 0);
    scanner.finish();
    scanner.finish();
    assert_eq!(scanner.content_events(), 1);
    assert!(!scanner.is_complete());
}

#[test]
fn last_usage_counts_and_null_is_ignored() {
    let mut scanner = UsageScanner::default();
    for usage in [
        r#"{"prompt_tokens":1,"completion_tokens":1}"#,
        r#"{"prompt_tokens":1,"completion_tokens":2}"#,
        "null",
    ] {
        scanner.push(format!("data: {{\"choices\":[],\"usage\":{usage}}}\n\n").as_bytes());
    }
    assert_eq!(
        scanner.usage(),
        Some(TokenUsage {
            prompt_tokens: 1,
            completion_tokens: 2,
            cached_tokens: None
        })
    );
}

#[test]
fn oversized_or_invalid_events_are_skipped() {
    let mut scanner = UsageScanner::default();
    let long = vec![b'x'; 700_000];
    scanner.push(b"data: ");
    scanner.push(&long);
    scanner.push(&long);
    scanner.push(b"\n\n");
    for _ in 0..2 {
        scanner.push(b"data: ");
        scanner.push(&long);
        scanner.push(b"\n");
    }
    scanner.push(b"\n");
    assert_eq!(scanner.content_events(), 0);
    scanner.push(b"data: {broken\n\n");
    scanner.push(STREAM.as_bytes());
    assert_eq!(
        scanner.usage(),
        Some(REPORTED_USAGE),
        "the rest of the stream is read"
    );
}

#[test]
fn document_usage_is_read_at_end() {
    for (choice, content) in [
        (
            json!({"message": {"role": "assistant", "content": "hi"}}),
            1,
        ),
        (
            json!({"message": {"content": null, "tool_calls": [{"id": "c"}]}}),
            1,
        ),
        (json!({"text": ""}), 0),
    ] {
        let usage = json!({"prompt_tokens": 419, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 416}});
        let mut scanner = UsageScanner::new(ResponseEncoding::Document);
        scanner.push(
            json!({"choices": [choice], "usage": usage})
                .to_string()
                .as_bytes(),
        );
        scanner.finish();
        assert_eq!(
            (scanner.usage(), scanner.content_events()),
            (Some(REPORTED_USAGE), content)
        );
    }
    let mut scanner = UsageScanner::new(ResponseEncoding::Document);
    scanner.push(br#"{"error": {"message": "no"}}"#);
    scanner.finish();
    assert_eq!((scanner.usage(), scanner.content_events()), (None, 0));
}

fn whole(body: &str) -> UsageScanner {
    let mut scanner = UsageScanner::new(ResponseEncoding::Document);
    scanner.push(body.as_bytes());
    scanner.finish();
    scanner
}

fn stream(events: &[Value]) -> UsageScanner {
    let mut scanner = UsageScanner::new(ResponseEncoding::EventStream);
    for event in events {
        scanner.push(format!("event: {}\ndata: {event}\n\n", event["type"]).as_bytes());
    }
    scanner.finish();
    scanner
}

fn usage(
    prompt_tokens: u64,
    completion_tokens: u64,
    cached_tokens: Option<u64>,
) -> Option<TokenUsage> {
    Some(TokenUsage {
        prompt_tokens,
        completion_tokens,
        cached_tokens,
    })
}

#[test]
fn usage_is_read_for_every_api() {
    assert_usage(&[
        (
            r#"{"data":[{"embedding":[0.5,-1e-3]}],"usage":{"prompt_tokens":7,"total_tokens":7}}"#,
            usage(7, 0, None),
            0,
        ),
        (
            r#"{"object":"response","output":[{"type":"message"}],"usage":{"input_tokens":9,"output_tokens":2,
                "input_tokens_details":{"cached_tokens":8},"output_tokens_details":{"reasoning_tokens":1}}}"#,
            usage(9, 2, Some(8)),
            1,
        ),
        (
            r#"{"type":"message","content":[{"type":"text","text":"a"}],"usage":{"input_tokens":10,"output_tokens":3}}"#,
            usage(10, 3, None),
            1,
        ),
        (
            r#"{"type":"message","content":[],"usage":{"input_tokens":10,"output_tokens":0,
                "cache_read_input_tokens":30,"cache_creation_input_tokens":2}}"#,
            usage(42, 0, Some(30)),
            0,
        ),
        (
            r#"{"text":"ab","meta_info":{"prompt_tokens":5,"completion_tokens":2,"cached_tokens":1}}"#,
            usage(5, 2, Some(1)),
            1,
        ),
        (
            r#"[{"text":"ab","meta_info":{"prompt_tokens":5,"completion_tokens":2,"cached_tokens":1}},
                {"text":"","meta_info":{"prompt_tokens":6,"completion_tokens":1}}]"#,
            usage(11, 3, Some(1)),
            1,
        ),
    ]);
}

#[test]
fn unusual_usage_is_read_or_ignored() {
    assert_usage(&[
        (
            r#"{"usage":{"prompt_tokens":5,"completion_tokens":null,"prompt_tokens_details":null}}"#,
            usage(5, 0, None),
            0,
        ),
        (
            r#"{"usage":{"prompt_tokens":-5,"completion_tokens":"2","prompt_tokens_details":[4]}}"#,
            usage(0, 0, None),
            0,
        ),
        (r#"{"usage":{}}"#, usage(0, 0, None), 0),
        (r#"{"usage":[1,2]}"#, None, 0),
        (r#"{"input_tokens":12}"#, None, 0),
        (
            r#"{"text":{"usage":{"prompt_tokens":1}},"message":"x","response":7,"delta":{},"type":3}"#,
            None,
            1,
        ),
        ("[]", None, 0),
    ]);
}

/// Checks the usage and the content events of each document.
fn assert_usage(cases: &[(&str, Option<TokenUsage>, u64)]) {
    for (body, reported, content) in cases {
        let scanner = whole(body);
        assert_eq!(
            (scanner.usage(), scanner.content_events()),
            (*reported, *content),
            "{body}"
        );
        assert!(scanner.is_complete(), "{body}");
    }
}

#[test]
fn invalid_documents_are_skipped() {
    for body in [
        "",
        "7",
        "\"usage\"",
        "{\"usage\":{\"prompt_tokens\":1}",
        "[1]",
        "[[1]]",
        "\u{feff}{}",
    ] {
        let scanner = whole(body);
        assert_eq!(
            (scanner.usage(), scanner.content_events()),
            (None, 0),
            "{body}"
        );
    }
}

#[test]
fn responses_api_events_are_read() {
    let about = |usage: Value| json!({"id": "r", "model": "m", "output": [], "usage": usage});
    let reported = json!({"input_tokens": 20, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 16}});
    let mut events = vec![
        json!({"type": "response.created", "response": about(Value::Null)}),
        json!({"type": "response.in_progress", "response": about(Value::Null)}),
        json!({"type": "response.output_item.added", "item": {"type": "message", "content": []}}),
        json!({"type": "response.reasoning_text.delta", "delta": "hm"}),
        json!({"type": "response.reasoning_summary_text.delta", "delta": "h"}),
        json!({"type": "response.output_text.delta", "delta": "a"}),
        json!({"type": "response.output_text.delta", "delta": ""}),
        json!({"type": "response.function_call_arguments.delta", "delta": "{}"}),
        json!({"type": "response.output_text.done", "text": "a"}),
        json!({"type": "response.content_part.done", "part": {"type": "output_text", "text": "a"}}),
    ];
    let open = stream(&events);
    assert_eq!(
        (open.usage(), open.content_events(), open.is_complete()),
        (None, 4, false)
    );
    for (last, done) in [
        ("completed", true),
        ("incomplete", true),
        ("failed", true),
        ("queued", false),
    ] {
        events
            .push(json!({"type": format!("response.{last}"), "response": about(reported.clone())}));
        let ended = stream(&events);
        assert_eq!(
            (ended.usage(), ended.content_events(), ended.is_complete()),
            (usage(20, 4, Some(16)), 4, done)
        );
        events.pop();
    }
}

#[test]
fn anthropic_usage_is_merged_from_two_events() {
    let start = json!({"input_tokens": 5, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 4,
        "output_tokens": 1});
    let delta = |delta: Value| json!({"type": "content_block_delta", "index": 0, "delta": delta});
    let mut events = vec![
        json!({"type": "message_start", "message": {"model": "m", "content": [], "usage": start}}),
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        json!({"type": "ping"}),
        delta(json!({"type": "thinking_delta", "thinking": "hm"})),
        delta(json!({"type": "signature_delta", "signature": "abc"})),
        delta(json!({"type": "text_delta", "text": "a"})),
        delta(json!({"type": "text_delta", "text": ""})),
        delta(json!({"type": "input_json_delta", "partial_json": "{"})),
        delta(json!("a")),
    ];
    let open = stream(&events);
    assert_eq!(
        (open.usage(), open.content_events(), open.is_complete()),
        (usage(25, 1, Some(16)), 3, false)
    );
    events.push(json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 9}}));
    events.push(json!({"type": "message_stop"}));
    let ended = stream(&events);
    assert_eq!(
        (ended.usage(), ended.is_complete()),
        (usage(25, 9, Some(16)), true)
    );
    // vLLM reports the prompt length only in the last event.
    events[0]["message"]["usage"] = json!({"input_tokens": 0, "output_tokens": 0});
    events[9]["usage"] = json!({"input_tokens": 30, "output_tokens": 9});
    assert_eq!(stream(&events).usage(), usage(30, 9, None));
}

#[test]
fn only_usage_of_long_document_is_retained() {
    let numbers = "0.0123456789,".repeat(200_000);
    let reported = r#""usage":{"prompt_tokens":7,"completion_tokens":1}"#;
    let list = format!(r#""data":[{{"usage":{{"prompt_tokens":3}},"embedding":[{numbers}0]}}]"#);
    let text = format!(r#""text":"\"usage\":{{\"prompt_tokens\":3}}{numbers}""#);
    let cases = [
        (format!("{{{list},{reported}}}"), usage(7, 1, None)),
        (format!("{{{reported} , {list}}}"), usage(7, 1, None)),
        (format!("{{{text},{reported}}}"), usage(7, 1, None)),
        (
            format!(r#"{{{list},"us\u0061ge" : {{"prompt_tokens":8}}, "x":{reported}"#),
            usage(8, 0, None),
        ),
        (format!("{{{list},\"x\":{{{reported}}}}}"), None),
        (format!("{{{list},\"usage\":[{numbers}]}}"), None),
        (format!("{numbers}{reported}"), None),
    ];
    for (body, reported) in cases {
        for size in [body.len(), 8192, 1021] {
            let mut scanner = UsageScanner::new(ResponseEncoding::Document);
            for chunk in body.as_bytes().chunks(size) {
                scanner.push(chunk);
                assert!(scanner.document.capacity() <= 2 * MAX_EVENT_BYTES);
            }
            scanner.finish();
            scanner.finish();
            assert_eq!(scanner.usage(), reported, "{size}");
        }
    }
}

fn event() -> impl Strategy<Value = String> {
    let count = 0_u64..1000;
    prop_oneof![
        count.clone().prop_map(|n| json!({"choices": [{"text": "a"}], "usage": {"prompt_tokens": n}}).to_string()),
        count.clone().prop_map(|n| {
            json!({"type": "message_start", "message": {"usage": {"input_tokens": n, "output_tokens": 1}}}).to_string()
        }),
        count.clone().prop_map(|n| json!({"type": "message_delta", "usage": {"output_tokens": n}}).to_string()),
        count.prop_map(|n| {
            let usage = json!({"input_tokens": n, "input_tokens_details": {"cached_tokens": n / 2}});
            json!({"type": "response.completed", "response": {"usage": usage}}).to_string()
        }),
        Just(json!({"type": "response.output_text.delta", "delta": "\u{e9}\n"}).to_string()),
        Just("[DONE]".to_owned()),
        "[{}\\[\\]\":,a-c0-9 ]{0,20}",
    ]
}

proptest! {
    #![proptest_config(property_config(500))]

    #[test]
    fn chunk_boundaries_do_not_change_usage(
        events in vec((event(), prop_oneof![Just("\n\n"), Just("\r\n\r\n"), Just("\r\r"), Just("\n")]), 0..6),
        sizes in vec(1_usize..40, 1..20),
        streamed in any::<bool>(),
    ) {
        let text: String = events.iter().map(|(event, end)| format!("data: {event}{end}")).collect();
        let text = if streamed { text } else { events.into_iter().next().map_or(String::new(), |(event, _)| event) };
        let kind = if streamed { ResponseEncoding::EventStream } else { ResponseEncoding::Document };
        let mut once = UsageScanner::new(kind);
        let mut cut = UsageScanner::new(kind);
        once.push(text.as_bytes());
        let mut rest = text.as_bytes();
        for size in sizes.iter().cycle() {
            let (chunk, after) = rest.split_at(rest.len().min(*size));
            cut.push(chunk);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        once.finish();
        cut.finish();
        let reported = |scanner: &UsageScanner| {
            (scanner.usage(), scanner.content_events(), scanner.is_complete())
        };
        prop_assert_eq!(reported(&cut), reported(&once));
    }

    #[test]
    fn usage_scanner_never_panics(bytes in vec(any::<u8>(), 0..200)) {
        for kind in [ResponseEncoding::EventStream, ResponseEncoding::Document] {
            let mut scanner = UsageScanner::new(kind);
            bytes.chunks(7).for_each(|chunk| scanner.push(chunk));
            scanner.finish();
            prop_assert_eq!(scanner.usage(), None);
        }
    }
}

/// Generates texts of events, and texts that must not be mistaken for structure.
fn event_text() -> impl Strategy<Value = Vec<u8>> {
    let odd: [&[u8]; 8] = [
        b"",
        b"\\\"",
        b"\\n",
        b"x\",\"content\":\"y",
        b"x\"},\"usage\":{\"prompt_tokens\":3",
        b"\x01",
        b"\xff",
        b"\\",
    ];
    prop_oneof![
        4 => "[a-zé ]{0,6}".prop_map(String::into_bytes),
        1 => proptest::sample::select(odd.to_vec()).prop_map(<[u8]>::to_vec),
    ]
}

/// Generates events of engines, and events that are only similar.
fn similar_event() -> impl Strategy<Value = Vec<u8>> {
    let around = [
        (
            "{\"id\":\"a\",\"choices\":[{\"delta\":{\"content\":\"",
            "\"},\"finish_reason\":null}]}",
        ),
        (
            "{\"id\":\"a\",\"choices\":[{\"text\":\"",
            "\",\"finish_reason\":null}]}",
        ),
        (
            "{\"choices\":[{\"delta\":{\"content\":\"",
            "\"}}],\"usage\":{\"prompt_tokens\":9}}",
        ),
        (
            "{\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"",
            "\"}}",
        ),
        ("{\"type\":\"message\",\"content\":\"", "\"}"),
        ("{\"type\":\"message_stop\",\"content\":\"", "\"}"),
        ("{\"x\\\"content\":\"", "\"}"),
        ("{\"a\":\"\\\"content\\\":\\\"", "\",\"text\":\"x\"}"),
        ("[DONE]", ""),
    ];
    let event = |((before, after), event_text): ((&str, &str), Vec<u8>)| {
        [before.as_bytes(), &event_text, after.as_bytes()].concat()
    };
    (proptest::sample::select(around.to_vec()), event_text()).prop_map(event)
}

proptest! {
    #[test]
    fn similar_events_count_like_parsed_events(
        events in vec((similar_event(), prop_oneof![Just("\n\n"), Just("\r\n\r\n"), Just("\n\r\n")]), 0..12),
        cuts in vec(0..4_000usize, 0..12),
    ) {
        let mut stream = Vec::new();
        let mut expected = UsageScanner::default();
        for (event, end) in &events {
            stream.extend(b"data: ".iter().chain(event).chain(end.as_bytes()));
            match event.as_slice() {
                b"[DONE]" => expected.is_complete = true,
                // Other tests cover data that is empty or has several lines.
                event => if let Some(reported) = response_event::parse_event(event) {
                    expected.content_events += u64::from(reported.content != EventContent::None);
                    expected.content_tokens = expected.content_tokens.saturating_add(reported.content.tokens());
                    expected.is_complete |= reported.is_last;
                    if let Some(counts) = reported.counts {
                        expected.counts.get_or_insert_default().merge(counts);
                    }
                },
            }
        }
        let mut scanner = UsageScanner::default();
        let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut % (stream.len() + 1)).chain([0, stream.len()]).collect();
        cuts.sort_unstable();
        cuts.windows(2).for_each(|cut| scanner.push(&stream[cut[0]..cut[1]]));
        scanner.finish();
        prop_assert_eq!(scanner.content_events(), expected.content_events());
        prop_assert_eq!(scanner.output_tokens(), expected.output_tokens());
        prop_assert_eq!(scanner.usage(), expected.usage());
        prop_assert_eq!(scanner.is_complete(), expected.is_complete());
    }
}

#[test]
fn output_tokens_are_counted_from_events() {
    let cases: [(&str, u64); 8] = [
        (
            r#"{"choices":[{"delta":{"content":"a b c"},"token_ids":[1,2,3]}]}"#,
            3,
        ),
        (
            r#"{"choices":[{"text":"a b","logprobs":{"tokens":["a"," b"],"token_logprobs":[-1,-1]}}]}"#,
            2,
        ),
        (
            r#"{"choices":[{"delta":{"content":"a b"},"logprobs":{"content":[{"token":"a"},{"token":" b"}]}}]}"#,
            2,
        ),
        (
            r#"{"choices":[{"delta":{"content":"a b"},"logprobs":null,"token_ids":null}]}"#,
            1,
        ),
        (
            r#"{"choices":[{"text":"a","token_ids":[1,2]},{"text":"b","token_ids":[3]}]}"#,
            3,
        ),
        (
            r#"{"choices":[{"delta":{"content":"a"}}],"usage":{"prompt_tokens":9,"completion_tokens":5}}"#,
            5,
        ),
        (
            r#"{"text":"a b c","output_ids":[1],"meta_info":{"completion_tokens":3}}"#,
            3,
        ),
        (
            r#"{"type":"response.output_text.delta","delta":"a b","logprobs":[{"token":"a"},{"token":" b"}]}"#,
            2,
        ),
    ];
    for (event, expected) in cases {
        let mut scanner = UsageScanner::new(ResponseEncoding::EventStream);
        scanner.push(format!("data: {event}\n\n").as_bytes());
        assert_eq!(
            (scanner.output_tokens(), scanner.content_events()),
            (expected, 1),
            "{event}"
        );
    }
    // Events without such lists count as one token each, including unparsed ones.
    let mut scanner = UsageScanner::new(ResponseEncoding::EventStream);
    for text in ["a", "b", "c"] {
        scanner.push(
            format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n")
                .as_bytes(),
        );
    }
    assert_eq!((scanner.output_tokens(), scanner.content_events()), (3, 3));
}
