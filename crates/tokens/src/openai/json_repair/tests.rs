use serde_json::json;

use super::*;

fn at(path: &[PathSegment]) -> Vec<PathSegment> {
    path.to_vec()
}

fn key(name: &str) -> PathSegment {
    name.into()
}

fn in_text(path: &[PathSegment]) -> CutPoint {
    CutPoint::InText(at(path))
}

fn between_values(path: &[PathSegment]) -> CutPoint {
    CutPoint::BetweenValues(at(path))
}

/// Checks the repaired JSON and the cut of each prefix.
fn assert_repaired(cases: Vec<(&str, &str, CutPoint)>) {
    for (prefix, json, cut) in cases {
        let repaired = repair(prefix.as_bytes()).unwrap_or_else(|| panic!("{prefix}"));
        assert_eq!(
            (
                String::from_utf8_lossy(&repaired.json).as_ref(),
                &repaired.cut
            ),
            (json, &cut),
            "{prefix}"
        );
    }
}

#[test]
fn open_values_are_removed_or_closed() {
    assert_repaired(vec![
        (" {", " {}", between_values(&[])),
        ("{\"pro", "{}", between_values(&[])),
        ("{\"prompt\"", "{}", between_values(&[])),
        ("{\"prompt\" :", "{}", between_values(&[])),
        ("{\"a\":tru", "{}", between_values(&[])),
        ("{\"a\":true", "{\"a\":true}", between_values(&[])),
        ("{\"a\":nul", "{}", between_values(&[])),
        ("{\"a\":1,", "{\"a\":1}", between_values(&[])),
        ("{\"a\":1, \"b\":-", "{\"a\":1}", between_values(&[])),
        (" {\"a\":[]} \n", " {\"a\":[]} \n", CutPoint::Complete),
        ("{}", "{}", CutPoint::Complete),
    ]);
}

#[test]
fn open_prompt_texts_are_closed() {
    let prompt = || in_text(&[key("prompt")]);
    assert_repaired(vec![
        ("{\"prompt\": \"", "{\"prompt\": \"\"}", prompt()),
        ("{\"prompt\":\"a b", "{\"prompt\":\"a b\"}", prompt()),
        ("{\"prompt\":\"a\\", "{\"prompt\":\"a\"}", prompt()),
        ("{\"prompt\":\"a\\\\", "{\"prompt\":\"a\\\\\"}", prompt()),
        ("{\"prompt\":\"a\\u00e", "{\"prompt\":\"a\"}", prompt()),
        (
            "{\"prompt\":\"a\\u00e9",
            "{\"prompt\":\"a\\u00e9\"}",
            prompt(),
        ),
        ("{\"prompt\":\"a\\ud83d", "{\"prompt\":\"a\"}", prompt()),
        (
            "{\"prompt\":\"a\\uD83D\\ude0",
            "{\"prompt\":\"a\"}",
            prompt(),
        ),
        (
            "{\"prompt\":\"a\\ud83d\\ude00",
            "{\"prompt\":\"a\\ud83d\\ude00\"}",
            prompt(),
        ),
        (
            "{\"prompt\":[\"a\",\"b",
            "{\"prompt\":[\"a\",\"b\"]}",
            in_text(&[key("prompt"), 1.into()]),
        ),
        (
            "{\"prompt\":[12,3",
            "{\"prompt\":[12]}",
            between_values(&[key("prompt")]),
        ),
        (
            "{\"prompt\":[12,3 ",
            "{\"prompt\":[12,3]}",
            between_values(&[key("prompt")]),
        ),
        (
            "{\"prompt\":[[1,2],[3,4",
            "{\"prompt\":[[1,2],[3]]}",
            between_values(&[key("prompt"), 1.into()]),
        ),
    ]);
}

#[test]
fn open_nested_texts_are_closed() {
    let message = [key("messages"), 0.into(), key("content")];
    let part = [
        key("messages"),
        0.into(),
        key("content"),
        0.into(),
        key("text"),
    ];
    assert_repaired(vec![
        (
            "{\"k\\u0065y\":{\"x\":\"",
            "{\"k\\u0065y\":{\"x\":\"\"}}",
            in_text(&[key("key"), key("x")]),
        ),
        (
            "{\"messages\":[{\"content\":\"h",
            "{\"messages\":[{\"content\":\"h\"}]}",
            in_text(&message),
        ),
        (
            "{\"messages\":[{\"content\":[{\"text\":\"h",
            "{\"messages\":[{\"content\":[{\"text\":\"h\"}]}]}",
            in_text(&part),
        ),
        (
            "{\"messages\":[{\"content\":\"h\"},{",
            "{\"messages\":[{\"content\":\"h\"},{}]}",
            between_values(&[key("messages"), 1.into()]),
        ),
    ]);
}

