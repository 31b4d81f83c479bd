//! Stores blocks of lower tiers whose parent is unknown, and gives them a location when the parent
//! gets one.

use super::copy_epochs::CopyEpoch;
use super::orphans::OrphanBlock;
use super::{BlockLocation, EventBuffers, MappedBlock, RankWriter};
use crate::block::{EngineHash, StorageTier};
use crate::index::event::{ApplyOutcome, StoredBlock};
use crate::index::layers::LayerSet;
use crate::index::trie::{BlockTrie, LayerHold};

impl RankWriter {
    /// Adds one copy of a hash that had no location until now. It keeps its other tiers if it is
    /// the same block.
    #[cold]
    pub(super) fn locate_stored_orphan(
        &mut self,
        block: StoredBlock,
        location: BlockLocation,
        tier: StorageTier,
        scratch: &mut EventBuffers,
    ) -> bool {
        let engine = block.engine;
        let Some(orphan) = self.take_orphan(engine) else {
            return false;
        };
        if orphan.local != block.local {
            self.drop_copies(engine, orphan.tiers);
            return false;
        }
        let mut stale_layers = orphan.stale_tiers(self.copy_epochs.generation());
        scratch.confirmed.extend(
            orphan
                .tiers
                .difference(stale_layers)
                .iter()
                .map(|layer| (location, layer)),
        );
        if orphan.tiers.has(tier) && !stale_layers.has(tier) {
            *self.extra_copies.entry((engine, tier)).or_insert(0) += 1;
            self.shared.add_copies(1);
        } else if orphan.tiers.has(tier) {
            stale_layers = stale_layers.without(tier);
            self.drop_extra_copies(engine, tier);
        } else {
            self.shared.add_copies(1);
        }
        scratch.gained.extend(
            orphan
                .tiers
                .without(tier)
                .iter()
                .map(|layer| (location, layer)),
        );
        let layers = orphan.tiers.with(tier);
        self.blocks.insert(engine, MappedBlock { location, layers });
        self.copy_epochs.set_counted_now(engine, stale_layers);
        self.add_group_layers(engine, scratch);
        true
    }

    /// Stores blocks in a lower tier whose parent is unknown.
    pub(super) fn store_orphans(
        &mut self,
        parent: EngineHash,
        blocks: &[StoredBlock],
        tier: StorageTier,
    ) -> ApplyOutcome {
        let mut parent = parent;
        let mut is_full = false;
        for (at, block) in blocks.iter().enumerate() {
            if let Some(before) = self.find_predecessor(*block) {
                // The hash has a location, and so has the rest of the run.
                let outcome = self.store_after(before, &blocks[at..], tier);
                return if at == 0 {
                    outcome
                } else {
                    ApplyOutcome::ParentAwaited
                };
            }
            if !self.add_orphan(parent, *block, tier) {
                is_full = true;
                break;
            }
            parent = block.engine;
        }
        let mut scratch = std::mem::take(&mut self.buffers);
        self.apply_all_lost(&mut scratch);
        self.return_buffers(scratch);
        match blocks {
            _ if is_full => ApplyOutcome::TooManyWaiting,
            [] => ApplyOutcome::Ok,
            _ => ApplyOutcome::ParentAwaited,
        }
    }

    /// Returns the predecessor of a block whose hash is known with this content: a block, or the
    /// start of a prompt.
    fn find_predecessor(&self, block: StoredBlock) -> Option<Option<BlockLocation>> {
        let location = self.blocks.get(block.engine)?.location;
        let (before, local) = self.index.shards[usize::from(location.shard)]
            .read()
            .origin(location.block);
        (local == block.local).then(|| before.map(|block| BlockLocation { block, ..location }))
    }

