//! How far the event source of a worker rank can be believed. An index that is out of date is worse than none, and nobody
//! sees it; so every source has a standing that follows from what happened to it, and facts for those who look. Pure: what
//! happened is told here with the time at which it happened.

mod owed;

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::worker::BlockSize;
use owed::Owed;

/// Whether what is known of a rank's cache is what its engine holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Trust {
    /// Attached and caught up; nothing that it told can be out of date.
    Exact,
    /// It is being attached, or tells what was missed.
    CatchingUp,
    /// What it told is true, but the engine may hold more: blocks were stored of which nothing was heard.
    Incomplete,
    /// Something that it told may have changed, and it was not heard.
    Stale,
    /// There is none, or it cannot be used.
    #[default]
    Absent,
}

impl Trust {
    /// All of them.
    pub const ALL: [Trust; 5] = [
        Trust::Exact,
        Trust::Incomplete,
        Trust::CatchingUp,
        Trust::Stale,
        Trust::Absent,
    ];

    /// The name on pages and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Trust::Exact => "exact",
            Trust::Incomplete => "incomplete",
            Trust::CatchingUp => "catching_up",
            Trust::Stale => "stale",
            Trust::Absent => "absent",
        }
    }

    /// Whether what it told is compared: while it is catching up only where it `told` something, as long as that is as good
    /// as what a stale one told. Before, that it did not name anything says nothing.
    pub fn counts(self, told: bool) -> bool {
        match self {
            Trust::Exact | Trust::Incomplete | Trust::Stale => true,
            Trust::CatchingUp => told,
            Trust::Absent => false,
        }
    }
}

/// Why a source is not exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Because {
    /// None is configured, and none was learned.
    NoSource,
    /// Not attached yet.
    Connecting,
    /// The engine is repeating what was missed.
    Replaying,
    /// It was attached, and is not.
    Detached,
    /// Batches got lost that nobody repeats, and what was held then may be gone.
    LostBatches,
    /// Stores were lost, or could not be used, so that blocks are held of which nothing is known.
    UntoldBlocks,
    /// The last batch could not be read.
    Undecodable,
    /// It says nothing although requests were answered that had to store blocks.
    Silent,
    /// The engine's blocks and ours do not divide one another.
    BlockSizeMismatch,
    /// It tells of another data-parallel rank.
    OtherRank,
}

impl Because {
    /// The name on pages and in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Because::NoSource => "no_source",
            Because::Connecting => "connecting",
            Because::Replaying => "replaying",
            Because::Detached => "detached",
            Because::LostBatches => "lost_batches",
            Because::UntoldBlocks => "untold_blocks",
            Because::Undecodable => "undecodable",
            Because::Silent => "silent",
            Because::BlockSizeMismatch => "block_size_mismatch",
            Because::OtherRank => "other_rank",
        }
    }
}

/// What decisions have to know of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Standing {
    /// How far it can be believed.
    pub trust: Trust,
    /// Why not further.
    pub because: Option<Because>,
    /// Tokens per block of the engine, where its events told; it reuses whole blocks of its own only.
    pub engine_block_size: Option<BlockSize>,
}

impl Default for Standing {
    fn default() -> Self {
        Self {
            trust: Trust::Absent,
            because: Some(Because::NoSource),
            engine_block_size: None,
        }
    }
}

impl Standing {
    /// Attached, caught up, and with blocks as configured.
    pub const EXACT: Standing = Standing {
        trust: Trust::Exact,
        because: None,
        engine_block_size: None,
    };

    /// A standing of which no block size is known.
    pub fn new(trust: Trust, because: Option<Because>) -> Self {
        Self {
            trust,
            because,
            engine_block_size: None,
        }
    }
}

impl Standing {
    /// Whether its events come in.
    pub fn is_attached(&self) -> bool {
        !matches!(self.because, Some(Because::Connecting | Because::Detached))
    }
}

/// What is made of trust.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrustRules {
    /// By what the credit for cached blocks is multiplied while their source is stale or catching up, from 0 to 1.
    pub stale_credit: f64,
    /// So many requests have to be answered that stored blocks, and nothing was heard.
    pub silence_requests: u32,
    /// And so much time has to pass since the first of them.
    pub silence_after: Duration,
    /// What becomes of the blocks of a rank when batches are lost for good.
    pub resync: Resync,
}

