use serde_json::json;

use super::*;

fn at(path: &[Step]) -> Vec<Step> {
    path.to_vec()
}

fn key(name: &str) -> Step {
    name.into()
}

#[test]
fn what_is_open_is_closed_and_named() {
    let text = |path: &[Step]| Cut::Text(at(path));
    let between = |path: &[Step]| Cut::Between(at(path));
    let message = [key("messages"), 0.into(), key("content")];
    let part = [
        key("messages"),
        0.into(),
        key("content"),
        0.into(),
        key("text"),
    ];
    let cases: Vec<(&str, &str, Cut)> = vec![
        (" {", " {}", between(&[])),
        ("{\"pro", "{}", between(&[])),
        ("{\"prompt\"", "{}", between(&[])),
        ("{\"prompt\" :", "{}", between(&[])),
        (
            "{\"prompt\": \"",
            "{\"prompt\": \"\"}",
            text(&[key("prompt")]),
        ),
        (
            "{\"prompt\":\"a b",
            "{\"prompt\":\"a b\"}",
            text(&[key("prompt")]),
        ),
        (
            "{\"prompt\":\"a\\",
            "{\"prompt\":\"a\"}",
            text(&[key("prompt")]),
        ),
        (
            "{\"prompt\":\"a\\\\",
            "{\"prompt\":\"a\\\\\"}",
            text(&[key("prompt")]),
        ),
        (
            "{\"prompt\":\"a\\u00e",
            "{\"prompt\":\"a\"}",
            text(&[key("prompt")]),
        ),
        (
            "{\"prompt\":\"a\\u00e9",
            "{\"prompt\":\"a\\u00e9\"}",
            text(&[key("prompt")]),
        ),
        (
            "{\"prompt\":\"a\\ud83d",
            "{\"prompt\":\"a\"}",
            text(&[key("prompt")]),
        ),
        (
            "{\"prompt\":\"a\\uD83D\\ude0",
            "{\"prompt\":\"a\"}",
            text(&[key("prompt")]),
        ),
        (
            "{\"prompt\":\"a\\ud83d\\ude00",
            "{\"prompt\":\"a\\ud83d\\ude00\"}",
            text(&[key("prompt")]),
        ),
        (
            "{\"prompt\":[\"a\",\"b",
            "{\"prompt\":[\"a\",\"b\"]}",
            text(&[key("prompt"), 1.into()]),
        ),
        (
            "{\"prompt\":[12,3",
            "{\"prompt\":[12]}",
            between(&[key("prompt")]),
        ),
        (
            "{\"prompt\":[12,3 ",
            "{\"prompt\":[12,3]}",
            between(&[key("prompt")]),
        ),
        (
            "{\"prompt\":[[1,2],[3,4",
            "{\"prompt\":[[1,2],[3]]}",
            between(&[key("prompt"), 1.into()]),
        ),
        ("{\"a\":tru", "{}", between(&[])),
        ("{\"a\":true", "{\"a\":true}", between(&[])),
        ("{\"a\":nul", "{}", between(&[])),
        ("{\"a\":1,", "{\"a\":1}", between(&[])),
        ("{\"a\":1, \"b\":-", "{\"a\":1}", between(&[])),
        (
            "{\"k\\u0065y\":{\"x\":\"",
            "{\"k\\u0065y\":{\"x\":\"\"}}",
            text(&[key("key"), key("x")]),
        ),
        (
            "{\"messages\":[{\"content\":\"h",
            "{\"messages\":[{\"content\":\"h\"}]}",
            text(&message),
        ),
        (
            "{\"messages\":[{\"content\":[{\"text\":\"h",
            "{\"messages\":[{\"content\":[{\"text\":\"h\"}]}]}",
            text(&part),
        ),
        (
            "{\"messages\":[{\"content\":\"h\"},{",
            "{\"messages\":[{\"content\":\"h\"},{}]}",
            between(&[key("messages"), 1.into()]),
        ),
        (" {\"a\":[]} \n", " {\"a\":[]} \n", Cut::Nowhere),
        ("{}", "{}", Cut::Nowhere),
    ];
    for (prefix, json, cut) in cases {
        let mended = mend(prefix.as_bytes()).unwrap_or_else(|| panic!("{prefix}"));
        assert_eq!(
            (String::from_utf8_lossy(&mended.json).as_ref(), &mended.cut),
            (json, &cut),
            "{prefix}"
        );
    }
    for character in ["\u{e9}", "\u{4e2d}", "\u{1f600}"] {
        for length in 0..character.len() {
            let prefix = [b"{\"prompt\":\"a\\n", &character.as_bytes()[..length]].concat();
            assert_eq!(
                mend(&prefix).unwrap().json,
                b"{\"prompt\":\"a\\n\"}",
                "{character} {length}"
            );
        }
    }
}

