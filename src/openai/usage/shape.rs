//! The events of one answer differ in little but what is said. An event that is like an earlier one, byte for byte but for the
//! text between the same two quotes, says the same of itself as that one did, and need not be parsed.
//!
//! Why that is so: what is told of an event depends on its keys, its numbers, the value of `type`, and on which texts are
//! empty. Up to the quote the bytes are the same, so a parser is in the same state: behind the quote that opens the value of
//! a key other than `type`. A text without quotes, escapes and control characters ends at the next quote, where the bytes
//! are the same again.

use memchr::memmem;

/// What stands before a text that may differ.
const KEYS: [&[u8]; 2] = [b"\"content\":\"", b"\"text\":\""];

/// An event that brought content, said nothing of usage and was not the last.
#[derive(Debug, Default)]
pub(super) struct Shape {
    /// Up to its text; empty while none is known.
    before: Vec<u8>,
    after: Vec<u8>,
}

impl Shape {
    /// Takes note of such an event.
    pub(super) fn learn(&mut self, json: &[u8]) {
        let Some(from) = KEYS
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

    /// Whether an event is like it.
    pub(super) fn fits(&self, json: &[u8]) -> bool {
        let text = json
            .strip_prefix(&*self.before)
            .and_then(|rest| rest.strip_suffix(&*self.after));
        !self.before.is_empty() && text.is_some_and(is_plain)
    }
}

/// Whether a text is written as it is, and there is one.
fn is_plain(text: &[u8]) -> bool {
    let plain = |byte: &u8| *byte >= b' ' && *byte != b'"' && *byte != b'\\';
    !text.is_empty() && text.iter().all(plain) && std::str::from_utf8(text).is_ok()
}
