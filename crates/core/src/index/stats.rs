//! Counters of the index and of its slots.

use serde::Serialize;

use super::limits::BlockLimits;
use crate::worker::RankSlot;

/// Position in the event stream of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventCursor {
    /// Number of events that stored blocks.
    pub stores: u64,
    /// Number of times events were lost.
    pub gaps: u32,
}

/// Size of the index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IndexStats {
    /// One entry per slot that has a writer, in slot order.
    pub slots: Vec<SlotStats>,
    /// Sum over the slots.
    pub total: BlockCounts,
    /// Number of distinct blocks, regardless of the number of ranks that hold them.
    pub distinct_blocks: u64,
    /// Number of trie runs that contain them.
    pub runs: u64,
}

/// Size of one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SlotStats {
    /// The slot.
    pub slot: RankSlot,
    /// Blocks held by the slot.
    #[serde(flatten)]
    pub counts: BlockCounts,
    /// Limits of the writer.
    pub limits: BlockLimits,
    /// Number of blocks and engine hashes dropped because of a limit since the writer was created.
    pub over_limit: u64,
}

/// Blocks per tier, and copies: an engine may hold one block several times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BlockCounts {
    /// Blocks in device memory.
    pub device: u64,
    /// Blocks in host memory.
    pub host: u64,
    /// Blocks on disk.
    pub disk: u64,
    /// Blocks in external storage.
    pub external: u64,
    /// Copies in all tiers.
    pub copies: u64,
    /// Blocks of lower tiers whose parent is unknown. They are included in the tier's count, but no
    /// query finds them yet.
    pub waiting: u64,
}
