//! The hold of a live request on the blocks of its prompt and on those it generates.

use std::sync::Arc;

use super::chains::RunId;
use super::rank::Rank;
use crate::block::BlockHashes;

/// What one request holds on a rank; dropping it lets go. On ranks that go by time it holds nothing.
#[derive(Debug)]
#[must_use = "dropping a lease lets the request's blocks be evicted"]
pub struct Lease {
    held: Option<Held>,
}

#[derive(Debug)]
struct Held {
    rank: Arc<Rank>,
    /// The run that the prompt ends with; none if the prompt has no complete block.
    tail: Option<RunId>,
    generated: u64,
}

impl Lease {
    /// Nothing is held.
    pub(super) fn none() -> Self {
        Self { held: None }
    }

    pub(super) fn of(rank: Arc<Rank>, tail: Option<RunId>) -> Self {
        Self { held: Some(Held { rank, tail, generated: 0 }) }
    }

    /// The request went somewhere else: what is here only because of it, and nobody has used since, is not here. Says how
    /// many blocks it has filled itself.
    pub fn revoke(mut self, prompt: &BlockHashes) -> u64 {
        let _ = prompt;
        self.held.as_mut().map_or(0, |held| held.generated)
    }

    /// The request has filled so many more blocks of its own. Their content is not known, but they take room: after the
    /// request as well, until they are evicted or a longer prompt turns out to be what they hold.
    pub fn grow(&mut self, blocks: u64) {
        if let Some(held) = &mut self.held {
            held.generated += blocks;
            held.rank.grow(blocks);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            held.rank.release(held.tail, held.generated);
        }
    }
}
