//! Index freshness: the extent to which the index matches the cache of an engine.
//!
//! An outdated index is worse than none, and is not visible from outside. Every event source
//! therefore has a status that follows from its history, and statistics for operators. The code is
//! pure: callers report what happened and when.
//!
//! Decision 0031, Decision 0035.

mod rules;
mod status;

use std::time::Instant;

use serde::Serialize;

use crate::block::BlockWindows;
use crate::wall_time::WallTime;
use crate::worker::BlockSize;
pub use rules::{FreshnessRules, ResyncMode};
pub use status::{IndexFreshness, SourceStatus, StaleReason};

impl Default for SourceStatus {
    fn default() -> Self {
        Self::new(IndexFreshness::Absent, Some(StaleReason::NoSource))
    }
}

impl SourceStatus {
    /// Returns whether the source is connected.
    pub fn is_attached(&self) -> bool {
        !matches!(
            self.reason,
            Some(StaleReason::Connecting | StaleReason::Detached)
        )
    }
}

/// Statistics of a source, for operators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SourceFacts {
    /// Time of the last status change.
    pub since: WallTime,
    /// Delay between the engine's timestamp and the arrival of the last batch, in seconds. Negative
    /// if the clocks differ.
    pub lag_seconds: Option<f64>,
    /// Whether the engine's clock is ahead, so that the lag is meaningless.
    pub clock_skew: bool,
    /// Time of the last batch.
    pub last_event: Option<WallTime>,
    /// Sequence number of the last batch.
    pub last_number: Option<u64>,
    /// Number of applied batches.
    pub batches: u64,
    /// Number of gaps in the sequence numbers, replayed or not.
    pub gaps: u64,
    /// Number of batches that were lost for good.
    pub lost_batches: u64,
    /// Number of batches that could not be decoded.
    pub undecodable: u64,
    /// Number of engine restarts observed.
    pub restarts: u64,
    /// Number of index blocks that may have been evicted in lost events.
    pub stale_blocks: u64,
    /// Number of requests answered since the last batch that must have stored blocks.
    pub requests_without_events: u32,
}

/// State of the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SourceLink {
    /// Not connected.
    #[default]
    Connecting,
    /// Connected, and replaying missed events.
    Replaying,
    /// Connected and caught up.
    Attached,
}

/// Batch that was applied.
#[derive(Clone, Copy, Debug)]
pub struct ReceivedBatch {
    /// Arrival, by the monotonic clock.
    pub at: Instant,
    /// Arrival, by the wall clock.
    pub received: WallTime,
    /// Timestamp of the engine, in seconds of Unix time. `None` for a replayed batch.
    pub written: Option<f64>,
    /// Sequence number.
    pub number: u64,
}

/// Consecutive batches of the own rank after which another publisher is assumed to be gone.
const OWN_IN_A_ROW: u32 = 64;

/// Maximum number of batches that one gap counts as: more than an engine publishes in an hour.
const MAX_COUNTED_GAP: u64 = 1 << 20;

/// State of the event source of one worker rank.
#[derive(Clone, Debug, Default)]
pub struct EventSourceState {
    link: SourceLink,
    /// Whether the source was ever connected.
    was_attached: bool,
    /// Whether the last batch could not be decoded.
    is_undecodable: bool,
    silent: bool,
    /// Whether the engine may hold blocks that were never reported.
    has_unreported: bool,
    unusable_reason: Option<StaleReason>,
    /// Number of batches of the own rank since the last batch of another rank. `None` without such
    /// a batch, or after `OWN_IN_A_ROW` own ones.
    since_foreign: Option<u32>,
    engine_block_size: Option<BlockSize>,
    windows: Option<BlockWindows>,
    silence: SilenceDetector,
    last_batch: Option<Instant>,
    facts: SourceFacts,
}

