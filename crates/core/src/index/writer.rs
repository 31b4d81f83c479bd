//! Writer of one worker rank: maps engine hashes to locations in the tries.
//!
//! Engine hashes and copies are private to the writer, so they need no shared lock. An engine may
//! cache a block several times and reports each copy. The block is removed with its last copy. An
//! engine may also use several hashes for one block, which then stays until the last hash is
//! removed. The tries are updated only for the first and the last one.
//!
//! Decision 0038.

mod clear;
mod copy_epochs;
mod engine_map;
mod groups;
mod orphans;
mod reconcile;
mod release;
mod snapshot;
mod store;
mod store_orphans;

use std::collections::HashMap;
use std::sync::Arc;

use copy_epochs::CopyEpochs;
use engine_map::{EngineBlockMap, EntryRef, MappedBlock};
use groups::{GroupChange, GroupHoldings};
use orphans::OrphanBlocks;
pub use reconcile::{PurgedBlocks, ReconcileReport};

use super::cache_groups::CacheGroupRules;
use super::event::{ApplyOutcome, GroupNeed, KvEvent};
use super::ids::{BlockId, BlockLocation, OwnerId, PREFETCH_DISTANCE};
use super::layers::{BlockLayer, LayerSet};
use super::owner_table::SharedRankState;
use super::prefix_index::PrefixIndex;
use super::reinsertion::EvictionFilter;
use crate::block::{EngineHash, LocalHash, StorageTier};
use crate::worker::RankSlot;

/// A copy of a block, with its entry in the map of engine hashes.
#[derive(Clone, Copy)]
struct CopyRef {
    engine: EngineHash,
    at: EntryRef,
    block: MappedBlock,
}

/// Applies the events of one worker rank. Dropping it removes all blocks of the rank from the
/// index.
#[derive(Debug)]
pub struct RankWriter {
    index: Arc<PrefixIndex>,
    slot: RankSlot,
    owner: OwnerId,
    shared: Arc<SharedRankState>,
    blocks: EngineBlockMap,
    /// Gap at which the copies of each hash were last counted.
    copy_epochs: CopyEpochs,
    /// Number of copies of a hash in a tier, beyond the first one.
    extra_copies: HashMap<(EngineHash, StorageTier), u32>,
    /// Number of engine hashes of a block, beyond the first one.
    aliases: HashMap<(BlockLocation, BlockLayer), u32>,
    orphans: OrphanBlocks,
    /// Present only for models with several cache groups.
    groups: Option<Box<GroupHoldings>>,
    /// Hashes that were evicted from the device recently.
    evicted: EvictionFilter,
    /// Number of evictions of blocks stored since the last gap. `None` unless the engine may hold
    /// blocks that were never reported.
    unreported_evictions: Option<u64>,
    buffers: EventBuffers,
}

/// Buffers of one event. They are reused.
#[derive(Debug, Default)]
struct EventBuffers {
    locals: Vec<LocalHash>,
    /// Map entries of the event's hashes.
    new_entries: Vec<EntryRef>,
    path: Vec<BlockId>,
    granted: Vec<BlockId>,
    /// Layers added by the event, in addition to its tier.
    gained: Vec<(BlockLocation, BlockLayer)>,
    /// Layers removed by the event.
    lost: Vec<(BlockLocation, BlockLayer)>,
    /// Layers confirmed by the event.
    confirmed: Vec<(BlockLocation, BlockLayer)>,
}

impl PrefixIndex {
    /// Creates the writer of a slot. It replaces an earlier writer, whose blocks are no longer
    /// reported.
    pub fn create_writer(self: &Arc<Self>, slot: RankSlot) -> RankWriter {
        let shared = Arc::new(SharedRankState::default());
        let owner = self.owners.write().register(slot, shared.clone());
        RankWriter {
            index: self.clone(),
            slot,
            owner,
            shared,
            blocks: EngineBlockMap::default(),
            copy_epochs: CopyEpochs::default(),
            extra_copies: HashMap::new(),
            aliases: HashMap::new(),
            orphans: OrphanBlocks::default(),
            groups: None,
            evicted: EvictionFilter::default(),
            unreported_evictions: None,
            buffers: EventBuffers::default(),
        }
    }
}

impl RankWriter {
    /// Returns the slot of the writer.
    pub fn slot(&self) -> RankSlot {
        self.slot
    }

