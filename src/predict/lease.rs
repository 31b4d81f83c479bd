//! The hold of a live request on the blocks of its prompt and on those it generates.

use std::sync::Arc;

use super::chains::{RunId, Stamp};
use super::rank::Rank;
use crate::block::BlockHashes;

/// What one request holds on a rank; dropping it lets go. On ranks that go by time it holds nothing.
#[derive(Debug)]
#[must_use = "dropping a lease lets the request's blocks be evicted"]
pub struct Lease {
    recorded: Option<Recorded>,
}

/// What a request left on a rank.
#[derive(Debug)]
pub(super) struct Recorded {
    pub(super) rank: Arc<Rank>,
    /// When.
    pub(super) stamp: Stamp,
    /// Leading blocks that were there before.
    pub(super) known: usize,
    /// What it holds.
    pub(super) held: Option<Held>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// The run that the prompt ends with; none if the prompt has no complete block.
    pub(super) tail: Option<RunId>,
    pub(super) generated: u64,
}

impl Lease {
    /// Nothing is held.
    pub(super) fn none() -> Self {
        Self { recorded: None }
    }

    pub(super) fn of(recorded: Recorded) -> Self {
        Self {
            recorded: Some(recorded),
        }
    }

    /// The request has filled so many more blocks of its own. Their content is not known, but they take room: after the
    /// request as well, until they are evicted or a longer prompt turns out to be what they hold.
    pub fn grow(&mut self, blocks: u64) {
        if let Some(Recorded {
            rank,
            held: Some(held),
            ..
        }) = &mut self.recorded
        {
            held.generated += blocks;
            rank.grow(blocks);
        }
    }

    /// The request went somewhere else: what was entered for it and used by nobody since is taken out again. Says how
    /// many blocks it had filled.
    pub fn revoke(mut self, prompt: &BlockHashes) -> u64 {
        let Some(Recorded {
            rank,
            stamp,
            known,
            held,
        }) = self.recorded.take()
        else {
            return 0;
        };
        rank.revoke(prompt, stamp, known, held);
        held.map_or(0, |held| held.generated)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(Recorded {
            rank,
            held: Some(held),
            ..
        }) = self.recorded.take()
        {
            rank.release(held.tail, held.generated);
        }
    }
}