impl EventSourceState {
    /// Resets everything except the counters, which are monotonic while the process runs.
    pub fn reset(&mut self, now: WallTime) {
        let facts = SourceFacts {
            since: now,
            batches: self.facts.batches,
            gaps: self.facts.gaps,
            lost_batches: self.facts.lost_batches,
            undecodable: self.facts.undecodable,
            restarts: self.facts.restarts,
            ..SourceFacts::default()
        };
        *self = Self {
            facts,
            ..Self::default()
        };
    }

    /// Creates a source that is not connected yet.
    pub fn new(now: WallTime) -> Self {
        Self {
            facts: SourceFacts {
                since: now,
                ..SourceFacts::default()
            },
            ..Self::default()
        }
    }

    /// Returns the status.
    pub fn status(&self) -> SourceStatus {
        let unusable = self
            .unusable_reason
            .or(self.since_foreign.map(|_| StaleReason::OtherRank));
        let (freshness, reason) = match (unusable, self.link) {
            (Some(reason), _) => (IndexFreshness::Absent, Some(reason)),
            (None, SourceLink::Connecting) if self.was_attached => {
                (IndexFreshness::Stale, Some(StaleReason::Detached))
            }
            (None, SourceLink::Connecting) => {
                (IndexFreshness::CatchingUp, Some(StaleReason::Connecting))
            }
            (None, SourceLink::Replaying) => {
                (IndexFreshness::CatchingUp, Some(StaleReason::Replaying))
            }
            (None, SourceLink::Attached) => match self.stale_reason() {
                None if self.has_unreported => (
                    IndexFreshness::Incomplete,
                    Some(StaleReason::UnreportedBlocks),
                ),
                None => (IndexFreshness::Exact, None),
                reason => (IndexFreshness::Stale, reason),
            },
        };
        SourceStatus {
            freshness,
            reason,
            engine_block_size: self.engine_block_size,
            windows: self.windows,
        }
    }

    fn stale_reason(&self) -> Option<StaleReason> {
        if self.silent {
            Some(StaleReason::Silent)
        } else if self.is_undecodable {
            Some(StaleReason::Undecodable)
        } else {
            (self.facts.stale_blocks > 0).then_some(StaleReason::LostBatches)
        }
    }

    /// Returns the statistics.
    pub fn facts(&self) -> SourceFacts {
        SourceFacts {
            requests_without_events: self.silence.requests,
            ..self.facts
        }
    }

    /// Applies a change. Returns whether the status changed.
    pub fn update(&mut self, now: WallTime, change: impl FnOnce(&mut Self)) -> bool {
        let before = self.status();
        change(self);
        let changed = self.status() != before;
        if changed {
            self.facts.since = now;
        }
        changed
    }

    /// Sets the state of the connection.
    pub fn set_link(&mut self, link: SourceLink) {
        self.was_attached |= link == SourceLink::Attached;
        if link != SourceLink::Attached {
            // No events arrive without a connection. If the source was silent, the next batch shows
            // whether it still is.
            self.silence = SilenceDetector::default();
        }
        self.link = link;
    }

    /// Records a batch that was decoded.
    pub fn record_batch(&mut self, batch: ReceivedBatch) {
        self.is_undecodable = false;
        self.silent = false;
        self.silence = SilenceDetector::default();
        self.last_batch = Some(batch.at);
        self.facts.batches += 1;
        self.facts.last_event = Some(batch.received);
        self.facts.last_number = Some(batch.number);
        if let Some(written) = batch.written {
            let lag = batch.received.as_unix_seconds() - written;
            self.facts.lag_seconds = Some(lag);
            self.facts.clock_skew = lag < 0.0;
        }
    }

    /// Records a batch that could not be decoded.
    pub fn record_undecodable(&mut self) {
        self.is_undecodable = true;
        self.facts.undecodable += 1;
    }

    /// Records a gap in the sequence numbers.
    pub fn record_gap(&mut self) {
        self.facts.gaps += 1;
    }

