//! What an engine says about its cache, in the index's own words: hashes already computed, tier already known.

use crate::block::{EngineHash, LocalHash};
use crate::tier::Tier;

pub use super::needs::GroupNeed;

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
    /// A cache group beside the main one holds its share of blocks on the device. The main group gives them their place
    /// by the same names, before or after.
    GroupStored {
        /// The engine's number of the group.
        group: u32,
        /// What the group must hold of a prefix.
        need: GroupNeed,
        /// The blocks, in no particular order; none where the event only tells that the group exists.
        blocks: Vec<EngineHash>,
    },
    /// A cache group beside the main one lost its share of blocks.
    GroupRemoved {
        /// The engine's number of the group.
        group: u32,
        /// The blocks.
        blocks: Vec<EngineHash>,
    },
    /// The whole cache of the rank is empty, in every tier and every group.
    Cleared,
}

impl KvEvent {
    /// The kind, as named in metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            KvEvent::Stored { .. } | KvEvent::GroupStored { .. } => "stored",
            KvEvent::Removed { .. } | KvEvent::GroupRemoved { .. } => "removed",
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
    /// Applied to a lower tier; blocks wait for a parent that is not known on this rank, and count once it is.
    ParentAwaited,
    /// Dropped in part, in a lower tier: too many blocks wait for parents that are not known on this rank.
    TooManyWaiting,
    /// Dropped in part: the index has as many blocks as it can name.
    IndexFull,
    /// Dropped: the parent is not known on this rank, and attaching it at the root would invent a prefix.
    ParentNotFound,
    /// Applied as far as possible: some removed blocks were not known on this rank.
    BlockNotFound,
    /// The engine has more cache groups, or more kinds of them, than can be followed, so nothing of this rank is
    /// believed to be reusable from the device.
    TooManyGroups,
}

impl Outcome {
    /// The name used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::DuplicateStore => "duplicate_store",
            Outcome::ParentAwaited => "parent_block_awaited",
            Outcome::TooManyWaiting => "too_many_waiting",
            Outcome::IndexFull => "index_full",
            Outcome::ParentNotFound => "parent_block_not_found",
            Outcome::BlockNotFound => "block_not_found",
            Outcome::TooManyGroups => "too_many_groups",
        }
    }
}
