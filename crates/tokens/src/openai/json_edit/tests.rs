use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use warmroute_property_tests::property_config;

use super::*;

#[test]
fn only_the_value_changes() {
    let cases = [
        (r#"{"model":"a","x":1}"#, r#"{"model":"new","x":1}"#),
        (
            "\r\n { \"x\" : 1 ,\t\"model\" : \"a\" } \n",
            "\r\n { \"x\" : 1 ,\t\"model\" : \"new\" } \n",
        ),
        (
            r#"{"model":{"a":["}"]},"n":12345678901234567890123,"f":1.50}"#,
            r#"{"model":"new","n":12345678901234567890123,"f":1.50}"#,
        ),
        (r#"{"model":null}"#, r#"{"model":"new"}"#),
        (r#"{"model":-1.5E+3 }"#, r#"{"model":"new" }"#),
        (
            r#"{"\u006dod\u0065l":"a\"","é":"é"}"#,
            r#"{"\u006dod\u0065l":"new","é":"é"}"#,
        ),
        (
            r#"{"model":"a","model":"b","MODEL":"c"}"#,
            r#"{"model":"new","model":"new","MODEL":"c"}"#,
        ),
        (
            r#"{"x":{"model":"a"},"y":["model"],"z":"\"model\":"}"#,
            r#"{"model":"new","x":{"model":"a"},"y":["model"],"z":"\"model\":"}"#,
        ),
        (r#" { "x":1}"#, r#" {"model":"new", "x":1}"#),
        ("{}", r#"{"model":"new"}"#),
        (" { } ", r#" {"model":"new" } "#),
    ];
    for (body, expected) in cases {
        let edited = set_model(body.as_bytes(), "new").unwrap();
        assert_eq!(String::from_utf8(edited).unwrap(), expected, "{body}");
    }
    let edited = set_field(b"{\"a\":1}", "k\"", b"[1, 2]").unwrap();
    assert_eq!(edited, br#"{"k\"":[1, 2],"a":1}"#);
    assert_eq!(
        set_model(b"{}", "q\"\\\n").unwrap(),
        br#"{"model":"q\"\\\n"}"#
    );
}

#[test]
fn repeated_key_above_limit_rejects_edit() {
    let body = |times: usize| format!("{{{}\"x\":1}}", "\"model\":0,".repeat(times));
    assert!(set_model(body(16).as_bytes(), "m").is_some());
    assert!(set_model(body(17).as_bytes(), "m").is_none());
}

#[test]
fn edited_body_is_utf8_without_mark() {
    let text = "{\"a\": \"é\", \"model\": \"x\"}";
    let utf16: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let marked = format!("\u{feff}{text}");
    for body in [marked.as_bytes(), &utf16] {
        let edited = set_model(body, "m").unwrap();
        assert_eq!(edited, text.replace("\"x\"", "\"m\"").into_bytes());
    }
}

#[test]
fn incomplete_object_is_not_edited() {
    let deep = format!("{{\"a\":{}", "[".repeat(1_000_000));
    let bodies = [
        "",
        " ",
        "[]",
        "null",
        "\"{}\"",
        "{",
        "{\"",
        "{\"model",
        "{\"model\"",
        "{\"model\":",
        "{\"model\":\"a",
        "{\"model\":\"a\"",
        "{\"model\":\"a\",",
        "{\"model\":\"a\",}",
        "{,}",
        "{\"model\" \"a\"}",
        "{\"model\":}",
        "{model:\"a\"}",
        "{\"a\":1 2}",
        "{\"a\":[}",
        "{\"a\":[}]}",
        "{\"a\":{]}}",
        "{\"a\":1}}",
        "{\"a\":1} {}",
        "{\"a\":\"\\\"}",
        "{\"a\":#}",
        &deep,
    ];
    for body in bodies {
        assert_eq!(
            set_model(body.as_bytes(), "m"),
            None,
            "{}",
            &body[..body.len().min(40)]
        );
    }
    let open = "[".repeat(1_000_000);
    let close = "]".repeat(1_000_000);
    let nested = format!("{{\"a\":{open}{close},\"model\":1}}");
    assert_eq!(
        set_model(nested.as_bytes(), "m").unwrap(),
        nested.replace(":1}", ":\"m\"}").into_bytes()
    );
}

/// Generates small JSON values of every kind.
pub(crate) fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        // Numbers that do not change when they are printed and parsed.
        any::<i32>().prop_map(|number| Value::from(f64::from(number) / 4.0)),
        any_text().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            vec((any_text(), inner), 0..4).prop_map(|fields| Value::from(Map::from_iter(fields))),
        ]
    })
}

/// Generates texts with structural characters and characters that need escapes.
pub(crate) fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("model".to_owned()),
        Just("\"model\":\"served\"".to_owned()),
        "[a-c{}\\[\\]\":, \\\\\n\u{e9}\u{4e2d}\u{1f600}]{0,12}",
    ]
}

/// Returns an object as text with white space between its parts, and the bounds of the values of
/// the key `model`.
fn object_text(
    fields: &[(String, Value)],
    spaces: &[&'static str],
) -> (String, Vec<(usize, usize)>) {
    let mut space = spaces.iter().cycle().copied();
    let mut next = || space.next().unwrap_or_default();
    let mut text = format!("{}{{{}", next(), next());
    let mut spans = Vec::new();
    for (nth, (key, value)) in fields.iter().enumerate() {
        text += if nth > 0 { "," } else { "" };
        text += next();
        // Some keys are written with escapes.
        let escaped = next().len() == 1 && key == "model";
        text += &if escaped {
            "\"m\\u006fdel\"".to_owned()
        } else {
            json!(key).to_string()
        };
        text += &format!("{}:{}", next(), next());
        let start = text.len();
        text += &if nth % 2 == 0 {
            value.to_string()
        } else {
            serde_json::to_string_pretty(value).unwrap()
        };
        if key == "model" {
            spans.push((start, text.len()));
        }
        text += next();
    }
    (text + "}" + next(), spans)
}

proptest! {
    #![proptest_config(property_config(10_000))]

    #[test]
    fn edit_changes_only_its_field(
        fields in vec((any_text(), any_json()), 0..5),
        spaces in vec(prop_oneof![Just(""), Just(" "), Just("\r\n\t ")], 1..9),
        name in any_text(),
    ) {
        let (body, spans) = object_text(&fields, &spaces);
        let edited = String::from_utf8(set_model(body.as_bytes(), &name).unwrap()).unwrap();
        let json = json!(name).to_string();
        let mut expected = body.clone();
        for (start, end) in spans.iter().rev() {
            expected.replace_range(*start..*end, &json);
        }
        let mut value: Map<String, Value> = serde_json::from_str(&body).unwrap();
        value.insert("model".to_owned(), Value::from(name));
        if spans.is_empty() {
            let first = body.find('{').unwrap() + 1;
            expected.insert_str(first, &format!("\"model\":{json}{}", if fields.is_empty() { "" } else { "," }));
        }
        prop_assert_eq!(&edited, &expected);
        prop_assert_eq!(serde_json::from_str::<Map<String, Value>>(&edited).unwrap(), value);
    }

    #[test]
    fn edit_of_any_body_never_panics(
        body in prop_oneof![vec(any::<u8>(), 0..60), "[{}\\[\\]\":,a1\\\\ ]{0,40}".prop_map(String::into_bytes)],
    ) {
        let edited = set_model(&body, "m");
        if serde_json::from_slice::<Map<String, Value>>(&body).is_ok() {
            prop_assert!(edited.is_some());
        }
    }
}

#[test]
fn several_edits_apply_with_insert_or_skip() {
    let changes = [
        FieldEdit::set("max_tokens", b"1"),
        FieldEdit::set("room", b"7"),
        FieldEdit::replace("stream_options", b"null"),
    ];
    let cases = [
        (
            r#"{"stream_options":{"a":[1]},"max_tokens":900,"x":1.50}"#,
            r#"{"room":7,"stream_options":null,"max_tokens":1,"x":1.50}"#,
        ),
        (r#"{ "x":1}"#, r#"{"max_tokens":1,"room":7, "x":1}"#),
        ("{}", r#"{"max_tokens":1,"room":7}"#),
        (
            r#"{"room":1,"max_tokens":2}"#,
            r#"{"room":7,"max_tokens":1}"#,
        ),
    ];
    for (body, expected) in cases {
        assert_eq!(
            String::from_utf8(apply_edits(body.as_bytes(), &changes).unwrap()).unwrap(),
            expected,
            "{body}"
        );
    }
    assert_eq!(apply_edits(b"{\"x\":1}", &[]).unwrap(), b"{\"x\":1}");
}

#[test]
fn values_are_found_in_body_order() {
    let body = br#"{"n": 2, "a":{"n":3}, "echo" :true,"\u006e":[4]}"#;
    assert_eq!(
        find_values(body, &["echo", "n"]).unwrap(),
        [(1, &b"2"[..]), (0, b"true"), (1, b"[4]")]
    );
    assert_eq!(find_values(b"[1]", &["n"]), None);
}

#[test]
fn text_is_found_by_path_only() {
    let body = r#"{"x":[{"a":"no"}],"a":{"b":"old"},"\u0061":{"c":{},"b":"new","n":7},"t":"top","e\"s":"q"}"#;
    let cases = [
        ("t", Some("top")),
        ("a.b", Some("new")),
        ("a.n", None),
        ("a.c", None),
        ("a", None),
        ("a.b.c", None),
        ("x.a", None),
        ("none", None),
        ("", None),
        ("e\"s", Some("q")),
    ];
    for (path, expected) in cases {
        assert_eq!(
            text_at_path(body.as_bytes(), path).as_deref(),
            expected,
            "{path}"
        );
    }
    for bad in [
        &b"\xff"[..],
        b"",
        b"[]",
        br#"{"t":"to"#,
        br#"{"t":"top","t":"to"#,
    ] {
        assert_eq!(text_at_path(bad, "t"), None);
    }
    for incomplete in [&br#"{"t":"top""#[..], br#"{"t":"top","a":[{"t"#] {
        assert_eq!(text_at_path(incomplete, "t").as_deref(), Some("top"));
    }
}
