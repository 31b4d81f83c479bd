//! What to do with a numbered batch. An engine numbers its batches from zero; we may miss some, see some twice, or meet
//! a new life of the engine whose numbers start over. Two marks tell these apart: the newest batch applied, with a digest of
//! its payload, and the newest number seen live. A number that does not exceed the newest live one is a new life. A new
//! life whose numbers have already overtaken ours is noticed by asking for one batch more than needed: the last applied
//! one, which has to come back unchanged.

use xxhash_rust::xxh3::xxh3_64;

/// A digest of a payload, to recognise it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(pub u64);

impl Digest {
    /// Digest of one payload.
    pub fn of(payload: &[u8]) -> Self {
        Self(xxh3_64(payload))
    }
}

/// The newest applied batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    seq: u64,
    digest: Digest,
}

/// What to do with a live batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Live {
    /// Apply it now.
    Apply,
    /// Its content is known already.
    Stale,
    /// Batches before it are missing: ask for a replay, then ask again where it belongs.
    Gap {
        /// First missing number.
        from: u64,
        /// The number of this batch, which is not missing.
        to: u64,
    },
    /// The engine started over: forget the rank, then ask again where the batch belongs.
    Restart,
}

/// What to do with a batch of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeated {
    /// Apply it now.
    Apply,
    /// Its content is known already.
    Known,
    /// The engine started over while we did not listen: forget the rank and replay from zero.
    Restart,
    /// Batches before it were left out.
    Hole {
        /// First missing number.
        from: u64,
        /// The number of this batch, which is not missing.
        to: u64,
    },
}

/// Why a replay did not bring everything that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incomplete {
    /// The engine repeats nothing.
    Empty,
    /// The engine no longer holds the first ones.
    StartedAfterRequested,
    /// Some in the middle were left out.
    NonContiguous,
    /// It ended early, or the engine stopped answering.
    EndedBeforeTarget,
}

impl Incomplete {
    /// The name used in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Incomplete::Empty => "empty",
            Incomplete::StartedAfterRequested => "started_after_requested",
            Incomplete::NonContiguous => "non_contiguous",
            Incomplete::EndedBeforeTarget => "ended_before_target",
        }
    }
}

/// The marks of one worker rank's event stream.
#[derive(Clone, Debug, Default)]
pub struct Sequencer {
    applied: Option<Mark>,
    last_live: Option<u64>,
}

impl Sequencer {
    /// Goes on behind a batch that somebody else has applied. Whatever comes live from now on was published after that, so
    /// a number that is no higher is a new life.
    pub fn resumed(seq: u64, digest: Digest) -> Self {
        Self {
            applied: Some(Mark { seq, digest }),
            last_live: Some(seq),
        }
    }

    /// The newest applied batch.
    pub fn applied(&self) -> Option<(u64, Digest)> {
        self.applied.map(|Mark { seq, digest }| (seq, digest))
    }

    /// Takes note of a live batch and says what to do with it.
    ///
    /// Numbers that do not rise are a new life of the engine, but for the very batch that was applied last: two
    /// connections of one publisher bring it twice.
    pub fn live(&mut self, seq: u64, digest: impl FnOnce() -> Digest) -> Live {
        let again = self
            .applied
            .filter(|mark| mark.seq == seq && self.last_live == Some(seq));
        if again.is_some_and(|mark| mark.digest == digest()) {
            return Live::Stale;
        }
        if self.last_live.is_some_and(|last| seq <= last) {
            self.forget();
            return Live::Restart;
        }
        self.place(seq)
    }

    /// Where a live batch belongs, given what has been applied since it arrived.
    pub fn place(&mut self, seq: u64) -> Live {
        self.last_live = Some(seq);
        match self.applied {
            Some(mark) if seq <= mark.seq => Live::Stale,
            _ if seq == self.expected() => Live::Apply,
            _ => Live::Gap {
                from: self.expected(),
                to: seq,
            },
        }
    }

    /// The number that follows the newest applied one.
    pub fn expected(&self) -> u64 {
        self.applied.map_or(0, |mark| mark.seq.saturating_add(1))
    }

    /// The number to start a replay at: the newest applied one, to see that it is still the same.
    pub fn ask_from(&self) -> u64 {
        self.applied.map_or(0, |mark| mark.seq)
    }

    /// Whether anything was applied in this life of the engine.
    pub fn is_fresh(&self) -> bool {
        self.applied.is_none()
    }

    /// Judges one batch of a replay.
    pub fn repeated(&mut self, seq: u64, digest: Digest) -> Repeated {
        match self.applied {
            Some(mark) if seq == mark.seq && digest != mark.digest => {
                self.forget();
                Repeated::Restart
            }
            Some(mark) if seq <= mark.seq => Repeated::Known,
            _ if seq == self.expected() => Repeated::Apply,
            _ => Repeated::Hole {
                from: self.expected(),
                to: seq,
            },
        }
    }

    /// Judges a replay that ended without a single batch. An engine that is still the same holds at least its newest
    /// batch, so one without has started over. True: forget the rank.
    pub fn repeated_nothing(&mut self) -> bool {
        let restarted = self.applied.is_some();
        if restarted {
            self.forget();
        }
        restarted
    }

    /// Both marks belong to a life of the engine that has ended.
    fn forget(&mut self) {
        self.applied = None;
        self.last_live = None;
    }

    /// Moves the mark: the batch was applied, or given up for good.
    pub fn advance(&mut self, seq: u64, digest: Digest) {
        self.applied = Some(Mark { seq, digest });
    }
}

#[cfg(test)]
mod tests;
