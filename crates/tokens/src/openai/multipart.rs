//! Multipart forms (`multipart/form-data`), which are used for audio and image uploads. Only the
//! field `model` is read, and no other content is copied. The form may be truncated. The model is
//! found if its part is complete.
//!
//! The crates `multer`, `multra` and `mpart-async` are not used, because they parse asynchronous
//! streams and copy the body into their own buffer. Forms may contain files of many megabytes.

use memchr::memmem;

/// Maximum length of a part's header in bytes.
const MAX_PART_HEADER_BYTES: usize = 4096;
/// Maximum length of the `model` field in bytes.
const MAX_MODEL_VALUE_BYTES: usize = 1024;
/// Maximum number of parts that are read.
const MAX_PARTS: usize = 1024;

/// Returns the part boundary of a `content-type` value.
pub fn multipart_boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    // RFC 2046 limits a boundary to 70 characters.
    header_parameter(parameters, "boundary").filter(|boundary| (1..=70).contains(&boundary.len()))
}

/// Returns the value of the field `model`.
pub(super) fn multipart_model(boundary: &str, body: &[u8]) -> Option<String> {
    let line = format!("\r\n--{boundary}");
    let separator = memmem::Finder::new(&line);
    // If the form has no preamble, no line break precedes the first boundary.
    let mut rest = match body.strip_prefix(&line.as_bytes()[2..]) {
        Some(rest) => rest,
        None => &body[separator.find(body)? + line.len()..],
    };
    for _ in 0..MAX_PARTS {
        let padding = rest
            .iter()
            .take_while(|byte| matches!(byte, b' ' | b'\t'))
            .count();
        // The form ends if anything else follows, in particular `--`.
        let part = rest[padding..].strip_prefix(b"\r\n")?;
        let window = &part[..part.len().min(MAX_PART_HEADER_BYTES)];
        let head = memmem::find(window, b"\r\n\r\n")?;
        let content = &part[head + 4..];
        if is_model_field(&part[..head]) {
            let value = &content[..separator
                .find(&content[..content.len().min(MAX_MODEL_VALUE_BYTES + line.len())])?];
            return std::str::from_utf8(value).ok().map(str::to_owned);
        }
        // The boundary of an empty part directly follows its header.
        let next = separator.find(&part[head + 2..])?;
        rest = &part[head + 2 + next + line.len()..];
    }
    None
}

/// Returns true if a part header is that of the field `model`.
fn is_model_field(head: &[u8]) -> bool {
    let Ok(head) = std::str::from_utf8(head) else {
        return false;
    };
    head.split("\r\n").any(|line| {
        let Some((name, value)) = line.split_once(':') else {
            return false;
        };
        name.trim().eq_ignore_ascii_case("content-disposition")
            && value.split_once(';').is_some_and(|(_, parameters)| {
                header_parameter(parameters, "name").as_deref() == Some("model")
                    && header_parameter(parameters, "filename").is_none()
            })
    })
}

/// Returns a parameter that follows the `;` of a header value. Quoted values may contain any
/// character.
fn header_parameter(mut rest: &str, wanted: &str) -> Option<String> {
    loop {
        let (name, after) = rest.split_once('=')?;
        // Parameters without a value are skipped.
        let name = name.rsplit(';').next().unwrap_or(name).trim();
        let (value, after) = parse_parameter_value(after.trim_start());
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        rest = after.split_once(';').map_or("", |(_, rest)| rest);
    }
}

/// Splits a parameter value from the text after it.
fn parse_parameter_value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(';').unwrap_or(text.len());
        return (text[..end].trim().to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => value.extend(chars.next().map(|(_, escaped)| escaped)),
            c => value.push(c),
        }
    }
    (value, "")
}
