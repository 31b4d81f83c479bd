//! The writer of one worker rank: from the engine's names of blocks to places in the trie. Names and copies are private
//! to the writer, so no lock is shared for them. An engine may cache one block several times and reports each; the block
//! leaves with the last copy. It may also give one content several names, and then the content stays until the last of
//! the names has left. The trie hears only of the first and the last.

mod certain;
mod clear;
mod counted;
mod groups;
mod names;
mod portrait;
mod release;
mod store;
mod waiting;

use std::collections::HashMap;
use std::sync::Arc;

pub use certain::{Forgotten, Settled};
use counted::Counted;
use groups::{Groups, Lesson};
use names::{At, Named, Names};
use waiting::Waiting;

use super::children::Mixed;
use super::event::{GroupNeed, KvEvent, Outcome};
use super::gains::Left;
use super::needs::Needs;
use super::owners::{Layer, Layers};
use super::seats::{Seat, Tally};
use super::trie::BlockId;
use super::{AHEAD, PrefixIndex};
use crate::block::{EngineHash, LocalHash};
use crate::tier::Tier;
use crate::worker::Slot;

/// Applies the events of one worker rank. Dropping it removes everything the rank holds from the index.
#[derive(Debug)]
pub struct RankWriter {
    index: Arc<PrefixIndex>,
    slot: Slot,
    seat: Seat,
    tally: Arc<Tally>,
    names: Names,
    /// When copies were counted of names that were stored since events were first lost.
    counts: Mixed<EngineHash, Counted>,
    /// Copies beyond the first.
    extra: HashMap<(EngineHash, Tier), u32>,
    /// Names beyond the first of one content.
    aliases: HashMap<(Place, Layer), u32>,
    waiting: Waiting,
    /// Only of models that have several cache groups.
    groups: Option<Box<Groups>>,
    /// How often events were lost.
    generation: u32,
    /// What left the device lately.
    left: Left,
    /// Whether the engine may hold blocks that were never told, and how many were evicted since of those stored since.
    untold: Option<u64>,
    scratch: Scratch,
}

/// A block within the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) shard: u8,
    pub(super) block: BlockId,
}

