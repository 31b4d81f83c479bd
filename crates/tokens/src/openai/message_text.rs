//! Text of a message, which is unescaped when it is first read. Most messages of a conversation are
//! never read, because their tokens are cached or because the model has no tokenizer.

use std::fmt;
use std::ops::Deref;
use std::sync::OnceLock;

use bytes::Bytes;
use memchr::{memchr, memchr2};

/// Text of a message. It may refer to the body from which it was read.
#[derive(Clone, Default)]
pub struct MessageText {
    /// The text as a string of the body, with quotes. Empty if `text` is set from the beginning.
    quoted: Bytes,
    text: OnceLock<String>,
}

impl MessageText {
    /// Creates a text from a valid JSON string.
    pub(super) fn from_quoted(quoted: Bytes) -> Self {
        Self {
            quoted,
            text: OnceLock::new(),
        }
    }

    /// Returns the text.
    pub(super) fn into_string(self) -> String {
        self.text
            .into_inner()
            .unwrap_or_else(|| unescape_bytes(&self.quoted))
    }

    /// Returns true if the text was unescaped or did not need it.
    #[cfg(test)]
    pub(crate) fn is_unescaped(&self) -> bool {
        self.text.get().is_some()
    }
}

impl Deref for MessageText {
    type Target = str;

    fn deref(&self) -> &str {
        self.text.get_or_init(|| unescape_bytes(&self.quoted))
    }
}

impl From<String> for MessageText {
    fn from(text: String) -> Self {
        Self {
            quoted: Bytes::new(),
            text: text.into(),
        }
    }
}

impl PartialEq for MessageText {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl fmt::Debug for MessageText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Returns the position after the closing quote of the string that opens at `quote`, if the string
/// is valid. Control characters are not checked.
pub(super) fn end_of_valid_string(bytes: &[u8], quote: usize) -> Option<usize> {
    if bytes.get(quote) != Some(&b'"') {
        return None;
    }
    let mut at = quote + 1;
    loop {
        at += memchr2(b'"', b'\\', bytes.get(at..)?)? + 1;
        if bytes[at - 1] == b'"' {
            return Some(at);
        }
        at += read_escape(&bytes[at..])?.1;
    }
}

/// Returns the text of a JSON string with its quotes, or `None` if it is invalid.
pub(super) fn unescape(quoted: &str) -> Option<String> {
    let mut rest = quoted.strip_prefix('"')?.strip_suffix('"')?;
    let mut text = String::with_capacity(rest.len());
    while let Some(found) = memchr(b'\\', rest.as_bytes()) {
        text.push_str(&rest[..found]);
        let escape = &rest[found + 1..];
        let (char, length) = read_escape(escape.as_bytes())?;
        text.push(char);
        rest = escape.get(length..)?;
    }
    text.push_str(rest);
    Some(text)
}

/// Returns the text of a valid JSON string.
fn unescape_bytes(quoted: &[u8]) -> String {
    let quoted = std::str::from_utf8(quoted).ok();
    quoted.and_then(unescape).unwrap_or_default()
}

/// Reads an escape without its backslash. Returns its character and its length in bytes.
fn read_escape(bytes: &[u8]) -> Option<(char, usize)> {
    let letter = *bytes.first()?;
    let char = match letter {
        b'n' => '\n',
        b'"' | b'\\' | b'/' => char::from(letter),
        b't' => '\t',
        b'r' => '\r',
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        _ => return read_code_point(bytes),
    };
    Some((char, 1))
}

/// Reads a code point in hexadecimal, which may be a pair of surrogates.
fn read_code_point(bytes: &[u8]) -> Option<(char, usize)> {
    let second = bytes.get(5..).and_then(|rest| rest.strip_prefix(b"\\"));
    let units = [read_unit(bytes)?, second.and_then(read_unit).unwrap_or(0)];
    let char = char::decode_utf16(units).next()?.ok()?;
    let length = if char.len_utf16() == 2 { 11 } else { 5 };
    Some((char, length))
}

/// Reads the letter `u` and four hexadecimal digits.
fn read_unit(bytes: &[u8]) -> Option<u16> {
    let digits = bytes.strip_prefix(b"u")?.get(..4)?;
    digits.iter().try_fold(0, |unit, digit| {
        let digit = char::from(*digit).to_digit(16)?;
        Some(unit << 4 | digit as u16)
    })
}
