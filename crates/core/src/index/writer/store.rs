//! Applies store events: inserts a sequence of blocks after a parent.

use super::{BlockLocation, EventBuffers, MappedBlock, RankWriter};
use crate::block::{EngineHash, StorageTier};
use crate::index::event::{ApplyOutcome, StoredBlock};
use crate::index::ids::BlockId;
use crate::index::layers::LayerSet;
use crate::index::prefix_index::shard_of;
use crate::index::trie::{BlockTrie, LayerHold};

/// Position in the index after which blocks are stored.
#[derive(Clone, Copy)]
struct StoreParent {
    shard: usize,
    /// Last block of the parent path; `None` for the first block of a prompt.
    after: Option<BlockId>,
}

/// Effect of a stored block.
#[derive(PartialEq, Eq)]
enum StoreEffect {
    /// The hash is new in this tier.
    NewHash,
    /// The hash has one more copy in this tier.
    ExtraCopy,
}

impl RankWriter {
    /// Stores as many of the blocks as the limits of the writer allow.
    pub(super) fn store(
        &mut self,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
        tier: StorageTier,
    ) -> ApplyOutcome {
        let (allowed, over) = blocks.split_at(self.count_allowed(blocks, tier));
        if over.is_empty() {
            return self.store_allowed(parent, blocks, tier);
        }
        self.shared.record_over_limit(over.len() as u64);
        let outcome = if allowed.is_empty() {
            ApplyOutcome::Ok
        } else {
            self.store_allowed(parent, allowed, tier)
        };
        match outcome {
            ApplyOutcome::Ok | ApplyOutcome::DuplicateStore | ApplyOutcome::ParentAwaited => {
                ApplyOutcome::IndexFull
            }
            outcome => outcome,
        }
    }

    /// Counts the leading blocks that keep the writer within its limits.
    fn count_allowed(&self, blocks: &[StoredBlock], tier: StorageTier) -> usize {
        let mut blocks_left = self.shared.remaining(tier);
        let max_hashes = self.shared.limits().max_hashes();
        let held = (self.blocks.len() + self.orphans.len()) as u64;
        let mut hashes_left = max_hashes.saturating_sub(held);
        let mut copies_left = max_hashes.saturating_sub(self.extra_copies.len() as u64);
        if blocks.len() as u64 <= blocks_left.min(hashes_left).min(copies_left) {
            return blocks.len();
        }
        let mut fits = |block: &&StoredBlock| {
            let mapped = self.blocks.get(block.engine);
            let is_new_hash = mapped.is_none();
            // If a hash moves to another block, the old block stays held as long as it has further
            // hashes.
            let may_move = !self.aliases.is_empty();
            let new_in_tier = may_move || mapped.is_none_or(|mapped| !mapped.layers.has(tier));
            let waiting = self.orphans.get(block.engine).map(|orphan| orphan.tiers);
            let is_copy = mapped
                .map(|mapped| mapped.layers)
                .or(waiting)
                .is_some_and(|layers| layers.has(tier));
            // A third copy is counted in the entry of the second one.
            let second_copy = is_copy && !self.extra_copies.contains_key(&(block.engine, tier));
            let fits = (!is_new_hash || hashes_left > 0)
                && (!new_in_tier || blocks_left > 0)
                && (!second_copy || copies_left > 0);
            copies_left = copies_left.saturating_sub(u64::from(second_copy));
            hashes_left = hashes_left.saturating_sub(u64::from(is_new_hash));
            blocks_left = blocks_left.saturating_sub(u64::from(new_in_tier));
            fits
        };
        blocks.iter().take_while(|block| fits(block)).count()
    }

