//! Store events: from a parent and a run of blocks to names with places.

use super::counted::Counted;
use super::waiting::Apart;
use super::{Named, Place, RankWriter, Scratch};
use crate::block::EngineHash;
use crate::index::event::{Outcome, StoredBlock};
use crate::index::owners::Layers;
use crate::index::shard_of;
use crate::index::trie::{BlockId, Hold, Trie};
use crate::tier::Tier;

/// What a stored block changed.
#[derive(PartialEq, Eq)]
enum Gain {
    /// The name is new in this tier.
    Name,
    /// One more copy.
    Copy,
}

impl RankWriter {
    /// Stores as many of the blocks as the limits of the writer allow.
    pub(super) fn store(
        &mut self,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
        tier: Tier,
    ) -> Outcome {
        let (allowed, over) = blocks.split_at(self.allowed(blocks, tier));
        if over.is_empty() {
            return self.store_allowed(parent, blocks, tier);
        }
        self.tally.note_over_limit(over.len() as u64);
        let outcome = if allowed.is_empty() {
            Outcome::Ok
        } else {
            self.store_allowed(parent, allowed, tier)
        };
        match outcome {
            Outcome::Ok | Outcome::DuplicateStore | Outcome::ParentAwaited => Outcome::IndexFull,
            outcome => outcome,
        }
    }

    /// How many of the blocks, from the first on, keep the writer within its limits.
    fn allowed(&self, blocks: &[StoredBlock], tier: Tier) -> usize {
        let mut room = self.tally.room(tier);
        let most_names = self.tally.limits().names();
        let held = (self.names.len() + self.waiting.len()) as u64;
        let mut names = most_names.saturating_sub(held);
        let mut copies = most_names.saturating_sub(self.extra.len() as u64);
        if blocks.len() as u64 <= room.min(names).min(copies) {
            return blocks.len();
        }
        let mut fits = |block: &&StoredBlock| {
            let named = self.names.get(block.engine);
            let new_name = named.is_none();
            // If a name moves to another content, the old content stays held as long as it has further names.
            let may_move = !self.aliases.is_empty();
            let new_in_tier = may_move || named.is_none_or(|named| !named.layers.has(tier));
            let waiting = self.waiting.get(block.engine).map(|apart| apart.tiers);
            let is_copy = named
                .map(|named| named.layers)
                .or(waiting)
                .is_some_and(|layers| layers.has(tier));
            // A third copy is counted in the entry of the second one.
            let second_copy = is_copy && !self.extra.contains_key(&(block.engine, tier));
            let fits = (!new_name || names > 0)
                && (!new_in_tier || room > 0)
                && (!second_copy || copies > 0);
            copies = copies.saturating_sub(u64::from(second_copy));
            names = names.saturating_sub(u64::from(new_name));
            room = room.saturating_sub(u64::from(new_in_tier));
            fits
        };
        blocks.iter().take_while(|block| fits(block)).count()
    }

    fn store_allowed(
        &mut self,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
        tier: Tier,
    ) -> Outcome {
        // Both are on their way from memory at once then.
        blocks
            .first()
            .into_iter()
            .for_each(|block| self.names.fetch(block.engine));
        match parent.map(|parent| (parent, self.names.get(parent))) {
            None => self.store_after(None, blocks, tier),
            Some((_, Some(named))) => self.store_after(Some(named.place), blocks, tier),
            // On the device a parent leaves after its children, so it was never there.
            Some((_, None)) if tier == Tier::Device => Outcome::ParentNotFound,
            Some((parent, None)) => self.store_apart(parent, blocks, tier),
        }
    }

