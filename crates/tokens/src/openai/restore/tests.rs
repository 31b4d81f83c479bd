use std::borrow::Cow;

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};
use warmroute_property_tests::property_config;

use super::*;
use crate::openai::json_edit::tests::{any_json, any_text};

/// Returns the output for each chunk, and the output at the end of the response.
fn restored(restorer: &mut ModelNameRestorer, chunks: &[&[u8]]) -> Vec<Vec<u8>> {
    let mut out: Vec<Vec<u8>> = chunks
        .iter()
        .map(|chunk| restorer.push(chunk).into_owned())
        .collect();
    out.push(restorer.finish());
    out
}

fn assert_restored_in_every_split(text: &str, served: &str, requested: &str, expected: &str) {
    let bytes = text.as_bytes();
    for cut in 0..=bytes.len() {
        let out = restored(
            &mut ModelNameRestorer::new(served, requested),
            &[&bytes[..cut], &[], &bytes[cut..]],
        )
        .concat();
        assert_eq!(
            String::from_utf8_lossy(&out),
            expected,
            "{text} cut at {cut}"
        );
    }
    let single: Vec<&[u8]> = bytes.chunks(1).collect();
    let out = restored(&mut ModelNameRestorer::new(served, requested), &single).concat();
    assert_eq!(
        String::from_utf8_lossy(&out),
        expected,
        "{text} byte by byte"
    );
}

