//! Checkpoints that let a query skip blocks which an earlier query has already compared.
//!
//! A sequence hash identifies a block and all blocks before it. If the sequence hash at a position
//! is known to equal the prompt's, the blocks before it need not be compared. Events do not contain
//! sequence hashes, and computing them would slow down writers. A query has those of its prompt,
//! and records one at every checkpoint it has compared. The next query, for the next turn of a chat
//! or the same system prompt, starts there.
//!
//! Decision 0021.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(super) use super::sizes::CHECKPOINT_INTERVAL;
use crate::block::SequenceHash;

/// Value of a checkpoint that no query has reached. A prompt with this sequence hash is compared
/// every time.
const EMPTY: u64 = 0;

/// Checkpoints of a chunk. Readers write them, but they never change the result of a query.
#[derive(Debug, Default)]
pub(super) struct PrefixCheckpoints(Vec<AtomicU64>);

impl PrefixCheckpoints {
    /// Adjusts the checkpoints to the number of positions in the chunk.
    pub(super) fn resize(&mut self, positions: usize) {
        self.0
            .resize_with(positions / CHECKPOINT_INTERVAL, AtomicU64::default);
    }

    /// Clears the checkpoints of positions that receive other blocks.
    pub(super) fn clear(&mut self, positions: Range<usize>) {
        let range = positions.start / CHECKPOINT_INTERVAL..positions.end / CHECKPOINT_INTERVAL;
        self.0[range]
            .iter_mut()
            .for_each(|checkpoint| *checkpoint.get_mut() = EMPTY);
    }

    /// Returns a lower bound for the number of blocks from a position on that match these sequence
    /// hashes.
    pub(super) fn matching_len(&self, from: usize, sequences: &[SequenceHash]) -> usize {
        let first = from / CHECKPOINT_INTERVAL;
        let len_to = |index: usize| (index + 1) * CHECKPOINT_INTERVAL - from;
        let matches = |index: usize| {
            let known = self.0[index].load(Relaxed);
            known == sequences[len_to(index) - 1].0 && known != EMPTY
        };
        let mut range = first..(from + sequences.len()) / CHECKPOINT_INTERVAL;
        // In most cases all checkpoints match, or all up to some position.
        if !range.is_empty() && matches(range.end - 1) {
            return len_to(range.end - 1);
        }
        while !range.is_empty() {
            let middle = range.start + range.len() / 2;
            if matches(middle) {
                range.start = middle + 1
            } else {
                range.end = middle
            }
        }
        if range.start > first {
            len_to(range.start - 1)
        } else {
            0
        }
    }

    /// Records the sequence hash of the block at a position, if the position has a checkpoint.
    pub(super) fn record(&self, at: usize, sequence: SequenceHash) {
        if at % CHECKPOINT_INTERVAL == CHECKPOINT_INTERVAL - 1 {
            self.0[at / CHECKPOINT_INTERVAL].store(sequence.0, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
