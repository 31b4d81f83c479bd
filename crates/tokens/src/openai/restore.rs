//! Restores the requested model name in responses of a model that is served under another name.
//!
//! The response is one document or a stream of events, and arrives in arbitrary chunks. The chunks
//! are forwarded at once, except for a value that may still equal the served name. Tokens are
//! therefore not delayed.

use std::borrow::Cow;

use memchr::{memchr, memchr2};
use serde_json::Value;

use super::json_scan::raw_text_equals;
use super::json_stream::{JsonStreamScanner, ValueBoundary, WantedPaths};

/// Paths of the model name: chat, completions, embeddings and complete responses; events of the
/// Responses API; the first event of the Messages API.
const MODEL_PATHS: WantedPaths = &[&["model"], &["response", "model"], &["message", "model"]];

/// Prefix of an event line with response data.
const DATA_FIELD: &[u8] = b"data:";

/// Rewrites the model name of one response.
#[derive(Debug)]
pub struct ModelNameRestorer {
    served_name: String,
    /// Requested name as JSON.
    requested_json: Vec<u8>,
    scanner: JsonStreamScanner,
    line: RestoreLine,
    /// Beginning of a value that may equal the served name.
    held: Vec<u8>,
    /// True if the scanner is inside a value that may equal the served name.
    is_holding: bool,
}

/// Kind of the current line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RestoreLine {
    /// The framing of the response is not known yet.
    Unknown,
    /// The response is one document.
    Document,
    /// This many bytes match [`DATA_FIELD`].
    FieldName(usize),
    /// The line carries response data.
    Data,
    /// Any other line.
    Other,
    /// The previous line ended with a carriage return, so a line feed belongs to it.
    AfterCarriageReturn,
}

/// A chunk and its rewritten output.
struct ChunkRewrite<'a> {
    chunk: &'a [u8],
    copied: usize,
    /// Start of the held value.
    value_start: usize,
    out: Vec<u8>,
}

impl ModelNameRestorer {
    /// Creates a rewriter that replaces the name `served` with `requested`.
    pub fn new(served: &str, requested: &str) -> Self {
        Self {
            served_name: served.to_owned(),
            requested_json: Value::from(requested).to_string().into_bytes(),
            scanner: JsonStreamScanner::new(MODEL_PATHS),
            line: RestoreLine::Unknown,
            held: Vec::new(),
            is_holding: false,
        }
    }