    fn store_after(&mut self, after: Option<Place>, blocks: &[StoredBlock], tier: Tier) -> Outcome {
        let Some(first) = blocks.first() else {
            return Outcome::Ok;
        };
        let shard = after.map_or(shard_of(first.local), |place| usize::from(place.shard));
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch
            .locals
            .extend(blocks.iter().map(|block| block.local));
        // Before the lock: growing the map takes long.
        self.names.reserve(blocks.len());
        let after = after.map(|place| place.block);
        let plain = self.waiting.is_empty() && self.groups.is_none() && !self.has_doubts();
        let outcome = if plain && self.begin(blocks, tier, &mut scratch) {
            self.store_new((shard, after), blocks, tier, &mut scratch)
        } else {
            self.store_any((shard, after), blocks, tier, &mut scratch)
        };
        self.recycle(scratch);
        outcome
    }

    /// Enters names that are to get their places, if all of them are new.
    fn begin(&mut self, blocks: &[StoredBlock], tier: Tier, scratch: &mut Scratch) -> bool {
        self.names.begin_all(
            blocks.iter().map(|block| block.engine),
            Layers::one(tier),
            &mut scratch.begun,
        );
        let all_new = scratch.begun.len() == blocks.len();
        if !all_new {
            self.undo(&blocks[..scratch.begun.len()]);
        }
        all_new
    }

    /// Takes back names that have no place yet.
    fn undo(&mut self, blocks: &[StoredBlock]) {
        for block in blocks {
            if let Some((at, _)) = self.names.seek(block.engine) {
                self.names.hold(at, Layers::NONE);
            }
        }
    }

    /// Stores blocks under names that are all new: what becomes of the names is known before anything is locked, so only
    /// the trie is changed while readers wait.
    fn store_new(
        &mut self,
        (shard, after): (usize, Option<BlockId>),
        blocks: &[StoredBlock],
        tier: Tier,
        scratch: &mut Scratch,
    ) -> Outcome {
        let hold = Hold {
            seat: self.seat,
            layer: tier.into(),
        };
        let Scratch {
            locals,
            path,
            granted: held,
            begun,
            ..
        } = scratch;
        {
            let mut trie = self.index.shards[shard].write();
            trie.trace(after, locals, path);
            let known = path.len();
            trie.extend(path.last().copied().or(after), &locals[known..], hold, path);
            trie.grant(&path[..known], hold, held);
        }
        let place = |block| Place {
            shard: shard as u8,
            block,
        };
        for (at, block) in begun.iter().zip(&*path) {
            self.names.place(*at, place(*block));
        }
        for block in &*held {
            *self
                .aliases
                .entry((place(*block), tier.into()))
                .or_insert(0) += 1;
        }
        let (stored, lost) = blocks.split_at(path.len());
        self.undo(lost);
        self.count(tier.into(), (path.len() - held.len()) as i64);
        self.tally.add_copies(stored.len() as i64);
        if self.generation > 0 {
            stored
                .iter()
                .for_each(|block| self.count_now(block.engine, Layers::NONE));
        }
        if tier == Tier::Device {
            let again = self.left.first(stored.iter().map(|block| block.engine));
            self.note_gain(again.map(|at| place(path[at])));
        }
        if lost.is_empty() {
            Outcome::Ok
        } else {
            Outcome::IndexFull
        }
    }

