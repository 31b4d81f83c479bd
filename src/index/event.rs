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
