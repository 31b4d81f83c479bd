//! Log of blocks that a rank evicted and later stored again on its device.
//!
//! The audit uses it to tell an eviction from a stale index. Most stored blocks are new, because
//! decoding creates a block at a time. The log contains only blocks that were evicted recently, so
//! it reaches back for minutes even if the engine is busy.

use std::collections::VecDeque;

use prefetch_index::prefetch_index;

use super::children::mix;
use super::ids::{BlockLocation, PREFETCH_DISTANCE};
use super::sizes::FILTER_HALF_CAPACITY;
use crate::block::EngineHash;

/// Maximum number of log entries per rank.
const MAX_LOG_ENTRIES: usize = 4096;

/// First recently evicted block of each store event, with the number of the event.
#[derive(Debug, Default)]
pub(super) struct ReinsertionLog {
    log: VecDeque<(u64, BlockLocation)>,
    /// Store event up to which nothing is known.
    unknown_until: u64,
    /// Store event after which the whole cache was cleared.
    cleared_at: Option<u64>,
}

impl ReinsertionLog {
    pub(super) fn record(&mut self, number: u64, location: BlockLocation) {
        if self.log.len() == MAX_LOG_ENTRIES
            && let Some((number, _)) = self.log.pop_front()
        {
            self.mark_unknown(number);
        }
        self.log.push_back((number, location));
    }

    /// Marks everything up to a store event as unknown.
    pub(super) fn mark_unknown(&mut self, number: u64) {
        self.unknown_until = self.unknown_until.max(number);
    }

    /// Records that the whole cache was cleared after a store event.
    pub(super) fn clear(&mut self, number: u64) {
        *self = Self {
            cleared_at: Some(number),
            ..Self::default()
        };
    }

    /// Returns whether a matching block was evicted and stored again after a store event. Returns
    /// `None` if the log does not reach back that far.
    pub(super) fn was_reinserted_since(
        &self,
        number: u64,
        matches: impl Fn(BlockLocation) -> bool,
    ) -> Option<bool> {
        let found = self.cleared_at.is_some_and(|cleared| number <= cleared)
            || self
                .log
                .iter()
                .rev()
                .take_while(|(at, _)| *at > number)
                .any(|(_, location)| matches(*location));
        (found || self.unknown_until <= number).then_some(found)
    }
}

/// Bits per half: eight per hash, of which three are set. The rate of false positives is about 5 %.
const HALF_BITS: usize = FILTER_HALF_CAPACITY * 8;
const BITS_PER_KEY: u32 = 3;
/// Words of one half per cache line. Both halves share the line, so a lookup costs one cache miss.
const WORDS_PER_LINE: usize = 4;

/// Bloom filter of the engine hashes that were evicted recently. It consists of two halves. When
/// the current half is full, the older one is cleared and becomes the current one.
#[derive(Debug, Default)]
pub(super) struct EvictionFilter {
    /// Bits of both halves. Empty until the first eviction.
    lines: Vec<FilterLine>,
    /// Index of the half that receives new hashes.
    current_half: usize,
    /// Number of hashes in the current half.
    count: usize,
    /// Store event at which the current half was started.
    half_start: u64,
    /// Whether the other half contains anything.
    has_older_half: bool,
}

/// Bits of some hashes, in both halves.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct FilterLine([[u64; WORDS_PER_LINE]; 2]);

impl EvictionFilter {
    /// Adds a hash that was evicted after a store event. If the older half is cleared, returns the
    /// store event up to which nothing is known now.
    pub(super) fn insert(&mut self, hash: EngineHash, number: u64) -> Option<u64> {
        let mut unknown_until = None;
        if self.count == FILTER_HALF_CAPACITY {
            // Plus one: a request with the same number may have been sent before the hashes that
            // were cleared.
            unknown_until = self.has_older_half.then_some(self.half_start + 1);
            self.current_half = 1 - self.current_half;
            self.has_older_half = true;
            self.lines
                .iter_mut()
                .for_each(|line| line.0[self.current_half] = [0; WORDS_PER_LINE]);
            self.count = 0;
            self.half_start = number;
        }
        if self.lines.is_empty() {
            self.lines
                .resize(HALF_BITS / (64 * WORDS_PER_LINE), FilterLine::default());
        }
        let (line, set) = bit_positions(hash);
        let half = &mut self.lines[line].0[self.current_half];
        half.iter_mut()
            .zip(set)
            .for_each(|(word, set)| *word |= set);
        self.count += 1;
        unknown_until
    }

