//! A writer's map from the engine's names to places. It is most of what an index takes of memory, and reading it is most of
//! what a writer waits for. Names lie in the order in which they came, next to those they were stored with, because
//! engines tell of them again in such rows. Where they lie is told by a table of small slots, seven to half a line of the
//! cache: a name is in the first seven it belongs to that had room, and while one is looked up those of the next are on
//! their way from memory. Beside the number of an entry a slot has eleven bits more of the name, so that an entry is hardly
//! ever read in vain; eight of these are bytes of one word and are compared at once. Growing builds the table anew and
//! moves no entry. What few names have beside a place is kept elsewhere.

mod log;

use log::{Entry, Log};
use prefetch_index::prefetch_index;

use crate::block::EngineHash;
use crate::index::AHEAD;
use crate::index::owners::Layers;
use crate::index::writer::Place;

/// Names of one shelf at most: what the number in a slot can tell, and what is built anew at once.
const SHELF: usize = if cfg!(test) { 200 } else { 1 << 19 };
/// Slots that are looked at together.
const WIDTH: usize = 7;
/// A table is full when more than this share of the slots is in use. Where names come and go, those that found no room where
/// they belong stay elsewhere, and who looks for a new name has to follow them: at seven eighths by tens of lines.
const FULL: (usize, usize) = (3, 4);
/// The lowest bit of each byte that tells of a slot, and the highest.
const LOWEST: u64 = 0x0001_0101_0101_0101;
const HIGHEST: u64 = LOWEST << 7;
/// One who passed by.
const PASSED: u64 = 1 << 56;
/// Bits of a number, of which no shelf has as many; in the others of its three bytes is more of the name.
const NUMBER: u32 = 21;

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
    /// As many as there are different endings of so many bits of the mixed names.
    shelves: Vec<Shelf>,
    bits: u32,
    len: usize,
}

/// A line of the cache: who finds no room in one half takes the other, and waits for nothing more.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Line([Slots; 2]);

/// Slots that names have in common.
#[derive(Clone, Copy, Debug, Default)]
struct Slots {
    /// A byte of the name for each slot, zero where there is none; in the highest byte how many names are behind these slots
    /// that belong to them or to others before, as far as a byte can tell: what it cannot stays until the table grows.
    bytes: u64,
    numbers: [[u8; 3]; WIDTH],
}

/// Names whose last bits are the same, once they are mixed.
#[derive(Debug, Default)]
struct Shelf {
    table: Vec<Line>,
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
        Some((
            At {
                shelf: shelf as u32,
                number,
            },
            self.shelves[shelf].log.get(number).named(),
        ))
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
        names: impl Iterator<Item = EngineHash> + Clone,
        layers: Layers,
        into: &mut Vec<At>,
    ) {
        let mut later = names.clone();
        later.by_ref().take(AHEAD).for_each(|name| self.fetch(name));
        into.extend(names.map_while(|name| {
            later.next().into_iter().for_each(|name| self.fetch(name));
            self.begin(name, mix(name.0), layers)
        }));
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
        self.shelves
            .iter_mut()
            .for_each(|shelf| shelf.reserve(more));
    }

    /// Gives memory back where most names have gone.
    pub(super) fn shrink(&mut self) {
        if self.shelves.iter().any(|shelf| shelf.log.is_sparse()) {
            self.divide(self.len.div_ceil(SHELF / 2).next_power_of_two());
        }
    }

    /// Asks memory for where a name is, or would be.
    pub(super) fn fetch(&self, name: EngineHash) {
        self.fetch_mixed(mix(name.0));
    }

    fn fetch_mixed(&self, mixed: u64) {
        if let Some(shelf) = self.shelves.get(self.shelf_of(mixed)) {
            prefetch_index(&shelf.table, seat(mixed, shelf.table.len()) / 2);
        }
    }

    /// Enters one name; `None` if it is there already.
    fn begin(&mut self, name: EngineHash, mixed: u64, layers: Layers) -> Option<At> {
        let shelf = self.shelf_of(mixed);
        let number = self.shelves.get_mut(shelf)?.enter(
            Entry {
                layers,
                ..Entry::new(name)
            },
            mixed,
        )?;
        self.len += 1;
        Some(At {
            shelf: shelf as u32,
            number,
        })
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
    /// The entry of a name, or the first place where a slot was free for it.
    fn find(&self, name: EngineHash, mixed: u64) -> Result<u32, Option<(usize, usize)>> {
        let mut free = None;
        // Others may have passed by everywhere, once around: in small tables by chance, in others once enough were counted.
        for at in way(mixed, self.table.len()) {
            let slots = self.slots(at);
            let mut alike = slots.with(byte(mixed));
            while alike != 0 {
                let slot = slot_of(alike);
                if slots.may_be(slot, mixed) {
                    let number = slots.number(slot);
                    if self.log.get(number).name == name.0 {
                        return Ok(number);
                    }
                }
                alike &= alike - 1;
            }
            if free.is_none() && slots.with(0) != 0 {
                free = Some((at, slot_of(slots.with(0))));
            }
            if slots.bytes < PASSED {
                break;
            }
        }
        Err(free)
    }

    /// Enters a name; `None` if it is there already.
    fn enter(&mut self, entry: Entry, mixed: u64) -> Option<u32> {
        let free = self.find(EngineHash(entry.name), mixed).err()?;
        let number = self.log.add(entry);
        self.add(number, mixed, free);
        Some(number)
    }

    /// Takes the first slot that is free, which may be known already. There is one, because no table is ever full.
    fn add(&mut self, number: u32, mixed: u64, free: Option<(usize, usize)>) {
        for at in way(mixed, self.table.len()) {
            let here = match free {
                Some((free, slot)) => (free == at).then_some(slot),
                None => Some(self.slots(at).with(0))
                    .filter(|free| *free != 0)
                    .map(slot_of),
            };
            let slots = self.slots_mut(at);
            if let Some(slot) = here {
                return slots.enter(slot, number, mixed);
            }
            slots.pass();
        }
    }

    fn remove(&mut self, gone: u32) {
        let mixed = mix(self.log.get(gone).name);
        self.log.remove(gone);
        for at in way(mixed, self.table.len()) {
            let slots = self.slots_mut(at);
            let mut alike = slots.with(byte(mixed));
            while alike != 0 {
                let slot = slot_of(alike);
                if slots.may_be(slot, mixed) && slots.number(slot) == gone {
                    slots.bytes &= !(0xff << (8 * slot));
                    return;
                }
                alike &= alike - 1;
            }
            slots.unpass();
        }
    }

    fn reserve(&mut self, more: usize) {
        let least = (self.log.len() + more) * FULL.1 / (FULL.0 * 2 * WIDTH) + 1;
        if least <= self.table.len() {
            return;
        }
        let length = least.max(self.table.len() * 2);
        self.table = Vec::new();
        self.table.reserve_exact(length);
        // Written now: memory that is read first costs two faults instead of one.
        self.table.resize(length, Line::default());
        let log = std::mem::take(&mut self.log);
        let mut entries = log.iter().map(|(number, entry)| (number, mix(entry.name)));
        let mut batch = [(0, 0); AHEAD];
        loop {
            let count = batch
                .iter_mut()
                .zip(entries.by_ref())
                .map(|(to, from)| *to = from)
                .count();
            batch[..count]
                .iter()
                .for_each(|(_, mixed)| prefetch_index(&self.table, seat(*mixed, length) / 2));
            batch[..count]
                .iter()
                .for_each(|(number, mixed)| self.add(*number, *mixed, None));
            if count < AHEAD {
                break;
            }
        }
        drop(entries);
        self.log = log;
    }

    fn slots(&self, at: usize) -> &Slots {
        &self.table[at / 2].0[at % 2]
    }

    fn slots_mut(&mut self, at: usize) -> &mut Slots {
        &mut self.table[at / 2].0[at % 2]
    }
}

