//! Watches on prompts: how many leading blocks of a prompt a worker rank has held at any moment since the watch began. A full
//! cache may evict the blocks of a request within seconds of its answer, so a later lookup cannot tell whether the engine
//! stored them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::seats::{Seat, Tally};
use super::{PrefixIndex, StoredBlock, read, shard_of};
use crate::block::{BlockHashes, LocalHash};
use crate::worker::Slot;

/// A watch on one prompt at one worker rank. Dropping it ends the watch.
#[derive(Debug)]
pub struct PrefixWatch {
    prefix: Arc<WatchedPrefix>,
    tally: Arc<Tally>,
}

/// The watches of one writer.
#[derive(Debug, Default)]
pub(super) struct PrefixWatches {
    /// The length of the list, read without its lock.
    count: AtomicUsize,
    list: Mutex<Vec<Arc<WatchedPrefix>>>,
}

#[derive(Debug)]
struct WatchedPrefix {
    locals: Box<[LocalHash]>,
    /// Most leading blocks held at once so far.
    most_held: AtomicUsize,
}

impl WatchedPrefix {
    fn note(&self, held: usize) {
        self.most_held.fetch_max(held, Ordering::Relaxed);
    }

    /// Whether a stored run can extend the held prefix. A run whose first block is not in the prompt cannot.
    fn may_grow_by(&self, blocks: &[StoredBlock]) -> bool {
        let is_complete = self.most_held.load(Ordering::Relaxed) == self.locals.len();
        !is_complete
            && blocks
                .first()
                .is_some_and(|first| self.locals.contains(&first.local))
    }
}

impl PrefixWatches {
    /// Called by the writer after it has stored blocks. Costs one atomic load while nothing is watched.
    pub(super) fn on_stored(&self, index: &PrefixIndex, seat: Seat, blocks: &[StoredBlock]) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        for prefix in self
            .list
            .lock()
            .iter()
            .filter(|prefix| prefix.may_grow_by(blocks))
        {
            prefix.note(index.held_prefix(&prefix.locals, seat));
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

impl PrefixWatch {
    /// Most leading blocks of the prompt that the rank has held at once since the watch began.
    pub fn most_held(&self) -> usize {
        self.prefix.most_held.load(Ordering::Relaxed)
    }

    /// Whether the slot still has the writer that it had when the watch began. The watch does not receive the stores of a later
    /// writer.
    pub fn is_current(&self, index: &PrefixIndex, slot: Slot) -> bool {
        index
            .seats
            .read()
            .seating(slot)
            .is_some_and(|(_, tally)| Arc::ptr_eq(tally, &self.tally))
    }
}

impl Drop for PrefixWatch {
    fn drop(&mut self) {
        self.tally.watches.remove(&self.prefix);
    }
}

impl PrefixIndex {
    /// Watches a prompt at a slot, beginning with what is held now; `None` where the slot has no writer.
    pub fn watch(&self, hashes: &BlockHashes, slot: Slot) -> Option<PrefixWatch> {
        let prefix = Arc::new(WatchedPrefix {
            locals: hashes.locals().into(),
            most_held: AtomicUsize::new(0),
        });
        let (seat, tally) = self
            .seats
            .read()
            .seating(slot)
            .map(|(seat, tally)| (seat, tally.clone()))?;
        // Registered before the lookup: a store that misses the watch is complete before the lookup begins.
        tally.watches.add(prefix.clone());
        prefix.note(self.held_prefix(&prefix.locals, seat));
        Some(PrefixWatch { prefix, tally })
    }

    /// Leading blocks that are held under a seat, in any tier.
    fn held_prefix(&self, locals: &[LocalHash], seat: Seat) -> usize {
        let Some(&first) = locals.first() else {
            return 0;
        };
        let trie = read(&self.shards[shard_of(first)]);
        let runs = trie
            .path(locals)
            .take_while(|(_, owners)| !owners.layers(seat).tiers().is_empty());
        runs.last().map_or(0, |(depths, _)| depths.end as usize)
    }
}
