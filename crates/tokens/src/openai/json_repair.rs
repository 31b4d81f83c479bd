//! Repair of truncated request bodies. Envoy may send only the beginning of a body, or the rest may
//! not have arrived yet. The beginning of a prompt suffices for finding cached prefixes.
//!
//! The repair closes open strings and containers and drops incomplete values. The result is parsed
//! like a complete body.

use serde_json::Value;

use super::json_scan::{JsonBoundary, JsonScanner, ScanState, skip_space};

/// Maximum nesting that the parsers accept.
const MAX_DEPTH: usize = 127;

const LITERALS: [&[u8]; 3] = [b"true", b"false", b"null"];

/// The beginning of a body, closed to a complete document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairedJson {
    /// The closed document.
    pub json: Vec<u8>,
    /// Position of the truncation.
    pub cut: CutPoint,
    /// Containers around the truncation, outermost first.
    open: Vec<OpenContainer>,
    /// Length of the document up to the last complete value. The document is truncated there if the
    /// open string is dropped.
    complete_len: usize,
}

/// Position at which a body was truncated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CutPoint {
    /// The body is complete.
    Complete,
    /// Inside the string at this path. Its text up to the truncation is retained.
    InText(Vec<PathSegment>),
    /// Between values of the container at this path. The retained values are complete.
    BetweenValues(Vec<PathSegment>),
}

/// One segment of a path into a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathSegment {
    /// Key of an object.
    Key(String),
    /// Index in a list, from 0.
    Index(usize),
}

impl From<&str> for PathSegment {
    fn from(key: &str) -> Self {
        Self::Key(key.to_owned())
    }
}

impl From<usize> for PathSegment {
    fn from(index: usize) -> Self {
        Self::Index(index)
    }
}

/// An object or list that is still open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OpenContainer {
    /// Length of the document up to the last complete value before the container.
    complete_len_before: usize,
    position: ContainerPosition,
}

/// Position inside a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContainerPosition {
    /// In the field whose key has these bounds.
    Object(usize, usize),
    /// In the last of this many elements.
    List(usize),
}

/// Closes the open containers and strings at the end of `prefix`.
///
/// The text of an incomplete string is retained. An incomplete key, number or literal is dropped,
/// because more of it may follow. Returns `None` if `prefix` is not the beginning of a JSON object
/// or is nested too deeply.
pub fn repair(prefix: &[u8]) -> Option<RepairedJson> {
    let mut repairer = JsonRepairer {
        prefix,
        scanner: JsonScanner::new(),
        at: 0,
        key_start: 0,
        value_start: 0,
        complete_len: 0,
        open: Vec::new(),
    };
    let end = repairer.scan()?;
    Some(repairer.into_repaired(end))
}

struct JsonRepairer<'a> {
    prefix: &'a [u8],
    scanner: JsonScanner,
    at: usize,
    key_start: usize,
    value_start: usize,
    /// Length of the document up to the last complete value.
    complete_len: usize,
    open: Vec<OpenContainer>,
}

/// The end of the prefix.
#[derive(Clone, Copy)]
enum PrefixEnd {
    Complete,
    InText(usize),
    BetweenValues,
}

impl JsonRepairer<'_> {
    /// Scans to the end of the prefix.
    fn scan(&mut self) -> Option<PrefixEnd> {
        while self.scanner.state() != ScanState::Done {
            let (scanned, boundary) = self.scanner.advance(&self.prefix[self.at..]);
            self.at += scanned;
            match boundary {
                Some(JsonBoundary::KeyBegin) => self.key_start = self.at - 1,
                Some(JsonBoundary::KeyEnd) => {
                    let key = ContainerPosition::Object(self.key_start, self.at);
                    self.open.last_mut()?.position = key;
                }
                Some(JsonBoundary::ValueBegin) => self.begin_value()?,
                Some(JsonBoundary::ValueEnd) => {
                    self.open.truncate(self.scanner.depth());
                    self.complete_len = self.at;
                }
                None => return self.end_inside(),
            }
        }
        (skip_space(self.prefix, self.at) == self.prefix.len()).then_some(PrefixEnd::Complete)
    }

    fn begin_value(&mut self) -> Option<()> {
        self.value_start = self.at - 1;
        if let Some(open) = self.open.last_mut()
            && let ContainerPosition::List(begun) = &mut open.position
        {
            *begun += 1;
        }
        let position = match self.prefix[self.value_start] {
            b'{' => ContainerPosition::Object(0, 0),
            b'[' => ContainerPosition::List(0),
            _ => return Some(()),
        };
        if self.open.len() == MAX_DEPTH {
            return None;
        }
        self.open.push(OpenContainer {
            complete_len_before: self.complete_len,
            position,
        });
        self.complete_len = self.at;
        Some(())
    }

    /// Handles the end of a prefix that is not a complete document.
    fn end_inside(&mut self) -> Option<PrefixEnd> {
        match self.scanner.state() {
            ScanState::Start | ScanState::Invalid => return None,
            ScanState::InText => {
                let end = end_of_cut_text(self.prefix, self.value_start + 1);
                return Some(PrefixEnd::InText(end));
            }
            ScanState::InScalar => {
                let scalar = &self.prefix[self.value_start..];
                if LITERALS.contains(&scalar) {
                    self.complete_len = self.prefix.len();
                } else if !may_become_scalar(scalar) {
                    return None;
                }
            }
            _ => {}
        }
        Some(PrefixEnd::BetweenValues)
    }

    fn into_repaired(self, end: PrefixEnd) -> RepairedJson {
        let Self {
            prefix,
            complete_len,
            open,
            ..
        } = self;
        let steps = |count: usize| {
            open[..count]
                .iter()
                .map(|open| open.path_segment(prefix))
                .collect()
        };
        let (mut json, cut) = match end {
            PrefixEnd::Complete => (prefix.to_vec(), CutPoint::Complete),
            PrefixEnd::InText(end) => (
                [&prefix[..end], b"\""].concat(),
                CutPoint::InText(steps(open.len())),
            ),
            PrefixEnd::BetweenValues => (
                prefix[..complete_len].to_vec(),
                CutPoint::BetweenValues(steps(open.len() - 1)),
            ),
        };
        close_containers(&mut json, &open);
        RepairedJson {
            json,
            cut,
            open,
            complete_len,
        }
    }
}

