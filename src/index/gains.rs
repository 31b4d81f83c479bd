//! What a rank got on its device once more after it had left. Most of what an engine stores is new, every block that decoding
//! fills is; so the log has only what left lately, and reaches back for minutes where the engine is busy.

use std::collections::VecDeque;

use prefetch_index::prefetch_index;

use super::AHEAD;
use super::children::mix;
use super::writer::Place;
use crate::block::EngineHash;

/// Stores that are remembered per rank.
const MOST_GAINS: usize = 4096;

/// Of each store, the first block that had left lately, with the number of the store.
#[derive(Debug, Default)]
pub(super) struct Gains {
    log: VecDeque<(u64, Place)>,
    /// Nothing is known of the time up to this store.
    unknown: u64,
    /// All that was held up to this store left then.
    cleared: Option<u64>,
}

impl Gains {
    pub(super) fn note(&mut self, number: u64, place: Place) {
        if self.log.len() == MOST_GAINS
            && let Some((number, _)) = self.log.pop_front()
        {
            self.forget(number);
        }
        self.log.push_back((number, place));
    }

    /// What happened up to a store is not remembered any more.
    pub(super) fn forget(&mut self, number: u64) {
        self.unknown = self.unknown.max(number);
    }

    /// Everything left after this store.
    pub(super) fn clear(&mut self, number: u64) {
        *self = Self {
            cleared: Some(number),
            ..Self::default()
        };
    }

    /// Whether one of these left and came again after a store; `None` where that is not remembered.
    pub(super) fn since(&self, number: u64, is_one: impl Fn(Place) -> bool) -> Option<bool> {
        let found = self.cleared.is_some_and(|cleared| number <= cleared)
            || self
                .log
                .iter()
                .rev()
                .take_while(|(at, _)| *at > number)
                .any(|(_, place)| is_one(*place));
        (found || self.unknown <= number).then_some(found)
    }
}

/// Names that one half of the memory holds.
const HALF: usize = if cfg!(test) { 1 << 10 } else { 1 << 16 };
/// Its bits: eight for each name, three of them set, so that five of a hundred others are taken for one of them.
const BITS: usize = HALF * 8;
const SET: u32 = 3;
/// Words of one half in a line of the cache, which has as many of the other: one wait for memory tells both.
const WORDS: usize = 4;

/// Which names left lately: those for certain, and a few more.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// Those that left last, and those before them; nothing before any did.
    lines: Vec<Line>,
    /// Which half of each line is of those that left last.
    turn: usize,
    /// In that half.
    count: usize,
    /// The store after which it began.
    began: u64,
    /// Whether there is anything in the other.
    older: bool,
}

/// The bits of some names, in both halves.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Line([[u64; WORDS]; 2]);

impl Left {
    /// A name left after a store. Where another is forgotten for its sake, the store up to which nothing is known now.
    pub(super) fn note(&mut self, name: EngineHash, number: u64) -> Option<u64> {
        let mut forgotten = None;
        if self.count == HALF {
            // One more: a request of the same number may have come before those that are forgotten.
            forgotten = self.older.then_some(self.began + 1);
            (self.turn, self.older) = (1 - self.turn, true);
            self.lines
                .iter_mut()
                .for_each(|line| line.0[self.turn] = [0; WORDS]);
            (self.count, self.began) = (0, number);
        }
        if self.lines.is_empty() {
            self.lines.resize(BITS / (64 * WORDS), Line::default());
        }
        let (line, set) = place(name);
        let half = &mut self.lines[line].0[self.turn];
        half.iter_mut()
            .zip(set)
            .for_each(|(word, set)| *word |= set);
        self.count += 1;
        forgotten
    }

    pub(super) fn has(&self, name: EngineHash) -> bool {
        let (line, set) = place(name);
        let in_half = |half: &[u64; WORDS]| {
            half.iter()
                .zip(set)
                .fold(0, |no, (word, set)| no | (set & !word))
                == 0
        };
        self.lines
            .get(line)
            .is_some_and(|line| line.0.iter().any(in_half))
    }

    /// The first name that left lately.
    pub(super) fn first(
        &self,
        names: impl ExactSizeIterator<Item = EngineHash> + Clone,
    ) -> Option<usize> {
        if self.lines.is_empty() {
            return None;
        }
        let mut later = names.clone();
        later.by_ref().take(AHEAD).for_each(|name| self.fetch(name));
        names.into_iter().position(|name| {
            later.next().into_iter().for_each(|name| self.fetch(name));
            self.has(name)
        })
    }

    /// Asks memory for what tells of a name.
    pub(super) fn fetch(&self, name: EngineHash) {
        prefetch_index(&self.lines, line(mix(name.0)));
    }
}

/// The line of a name, and its bits there.
fn place(name: EngineHash) -> (usize, [u64; WORDS]) {
    let mixed = mix(name.0);
    let mut set = [0; WORDS];
    for bit in (0..SET).map(|at| (mixed >> (8 * at)) as usize % (64 * WORDS)) {
        set[bit / 64] |= 1 << (bit % 64);
    }
    (line(mixed), set)
}

fn line(mixed: u64) -> usize {
    (mixed >> 40) as usize % (BITS / (64 * WORDS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::trie::BlockId;

    fn place(block: u32) -> Place {
        Place {
            shard: 3,
            block: BlockId(block),
        }
    }

    #[test]
    fn gains_beyond_what_is_remembered_are_not_known() {
        let mut gains = Gains::default();
        (1..=MOST_GAINS as u64).for_each(|number| gains.note(number, place(number as u32)));
        let since =
            |gains: &Gains, number, block| gains.since(number, |gained| gained == place(block));
        assert_eq!(
            (since(&gains, 7, 8), since(&gains, 8, 8)),
            (Some(true), Some(false))
        );
        gains.note(MOST_GAINS as u64 + 1, place(0));
        assert_eq!(
            (since(&gains, 0, 1), since(&gains, 1, 1)),
            (None, Some(false))
        );
        gains.clear(9000);
        assert_eq!(
            (since(&gains, 9000, 1), since(&gains, 9001, 1)),
            (Some(true), Some(false)),
            "all of it left"
        );
    }

    #[test]
    fn what_left_is_known_until_as_many_left_after_it_and_few_others_are_taken_for_it() {
        let (mut left, half) = (Left::default(), HALF as u64);
        let name = |number: u64| EngineHash(xxhash_rust::xxh3::xxh3_64(&number.to_le_bytes()));
        let forgotten: Vec<_> = (0..=3 * half)
            .filter_map(|at| left.note(name(at), at))
            .collect();
        // The third half took the place of the first, and the fourth that of the second.
        assert_eq!(forgotten, [half + 1, 2 * half + 1]);
        assert!((2 * half..=3 * half).all(|at| left.has(name(at))));
        let others = (10 * half..20 * half)
            .filter(|&at| left.has(name(at)))
            .count() as u64;
        assert!(others < half, "{others} of {}", 10 * half);
    }
}