    fn store_allowed(
        &mut self,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
        tier: StorageTier,
    ) -> ApplyOutcome {
        // Overlaps the cache misses of both lookups.
        blocks
            .first()
            .into_iter()
            .for_each(|block| self.blocks.prefetch(block.engine));
        match parent.map(|parent| (parent, self.blocks.get(parent))) {
            None => self.store_after(None, blocks, tier),
            Some((_, Some(mapped))) => self.store_after(Some(mapped.location), blocks, tier),
            // On the device, a parent is evicted after its children. It was therefore never stored
            // here.
            Some((_, None)) if tier == StorageTier::Device => ApplyOutcome::ParentNotFound,
            Some((parent, None)) => self.store_orphans(parent, blocks, tier),
        }
    }

    pub(super) fn store_after(
        &mut self,
        after: Option<BlockLocation>,
        blocks: &[StoredBlock],
        tier: StorageTier,
    ) -> ApplyOutcome {
        let Some(first) = blocks.first() else {
            return ApplyOutcome::Ok;
        };
        let shard = after.map_or(shard_of(first.local), |location| {
            usize::from(location.shard)
        });
        let mut scratch = std::mem::take(&mut self.buffers);
        scratch
            .locals
            .extend(blocks.iter().map(|block| block.local));
        // Before the lock is taken, because growing the map takes time.
        self.blocks.reserve(blocks.len());
        let parent = StoreParent {
            shard,
            after: after.map(|location| location.block),
        };
        let plain = self.orphans.is_empty() && self.groups.is_none() && !self.has_stale();
        let outcome = if plain && self.insert_unlocated(blocks, tier, &mut scratch) {
            self.store_new_hashes(parent, blocks, tier, &mut scratch)
        } else {
            self.store_any_hashes(parent, blocks, tier, &mut scratch)
        };
        self.return_buffers(scratch);
        outcome
    }

    /// Inserts hashes without locations, if all of them are new.
    fn insert_unlocated(
        &mut self,
        blocks: &[StoredBlock],
        tier: StorageTier,
        scratch: &mut EventBuffers,
    ) -> bool {
        self.blocks.insert_unlocated(
            blocks.iter().map(|block| block.engine),
            LayerSet::of(tier),
            &mut scratch.new_entries,
        );
        let all_new = scratch.new_entries.len() == blocks.len();
        if !all_new {
            self.remove_unlocated(&blocks[..scratch.new_entries.len()]);
        }
        all_new
    }

    /// Removes hashes that have no location yet.
    pub(super) fn remove_unlocated(&mut self, blocks: &[StoredBlock]) {
        for block in blocks {
            if let Some((at, _)) = self.blocks.find(block.engine) {
                self.blocks.set_layers(at, LayerSet::NONE);
            }
        }
    }

    /// Stores blocks whose hashes are all new. The hashes are inserted before the lock is taken, so
    /// only the trie changes while readers wait.
    fn store_new_hashes(
        &mut self,
        parent: StoreParent,
        blocks: &[StoredBlock],
        tier: StorageTier,
        scratch: &mut EventBuffers,
    ) -> ApplyOutcome {
        let StoreParent { shard, after } = parent;
        let hold = LayerHold::new(self.owner, tier);
        let EventBuffers {
            locals,
            path,
            granted: held,
            new_entries: entries,
            ..
        } = scratch;
        {
            let mut trie = self.index.shards[shard].write();
            trie.trace_path(after, locals, path);
            let known = path.len();
            trie.insert(path.last().copied().or(after), &locals[known..], hold, path);
            trie.grant_missing(&path[..known], hold, held);
        }
        let location = |block| BlockLocation::new(shard, block);
        for (at, block) in entries.iter().zip(&*path) {
            self.blocks.set_location(*at, location(*block));
        }
        for block in &*held {
            *self
                .aliases
                .entry((location(*block), tier.into()))
                .or_insert(0) += 1;
        }
        let (stored, dropped) = blocks.split_at(path.len());
        self.remove_unlocated(dropped);
        self.count_layer(tier.into(), (path.len() - held.len()) as i64);
        self.shared.add_copies(stored.len() as i64);
        if self.copy_epochs.generation() > 0 {
            stored.iter().for_each(|block| {
                self.copy_epochs
                    .set_counted_now(block.engine, LayerSet::NONE)
            });
        }
        if tier == StorageTier::Device {
            let reinserted = self
                .evicted
                .first_evicted(stored.iter().map(|block| block.engine));
            self.record_reinsertion(reinserted.map(|at| location(path[at])));
        }
        if dropped.is_empty() {
            ApplyOutcome::Ok
        } else {
            ApplyOutcome::IndexFull
        }
    }

