//! Classifies numbered batches. An engine numbers its batches from zero. The subscriber may miss
//! some, receive some twice, or reach a restarted engine whose numbers begin at zero again. Two
//! positions distinguish these cases: the newest applied batch, with a digest of its payload, and
//! the newest live number. A live number that does not exceed the newest one indicates a restart. A
//! restarted engine may already have passed the known numbers. Every replay therefore includes the
//! last applied batch, which must be unchanged.
//!
//! Decision 0033.

use strum::IntoStaticStr;
use xxhash_rust::xxh3::xxh3_64;

/// Digest of a payload (XXH3-64).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PayloadDigest(pub u64);

impl PayloadDigest {
    /// Computes the digest of a payload.
    pub(super) fn of(payload: &[u8]) -> Self {
        Self(xxh3_64(payload))
    }
}

/// Number and digest of an applied batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AppliedBatch {
    seq: u64,
    digest: PayloadDigest,
}

/// A gap in the batch numbers before a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SequenceGap {
    /// First missing number.
    pub(super) from: u64,
    /// Number of the batch that arrived, which is not missing.
    pub(super) to: u64,
}

/// Action for a live batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LiveAction {
    /// Apply the batch.
    Apply,
    /// Skip the batch: its content is already applied.
    Stale,
    /// Batches before it are missing. Request a replay, then call [`Sequencer::action_for`] again.
    Gap(SequenceGap),
    /// The engine restarted. Clear the rank, then call [`Sequencer::action_for`] again.
    Restart,
}

/// Action for a replayed batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplayAction {
    /// Apply the batch.
    Apply,
    /// Skip the batch: its content is already applied.
    Duplicate,
    /// The engine restarted while the subscriber was disconnected. Clear the rank and replay from
    /// zero.
    Restart,
    /// The replay omits batches before this one.
    Gap(SequenceGap),
}

/// Reason why a replay is incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(super) enum ReplayError {
    /// The engine replayed nothing.
    Empty,
    /// The engine no longer holds the first batches.
    StartedAfterRequested,
    /// The engine omitted batches in the middle.
    NonContiguous,
    /// The replay ended early, or the engine stopped replying.
    EndedBeforeTarget,
}

impl ReplayError {
    /// Returns the name of the reason in logs.
    pub(super) fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Position in the event stream of one worker rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Sequencer {
    applied: Option<AppliedBatch>,
    last_live: Option<u64>,
}

impl Sequencer {
    /// Creates a sequencer that resumes after a batch that another reader applied. Later live
    /// batches have higher numbers, so a live number that is not higher indicates a restart.
    pub(super) fn resume_after(seq: u64, digest: PayloadDigest) -> Self {
        Self {
            applied: Some(AppliedBatch { seq, digest }),
            last_live: Some(seq),
        }
    }

    /// Returns the newest applied batch.
    pub(super) fn applied(&self) -> Option<(u64, PayloadDigest)> {
        self.applied
            .map(|AppliedBatch { seq, digest }| (seq, digest))
    }

    /// Records a live batch and returns the action for it.
    ///
    /// A number that does not increase indicates a restart, with one exception. Two connections to
    /// one publisher deliver the last applied batch twice.
    pub(super) fn accept_live(
        &mut self,
        seq: u64,
        digest: impl FnOnce() -> PayloadDigest,
    ) -> LiveAction {
        let again = self
            .applied
            .filter(|mark| mark.seq == seq && self.last_live == Some(seq));
        if again.is_some_and(|mark| mark.digest == digest()) {
            return LiveAction::Stale;
        }
        if self.last_live.is_some_and(|last| seq <= last) {
            self.reset();
            return LiveAction::Restart;
        }
        self.action_for(seq)
    }

    /// Returns the action for a live batch, given the batches that were applied since it arrived.
    pub(super) fn action_for(&mut self, seq: u64) -> LiveAction {
        self.last_live = Some(seq);
        match self.applied {
            Some(mark) if seq <= mark.seq => LiveAction::Stale,
            _ if seq == self.next_seq() => LiveAction::Apply,
            _ => LiveAction::Gap(self.gap_before(seq)),
        }
    }

    fn gap_before(&self, seq: u64) -> SequenceGap {
        SequenceGap {
            from: self.next_seq(),
            to: seq,
        }
    }

    /// Returns the number after the newest applied one.
    pub(super) fn next_seq(&self) -> u64 {
        self.applied.map_or(0, |mark| mark.seq.saturating_add(1))
    }

    /// Returns the first number of a replay request: the newest applied batch, to check that it is
    /// unchanged.
    pub(super) fn replay_start(&self) -> u64 {
        self.applied.map_or(0, |mark| mark.seq)
    }

    /// Returns true if no batch was applied since the engine started.
    pub(super) fn is_fresh(&self) -> bool {
        self.applied.is_none()
    }

    /// Returns the action for a replayed batch.
    pub(super) fn accept_replayed(&mut self, seq: u64, digest: PayloadDigest) -> ReplayAction {
        match self.applied {
            Some(mark) if seq == mark.seq && digest != mark.digest => {
                self.reset();
                ReplayAction::Restart
            }
            Some(mark) if seq <= mark.seq => ReplayAction::Duplicate,
            _ if seq == self.next_seq() => ReplayAction::Apply,
            _ => ReplayAction::Gap(self.gap_before(seq)),
        }
    }

    /// Records a replay without any batch. An engine that did not restart holds at least its newest
    /// batch, so an empty replay indicates a restart. Returns true if the rank has to be cleared.
    pub(super) fn accept_empty_replay(&mut self) -> bool {
        let restarted = self.applied.is_some();
        if restarted {
            self.reset();
        }
        restarted
    }

    /// Clears both positions after a restart.
    fn reset(&mut self) {
        self.applied = None;
        self.last_live = None;
    }

    /// Advances the position after a batch was applied or skipped.
    pub(super) fn advance(&mut self, seq: u64, digest: PayloadDigest) {
        self.applied = Some(AppliedBatch { seq, digest });
    }
}

#[cfg(test)]
mod tests;
