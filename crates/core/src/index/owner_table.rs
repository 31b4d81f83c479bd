//! Owner ids: the numbers under which the tries store the blocks of a rank.
//!
//! A slot is not used directly. A rank that is cleared or removed must disappear at once, but
//! removing its blocks from the tries takes time. The rank gives up its owner id, readers stop
//! reporting it, and the id is reused only when no trie contains it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use super::cache_groups::CacheGroupRules;
use super::ids::OwnerId;
use super::limits::BlockLimits;
use super::reinsertion::ReinsertionLog;
use super::stale_blocks::StaleBlocks;
use super::stats::{BlockCounts, EventCursor, SlotStats};
use super::watch::PrefixWatches;
use crate::block::StorageTier;
use crate::worker::RankSlot;

/// All owner ids.
#[derive(Debug, Default)]
pub(super) struct OwnerTable {
    map: Arc<OwnerMap>,
    states: Arc<RankStates>,
    free: Vec<OwnerId>,
}

/// Shared states of the ranks, indexed by slot.
type RankStates = Vec<Option<Arc<SharedRankState>>>;

/// Current number of device blocks of each slot. The writers update it.
#[derive(Clone, Debug, Default)]
pub struct DeviceBlockCounts(Arc<RankStates>);

/// Device blocks of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankDeviceBlocks {
    /// Number of cached blocks.
    pub blocks: u64,
    /// Whether the engine has evicted device blocks since its cache was last cleared.
    pub has_evicted: bool,
}

impl DeviceBlockCounts {
    /// Returns the device blocks of a slot; none if it has no writer.
    #[inline]
    pub fn get(&self, slot: RankSlot) -> RankDeviceBlocks {
        let state = self.0.get(slot.index()).and_then(Option::as_ref);
        state.map_or_else(RankDeviceBlocks::default, |state| RankDeviceBlocks {
            blocks: state.block_count(StorageTier::Device),
            has_evicted: state.has_evicted(),
        })
    }
}

/// Mapping between owner ids and slots. A query result keeps the mapping of its query, which costs
/// nothing while no rank is added or removed.
#[derive(Clone, Debug, Default)]
pub(super) struct OwnerMap {
    slots: Vec<Option<RankSlot>>,
    by_slot: Vec<Option<OwnerId>>,
    /// Reuse rules of ranks with several cache groups. Ends with the last owner that has any.
    rules: Vec<Option<Arc<CacheGroupRules>>>,
}

/// Slots whose cache has several groups (vLLM: hybrid KV cache). A prompt that was sent there does
/// not show which shares the groups have kept.
#[derive(Clone, Debug, Default)]
pub struct HybridSlots(Arc<OwnerMap>);

impl HybridSlots {
    pub(super) fn new(map: &Arc<OwnerMap>) -> Self {
        Self(map.clone())
    }

    /// Returns whether the cache of this slot has several groups.
    pub fn contains(&self, slot: RankSlot) -> bool {
        self.0
            .owner(slot)
            .is_some_and(|owner| self.0.rules(owner).is_some())
    }

    /// Returns whether no rank was added or removed between the two.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl OwnerMap {
    /// Returns whether any owner has reuse rules.
    pub(super) fn has_rules(&self) -> bool {
        !self.rules.is_empty()
    }

    pub(super) fn rules(&self, owner: OwnerId) -> Option<&CacheGroupRules> {
        self.rules.get(owner.at())?.as_deref()
    }

    pub(super) fn slot(&self, owner: OwnerId) -> Option<RankSlot> {
        self.slots.get(owner.at()).copied().flatten()
    }

    pub(super) fn owner(&self, slot: RankSlot) -> Option<OwnerId> {
        self.by_slot.get(slot.index()).copied().flatten()
    }

    /// Vacates an owner id. Returns its slot.
    fn vacate(&mut self, owner: OwnerId) -> Option<RankSlot> {
        if let Some(rules) = self.rules.get_mut(owner.at()) {
            *rules = None;
        }
        while self.rules.pop_if(|rules| rules.is_none()).is_some() {}
        self.slots[owner.at()].take()
    }