    /// Stores blocks some of whose names are known, or that wait, or that cache groups hold.
    fn store_any(
        &mut self,
        (shard, after): (usize, Option<BlockId>),
        blocks: &[StoredBlock],
        tier: Tier,
        scratch: &mut Scratch,
    ) -> Outcome {
        let index = self.index.clone();
        let mut trie = index.shards[shard].write();
        let hold = Hold {
            seat: self.seat,
            layer: tier.into(),
        };
        trie.trace(after, &scratch.locals, &mut scratch.path);
        let known = scratch.path.len();
        let last = scratch.path.last().copied().or(after);
        trie.extend(last, &scratch.locals[known..], hold, &mut scratch.path);
        let (stored, lost) = blocks.split_at(scratch.path.len());
        let (mut gained, mut entered, mut again) = (false, 0, None);
        for (at, block) in stored.iter().enumerate() {
            let place = Place {
                shard: shard as u8,
                block: scratch.path[at],
            };
            if self.name(*block, place, tier, scratch) == Gain::Copy {
                continue;
            }
            gained = true;
            if again.is_none() && tier == Tier::Device && self.left.has(block.engine) {
                again = Some(place);
            }
            if at >= known {
                entered += 1;
            } else if trie.layers(place.block, self.seat).has(tier) {
                *self.aliases.entry((place, tier.into())).or_insert(0) += 1;
            } else {
                entered += 1;
                scratch.granted.push(place.block);
            }
        }
        self.count(tier.into(), entered);
        self.note_gain(again);
        trie.mark_all(&scratch.granted, hold, true);
        self.grant(&mut trie, shard, scratch);
        if !self.waiting.is_empty() {
            self.adopt(&mut trie, stored);
        }
        if self.generation > 0 {
            scratch.sure.extend(scratch.path.iter().map(|&block| {
                (
                    Place {
                        shard: shard as u8,
                        block,
                    },
                    tier.into(),
                )
            }));
            let parent = after.filter(|_| tier == Tier::Device).map(|block| Place {
                shard: shard as u8,
                block,
            });
            self.hear(&scratch.sure, parent.map(|parent| (&*trie, parent)));
        }
        self.release(&mut trie, shard, scratch);
        drop(trie);
        self.release_elsewhere(scratch);
        match gained {
            _ if !lost.is_empty() => Outcome::IndexFull,
            true => Outcome::Ok,
            false => Outcome::DuplicateStore,
        }
    }

    /// A block that left lately is there again.
    fn note_gain(&self, again: Option<Place>) {
        if let Some(again) = again {
            self.tally
                .gains
                .lock()
                .note(self.tally.moment().stores + 1, again);
        }
    }

    /// Enters one copy of a name. A name that stood for another content until now lets go of that: the engine's word
    /// is the newer one.
    fn name(
        &mut self,
        block: StoredBlock,
        place: Place,
        tier: Tier,
        scratch: &mut Scratch,
    ) -> Gain {
        let engine = block.engine;
        if !self.waiting.is_empty() && self.name_waiting(block, place, tier, scratch) {
            return Gain::Name;
        }
        let fresh = Named {
            place,
            layers: Layers::one(tier),
        };
        let before = self.names.seek(engine);
        let doubted = before.map_or(Layers::NONE, |(_, named)| self.doubts(engine, named.layers));
        match before {
            None => {
                self.names.set(engine, fresh);
                self.count_now(engine, Layers::NONE);
                self.name_in_groups(engine, scratch);
            }
            Some((_, named)) if named.place != place => {
                self.names.set(engine, fresh);
                self.count_now(engine, Layers::NONE);
                scratch
                    .lost
                    .extend(named.layers.iter().map(|layer| (named.place, layer)));
                self.forget_copies(engine, named.layers);
                self.name_in_groups(engine, scratch);
            }
            Some((at, named)) if !named.layers.has(tier) => {
                self.names.hold(at, named.layers.with(tier));
                self.count_now(engine, doubted);
            }
            Some(_) if doubted.has(tier) => {
                self.count_now(engine, doubted.without(tier));
                self.forget_extra(engine, tier);
                return Gain::Copy;
            }
            Some(_) => {
                self.count_now(engine, doubted);
                *self.extra.entry((engine, tier)).or_insert(0) += 1;
                self.tally.add_copies(1);
                return Gain::Copy;
            }
        }
        self.tally.add_copies(1);
        Gain::Name
    }

    /// Enters what the cache groups hold of a name that has just got its place.
    #[cold]
    fn name_in_groups(&mut self, engine: EngineHash, scratch: &mut Scratch) {
        let Some(groups) = &self.groups else { return };
        let layers = groups.layers(engine);
        if let Some((at, named)) = self.names.seek(engine) {
            self.names.hold(at, named.layers.and(layers));
            scratch
                .won
                .extend(layers.iter().map(|layer| (named.place, layer)));
            scratch
                .sure
                .extend(groups.sure(engine).iter().map(|layer| (named.place, layer)));
        }
    }

