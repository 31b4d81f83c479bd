//! Under which number a rank's blocks are entered in the tries. A seat and not the slot itself, because a rank that is
//! cleared or leaves must vanish at once, while taking its blocks out of the tries takes time: it gives up its seat,
//! readers no longer report the seat, and the seat is given out again only when no trie mentions it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::doubts::Doubts;
use super::gains::Gains;
use super::needs::Needs;
use super::watch::PrefixWatches;
use super::{BlockCounts, BlockLimits, Moment, SlotStats};
use crate::tier::Tier;
use crate::worker::Slot;

/// Number of a writer's blocks in the tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Seat(pub(super) u32);

impl Seat {
    pub(super) fn at(self) -> usize {
        self.0 as usize
    }
}

/// All seats.
#[derive(Debug, Default)]
pub(super) struct Seats {
    plan: Arc<Plan>,
    /// By slot.
    tallies: Vec<Option<Arc<Tally>>>,
    free: Vec<Seat>,
}

/// Who sits where. An answer keeps the one it was found with, which costs nothing while nobody comes or goes.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    slots: Vec<Option<Slot>>,
    by_slot: Vec<Option<Seat>>,
    /// What the blocks under a seat need beside them to be of use; as long as the last seat that needs anything.
    needs: Vec<Option<Arc<Needs>>>,
}

/// Whose cache has several groups: that a prompt was there says nothing of what these have kept of it.
#[derive(Clone, Debug, Default)]
pub struct Grouped(Arc<Plan>);

impl Grouped {
    pub(super) fn of(plan: &Arc<Plan>) -> Self {
        Self(plan.clone())
    }

    /// Whether this slot's has.
    pub fn has(&self, slot: Slot) -> bool {
        self.0
            .seat(slot)
            .is_some_and(|seat| self.0.needs(seat).is_some())
    }

    /// Whether nobody came or went between the two.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Plan {
    /// Whether any seat has needs.
    pub(super) fn any_needs(&self) -> bool {
        !self.needs.is_empty()
    }

    pub(super) fn needs(&self, seat: Seat) -> Option<&Needs> {
        self.needs.get(seat.at())?.as_deref()
    }

    pub(super) fn slot(&self, seat: Seat) -> Option<Slot> {
        self.slots.get(seat.at()).copied().flatten()
    }

    pub(super) fn seat(&self, slot: Slot) -> Option<Seat> {
        self.by_slot.get(slot.at()).copied().flatten()
    }

    /// Empties a seat; the slot that was reported under it.
    fn rise(&mut self, seat: Seat) -> Option<Slot> {
        if let Some(needs) = self.needs.get_mut(seat.at()) {
            *needs = None;
        }
        while self.needs.pop_if(|needs| needs.is_none()).is_some() {}
        self.slots[seat.at()].take()
    }

    fn need(&mut self, seat: Seat, needs: Arc<Needs>) {
        if self.needs.len() <= seat.at() {
            self.needs.resize(seat.at() + 1, None);
        }
        self.needs[seat.at()] = Some(needs);
    }

    fn sit(&mut self, slot: Slot, seat: Seat) {
        if self.by_slot.len() <= slot.at() {
            self.by_slot.resize(slot.at() + 1, None);
        }
        self.slots[seat.at()] = Some(slot);
        self.by_slot[slot.at()] = Some(seat);
    }
}

impl Seats {
    /// Gives a slot to a new writer; the one before it, if it is still there, is not reported any more.
    pub(super) fn join(&mut self, slot: Slot, tally: Arc<Tally>) -> Seat {
        let seat = self.vacant();
        let plan = Arc::make_mut(&mut self.plan);
        if let Some(before) = plan.seat(slot) {
            plan.rise(before);
        }
        plan.sit(slot, seat);
        if self.tallies.len() <= slot.at() {
            self.tallies.resize(slot.at() + 1, None);
        }
        self.tallies[slot.at()] = Some(tally);
        seat
    }

    /// Moves a writer to a fresh seat; the blocks under its old one are no longer reported.
    pub(super) fn renew(&mut self, seat: Seat) -> Seat {
        let fresh = self.vacant();
        self.replace(seat, fresh, None);
        fresh
    }

    /// A seat that is not reported before it replaces another.
    pub(super) fn hidden(&mut self) -> Seat {
        self.vacant()
    }

    /// Reports the blocks under another seat of the same writer instead of those under this one.
    pub(super) fn replace(&mut self, seat: Seat, by: Seat, needs: Option<Arc<Needs>>) {
        let plan = Arc::make_mut(&mut self.plan);
        let Some(slot) = plan.rise(seat) else { return };
        plan.sit(slot, by);
        needs.into_iter().for_each(|needs| plan.need(by, needs));
    }

    /// The blocks under this seat are no longer reported.
    pub(super) fn leave(&mut self, seat: Seat) {
        let plan = Arc::make_mut(&mut self.plan);
        if let Some(slot) = plan.rise(seat) {
            plan.by_slot[slot.at()] = None;
            self.tallies[slot.at()] = None;
        }
    }

