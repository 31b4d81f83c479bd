//! Incremental scanner over one JSON object, and byte scans of JSON text. They do not use
//! recursion, so nesting cannot exhaust the stack.

use memchr::memchr2;

/// Maximum nesting. The scanner stores one byte per level.
const MAX_NESTING: usize = 1 << 20;

/// Maximum number of JSON values in a conversation and its tools; real requests have far fewer.
pub(super) const MAX_JSON_VALUES: usize = 1 << 17;

/// Boundary of a key or value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonBoundary {
    /// The previous byte was the opening quote of a key.
    KeyBegin,
    /// The previous byte was the closing quote of a key.
    KeyEnd,
    /// The previous byte was the first of a value.
    ValueBegin,
    /// The previous byte was the last of a value.
    ValueEnd,
}

/// Position of a [`JsonScanner`] in the grammar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanState {
    /// Before the document.
    Start,
    ObjectStart,
    BeforeKey,
    InKey,
    AfterKey,
    ListStart,
    BeforeValue,
    InText,
    InScalar,
    InSkipped,
    /// Inside a string inside a skipped value.
    InSkippedText,
    AfterValue,
    /// After the document.
    Done,
    /// The input is not a JSON object.
    Invalid,
}

/// Incremental scanner over one JSON object, which may arrive in arbitrary chunks.
///
/// Numbers, literals and escapes are not validated. In a skipped value, only brackets and strings
/// are validated.
#[derive(Debug)]
pub(super) struct JsonScanner {
    state: ScanState,
    /// Closing brackets of the open containers, outermost first.
    closing: Vec<u8>,
    /// Number of containers around the skipped value.
    skipped_depth: usize,
    /// True if the previous byte was a backslash.
    escaped: bool,
}

impl JsonScanner {
    pub(super) fn new() -> Self {
        Self {
            state: ScanState::Start,
            closing: Vec::new(),
            skipped_depth: 0,
            escaped: false,
        }
    }

    /// Resets the scanner for another document.
    pub(super) fn restart(&mut self) {
        self.state = ScanState::Start;
        self.closing.clear();
        self.escaped = false;
    }

    pub(super) fn state(&self) -> ScanState {
        self.state
    }

    /// Returns the number of open containers.
    pub(super) fn depth(&self) -> usize {
        self.closing.len()
    }

    /// Skips the value that has just begun. No boundaries inside it are reported.
    pub(super) fn skip_value(&mut self) {
        if matches!(self.state, ScanState::ObjectStart | ScanState::ListStart) {
            self.state = ScanState::InSkipped;
            self.skipped_depth = self.closing.len() - 1;
        }
    }

    /// Handles the end of a line. A string or key that is still open is invalid, because strings
    /// cannot contain raw line breaks.
    pub(super) fn end_line(&mut self) {
        match self.state {
            ScanState::InKey | ScanState::InText | ScanState::InSkippedText => {
                self.state = ScanState::Invalid;
            }
            ScanState::InScalar => self.state = ScanState::AfterValue,
            _ => {}
        }
    }

    /// Advances to the next boundary or to the end of `bytes`. Returns the number of scanned bytes.
    pub(super) fn advance(&mut self, bytes: &[u8]) -> (usize, Option<JsonBoundary>) {
        let mut at = 0;
        while at < bytes.len() {
            let (scanned, boundary) = match self.state {
                ScanState::Done | ScanState::Invalid => return (bytes.len(), None),
                ScanState::InKey | ScanState::InText | ScanState::InSkippedText => {
                    self.scan_text(&bytes[at..])
                }
                ScanState::InScalar => self.scan_scalar(&bytes[at..]),
                ScanState::InSkipped => self.scan_skipped(&bytes[at..]),
                _ => self.scan_structure(&bytes[at..]),
            };
            at += scanned;
            if boundary.is_some() {
                return (at, boundary);
            }
        }
        (at, None)
    }

