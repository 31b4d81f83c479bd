//! Numbers of owners and blocks.

/// Number of hash-map lookups to prefetch ahead of the current one.
pub(super) const PREFETCH_DISTANCE: usize = 16;

/// Number under which the blocks of a writer are stored in the tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct OwnerId(pub(super) u32);

impl OwnerId {
    pub(super) fn at(self) -> usize {
        self.0 as usize
    }
}

/// Id of a block in one trie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct BlockId(pub(super) u32);

/// Shard and id of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct BlockLocation {
    pub(super) shard: u8,
    pub(super) block: BlockId,
}

impl BlockLocation {
    pub(super) fn new(shard: usize, block: BlockId) -> Self {
        Self {
            shard: shard as u8,
            block,
        }
    }
}
