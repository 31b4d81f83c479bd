//! Changes fields of a request body and leaves every other byte as the client wrote it: reading a body and writing it
//! again would turn big integers into floats, order keys anew and touch what engines read and we do not know.

use serde_json::Value;

use super::scan::{end_of_text, end_of_value, says, skip_space};

/// How often a key may be there. An honest body has it once, and a long value in place of many short ones would be a body
/// far longer than the one that came.
const MOST_TIMES: usize = 16;

/// One field with another value. A key that is there several times is changed everywhere, because engines differ in which
/// they read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change<'a> {
    /// A top-level key.
    pub key: &'a str,
    /// The value, as JSON.
    pub json: &'a [u8],
    /// Where the key is missing.
    pub missing: Missing,
}

/// What becomes of a key that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// It is put first.
    Added,
    /// It stays away.
    Left,
}

impl<'a> Change<'a> {
    /// The field has this value.
    pub fn set(key: &'a str, json: &'a [u8]) -> Self {
        Self {
            key,
            json,
            missing: Missing::Added,
        }
    }

    /// The field has this value where it is there at all.
    pub fn replace(key: &'a str, json: &'a [u8]) -> Self {
        Self {
            key,
            json,
            missing: Missing::Left,
        }
    }
}

/// The body with another model; `None` where it is not a whole JSON object.
pub fn set_model(body: &[u8], model: &str) -> Option<Vec<u8>> {
    set_field(body, "model", Value::from(model).to_string().as_bytes())
}

/// The body with `json` under a top-level key; `None` as [`change`] says.
pub fn set_field(body: &[u8], key: &str, json: &[u8]) -> Option<Vec<u8>> {
    change(body, &[Change::set(key, json)])
}

/// The body with changed fields, each key at most once among `changes`; `None` where it is not a whole JSON object, or has
/// one of the keys absurdly often.
pub fn change(body: &[u8], changes: &[Change<'_>]) -> Option<Vec<u8>> {
    let Fields {
        first,
        empty,
        spans,
    } = fields(body, |name| {
        changes.iter().position(|change| says(name, change.key))
    })?;
    let times = |at: usize| spans.iter().filter(|span| span.of == at).count();
    if (0..changes.len()).any(|at| times(at) > MOST_TIMES) {
        return None;
    }
    let longer: usize = changes
        .iter()
        .map(|change| change.key.len() + change.json.len() + 8)
        .sum();
    let mut edited = Vec::with_capacity(body.len() + longer);
    edited.extend_from_slice(&body[..first]);
    let mut added = changes
        .iter()
        .enumerate()
        .filter(|(at, change)| change.missing == Missing::Added && times(*at) == 0);
    let mut any = false;
    for (_, change) in &mut added {
        edited.extend_from_slice(if any { b"," } else { b"" });
        edited.extend_from_slice(Value::from(change.key).to_string().as_bytes());
        edited.push(b':');
        edited.extend_from_slice(change.json);
        any = true;
    }
    edited.extend_from_slice(if any && !empty { b"," } else { b"" });
    let mut copied = first;
    for Span { of, start, end } in spans {
        edited.extend_from_slice(&body[copied..start]);
        edited.extend_from_slice(changes[of].json);
        copied = end;
    }
    edited.extend_from_slice(&body[copied..]);
    Some(edited)
}

/// The values under top-level keys, as they stand in the body: by the place of the key in `keys`, in the order of the body;
/// `None` where it is not a whole JSON object.
pub fn look<'b>(body: &'b [u8], keys: &[&str]) -> Option<Vec<(usize, &'b [u8])>> {
    let found = fields(body, |name| keys.iter().position(|key| says(name, key)))?;
    Some(
        found
            .spans
            .into_iter()
            .map(|Span { of, start, end }| (of, &body[start..end]))
            .collect(),
    )
}

/// What an edit needs to know of a body.
struct Fields {
    /// The place after the opening brace.
    first: usize,
    /// Whether the object has no fields.
    empty: bool,
    /// Where the values that were asked for begin and end.
    spans: Vec<Span>,
}

struct Span {
    /// Under which of the keys.
    of: usize,
    start: usize,
    end: usize,
}

fn fields(body: &[u8], wanted: impl Fn(&[u8]) -> Option<usize>) -> Option<Fields> {
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
        if let Some(of) = wanted(&body[named]) {
            spans.push(Span { of, start, end });
        }
        at = skip_space(body, end);
        match body.get(at)? {
            b',' => at = skip_space(body, at + 1),
            b'}' => more = false,
            _ => return None,
        }
    }
    // Whoever reads a body with something behind it may read something else than we did.
    (skip_space(body, at + 1) == body.len()).then_some(Fields {
        first,
        empty,
        spans,
    })
}

#[cfg(test)]
pub(in crate::openai) mod tests;