    /// Enters one copy of a name that had no place until now. What it holds already comes along if it is the same block.
    #[cold]
    fn name_waiting(
        &mut self,
        block: StoredBlock,
        place: Place,
        tier: Tier,
        scratch: &mut Scratch,
    ) -> bool {
        let engine = block.engine;
        let Some(apart) = self.take_waiting(engine) else {
            return false;
        };
        if apart.local != block.local {
            self.forget_copies(engine, apart.tiers);
            return false;
        }
        let mut doubted = apart.doubts(self.generation);
        scratch.sure.extend(
            apart
                .tiers
                .except(doubted)
                .iter()
                .map(|layer| (place, layer)),
        );
        if apart.tiers.has(tier) && !doubted.has(tier) {
            *self.extra.entry((engine, tier)).or_insert(0) += 1;
            self.tally.add_copies(1);
        } else if apart.tiers.has(tier) {
            doubted = doubted.without(tier);
            self.forget_extra(engine, tier);
        } else {
            self.tally.add_copies(1);
        }
        scratch
            .won
            .extend(apart.tiers.without(tier).iter().map(|layer| (place, layer)));
        let layers = apart.tiers.with(tier);
        self.names.set(engine, Named { place, layers });
        self.count_now(engine, doubted);
        self.name_in_groups(engine, scratch);
        true
    }

