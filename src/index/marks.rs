//! What readers know of the blocks of a chunk. A sequence hash names all blocks before its own, so where that of one block of a
//! prompt is known to be the prompt's, nothing before it has to be compared. Writers are not told sequence hashes, and to compute
//! them would take their time; a reader has those of its prompt, and leaves one behind wherever it has compared so far. Who comes
//! next, with the next turn of a chat or the same system prompt, begins where that is.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::block::SequenceHash;

/// Positions from one mark to the next; the last of them has the mark.
pub(super) const APART: usize = if cfg!(test) { 1 << 2 } else { 1 << 6 };
/// Nobody has come there yet. Who really is called so is compared each time.
const UNKNOWN: u64 = 0;

/// The marks of a chunk. That readers write them is no change: who comes later finds what it would have found without.
#[derive(Debug, Default)]
pub(super) struct Marks(Vec<AtomicU64>);

impl Marks {
    /// The chunk has so many positions now.
    pub(super) fn fit(&mut self, positions: usize) {
        self.0.resize_with(positions / APART, AtomicU64::default);
    }

    /// Other blocks come to these positions.
    pub(super) fn forget(&mut self, positions: Range<usize>) {
        let marks = positions.start / APART..positions.end / APART;
        self.0[marks]
            .iter_mut()
            .for_each(|mark| *mark.get_mut() = UNKNOWN);
    }

    /// How many blocks from a position on are known to have these names, at least.
    pub(super) fn known(&self, from: usize, names: &[SequenceHash]) -> usize {
        let first = from / APART;
        let up_to = |mark: usize| (mark + 1) * APART - from;
        let is_so = |mark: usize| {
            let known = self.0[mark].load(Relaxed);
            known == names[up_to(mark) - 1].0 && known != UNKNOWN
        };
        let mut left = first..(from + names.len()) / APART;
        // Mostly all of them agree, or those up to some place do.
        if !left.is_empty() && is_so(left.end - 1) {
            return up_to(left.end - 1);
        }
        while !left.is_empty() {
            let middle = left.start + left.len() / 2;
            if is_so(middle) {
                left.start = middle + 1
            } else {
                left.end = middle
            }
        }
        if left.start > first {
            up_to(left.start - 1)
        } else {
            0
        }
    }

    /// The block at a position is called so, if there is a mark.
    pub(super) fn leave(&self, at: usize, name: SequenceHash) {
        if at % APART == APART - 1 {
            self.0[at / APART].store(name.0, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
