//! A writer's map from the engine's names to places. It is most of what an index takes of memory, and reading it is most of
//! what a writer waits for. Names lie in the order in which they came, next to those they were stored with, because
//! engines tell of them again in such rows. Where they lie is told by a table of small slots that stays in the cache:
//! beside the number of an entry a slot has how far it lies behind its seat and five bits more of the name, so that an
//! entry is read only if it is the right one. Growing builds the table anew and moves no entry. What few names have beside
//! a place is kept elsewhere.

mod log;

use std::hint::black_box;

use log::{Entry, Log};

use crate::block::EngineHash;
use crate::index::owners::Layers;
use crate::index::writer::Place;

/// Names of one shelf at most: what the number in a slot can tell, and what is built anew at once.
const SHELF: usize = if cfg!(test) { 64 } else { 1 << 20 };
/// Bits of a slot that are the number of an entry.
const NUMBER: u32 = 22;
/// No entry.
const EMPTY: u32 = 0;
/// How far behind their seats slots may lie so that they tell it.
const FAR: u32 = 31;
/// Slots that are looked at together.
const WINDOW: usize = 8;
/// A table is full when more than this share of the slots is in use.
const FULL: (usize, usize) = (4, 5);
/// Maps of so few names lie in the cache anyway.
const FEW: usize = 1024;
/// Names that are looked up at once.
pub(super) const BATCH: usize = 64;

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) place: Place,
    /// Tiers with at least one copy, never none, and the classes of cache groups that hold it.
    pub(super) layers: Layers,
}

/// Where an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    shelf: u32,
    number: u32,
}

/// All names of one writer.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// As many as there are different beginnings of so many bits of the mixed names.
    shelves: Vec<Shelf>,
    bits: u32,
    len: usize,
}

/// Names whose first bits are the same.
#[derive(Debug, Default)]
struct Shelf {
    slots: Vec<u32>,
    log: Log,
}

