//! Who holds which prefix, in which tier. Blocks of all worker ranks lie in compressed tries that are navigated by local
//! hashes, so that a query compares long runs of memory; what an engine calls its blocks is private to the writer of
//! that rank. The tries are sharded by the first block of the prompt, one lock each. A query lies in one shard and so does
//! a run of stored blocks, hence a reader sees every event whole or not at all, and waits for one event at most.

mod arena;
mod children;
mod doubts;
pub mod dump;
pub mod event;
mod extents;
mod gains;
mod limits;
mod marks;
mod needs;
mod overlaps;
mod owners;
mod paths;
mod position;
mod salts;
mod seats;
mod slab;
mod trie;
mod watch;
mod writer;

use std::collections::HashSet;
use std::hint;
use std::sync::Arc;

use parking_lot::{RwLock, RwLockReadGuard};
use serde::Serialize;

pub use event::{GroupNeed, KvEvent, Outcome, StoredBlock};
pub use limits::BlockLimits;
pub use overlaps::{Overlaps, TierBlocks};
use owners::Layer;
pub(crate) use paths::{Entered, PathEnd, PathWriter};
pub use position::{Position, SharedPosition, Taught, TaughtGroup};
pub(crate) use salts::Salts;
pub use seats::Grouped;
use seats::Seats;
use trie::Trie;
pub use watch::PrefixWatch;
use writer::Place;
pub use writer::{Forgotten, RankWriter, Settled};

use crate::block::{BlockHashes, LocalHash};
use crate::tier::Tier;
use crate::worker::Slot;

/// Tries in an index. The number only has to be large against the number of busy threads.
const SHARDS: usize = 64;
/// Names that are on their way from memory while one is looked up.
const AHEAD: usize = 16;

/// Cached prefixes of all worker ranks.
#[derive(Debug)]
pub struct PrefixIndex {
    shards: Box<[RwLock<Trie>]>,
    seats: RwLock<Seats>,
}

/// How far the events of a slot were at some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// Those that stored something.
    pub stores: u64,
    /// How often some were lost.
    pub gaps: u32,
}

/// The size of the index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IndexStats {
    /// Per slot that has a writer, in slot order.
    pub slots: Vec<SlotStats>,
    /// Sum over the slots.
    pub total: BlockCounts,
    /// Distinct blocks, however many ranks hold them.
    pub distinct_blocks: u64,
    /// Runs they are kept in.
    pub runs: u64,
}

/// What one slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SlotStats {
    /// The slot.
    pub slot: Slot,
    /// What it holds.
    #[serde(flatten)]
    pub counts: BlockCounts,
    /// Limits of the writer.
    pub limits: BlockLimits,
    /// Blocks and names that were dropped because a limit was reached, since the writer joined.
    pub over_limit: u64,
}

/// Blocks per tier, and copies: the engine may hold one block several times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BlockCounts {
    /// Blocks on the device.
    pub device: u64,
    /// Blocks in host memory.
    pub host: u64,
    /// Blocks on disk.
    pub disk: u64,
    /// Blocks in external storage.
    pub external: u64,
    /// Copies in all tiers.
    pub copies: u64,
    /// Blocks of lower tiers, counted there, that no query finds yet because their parent is not known.
    pub waiting: u64,
}

/// How often a reader looks again before it sleeps: some 20 us, in which a writer is done with nearly any event. To be
/// woken takes longer, and costs the writer as much.
const LOOKS: usize = 1_000;

fn read(shard: &RwLock<Trie>) -> RwLockReadGuard<'_, Trie> {
    for _ in 0..LOOKS {
        if let Some(trie) = shard.try_read() {
            return trie;
        }
        hint::spin_loop();
    }
    shard.read()
}

impl PrefixIndex {
    /// An index that holds nothing.
    pub fn new() -> Arc<Self> {
        let shards = (0..SHARDS).map(|_| RwLock::default()).collect();
        Arc::new(Self {
            shards,
            seats: RwLock::default(),
        })
    }

    /// The writer of a slot. It takes the slot over: what an earlier writer of the slot holds is no longer reported.
    pub fn join(self: &Arc<Self>, slot: Slot) -> RankWriter {
        RankWriter::new(self.clone(), slot)
    }

    /// Limits the blocks that the writer of a slot may add. Blocks above the new limit are not removed.
    pub fn set_limits(&self, slot: Slot, limits: BlockLimits) {
        if let Some((_, tally)) = self.seats.read().seating(slot) {
            tally.set_limits(limits);
        }
    }

    /// A writer of a slot for whom blocks need no names. It takes the slot over as any writer does.
    pub(crate) fn paths(self: &Arc<Self>, slot: Slot) -> PathWriter {
        PathWriter::new(self.clone(), slot)
    }

