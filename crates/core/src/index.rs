//! Index of the cached prefixes of all worker ranks, by storage tier.
//!
//! Blocks are stored in compressed tries that are navigated by local hashes, so a query compares
//! long runs of memory. The mapping from engine hashes to blocks is private to the writer of each
//! rank.
//!
//! The tries are sharded by the first block of the prompt, with one lock each. A query and a stored
//! run of blocks each lie in one shard. A reader therefore sees every event completely or not at
//! all, and waits for at most one event.

mod aging_bloom_filter;
mod arena;
mod cache_groups;
mod checkpoints;
mod children;
pub mod dump;
pub mod event;
mod extents;
mod ids;
mod layers;
mod limits;
mod overlaps;
mod owner_table;
mod owners;
mod path_writer;
mod position;
mod prefix_index;
mod reinsertion;
mod salts;
mod sizes;
mod slab;
mod stale_blocks;
mod stats;
mod trie;
mod watch;
mod writer;

pub(crate) use aging_bloom_filter::AgingBloomFilter;
pub use event::{ApplyOutcome, GroupNeed, KvEvent, StoredBlock};
pub use limits::BlockLimits;
pub use overlaps::{Overlaps, TierBlocks};
pub use owner_table::{DeviceBlockCounts, HybridSlots, RankDeviceBlocks};
pub(crate) use path_writer::{InsertedPath, PathEnd, PathWriter};
pub use position::{EventPosition, ReaderGroup, ReaderState, SharedPosition};
pub use prefix_index::PrefixIndex;
pub use salts::SaltTable;
pub use stats::{BlockCounts, EventCursor, IndexStats, SlotStats};
pub use watch::PrefixWatch;
pub use writer::{PurgedBlocks, RankWriter, ReconcileReport};

#[cfg(test)]
mod tests;
