//! Encoding of request bodies. Engines read bodies with Python's `json.loads`, which detects UTF-8,
//! UTF-16 and UTF-32, with and without a byte order mark.

use std::borrow::Cow;

use super::error::ParseError;

/// Byte order mark of UTF-8.
const UTF8_MARK: &[u8] = &[0xef, 0xbb, 0xbf];

/// Encoding of a body, with the function that reads a code unit.
enum BodyEncoding {
    Utf8,
    Utf16(fn([u8; 2]) -> u16),
    Utf32(fn([u8; 4]) -> u32),
}

/// Removes the byte order mark of UTF-8.
pub(super) fn without_byte_order_mark(body: &[u8]) -> &[u8] {
    body.strip_prefix(UTF8_MARK).unwrap_or(body)
}

/// Converts a body to UTF-8 without a byte order mark. A body that is not UTF-16 or UTF-32 is not
/// validated. Surrogates without a partner are an error, because texts cannot contain them.
pub fn decode_body(body: &[u8]) -> Result<Cow<'_, [u8]>, ParseError> {
    let (encoding, body) = detect_encoding(body);
    let (name, text) = match encoding {
        BodyEncoding::Utf8 => return Ok(Cow::Borrowed(body)),
        BodyEncoding::Utf16(read) => ("UTF-16", decode_utf16(body, read)),
        BodyEncoding::Utf32(read) => ("UTF-32", decode_utf32(body, read)),
    };
    text.map(|text| Cow::Owned(text.into_bytes()))
        .ok_or_else(|| ParseError::Json(format!("it is not {name}")))
}

/// Detects the encoding as Python does.
fn detect_encoding(body: &[u8]) -> (BodyEncoding, &[u8]) {
    use BodyEncoding::{Utf8, Utf16, Utf32};
    match body {
        [0, 0, 0xfe, 0xff, rest @ ..] => (Utf32(u32::from_be_bytes), rest),
        [0xff, 0xfe, 0, 0, rest @ ..] => (Utf32(u32::from_le_bytes), rest),
        [0xfe, 0xff, rest @ ..] => (Utf16(u16::from_be_bytes), rest),
        [0xff, 0xfe, rest @ ..] => (Utf16(u16::from_le_bytes), rest),
        [0, 0, _, _, ..] => (Utf32(u32::from_be_bytes), body),
        [0, _, _, _, ..] => (Utf16(u16::from_be_bytes), body),
        [_, 0, 0, 0, ..] => (Utf32(u32::from_le_bytes), body),
        [_, 0, _, _, ..] => (Utf16(u16::from_le_bytes), body),
        _ => (Utf8, without_byte_order_mark(body)),
    }
}

fn decode_utf16(body: &[u8], read: fn([u8; 2]) -> u16) -> Option<String> {
    let (units, rest) = body.as_chunks::<2>();
    let text: Result<String, _> = char::decode_utf16(units.iter().copied().map(read)).collect();
    text.ok().filter(|_| rest.is_empty())
}

fn decode_utf32(body: &[u8], read: fn([u8; 4]) -> u32) -> Option<String> {
    let (units, rest) = body.as_chunks::<4>();
    let text: Option<String> = units
        .iter()
        .map(|unit| char::from_u32(read(*unit)))
        .collect();
    text.filter(|_| rest.is_empty())
}
