//! Clears a rank, and removes it from the index.

use super::RankWriter;
use crate::index::ids::{BlockLocation, OwnerId};

/// Number of blocks that a clear or a purge removes before waiting readers get the lock.
pub(super) const SWEEP_BATCH: usize = 256;

impl RankWriter {
    /// Stops reporting the blocks in one step, and then removes them in batches.
    pub(super) fn clear(&mut self) {
        let old_owner = self.owner;
        self.owner = self.index.owners.write().reassign(old_owner);
        self.shared.reset();
        self.unreported_evictions = None;
        self.evicted = Default::default();
        self.copy_epochs.clear();
        self.extra_copies.clear();
        self.aliases.clear();
        self.orphans = Default::default();
        // The next events announce the groups again. Another model may have none.
        self.groups = None;
        self.sweep(old_owner);
    }

    /// Removes an owner from all tries. It is no longer reported to readers.
    fn sweep(&mut self, old_owner: OwnerId) {
        let blocks = std::mem::take(&mut self.blocks);
        let mut locations: Vec<BlockLocation> =
            blocks.iter().map(|(_, mapped)| mapped.location).collect();
        drop(blocks);
        locations.sort_unstable();
        for shard in locations.chunk_by(|a, b| a.shard == b.shard) {
            for batch in shard.chunks(SWEEP_BATCH) {
                let mut trie = self.index.shards[usize::from(batch[0].shard)].write();
                batch
                    .iter()
                    .for_each(|location| trie.remove_owner(location.block, old_owner));
            }
        }
        self.index.owners.write().free(old_owner);
    }
}

impl Drop for RankWriter {
    fn drop(&mut self) {
        self.index.owners.write().unregister(self.owner);
        self.sweep(self.owner);
    }
}