#[test]
fn requested_name_is_restored_in_documents() {
    let cases = [
        (r#"{"model":"s","x":1}"#, r#"{"model":"A\"","x":1}"#),
        (
            "\n{ \"x\" : [1, {}],\r\n\t\"model\" :\n \"s\" }\n",
            "\n{ \"x\" : [1, {}],\r\n\t\"model\" :\n \"A\\\"\" }\n",
        ),
        (r#"{"m\u006fdel":"\u0073"}"#, r#"{"m\u006fdel":"A\""}"#),
        (
            r#"{"model":"s","model":"s"}"#,
            r#"{"model":"A\"","model":"A\""}"#,
        ),
        (r#"{"model":"s2","n":1}"#, r#"{"model":"s2","n":1}"#),
        (r#"{"model":"","n":1}"#, r#"{"model":"","n":1}"#),
        (r#"{"model":7,"x":"s"}"#, r#"{"model":7,"x":"s"}"#),
        (
            r#"{"model":["s"],"x":{"model":"s"}}"#,
            r#"{"model":["s"],"x":{"model":"s"}}"#,
        ),
        (
            r#"{"a":"\"model\":\"s\"","model":null}"#,
            r#"{"a":"\"model\":\"s\"","model":null}"#,
        ),
        (
            r#"{"choices":[{"message":{"model":"s"}}],"model":"s"}"#,
            r#"{"choices":[{"message":{"model":"s"}}],"model":"A\""}"#,
        ),
        (
            r#"{"a":{"response":{"model":"s"}}}"#,
            r#"{"a":{"response":{"model":"s"}}}"#,
        ),
        (
            r#"{"response":{"message":{"model":"s"},"model":"s"}}"#,
            r#"{"response":{"message":{"model":"s"},"model":"A\""}}"#,
        ),
        (
            r#"{"message":{"id":{},"model":"s"},"model":"s"}"#,
            r#"{"message":{"id":{},"model":"A\""},"model":"A\""}"#,
        ),
        (
            r#"{"message":"model","model":"s"}"#,
            r#"{"message":"model","model":"A\""}"#,
        ),
        (r#"[{"model":"s"}]"#, r#"[{"model":"s"}]"#),
    ];
    for (text, expected) in cases {
        assert_restored_in_every_split(text, "s", "A\"", expected);
    }
    assert_restored_in_every_split(
        r#"{"model":"org\/s\u00e9\ud83d\ude00"}"#,
        "org/s\u{e9}\u{1f600}",
        "a",
        r#"{"model":"a"}"#,
    );
}

#[test]
fn requested_name_is_restored_in_event_streams() {
    let cases = [
        (
            "data: {\"model\":\"s\"}\n\ndata: [DONE]\n\n",
            "data: {\"model\":\"A\\\"\"}\n\ndata: [DONE]\n\n",
        ),
        (
            ": c\nevent: message_start\nid: 1\ndata:{\"message\":{\"model\": \"s\"}}\n\nevent: x\ndata: {\"model\":\"s\"}\n\n",
            ": c\nevent: message_start\nid: 1\ndata:{\"message\":{\"model\": \"A\\\"\"}}\n\nevent: x\ndata: {\"model\":\"A\\\"\"}\n\n",
        ),
        (
            "data: {\"response\":{\r\ndata: \"model\":\r\ndata: \"s\"}}\r\n\r\ndata: {\"model\":\"s\"}",
            "data: {\"response\":{\r\ndata: \"model\":\r\ndata: \"A\\\"\"}}\r\n\r\ndata: {\"model\":\"A\\\"\"}",
        ),
        (
            "data: {\"model\":\"s\"}\rdata: {\"model\":\"s\"}\r\r",
            "data: {\"model\":\"A\\\"\"}\rdata: {\"model\":\"A\\\"\"}\r\r",
        ),
        (
            "data: {\"model\":\"s\n\ndata: {\"model\":\"s\"}\n\n",
            "data: {\"model\":\"s\n\ndata: {\"model\":\"A\\\"\"}\n\n",
        ),
        (
            "dat: {\"model\":\"s\"}\n data: {\"model\":\"s\"}\n",
            "dat: {\"model\":\"s\"}\n data: {\"model\":\"s\"}\n",
        ),
        (
            "event: data: {\"model\":\"s\"}\n\n",
            "event: data: {\"model\":\"s\"}\n\n",
        ),
        ("{\"model\":\"s", "{\"model\":\"s"),
        ("{\"model\":\"\\u007", "{\"model\":\"\\u007"),
        ("", ""),
    ];
    for (text, expected) in cases {
        assert_restored_in_every_split(text, "s", "A\"", expected);
    }
}

#[test]
fn only_possible_model_name_is_held_back() {
    let cases: [(&str, &str); 10] = [
        (r#"{"model":"ser"#, r#"{"model":"#),
        (r#"{"model":""#, r#"{"model":"#),
        (r#"{"model":"sex"#, r#"{"model":"sex"#),
        (r#"{"mod"#, r#"{"mod"#),
        (r#"{"model":"#, r#"{"model":"#),
        (r#"{"model":"\u0073er"#, r#"{"model":"#),
        (r#"{"x":"ser"#, r#"{"x":"ser"#),
        (
            r#"{"choices":[{"delta":{"content":"ser"#,
            r#"{"choices":[{"delta":{"content":"ser"#,
        ),
        ("data: {\"a\":1}\n\ndata", "data: {\"a\":1}\n\ndata"),
        (r#"{"model":"x\u0073e"#, r#"{"model":"x\u0073e"#),
    ];
    for (text, gone) in cases {
        let mut restorer = ModelNameRestorer::new("served", "asked");
        assert_eq!(
            String::from_utf8_lossy(&restorer.push(text.as_bytes())),
            gone
        );
        assert_eq!(
            String::from_utf8_lossy(&restorer.finish()),
            text[gone.len()..]
        );
    }
    let mut restorer = ModelNameRestorer::new("served", "asked");
    let text = format!(r#"{{"model":"{}"#, r"\u0073".repeat(7));
    assert_eq!(
        restorer.push(text.as_bytes()).len(),
        text.len(),
        "too long to be the name, whatever its content"
    );
}

#[test]
fn unchanged_chunk_is_not_copied() {
    let mut restorer = ModelNameRestorer::new("served", "asked");
    for chunk in [
        "data: {\"model\":\"other\",\"choices\":[{\"text\":\"a\"}]}\n\n",
        "data: {\"x\":",
        "[1,2]}\n\n",
    ] {
        assert!(
            matches!(restorer.push(chunk.as_bytes()), Cow::Borrowed(same) if same == chunk.as_bytes())
        );
    }
    assert!(matches!(
        restorer.push(b"data: {\"model\":\"served\"}"),
        Cow::Owned(_)
    ));
}

/// Reference implementation: replaces the names in a parsed document.
fn reference(document: &Value, served: &str, requested: &str) -> Value {
    let mut document = document.clone();
    for path in ["/model", "/response/model", "/message/model"] {
        if let Some(model) = document.pointer_mut(path).filter(|model| *model == served) {
            *model = Value::from(requested);
        }
    }
    document
}

fn document() -> impl Strategy<Value = Value> {
    let model = prop_oneof![3 => Just(json!("s\u{e9}\"")), 1 => Just(json!("s")), 1 => any_json()];
    let key = prop_oneof![
        3 => Just("model".to_owned()), 1 => Just("response".to_owned()), 1 => Just("message".to_owned()), 2 => any_text(),
    ];
    let inner = vec((key.clone(), model.clone()), 0..3)
        .prop_map(|fields| Value::Object(fields.into_iter().collect()));
    let value = prop_oneof![2 => model, 2 => inner, 1 => any_json()];
    vec((key, value), 0..5).prop_map(|fields| Value::Object(fields.into_iter().collect()))
}

/// Prints JSON in one of several styles.
fn text_of(value: &Value, style: u8) -> String {
    let text = if style & 1 == 0 {
        value.to_string()
    } else {
        serde_json::to_string_pretty(value).unwrap()
    };
    let text = if style & 2 == 0 {
        text
    } else {
        text.replace('\u{e9}', "\\u00e9")
    };
    if style & 4 == 0 {
        text
    } else {
        text.replace("model", "mod\\u0065l")
    }
}

fn cut<'t>(text: &'t [u8], sizes: &[usize]) -> Vec<&'t [u8]> {
    let mut rest = text;
    let mut chunks = Vec::new();
    for size in sizes.iter().cycle() {
        let (chunk, after) = rest.split_at(rest.len().min(*size));
        chunks.push(chunk);
        rest = after;
        if rest.is_empty() {
            break;
        }
    }
    chunks
}

proptest! {
    #![proptest_config(property_config(3000))]

    #[test]
    fn stream_rewrite_equals_parsed_rewrite(
        events in vec((document(), 0_u8..8), 1..4),
        sizes in vec(0_usize..12, 1..20).prop_filter("some progress", |sizes| sizes.iter().any(|size| *size > 0)),
        end in prop_oneof![Just("\n"), Just("\r\n"), Just("\r")],
    ) {
        let data = |text: String| text.lines().map(|line| format!("data: {line}{end}")).collect::<String>() + end;
        let stream: String = events.iter().map(|(event, style)| data(text_of(event, *style))).collect();
        let out = restored(&mut ModelNameRestorer::new("s\u{e9}\"", "A\\"), &cut(stream.as_bytes(), &sizes)).concat();
        let out = String::from_utf8(out).unwrap();
        let twice = format!("{end}{end}");
        let found: Vec<Value> = out
            .split_terminator(&twice)
            .map(|event| {
                let lines = event.split(end).map(|line| line.strip_prefix("data: ").unwrap());
                serde_json::from_str(&lines.collect::<Vec<_>>().join("\n")).unwrap()
            })
            .collect();
        let expected: Vec<Value> = events.iter().map(|(event, _)| reference(event, "s\u{e9}\"", "A\\")).collect();
        prop_assert_eq!(found, expected);
        // Equal names leave the response unchanged.
        let same = restored(&mut ModelNameRestorer::new("s\u{e9}\"", "s\u{e9}\""), &cut(out.as_bytes(), &sizes)).concat();
        prop_assert_eq!(String::from_utf8(same).unwrap(), out);
    }

    #[test]
    fn document_rewrite_equals_parsed_rewrite(
        answer in document(), style in 0_u8..8, sizes in vec(1_usize..12, 1..20),
    ) {
        let text = text_of(&answer, style);
        let out = restored(&mut ModelNameRestorer::new("s\u{e9}\"", "A\\"), &cut(text.as_bytes(), &sizes)).concat();
        prop_assert_eq!(serde_json::from_slice::<Value>(&out).unwrap(), reference(&answer, "s\u{e9}\"", "A\\"));
        let never = restored(&mut ModelNameRestorer::new("nobody", "A"), &cut(text.as_bytes(), &sizes)).concat();
        prop_assert_eq!(never, text.into_bytes());
    }

    #[test]
    fn non_json_response_passes_unchanged(
        bytes in prop_oneof![
            vec(any::<u8>(), 0..80),
            vec(prop_oneof![
                Just("data:"), Just("\n"), Just("{"), Just("}"), Just("\"model\""), Just(":"), Just("\"serv"), Just("\\"),
                Just("["), Just(","), Just(" "), Just("\r"), Just("\""), Just("1"), Just("\"response\""),
            ], 0..40).prop_map(|parts| parts.concat().into_bytes()),
        ],
        sizes in vec(1_usize..9, 1..9),
    ) {
        let out = restored(&mut ModelNameRestorer::new("served", "asked"), &cut(&bytes, &sizes)).concat();
        prop_assert_eq!(out, bytes);
    }
}
