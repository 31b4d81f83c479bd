//! A writer's map from the engine's names to places. It is most of what an index takes of memory, and reading it is most of
//! what a writer waits for: so an entry is packed, lies in one line of the cache where chance allows, and what few names
//! have beside a place is kept elsewhere. Entries lie in the order of their mixed names, about where they would if these
//! were spread evenly; hence the map grows by a quarter at a time in one pass over both. Before a batch is looked up, all
//! its entries are touched, so that memory answers for many at once.

use std::hint::black_box;

use crate::block::EngineHash;
use crate::index::owners::Layers;
use crate::index::trie::BlockId;
use crate::index::writer::Place;

/// Full when more than this share of the entries is in use.
const FULL: (usize, usize) = (4, 5);
/// It has so many entries more when it grows, and fewer when it shrinks.
const STEP: (usize, usize) = (5, 4);
/// Entries of the smallest map that has any.
const LEAST: usize = 8;

/// What a name stands for, in one word and a half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(packed)]
struct Entry {
    name: u64,
    block: u32,
    shard: u8,
    /// Empty where there is no entry.
    layers: Layers,
}

const EMPTY: Entry = Entry { name: 0, block: 0, shard: 0, layers: Layers::NONE };

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) place: Place,
    /// Tiers with at least one copy, never none, and the classes of cache groups that hold it.
    pub(super) layers: Layers,
}

impl Entry {
    fn named(self) -> Named {
        Named { place: Place { shard: self.shard, block: BlockId(self.block) }, layers: self.layers }
    }
}

/// Where an entry is.
#[derive(Clone, Copy, Debug)]
pub(super) struct At(u32);

/// All names of one writer.
#[derive(Debug, Default)]
pub(super) struct Names {
    entries: Vec<Entry>,
    len: usize,
}

impl Names {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, name: EngineHash) -> Option<Named> {
        self.find(name).ok().map(|at| self.entries[at].named())
    }

    pub(super) fn has(&self, name: EngineHash) -> bool {
        self.find(name).is_ok()
    }

    /// What a name stands for, and where its entry is until anything is entered or removed.
    pub(super) fn seek(&self, name: EngineHash) -> Option<(At, Named)> {
        self.find(name).ok().map(|at| (At(at as u32), self.entries[at].named()))
    }

    /// Sets what a name holds; where that is nothing, it is removed.
    pub(super) fn hold(&mut self, at: At, layers: Layers) {
        if layers.is_empty() {
            self.close(at.0 as usize);
            self.len -= 1;
        } else {
            self.entries[at.0 as usize].layers = layers;
        }
    }

    /// What a name stands for from now on.
    pub(super) fn set(&mut self, name: EngineHash, named: Named) {
        self.reserve(1);
        let at = match self.find(name) {
            Ok(at) => at,
            Err(at) => {
                self.len += 1;
                at
            }
        };
        self.entries[at] = Entry {
            name: name.0,
            block: named.place.block.0,
            shard: named.place.shard,
            layers: named.layers,
        };
    }

    /// Enters a name that holds something whose place is told later; where the entry is until anything else is entered or
    /// removed. `None` if the name is there already. There must be room.
    pub(super) fn begin(&mut self, name: EngineHash, layers: Layers) -> Option<At> {
        let at = self.find(name).err()?;
        self.entries[at] = Entry { name: name.0, layers, ..EMPTY };
        self.len += 1;
        Some(At(at as u32))
    }

    /// The place of a name that was entered.
    pub(super) fn place(&mut self, at: At, place: Place) {
        let entry = &mut self.entries[at.0 as usize];
        (entry.shard, entry.block) = (place.shard, place.block.0);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (EngineHash, Named)> {
        let held = self.entries.iter().filter(|entry| !entry.layers.is_empty());
        held.map(|entry| (EngineHash(entry.name), entry.named()))
    }

    /// Makes room for so many names more.
    pub(super) fn reserve(&mut self, more: usize) {
        let least = (self.len + more) * FULL.1 / FULL.0 + 1;
        if least > self.entries.len() {
            self.resize(least.max(self.entries.len() * STEP.0 / STEP.1).max(LEAST));
        }
    }

    /// Gives memory back where most names have gone.
    pub(super) fn shrink(&mut self) {
        if self.entries.len() > LEAST && self.len * 3 < self.entries.len() {
            self.resize((self.len * 2).max(LEAST));
        }
    }

    /// Fetches where these names are, or would be.
    pub(super) fn touch(&self, names: impl Iterator<Item = EngineHash>) {
        if self.entries.len() > FEW {
            let layers = names.map(|name| self.entries[self.seat(name.0)].layers);
            black_box(layers.fold(Layers::NONE, Layers::and));
        }
    }

    fn resize(&mut self, entries: usize) {
        let mut old = std::mem::replace(&mut self.entries, vec![EMPTY; entries]);
        for entry in old.drain(..).filter(|entry| !entry.layers.is_empty()) {
            let mut at = self.seat(entry.name);
            while !self.entries[at].layers.is_empty() {
                at = self.after(at);
            }
            self.entries[at] = entry;
        }
    }

    /// Where a name is, or where it has to be entered.
    fn find(&self, name: EngineHash) -> Result<usize, usize> {
        if self.entries.is_empty() {
            return Err(0);
        }
        let mut at = self.seat(name.0);
        loop {
            let entry = self.entries[at];
            if entry.layers.is_empty() {
                return Err(at);
            }
            if entry.name == name.0 {
                return Ok(at);
            }
            at = self.after(at);
        }
    }

    /// Empties an entry: those behind it that would lie nearer to their seats there move up.
    fn close(&mut self, at: usize) {
        let (mut hole, mut at) = (at, at);
        loop {
            at = self.after(at);
            let entry = self.entries[at];
            if entry.layers.is_empty() {
                break;
            }
            let seat = self.seat(entry.name);
            let stays = if hole <= at { hole < seat && seat <= at } else { hole < seat || seat <= at };
            if !stays {
                self.entries[hole] = entry;
                hole = at;
            }
        }
        self.entries[hole] = EMPTY;
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.entries.len() { 0 } else { at + 1 }
    }

    /// Where a name lies if nothing is in its way.
    fn seat(&self, name: u64) -> usize {
        ((u128::from(spread(name)) * self.entries.len() as u128) >> 64) as usize
    }
}

/// Maps that lie in the cache anyway have no more entries.
const FEW: usize = 1024;

/// Spreads a name over all bits: some engines number their blocks.
fn spread(name: u64) -> u64 {
    let wide = u128::from(name ^ 0x2545_f491_4f6c_dd1d) * 0x9e37_79b9_7f4a_7c15;
    (wide >> 64) as u64 ^ wide as u64
}

#[cfg(test)]
mod tests;
