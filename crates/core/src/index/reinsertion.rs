//! Log of blocks that a rank evicted and later stored again on its device.
//!
//! The audit uses it to tell an eviction from a stale index. Most stored blocks are new, because
//! decoding creates a block at a time. The log contains only blocks that were evicted recently, so
//! it reaches back for minutes even if the engine is busy.

use std::collections::VecDeque;

use super::aging_bloom_filter::AgingBloomFilter;
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

/// Engine hashes that were evicted recently.
#[derive(Debug)]
pub(super) struct EvictionFilter {
    recent: AgingBloomFilter,
    /// Store event at which the current half was started.
    half_start: u64,
    has_older_half: bool,
}

impl Default for EvictionFilter {
    fn default() -> Self {
        Self {
            recent: AgingBloomFilter::new(FILTER_HALF_CAPACITY),
            half_start: 0,
            has_older_half: false,
        }
    }
}

impl EvictionFilter {
    /// Adds a hash that was evicted after a store event. If the older half is cleared, returns the
    /// store event up to which nothing is known now.
    pub(super) fn insert(&mut self, hash: EngineHash, number: u64) -> Option<u64> {
        if !self.recent.insert(hash.0) {
            return None;
        }
        // Plus one: a request with the same number may have been sent before the hashes that were
        // cleared.
        let unknown_until = self.has_older_half.then_some(self.half_start + 1);
        self.has_older_half = true;
        self.half_start = number;
        unknown_until
    }

    pub(super) fn contains(&self, hash: EngineHash) -> bool {
        self.recent.contains(hash.0)
    }

    /// Returns the index of the first hash that was evicted recently.
    pub(super) fn first_evicted(
        &self,
        hashes: impl ExactSizeIterator<Item = EngineHash> + Clone,
    ) -> Option<usize> {
        if self.recent.is_empty() {
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
        self.recent.prefetch(hash.0);
    }
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