    /// Applies one event. Readers see all of it or nothing.
    pub fn apply(&mut self, event: &KvEvent) -> ApplyOutcome {
        match event {
            KvEvent::Stored {
                parent,
                blocks,
                tier,
            } => {
                let outcome = self.store(*parent, blocks, *tier);
                match outcome {
                    ApplyOutcome::Ok => self.shared.record_store(),
                    // The parent was not reported, but is in use.
                    ApplyOutcome::ParentNotFound => {
                        self.unreported_evictions = self.unreported_evictions.map(|_| 0)
                    }
                    _ => {}
                }
                self.shared
                    .watches
                    .on_stored(blocks, |locals| self.index.held_prefix(locals, self.owner));
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
                ApplyOutcome::Ok
            }
        }
    }

    fn remove(&mut self, blocks: &[EngineHash], tier: StorageTier) -> ApplyOutcome {
        if tier == StorageTier::Device && !blocks.is_empty() {
            self.shared.set_has_evicted(true);
        }
        let mut scratch = std::mem::take(&mut self.buffers);
        let mut outcome = ApplyOutcome::Ok;
        let mut evicted = Vec::new();
        let mut copies = 0;
        blocks
            .iter()
            .take(PREFETCH_DISTANCE)
            .for_each(|engine| self.prefetch(*engine));
        for (number, &engine) in blocks.iter().enumerate() {
            if let Some(later) = blocks.get(number + PREFETCH_DISTANCE) {
                self.prefetch(*later);
            }
            let Some((at, mapped)) = self
                .blocks
                .find(engine)
                .filter(|(_, mapped)| mapped.layers.has(tier))
            else {
                if !self.remove_orphan_copy(engine, tier) {
                    outcome = ApplyOutcome::BlockNotFound;
                }
                continue;
            };
            copies += 1;
            if !self.extra_copies.is_empty()
                && remove_extra_copy(&mut self.extra_copies, engine, tier)
            {
                continue;
            }
            if self.copy_epochs.generation() > 0 {
                evicted.push(self.copy_epochs.epoch_at_eviction(engine, tier));
            }
            self.record_evicted(engine, tier);
            self.remove_last_copy(
                CopyRef {
                    engine,
                    at,
                    block: mapped,
                },
                tier,
                &mut scratch,
            );
        }
        self.shared.add_copies(-copies);
        self.blocks.shrink();
        self.apply_all_lost(&mut scratch);
        self.return_buffers(scratch);
        self.record_evictions(tier, &evicted);
        outcome
    }

    /// Prefetches the memory that a removal reads.
    fn prefetch(&self, engine: EngineHash) {
        self.blocks.prefetch(engine);
        self.evicted.prefetch(engine);
    }

    /// Removes the last copy of a hash in a tier.
    fn remove_last_copy(&mut self, copy: CopyRef, tier: StorageTier, scratch: &mut EventBuffers) {
        let remaining = copy.block.layers.without(tier);
        scratch.lost.push((copy.block.location, tier.into()));
        if !remaining.tiers().is_empty() {
            self.blocks.set_layers(copy.at, remaining);
            return;
        }
        // Without a copy, the shares of the cache groups have no location either.
        scratch
            .lost
            .extend(remaining.iter().map(|layer| (copy.block.location, layer)));
        self.blocks.set_layers(copy.at, LayerSet::NONE);
        self.copy_epochs.remove(copy.engine);
    }

    fn record_evicted(&mut self, engine: EngineHash, tier: StorageTier) {
        if tier == StorageTier::Device
            && let Some(unknown_until) = self
                .evicted
                .insert(engine, self.shared.event_cursor().stores)
        {
            self.shared.reinsertions.lock().mark_unknown(unknown_until);
        }
    }

    /// Removes one copy of a block without a location. Returns whether there was one.
    #[cold]
    fn remove_orphan_copy(&mut self, engine: EngineHash, tier: StorageTier) -> bool {
        if !self
            .orphans
            .get_mut(engine)
            .is_some_and(|orphan| orphan.tiers.has(tier))
        {
            return false;
        }
        self.shared.add_copies(-1);
        if !remove_extra_copy(&mut self.extra_copies, engine, tier) {
            self.drop_orphan_tier(engine, tier);
        }
        true
    }

    /// Removes a tier of a block without a location.
    fn drop_orphan_tier(&mut self, engine: EngineHash, tier: StorageTier) {
        let Some(orphan) = self.orphans.get_mut(engine) else {
            return;
        };
        orphan.tiers = orphan.tiers.without(tier);
        orphan.stale = orphan.stale.without(tier);
        let is_gone = orphan.tiers.is_empty();
        self.shared.add_blocks(tier, -1);
        if is_gone {
            self.orphans.take(engine);
            self.shared.add_waiting(-1);
        }
    }

