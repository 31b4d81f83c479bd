//! Writer of a slot whose blocks have no engine hashes. It inserts and removes paths of prompts.
//!
//! The holds of the slot in the tries are the only record of its blocks, so a block costs only its
//! memory in a trie. The caller keeps the last block of each path, from which the tries lead back
//! to all blocks before it.

use std::sync::Arc;

use parking_lot::RwLockWriteGuard;

use super::ids::{BlockId, BlockLocation, OwnerId};
use super::owner_table::SharedRankState;
use super::prefix_index::{PrefixIndex, shard_of};
use super::trie::LayerHold;
use crate::block::{LocalHash, StorageTier};
use crate::worker::RankSlot;

/// Blocks inserted or removed before waiting readers get the lock. A reader may see a path only up
/// to some block.
const BLOCKS_PER_STEP: usize = 512;

/// Last block of a path. Valid while the path is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PathEnd(BlockLocation);

/// Result of inserting a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InsertedPath {
    /// Number of inserted blocks. Smaller than requested only if the index is full.
    pub(crate) blocks: usize,
    /// New end of the path. `None` only if the path is empty.
    pub(crate) end: Option<PathEnd>,
}

/// Inserts and removes the paths of one slot, all on the device. It must be empty when it is
/// dropped.
#[derive(Debug)]
pub(crate) struct PathWriter {
    index: Arc<PrefixIndex>,
    owner: OwnerId,
    shared: Arc<SharedRankState>,
    held: u64,
    /// Buffer that is reused.
    path: Vec<BlockId>,
}

impl PrefixIndex {
    /// Creates a writer whose blocks have no engine hashes. It replaces an earlier writer of the
    /// slot.
    pub(crate) fn create_path_writer(self: &Arc<Self>, slot: RankSlot) -> PathWriter {
        let shared = Arc::new(SharedRankState::default());
        let owner = self.owners.write().register(slot, shared.clone());
        PathWriter {
            index: self.clone(),
            owner,
            shared,
            held: 0,
            path: Vec::new(),
        }
    }
}

impl PathWriter {
    /// Counts the leading blocks of a prompt that are held.
    pub(crate) fn known_blocks(&self, locals: &[LocalHash]) -> usize {
        let Some(&first) = locals.first() else {
            return 0;
        };
        let trie = self.index.shards[shard_of(first)].read();
        let held = trie
            .matching_runs(locals)
            .take_while(|(_, owners)| owners.layers(self.owner).has(StorageTier::Device));
        held.last().map_or(0, |(run, _)| run.end as usize)
    }

    /// Inserts blocks that are not held yet, after a path or at the start of a prompt.
    pub(crate) fn insert(&mut self, after: Option<PathEnd>, locals: &[LocalHash]) -> InsertedPath {
        let Some(&first) = locals.first() else {
            return InsertedPath {
                blocks: 0,
                end: after,
            };
        };
        let shard = after.map_or_else(
            || shard_of(first),
            |PathEnd(location)| usize::from(location.shard),
        );
        let hold = LayerHold::new(self.owner, StorageTier::Device);
        let index = self.index.clone();
        let mut last = after.map(|PathEnd(location)| location.block);
        let mut blocks = 0;
        let mut trie = index.shards[shard].write();
        for (step, batch) in locals.chunks(BLOCKS_PER_STEP).enumerate() {
            if step > 0 {
                RwLockWriteGuard::bump(&mut trie);
            }
            self.path.clear();
            trie.trace_path(last, batch, &mut self.path);
            trie.set_hold_all(&self.path, hold, true);
            let new = &batch[self.path.len()..];
            trie.insert(
                self.path.last().copied().or(last),
                new,
                hold,
                &mut self.path,
            );
            last = self.path.last().copied().or(last);
            blocks += self.path.len();
            if self.path.len() < batch.len() {
                break;
            }
        }
        drop(trie);
        self.adjust_counts(blocks as i64);
        InsertedPath {
            blocks,
            end: last.map(|block| PathEnd(BlockLocation::new(shard, block))),
        }
    }

    /// Removes blocks from the end of a path. Returns the new end.
    pub(crate) fn remove_tail(&mut self, end: PathEnd, blocks: u64) -> Option<PathEnd> {
        let PathEnd(BlockLocation { shard, block }) = end;
        let hold = LayerHold::new(self.owner, StorageTier::Device);
        let index = self.index.clone();
        let mut remaining = blocks as usize;
        let mut last = Some(block);
        let mut step = BLOCKS_PER_STEP;
        let mut trie = index.shards[usize::from(shard)].write();
        while let Some(block) = last.filter(|_| remaining > 0) {
            if step == 0 {
                RwLockWriteGuard::bump(&mut trie);
                step = BLOCKS_PER_STEP;
            }
            let (first, count) = trie.extent_ending_at(block, remaining.min(step));
            last = trie.origin(first).0;
            trie.set_hold(first, count, hold, false);
            step -= count;
            remaining -= count;
        }
        drop(trie);
        self.adjust_counts(remaining as i64 - blocks as i64);
        last.map(|block| PathEnd(BlockLocation { shard, block }))
    }

    /// Returns the end of the path before its last `blocks` blocks, and the local hash of the first
    /// of these.
    pub(crate) fn trace_back(&self, end: PathEnd, blocks: u64) -> (Option<PathEnd>, LocalHash) {
        let PathEnd(BlockLocation { shard, mut block }) = end;
        let trie = self.index.shards[usize::from(shard)].read();
        let mut remaining = blocks as usize;
        loop {
            let (first, count) = trie.extent_ending_at(block, remaining);
            let (before, local) = trie.origin(first);
            remaining -= count;
            match before {
                Some(before) if remaining > 0 => block = before,
                _ => {
                    return (
                        before.map(|block| PathEnd(BlockLocation { shard, block })),
                        local,
                    );
                }
            }
        }
    }

    /// Stops reporting the blocks. They still have to be removed.
    pub(crate) fn hide(&self) {
        self.index.owners.write().unregister(self.owner);
    }

    fn adjust_counts(&mut self, by: i64) {
        self.held = self.held.saturating_add_signed(by);
        self.shared.add_blocks(StorageTier::Device, by);
        self.shared.add_copies(by);
    }
}

impl Drop for PathWriter {
    fn drop(&mut self) {
        debug_assert!(
            self.held == 0 || std::thread::panicking(),
            "{} blocks are still held",
            self.held
        );
        let mut owners = self.index.owners.write();
        owners.unregister(self.owner);
        // The next user of an owner id that is still in the tries would appear to hold these
        // blocks.
        if self.held == 0 {
            owners.free(self.owner);
        }
    }
}

#[cfg(test)]
mod tests;