    /// Scans separators up to the next key or the boundary of a value.
    fn scan_structure(&mut self, bytes: &[u8]) -> (usize, Option<JsonBoundary>) {
        let mut state = self.state;
        for (at, &byte) in bytes.iter().enumerate() {
            if is_space(byte) {
                continue;
            }
            state = match (state, byte) {
                (ScanState::AfterKey, b':') => ScanState::BeforeValue,
                (ScanState::AfterValue, b',') if self.closing.last() == Some(&b'}') => {
                    ScanState::BeforeKey
                }
                (ScanState::AfterValue, b',') => ScanState::BeforeValue,
                (ScanState::AfterValue | ScanState::ObjectStart, b'}')
                | (ScanState::AfterValue | ScanState::ListStart, b']') => {
                    return (at + 1, self.close_container(byte));
                }
                (ScanState::BeforeKey | ScanState::ObjectStart, b'"') => {
                    self.state = ScanState::InKey;
                    return (at + 1, Some(JsonBoundary::KeyBegin));
                }
                (ScanState::BeforeValue | ScanState::ListStart, _) | (ScanState::Start, b'{') => {
                    return (at + 1, self.begin_value(byte));
                }
                _ => {
                    self.state = ScanState::Invalid;
                    return (at + 1, None);
                }
            };
        }
        self.state = state;
        (bytes.len(), None)
    }

    fn begin_value(&mut self, byte: u8) -> Option<JsonBoundary> {
        self.state = match byte {
            b'"' => ScanState::InText,
            b'{' => ScanState::ObjectStart,
            b'[' => ScanState::ListStart,
            _ if is_scalar_byte(byte) => ScanState::InScalar,
            _ => ScanState::Invalid,
        };
        if matches!(byte, b'{' | b'[') {
            self.open_container(byte);
        }
        (self.state != ScanState::Invalid).then_some(JsonBoundary::ValueBegin)
    }

    fn open_container(&mut self, bracket: u8) {
        if self.closing.len() == MAX_NESTING {
            self.state = ScanState::Invalid;
        } else {
            self.closing.push(if bracket == b'{' { b'}' } else { b']' });
        }
    }

    fn close_container(&mut self, bracket: u8) -> Option<JsonBoundary> {
        if self.closing.pop() != Some(bracket) {
            self.state = ScanState::Invalid;
            return None;
        }
        let skips_on =
            self.state == ScanState::InSkipped && self.closing.len() > self.skipped_depth;
        (!skips_on).then(|| self.end_value())
    }

    fn end_value(&mut self) -> JsonBoundary {
        self.state = if self.closing.is_empty() {
            ScanState::Done
        } else {
            ScanState::AfterValue
        };
        JsonBoundary::ValueEnd
    }

    fn scan_text(&mut self, bytes: &[u8]) -> (usize, Option<JsonBoundary>) {
        let start = usize::from(std::mem::take(&mut self.escaped));
        let end = match find_text_end(bytes, start) {
            TextEnd::Closed(end) => end,
            TextEnd::Open { escaped } => {
                self.escaped = escaped;
                return (bytes.len(), None);
            }
        };
        let boundary = match self.state {
            ScanState::InKey => {
                self.state = ScanState::AfterKey;
                Some(JsonBoundary::KeyEnd)
            }
            ScanState::InSkippedText => {
                self.state = ScanState::InSkipped;
                None
            }
            _ => Some(self.end_value()),
        };
        (end, boundary)
    }

    fn scan_scalar(&mut self, bytes: &[u8]) -> (usize, Option<JsonBoundary>) {
        match bytes.iter().position(|byte| !is_scalar_byte(*byte)) {
            Some(end) => (end, Some(self.end_value())),
            None => (bytes.len(), None),
        }
    }

