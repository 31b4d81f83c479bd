//! Prompts that are watched on the slot of one writer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::event::StoredBlock;
use crate::block::LocalHash;

/// Prompt that is watched on one slot.
#[derive(Debug)]
pub(super) struct WatchedPrefix {
    pub(super) locals: Box<[LocalHash]>,
    /// Largest number of leading blocks held at once.
    pub(super) max_held: AtomicUsize,
}

/// Watched prompts of one writer.
#[derive(Debug, Default)]
pub(super) struct PrefixWatches {
    /// Length of the list, read without its lock.
    count: AtomicUsize,
    list: Mutex<Vec<Arc<WatchedPrefix>>>,
}

impl WatchedPrefix {
    pub(super) fn record(&self, held: usize) {
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

    pub(super) fn add(&self, prefix: Arc<WatchedPrefix>) {
        let mut list = self.list.lock();
        list.push(prefix);
        self.count.store(list.len(), Ordering::Release);
    }

    pub(super) fn remove(&self, prefix: &Arc<WatchedPrefix>) {
        let mut list = self.list.lock();
        list.retain(|other| !Arc::ptr_eq(other, prefix));
        self.count.store(list.len(), Ordering::Release);
    }
}