impl RepairedJson {
    /// Removes the innermost open string or container, for parsers that require fields that may
    /// follow the truncation. Returns `None` if nothing is left to remove.
    pub fn drop_innermost(mut self) -> Option<Self> {
        match &mut self.cut {
            CutPoint::Complete => return None,
            CutPoint::InText(path) => {
                path.pop();
                self.cut = CutPoint::BetweenValues(std::mem::take(path));
            }
            CutPoint::BetweenValues(path) => {
                path.pop()?;
                self.complete_len = self.open.pop()?.complete_len_before;
            }
        }
        self.json.truncate(self.complete_len);
        close_containers(&mut self.json, &self.open);
        Some(self)
    }
}

impl OpenContainer {
    fn path_segment(&self, prefix: &[u8]) -> PathSegment {
        match self.position {
            ContainerPosition::List(begun) => PathSegment::Index(begun.saturating_sub(1)),
            ContainerPosition::Object(start, end) => {
                let raw = &prefix[start..end];
                let key = serde_json::from_slice::<Value>(raw)
                    .ok()
                    .and_then(|key| key.as_str().map(str::to_owned));
                PathSegment::Key(key.unwrap_or_else(|| String::from_utf8_lossy(raw).into_owned()))
            }
        }
    }
}

fn close_containers(json: &mut Vec<u8>, open: &[OpenContainer]) {
    json.extend(open.iter().rev().map(|open| match open.position {
        ContainerPosition::Object(..) => b'}',
        ContainerPosition::List(_) => b']',
    }));
}

/// Returns true if an incomplete scalar may become a number or literal.
fn may_become_scalar(scalar: &[u8]) -> bool {
    let digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
    let is_number = matches!(scalar.first(), Some(b'-' | b'0'..=b'9')) && scalar.iter().all(digit);
    is_number || LITERALS.iter().any(|literal| literal.starts_with(scalar))
}

/// Returns the position where an open string can be closed: before an incomplete escape or
/// character.
fn end_of_cut_text(prefix: &[u8], start: usize) -> usize {
    let mut at = start;
    while let Some(found) = memchr::memchr(b'\\', &prefix[at..]) {
        at += found;
        let length = escape_length(&prefix[at..]);
        if at + length > prefix.len() {
            return at;
        }
        at += length;
    }
    prefix.len() - incomplete_char_bytes(&prefix[at..])
}

/// Returns the length of the escape at the start of `escape`. A surrogate pair counts as one
/// escape.
fn escape_length(escape: &[u8]) -> usize {
    match escape {
        [
            _,
            b'u',
            b'd' | b'D',
            b'8' | b'9' | b'a' | b'A' | b'b' | b'B',
            ..,
        ] => 12,
        [_, b'u', ..] => 6,
        _ => 2,
    }
}

/// Returns the number of bytes of an incomplete character at the end of `text`.
fn incomplete_char_bytes(text: &[u8]) -> usize {
    let last = text
        .iter()
        .rev()
        .take(3)
        .position(|byte| byte & 0xc0 != 0x80)
        .map_or(0, |at| at + 1);
    let length = match text.len().checked_sub(last).and_then(|at| text.get(at)) {
        Some(0xc2..=0xdf) => 2,
        Some(0xe0..=0xef) => 3,
        Some(0xf0..=0xf4) => 4,
        _ => 0,
    };
    if last < length { last } else { 0 }
}

#[cfg(test)]
mod tests;