impl Default for TrustRules {
    fn default() -> Self {
        Self {
            stale_credit: 0.5,
            silence_requests: 3,
            silence_after: Duration::from_secs(10),
            resync: Resync::Keep,
        }
    }
}

impl TrustRules {
    /// What of the credit for cached blocks is left.
    pub fn credit(&self, standing: Standing) -> f64 {
        match (standing.trust, standing.because) {
            // Of who has no source only predictions are known, which are no less true for that.
            (Trust::Exact | Trust::Incomplete, _)
            | (Trust::Absent, None | Some(Because::NoSource)) => 1.0,
            // What it told before it became unusable may be anything by now.
            (Trust::Absent, Some(_)) => 0.0,
            (Trust::CatchingUp | Trust::Stale, _) => self.stale_credit,
        }
    }
}

/// What becomes of the blocks of a rank when batches are lost for good.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resync {
    /// They stay, doubted.
    #[default]
    Keep,
    /// They are forgotten, and what comes is learned anew.
    Clear,
}

/// What happened to a source, for those who look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Facts {
    /// Since when it stands as it does, in seconds of unix time.
    pub since: f64,
    /// How much later than the engine wrote it the last batch came, in seconds; less than nothing where the clocks differ.
    pub lag_seconds: Option<f64>,
    /// Whether the engine's clock is ahead of ours, so that the lag says nothing.
    pub clock_skew: bool,
    /// When the last batch came, in seconds of unix time.
    pub last_event: Option<f64>,
    /// Its number.
    pub last_number: Option<u64>,
    /// Batches taken.
    pub batches: u64,
    /// Gaps in their numbers, closed or not.
    pub gaps: u64,
    /// Batches that are lost for good.
    pub lost_batches: u64,
    /// Batches that could not be read.
    pub undecodable: u64,
    /// Lives of the engine that began while we listened.
    pub restarts: u64,
    /// Blocks, as the index counts them, that may be gone.
    pub doubted_blocks: u64,
    /// Requests answered without a word since the last batch, of those that had to store blocks.
    pub unheard_requests: u32,
}

/// How far the connection is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Link {
    /// Not attached.
    #[default]
    Connecting,
    /// Attached, and asking for what was missed.
    Replaying,
    /// Attached.
    Attached,
}

/// One batch that was taken.
#[derive(Clone, Copy, Debug)]
pub struct Heard {
    /// When, by our clock that only goes forward.
    pub at: Instant,
    /// When, in seconds of unix time.
    pub unix: f64,
    /// When the engine wrote it, in seconds of unix time, where that is of interest: it is not where it was repeated.
    pub written: Option<f64>,
    /// Its number.
    pub number: u64,
}

/// So many own batches without one of another rank between them, and nobody else publishes here any more.
const OWN_IN_A_ROW: u32 = 64;

/// The event source of one worker rank as we see it.
#[derive(Clone, Debug, Default)]
pub struct Source {
    link: Link,
    /// Whether it was ever attached.
    known: bool,
    /// Whether the last batch could not be read.
    unread: bool,
    silent: bool,
    /// Whether its engine may hold blocks that were never told.
    untold: bool,
    unusable: Option<Because>,
    /// Own batches since one of another rank came, while that is not long ago.
    since_foreign: Option<u32>,
    engine_block_size: Option<BlockSize>,
    owed: Owed,
    heard: Option<Instant>,
    facts: Facts,
}

impl Source {
    /// A source that is not attached yet.
    pub fn new(unix: f64) -> Self {
        Self {
            facts: Facts {
                since: unix,
                ..Facts::default()
            },
            ..Self::default()
        }
    }

    /// How it stands.
    pub fn standing(&self) -> Standing {
        let unusable = self
            .unusable
            .or(self.since_foreign.map(|_| Because::OtherRank));
        let (trust, because) = match (unusable, self.link) {
            (Some(because), _) => (Trust::Absent, Some(because)),
            (None, Link::Connecting) if self.known => (Trust::Stale, Some(Because::Detached)),
            (None, Link::Connecting) => (Trust::CatchingUp, Some(Because::Connecting)),
            (None, Link::Replaying) => (Trust::CatchingUp, Some(Because::Replaying)),
            (None, Link::Attached) => match self.flaw() {
                None if self.untold => (Trust::Incomplete, Some(Because::UntoldBlocks)),
                None => (Trust::Exact, None),
                because => (Trust::Stale, because),
            },
        };
        Standing {
            trust,
            because,
            engine_block_size: self.engine_block_size,
        }
    }