    /// Adds one copy of a block without a location. Returns false if there are too many.
    fn add_orphan(&mut self, parent: EngineHash, block: StoredBlock, tier: StorageTier) -> bool {
        let StoredBlock { engine, local } = block;
        let known = self
            .orphans
            .get_mut(engine)
            .filter(|orphan| (orphan.parent, orphan.local) == (parent, local));
        if let Some(orphan) = known {
            orphan.stale = orphan.stale_tiers(self.copy_epochs.generation());
            orphan.generation = self.copy_epochs.generation();
            if !orphan.tiers.has(tier) {
                orphan.tiers = orphan.tiers.with(tier);
                self.shared.add_blocks(tier, 1);
                self.shared.add_copies(1);
            } else if orphan.stale.has(tier) {
                orphan.stale = orphan.stale.without(tier);
                self.drop_extra_copies(engine, tier);
            } else {
                *self.extra_copies.entry((engine, tier)).or_insert(0) += 1;
                self.shared.add_copies(1);
            }
            return true;
        }
        if self.orphans.is_full() {
            return false;
        }
        self.remove_hash(engine);
        let orphan = OrphanBlock {
            parent,
            local,
            tiers: LayerSet::of(tier),
            stale: LayerSet::NONE,
            generation: self.copy_epochs.generation(),
        };
        self.orphans.insert(engine, orphan);
        self.shared.add_waiting(1);
        self.shared.add_blocks(tier, 1);
        self.shared.add_copies(1);
        true
    }

    /// Removes an orphan, but not its copies.
    pub(super) fn take_orphan(&mut self, engine: EngineHash) -> Option<OrphanBlock> {
        let orphan = self.orphans.take(engine)?;
        self.uncount_orphan(&orphan);
        Some(orphan)
    }

    fn uncount_orphan(&self, orphan: &OrphanBlock) {
        self.shared.add_waiting(-1);
        orphan
            .tiers
            .iter_tiers()
            .for_each(|tier| self.shared.add_blocks(tier, -1));
    }

    /// Locates the orphans that follow these blocks, in one step because readers see an event as a
    /// whole. The number of orphans is bounded.
    pub(super) fn locate_orphans(&mut self, trie: &mut BlockTrie, blocks: &[StoredBlock]) {
        let with_orphans = blocks
            .iter()
            .map(|block| block.engine)
            .filter(|engine| self.orphans.has_child(*engine));
        let mut parents: Vec<EngineHash> = with_orphans.collect();
        while let Some(&parent) = parents.last() {
            let location = self.blocks.get(parent).map(|mapped| mapped.location);
            match location.and_then(|location| Some((location, self.orphans.take_child(parent)?))) {
                None => drop(parents.pop()),
                Some((location, (child, orphan))) => {
                    self.locate_orphan(trie, location, child, &orphan);
                    parents.push(child);
                }
            }
        }
    }

    /// Locates one orphan after its parent.
    fn locate_orphan(
        &mut self,
        trie: &mut BlockTrie,
        after: BlockLocation,
        child: EngineHash,
        orphan: &OrphanBlock,
    ) {
        self.uncount_orphan(orphan);
        let groups = self
            .groups
            .as_ref()
            .map_or(LayerSet::NONE, |groups| groups.held_layers(child));
        let layers = orphan.tiers.union(groups);
        let mut path = Vec::new();
        trie.trace_path(Some(after.block), &[orphan.local], &mut path);
        for layer in layers.iter() {
            if let Some(&block) = path.first() {
                self.add_layer(trie, BlockLocation { block, ..after }, layer);
            } else {
                let hold = LayerHold::new(self.owner, layer);
                trie.insert(Some(after.block), &[orphan.local], hold, &mut path);
                self.count_layer(layer, path.len() as i64);
            }
        }
        let Some(&block) = path.first() else {
            // The trie is full.
            self.drop_copies(child, orphan.tiers);
            return;
        };
        let location = BlockLocation { block, ..after };
        let confirmed = layers
            .tiers()
            .difference(orphan.stale_tiers(self.copy_epochs.generation()));
        let confirmed = confirmed.union(
            self.groups
                .as_ref()
                .map_or(LayerSet::NONE, |groups| groups.counted_layers(child)),
        );
        self.confirm(
            &confirmed
                .iter()
                .map(|layer| (location, layer))
                .collect::<Vec<_>>(),
            None,
        );
        self.blocks.insert(child, MappedBlock { location, layers });
        self.copy_epochs.set(
            child,
            CopyEpoch {
                stale: orphan.stale,
                generation: orphan.generation,
            },
        );
    }
}
