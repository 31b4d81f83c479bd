//! The writer of one worker rank: from the engine's names of blocks to places in the trie. Names and copies are private
//! to the writer, so no lock is shared for them. An engine may cache one block several times and reports each; the block
//! leaves with the last copy. It may also give one content several names, and then the content stays until the last of
//! the names has left. The trie hears only of the first and the last.

use std::collections::HashMap;
use std::sync::Arc;

use super::children::Mixed;
use super::event::{KvEvent, Outcome, StoredBlock};
use super::owners::Tiers;
use super::seats::{Seat, Tally};
use super::trie::{BlockId, Hold, Trie};
use super::{PrefixIndex, shard_of};
use crate::block::{EngineHash, LocalHash};
use crate::tier::Tier;
use crate::worker::Slot;

/// Blocks that a clean-up takes out of a trie before it lets readers in.
const SWEEP: usize = 256;

/// Applies the events of one worker rank. Dropping it removes everything the rank holds from the index.
#[derive(Debug)]
pub struct RankWriter {
    index: Arc<PrefixIndex>,
    slot: Slot,
    seat: Seat,
    tally: Arc<Tally>,
    held: Mixed<EngineHash, Named>,
    /// Copies beyond the first.
    extra: HashMap<(EngineHash, Tier), u32>,
    /// Names beyond the first of one content.
    aliases: HashMap<(Place, Tier), u32>,
    scratch: Scratch,
}

/// A block within the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Place {
    shard: u8,
    block: BlockId,
}

/// What the engine's name of a block stands for.
#[derive(Clone, Copy, Debug)]
struct Named {
    place: Place,
    /// Tiers with at least one copy; never empty.
    tiers: Tiers,
    /// Tiers whose copies may be gone: events were lost since they were counted.
    doubted: Tiers,
}

/// Buffers of one event, kept to be used again.
#[derive(Debug, Default)]
struct Scratch {
    locals: Vec<LocalHash>,
    path: Vec<BlockId>,
    granted: Vec<BlockId>,
    lost: Vec<(Place, Tier)>,
}

/// What a stored block changed.
#[derive(PartialEq, Eq)]
enum Gain {
    /// The name is new in this tier.
    Name,
    /// One more copy.
    Copy,
}

impl RankWriter {
    pub(super) fn new(index: Arc<PrefixIndex>, slot: Slot) -> Self {
        let tally = Arc::new(Tally::default());
        let seat = index.seats.write().join(slot, tally.clone());
        Self {
            index,
            slot,
            seat,
            tally,
            held: Mixed::default(),
            extra: HashMap::new(),
            aliases: HashMap::new(),
            scratch: Scratch::default(),
        }
    }

    /// The slot it writes for.
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Applies one event; readers see all of it or nothing.
    pub fn apply(&mut self, event: &KvEvent) -> Outcome {
        match event {
            KvEvent::Stored { parent, blocks, tier } => self.store(*parent, blocks, *tier),
            KvEvent::Removed { blocks, tier } => self.remove(blocks, *tier),
            KvEvent::Cleared => {
                self.clear();
                Outcome::Ok
            }
        }
    }

    /// Events were lost for good, so blocks may have gone unnoticed. They stay, but the next time the engine stores one,
    /// its copies are counted from one again: otherwise a removal that was lost would keep it for ever.
    pub fn doubt(&mut self) {
        for named in self.held.values_mut() {
            named.doubted = named.tiers;
        }
    }

    fn store(&mut self, parent: Option<EngineHash>, blocks: &[StoredBlock], tier: Tier) -> Outcome {
        let after = match parent.map(|parent| self.held.get(&parent)) {
            None => None,
            Some(Some(named)) => Some(named.place),
            Some(None) => return Outcome::ParentNotFound,
        };
        let Some(first) = blocks.first() else { return Outcome::Ok };
        let shard = after.map_or(shard_of(first.local), |place| usize::from(place.shard));
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.locals.extend(blocks.iter().map(|block| block.local));
        // Before the lock: growing the map takes long.
        self.held.reserve(blocks.len());
        let index = self.index.clone();
        let mut trie = index.shards[shard].write();
        let hold = Hold { seat: self.seat, tier };
        let after = after.map(|place| place.block);
        trie.trace(after, scratch.locals.iter().copied(), &mut scratch.path);
        let known = scratch.path.len();
        let last = scratch.path.last().copied().or(after);
        trie.extend(last, &scratch.locals[known..], hold, &mut scratch.path);
        let mut gained = false;
        for (at, block) in blocks.iter().enumerate() {
            let place = Place { shard: shard as u8, block: scratch.path[at] };
            if self.name(block.engine, place, tier, &mut scratch.lost) == Gain::Copy {
                continue;
            }
            gained = true;
            if at >= known {
                self.tally.add_blocks(tier, 1);
            } else if trie.tiers(place.block, self.seat).has(tier) {
                *self.aliases.entry((place, tier)).or_insert(0) += 1;
            } else {
                self.tally.add_blocks(tier, 1);
                scratch.granted.push(place.block);
            }
        }
        mark_spans(&mut trie, &scratch.granted, hold, true);
        self.release(&mut trie, shard, &mut scratch);
        drop(trie);
        self.release_elsewhere(&mut scratch);
        self.recycle(scratch);
        if gained { Outcome::Ok } else { Outcome::DuplicateStore }
    }

