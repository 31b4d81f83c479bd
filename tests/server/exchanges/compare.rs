//! Comparison of the expected with the actual values, in every field. In expected values, `<hex16>`
//! and `<hex32>` match random names, `<between 1 and 2 ms>` matches a measured time, and `<starts
//! with text>` matches a text with this beginning.

use serde_json::Value;

use crate::exchanges::wire;

/// Returns every difference with its path.
pub(crate) fn differences(expected: &Value, found: &Value) -> Vec<String> {
    let mut different = Vec::new();
    compare("", expected, found, &mut different);
    different
}

fn compare(place: &str, expected: &Value, found: &Value, different: &mut Vec<String>) {
    match (expected, found) {
        (Value::String(pattern), Value::String(text))
            if pattern.starts_with('<') && pattern.ends_with('>') =>
        {
            if !matches(pattern, text) {
                different.push(format!("{place}: {text:?} is not {pattern}"));
            }
        }
        (Value::Object(_), _) if is_written_bytes(expected) => {
            let expected = wire::canonical_bytes(&wire::bytes(expected));
            if expected != *found {
                different.push(format!(
                    "{place}: {} is not {}",
                    short(found),
                    short(&expected)
                ));
            }
        }
        (Value::Object(expected), Value::Object(found)) => {
            for (key, value) in expected {
                let place = format!("{place}/{key}");
                match found.get(key) {
                    Some(found) => compare(&place, value, found, different),
                    None => different.push(format!("{place}: missing, expected {}", short(value))),
                }
            }
            for (key, value) in found.iter().filter(|(key, _)| !expected.contains_key(*key)) {
                different.push(format!("{place}/{key}: unexpected {}", short(value)));
            }
        }
        (Value::Array(expected), Value::Array(found)) => {
            for (at, value) in expected.iter().enumerate() {
                let place = format!("{place}/{at}");
                match found.get(at) {
                    Some(found) => compare(&place, value, found, different),
                    None => different.push(format!("{place}: missing, expected {}", short(value))),
                }
            }
            for (at, value) in found.iter().enumerate().skip(expected.len()) {
                different.push(format!("{place}/{at}: unexpected {}", short(value)));
            }
        }
        (Value::Number(expected), Value::Number(found)) if expected.as_f64() == found.as_f64() => {}
        _ if expected == found => {}
        _ => different.push(format!(
            "{place}: {} is not {}",
            short(found),
            short(expected)
        )),
    }
}

fn matches(pattern: &str, text: &str) -> bool {
    let inner = &pattern[1..pattern.len() - 1];
    if let Some(beginning) = inner.strip_prefix("starts with ") {
        return text.starts_with(beginning);
    }
    if let Some(range) = inner
        .strip_prefix("between ")
        .and_then(|rest| rest.strip_suffix(" ms"))
    {
        let (least, most) = range.split_once(" and ").unwrap();
        let number = |text: &str| text.parse::<u64>().ok();
        let found = text.strip_suffix("ms").and_then(number);
        return found.is_some_and(|found| {
            (number(least).unwrap()..=number(most).unwrap()).contains(&found)
        });
    }
    let is_hex = |length| text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match inner {
        "hex16" => is_hex(16),
        "hex32" => is_hex(32),
        _ => panic!("unknown pattern: {pattern}"),
    }
}

fn is_written_bytes(value: &Value) -> bool {
    let Value::Object(fields) = value else {
        return false;
    };
    match fields.len() {
        1 => fields.get("hex").is_some_and(Value::is_string),
        2 => fields.contains_key("repeat") && fields.contains_key("times"),
        _ => false,
    }
}

fn short(value: &Value) -> String {
    let mut text = value.to_string();
    if text.chars().count() > 400 {
        text = format!(
            "{}... ({} characters)",
            text.chars().take(400).collect::<String>(),
            text.len()
        );
    }
    text
}