    fn flaw(&self) -> Option<Because> {
        if self.silent {
            Some(Because::Silent)
        } else if self.unread {
            Some(Because::Undecodable)
        } else {
            (self.facts.doubted_blocks > 0).then_some(Because::LostBatches)
        }
    }

    /// What happened to it.
    pub fn facts(&self) -> Facts {
        Facts {
            unheard_requests: self.owed.requests(),
            ..self.facts
        }
    }

    /// Changes it; true if it stands otherwise now.
    pub fn change(&mut self, unix: f64, how: impl FnOnce(&mut Self)) -> bool {
        let before = self.standing();
        how(self);
        let changed = self.standing() != before;
        if changed {
            self.facts.since = unix;
        }
        changed
    }

    /// The connection is so far now.
    pub fn linked(&mut self, link: Link) {
        self.known |= link == Link::Attached;
        if link != Link::Attached {
            // Whoever is not attached cannot be heard. Whether who was silent still is shows with the next batch.
            self.owed = Owed::default();
        }
        self.link = link;
    }

    /// A batch was taken and read.
    pub fn heard(&mut self, batch: Heard) {
        self.unread = false;
        self.silent = false;
        self.owed = Owed::default();
        self.heard = Some(batch.at);
        self.facts.batches += 1;
        self.facts.last_event = Some(batch.unix);
        self.facts.last_number = Some(batch.number);
        if let Some(written) = batch.written {
            let lag = batch.unix - written;
            self.facts.lag_seconds = Some(lag);
            self.facts.clock_skew = lag < 0.0;
        }
    }

    /// A batch came that cannot be read.
    pub fn undecodable(&mut self) {
        self.unread = true;
        self.facts.undecodable += 1;
    }

    /// Numbers were missing.
    pub fn gap(&mut self) {
        self.facts.gaps += 1;
    }

    /// Batches are lost for good.
    pub fn lost(&mut self, batches: u64) {
        self.facts.lost_batches = self.facts.lost_batches.saturating_add(batches);
    }

    /// Something was not heard.
    pub fn missed(&mut self) {
        self.untold = true;
    }

    /// Whether the engine may hold blocks that were never told.
    pub fn untold(&mut self, untold: bool) {
        self.untold = untold;
    }

    /// So many blocks may be gone now.
    pub fn doubted(&mut self, blocks: u64) {
        self.facts.doubted_blocks = blocks;
    }

    /// The engine is a new one, and nothing of the old one is believed any more.
    pub fn restarted(&mut self) {
        self.facts.restarts += 1;
        self.cleared();
        self.engine_block_size = None;
        self.unusable = None;
        self.since_foreign = None;
    }

    /// The engine emptied its cache.
    pub fn cleared(&mut self) {
        self.emptied();
        self.untold = false;
    }

    /// Nothing of what it told is held any more.
    pub fn emptied(&mut self) {
        self.unread = false;
        self.facts.doubted_blocks = 0;
    }

    /// The engine's blocks are of this size, and can be used.
    pub fn sized(&mut self, engine: BlockSize) {
        self.engine_block_size = Some(engine);
        self.unusable = None;
    }

    /// Whether a batch names the rank it was taken for. Where two ranks publish to one place their batches take turns, so
    /// one of its own is no sign that the other has gone.
    pub fn named(&mut self, own: bool) {
        self.since_foreign = match own {
            false => Some(0),
            true => self
                .since_foreign
                .map(|own| own + 1)
                .filter(|own| *own < OWN_IN_A_ROW),
        };
    }

    /// Its events say nothing that could be used.
    pub fn unusable(&mut self, because: Because, engine: Option<BlockSize>) {
        self.unusable = Some(because);
        self.engine_block_size = engine.or(self.engine_block_size);
    }

    /// A request that had to store blocks was answered.
    pub fn answered(&mut self, routed: Instant, now: Instant) {
        if self.link == Link::Attached && self.heard.is_none_or(|heard| heard < routed) {
            self.owed.answered(now);
        }
    }

    /// Looks whether it is silent.
    pub fn look(&mut self, now: Instant, rules: &TrustRules) {
        self.silent |= self.owed.is_overdue(now, rules);
    }

    /// Whether it was found silent.
    pub fn is_silent(&self) -> bool {
        self.silent
    }
}

#[cfg(test)]
mod tests;
