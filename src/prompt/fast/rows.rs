//! Places that wait by rank. The lowest rank is found by bits, so that nothing is sorted but what waits in one row, and that
//! mostly is sorted already.

use super::merges::NEVER;

/// The end of a row.
const NONE: u32 = u32::MAX;

/// Entries and symbols of which room is kept for the next word.
pub(super) const KEPT: usize = 1 << 14;

/// The rows of all ranks.
#[derive(Default)]
pub(super) struct Rows {
    /// The newest entry of each row.
    heads: Vec<u32>,
    /// A bit for each row that has entries, and one for each word of these.
    filled: Vec<u64>,
    words: Vec<u64>,
    entries: Vec<Entry>,
    free: u32,
    /// No row before this word of bits has entries.
    lowest: usize,
}

#[derive(Clone, Copy)]
struct Entry {
    place: u32,
    next: u32,
}

impl Rows {
    /// Empty rows for so many ranks.
    pub(super) fn begin(&mut self, ranks: usize) {
        self.heads.resize(ranks, NONE);
        self.filled.resize(ranks.div_ceil(64), 0);
        self.words.resize(self.filled.len().div_ceil(64), 0);
        self.entries.clear();
        (self.free, self.lowest) = (NONE, 0);
    }

    /// A place waits at the end of a row.
    pub(super) fn push(&mut self, rank: u32, place: u32) {
        if rank == NEVER {
            return;
        }
        let row = rank as usize;
        let entry = Entry { place, next: self.heads[row] };
        let at = match self.entries.get_mut(self.free as usize) {
            Some(free) => {
                let at = self.free;
                self.free = free.next;
                *free = entry;
                at
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        self.heads[row] = at;
        self.filled[row / 64] |= 1 << (row % 64);
        self.words[row / 64 / 64] |= 1 << (row / 64 % 64);
        self.lowest = self.lowest.min(row / 64 / 64);
    }

    /// Takes the row of the lowest rank, from left to right.
    pub(super) fn take_lowest(&mut self, places: &mut Vec<u32>) -> Option<u32> {
        let skipped = self.words[self.lowest..].iter().position(|word| *word != 0)?;
        self.lowest += skipped;
        let word = self.lowest * 64 + self.words[self.lowest].trailing_zeros() as usize;
        let row = word * 64 + self.filled[word].trailing_zeros() as usize;
        self.filled[word] &= self.filled[word] - 1;
        if self.filled[word] == 0 {
            self.words[self.lowest] &= self.words[self.lowest] - 1;
        }
        places.clear();
        let mut at = std::mem::replace(&mut self.heads[row], NONE);
        while let Some(entry) = self.entries.get_mut(at as usize) {
            places.push(entry.place);
            (at, self.free, entry.next) = (entry.next, at, self.free);
        }
        places.reverse();
        if !places.is_sorted() {
            places.sort_unstable();
        }
        Some(row as u32)
    }

    /// Frees what a long word took.
    pub(super) fn give_back(&mut self) {
        self.entries.clear();
        self.entries.shrink_to(KEPT);
    }
}
