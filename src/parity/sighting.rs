//! A real request whose blocks are looked for after it was answered. It holds a place among a few of its model, given back
//! by drop, so that what is looked after never grows with the traffic.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Change, Standing};
use crate::block::BlockHashes;
use crate::worker::WorkerRank;

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

/// A request to be looked after.
#[derive(Debug)]
pub struct Sighting {
    standing: Arc<Standing>,
    rank: WorkerRank,
    hashes: BlockHashes,
    stores: u64,
}

impl Sighting {
    pub(super) fn new(standing: Arc<Standing>, (rank, hashes): (WorkerRank, BlockHashes), stores: u64) -> Self {
        Self { standing, rank, hashes, stores }
    }

    /// Where its blocks should be.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// It was answered there: its blocks are to be looked for.
    pub fn answered(self, by: WorkerRank) {
        if by == self.rank {
            let standing = self.standing.clone();
            standing.ready.lock().push(self);
        }
    }

    /// The blocks that should be there.
    pub fn hashes(&self) -> &BlockHashes {
        &self.hashes
    }

    /// What was found: `held` leading blocks of those that have to be there, after `stores` events that stored something.
    /// `None` where that says nothing, because the engine told of nothing new, or may not have told all: what it had
    /// cached before we listened it never tells.
    pub fn found(self, (held, of): (usize, usize), stores: u64, told: Told) -> Option<(Evidence, Change)> {
        let evidence = match held {
            _ if of == 0 => return None,
            held if held >= of => Evidence::Confirmed,
            _ if told == Told::Some => {
                self.standing.undecided(self.rank.worker);
                return None;
            }
            _ if stores <= self.stores => return None,
            block => Evidence::Unconfirmed { block },
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