impl Names {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, name: EngineHash) -> Option<Named> {
        Some(self.seek(name)?.1)
    }

    pub(super) fn has(&self, name: EngineHash) -> bool {
        self.seek(name).is_some()
    }

    /// What a name stands for, and where its entry is until room is made for more, or less.
    pub(super) fn seek(&self, name: EngineHash) -> Option<(At, Named)> {
        let mixed = mix(name.0);
        let shelf = self.shelf_of(mixed);
        let number = self.shelves.get(shelf)?.find(name, mixed).ok()?;
        Some((At { shelf: shelf as u32, number }, self.shelves[shelf].log.get(number).named()))
    }

    /// Sets what a name holds; where that is nothing, it is removed.
    pub(super) fn hold(&mut self, at: At, layers: Layers) {
        let shelf = &mut self.shelves[at.shelf as usize];
        if layers.is_empty() {
            shelf.remove(at.number);
            self.len -= 1;
        } else {
            shelf.log.get_mut(at.number).layers = layers;
        }
    }

    /// What a name stands for from now on.
    pub(super) fn set(&mut self, name: EngineHash, named: Named) {
        self.reserve(1);
        if let Some(at) = self.begin(name, mix(name.0), named.layers) {
            self.place(at, named.place);
        } else if let Some((at, _)) = self.seek(name) {
            self.place(at, named.place);
            self.hold(at, named.layers);
        }
    }

    /// Enters names that hold something whose places are told later, up to the first that is there already; their entries
    /// are appended. Room must have been made for them.
    pub(super) fn begin_all(
        &mut self,
        names: impl ExactSizeIterator<Item = EngineHash>,
        layers: Layers,
        into: &mut Vec<At>,
    ) {
        let mut batch = [(EngineHash(0), 0); BATCH];
        let count = names.len().min(BATCH);
        batch.iter_mut().zip(names).for_each(|(entry, name)| *entry = (name, mix(name.0)));
        let batch = &batch[..count];
        self.touch_mixed(batch.iter().map(|(_, mixed)| *mixed));
        for &(name, mixed) in batch {
            let Some(at) = self.begin(name, mixed, layers) else { return };
            into.push(at);
        }
    }

    /// The place of a name that was entered there.
    pub(super) fn place(&mut self, at: At, place: Place) {
        let entry = self.shelves[at.shelf as usize].log.get_mut(at.number);
        (entry.shard, entry.block) = (place.shard, place.block.0);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (EngineHash, Named)> {
        let entries = self.shelves.iter().flat_map(|shelf| shelf.log.iter());
        entries.map(|(_, entry)| (EngineHash(entry.name), entry.named()))
    }

    /// Makes room for so many names more.
    pub(super) fn reserve(&mut self, more: usize) {
        let wanted = (self.len + more).div_ceil(SHELF).next_power_of_two();
        if wanted > self.shelves.len() {
            self.divide(wanted);
        }
        self.shelves.iter_mut().for_each(|shelf| shelf.reserve(more));
    }

    /// Gives memory back where most names have gone.
    pub(super) fn shrink(&mut self) {
        if self.shelves.iter().any(|shelf| shelf.log.is_sparse()) {
            self.divide(self.len.div_ceil(SHELF / 2).next_power_of_two());
        }
    }

    /// Fetches where these names are, or would be.
    pub(super) fn touch(&self, names: impl Iterator<Item = EngineHash>) {
        self.touch_mixed(names.map(|name| mix(name.0)));
    }

    fn touch_mixed(&self, mixed: impl Iterator<Item = u64>) {
        if self.len > FEW {
            let slots = mixed.map(|mixed| {
                let slots = &self.shelves[self.shelf_of(mixed)].slots;
                slots[seat(mixed, slots.len())]
            });
            black_box(slots.fold(0, u32::wrapping_add));
        }
    }

    /// Enters one name; `None` if it is there already.
    fn begin(&mut self, name: EngineHash, mixed: u64, layers: Layers) -> Option<At> {
        let shelf = self.shelf_of(mixed);
        let number = self.shelves.get_mut(shelf)?.enter(Entry { layers, ..Entry::new(name) }, mixed)?;
        self.len += 1;
        Some(At { shelf: shelf as u32, number })
    }

    /// Enters all names anew in so many shelves.
    fn divide(&mut self, shelves: usize) {
        let all = std::mem::take(&mut self.shelves);
        self.bits = shelves.ilog2();
        self.shelves.resize_with(shelves, Shelf::default);
        for (_, entry) in all.iter().flat_map(|shelf| shelf.log.iter()) {
            let mixed = mix(entry.name);
            let shelf = self.shelf_of(mixed);
            self.shelves[shelf].reserve(1);
            self.shelves[shelf].enter(*entry, mixed);
        }
    }

    fn shelf_of(&self, mixed: u64) -> usize {
        // The last bits: the first tell the seat.
        mixed as usize & ((1 << self.bits) - 1)
    }
}

impl Shelf {
    /// The entry of a name, or the slot to enter it in, and how far that is behind its seat.
    fn find(&self, name: EngineHash, mixed: u64) -> Result<u32, (usize, u32)> {
        if self.slots.is_empty() {
            return Err((0, 0));
        }
        let (mut at, mut behind) = (seat(mixed, self.slots.len()), 0);
        // Several at once without a branch for each, where it is usual to end: what a name meets cannot be foreseen.
        while behind + WINDOW as u32 <= FAR
            && let Some(window) = window(&self.slots, at)
        {
            let mark = mark(mixed, behind);
            let empty = ones_of(window, |_, slot| slot == EMPTY);
            let mut alike = ones_of(window, |i, slot| slot >> NUMBER == mark + i) & (empty.wrapping_sub(1) & !empty);
            while alike != 0 {
                let number = number(window[alike.trailing_zeros() as usize]);
                if self.log.get(number).name == name.0 {
                    return Ok(number);
                }
                alike &= alike - 1;
            }
            if empty != 0 {
                let ahead = empty.trailing_zeros();
                return Err((at + ahead as usize, behind + ahead));
            }
            (at, behind) = (self.wrap(at + WINDOW), behind + WINDOW as u32);
        }
        loop {
            let slot = self.slots[at];
            if slot == EMPTY {
                return Err((at, behind));
            }
            if slot >> NUMBER == mark(mixed, behind) && self.log.get(number(slot)).name == name.0 {
                return Ok(number(slot));
            }
            (at, behind) = (self.after(at), behind + 1);
        }
    }

    /// Enters a name; `None` if it is there already.
    fn enter(&mut self, entry: Entry, mixed: u64) -> Option<u32> {
        let (at, behind) = self.find(EngineHash(entry.name), mixed).err()?;
        let number = self.log.add(entry);
        self.slots[at] = slot(number, mark(mixed, behind));
        Some(number)
    }