    fn set_rules(&mut self, owner: OwnerId, rules: Arc<CacheGroupRules>) {
        if self.rules.len() <= owner.at() {
            self.rules.resize(owner.at() + 1, None);
        }
        self.rules[owner.at()] = Some(rules);
    }

    fn assign(&mut self, slot: RankSlot, owner: OwnerId) {
        if self.by_slot.len() <= slot.index() {
            self.by_slot.resize(slot.index() + 1, None);
        }
        self.slots[owner.at()] = Some(slot);
        self.by_slot[slot.index()] = Some(owner);
    }
}

impl OwnerTable {
    /// Registers a new writer of a slot. An earlier writer of the slot is no longer reported.
    pub(super) fn register(&mut self, slot: RankSlot, shared: Arc<SharedRankState>) -> OwnerId {
        let owner = self.allocate();
        let map = Arc::make_mut(&mut self.map);
        if let Some(before) = map.owner(slot) {
            map.vacate(before);
        }
        map.assign(slot, owner);
        let states = Arc::make_mut(&mut self.states);
        if states.len() <= slot.index() {
            states.resize(slot.index() + 1, None);
        }
        states[slot.index()] = Some(shared);
        owner
    }

    /// Moves a writer to a new owner id. The blocks under the old one are no longer reported.
    pub(super) fn reassign(&mut self, owner: OwnerId) -> OwnerId {
        let new_owner = self.allocate();
        self.replace(owner, new_owner, None);
        new_owner
    }

    /// Allocates an owner id that is not reported until it replaces another one.
    pub(super) fn allocate_hidden(&mut self) -> OwnerId {
        self.allocate()
    }

    /// Reports the blocks under the owner id `by` instead of those under `owner`.
    pub(super) fn replace(
        &mut self,
        owner: OwnerId,
        by: OwnerId,
        rules: Option<Arc<CacheGroupRules>>,
    ) {
        let map = Arc::make_mut(&mut self.map);
        let Some(slot) = map.vacate(owner) else {
            return;
        };
        map.assign(slot, by);
        if let Some(rules) = rules {
            map.set_rules(by, rules);
        }
    }

    /// Stops reporting the blocks of an owner.
    pub(super) fn unregister(&mut self, owner: OwnerId) {
        let map = Arc::make_mut(&mut self.map);
        if let Some(slot) = map.vacate(owner) {
            map.by_slot[slot.index()] = None;
            Arc::make_mut(&mut self.states)[slot.index()] = None;
        }
    }

    /// Sets the reuse rules of an owner. From now on, only prefixes that satisfy them count as
    /// reusable.
    pub(super) fn set_rules(&mut self, owner: OwnerId, rules: Arc<CacheGroupRules>) {
        if self.map.slot(owner).is_some() {
            Arc::make_mut(&mut self.map).set_rules(owner, rules);
        }
    }

    pub(super) fn device_block_counts(&self) -> DeviceBlockCounts {
        DeviceBlockCounts(self.states.clone())
    }

    pub(super) fn owner_map(&self) -> &Arc<OwnerMap> {
        &self.map
    }

    pub(super) fn rules(&self, owner: OwnerId) -> Option<&CacheGroupRules> {
        self.map.rules(owner)
    }

    /// Frees an owner id that no trie contains.
    pub(super) fn free(&mut self, owner: OwnerId) {
        self.free.push(owner);
    }

    pub(super) fn stats(&self) -> Vec<SlotStats> {
        let states = self
            .states
            .iter()
            .enumerate()
            .filter_map(|(slot, shared)| Some((slot, shared.as_ref()?)));
        let stats = |(slot, shared): (usize, &Arc<SharedRankState>)| SlotStats {
            slot: RankSlot(slot as u32),
            counts: shared.counts(),
            limits: shared.limits(),
            over_limit: shared.over_limit.load(Ordering::Relaxed),
        };
        states.map(stats).collect()
    }