    /// Stores a run in a lower tier whose parent is not known.
    fn store_apart(&mut self, parent: EngineHash, blocks: &[StoredBlock], tier: Tier) -> Outcome {
        let (mut parent, mut full) = (parent, false);
        for (at, block) in blocks.iter().enumerate() {
            if let Some(before) = self.place_before(*block) {
                // Its name tells where it is, and so where the rest of the run is.
                let outcome = self.store_after(before, &blocks[at..], tier);
                return if at == 0 {
                    outcome
                } else {
                    Outcome::ParentAwaited
                };
            }
            if !self.wait(parent, *block, tier) {
                full = true;
                break;
            }
            parent = block.engine;
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        self.release_elsewhere(&mut scratch);
        self.recycle(scratch);
        match blocks {
            _ if full => Outcome::TooManyWaiting,
            [] => Outcome::Ok,
            _ => Outcome::ParentAwaited,
        }
    }

    /// What a block follows that is known by name with this content: a block, or the start.
    fn place_before(&self, block: StoredBlock) -> Option<Option<Place>> {
        let place = self.names.get(block.engine)?.place;
        let (before, local) = self.index.shards[usize::from(place.shard)]
            .read()
            .origin(place.block);
        (local == block.local).then(|| before.map(|block| Place { block, ..place }))
    }

    /// Enters one copy of a block that has no place yet; false if too many wait already.
    fn wait(&mut self, parent: EngineHash, block: StoredBlock, tier: Tier) -> bool {
        let StoredBlock { engine, local } = block;
        let known = self
            .waiting
            .get_mut(engine)
            .filter(|apart| (apart.parent, apart.local) == (parent, local));
        if let Some(apart) = known {
            (apart.doubted, apart.counted) = (apart.doubts(self.generation), self.generation);
            if !apart.tiers.has(tier) {
                apart.tiers = apart.tiers.with(tier);
                self.tally.add_blocks(tier, 1);
                self.tally.add_copies(1);
            } else if apart.doubted.has(tier) {
                apart.doubted = apart.doubted.without(tier);
                self.forget_extra(engine, tier);
            } else {
                *self.extra.entry((engine, tier)).or_insert(0) += 1;
                self.tally.add_copies(1);
            }
            return true;
        }
        if self.waiting.is_full() {
            return false;
        }
        self.forget(engine);
        let apart = Apart {
            parent,
            local,
            tiers: Layers::one(tier),
            doubted: Layers::NONE,
            counted: self.generation,
        };
        self.waiting.insert(engine, apart);
        self.tally.add_waiting(1);
        self.tally.add_blocks(tier, 1);
        self.tally.add_copies(1);
        true
    }

    /// Lets go of what a name stood for.
    fn forget(&mut self, engine: EngineHash) {
        if let Some(apart) = self.take_waiting(engine) {
            self.forget_copies(engine, apart.tiers);
        }
        if let Some((at, named)) = self.names.seek(engine) {
            self.names.hold(at, Layers::NONE);
            self.uncount(engine);
            self.forget_copies(engine, named.layers);
            // Released with the rest of the event.
            self.scratch
                .lost
                .extend(named.layers.iter().map(|layer| (named.place, layer)));
        }
    }

    /// Takes a block out of those without a place, its copies still counted.
    fn take_waiting(&mut self, engine: EngineHash) -> Option<Apart> {
        let apart = self.waiting.take(engine)?;
        self.placed(&apart);
        Some(apart)
    }

    fn placed(&self, apart: &Apart) {
        self.tally.add_waiting(-1);
        apart
            .tiers
            .iter_tiers()
            .for_each(|tier| self.tally.add_blocks(tier, -1));
    }

    fn forget_copies(&mut self, engine: EngineHash, layers: Layers) {
        for tier in layers.iter_tiers() {
            self.forget_extra(engine, tier);
            self.tally.add_copies(-1);
        }
    }

    pub(super) fn forget_extra(&mut self, engine: EngineHash, tier: Tier) {
        let copies = self.extra.remove(&(engine, tier)).unwrap_or(0);
        self.tally.add_copies(-i64::from(copies));
    }

    /// Gives places to the blocks that have waited for these. All in one step, because readers see an event whole; how many
    /// may wait is bounded.
    fn adopt(&mut self, trie: &mut Trie, blocks: &[StoredBlock]) {
        let awaited = blocks
            .iter()
            .map(|block| block.engine)
            .filter(|engine| self.waiting.has_child(*engine));
        let mut parents: Vec<EngineHash> = awaited.collect();
        while let Some(&parent) = parents.last() {
            let place = self.names.get(parent).map(|named| named.place);
            match place.and_then(|place| Some((place, self.waiting.take_child(parent)?))) {
                None => drop(parents.pop()),
                Some((place, (child, apart))) => {
                    self.adopt_one(trie, place, child, &apart);
                    parents.push(child);
                }
            }
        }
    }

    /// Gives a place after another to a block that waits no longer.
    fn adopt_one(&mut self, trie: &mut Trie, after: Place, child: EngineHash, apart: &Apart) {
        self.placed(apart);
        let groups = self
            .groups
            .as_ref()
            .map_or(Layers::NONE, |groups| groups.layers(child));
        let layers = apart.tiers.and(groups);
        let mut path = Vec::new();
        trie.trace(Some(after.block), &[apart.local], &mut path);
        for layer in layers.iter() {
            if let Some(&block) = path.first() {
                self.gain(trie, Place { block, ..after }, layer);
            } else {
                let hold = Hold {
                    seat: self.seat,
                    layer,
                };
                trie.extend(Some(after.block), &[apart.local], hold, &mut path);
                self.count(layer, path.len() as i64);
            }
        }
        let Some(&block) = path.first() else {
            // There was no room for it.
            self.forget_copies(child, apart.tiers);
            return;
        };
        let place = Place { block, ..after };
        let sure = layers.tiers().except(apart.doubts(self.generation));
        let sure = sure.and(
            self.groups
                .as_ref()
                .map_or(Layers::NONE, |groups| groups.sure(child)),
        );
        self.hear(
            &sure.iter().map(|layer| (place, layer)).collect::<Vec<_>>(),
            None,
        );
        self.names.set(child, Named { place, layers });
        self.set_counted(
            child,
            Counted {
                doubted: apart.doubted,
                since: apart.counted,
            },
        );
    }
}