    /// Stores blocks of which some hashes are known, are orphans, or are held by cache groups.
    fn store_any_hashes(
        &mut self,
        parent: StoreParent,
        blocks: &[StoredBlock],
        tier: StorageTier,
        scratch: &mut EventBuffers,
    ) -> ApplyOutcome {
        let StoreParent { shard, after } = parent;
        let index = self.index.clone();
        let mut trie = index.shards[shard].write();
        let hold = LayerHold::new(self.owner, tier);
        trie.trace_path(after, &scratch.locals, &mut scratch.path);
        let known = scratch.path.len();
        let last = scratch.path.last().copied().or(after);
        trie.insert(last, &scratch.locals[known..], hold, &mut scratch.path);
        let (stored, dropped) = blocks.split_at(scratch.path.len());
        let mut any_new = false;
        let mut added = 0;
        let mut reinserted = None;
        for (at, block) in stored.iter().enumerate() {
            let location = BlockLocation::new(shard, scratch.path[at]);
            if self.record_copy(*block, location, tier, scratch) == StoreEffect::ExtraCopy {
                continue;
            }
            any_new = true;
            if reinserted.is_none()
                && tier == StorageTier::Device
                && self.evicted.contains(block.engine)
            {
                reinserted = Some(location);
            }
            if at >= known {
                added += 1;
            } else if trie.layers_of(location.block, self.owner).has(tier) {
                *self.aliases.entry((location, tier.into())).or_insert(0) += 1;
            } else {
                added += 1;
                scratch.granted.push(location.block);
            }
        }
        self.count_layer(tier.into(), added);
        self.record_reinsertion(reinserted);
        trie.set_hold_all(&scratch.granted, hold, true);
        self.apply_gained(&mut trie, shard, scratch);
        if !self.orphans.is_empty() {
            self.locate_orphans(&mut trie, stored);
        }
        if self.copy_epochs.generation() > 0 {
            self.confirm_stored(&trie, parent, tier, scratch);
        }
        self.apply_lost(&mut trie, shard, scratch);
        drop(trie);
        self.apply_all_lost(scratch);
        match any_new {
            _ if !dropped.is_empty() => ApplyOutcome::IndexFull,
            true => ApplyOutcome::Ok,
            false => ApplyOutcome::DuplicateStore,
        }
    }

    /// Confirms stored blocks, and the blocks before them on the device.
    fn confirm_stored(
        &self,
        trie: &BlockTrie,
        parent: StoreParent,
        tier: StorageTier,
        scratch: &mut EventBuffers,
    ) {
        let location = |block| BlockLocation::new(parent.shard, block);
        let stored = scratch
            .path
            .iter()
            .map(|&block| (location(block), tier.into()));
        scratch.confirmed.extend(stored);
        let before = parent
            .after
            .filter(|_| tier == StorageTier::Device)
            .map(|block| (trie, location(block)));
        self.confirm(&scratch.confirmed, before);
    }

    /// Logs that a block was evicted recently and is stored again.
    fn record_reinsertion(&self, reinserted: Option<BlockLocation>) {
        if let Some(reinserted) = reinserted {
            self.shared
                .reinsertions
                .lock()
                .record(self.shared.event_cursor().stores + 1, reinserted);
        }
    }

