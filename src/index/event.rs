//! What an engine says about its cache, in the index's own words: hashes already computed, tier already known.

use crate::block::{EngineHash, LocalHash};
use crate::tier::Tier;

/// One stored block: the engine's name for it and the hash of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// The engine's name.
    pub engine: EngineHash,
    /// Ours.
    pub local: LocalHash,
}

/// One change of one worker rank's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// A run of blocks is now cached, following `parent` or the start of a prompt.
    Stored {
        /// The block before the first one.
        parent: Option<EngineHash>,
        /// The run, in order.
        blocks: Vec<StoredBlock>,
        /// Where they lie.
        tier: Tier,
    },
    /// Blocks left a tier.
    Removed {
        /// Their names.
        blocks: Vec<EngineHash>,
        /// The tier they left.
        tier: Tier,
    },
    /// The whole cache of the rank is empty, in every tier.
    Cleared,
}

impl KvEvent {
    /// The kind, as named in metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            KvEvent::Stored { .. } => "stored",
            KvEvent::Removed { .. } => "removed",
            KvEvent::Cleared => "cleared",
        }
    }
}

/// What became of one event. Outcomes never stop the stream; they are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Applied whole.
    Ok,
    /// Applied; every block was held already, so only copies were counted.
    DuplicateStore,
    /// Dropped: the parent is not known on this rank, and attaching it at the root would invent a prefix.
    ParentNotFound,
    /// Applied as far as possible: some removed blocks were not known on this rank.
    BlockNotFound,
}

impl Outcome {
    /// The name used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::DuplicateStore => "duplicate_store",
            Outcome::ParentNotFound => "parent_block_not_found",
            Outcome::BlockNotFound => "block_not_found",
        }
    }
}
