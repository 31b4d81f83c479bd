//! The writer for a slot whose blocks nobody names: it enters and takes out stretches of prompts. What the slot's seat holds
//! in the tries is the only record of which blocks there are, hence a block costs what it takes in a trie and no more.
//! Whoever enters a path keeps its last block, and from there the tries lead back to everything before it.

use std::sync::Arc;

use parking_lot::RwLockWriteGuard;

use super::PrefixIndex;
use super::seats::{Seat, Tally};
use super::shard_of;
use super::trie::{BlockId, Hold};
use super::writer::Place;
use crate::block::LocalHash;
use crate::tier::Tier;
use crate::worker::Slot;

/// Blocks that are entered or taken out before waiting readers are let in. A reader may see a part of a path, from its beginning.
const STEP: usize = 512;

/// The last block of a path. Good as long as the path is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PathEnd(Place);

/// What came of a path that was to be entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entered {
    /// How many blocks were; fewer than asked for only where the index can hold no more.
    pub(crate) blocks: usize,
    /// Where the path ends now. None only where there is nothing.
    pub(crate) end: Option<PathEnd>,
}

/// Enters and takes out paths of one slot, all on the device. To be emptied before it is dropped.
#[derive(Debug)]
pub(crate) struct PathWriter {
    index: Arc<PrefixIndex>,
    seat: Seat,
    tally: Arc<Tally>,
    held: u64,
    /// Kept to be used again.
    path: Vec<BlockId>,
}

impl PathWriter {
    pub(super) fn new(index: Arc<PrefixIndex>, slot: Slot) -> Self {
        let tally = Arc::new(Tally::default());
        let seat = index.seats.write().join(slot, tally.clone());
        Self {
            index,
            seat,
            tally,
            held: 0,
            path: Vec::new(),
        }
    }

    /// Leading blocks of a prompt that were entered.
    pub(crate) fn known(&self, locals: &[LocalHash]) -> usize {
        let Some(&first) = locals.first() else {
            return 0;
        };
        let trie = self.index.shards[shard_of(first)].read();
        let held = trie
            .path(locals)
            .take_while(|(_, owners)| owners.layers(self.seat).has(Tier::Device));
        held.last().map_or(0, |(run, _)| run.end as usize)
    }

    /// Enters what follows a path, or the start, and was not entered yet.
    pub(crate) fn enter(&mut self, after: Option<PathEnd>, locals: &[LocalHash]) -> Entered {
        let Some(&first) = locals.first() else {
            return Entered {
                blocks: 0,
                end: after,
            };
        };
        let shard = after.map_or_else(
            || shard_of(first),
            |PathEnd(place)| usize::from(place.shard),
        );
        let (hold, index) = (self.hold(), self.index.clone());
        let mut last = after.map(|PathEnd(place)| place.block);
        let mut blocks = 0;
        let mut trie = index.shards[shard].write();
        for (step, some) in locals.chunks(STEP).enumerate() {
            if step > 0 {
                RwLockWriteGuard::bump(&mut trie);
            }
            self.path.clear();
            trie.trace(last, some, &mut self.path);
            trie.mark_all(&self.path, hold, true);
            let new = &some[self.path.len()..];
            trie.extend(
                self.path.last().copied().or(last),
                new,
                hold,
                &mut self.path,
            );
            last = self.path.last().copied().or(last);
            blocks += self.path.len();
            if self.path.len() < some.len() {
                break;
            }
        }
        drop(trie);
        self.count(blocks as i64);
        Entered {
            blocks,
            end: last.map(|block| {
                PathEnd(Place {
                    shard: shard as u8,
                    block,
                })
            }),
        }
    }

    /// Takes so many blocks off the end of a path; its new end.
    pub(crate) fn cut(&mut self, end: PathEnd, blocks: u64) -> Option<PathEnd> {
        let PathEnd(Place { shard, block }) = end;
        let (hold, index) = (self.hold(), self.index.clone());
        let (mut left, mut last, mut step) = (blocks as usize, Some(block), STEP);
        let mut trie = index.shards[usize::from(shard)].write();
        while let Some(block) = last.filter(|_| left > 0) {
            if step == 0 {
                RwLockWriteGuard::bump(&mut trie);
                step = STEP;
            }
            let (first, count) = trie.stretch(block, left.min(step));
            last = trie.origin(first).0;
            trie.mark(first, count, hold, false);
            (step, left) = (step - count, left - count);
        }
        drop(trie);
        self.count(left as i64 - blocks as i64);
        last.map(|block| PathEnd(Place { shard, block }))
    }

    /// What the last so many blocks of a path follow, and the first of them.
    pub(crate) fn before(&self, end: PathEnd, blocks: u64) -> (Option<PathEnd>, LocalHash) {
        let PathEnd(Place { shard, mut block }) = end;
        let trie = self.index.shards[usize::from(shard)].read();
        let mut left = blocks as usize;
        loop {
            let (first, count) = trie.stretch(block, left);
            let (before, local) = trie.origin(first);
            left -= count;
            match before {
                Some(before) if left > 0 => block = before,
                _ => return (before.map(|block| PathEnd(Place { shard, block })), local),
            }
        }
    }

    /// From now on nothing of it is reported. What it holds is still to be taken out.
    pub(crate) fn hide(&self) {
        self.index.seats.write().leave(self.seat);
    }

    fn hold(&self) -> Hold {
        Hold {
            seat: self.seat,
            layer: Tier::Device.into(),
        }
    }

    fn count(&mut self, by: i64) {
        self.held = self.held.saturating_add_signed(by);
        self.tally.add_blocks(Tier::Device, by);
        self.tally.add_copies(by);
    }
}

impl Drop for PathWriter {
    fn drop(&mut self) {
        debug_assert!(
            self.held == 0 || std::thread::panicking(),
            "{} blocks were left behind",
            self.held
        );
        let mut seats = self.index.seats.write();
        seats.leave(self.seat);
        // Whoever got a seat that the tries still mention would be said to hold what it does not.
        if self.held == 0 {
            seats.free(self.seat);
        }
    }
}

#[cfg(test)]
mod tests;
