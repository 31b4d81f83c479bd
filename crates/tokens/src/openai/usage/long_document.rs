//! Usage of a JSON response that is too long to buffer. The usage is extracted while the bytes
//! pass, and nothing else is stored.

use super::counts::{UsageCounts, parse_object};
use crate::openai::json_stream::{JsonStreamScanner, ValueBoundary, WantedPaths};

const USAGE_PATHS: WantedPaths = &[&["usage"], &["meta_info"]];

/// Maximum length of a usage object in bytes.
const MAX_USAGE_BYTES: usize = 64 << 10;

/// Scanner for the usage of one response.
#[derive(Debug)]
pub(super) struct LongDocument {
    scanner: JsonStreamScanner,
    /// Buffered part of the current usage value.
    usage_bytes: Option<Vec<u8>>,
    counts: Option<UsageCounts>,
}

impl Default for LongDocument {
    fn default() -> Self {
        Self {
            scanner: JsonStreamScanner::new(USAGE_PATHS),
            usage_bytes: None,
            counts: None,
        }
    }
}

impl LongDocument {
    pub(super) fn push(&mut self, mut chunk: &[u8]) {
        while !chunk.is_empty() {
            let (walked, mark) = self.scanner.advance(chunk);
            if let Some(begun) = &mut self.usage_bytes {
                let room = MAX_USAGE_BYTES.saturating_sub(begun.len());
                begun.extend_from_slice(&chunk[..walked.min(room)]);
            }
            match mark {
                Some(ValueBoundary::Begin) => self.usage_bytes = Some(vec![chunk[walked - 1]]),
                Some(ValueBoundary::End) => {
                    let counts = self
                        .usage_bytes
                        .take()
                        .and_then(|usage| parse_object(serde_json::from_slice(&usage).ok()?));
                    self.counts = counts.or(self.counts);
                }
                None => {}
            }
            chunk = &chunk[walked..];
        }
    }

    /// Returns the counts if the response reported usage.
    pub(super) fn into_counts(self) -> Option<UsageCounts> {
        self.counts
    }
}