    /// Records batches that were lost for good. A forged batch number counts at most as
    /// `MAX_COUNTED_GAP` batches.
    pub fn record_lost(&mut self, batches: u64) {
        let counted = batches.min(MAX_COUNTED_GAP);
        self.facts.lost_batches = self.facts.lost_batches.saturating_add(counted);
    }

    /// Records that a store was not received.
    pub fn mark_unreported(&mut self) {
        self.has_unreported = true;
    }

    /// Sets whether the engine may hold blocks that were never reported.
    pub fn set_unreported(&mut self, has_unreported: bool) {
        self.has_unreported = has_unreported;
    }

    /// Sets the number of stale blocks.
    pub fn set_stale_blocks(&mut self, blocks: u64) {
        self.facts.stale_blocks = blocks;
    }

    /// Records an engine restart. The status of the previous process no longer applies.
    pub fn record_restart(&mut self) {
        self.facts.restarts += 1;
        self.record_cleared();
        self.engine_block_size = None;
        self.unusable_reason = None;
        self.since_foreign = None;
    }

    /// Records that the engine cleared its cache.
    pub fn record_cleared(&mut self) {
        self.record_emptied();
        self.has_unreported = false;
    }

    /// Records that the index holds no block of the source any more.
    pub fn record_emptied(&mut self) {
        self.is_undecodable = false;
        self.facts.stale_blocks = 0;
    }

    /// Sets the engine's block size. The events are usable from now on.
    pub fn set_block_size(&mut self, engine: BlockSize) {
        self.engine_block_size = Some(engine);
        self.unusable_reason = None;
    }

    /// Sets the tokens that the hash of each block covers in the events.
    pub fn set_windows(&mut self, windows: BlockWindows) {
        self.windows = Some(windows);
    }

    /// Records whether a batch belongs to the expected rank. If two ranks publish to one address,
    /// their batches alternate, so a single batch of the own rank does not show that the other one
    /// is gone.
    pub fn record_batch_rank(&mut self, is_own: bool) {
        self.since_foreign = match is_own {
            false => Some(0),
            true => self
                .since_foreign
                .map(|count| count + 1)
                .filter(|count| *count < OWN_IN_A_ROW),
        };
    }

    /// Marks the events as not usable.
    pub fn set_unusable(&mut self, reason: StaleReason, engine: Option<BlockSize>) {
        self.unusable_reason = Some(reason);
        self.engine_block_size = engine.or(self.engine_block_size);
    }

    /// Records the response to a request that must have stored blocks.
    pub fn record_answer(&mut self, routed: Instant, now: Instant) {
        if self.link == SourceLink::Attached
            && self.last_batch.is_none_or(|received| received < routed)
        {
            self.silence.record_answer(now);
        }
    }

    /// Checks whether the source is silent.
    pub fn check_silence(&mut self, now: Instant, rules: &FreshnessRules) {
        self.silent |= self.silence.is_overdue(now, rules);
    }

    /// Returns whether the source is silent.
    pub fn is_silent(&self) -> bool {
        self.silent
    }
}

/// Detects a source that has stopped publishing: requests must have stored blocks, but no event
/// arrived. One such request proves nothing, because the engine may already hold the blocks, for
/// example from another request a moment before. Several requests and some time are required.
#[derive(Clone, Copy, Debug, Default)]
struct SilenceDetector {
    requests: u32,
    first: Option<Instant>,
}

impl SilenceDetector {
    fn record_answer(&mut self, now: Instant) {
        self.requests = self.requests.saturating_add(1);
        self.first.get_or_insert(now);
    }

    fn is_overdue(&self, now: Instant, rules: &FreshnessRules) -> bool {
        let enough = self.requests >= rules.silence_requests.max(1);
        enough
            && self
                .first
                .is_some_and(|first| now.saturating_duration_since(first) >= rules.silence_after)
    }
}

#[cfg(test)]
mod tests;
