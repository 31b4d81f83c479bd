//! KV events of an engine in the index's terms: hashes are computed and tiers are resolved.

use strum::IntoStaticStr;

use crate::block::{EngineHash, LocalHash, StorageTier};

pub use super::cache_groups::GroupNeed;

/// One stored block: the engine's hash and the local hash of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// Hash chosen by the engine.
    pub engine: EngineHash,
    /// Hash of the tokens.
    pub local: LocalHash,
}

/// Change of one worker rank's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Consecutive blocks are cached after `parent`, or at the start of a prompt.
    Stored {
        /// Block before the first one.
        parent: Option<EngineHash>,
        /// Stored blocks, in order.
        blocks: Vec<StoredBlock>,
        /// Tier of the blocks.
        tier: StorageTier,
    },
    /// Blocks were removed from a tier.
    Removed {
        /// Engine hashes of the blocks.
        blocks: Vec<EngineHash>,
        /// Tier of the blocks.
        tier: StorageTier,
    },
    /// A cache group other than the main one holds its share of blocks on the device. The main
    /// group stores the same engine hashes earlier or later, which determines their location.
    GroupStored {
        /// Number of the group, assigned by the engine.
        group: u32,
        /// Blocks that the group must hold of a prefix.
        need: GroupNeed,
        /// The blocks, in no particular order. Empty if the event only announces the group.
        blocks: Vec<EngineHash>,
    },
    /// A cache group other than the main one lost its share of blocks.
    GroupRemoved {
        /// Number of the group, assigned by the engine.
        group: u32,
        /// Engine hashes of the blocks.
        blocks: Vec<EngineHash>,
    },
    /// The whole cache of the rank is empty, in every tier and every group.
    Cleared,
}

impl KvEvent {
    /// Returns the kind used in metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            KvEvent::Stored { .. } | KvEvent::GroupStored { .. } => "stored",
            KvEvent::Removed { .. } | KvEvent::GroupRemoved { .. } => "removed",
            KvEvent::Cleared => "cleared",
        }
    }
}

/// Result of applying one event. Outcomes are counted and never stop the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ApplyOutcome {
    /// Applied completely.
    Ok,
    /// Applied. All blocks were held already, so only copies were counted.
    DuplicateStore,
    /// Applied to a lower tier. The parent is unknown on this rank, and the blocks count once it is
    /// stored.
    #[strum(serialize = "parent_block_awaited")]
    ParentAwaited,
    /// Dropped in part, in a lower tier: too many blocks have an unknown parent.
    TooManyWaiting,
    /// Dropped in part: a limit of the index is reached.
    IndexFull,
    /// Dropped: the parent is unknown on this rank. Attaching the blocks to the root would create a
    /// wrong prefix.
    #[strum(serialize = "parent_block_not_found")]
    ParentNotFound,
    /// Applied as far as possible: some removed blocks were unknown on this rank.
    BlockNotFound,
    /// The engine has more cache groups, or more distinct requirements, than can be tracked. No
    /// device prefix of this rank counts as reusable.
    TooManyGroups,
}

impl ApplyOutcome {
    /// Returns the name used in metrics.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
