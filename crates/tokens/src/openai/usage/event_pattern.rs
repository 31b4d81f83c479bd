//! Pattern of the events of a response. Events differ mostly in their text. An event that equals an
//! earlier one except for the text between the same two quotes has the same fields and need not be
//! parsed.
//!
//! Correctness: the parsed fields depend on keys, numbers, the value of `type`, and on which texts
//! are empty. Up to the opening quote the bytes are equal, so a parser is in the same state: at the
//! value of a key other than `type`. A text without quotes, escapes and control characters ends at
//! the next quote, from where the bytes are equal again.

use memchr::memmem;

/// Keys of the texts that may differ, with the opening quote of the text.
const TEXT_KEYS: [&[u8]; 2] = [b"\"content\":\"", b"\"text\":\""];

/// Pattern of an event that has content, reports no usage and does not end the response.
#[derive(Debug, Default)]
pub(super) struct EventPattern {
    /// Bytes up to the text; empty if no event is recorded.
    before: Vec<u8>,
    after: Vec<u8>,
}

impl EventPattern {
    /// Records the pattern of an event. The caller has parsed it and checked these properties.
    pub(super) fn record(&mut self, json: &[u8]) {
        let Some(from) = TEXT_KEYS
            .iter()
            .find_map(|key| Some(memmem::find(json, key)? + key.len()))
        else {
            return;
        };
        let (before, rest) = json.split_at(from);
        let Some(len) = memchr::memchr(b'"', rest) else {
            return;
        };
        let (text, after) = rest.split_at(len);
        if !is_plain(text) {
            return;
        }
        self.before.clear();
        self.before.extend_from_slice(before);
        self.after.clear();
        self.after.extend_from_slice(after);
    }

    /// Returns true if an event matches the pattern.
    pub(super) fn matches(&self, json: &[u8]) -> bool {
        let text = json
            .strip_prefix(&*self.before)
            .and_then(|rest| rest.strip_suffix(&*self.after));
        !self.before.is_empty() && text.is_some_and(is_plain)
    }
}

/// Returns true for a text that is not empty and has no escapes.
fn is_plain(text: &[u8]) -> bool {
    let plain = |byte: &u8| *byte >= b' ' && *byte != b'"' && *byte != b'\\';
    !text.is_empty() && text.iter().all(plain) && std::str::from_utf8(text).is_ok()
}