#[test]
fn incomplete_characters_are_removed() {
    for character in ["\u{e9}", "\u{4e2d}", "\u{1f600}"] {
        for length in 0..character.len() {
            let prefix = [b"{\"prompt\":\"a\\n", &character.as_bytes()[..length]].concat();
            assert_eq!(
                repair(&prefix).unwrap().json,
                b"{\"prompt\":\"a\\n\"}",
                "{character} {length}"
            );
        }
    }
}

#[test]
fn prefix_of_non_object_is_not_repaired() {
    let deep = format!("{{\"a\":{}", "[".repeat(127));
    let prefixes = [
        "",
        " ",
        "[",
        "\"a",
        "1",
        "tru",
        "{]",
        "{}}",
        "{} x",
        "{,",
        "{\"a\",",
        "{\"a\"}",
        "{\"a\":1 2",
        "{\"a\":,",
        "{\"a\":}",
        "{\"a\":1,}",
        "{\"a\":[1,]",
        "{\"a\":[}",
        "{\"a\":trux",
        "{\"a\":truex",
        "{\"a\":1x",
        "{a",
        "{\"a\":#",
        &deep,
    ];
    for prefix in prefixes {
        assert_eq!(repair(prefix.as_bytes()), None, "{prefix}");
    }
    assert_eq!(repair(&vec![b'['; 1 << 20]), None);
    let repaired = repair(&deep.as_bytes()[..deep.len() - 1]).unwrap();
    assert!(
        serde_json::from_slice::<Value>(&repaired.json).is_ok(),
        "the maximum nesting of the parsers"
    );
}

#[test]
fn open_containers_are_dropped_innermost_first() {
    let prefix = br#"{"model":"m","messages":[{"role":"user","content":"a"},{"content":"b"#;
    let mut repaired = repair(prefix);
    let mut seen = Vec::new();
    while let Some(now) = repaired {
        seen.push((
            String::from_utf8(now.json.clone()).unwrap(),
            now.cut.clone(),
        ));
        repaired = now.drop_innermost();
    }
    let whole = r#"{"model":"m","messages":[{"role":"user","content":"a"}"#;
    let messages = key("messages");
    let expected = [
        (
            format!(r#"{whole},{{"content":"b"}}]}}"#),
            CutPoint::InText(vec![messages.clone(), 1.into(), key("content")]),
        ),
        (
            format!("{whole},{{}}]}}"),
            CutPoint::BetweenValues(vec![messages.clone(), 1.into()]),
        ),
        (
            format!("{whole}]}}"),
            CutPoint::BetweenValues(vec![messages]),
        ),
        (
            r#"{"model":"m"}"#.to_owned(),
            CutPoint::BetweenValues(vec![]),
        ),
    ];
    assert_eq!(seen, expected);
    assert_eq!(repair(b"{}").unwrap().drop_innermost(), None);
}

/// Returns true if `part` is a value that a prefix of `whole` may contain. The last entry on each
/// level may be incomplete: a text may be a prefix, and an object or list may have only the first
/// entries. All other values are equal.
fn begins(part: &Value, whole: &Value) -> bool {
    match (part, whole) {
        (Value::String(part), Value::String(whole)) => whole.starts_with(part),
        (Value::Array(part), Value::Array(whole)) => {
            let last = part.len().saturating_sub(1);
            part.len() <= whole.len()
                && part
                    .iter()
                    .zip(whole)
                    .enumerate()
                    .all(|(at, (part, whole))| {
                        if at == last {
                            begins(part, whole)
                        } else {
                            part == whole
                        }
                    })
        }
        (Value::Object(part), Value::Object(whole)) => {
            let last = part.len().saturating_sub(1);
            part.len() <= whole.len()
                && part
                    .iter()
                    .zip(whole)
                    .enumerate()
                    .all(|(at, ((key, part), (name, whole)))| {
                        key == name
                            && if at == last {
                                begins(part, whole)
                            } else {
                                part == whole
                            }
                    })
        }
        _ => part == whole,
    }
}

fn value_at<'v>(value: &'v Value, path: &[PathSegment]) -> Option<&'v Value> {
    path.iter().try_fold(value, |value, step| match step {
        PathSegment::Key(key) => value.get(key),
        PathSegment::Index(index) => value.get(index),
    })
}

