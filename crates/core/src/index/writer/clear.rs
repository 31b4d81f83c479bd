//! Clears a rank, and removes it from the index.

use super::RankWriter;
use crate::index::ids::{BlockLocation, OwnerId};

/// Blocks that a long change inserts or removes before it lets readers in.
pub(super) const SWEEP_BATCH: usize = 256;

impl RankWriter {
    /// Stops reporting the blocks in one step, and then removes them in batches.
    pub(super) fn clear(&mut self) {
        let left = self.owner;
        self.owner = self.index.owners.write().reassign(left);
        self.shared.reset();
        self.unreported_evictions = None;
        self.evicted = Default::default();
        self.copy_epochs.clear();
        self.extra_copies.clear();
        self.aliases.clear();
        self.orphans = Default::default();
        // The next events announce the groups again. Another model may have none.
        self.groups = None;
        self.sweep(left);
    }

    /// Removes an owner that is no longer reported from all tries.
    fn sweep(&mut self, left: OwnerId) {
        let names = std::mem::take(&mut self.blocks);
        let mut locations: Vec<BlockLocation> =
            names.iter().map(|(_, named)| named.location).collect();
        drop(names);
        locations.sort_unstable();
        for shard in locations.chunk_by(|a, b| a.shard == b.shard) {
            for some in shard.chunks(SWEEP_BATCH) {
                let mut trie = self.index.shards[usize::from(some[0].shard)].write();
                some.iter()
                    .for_each(|location| trie.remove_owner(location.block, left));
            }
        }
        self.index.owners.write().free(left);
    }
}

impl Drop for RankWriter {
    fn drop(&mut self) {
        self.index.owners.write().unregister(self.owner);
        self.sweep(self.owner);
    }
}