    fn store_group(&mut self, group: u32, need: GroupNeed, blocks: &[EngineHash]) -> ApplyOutcome {
        let groups = self.groups.get_or_insert_default();
        let change = groups.define(group, need);
        let max_hashes = usize::try_from(self.shared.limits().max_hashes()).unwrap_or(usize::MAX);
        let mut any_new = false;
        let mut over = 0;
        if let Some(at) = groups.find(group) {
            for &engine in blocks {
                match groups.store(at, engine, max_hashes) {
                    Some(is_new) => any_new |= is_new,
                    None => over += 1,
                }
            }
        }
        self.shared.record_over_limit(over);
        if change == GroupChange::Changed {
            // The blocks get their new layers one by one. Until all have them, nothing counts as
            // reusable.
            self.publish_rules(CacheGroupRules {
                has_unknown: true,
                ..CacheGroupRules::default()
            });
        }
        match change {
            GroupChange::Unchanged | GroupChange::TooMany { new: false } => {
                self.update_group_layers(blocks)
            }
            GroupChange::New | GroupChange::Changed | GroupChange::TooMany { new: true } => {
                self.update_all_group_layers()
            }
        }
        match change {
            GroupChange::TooMany { .. } => ApplyOutcome::TooManyGroups,
            _ if over > 0 => ApplyOutcome::IndexFull,
            _ if any_new || blocks.is_empty() => ApplyOutcome::Ok,
            _ => ApplyOutcome::DuplicateStore,
        }
    }

    fn remove_group(&mut self, group: u32, blocks: &[EngineHash]) -> ApplyOutcome {
        // The groups share the blocks of the device (vLLM).
        self.shared.set_has_evicted(true);
        let Some(groups) = &mut self.groups else {
            return ApplyOutcome::BlockNotFound;
        };
        let Some(at) = groups.find(group) else {
            return ApplyOutcome::BlockNotFound;
        };
        let removed = blocks
            .iter()
            .filter(|engine| groups.remove(at, **engine))
            .count();
        self.update_group_layers(blocks);
        if removed == blocks.len() {
            ApplyOutcome::Ok
        } else {
            ApplyOutcome::BlockNotFound
        }
    }

    /// Updates the layers that the cache groups hold of these blocks.
    fn update_group_layers(&mut self, blocks: &[EngineHash]) {
        let Some(groups) = &self.groups else { return };
        let mut scratch = std::mem::take(&mut self.buffers);
        for &engine in blocks {
            let Some((at, mapped)) = self.blocks.find(engine) else {
                continue;
            };
            let tiers = mapped.layers.tiers();
            let now = groups.held_layers(engine);
            let before = mapped.layers.difference(tiers);
            scratch.gained.extend(
                now.difference(before)
                    .iter()
                    .map(|layer| (mapped.location, layer)),
            );
            scratch.lost.extend(
                before
                    .difference(now)
                    .iter()
                    .map(|layer| (mapped.location, layer)),
            );
            self.blocks.set_layers(at, tiers.union(now));
            scratch.confirmed.extend(
                groups
                    .counted_layers(engine)
                    .iter()
                    .map(|layer| (mapped.location, layer)),
            );
        }
        self.apply_all_gained(&mut scratch);
        self.apply_all_lost(&mut scratch);
        self.confirm(&scratch.confirmed, None);
        self.return_buffers(scratch);
    }

    /// Updates the layers of all blocks, and publishes the rules afterwards. Readers see a rule
    /// only when the layers for it are complete.
    fn update_all_group_layers(&mut self) {
        let held: Vec<_> = self.blocks.iter().map(|(engine, _)| engine).collect();
        self.update_group_layers(&held);
        if let Some(groups) = &self.groups {
            self.publish_rules(groups.rules().clone());
        }
    }

    fn publish_rules(&self, rules: CacheGroupRules) {
        self.index
            .owners
            .write()
            .set_rules(self.owner, Arc::new(rules));
    }

    fn return_buffers(&mut self, mut scratch: EventBuffers) {
        scratch.locals.clear();
        scratch.new_entries.clear();
        scratch.path.clear();
        scratch.granted.clear();
        scratch.confirmed.clear();
        self.buffers = scratch;
    }
}

/// Removes a copy beyond the first one. Returns whether there was one.
fn remove_extra_copy(
    extra: &mut HashMap<(EngineHash, StorageTier), u32>,
    engine: EngineHash,
    tier: StorageTier,
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
