//! Sizes of the data structures of the index. Unit tests use small sizes, so that short sequences
//! of events reach every growth, split and limit.

/// Returns the size for production, or the one for unit tests.
const fn size(production: usize, test: usize) -> usize {
    if cfg!(test) { test } else { production }
}

/// Engine hashes per half of the eviction filter.
pub(super) const FILTER_HALF_CAPACITY: usize = size(1 << 16, 1 << 10);

/// Positions in a chunk of the arena. An extent lies within one chunk.
pub(super) const CHUNK: usize = size(1 << 13, 1 << 7);

/// Maximum number of salted blocks per rank. The salts of further blocks are unknown, and stores
/// that follow them are dropped.
pub(super) const MAX_SALTED_BLOCKS: usize = size(1 << 22, 1 << 12);

/// Maximum number of salt bytes per rank. A salt counts once for every block that has it.
pub(super) const MAX_SALT_BYTES: usize = size(1 << 28, 1 << 16);

/// Number of owners from which a set uses bits.
pub(super) const DENSE_THRESHOLD: usize = size(32, 2);

/// Number of owners below which a list is used again.
pub(super) const SPARSE_THRESHOLD: usize = size(16, 2);

/// Distance between checkpoints. The checkpoint is at the last position of each interval.
pub(super) const CHECKPOINT_INTERVAL: usize = size(1 << 6, 1 << 2);

/// Maximum number of orphans per rank. They do not influence routing, so their memory is limited.
pub(super) const MAX_ORPHANS: usize = size(1 << 18, 1 << 12);

/// Entries per page of an engine map.
pub(super) const ENTRIES_PER_PAGE: usize = size(1 << 10, 16);

/// Maximum number of hashes per partition of an engine map. Limited by the entry number in a slot,
/// and by the time to rebuild a table.
pub(super) const PARTITION_CAPACITY: usize = size(1 << 19, 200);
