//! Forms (`multipart/form-data`), as audio and images are sent: of all their parts only the field `model` is read, and
//! nothing is copied. A form may be cut off anywhere; then the model counts if it came before the end.

use memchr::memmem;

/// Longest head of a part that is looked at.
const LONGEST_HEAD: usize = 4096;
/// Longest name of a model.
const LONGEST_MODEL: usize = 1024;
/// Most parts that are looked at.
const MOST_PARTS: usize = 1024;

/// The boundary between the parts, from a `content-type`.
pub fn boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    // RFC 2046: up to 70 characters.
    parameter(parameters, "boundary").filter(|boundary| (1..=70).contains(&boundary.len()))
}

/// The model that a form names.
pub(super) fn model(boundary: &str, body: &[u8]) -> Option<String> {
    let line = format!("\r\n--{boundary}");
    let separator = memmem::Finder::new(&line);
    // The first boundary has no line before it, unless there is a preamble.
    let mut rest = match body.strip_prefix(&line.as_bytes()[2..]) {
        Some(rest) => rest,
        None => &body[separator.find(body)? + line.len()..],
    };
    for _ in 0..MOST_PARTS {
        let padding = rest
            .iter()
            .take_while(|byte| matches!(byte, b' ' | b'\t'))
            .count();
        // Anything else, above all `--`, ends the form.
        let part = rest[padding..].strip_prefix(b"\r\n")?;
        let window = &part[..part.len().min(LONGEST_HEAD)];
        let head = memmem::find(window, b"\r\n\r\n")?;
        let content = &part[head + 4..];
        if is_model(&part[..head]) {
            let value = &content
                [..separator.find(&content[..content.len().min(LONGEST_MODEL + line.len())])?];
            return std::str::from_utf8(value).ok().map(str::to_owned);
        }
        // A part without content has the boundary right after its head.
        let next = separator.find(&part[head + 2..])?;
        rest = &part[head + 2 + next + line.len()..];
    }
    None
}

/// Whether a part is the field `model`, by its head.
fn is_model(head: &[u8]) -> bool {
    let Ok(head) = std::str::from_utf8(head) else {
        return false;
    };
    head.split("\r\n").any(|line| {
        let Some((name, value)) = line.split_once(':') else {
            return false;
        };
        name.trim().eq_ignore_ascii_case("content-disposition")
            && value.split_once(';').is_some_and(|(_, parameters)| {
                parameter(parameters, "name").as_deref() == Some("model")
                    && parameter(parameters, "filename").is_none()
            })
    })
}

/// A parameter after the `;` of a header's value; values may be quoted, and then hold any character.
fn parameter(mut rest: &str, wanted: &str) -> Option<String> {
    loop {
        let (name, after) = rest.split_once('=')?;
        // Parameters without a value are passed over.
        let name = name.rsplit(';').next().unwrap_or(name).trim();
        let (value, after) = value(after.trim_start());
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        rest = after.split_once(';').map_or("", |(_, rest)| rest);
    }
}

/// A value and what comes after it.
fn value(text: &str) -> (String, &str) {
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
