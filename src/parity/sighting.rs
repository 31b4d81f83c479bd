//! A real request whose blocks are looked for after it was answered. It holds a place among a few of its model, given back
//! by drop, so that what is looked after never grows with the traffic.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Change, Standing};
use crate::block::BlockHashes;
use crate::index::{Moment, PrefixWatch};
use crate::worker::{BlockSize, WorkerRank};

/// What a request's blocks, found or not, say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// The blocks appeared.
    Confirmed,
    /// They did not, though the engine told of others.
    Unconfirmed {
        /// The first that is missing.
        block: usize,
    },
}

/// How much of what an engine holds its events told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// All of it.
    All,
    /// It may hold more: blocks were stored of which nothing was heard.
    Some,
}

/// What we foretold of a request's blocks by ourselves.
#[derive(Clone, Debug, Default)]
pub enum Foretold {
    /// Nothing: its tokens came from elsewhere, or are not known.
    #[default]
    Nothing,
    /// The blocks of its prompt, in which an image or the like stands. Clients name those, and engines as they are set up:
    /// where such a block is missing, that says nothing of tokens.
    Illustrated,
    /// The blocks of its prompt.
    Prompt,
    /// These blocks, by which it is not routed because they are not believed.
    Shadow(Box<BlockHashes>),
}

impl Foretold {
    /// Whether its blocks are made of our own tokens.
    pub fn is_ours(&self) -> bool {
        matches!(self, Foretold::Illustrated | Foretold::Prompt)
    }
}

/// A request whose blocks are checked after its answer.
#[derive(Debug)]
pub struct Sighting {
    standing: Arc<Standing>,
    rank: WorkerRank,
    prompt: WatchedPrompt,
}

/// The blocks that a worker rank is expected to store, watched from the moment of the choice.
#[derive(Debug)]
pub struct WatchedPrompt {
    /// Also reports blocks that are evicted before the check.
    pub watch: PrefixWatch,
    /// Whole blocks of the prompt.
    pub blocks: usize,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// The position in the rank's events at that moment.
    pub since: Moment,
}

/// What the index shows of a watched prompt at the time of the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptCheck {
    /// Most leading blocks that were held at once.
    pub held: usize,
    /// Blocks that the engine has to store.
    pub expected: usize,
    /// The position in the rank's events now.
    pub now: Moment,
    /// How completely the events report the cache of the engine.
    pub told: Told,
}

impl Sighting {
    pub(super) fn new(standing: Arc<Standing>, rank: WorkerRank, prompt: WatchedPrompt) -> Self {
        Self {
            standing,
            rank,
            prompt,
        }
    }

    /// The worker rank that should store the blocks.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// The watched blocks.
    pub fn prompt(&self) -> &WatchedPrompt {
        &self.prompt
    }

    /// Records that this rank answered the request. Only the blocks of the chosen rank are checked.
    pub fn answered(self, by: WorkerRank) {
        if by == self.rank {
            let standing = self.standing.clone();
            standing.ready.lock().push(self);
        }
    }

    /// Judges the check and enters the result. `None` where the check proves nothing: the engine stored nothing at all, or
    /// its events may not report everything that it holds.
    pub fn found(self, check: PromptCheck) -> Option<(Evidence, Change)> {
        let since = self.prompt.since;
        let evidence = match check {
            PromptCheck { expected: 0, .. } => return None,
            PromptCheck { held, expected, .. } if held >= expected => Evidence::Confirmed,
            // A store may be among the events that were lost since the choice, even if the source is exact again.
            PromptCheck { told, now, .. } if told == Told::Some || now.gaps != since.gaps => {
                self.standing.undecided(self.rank.worker);
                return None;
            }
            PromptCheck { now, .. } if now.stores <= since.stores => return None,
            PromptCheck { held, .. } => Evidence::Unconfirmed { block: held },
        };
        let standing = self.standing.clone();
        Some((evidence, standing.seen(self.rank.worker, evidence)))
    }
}

impl Drop for Sighting {
    fn drop(&mut self) {
        self.standing.sightings.fetch_sub(1, Ordering::Relaxed);
    }
}
