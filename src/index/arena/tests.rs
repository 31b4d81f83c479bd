use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// Limits the number of chunks.
pub(in crate::index) fn limit(arena: &mut Arena, chunks: usize) {
    arena.most = chunks;
}

/// Free positions, and positions that are not.
pub(in crate::index) fn counts(arena: &Arena) -> (usize, usize) {
    (arena.free, arena.used)
}

/// Positions there is memory for.
pub(in crate::index) fn capacity(arena: &Arena) -> usize {
    arena
        .chunks
        .iter()
        .map(|chunk| chunk.homes.capacity())
        .sum()
}

/// Panics if the lists do not agree with what is in use.
pub(in crate::index) fn check(arena: &Arena, used: &BTreeMap<u32, u32>) {
    let mut free = BTreeMap::new();
    for (list, &head) in arena.lists.iter().enumerate() {
        let (mut before, mut at) = (NONE, head);
        while at != NONE {
            let len = arena.length(at);
            assert!(
                len > 0 && len.ilog2() as usize == list,
                "{len} in list {list}"
            );
            let (back, next) = arena.links(at);
            assert_eq!(back, before, "the list does not lead back");
            assert!(free.insert(at, len).is_none(), "listed twice");
            (before, at) = (at, next);
        }
    }
    assert_eq!(
        arena.free,
        free.values().map(|len| *len as usize).sum::<usize>()
    );
    assert_eq!(
        arena.used,
        used.values().map(|len| *len as usize).sum::<usize>()
    );
    for (number, chunk) in arena.chunks.iter().enumerate() {
        let is_last = number + 1 == arena.chunks.len();
        let bare = arena.bare.contains(&(number as u32));
        assert_eq!(chunk.locals.len(), chunk.homes.len());
        assert!(
            is_last || chunk.homes.len() == if bare { 0 } else { CHUNK },
            "chunk {number} is not whole"
        );
        let (mut at, mut was_free) = ((number * CHUNK) as u32, false);
        let end = at + chunk.homes.len() as u32;
        while at < end {
            let is_free = free.contains_key(&at);
            let len = free.get(&at).or_else(|| used.get(&at)).copied();
            let len = len.unwrap_or_else(|| panic!("position {at} is neither free nor in use"));
            assert!(
                !(is_free && was_free),
                "free neighbours at {at} were not joined"
            );
            if is_free {
                assert!((at..at + len).all(|at| arena.home(at).is_none()));
            }
            (at, was_free) = (at + len, is_free);
        }
        assert_eq!(at, end);
        // Unless it was to be followed by another, for which there was no room.
        assert!(
            !(is_last && was_free && arena.chunks.len() < arena.most),
            "the last chunk ends with what is free"
        );
    }
}

#[derive(Clone, Debug)]
enum Step {
    Take(usize, usize),
    Behind(usize, usize),
    Give(usize),
    GiveTail(usize, u32),
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..200usize, 1..65usize).prop_map(|(want, least)| Step::Take(want, least)),
        2 => (1..9usize, 1..2usize).prop_map(|(want, least)| Step::Take(want, least)),
        2 => (any::<usize>(), 1..100usize).prop_map(|(pick, want)| Step::Behind(pick, want)),
        5 => any::<usize>().prop_map(Step::Give),
        2 => (any::<usize>(), 1..60u32).prop_map(|(pick, len)| Step::GiveTail(pick, len)),
    ]
}

/// Stretches in use: what they are is written into them, so that one that lies in two is noticed.
#[derive(Default)]
struct Bed {
    arena: Arena,
    used: BTreeMap<u32, u32>,
    most: usize,
}

impl Bed {
    fn enter(&mut self, first: u32, len: u32) {
        let overlapping = self
            .used
            .range(..first + len)
            .next_back()
            .is_some_and(|(at, len)| at + len > first);
        assert!(!overlapping, "{first} is in use");
        assert!(
            first as usize / CHUNK == (first + len - 1) as usize / CHUNK,
            "in two chunks"
        );
        self.arena.settle(Stretch { first, len }, 7);
        self.arena
            .write(first, &vec![LocalHash(u64::from(first)); len as usize]);
        self.used.insert(first, len);
    }

    fn pick(&self, pick: usize) -> Option<(u32, u32)> {
        self.used
            .iter()
            .nth(pick % self.used.len().max(1))
            .map(|(at, len)| (*at, *len))
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Take(want, least) => {
                let Some(stretch) = self.arena.take(*want, *least) else {
                    return;
                };
                assert!(stretch.len >= 1 && stretch.len as usize <= *want);
                self.enter(stretch.first, stretch.len);
            }
            Step::Behind(pick, want) => {
                let Some((first, len)) = self.pick(*pick) else {
                    return;
                };
                let more = self.arena.take_behind(first + len, *want);
                assert!(more as usize <= *want);
                if more > 0 {
                    self.enter(first + len, more);
                }
            }
            Step::Give(pick) => {
                let Some((first, len)) = self.pick(*pick) else {
                    return;
                };
                self.used.remove(&first);
                self.arena.give(Stretch { first, len });
            }
            Step::GiveTail(pick, gone) => {
                let Some((first, len)) = self.pick(*pick) else {
                    return;
                };
                let gone = (*gone).min(len);
                self.used.remove(&first);
                if gone < len {
                    self.used.insert(first, len - gone);
                }
                self.arena.give(Stretch {
                    first: first + len - gone,
                    len: gone,
                });
            }
        }
        self.most = self.most.max(counts(&self.arena).1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_two_stretches_overlap_and_what_is_free_is_listed_and_joined(
        script in vec(steps(), 1..120),
        chunks in 1..8usize,
    ) {
        let mut bed = Bed::default();
        limit(&mut bed.arena, chunks);
        for step in &script {
            bed.step(step);
            check(&bed.arena, &bed.used);
        }
        for (first, len) in std::mem::take(&mut bed.used) {
            bed.arena.give(Stretch { first, len });
        }
        check(&bed.arena, &bed.used);
        prop_assert!(counts(&bed.arena).0 <= CHUNK && capacity(&bed.arena) <= 2 * CHUNK, "memory is kept");
    }
}

#[test]
fn what_became_free_is_used_again_however_small_its_pieces_are() {
    let mut bed = Bed::default();
    for round in 0..200usize {
        for _ in 0..60 {
            bed.step(&Step::Take(1 + (round * 37) % 90, 64));
        }
        for pick in 0..58 {
            bed.step(&Step::Give(pick * 13 + round));
        }
    }
    let (free, used) = counts(&bed.arena);
    assert!(
        free + used <= 2 * bed.most + 2 * CHUNK,
        "{free} free, {used} used, {} at most",
        bed.most
    );
    check(&bed.arena, &bed.used);
}

#[test]
fn an_arena_that_is_full_says_so_and_takes_again_what_is_given_back() {
    let mut bed = Bed::default();
    limit(&mut bed.arena, 2);
    while let Some(stretch) = bed.arena.take(50, 16) {
        bed.enter(stretch.first, stretch.len);
    }
    assert_eq!(counts(&bed.arena), (0, 2 * CHUNK));
    bed.step(&Step::Give(3));
    assert!(bed.arena.take(10, 1).is_some());
}
