//! Edits fields of a request body and leaves every other byte unchanged. Parsing and rewriting the
//! body would turn large integers into floats, reorder keys and change unknown fields that engines
//! read.

use std::ops::Range;

use serde_json::Value;

use super::body_encoding::decode_body;
use super::json_scan::{JsonBoundary, JsonScanner, ScanState, raw_text_equals, skip_space};

/// Maximum number of occurrences of a key. Real bodies have one. Replacing many short values with a
/// long one would inflate the body.
const MAX_KEY_REPEATS: usize = 16;

/// One field edit. All occurrences of a repeated key are changed, because engines differ in the one
/// that they read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldEdit<'a> {
    /// A top-level key.
    pub key: &'a str,
    /// New value as JSON.
    pub json: &'a [u8],
    /// True if a missing key is inserted as the first field.
    pub inserts_missing_key: bool,
}

impl<'a> FieldEdit<'a> {
    /// Creates an edit that sets the field and inserts it if it is missing.
    pub fn set(key: &'a str, json: &'a [u8]) -> Self {
        Self {
            key,
            json,
            inserts_missing_key: true,
        }
    }

    /// Creates an edit that replaces the field only if it is present.
    pub fn replace(key: &'a str, json: &'a [u8]) -> Self {
        Self {
            key,
            json,
            inserts_missing_key: false,
        }
    }
}

/// Sets the model of a body. Returns `None` if the body is not a complete JSON object.
pub fn set_model(body: &[u8], model: &str) -> Option<Vec<u8>> {
    set_field(body, "model", Value::from(model).to_string().as_bytes())
}

/// Sets a top-level field. Returns `None` under the conditions of [`apply_edits`].
pub fn set_field(body: &[u8], key: &str, json: &[u8]) -> Option<Vec<u8>> {
    apply_edits(body, &[FieldEdit::set(key, json)])
}

/// Applies field edits with distinct keys. The result is UTF-8. Returns `None` if the body is not a
/// complete JSON object or repeats a key more than [`MAX_KEY_REPEATS`] times.
pub fn apply_edits(body: &[u8], edits: &[FieldEdit<'_>]) -> Option<Vec<u8>> {
    let body = &decode_body(body).ok()?;
    let keys: Vec<_> = edits.iter().map(|edit| edit.key).collect();
    let ScannedFields {
        first_field,
        is_empty,
        values,
    } = scan_fields(body, &keys)?;
    let times = |at: usize| values.iter().filter(|(edit, _)| *edit == at).count();
    if (0..edits.len()).any(|at| times(at) > MAX_KEY_REPEATS) {
        return None;
    }
    let longer: usize = edits
        .iter()
        .map(|edit| edit.key.len() + edit.json.len() + 8)
        .sum();
    let mut edited = Vec::with_capacity(body.len() + longer);
    edited.extend_from_slice(&body[..first_field]);
    let mut added = edits
        .iter()
        .enumerate()
        .filter(|(at, edit)| edit.inserts_missing_key && times(*at) == 0);
    let mut any = false;
    for (_, edit) in &mut added {
        edited.extend_from_slice(if any { b"," } else { b"" });
        edited.extend_from_slice(Value::from(edit.key).to_string().as_bytes());
        edited.push(b':');
        edited.extend_from_slice(edit.json);
        any = true;
    }
    edited.extend_from_slice(if any && !is_empty { b"," } else { b"" });
    let mut copied = first_field;
    for (edit, value) in values {
        edited.extend_from_slice(&body[copied..value.start]);
        edited.extend_from_slice(edits[edit].json);
        copied = value.end;
    }
    edited.extend_from_slice(&body[copied..]);
    Some(edited)
}

/// Returns the raw values of top-level keys in body order, each with the index of its key in
/// `keys`. Returns `None` if the body is not a complete JSON object.
pub fn find_values<'b>(body: &'b [u8], keys: &[&str]) -> Option<Vec<(usize, &'b [u8])>> {
    let values = scan_fields(body, keys)?.values;
    let raw = values.into_iter().map(|(key, value)| (key, &body[value]));
    Some(raw.collect())
}

/// Returns the text at a dotted path in a JSON object, whose end may be missing. Of repeated keys,
/// the last one is used.
pub fn text_at_path(body: &[u8], path: &str) -> Option<String> {
    let steps: Vec<&str> = path.split('.').collect();
    let mut scanner = JsonScanner::new();
    let mut at = 0;
    let mut key = 0..0;
    let mut value_start = None;
    let mut text = None;
    loop {
        let depth = scanner.depth();
        let (scanned, boundary) = scanner.advance(&body[at..]);
        at += scanned;
        match boundary {
            Some(JsonBoundary::KeyBegin) => key.start = at - 1,
            Some(JsonBoundary::KeyEnd) => key.end = at,
            Some(JsonBoundary::ValueBegin) if depth == 0 => {}
            Some(JsonBoundary::ValueBegin) => {
                let is_step = raw_text_equals(&body[key.clone()], steps[depth - 1]);
                let is_last = depth == steps.len();
                if is_step {
                    text = None;
                    value_start = is_last.then_some(at - 1);
                }
                if !is_step || is_last || scanner.state() == ScanState::ListStart {
                    scanner.skip_value();
                }
            }
            Some(JsonBoundary::ValueEnd) => {
                if let Some(start) = value_start.take() {
                    text = serde_json::from_slice(&body[start..at]).ok();
                }
            }
            None => return text,
        }
    }
}

/// Fields of an object.
struct ScannedFields {
    /// Position after the opening brace.
    first_field: usize,
    /// True if the object has no fields.
    is_empty: bool,
    /// Index of each found key, and the bounds of its value.
    values: Vec<(usize, Range<usize>)>,
}

/// Finds the values of top-level keys.
fn scan_fields(body: &[u8], keys: &[&str]) -> Option<ScannedFields> {
    let mut values = Vec::new();
    let mut scanner = JsonScanner::new();
    let mut first_field = None;
    let mut key = 0..0;
    let mut value_start = 0;
    let mut at = 0;
    while scanner.state() != ScanState::Done {
        let (scanned, boundary) = scanner.advance(&body[at..]);
        at += scanned;
        match boundary? {
            JsonBoundary::KeyBegin => key.start = at - 1,
            JsonBoundary::KeyEnd => key.end = at,
            JsonBoundary::ValueBegin if first_field.is_none() => first_field = Some(at),
            JsonBoundary::ValueBegin => {
                value_start = at - 1;
                scanner.skip_value();
            }
            JsonBoundary::ValueEnd if scanner.state() == ScanState::Done => {}
            JsonBoundary::ValueEnd => {
                let name = &body[key.clone()];
                if let Some(key) = keys.iter().position(|key| raw_text_equals(name, key)) {
                    values.push((key, value_start..at));
                }
            }
        }
    }
    let first_field = first_field?;
    // A body with trailing data is rejected, because other parsers might read it differently.
    let is_complete = skip_space(body, at) == body.len();
    is_complete.then(|| ScannedFields {
        first_field,
        is_empty: body[skip_space(body, first_field)] == b'}',
        values,
    })
}

#[cfg(test)]
pub(crate) mod tests;
