//! Watches on prompts: the number of leading blocks of a prompt that a worker rank has held at any
//! moment since the watch began. A full cache may evict the blocks of a request within seconds of
//! its answer. A later lookup cannot tell whether the engine stored them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::event::StoredBlock;
use super::owner_table::SharedRankState;
use super::prefix_index::PrefixIndex;
use crate::block::{BlockHashes, LocalHash};
use crate::worker::RankSlot;

/// Watch on one prompt at one worker rank. Dropping it ends the watch.
#[derive(Debug)]
pub struct PrefixWatch {
    prefix: Arc<WatchedPrefix>,
    shared: Arc<SharedRankState>,
}

impl PrefixWatch {
    /// Returns the largest number of leading blocks that the rank has held at once since the watch
    /// began.
    pub fn max_held(&self) -> usize {
        self.prefix.max_held.load(Ordering::Relaxed)
    }

    /// Returns whether the slot still has the writer that it had when the watch began. The watch
    /// does not receive the stores of a later writer.
    pub fn is_current(&self, index: &PrefixIndex, slot: RankSlot) -> bool {
        index
            .owners
            .read()
            .find(slot)
            .is_some_and(|(_, shared)| Arc::ptr_eq(shared, &self.shared))
    }
}

impl Drop for PrefixWatch {
    fn drop(&mut self) {
        self.shared.watches.remove(&self.prefix);
    }
}

impl PrefixIndex {
    /// Watches a prompt on a slot, starting with the blocks held now. Returns `None` if the slot
    /// has no writer.
    pub fn watch(&self, hashes: &BlockHashes, slot: RankSlot) -> Option<PrefixWatch> {
        let prefix = Arc::new(WatchedPrefix {
            locals: hashes.locals().into(),
            max_held: AtomicUsize::new(0),
        });
        let (owner, shared) = self
            .owners
            .read()
            .find(slot)
            .map(|(owner, shared)| (owner, shared.clone()))?;
        // Registered before the lookup: a store that misses the watch is complete before the lookup
        // begins.
        shared.watches.add(prefix.clone());
        prefix.record(self.held_prefix(&prefix.locals, owner));
        Some(PrefixWatch { prefix, shared })
    }
}

/// Prompt that is watched on one slot.
#[derive(Debug)]
struct WatchedPrefix {
    locals: Box<[LocalHash]>,
    /// Largest number of leading blocks held at once.
    max_held: AtomicUsize,
}

/// Watched prompts of one writer.
#[derive(Debug, Default)]
pub(super) struct PrefixWatches {
    /// Length of the list, read without its lock.
    count: AtomicUsize,
    list: Mutex<Vec<Arc<WatchedPrefix>>>,
}

impl WatchedPrefix {
    fn record(&self, held: usize) {
        self.max_held.fetch_max(held, Ordering::Relaxed);
    }

    /// Returns whether a stored run can extend the held prefix. A run whose first block is not in
    /// the prompt cannot.
    fn may_grow_by(&self, blocks: &[StoredBlock]) -> bool {
        let is_complete = self.max_held.load(Ordering::Relaxed) == self.locals.len();
        !is_complete
            && blocks
                .first()
                .is_some_and(|first| self.locals.contains(&first.local))
    }
}

impl PrefixWatches {
    /// Handles stored blocks. `count_held` counts the leading blocks of a prompt that the writer
    /// holds. Costs one atomic load while nothing is watched.
    pub(super) fn on_stored(
        &self,
        blocks: &[StoredBlock],
        count_held: impl Fn(&[LocalHash]) -> usize,
    ) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        for prefix in self
            .list
            .lock()
            .iter()
            .filter(|prefix| prefix.may_grow_by(blocks))
        {
            prefix.record(count_held(&prefix.locals));
        }
    }

    fn add(&self, prefix: Arc<WatchedPrefix>) {
        let mut list = self.list.lock();
        list.push(prefix);
        self.count.store(list.len(), Ordering::Release);
    }

    fn remove(&self, prefix: &Arc<WatchedPrefix>) {
        let mut list = self.list.lock();
        list.retain(|other| !Arc::ptr_eq(other, prefix));
        self.count.store(list.len(), Ordering::Release);
    }
}