    /// Processes the next chunk and returns the bytes to forward. They are borrowed if unchanged.
    pub fn push<'a>(&mut self, chunk: &'a [u8]) -> Cow<'a, [u8]> {
        let mut rewrite = ChunkRewrite {
            chunk,
            copied: 0,
            value_start: 0,
            out: Vec::new(),
        };
        let mut at = 0;
        while at < chunk.len() {
            at = match self.line {
                RestoreLine::Unknown => self.detect_framing(chunk, at),
                RestoreLine::Document => self.scan_document(&mut rewrite, at, chunk.len()),
                RestoreLine::Data => {
                    let end =
                        memchr2(b'\n', b'\r', &chunk[at..]).map_or(chunk.len(), |found| at + found);
                    let at = self.scan_document(&mut rewrite, at, end);
                    if at < chunk.len() && at == end {
                        self.end_line(&mut rewrite, at)
                    } else {
                        at
                    }
                }
                RestoreLine::Other => match memchr2(b'\n', b'\r', &chunk[at..]) {
                    Some(found) => self.end_line(&mut rewrite, at + found),
                    None => chunk.len(),
                },
                RestoreLine::FieldName(_) | RestoreLine::AfterCarriageReturn => {
                    self.scan_line_start(&mut rewrite, at)
                }
            };
        }
        if self.is_holding {
            self.hold_partial_value(&mut rewrite);
        }
        rewrite.into_output()
    }

    /// Ends the response and returns the bytes still held back.
    pub fn finish(&mut self) -> Vec<u8> {
        self.is_holding = false;
        std::mem::take(&mut self.held)
    }

    /// Detects whether the response consists of event lines.
    fn detect_framing(&mut self, chunk: &[u8], at: usize) -> usize {
        match chunk[at] {
            b' ' | b'\t' | b'\n' | b'\r' => return at + 1,
            b'{' => self.line = RestoreLine::Document,
            _ => self.line = RestoreLine::FieldName(0),
        }
        at
    }

    fn scan_line_start(&mut self, rewrite: &mut ChunkRewrite<'_>, at: usize) -> usize {
        let byte = rewrite.chunk[at];
        let matched = match self.line {
            RestoreLine::AfterCarriageReturn if byte == b'\n' => {
                self.line = RestoreLine::FieldName(0);
                return at + 1;
            }
            RestoreLine::FieldName(matched) => matched,
            _ => 0,
        };
        if byte == DATA_FIELD[matched] {
            let whole = matched + 1 == DATA_FIELD.len();
            self.line = if whole {
                RestoreLine::Data
            } else {
                RestoreLine::FieldName(matched + 1)
            };
            if whole && self.scanner.is_done() {
                self.scanner.restart();
            }
            return at + 1;
        }
        if matches!(byte, b'\n' | b'\r') {
            if matched == 0 {
                // An empty line ends the event.
                self.release_held(rewrite);
                self.scanner.restart();
            }
            return self.end_line(rewrite, at);
        }
        self.line = RestoreLine::Other;
        at
    }

    /// Ends a line and returns the position after it.
    fn end_line(&mut self, rewrite: &mut ChunkRewrite<'_>, at: usize) -> usize {
        if self.line == RestoreLine::Data {
            self.release_held(rewrite);
            self.scanner.end_line();
        }
        self.line = if rewrite.chunk[at] == b'\r' {
            RestoreLine::AfterCarriageReturn
        } else {
            RestoreLine::FieldName(0)
        };
        at + 1
    }

    /// Scans document bytes up to `end` or the next value boundary.
    fn scan_document(&mut self, rewrite: &mut ChunkRewrite<'_>, at: usize, end: usize) -> usize {
        let (walked, mark) = self.scanner.advance(&rewrite.chunk[at..end]);
        let at = at + walked;
        match mark {
            Some(ValueBoundary::Begin) if rewrite.chunk[at - 1] == b'"' => {
                self.is_holding = true;
                rewrite.value_start = at - 1;
            }
            Some(ValueBoundary::End) if self.is_holding => self.end_held_value(rewrite, at),
            _ => {}
        }
        at
    }

    /// Ends the held value and replaces it if it equals the served name.
    fn end_held_value(&mut self, rewrite: &mut ChunkRewrite<'_>, end: usize) {
        self.is_holding = false;
        let raw = &rewrite.chunk[rewrite.value_start..end];
        let is_served = if self.held.is_empty() {
            raw_text_equals(raw, &self.served_name)
        } else {
            raw_text_equals(&[&self.held, raw].concat(), &self.served_name)
        };
        if is_served {
            self.held.clear();
            rewrite.replace(end, &self.requested_json);
        } else {
            rewrite.out.append(&mut self.held);
        }
    }

    /// Forwards the held bytes unchanged.
    fn release_held(&mut self, rewrite: &mut ChunkRewrite<'_>) {
        self.is_holding = false;
        rewrite.out.append(&mut self.held);
    }

    /// Holds back a value at the end of the chunk while it may equal the served name.
    fn hold_partial_value(&mut self, rewrite: &mut ChunkRewrite<'_>) {
        let begun = &rewrite.chunk[rewrite.value_start..];
        self.held.extend_from_slice(begun);
        if may_become(&self.held, &self.served_name) {
            rewrite.replace(rewrite.chunk.len(), b"");
            return;
        }
        self.held.truncate(self.held.len() - begun.len());
        self.release_held(rewrite);
    }
}

impl<'a> ChunkRewrite<'a> {
    /// Replaces the value that ends at `end`.
    fn replace(&mut self, end: usize, by: &[u8]) {
        self.out
            .extend_from_slice(&self.chunk[self.copied..self.value_start]);
        self.out.extend_from_slice(by);
        self.copied = end;
    }

    fn into_output(mut self) -> Cow<'a, [u8]> {
        if self.out.is_empty() {
            return Cow::Borrowed(&self.chunk[self.copied..]);
        }
        self.out.extend_from_slice(&self.chunk[self.copied..]);
        Cow::Owned(self.out)
    }
}

/// Returns true if an incomplete raw string may still equal `text`.
fn may_become(raw: &[u8], text: &str) -> bool {
    let begun = &raw[1..];
    match memchr(b'\\', begun) {
        None => text.as_bytes().starts_with(begun),
        // An escaped byte takes at most six bytes.
        Some(escape) => {
            text.as_bytes().starts_with(&begun[..escape]) && begun.len() <= 6 * text.len()
        }
    }
}

#[cfg(test)]
mod tests;
