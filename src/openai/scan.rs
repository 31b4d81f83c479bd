//! Steps over JSON that lies in a buffer, without reading it: where a text or a value ends, and whether a raw text says
//! something. No recursion, so that no depth of nesting can exhaust the stack.

use memchr::memchr2;

/// The first byte from `at` on that is not white space.
pub(super) fn skip_space(bytes: &[u8], at: usize) -> usize {
    let space = |byte: &&u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
    at + bytes[at..].iter().take_while(space).count()
}

/// Where the text that opens at `quote` has ended: the place after its closing quote.
pub(super) fn end_of_text(bytes: &[u8], quote: usize) -> Option<usize> {
    let mut at = quote + 1;
    loop {
        at += memchr2(b'"', b'\\', bytes.get(at..)?)?;
        if bytes[at] == b'"' {
            return Some(at + 1);
        }
        at += 2;
    }
}

/// Where the value that begins at `start` has ended. Brackets must match; what else stands inside is not judged.
pub(super) fn end_of_value(bytes: &[u8], start: usize) -> Option<usize> {
    match bytes.get(start)? {
        b'"' => end_of_text(bytes, start),
        b'{' | b'[' => end_of_nest(bytes, start),
        _ => {
            let part =
                |byte: &&u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
            let length = bytes[start..].iter().take_while(part).count();
            (length > 0).then_some(start + length)
        }
    }
}

fn end_of_nest(bytes: &[u8], start: usize) -> Option<usize> {
    let mut open = Vec::new();
    let mut at = start;
    loop {
        at += next_mark(bytes.get(at..)?)?;
        match bytes[at] {
            b'"' => {
                at = end_of_text(bytes, at)?;
                continue;
            }
            b'{' => open.push(b'}'),
            b'[' => open.push(b']'),
            close @ (b'}' | b']') if open.pop() != Some(close) => return None,
            _ => {}
        }
        at += 1;
        if open.is_empty() {
            return Some(at);
        }
    }
}

/// The next quote or bracket; rarely a control character, which counts as nothing. Blocks without any are passed over at
/// once, which is what makes lists of numbers cheap.
pub(super) fn next_mark(bytes: &[u8]) -> Option<usize> {
    // One bit is all that lies between the two kinds of brackets.
    let mark = |byte: &u8| matches!(byte | 0x20, b'"' | b'{' | b'}');
    let mut blocks = bytes.chunks(32).enumerate();
    let (nth, block) =
        blocks.find(|(_, block)| block.iter().fold(false, |found, byte| found | mark(byte)))?;
    block.iter().position(mark).map(|at| nth * 32 + at)
}

/// Whether a document has more than so many values, keys not counted.
pub(super) fn has_more_values(bytes: &[u8], most: usize) -> bool {
    let mut values = 1;
    let mut rest = bytes;
    loop {
        let quote = memchr::memchr(b'"', rest).unwrap_or(rest.len());
        values += rest[..quote]
            .iter()
            .filter(|byte| matches!(byte, b',' | b'{' | b'['))
            .count();
        if values > most {
            return true;
        }
        let Some(end) = end_of_text(rest, quote) else {
            return false;
        };
        rest = &rest[end..];
    }
}

/// Whether a raw text, with its quotes, says `text`; escapes count as what they stand for.
pub(super) fn says(raw: &[u8], text: &str) -> bool {
    if memchr::memchr(b'\\', raw).is_none() {
        return raw
            .strip_prefix(b"\"")
            .and_then(|raw| raw.strip_suffix(b"\""))
            == Some(text.as_bytes());
    }
    serde_json::from_slice::<String>(raw).is_ok_and(|said| said == text)
}