impl Slots {
    /// The slots that have a byte, by their highest bits; behind the first one there may be others by mistake.
    fn with(&self, byte: u64) -> u64 {
        let zero = self.bytes ^ (LOWEST * byte);
        zero.wrapping_sub(LOWEST) & !zero & HIGHEST
    }

    /// Whether a slot is that of a name, as far as it tells.
    fn may_be(&self, slot: usize, mixed: u64) -> bool {
        self.bytes >> (8 * slot) & 0xff == byte(mixed) && self.raw(slot) >> NUMBER == more(mixed)
    }

    fn number(&self, slot: usize) -> u32 {
        self.raw(slot) & ((1 << NUMBER) - 1)
    }

    fn raw(&self, slot: usize) -> u32 {
        let [a, b, c] = self.numbers[slot];
        u32::from_le_bytes([a, b, c, 0])
    }

    fn enter(&mut self, slot: usize, number: u32, mixed: u64) {
        debug_assert!(number < 1 << NUMBER, "a shelf with too many names");
        self.bytes |= byte(mixed) << (8 * slot);
        let [a, b, c, _] = (number | more(mixed) << NUMBER).to_le_bytes();
        self.numbers[slot] = [a, b, c];
    }

    fn pass(&mut self) {
        if self.bytes >> 56 < 0xff {
            self.bytes += PASSED;
        }
    }

    fn unpass(&mut self) {
        if self.bytes >> 56 < 0xff {
            self.bytes -= PASSED;
        }
    }
}

fn slot_of(bits: u64) -> usize {
    bits.trailing_zeros() as usize / 8
}

/// Which half of which line a name is in if there is room.
fn seat(mixed: u64, lines: usize) -> usize {
    (((mixed >> 32) * 2 * lines as u64) >> 32) as usize
}

/// Where it is otherwise, in this order: in the other half of the line, then anywhere else, and in what follows that. Who
/// went to the next line at once would crowd where it is crowded.
fn way(mixed: u64, lines: usize) -> impl Iterator<Item = usize> {
    let first = seat(mixed, lines);
    let elsewhere = move |at: usize| {
        let second = seat(
            u64::from(mixed as u32).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            lines,
        );
        let line = second / 2 + at / 2;
        2 * if line < lines { line } else { line - lines } + (second ^ at) % 2
    };
    // A shelf that nothing was entered in has no table.
    [first, first ^ 1]
        .into_iter()
        .take(2 * lines)
        .chain((0..2 * lines).map(elsewhere))
}

/// What a slot tells of a name.
fn byte(mixed: u64) -> u64 {
    (mixed >> 24 & 0xff).max(1)
}

/// What the number in a slot tells of it beside.
fn more(mixed: u64) -> u32 {
    (mixed >> 21) as u32 & 7
}

/// Spreads a name over all bits: some engines number their blocks.
fn mix(name: u64) -> u64 {
    let wide = u128::from(name ^ 0x2545_f491_4f6c_dd1d) * 0x9e37_79b9_7f4a_7c15;
    (wide >> 64) as u64 ^ wide as u64
}

#[cfg(test)]
mod tests;