    /// Adds one copy of a hash. If the hash referred to another block until now, it is moved: the
    /// newer event is right.
    fn record_copy(
        &mut self,
        block: StoredBlock,
        location: BlockLocation,
        tier: StorageTier,
        scratch: &mut EventBuffers,
    ) -> StoreEffect {
        let engine = block.engine;
        if !self.orphans.is_empty() && self.locate_stored_orphan(block, location, tier, scratch) {
            return StoreEffect::NewHash;
        }
        let new_block = MappedBlock {
            location,
            layers: LayerSet::of(tier),
        };
        let before = self.blocks.find(engine);
        let stale_layers = before.map_or(LayerSet::NONE, |(_, mapped)| {
            self.copy_epochs.stale_tiers(engine, mapped.layers)
        });
        match before {
            None => {
                self.blocks.insert(engine, new_block);
                self.copy_epochs.set_counted_now(engine, LayerSet::NONE);
                self.add_group_layers(engine, scratch);
            }
            Some((_, mapped)) if mapped.location != location => {
                self.blocks.insert(engine, new_block);
                self.copy_epochs.set_counted_now(engine, LayerSet::NONE);
                scratch
                    .lost
                    .extend(mapped.layers.iter().map(|layer| (mapped.location, layer)));
                self.drop_copies(engine, mapped.layers);
                self.add_group_layers(engine, scratch);
            }
            Some((at, mapped)) if !mapped.layers.has(tier) => {
                self.blocks.set_layers(at, mapped.layers.with(tier));
                self.copy_epochs.set_counted_now(engine, stale_layers);
            }
            Some(_) if stale_layers.has(tier) => {
                self.copy_epochs
                    .set_counted_now(engine, stale_layers.without(tier));
                self.drop_extra_copies(engine, tier);
                return StoreEffect::ExtraCopy;
            }
            Some(_) => {
                self.copy_epochs.set_counted_now(engine, stale_layers);
                *self.extra_copies.entry((engine, tier)).or_insert(0) += 1;
                self.shared.add_copies(1);
                return StoreEffect::ExtraCopy;
            }
        }
        self.shared.add_copies(1);
        StoreEffect::NewHash
    }

    /// Adds the layers that the cache groups hold of a hash that has just got its location.
    #[cold]
    pub(super) fn add_group_layers(&mut self, engine: EngineHash, scratch: &mut EventBuffers) {
        let Some(groups) = &self.groups else { return };
        let layers = groups.held_layers(engine);
        if let Some((at, mapped)) = self.blocks.find(engine) {
            self.blocks.set_layers(at, mapped.layers.union(layers));
            scratch
                .gained
                .extend(layers.iter().map(|layer| (mapped.location, layer)));
            scratch.confirmed.extend(
                groups
                    .counted_layers(engine)
                    .iter()
                    .map(|layer| (mapped.location, layer)),
            );
        }
    }

    /// Removes a hash.
    pub(super) fn remove_hash(&mut self, engine: EngineHash) {
        if let Some(orphan) = self.take_orphan(engine) {
            self.drop_copies(engine, orphan.tiers);
        }
        if let Some((at, mapped)) = self.blocks.find(engine) {
            self.blocks.set_layers(at, LayerSet::NONE);
            self.copy_epochs.remove(engine);
            self.drop_copies(engine, mapped.layers);
            // Released at the end of the event.
            self.buffers
                .lost
                .extend(mapped.layers.iter().map(|layer| (mapped.location, layer)));
        }
    }

    pub(super) fn drop_copies(&mut self, engine: EngineHash, layers: LayerSet) {
        for tier in layers.iter_tiers() {
            self.drop_extra_copies(engine, tier);
            self.shared.add_copies(-1);
        }
    }

    pub(super) fn drop_extra_copies(&mut self, engine: EngineHash, tier: StorageTier) {
        let copies = self.extra_copies.remove(&(engine, tier)).unwrap_or(0);
        self.shared.add_copies(-i64::from(copies));
    }
}