    /// Returns the owner id of a slot and the shared state of its writer.
    pub(super) fn find(&self, slot: RankSlot) -> Option<(OwnerId, &Arc<SharedRankState>)> {
        Some((
            self.map.owner(slot)?,
            self.states.get(slot.index())?.as_ref()?,
        ))
    }

    fn allocate(&mut self) -> OwnerId {
        self.free.pop().unwrap_or_else(|| {
            let slots = &mut Arc::make_mut(&mut self.map).slots;
            slots.push(None);
            OwnerId(slots.len() as u32 - 1)
        })
    }
}

/// State of a writer that is shared with readers.
#[derive(Debug, Default)]
pub(super) struct SharedRankState {
    limits: RwLock<BlockLimits>,
    /// Number of blocks dropped because of a limit.
    over_limit: AtomicU64,
    blocks: [AtomicU64; 4],
    copies: AtomicU64,
    waiting: AtomicU64,
    /// Number of events that stored blocks. It only grows, so two readings show whether blocks were
    /// stored in between.
    stores: AtomicU64,
    /// Number of gaps in the event stream.
    gaps: AtomicU32,
    /// Whether the engine has evicted device blocks since its cache was last cleared.
    has_evicted: AtomicBool,
    pub(super) stale: Mutex<StaleBlocks>,
    pub(super) reinsertions: Mutex<ReinsertionLog>,
    pub(super) watches: PrefixWatches,
}

impl SharedRankState {
    pub(super) fn set_limits(&self, limits: BlockLimits) {
        *self.limits.write() = limits;
    }

    pub(super) fn limits(&self) -> BlockLimits {
        *self.limits.read()
    }

    /// Returns the number of blocks that may still be added to a tier.
    pub(super) fn remaining(&self, tier: StorageTier) -> u64 {
        self.limits()
            .for_tier(tier)
            .saturating_sub(self.block_count(tier))
    }

    fn block_count(&self, tier: StorageTier) -> u64 {
        self.blocks[tier as usize].load(Ordering::Relaxed)
    }

    pub(super) fn record_over_limit(&self, blocks: u64) {
        self.over_limit.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Changes the number of blocks in a tier. Only the writer changes its counters, so a plain
    /// load and store are enough.
    pub(super) fn add_blocks(&self, tier: StorageTier, by: i64) {
        add(&self.blocks[tier as usize], by);
    }

    pub(super) fn add_copies(&self, by: i64) {
        add(&self.copies, by);
    }

    pub(super) fn add_waiting(&self, by: i64) {
        add(&self.waiting, by);
    }

    pub(super) fn record_store(&self) {
        add(&self.stores, 1);
    }

    /// Records a gap. Returns the number of gaps so far.
    pub(super) fn record_gap(&self) -> u32 {
        self.gaps.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    pub(super) fn event_cursor(&self) -> EventCursor {
        EventCursor {
            stores: self.stores.load(Ordering::Relaxed),
            gaps: self.gaps.load(Ordering::Relaxed),
        }
    }

    pub(super) fn has_evicted(&self) -> bool {
        self.has_evicted.load(Ordering::Relaxed)
    }

    pub(super) fn set_has_evicted(&self, has_evicted: bool) {
        self.has_evicted.store(has_evicted, Ordering::Relaxed);
    }

    pub(super) fn reset(&self) {
        self.set_has_evicted(false);
        self.stale.lock().reset();
        self.reinsertions.lock().clear(self.event_cursor().stores);
        for count in self.blocks.iter().chain([&self.copies, &self.waiting]) {
            count.store(0, Ordering::Relaxed);
        }
    }

    fn counts(&self) -> BlockCounts {
        BlockCounts {
            device: self.block_count(StorageTier::Device),
            host: self.block_count(StorageTier::HostPinned),
            disk: self.block_count(StorageTier::Disk),
            external: self.block_count(StorageTier::External),
            copies: self.copies.load(Ordering::Relaxed),
            waiting: self.waiting.load(Ordering::Relaxed),
        }
    }
}

fn add(count: &AtomicU64, by: i64) {
    count.store(
        count.load(Ordering::Relaxed).wrapping_add_signed(by),
        Ordering::Relaxed,
    );
}