    /// Finds what each slot has cached of a prompt. `into` is overwritten.
    pub fn overlaps(&self, hashes: &BlockHashes, into: &mut Overlaps) {
        into.clear();
        let Some(&first) = hashes.locals().first() else {
            return;
        };
        let trie = read(&self.shards[shard_of(first)]);
        trie.walk(hashes, into);
        // Under the lock of the trie: a seat is given to another rank only after its traces have left all tries.
        let seats = self.seats.read();
        let plan = seats.plan();
        if plan.any_needs() {
            // An engine computes at least the last token of a prompt.
            let most = hashes.tokens().saturating_sub(1) / hashes.block_size().tokens();
            into.limit(
                &trie,
                hashes.locals(),
                plan,
                u32::try_from(most).unwrap_or(u32::MAX),
            );
        }
        into.settle(plan);
    }

    /// Whose cache has several groups at this instant.
    pub fn grouped(&self) -> Grouped {
        Grouped::of(self.seats.read().plan())
    }

    /// How far the events of a slot are; `None` where nobody writes for it.
    pub fn moment(&self, slot: Slot) -> Option<Moment> {
        Some(self.seats.read().seating(slot)?.1.moment())
    }

    /// Blocks on the device, and cache groups' shares of them, that a slot may have lost since events were; `None` where nobody writes for it, or is busy with them.
    pub fn doubted(&self, slot: Slot) -> Option<u64> {
        Some(
            self.seats
                .read()
                .seating(slot)?
                .1
                .doubts
                .try_lock()?
                .doubted(),
        )
    }

    /// An engine found the first blocks of a prompt cached that was sent to it at some moment: those of them that it is
    /// known to hold are certain, unless events were lost since.
    pub fn found(&self, hashes: &BlockHashes, blocks: usize, slot: Slot, sent: Moment) {
        let Some(&first) = hashes.locals().first() else {
            return;
        };
        let shard = shard_of(first);
        let trie = self.shards[shard].read();
        let seats = self.seats.read();
        let Some((seat, tally)) = seats.seating(slot) else {
            return;
        };
        // Whoever forgets holds it for long, and then it comes too late.
        let Some(mut doubts) = tally.doubts.try_lock().filter(|doubts| doubts.any()) else {
            return;
        };
        if tally.moment().gaps != sent.gaps {
            return;
        }
        let mut path = Vec::new();
        trie.trace(None, first_of(hashes, blocks), &mut path);
        let place = |block| Place {
            shard: shard as u8,
            block,
        };
        for &block in &path {
            let fastest = trie.layers(block, seat).from(Tier::Device);
            fastest
                .into_iter()
                .for_each(|tier| _ = doubts.hear(place(block), tier));
        }
        let classes = seats.needs(seat).map_or(&[][..], |needs| &needs.classes);
        for (number, class) in classes.iter().enumerate() {
            let layer = Layer::class(number);
            for &block in class.used(blocks).filter_map(|at| path.get(at)) {
                let layers = trie.layers(block, seat);
                if layers.has(Tier::Device) && layers.has(layer) {
                    doubts.hear(place(block), layer);
                }
            }
        }
        doubts.close();
    }

    /// Whether one of the first blocks of a prompt left a slot's device after a moment and came again; `None` where that is
    /// not remembered.
    pub fn regained_since(
        &self,
        hashes: &BlockHashes,
        blocks: usize,
        slot: Slot,
        since: Moment,
    ) -> Option<bool> {
        let Some(&first) = hashes.locals().first() else {
            return Some(false);
        };
        let shard = shard_of(first);
        let trie = self.shards[shard].read();
        let mut path = Vec::new();
        trie.trace(None, first_of(hashes, blocks), &mut path);
        let path: HashSet<_> = path.into_iter().collect();
        let seats = self.seats.read();
        let gains = seats.seating(slot)?.1.gains.lock();
        gains.since(since.stores, |place| {
            usize::from(place.shard) == shard && path.contains(&place.block)
        })
    }

    /// Counts what is held.
    pub fn stats(&self) -> IndexStats {
        let mut stats = IndexStats {
            slots: self.seats.read().stats(),
            ..IndexStats::default()
        };
        for slot in &stats.slots {
            stats.total.device += slot.counts.device;
            stats.total.host += slot.counts.host;
            stats.total.disk += slot.counts.disk;
            stats.total.external += slot.counts.external;
            stats.total.copies += slot.counts.copies;
            stats.total.waiting += slot.counts.waiting;
        }
        for shard in &self.shards {
            let trie = shard.read();
            stats.distinct_blocks += trie.blocks() as u64;
            stats.runs += trie.runs() as u64;
        }
        stats
    }
}

fn first_of(hashes: &BlockHashes, blocks: usize) -> &[LocalHash] {
    let locals = hashes.locals();
    &locals[..blocks.min(locals.len())]
}

/// The shard of all prompts that begin with this block.
fn shard_of(first: LocalHash) -> usize {
    children::mix(first.0) as usize % SHARDS
}

#[cfg(test)]
mod tests;
