//! The usage of an answer in one piece that is too long to be kept: found while the bytes pass by, and all that is kept of them.

use super::answer::{self, Counts};
use crate::openai::walk::{Mark, Walker, Wanted};

const USAGE: Wanted = &[&["usage"], &["meta_info"]];

/// Longest usage that is looked at.
const LIMIT: usize = 64 << 10;

/// Looks for the usage of one answer.
#[derive(Debug)]
pub(super) struct Long {
    walker: Walker,
    /// The usage as far as it has arrived, where one is in it.
    begun: Option<Vec<u8>>,
    counts: Option<Counts>,
}

impl Default for Long {
    fn default() -> Self {
        Self {
            walker: Walker::new(USAGE),
            begun: None,
            counts: None,
        }
    }
}

impl Long {
    pub(super) fn push(&mut self, mut chunk: &[u8]) {
        while !chunk.is_empty() {
            let (walked, mark) = self.walker.step(chunk);
            if let Some(begun) = &mut self.begun {
                let room = LIMIT.saturating_sub(begun.len());
                begun.extend_from_slice(&chunk[..walked.min(room)]);
            }
            match mark {
                Some(Mark::Begin) => self.begun = Some(Vec::new()),
                Some(Mark::End) => {
                    let told = self.begun.take().and_then(|usage| answer::counts(&usage));
                    self.counts = told.or(self.counts);
                }
                None => {}
            }
            chunk = &chunk[walked..];
        }
    }

    /// What the answer told, if it did.
    pub(super) fn usage(self) -> Option<Counts> {
        self.counts
    }
}