    /// From now on only prefixes that satisfy these needs are reported as reusable.
    pub(super) fn need(&mut self, seat: Seat, needs: Arc<Needs>) {
        if self.plan.slot(seat).is_some() {
            Arc::make_mut(&mut self.plan).need(seat, needs);
        }
    }

    pub(super) fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    pub(super) fn needs(&self, seat: Seat) -> Option<&Needs> {
        self.plan.needs(seat)
    }

    /// No trie mentions this seat any more.
    pub(super) fn free(&mut self, seat: Seat) {
        self.free.push(seat);
    }

    pub(super) fn stats(&self) -> Vec<SlotStats> {
        let seated = self
            .tallies
            .iter()
            .enumerate()
            .filter_map(|(slot, tally)| Some((slot, tally.as_ref()?)));
        let stats = |(slot, tally): (usize, &Arc<Tally>)| SlotStats {
            slot: Slot(slot as u32),
            counts: tally.read(),
            limits: tally.limits(),
            over_limit: tally.over_limit.load(Ordering::Relaxed),
        };
        seated.map(stats).collect()
    }

    /// Under which seat a slot is reported, and what its writer tells of itself.
    pub(super) fn seating(&self, slot: Slot) -> Option<(Seat, &Arc<Tally>)> {
        Some((
            self.plan.seat(slot)?,
            self.tallies.get(slot.at())?.as_ref()?,
        ))
    }

    fn vacant(&mut self) -> Seat {
        self.free.pop().unwrap_or_else(|| {
            let slots = &mut Arc::make_mut(&mut self.plan).slots;
            slots.push(None);
            Seat(slots.len() as u32 - 1)
        })
    }
}

/// A writer's counts, where others can read them.
#[derive(Debug)]
pub(super) struct Tally {
    most_device: AtomicU64,
    most_lower: AtomicU64,
    /// Blocks that were dropped because a limit was reached.
    over_limit: AtomicU64,
    blocks: [AtomicU64; 4],
    copies: AtomicU64,
    waiting: AtomicU64,
    /// Events that stored something. Never taken back: whoever compares two readings learns whether there was news.
    stores: AtomicU64,
    /// How often events were lost.
    gaps: AtomicU32,
    pub(super) doubts: Mutex<Doubts>,
    pub(super) gains: Mutex<Gains>,
    pub(super) watches: PrefixWatches,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            most_device: AtomicU64::new(BlockLimits::NONE.device),
            most_lower: AtomicU64::new(BlockLimits::NONE.lower_tier),
            over_limit: AtomicU64::default(),
            blocks: Default::default(),
            copies: AtomicU64::default(),
            waiting: AtomicU64::default(),
            stores: AtomicU64::default(),
            gaps: AtomicU32::default(),
            doubts: Mutex::default(),
            gains: Mutex::default(),
            watches: PrefixWatches::default(),
        }
    }
}

impl Tally {
    pub(super) fn set_limits(&self, limits: BlockLimits) {
        self.most_device.store(limits.device, Ordering::Relaxed);
        self.most_lower.store(limits.lower_tier, Ordering::Relaxed);
    }

    pub(super) fn limits(&self) -> BlockLimits {
        let load = |most: &AtomicU64| most.load(Ordering::Relaxed);
        BlockLimits {
            device: load(&self.most_device),
            lower_tier: load(&self.most_lower),
        }
    }

    /// Blocks that may still be added to a tier.
    pub(super) fn room(&self, tier: Tier) -> u64 {
        self.limits()
            .of(tier)
            .saturating_sub(self.blocks[tier as usize].load(Ordering::Relaxed))
    }

    pub(super) fn note_over_limit(&self, blocks: u64) {
        self.over_limit.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Only the writer changes its tally, so a plain load and store do.
    pub(super) fn add_blocks(&self, tier: Tier, by: i64) {
        add(&self.blocks[tier as usize], by);
    }

    pub(super) fn add_copies(&self, by: i64) {
        add(&self.copies, by);
    }

    pub(super) fn add_waiting(&self, by: i64) {
        add(&self.waiting, by);
    }

    pub(super) fn note_store(&self) {
        add(&self.stores, 1);
    }

    /// Events were lost; how often so far.
    pub(super) fn note_gap(&self) -> u32 {
        self.gaps.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    pub(super) fn moment(&self) -> Moment {
        Moment {
            stores: self.stores.load(Ordering::Relaxed),
            gaps: self.gaps.load(Ordering::Relaxed),
        }
    }

    pub(super) fn reset(&self) {
        self.doubts.lock().reset();
        self.gains.lock().clear(self.moment().stores);
        for count in self.blocks.iter().chain([&self.copies, &self.waiting]) {
            count.store(0, Ordering::Relaxed);
        }
    }

    fn read(&self) -> BlockCounts {
        let blocks = |tier: Tier| self.blocks[tier as usize].load(Ordering::Relaxed);
        BlockCounts {
            device: blocks(Tier::Device),
            host: blocks(Tier::HostPinned),
            disk: blocks(Tier::Disk),
            external: blocks(Tier::External),
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