    fn scan_skipped(&mut self, bytes: &[u8]) -> (usize, Option<JsonBoundary>) {
        let mut at = 0;
        while let Some(found) = next_delimiter(&bytes[at..]) {
            let byte = bytes[at + found];
            at += found + 1;
            match byte {
                b'"' => match find_text_end(bytes, at) {
                    TextEnd::Closed(end) => at = end,
                    TextEnd::Open { escaped } => {
                        self.state = ScanState::InSkippedText;
                        self.escaped = escaped;
                        break;
                    }
                },
                b'{' | b'[' => self.open_container(byte),
                b'}' | b']' => {
                    let boundary = self.close_container(byte);
                    if boundary.is_some() {
                        return (at, boundary);
                    }
                }
                _ => {}
            }
            if self.state == ScanState::Invalid {
                break;
            }
        }
        (bytes.len(), None)
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

/// Returns true for a byte of a number or literal.
fn is_scalar_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.')
}

/// Returns the first position from `at` that is not white space.
pub(super) fn skip_space(bytes: &[u8], at: usize) -> usize {
    at + bytes[at..]
        .iter()
        .take_while(|byte| is_space(**byte))
        .count()
}

/// Returns the position after the closing quote of the string that opens at `quote`.
pub(super) fn end_of_text(bytes: &[u8], quote: usize) -> Option<usize> {
    match find_text_end(bytes, quote + 1) {
        TextEnd::Closed(end) => Some(end),
        TextEnd::Open { .. } => None,
    }
}

/// End of the content of a string.
enum TextEnd {
    /// Position after the closing quote.
    Closed(usize),
    /// The string continues, and its next byte may be escaped.
    Open { escaped: bool },
}

fn find_text_end(bytes: &[u8], start: usize) -> TextEnd {
    let mut at = start;
    loop {
        match memchr2(b'"', b'\\', bytes.get(at..).unwrap_or_default()) {
            None => {
                return TextEnd::Open {
                    escaped: at > bytes.len(),
                };
            }
            Some(found) if bytes[at + found] == b'"' => return TextEnd::Closed(at + found + 1),
            Some(found) => at += found + 2,
        }
    }
}

/// Returns the position of the next quote or bracket. It may also be that of a control character,
/// which callers ignore. Blocks without delimiters are skipped as a whole, which makes lists of
/// numbers cheap.
fn next_delimiter(bytes: &[u8]) -> Option<usize> {
    // The two kinds of brackets differ in one bit.
    let mark = |byte: &u8| matches!(byte | 0x20, b'"' | b'{' | b'}');
    let mut blocks = bytes.chunks(32).enumerate();
    let (nth, block) =
        blocks.find(|(_, block)| block.iter().fold(false, |found, byte| found | mark(byte)))?;
    block.iter().position(mark).map(|at| nth * 32 + at)
}

/// Returns the position after the value that begins at `at`. Only strings and the depth of brackets
/// are checked.
pub(super) fn end_of_value(bytes: &[u8], at: usize) -> Option<usize> {
    match bytes.get(at)? {
        b'"' => end_of_text(bytes, at),
        b'{' | b'[' => end_of_container(bytes, at),
        _ => {
            let scalar = bytes[at..].iter().take_while(|byte| is_scalar_byte(**byte));
            Some(at + scalar.count())
        }
    }
}

fn end_of_container(bytes: &[u8], start: usize) -> Option<usize> {
    let mut at = start;
    let mut depth = 0_usize;
    loop {
        at += next_delimiter(bytes.get(at..)?)?;
        match bytes[at] {
            b'"' => {
                at = end_of_text(bytes, at)?;
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            _ => {}
        }
        at += 1;
        if depth == 0 {
            return Some(at);
        }
    }
}

/// Returns true if a document has more values than warmroute reads. Keys are not counted.
pub(super) fn has_too_many_values(bytes: &[u8]) -> bool {
    // The separators inside strings are counted as well, so this is an upper bound. Unlike the
    // search for the ends of strings, it reads vectors of bytes.
    if count_separators(bytes) < MAX_JSON_VALUES {
        return false;
    }
    count_values_to(bytes, MAX_JSON_VALUES) > MAX_JSON_VALUES
}

/// Returns the number of values of a document. Keys are not counted.
pub(super) fn count_values(bytes: &[u8]) -> usize {
    count_values_to(bytes, usize::MAX)
}

/// Counts values until there are more than `max`.
fn count_values_to(bytes: &[u8], max: usize) -> usize {
    let mut values = 1;
    let mut rest = bytes;
    loop {
        let quote = memchr::memchr(b'"', rest).unwrap_or(rest.len());
        values += rest[..quote]
            .iter()
            .filter(|byte| is_separator(**byte))
            .count();
        if values > max {
            return values;
        }
        let Some(end) = end_of_text(rest, quote) else {
            return values;
        };
        rest = &rest[end..];
    }
}

/// Returns an upper bound on the number of values after the first.
pub(super) fn count_separators(bytes: &[u8]) -> usize {
    // Sums of single bytes are vectorized. They do not overflow in a block of this length.
    let count_in_block = |block: &[u8]| {
        let sum: u8 = block.iter().map(|byte| u8::from(is_separator(*byte))).sum();
        usize::from(sum)
    };
    bytes.chunks(192).map(count_in_block).sum()
}

/// Returns true for a byte that begins another value, outside of strings.
fn is_separator(byte: u8) -> bool {
    matches!(byte, b',' | b'{' | b'[')
}

/// Returns true if a raw string with quotes equals `text` after decoding its escapes.
pub(super) fn raw_text_equals(raw: &[u8], text: &str) -> bool {
    if memchr::memchr(b'\\', raw).is_none() {
        return raw
            .strip_prefix(b"\"")
            .and_then(|raw| raw.strip_suffix(b"\""))
            == Some(text.as_bytes());
    }
    serde_json::from_slice::<String>(raw).is_ok_and(|decoded| decoded == text)
}
