//! The entries of a map of names, in the order in which they came. Those that have left leave places that are taken again,
//! the last one first, which is the order of the engines: they free the end of a prefix before its beginning.

use super::Named;
use crate::block::EngineHash;
use crate::index::owners::Layers;
use crate::index::trie::BlockId;
use crate::index::writer::Place;

/// Entries in one piece of memory.
const PIECE: usize = if cfg!(test) { 16 } else { 1 << 10 };
/// The end of the list of free entries.
const NONE: u64 = u64::MAX;

/// A name and what it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, packed)]
pub(super) struct Entry {
    pub(super) name: u64,
    pub(super) block: u32,
    pub(super) shard: u8,
    /// Empty where there is no entry; then the name is the number of the next such.
    pub(super) layers: Layers,
}

impl Entry {
    /// A name that stands for nothing yet.
    pub(super) fn new(name: EngineHash) -> Self {
        Self {
            name: name.0,
            block: 0,
            shard: 0,
            layers: Layers::NONE,
        }
    }

    pub(super) fn named(self) -> Named {
        Named {
            place: Place {
                shard: self.shard,
                block: BlockId(self.block),
            },
            layers: self.layers,
        }
    }
}

/// All entries.
#[derive(Debug)]
pub(super) struct Log {
    pieces: Vec<Vec<Entry>>,
    free: u64,
    len: usize,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            pieces: Vec::new(),
            free: NONE,
            len: 0,
        }
    }
}

impl Log {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether most of the memory is free.
    pub(super) fn is_sparse(&self) -> bool {
        self.pieces.len() > 1 && self.len < self.pieces.len() * PIECE / 4
    }

    pub(super) fn get(&self, number: u32) -> &Entry {
        &self.pieces[number as usize / PIECE][number as usize % PIECE]
    }

    pub(super) fn get_mut(&mut self, number: u32) -> &mut Entry {
        &mut self.pieces[number as usize / PIECE][number as usize % PIECE]
    }

    /// Enters something; its number.
    pub(super) fn add(&mut self, entry: Entry) -> u32 {
        self.len += 1;
        if self.free != NONE {
            let number = self.free as u32;
            self.free = self.get(number).name;
            *self.get_mut(number) = entry;
            return number;
        }
        if self.pieces.last().is_none_or(|piece| piece.len() == PIECE) {
            // Only the first piece grows by copying.
            let room = if self.pieces.is_empty() { 4 } else { PIECE };
            self.pieces.push(Vec::with_capacity(room));
        }
        let before = (self.pieces.len() - 1) * PIECE;
        let Some(last) = self.pieces.last_mut() else {
            return 0;
        };
        last.push(entry);
        (before + last.len() - 1) as u32
    }

    pub(super) fn remove(&mut self, number: u32) {
        self.len -= 1;
        let next = std::mem::replace(&mut self.free, u64::from(number));
        *self.get_mut(number) = Entry::new(EngineHash(next));
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Entry)> {
        let all = self.pieces.iter().flatten();
        (0..)
            .zip(all)
            .filter(|(_, entry)| !{ entry.layers }.is_empty())
    }
}
