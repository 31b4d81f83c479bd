//! Under which number a rank's blocks are entered in the tries. A seat and not the slot itself, because a rank that is
//! cleared or leaves must vanish at once, while taking its blocks out of the tries takes time: it gives up its seat,
//! readers no longer report the seat, and the seat is given out again only when no trie mentions it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{BlockCounts, SlotStats};
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
    slots: Vec<Option<Slot>>,
    by_slot: Vec<Option<Seating>>,
    free: Vec<Seat>,
}

/// Who speaks for a slot now.
#[derive(Clone, Debug)]
struct Seating {
    seat: Seat,
    tally: Arc<Tally>,
}

impl Seats {
    /// Gives a slot to a new writer; the one before it, if it is still there, is not reported any more.
    pub(super) fn join(&mut self, slot: Slot, tally: Arc<Tally>) -> Seat {
        if self.by_slot.len() <= slot.at() {
            self.by_slot.resize(slot.at() + 1, None);
        }
        if let Some(before) = self.by_slot[slot.at()].take() {
            self.slots[before.seat.at()] = None;
        }
        let seat = self.vacant();
        self.slots[seat.at()] = Some(slot);
        self.by_slot[slot.at()] = Some(Seating { seat, tally });
        seat
    }

    /// Moves a writer to a fresh seat; the blocks under its old one are no longer reported.
    pub(super) fn renew(&mut self, seat: Seat) -> Seat {
        let fresh = self.vacant();
        if let Some(slot) = self.slots[seat.at()].take() {
            self.slots[fresh.at()] = Some(slot);
            if let Some(seating) = &mut self.by_slot[slot.at()] {
                seating.seat = fresh;
            }
        }
        fresh
    }

    /// The blocks under this seat are no longer reported.
    pub(super) fn leave(&mut self, seat: Seat) {
        if let Some(slot) = self.slots[seat.at()].take() {
            self.by_slot[slot.at()] = None;
        }
    }

    /// No trie mentions this seat any more.
    pub(super) fn free(&mut self, seat: Seat) {
        self.free.push(seat);
    }

    pub(super) fn slot(&self, seat: Seat) -> Option<Slot> {
        self.slots.get(seat.at()).copied().flatten()
    }

    pub(super) fn stats(&self) -> Vec<SlotStats> {
        let seated = self.by_slot.iter().enumerate().filter_map(|(slot, seating)| Some((slot, seating.as_ref()?)));
        seated.map(|(slot, seating)| SlotStats { slot: Slot(slot as u32), counts: seating.tally.read() }).collect()
    }

    fn vacant(&mut self) -> Seat {
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            Seat(self.slots.len() as u32 - 1)
        })
    }
}

/// A writer's counts, where others can read them.
#[derive(Debug, Default)]
pub(super) struct Tally {
    blocks: [AtomicU64; 4],
    copies: AtomicU64,
}

impl Tally {
    /// Only the writer changes its tally, so a plain load and store do.
    pub(super) fn add_blocks(&self, tier: Tier, by: i64) {
        add(&self.blocks[tier as usize], by);
    }

    pub(super) fn add_copies(&self, by: i64) {
        add(&self.copies, by);
    }

    pub(super) fn reset(&self) {
        for count in self.blocks.iter().chain([&self.copies]) {
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
        }
    }
}

fn add(count: &AtomicU64, by: i64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add_signed(by), Ordering::Relaxed);
}
