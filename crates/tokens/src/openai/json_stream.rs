//! Boundaries of some wanted values in a JSON document that arrives in arbitrary chunks.
//!
//! The scanner compares only the keys of the two outermost levels and skips deeper values at the
//! speed of a byte search. It stores at most one short key. Input that is not JSON produces no
//! boundary.

use super::json_scan::{JsonBoundary, JsonScanner, ScanState, raw_text_equals};

/// Key paths of the wanted fields, at most two keys long.
pub(super) type WantedPaths = &'static [&'static [&'static str]];

/// Maximum length of a raw key in bytes. It suffices for a wanted key with all bytes escaped, and
/// its quotes.
const MAX_KEY_BYTES: usize = 64;

/// A boundary of a wanted value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueBoundary {
    /// The previous byte was the first of a wanted value.
    Begin,
    /// The previous byte was the last of a wanted value.
    End,
}

/// Scanner for the wanted values of a document.
#[derive(Debug)]
pub(super) struct JsonStreamScanner {
    scanner: JsonScanner,
    wanted_paths: WantedPaths,
    /// The current raw key. If it is longer than [`MAX_KEY_BYTES`], only its beginning is stored.
    key: Vec<u8>,
    /// Key of the enclosing object, if the scanner is inside a second object.
    outer_key: Option<&'static str>,
    /// True if the scanner is inside a wanted value.
    in_wanted_value: bool,
}

impl JsonStreamScanner {
    pub(super) fn new(wanted_paths: WantedPaths) -> Self {
        Self {
            scanner: JsonScanner::new(),
            wanted_paths,
            key: Vec::new(),
            outer_key: None,
            in_wanted_value: false,
        }
    }

    /// Resets the scanner for another document.
    pub(super) fn restart(&mut self) {
        self.scanner.restart();
        self.outer_key = None;
        self.in_wanted_value = false;
    }

    /// Returns true if the document is complete.
    pub(super) fn is_done(&self) -> bool {
        self.scanner.state() == ScanState::Done
    }

    /// Handles the end of a line. Strings cannot contain raw line breaks.
    pub(super) fn end_line(&mut self) {
        if self.scanner.state() == ScanState::InScalar {
            self.in_wanted_value = false;
        }
        self.scanner.end_line();
    }

    /// Advances to the next boundary or to the end of `bytes`. Returns the number of scanned bytes.
    pub(super) fn advance(&mut self, bytes: &[u8]) -> (usize, Option<ValueBoundary>) {
        let mut at = 0;
        loop {
            let (scanned, boundary) = self.scanner.advance(&bytes[at..]);
            if self.scanner.state() == ScanState::InKey || boundary == Some(JsonBoundary::KeyEnd) {
                self.extend_key(&bytes[at..at + scanned]);
            }
            at += scanned;
            let wanted = match boundary {
                Some(JsonBoundary::KeyBegin) => {
                    self.key.clear();
                    self.key.push(b'"');
                    None
                }
                Some(JsonBoundary::KeyEnd) => None,
                Some(JsonBoundary::ValueBegin) => self.begin_value(),
                Some(JsonBoundary::ValueEnd) => self.end_value(),
                None => return (at, None),
            };
            if wanted.is_some() {
                return (at, wanted);
            }
        }
    }

    fn extend_key(&mut self, bytes: &[u8]) {
        let room = (MAX_KEY_BYTES + 1).saturating_sub(self.key.len());
        self.key.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn begin_value(&mut self) -> Option<ValueBoundary> {
        let is_object = self.scanner.state() == ScanState::ObjectStart;
        if is_object && self.scanner.depth() == 1 {
            return None;
        }
        if self.is_wanted_key() {
            self.in_wanted_value = true;
            self.scanner.skip_value();
            return Some(ValueBoundary::Begin);
        }
        match self.wanted_outer_key() {
            Some(key) if is_object => self.outer_key = Some(key),
            _ => self.scanner.skip_value(),
        }
        None
    }

    fn end_value(&mut self) -> Option<ValueBoundary> {
        if self.scanner.depth() == 1 {
            self.outer_key = None;
        }
        std::mem::take(&mut self.in_wanted_value).then_some(ValueBoundary::End)
    }

    fn is_wanted_key(&self) -> bool {
        self.wanted_paths
            .iter()
            .any(|path| match (self.outer_key, *path) {
                (None, [key]) => raw_text_equals(&self.key, key),
                (Some(outer), [first, key]) => outer == *first && raw_text_equals(&self.key, key),
                _ => false,
            })
    }

    /// Returns the current key if wanted keys can be below it.
    fn wanted_outer_key(&self) -> Option<&'static str> {
        let outer = self
            .wanted_paths
            .iter()
            .filter(|path| self.outer_key.is_none() && path.len() == 2)
            .map(|path| path[0]);
        outer
            .into_iter()
            .find(|key| raw_text_equals(&self.key, key))
    }
}