/// Returns a measure of the known part of a value. It must not decrease when more of the body is
/// known.
fn size(value: &Value) -> usize {
    match value {
        Value::String(text) => 1 + text.len(),
        Value::Array(list) => 1 + list.iter().map(size).sum::<usize>(),
        Value::Object(fields) => {
            1 + fields
                .iter()
                .map(|(key, value)| key.len() + size(value))
                .sum::<usize>()
        }
        _ => 1,
    }
}

#[test]
fn body_prefix_is_read_at_every_cut() {
    let chat = json!({
        "model": "m", "stream": true, "temperature": 0.75, "stop": null,
        "messages": [
            {"role": "system", "content": "You \"are\" \\ a \u{4e2d}\u{1f600}\n"},
            {"role": "user", "content": [{"type": "text", "text": "h\u{e9}"}, {"type": "image_url", "image_url": {"url": "u"}}]},
            {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\":[1,2]}"}}]},
            {"content": "x", "role": "tool"},
        ],
        "tools": [{"type": "function", "function": {"parameters": {"required": [], "x": {}}}}], "max_tokens": 100,
    });
    let escaped = r#"{"prompt":["a\ud83d\ude00b\u00e9\/","\\\""],"n":-1.5e+10,"b":[false,true,null,[[1,22],[]]] , "s":""}"#;
    let corpus = [
        chat.to_string(),
        serde_json::to_string_pretty(&chat).unwrap(),
        escaped.to_owned(),
        json!({"input": "text", "prompt": [[1, 23, 456], [7]]}).to_string(),
    ];
    for body in corpus {
        let whole: Value = serde_json::from_str(&body).unwrap();
        let mut known = 0;
        for cut in 1..body.len() {
            let repaired =
                repair(&body.as_bytes()[..cut]).unwrap_or_else(|| panic!("{}", &body[..cut]));
            let part: Value = serde_json::from_slice(&repaired.json).unwrap_or_else(|error| {
                panic!("{error}: {}", String::from_utf8_lossy(&repaired.json))
            });
            assert!(begins(&part, &whole), "{part} of {whole}");
            assert!(
                size(&part) >= known,
                "a longer prefix has less content: {part}"
            );
            known = size(&part);
            match &repaired.cut {
                CutPoint::InText(path) => assert!(
                    value_at(&part, path).is_some_and(Value::is_string),
                    "{path:?} in {part}"
                ),
                CutPoint::BetweenValues(path) => {
                    assert!(value_at(&part, path).is_some_and(|v| v.is_array() || v.is_object()))
                }
                CutPoint::Complete => panic!("{cut} of {}", body.len()),
            }
            let mut next = repaired.drop_innermost();
            while let Some(shorter) = next {
                assert!(begins(
                    &serde_json::from_slice(&shorter.json).unwrap(),
                    &whole
                ));
                next = shorter.drop_innermost();
            }
        }
        let repaired = repair(body.as_bytes()).unwrap();
        assert_eq!(
            (repaired.json, repaired.cut),
            (body.into_bytes(), CutPoint::Complete)
        );
    }
}

mod any {
    use proptest::prelude::*;
    use warmroute_property_tests::property_config;

    use super::*;
    use crate::openai::json_edit::tests::any_json;

    proptest! {
        #![proptest_config(property_config(2000))]

        #[test]
        fn prefix_of_any_body_is_repaired(value in any_json(), cut in any::<proptest::sample::Index>(), pretty: bool) {
            let whole = json!({"a": value, "b": [value]});
            let text = if pretty { serde_json::to_string_pretty(&whole).unwrap() } else { whole.to_string() };
            let prefix = &text.as_bytes()[..cut.index(text.len()).max(1)];
            let part: Value = serde_json::from_slice(&repair(prefix).unwrap().json).unwrap();
            prop_assert!(begins(&part, &whole), "{} of {}", part, whole);
        }

        #[test]
        fn repairing_any_bytes_never_panics(
            rest in prop_oneof![
                proptest::collection::vec(any::<u8>(), 0..40),
                "[{}\\[\\]\":,a1tn\\\\u ]{0,40}".prop_map(String::into_bytes),
            ],
        ) {
            let mut repaired = repair(&[b"{\"a\":", &rest[..]].concat());
            while let Some(now) = repaired {
                repaired = now.drop_innermost();
            }
        }
    }
}