    /// Enters one copy of a name. A name that stood for another content until now lets go of that: the engine's word
    /// is the newer one.
    fn name(&mut self, engine: EngineHash, place: Place, tier: Tier, lost: &mut Vec<(Place, Tier)>) -> Gain {
        let fresh = Named { place, tiers: Tiers::one(tier), doubted: Tiers::NONE };
        let named = self.held.entry(engine).or_insert(Named { tiers: Tiers::NONE, ..fresh });
        if named.place != place {
            for tier in named.tiers.iter() {
                lost.push((named.place, tier));
                let copies = 1 + self.extra.remove(&(engine, tier)).unwrap_or(0);
                self.tally.add_copies(-i64::from(copies));
            }
            *named = fresh;
        } else if !named.tiers.has(tier) {
            named.tiers = named.tiers.with(tier);
        } else {
            if named.doubted.has(tier) {
                named.doubted = named.doubted.without(tier);
                let copies = self.extra.remove(&(engine, tier)).unwrap_or(0);
                self.tally.add_copies(-i64::from(copies));
            } else {
                *self.extra.entry((engine, tier)).or_insert(0) += 1;
                self.tally.add_copies(1);
            }
            return Gain::Copy;
        }
        self.tally.add_copies(1);
        Gain::Name
    }

    fn remove(&mut self, blocks: &[EngineHash], tier: Tier) -> Outcome {
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut outcome = Outcome::Ok;
        for &engine in blocks {
            let Some(named) = self.held.get_mut(&engine).filter(|named| named.tiers.has(tier)) else {
                outcome = Outcome::BlockNotFound;
                continue;
            };
            self.tally.add_copies(-1);
            if let Some(extra) = self.extra.get_mut(&(engine, tier)) {
                *extra -= 1;
                if *extra == 0 {
                    self.extra.remove(&(engine, tier));
                }
                continue;
            }
            named.tiers = named.tiers.without(tier);
            named.doubted = named.doubted.without(tier);
            scratch.lost.push((named.place, tier));
            if named.tiers.is_empty() {
                self.held.remove(&engine);
            }
        }
        self.release_elsewhere(&mut scratch);
        self.recycle(scratch);
        outcome
    }

    /// Lets go of what was lost in one shard.
    fn release(&mut self, trie: &mut Trie, shard: usize, scratch: &mut Scratch) {
        let Scratch { lost, granted, .. } = scratch;
        for tier in Tier::ALL {
            granted.clear();
            lost.retain(|&(place, lost_tier)| {
                let here = lost_tier == tier && usize::from(place.shard) == shard;
                if here && !self.has_other_name(place, tier) {
                    granted.push(place.block);
                }
                !here
            });
            self.tally.add_blocks(tier, -(granted.len() as i64));
            granted.sort_unstable_by_key(|block| trie.home(*block));
            mark_spans(trie, granted, Hold { seat: self.seat, tier }, false);
        }
    }

    /// Lets go of what was lost in shards that are not locked.
    fn release_elsewhere(&mut self, scratch: &mut Scratch) {
        let index = self.index.clone();
        while let Some(&(place, _)) = scratch.lost.first() {
            let shard = usize::from(place.shard);
            let mut trie = index.shards[shard].write();
            self.release(&mut trie, shard, scratch);
        }
    }

    /// Takes one name off a content; whether another is left.
    fn has_other_name(&mut self, place: Place, tier: Tier) -> bool {
        let Some(others) = self.aliases.get_mut(&(place, tier)) else { return false };
        *others -= 1;
        if *others == 0 {
            self.aliases.remove(&(place, tier));
        }
        true
    }

    /// One step for readers: they stop reporting the seat. Then the blocks are taken out bit by bit.
    fn clear(&mut self) {
        let left = self.seat;
        self.seat = self.index.seats.write().renew(left);
        self.tally.reset();
        self.extra.clear();
        self.aliases.clear();
        self.sweep(left);
    }

    /// Takes a seat that nobody sits on any more out of all tries.
    fn sweep(&mut self, left: Seat) {
        let mut places: Vec<Place> = self.held.drain().map(|(_, named)| named.place).collect();
        places.sort_unstable();
        for shard in places.chunk_by(|a, b| a.shard == b.shard) {
            for some in shard.chunks(SWEEP) {
                let mut trie = self.index.shards[usize::from(some[0].shard)].write();
                some.iter().for_each(|place| trie.evict(place.block, left));
            }
        }
        self.index.seats.write().free(left);
    }

    fn recycle(&mut self, mut scratch: Scratch) {
        scratch.locals.clear();
        scratch.path.clear();
        scratch.granted.clear();
        self.scratch = scratch;
    }
}

impl Drop for RankWriter {
    fn drop(&mut self) {
        self.index.seats.write().leave(self.seat);
        self.sweep(self.seat);
    }
}

/// Marks blocks in as few steps as their order allows.
fn mark_spans(trie: &mut Trie, blocks: &[BlockId], hold: Hold, on: bool) {
    let mut rest = blocks;
    while let Some(&first) = rest.first() {
        let count = trie.span(rest);
        trie.mark(first, count, hold, on);
        rest = &rest[count..];
    }
}