    /// Empties the slot of an entry: those behind it that would lie nearer to their seats there move up.
    fn remove(&mut self, gone: u32) {
        let mixed = mix(self.log.get(gone).name);
        let mut hole = seat(mixed, self.slots.len());
        while number(self.slots[hole]) != gone || self.slots[hole] == EMPTY {
            hole = self.after(hole);
        }
        let (mut at, mut distance) = (hole, 0);
        loop {
            (at, distance) = (self.after(at), distance + 1);
            let moved = self.slots[at];
            if moved == EMPTY {
                break;
            }
            let behind = self.behind(at, moved);
            if behind >= distance {
                let mark = (moved >> NUMBER) & !FAR | (behind - distance).min(FAR);
                self.slots[hole] = slot(number(moved), mark);
                (hole, distance) = (at, 0);
            }
        }
        self.slots[hole] = EMPTY;
        self.log.remove(gone);
    }

    /// How far behind its seat a slot lies.
    fn behind(&self, at: usize, slot: u32) -> u32 {
        let told = (slot >> NUMBER) & FAR;
        if told < FAR {
            return told;
        }
        let seat = seat(mix(self.log.get(number(slot)).name), self.slots.len());
        (if at >= seat { at - seat } else { at + self.slots.len() - seat }) as u32
    }

    fn reserve(&mut self, more: usize) {
        let least = (self.log.len() + more) * FULL.1 / FULL.0 + 1;
        if least <= self.slots.len() {
            return;
        }
        let slots = least.max(self.log.len() * FULL.1 / FULL.0 * 3 / 2);
        self.slots = Vec::new();
        self.slots.reserve_exact(slots);
        // Written now: memory that is read first costs two faults instead of one.
        self.slots.resize(slots, EMPTY);
        for (number, entry) in self.log.iter() {
            let mixed = mix(entry.name);
            let (at, behind) = vacant(&self.slots, seat(mixed, slots));
            self.slots[at] = slot(number, mark(mixed, behind));
        }
    }

    fn wrap(&self, at: usize) -> usize {
        if at == self.slots.len() { 0 } else { at }
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }
}

/// Where a name would lie if nothing were in its way.
fn seat(mixed: u64, slots: usize) -> usize {
    ((mixed >> 32) * slots as u64 >> 32) as usize
}

/// The slots from one on, if the table does not end before.
fn window(slots: &[u32], at: usize) -> Option<&[u32; WINDOW]> {
    slots.get(at..at + WINDOW)?.try_into().ok()
}

/// The first slot from a seat on that is empty, and how far behind it is.
fn vacant(slots: &[u32], seat: usize) -> (usize, u32) {
    let (mut at, mut behind) = (seat, 0);
    while let Some(window) = window(slots, at) {
        let empty = ones_of(window, |_, slot| slot == EMPTY);
        if empty != 0 {
            let ahead = empty.trailing_zeros();
            return (at + ahead as usize, behind + ahead);
        }
        (at, behind) = (at + WINDOW, behind + WINDOW as u32);
    }
    while at >= slots.len() || slots[at] != EMPTY {
        (at, behind) = if at >= slots.len() { (0, behind) } else { (at + 1, behind + 1) };
    }
    (at, behind)
}

/// The slots of which something is true, a bit each.
fn ones_of(window: &[u32; WINDOW], is_one: impl Fn(u32, u32) -> bool) -> u32 {
    (0..).zip(window).fold(0, |ones, (i, &slot)| ones | u32::from(is_one(i, slot)) << i)
}

/// What a slot has beside its number.
fn mark(mixed: u64, behind: u32) -> u32 {
    (mixed as u32 >> 22 & FAR) << 5 | behind.min(FAR)
}

fn slot(number: u32, mark: u32) -> u32 {
    mark << NUMBER | (number + 1)
}

fn number(slot: u32) -> u32 {
    (slot & ((1 << NUMBER) - 1)).wrapping_sub(1)
}

/// Spreads a name over all bits: some engines number their blocks.
fn mix(name: u64) -> u64 {
    let wide = u128::from(name ^ 0x2545_f491_4f6c_dd1d) * 0x9e37_79b9_7f4a_7c15;
    (wide >> 64) as u64 ^ wide as u64
}

#[cfg(test)]
mod tests;
