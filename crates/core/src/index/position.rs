//! Position of the index in the event stream of a rank.
//!
//! Decision 0016.

use serde::{Deserialize, Serialize};

use crate::block::{BlockWindows, StorageTier};

/// Newest batch of events in the index, and the state needed to continue after it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventPosition {
    /// Sequence number of the batch.
    pub seq: u64,
    /// Digest of its payload, to recognize the batch.
    pub digest: u64,
    /// Digest of the event source and the settings of its reader. Another reader would compute
    /// other blocks from the same events.
    pub reader_digest: u64,
    /// Whether the reader was attached when the position was taken, so that only later events can
    /// be missing.
    pub is_live: bool,
    /// State of the reader.
    pub reader_state: ReaderState,
}

/// State that later events depend on and the index does not contain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReaderState {
    /// Cache group whose engine hashes identify the blocks.
    pub main_group: Option<u32>,
    /// All known cache groups, by number.
    pub groups: Vec<ReaderGroup>,
    /// Tokens per engine block, by tier.
    pub block_sizes: [Option<u32>; StorageTier::ALL.len()],
    /// Latest tokens per engine block on the device. Unlike `block_sizes`, it survives a cleared
    /// cache.
    pub engine_block_size: Option<u32>,
    /// Tokens that the hash of each block covers in the last store on the device.
    pub windows: Option<BlockWindows>,
    /// Whether valid stores were dropped.
    pub has_dropped_stores: bool,
}

/// Known cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReaderGroup {
    /// Number of the group, assigned by the engine.
    pub id: u32,
    /// Kind of the group, as encoded by the event reader.
    pub kind: u8,
    /// Tokens of the sliding window.
    pub window: Option<u32>,
}
