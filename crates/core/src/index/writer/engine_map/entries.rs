//! Entries of an engine map, in the order of insertion. Free entries are reused last in, first out.
//! Engines free the end of a prefix before its beginning, so the entries keep their order.

use crate::block::EngineHash;
use crate::index::ids::{BlockId, BlockLocation};
use crate::index::layers::LayerSet;
use crate::index::sizes::ENTRIES_PER_PAGE;

/// End of the free list.
const FREE_LIST_END: u64 = u64::MAX;

/// Location of an engine hash and the layers it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index::writer) struct MappedBlock {
    pub(in crate::index::writer) location: BlockLocation,
    /// Tiers with at least one copy, never empty, and the rules of the cache groups that hold the
    /// block.
    pub(in crate::index::writer) layers: LayerSet,
}

/// Engine hash, its location and its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, packed)]
pub(super) struct HashEntry {
    pub(super) engine: u64,
    pub(super) block: u32,
    pub(super) shard: u8,
    /// Empty for a free entry. `engine` is then the number of the next free entry.
    pub(super) layers: LayerSet,
}

impl HashEntry {
    /// Creates an entry without a location.
    fn new(hash: EngineHash, layers: LayerSet) -> Self {
        Self {
            engine: hash.0,
            block: 0,
            shard: 0,
            layers,
        }
    }

    pub(super) fn is_free(self) -> bool {
        { self.layers }.is_empty()
    }

    pub(super) fn mapped_block(self) -> MappedBlock {
        MappedBlock {
            location: BlockLocation {
                shard: self.shard,
                block: BlockId(self.block),
            },
            layers: self.layers,
        }
    }
}

/// All entries.
#[derive(Debug)]
pub(super) struct EntryList {
    pages: Vec<Vec<HashEntry>>,
    free: u64,
    len: usize,
}

impl Default for EntryList {
    fn default() -> Self {
        Self {
            pages: Vec::new(),
            free: FREE_LIST_END,
            len: 0,
        }
    }
}

impl EntryList {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns whether most of the memory is free.
    pub(super) fn is_sparse(&self) -> bool {
        self.pages.len() > 1 && self.len < self.pages.len() * ENTRIES_PER_PAGE / 4
    }

    pub(super) fn get(&self, number: u32) -> &HashEntry {
        &self.pages[number as usize / ENTRIES_PER_PAGE][number as usize % ENTRIES_PER_PAGE]
    }

    pub(super) fn get_mut(&mut self, number: u32) -> &mut HashEntry {
        &mut self.pages[number as usize / ENTRIES_PER_PAGE][number as usize % ENTRIES_PER_PAGE]
    }

    /// Adds an entry without a location. Returns its number. Inlined, because an entry that is
    /// passed between functions is written in parts and read as a whole, which stalls the load.
    #[inline(always)]
    pub(super) fn insert(&mut self, hash: EngineHash, layers: LayerSet) -> u32 {
        let entry = HashEntry::new(hash, layers);
        self.len += 1;
        if self.free != FREE_LIST_END {
            let number = self.free as u32;
            self.free = self.get(number).engine;
            *self.get_mut(number) = entry;
            return number;
        }
        if self
            .pages
            .last()
            .is_none_or(|page| page.len() == ENTRIES_PER_PAGE)
        {
            // Only the first page grows by copying.
            let capacity = if self.pages.is_empty() {
                4
            } else {
                ENTRIES_PER_PAGE
            };
            self.pages.push(Vec::with_capacity(capacity));
        }
        let before = (self.pages.len() - 1) * ENTRIES_PER_PAGE;
        let Some(last) = self.pages.last_mut() else {
            return 0;
        };
        last.push(entry);
        (before + last.len() - 1) as u32
    }

    pub(super) fn remove(&mut self, number: u32) {
        self.len -= 1;
        let next = std::mem::replace(&mut self.free, u64::from(number));
        *self.get_mut(number) = HashEntry::new(EngineHash(next), LayerSet::NONE);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &HashEntry> {
        self.pages.iter().flatten().filter(|entry| !entry.is_free())
    }

    /// Iterates over all entries, including the free ones: the number of the first entry of each
    /// batch, and at most `len` entries.
    pub(super) fn batches(&self, len: usize) -> impl Iterator<Item = (u32, &[HashEntry])> {
        let page_starts = (0..).step_by(ENTRIES_PER_PAGE);
        page_starts
            .zip(&self.pages)
            .flat_map(move |(start, page)| (start..).step_by(len).zip(page.chunks(len)))
    }
}