    pub(super) fn contains(&self, hash: EngineHash) -> bool {
        let (line, set) = bit_positions(hash);
        let in_half = |half: &[u64; WORDS_PER_LINE]| {
            half.iter()
                .zip(set)
                .fold(0, |missing, (word, set)| missing | (set & !word))
                == 0
        };
        self.lines
            .get(line)
            .is_some_and(|line| line.0.iter().any(in_half))
    }

    /// Returns the index of the first hash that was evicted recently.
    pub(super) fn first_evicted(
        &self,
        hashes: impl ExactSizeIterator<Item = EngineHash> + Clone,
    ) -> Option<usize> {
        if self.lines.is_empty() {
            return None;
        }
        let mut later = hashes.clone();
        later
            .by_ref()
            .take(PREFETCH_DISTANCE)
            .for_each(|hash| self.prefetch(hash));
        hashes.into_iter().position(|hash| {
            later
                .next()
                .into_iter()
                .for_each(|hash| self.prefetch(hash));
            self.contains(hash)
        })
    }

    /// Prefetches the cache line of a hash.
    pub(super) fn prefetch(&self, hash: EngineHash) {
        prefetch_index(&self.lines, line_index(mix(hash.0)));
    }
}

/// Returns the line of a hash and its bits in that line.
fn bit_positions(hash: EngineHash) -> (usize, [u64; WORDS_PER_LINE]) {
    let mixed = mix(hash.0);
    let mut set = [0; WORDS_PER_LINE];
    for bit in (0..BITS_PER_KEY).map(|at| (mixed >> (8 * at)) as usize % (64 * WORDS_PER_LINE)) {
        set[bit / 64] |= 1 << (bit % 64);
    }
    (line_index(mixed), set)
}

fn line_index(mixed: u64) -> usize {
    (mixed >> 40) as usize % (HALF_BITS / (64 * WORDS_PER_LINE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::ids::BlockId;

    fn location(block: u32) -> BlockLocation {
        BlockLocation {
            shard: 3,
            block: BlockId(block),
        }
    }

    #[test]
    fn old_reinsertions_are_unknown() {
        let mut log = ReinsertionLog::default();
        (1..=MAX_LOG_ENTRIES as u64).for_each(|number| log.record(number, location(number as u32)));
        let since = |log: &ReinsertionLog, number, block| {
            log.was_reinserted_since(number, |candidate| candidate == location(block))
        };
        assert_eq!(
            (since(&log, 7, 8), since(&log, 8, 8)),
            (Some(true), Some(false))
        );
        log.record(MAX_LOG_ENTRIES as u64 + 1, location(0));
        assert_eq!((since(&log, 0, 1), since(&log, 1, 1)), (None, Some(false)));
        log.clear(9000);
        assert_eq!(
            (since(&log, 9000, 1), since(&log, 9001, 1)),
            (Some(true), Some(false)),
            "the whole cache was cleared"
        );
    }

    #[test]
    fn eviction_filter_keeps_recent_hashes() {
        let mut filter = EvictionFilter::default();
        let half = FILTER_HALF_CAPACITY as u64;
        let hash = |number: u64| EngineHash(xxhash_rust::xxh3::xxh3_64(&number.to_le_bytes()));
        let unknown: Vec<_> = (0..=3 * half)
            .filter_map(|at| filter.insert(hash(at), at))
            .collect();
        // The third half replaced the first one, and the fourth the second one.
        assert_eq!(unknown, [half + 1, 2 * half + 1]);
        assert!((2 * half..=3 * half).all(|at| filter.contains(hash(at))));
        let others = (10 * half..20 * half)
            .filter(|&at| filter.contains(hash(at)))
            .count() as u64;
        assert!(others < half, "{others} of {}", 10 * half);
    }
}
