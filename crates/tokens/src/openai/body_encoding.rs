//! Encoding of request bodies. Engines read bodies with Python's `json.loads`, which detects UTF-8,
//! UTF-16 and UTF-32, with and without a byte order mark.

use std::borrow::Cow;

use super::error::ParseError;

/// Byte order mark of UTF-8.
const UTF8_MARK: &[u8] = &[0xef, 0xbb, 0xbf];

/// Order of the bytes of a code unit.
#[derive(Clone, Copy)]
enum ByteOrder {
    Big,
    Little,
}

/// Encoding of a body, without its byte order mark.
enum BodyEncoding {
    Utf8,
    Utf16(ByteOrder),
    Utf32(ByteOrder),
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
        BodyEncoding::Utf16(order) => ("UTF-16", decode_utf16(body, order)),
        BodyEncoding::Utf32(order) => ("UTF-32", decode_utf32(body, order)),
    };
    text.map(|text| Cow::Owned(text.into_bytes()))
        .ok_or_else(|| ParseError::Json(format!("it is not {name}")))
}

/// Detects the encoding as Python does.
fn detect_encoding(body: &[u8]) -> (BodyEncoding, &[u8]) {
    use BodyEncoding::{Utf8, Utf16, Utf32};
    use ByteOrder::{Big, Little};
    match body {
        [0, 0, 0xfe, 0xff, rest @ ..] => (Utf32(Big), rest),
        [0xff, 0xfe, 0, 0, rest @ ..] => (Utf32(Little), rest),
        [0xfe, 0xff, rest @ ..] => (Utf16(Big), rest),
        [0xff, 0xfe, rest @ ..] => (Utf16(Little), rest),
        [0, 0, _, _, ..] => (Utf32(Big), body),
        [0, _, _, _, ..] => (Utf16(Big), body),
        [_, 0, 0, 0, ..] => (Utf32(Little), body),
        [_, 0, _, _, ..] => (Utf16(Little), body),
        _ => (Utf8, without_byte_order_mark(body)),
    }
}

fn decode_utf16(body: &[u8], order: ByteOrder) -> Option<String> {
    let (units, rest) = body.as_chunks::<2>();
    let units = units.iter().map(|unit| match order {
        ByteOrder::Big => u16::from_be_bytes(*unit),
        ByteOrder::Little => u16::from_le_bytes(*unit),
    });
    let text: Result<String, _> = char::decode_utf16(units).collect();
    text.ok().filter(|_| rest.is_empty())
}

fn decode_utf32(body: &[u8], order: ByteOrder) -> Option<String> {
    let (units, rest) = body.as_chunks::<4>();
    let mut units = units.iter().map(|unit| match order {
        ByteOrder::Big => u32::from_be_bytes(*unit),
        ByteOrder::Little => u32::from_le_bytes(*unit),
    });
    let text: Option<String> = units.try_fold(String::new(), |mut text, unit| {
        text.push(char::from_u32(unit)?);
        Some(text)
    });
    text.filter(|_| rest.is_empty())
}