/// Buffers of one event, kept to be used again.
#[derive(Debug, Default)]
struct Scratch {
    locals: Vec<LocalHash>,
    /// Where the names of the event were entered.
    begun: Vec<At>,
    path: Vec<BlockId>,
    granted: Vec<BlockId>,
    /// What names hold now beside the tier of the event.
    won: Vec<(Place, Layer)>,
    /// What names hold no longer.
    lost: Vec<(Place, Layer)>,
    /// What is there for certain.
    sure: Vec<(Place, Layer)>,
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
            names: Names::default(),
            counts: Mixed::default(),
            extra: HashMap::new(),
            aliases: HashMap::new(),
            waiting: Waiting::default(),
            groups: None,
            generation: 0,
            left: Left::default(),
            untold: None,
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
            KvEvent::Stored {
                parent,
                blocks,
                tier,
            } => {
                let outcome = self.store(*parent, blocks, *tier);
                match outcome {
                    Outcome::Ok => self.tally.note_store(),
                    // What was not told is in use.
                    Outcome::ParentNotFound => self.untold = self.untold.map(|_| 0),
                    _ => {}
                }
                self.tally.watches.on_stored(&self.index, self.seat, blocks);
                outcome
            }
            KvEvent::Removed { blocks, tier } => self.remove(blocks, *tier),
            KvEvent::GroupStored {
                group,
                need,
                blocks,
            } => self.store_group(*group, *need, blocks),
            KvEvent::GroupRemoved { group, blocks } => self.remove_group(*group, blocks),
            KvEvent::Cleared => {
                self.clear();
                Outcome::Ok
            }
        }
    }

    fn remove(&mut self, blocks: &[EngineHash], tier: Tier) -> Outcome {
        let mut scratch = std::mem::take(&mut self.scratch);
        let (mut outcome, mut evicted, mut copies) = (Outcome::Ok, Vec::new(), 0);
        blocks
            .iter()
            .take(AHEAD)
            .for_each(|engine| self.fetch(*engine));
        for (number, &engine) in blocks.iter().enumerate() {
            if let Some(later) = blocks.get(number + AHEAD) {
                self.fetch(*later);
            }
            let Some((at, named)) = self
                .names
                .seek(engine)
                .filter(|(_, named)| named.layers.has(tier))
            else {
                if !self.remove_waiting(engine, tier) {
                    outcome = Outcome::BlockNotFound;
                }
                continue;
            };
            copies += 1;
            if !self.extra.is_empty() && take_extra(&mut self.extra, engine, tier) {
                continue;
            }
            if self.generation > 0 {
                evicted.push(self.counted_when_evicted(engine, tier));
            }
            self.note_left(engine, tier);
            self.remove_last((engine, at, named), tier, &mut scratch);
        }
        self.tally.add_copies(-copies);
        self.names.shrink();
        self.release_elsewhere(&mut scratch);
        self.recycle(scratch);
        self.evicted(tier, &evicted);
        outcome
    }

    /// Asks memory for what a removal will read.
    fn fetch(&self, engine: EngineHash) {
        self.names.fetch(engine);
        self.left.fetch(engine);
    }

    /// The last copy of a name in a tier is gone.
    fn remove_last(
        &mut self,
        (engine, at, named): (EngineHash, At, Named),
        tier: Tier,
        scratch: &mut Scratch,
    ) {
        let left = named.layers.without(tier);
        scratch.lost.push((named.place, tier.into()));
        if !left.tiers().is_empty() {
            self.names.hold(at, left);
            return;
        }
        // What the groups hold of it has no place any more either.
        scratch
            .lost
            .extend(left.iter().map(|layer| (named.place, layer)));
        self.names.hold(at, Layers::NONE);
        self.uncount(engine);
    }

    fn note_left(&mut self, engine: EngineHash, tier: Tier) {
        if tier == Tier::Device
            && let Some(forgotten) = self.left.note(engine, self.tally.moment().stores)
        {
            self.tally.gains.lock().forget(forgotten);
        }
    }

    /// Takes out one copy of a block without a place; false if there is none.
    #[cold]
    fn remove_waiting(&mut self, engine: EngineHash, tier: Tier) -> bool {
        if !self
            .waiting
            .get_mut(engine)
            .is_some_and(|apart| apart.tiers.has(tier))
        {
            return false;
        }
        self.tally.add_copies(-1);
        if !take_extra(&mut self.extra, engine, tier) {
            self.lose_waiting(engine, tier);
        }
        true
    }

    /// A block without a place has no copy left in a tier in which it had some.
    fn lose_waiting(&mut self, engine: EngineHash, tier: Tier) {
        let Some(apart) = self.waiting.get_mut(engine) else {
            return;
        };
        apart.tiers = apart.tiers.without(tier);
        apart.doubted = apart.doubted.without(tier);
        let gone = apart.tiers.is_empty();
        self.tally.add_blocks(tier, -1);
        if gone {
            self.waiting.take(engine);
            self.tally.add_waiting(-1);
        }
    }

    fn store_group(&mut self, group: u32, need: GroupNeed, blocks: &[EngineHash]) -> Outcome {
        let groups = self.groups.get_or_insert_default();
        let lesson = groups.learn(group, need);
        let most = usize::try_from(self.tally.limits().names()).unwrap_or(usize::MAX);
        let mut gained = false;
        let mut over = 0;
        if let Some(at) = groups.find(group) {
            for &engine in blocks {
                match groups.store(at, engine, most) {
                    Some(is_new) => gained |= is_new,
                    None => over += 1,
                }
            }
        }
        self.tally.note_over_limit(over);
        if lesson == Lesson::Changed {
            // The blocks get other classes one by one, so until all have theirs nothing is reusable.
            self.tell_needs(Needs {
                unknown: true,
                ..Needs::default()
            });
        }
        match lesson {
            Lesson::Known | Lesson::TooMany { new: false } => self.regroup(blocks),
            Lesson::New | Lesson::Changed | Lesson::TooMany { new: true } => self.regroup_all(),
        }
        match lesson {
            Lesson::TooMany { .. } => Outcome::TooManyGroups,
            _ if over > 0 => Outcome::IndexFull,
            _ if gained || blocks.is_empty() => Outcome::Ok,
            _ => Outcome::DuplicateStore,
        }
    }

    fn remove_group(&mut self, group: u32, blocks: &[EngineHash]) -> Outcome {
        let Some(groups) = &mut self.groups else {
            return Outcome::BlockNotFound;
        };
        let Some(at) = groups.find(group) else {
            return Outcome::BlockNotFound;
        };
        let removed = blocks
            .iter()
            .filter(|engine| groups.remove(at, **engine))
            .count();
        self.regroup(blocks);
        if removed == blocks.len() {
            Outcome::Ok
        } else {
            Outcome::BlockNotFound
        }
    }

    /// Tells the tries what the groups hold of some blocks now.
    fn regroup(&mut self, blocks: &[EngineHash]) {
        let Some(groups) = &self.groups else { return };
        let mut scratch = std::mem::take(&mut self.scratch);
        for &engine in blocks {
            let Some((at, named)) = self.names.seek(engine) else {
                continue;
            };
            let (tiers, now) = (named.layers.tiers(), groups.layers(engine));
            let before = named.layers.except(tiers);
            scratch
                .won
                .extend(now.except(before).iter().map(|layer| (named.place, layer)));
            scratch
                .lost
                .extend(before.except(now).iter().map(|layer| (named.place, layer)));
            self.names.hold(at, tiers.and(now));
            scratch
                .sure
                .extend(groups.sure(engine).iter().map(|layer| (named.place, layer)));
        }
        self.grant_elsewhere(&mut scratch);
        self.release_elsewhere(&mut scratch);
        self.hear(&scratch.sure, None);
        self.recycle(scratch);
    }

    /// After the groups themselves have changed: the blocks first, so that a reader sees the need only when it is told
    /// who satisfies it.
    fn regroup_all(&mut self) {
        let held: Vec<_> = self.names.iter().map(|(engine, _)| engine).collect();
        self.regroup(&held);
        if let Some(groups) = &self.groups {
            self.tell_needs(groups.needs().clone());
        }
    }

    fn tell_needs(&self, needs: Needs) {
        self.index.seats.write().need(self.seat, Arc::new(needs));
    }

    fn recycle(&mut self, mut scratch: Scratch) {
        scratch.locals.clear();
        scratch.begun.clear();
        scratch.path.clear();
        scratch.granted.clear();
        scratch.sure.clear();
        self.scratch = scratch;
    }
}

/// Takes one of the copies beyond the first, if there is any.
fn take_extra(
    extra: &mut HashMap<(EngineHash, Tier), u32>,
    engine: EngineHash,
    tier: Tier,
) -> bool {
    let Some(copies) = extra.get_mut(&(engine, tier)) else {
        return false;
    };
    *copies -= 1;
    if *copies == 0 {
        extra.remove(&(engine, tier));
    }
    true
}