#[test]
fn what_is_no_beginning_of_an_object_is_not_mended() {
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
        assert_eq!(mend(prefix.as_bytes()), None, "{prefix}");
    }
    assert_eq!(mend(&vec![b'['; 1 << 20]), None);
    let mended = mend(&deep.as_bytes()[..deep.len() - 1]).unwrap();
    assert!(
        serde_json::from_slice::<Value>(&mended.json).is_ok(),
        "as deep as the readers go"
    );
}

#[test]
fn what_is_open_can_be_dropped_step_by_step() {
    let prefix = br#"{"model":"m","messages":[{"role":"user","content":"a"},{"content":"b"#;
    let mut mended = mend(prefix);
    let mut seen = Vec::new();
    while let Some(now) = mended {
        seen.push((
            String::from_utf8(now.json.clone()).unwrap(),
            now.cut.clone(),
        ));
        mended = now.shorter();
    }
    let whole = r#"{"model":"m","messages":[{"role":"user","content":"a"}"#;
    let messages = key("messages");
    let expected = [
        (
            format!(r#"{whole},{{"content":"b"}}]}}"#),
            Cut::Text(vec![messages.clone(), 1.into(), key("content")]),
        ),
        (
            format!("{whole},{{}}]}}"),
            Cut::Between(vec![messages.clone(), 1.into()]),
        ),
        (format!("{whole}]}}"), Cut::Between(vec![messages])),
        (r#"{"model":"m"}"#.to_owned(), Cut::Between(vec![])),
    ];
    assert_eq!(seen, expected);
    assert_eq!(mend(b"{}").unwrap().shorter(), None);
}

/// Whether `part` is what one may know of `whole` from its beginning: equal, but for the last entry on each level, which may
/// be a beginning itself; of texts any beginning, of objects and lists the first entries, of anything else nothing.
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

fn value_at<'v>(value: &'v Value, path: &[Step]) -> Option<&'v Value> {
    path.iter().try_fold(value, |value, step| match step {
        Step::Key(key) => value.get(key),
        Step::Index(index) => value.get(index),
    })
}

/// Bytes of what is known, as a measure that grows.
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
fn wherever_a_body_is_cut_its_beginning_is_read() {
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
            let mended =
                mend(&body.as_bytes()[..cut]).unwrap_or_else(|| panic!("{}", &body[..cut]));
            let part: Value = serde_json::from_slice(&mended.json).unwrap_or_else(|error| {
                panic!("{error}: {}", String::from_utf8_lossy(&mended.json))
            });
            assert!(begins(&part, &whole), "{part} of {whole}");
            assert!(
                size(&part) >= known,
                "less is known after more bytes: {part}"
            );
            known = size(&part);
            match &mended.cut {
                Cut::Text(path) => assert!(
                    value_at(&part, path).is_some_and(Value::is_string),
                    "{path:?} in {part}"
                ),
                Cut::Between(path) => {
                    assert!(value_at(&part, path).is_some_and(|v| v.is_array() || v.is_object()))
                }
                Cut::Nowhere => panic!("{cut} of {}", body.len()),
            }
            let mut next = mended.shorter();
            while let Some(shorter) = next {
                assert!(begins(
                    &serde_json::from_slice(&shorter.json).unwrap(),
                    &whole
                ));
                next = shorter.shorter();
            }
        }
        let mended = mend(body.as_bytes()).unwrap();
        assert_eq!((mended.json, mended.cut), (body.into_bytes(), Cut::Nowhere));
    }
}

mod any {
    use proptest::prelude::*;

    use super::*;
    use crate::openai::edit::tests::any_json;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_beginning_of_any_body_is_read(value in any_json(), cut in any::<proptest::sample::Index>(), pretty: bool) {
            let whole = json!({"a": value, "b": [value]});
            let text = if pretty { serde_json::to_string_pretty(&whole).unwrap() } else { whole.to_string() };
            let prefix = &text.as_bytes()[..cut.index(text.len()).max(1)];
            let part: Value = serde_json::from_slice(&mend(prefix).unwrap().json).unwrap();
            prop_assert!(begins(&part, &whole), "{} of {}", part, whole);
        }

        #[test]
        fn no_bytes_make_mending_panic(
            rest in prop_oneof![
                proptest::collection::vec(any::<u8>(), 0..40),
                "[{}\\[\\]\":,a1tn\\\\u ]{0,40}".prop_map(String::into_bytes),
            ],
        ) {
            let mut mended = mend(&[b"{\"a\":", &rest[..]].concat());
            while let Some(now) = mended {
                mended = now.shorter();
            }
        }
    }
}
