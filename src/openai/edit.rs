//! Changes one field of a request body and leaves every other byte as the client wrote it: reading a body and writing it
//! again would turn big integers into floats, order keys anew and touch what engines read and we do not know.

use serde_json::Value;

use super::scan::{end_of_text, end_of_value, says, skip_space};

/// How often a key may be there. An honest body has it once, and a long value in place of many short ones would be a body
/// far longer than the one that came.
const MOST_TIMES: usize = 16;

/// The body with another model; `None` where it is not a whole JSON object.
pub fn set_model(body: &[u8], model: &str) -> Option<Vec<u8>> {
    set_field(body, "model", Value::from(model).to_string().as_bytes())
}

/// The body with `json` under a top-level key; `None` where it is not a whole JSON object,
/// or has the key absurdly often. A key that is there several times
/// is changed everywhere, because engines differ in which they read; one that is missing is put first.
pub fn set_field(body: &[u8], key: &str, json: &[u8]) -> Option<Vec<u8>> {
    let Fields { first, empty, spans } = fields(body, key)?;
    if spans.len() > MOST_TIMES {
        return None;
    }
    let mut edited = Vec::with_capacity(body.len() + json.len() + key.len() + 8);
    let mut copied = 0;
    if spans.is_empty() {
        edited.extend_from_slice(&body[..first]);
        edited.extend_from_slice(Value::from(key).to_string().as_bytes());
        edited.push(b':');
        edited.extend_from_slice(json);
        edited.extend_from_slice(if empty { b"" } else { b"," });
        copied = first;
    }
    for (start, end) in spans {
        edited.extend_from_slice(&body[copied..start]);
        edited.extend_from_slice(json);
        copied = end;
    }
    edited.extend_from_slice(&body[copied..]);
    Some(edited)
}

/// What an edit needs to know of a body.
struct Fields {
    /// The place after the opening brace.
    first: usize,
    /// Whether the object has no fields.
    empty: bool,
    /// Where the values under the key begin and end.
    spans: Vec<(usize, usize)>,
}

fn fields(body: &[u8], key: &str) -> Option<Fields> {
    let open = skip_space(body, 0);
    if body.get(open) != Some(&b'{') {
        return None;
    }
    let first = open + 1;
    let mut spans = Vec::new();
    let mut at = skip_space(body, first);
    let empty = body.get(at) == Some(&b'}');
    let mut more = !empty;
    while more {
        if body.get(at) != Some(&b'"') {
            return None;
        }
        let named = at..end_of_text(body, at)?;
        at = skip_space(body, named.end);
        if body.get(at) != Some(&b':') {
            return None;
        }
        let start = skip_space(body, at + 1);
        let end = end_of_value(body, start)?;
        if says(&body[named], key) {
            spans.push((start, end));
        }
        at = skip_space(body, end);
        match body.get(at)? {
            b',' => at = skip_space(body, at + 1),
            b'}' => more = false,
            _ => return None,
        }
    }
    // Whoever reads a body with something behind it may read something else than we did.
    (skip_space(body, at + 1) == body.len()).then_some(Fields { first, empty, spans })
}

#[cfg(test)]
pub(in crate::openai) mod tests;
