use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;

/// Limits the number of chunks.
pub(in crate::index) fn limit(arena: &mut BlockArena, chunks: usize) {
    arena.max_chunks = chunks;
}

/// Returns the numbers of free and used positions.
pub(in crate::index) fn counts(arena: &BlockArena) -> (usize, usize) {
    (arena.free, arena.used)
}

/// Returns the number of positions with memory.
pub(in crate::index) fn capacity(arena: &BlockArena) -> usize {
    arena
        .chunks
        .iter()
        .map(|chunk| chunk.run_ids.capacity())
        .sum()
}

/// Panics if the free lists do not match the used extents.
pub(in crate::index) fn check(arena: &BlockArena, used: &BTreeMap<u32, u32>) {
    let mut free = BTreeMap::new();
    for (list, &head) in arena.free_lists.iter().enumerate() {
        let mut before = LIST_END;
        let mut at = head;
        while at != LIST_END {
            let len = arena.free_len(at);
            assert!(
                len > 0 && len.ilog2() as usize == list,
                "{len} in list {list}"
            );
            let (previous, next) = arena.free_links(at);
            assert_eq!(previous, before, "the links of the list are not symmetric");
            assert!(free.insert(at, len).is_none(), "listed twice");
            before = at;
            at = next;
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
        let is_empty = arena.empty_chunks.contains(&(number as u32));
        assert_eq!(chunk.locals.len(), chunk.run_ids.len());
        assert!(
            is_last || chunk.run_ids.len() == if is_empty { 0 } else { CHUNK },
            "chunk {number} is not complete"
        );
        let mut at = (number * CHUNK) as u32;
        let mut was_free = false;
        let end = at + chunk.run_ids.len() as u32;
        while at < end {
            let is_free = free.contains_key(&at);
            let len = free.get(&at).or_else(|| used.get(&at)).copied();
            let len = len.unwrap_or_else(|| panic!("position {at} is neither free nor in use"));
            assert!(
                !(is_free && was_free),
                "free neighbours at {at} were not merged"
            );
            if is_free {
                assert!((at..at + len).all(|at| arena.run_at(at).is_none()));
            }
            at += len;
            was_free = is_free;
        }
        assert_eq!(at, end);
        // At the limit of chunks, opening a further chunk fails after the last chunk was extended.
        assert!(
            !(is_last && was_free && arena.chunks.len() < arena.max_chunks),
            "the last chunk ends with free positions"
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
        4 => (1..200usize, 1..65usize).prop_map(|(want, min_len)| Step::Take(want, min_len)),
        2 => (1..9usize, 1..2usize).prop_map(|(want, min_len)| Step::Take(want, min_len)),
        2 => (any::<usize>(), 1..100usize).prop_map(|(pick, want)| Step::Behind(pick, want)),
        5 => any::<usize>().prop_map(Step::Give),
        2 => (any::<usize>(), 1..60u32).prop_map(|(pick, len)| Step::GiveTail(pick, len)),
    ]
}

/// Arena with its used extents. The blocks of an extent contain its start, so overlapping extents
/// are detected.
#[derive(Default)]
struct TestArena {
    arena: BlockArena,
    used: BTreeMap<u32, u32>,
    most: usize,
}

impl TestArena {
    fn enter(&mut self, first: u32, len: u32) {
        let overlapping = self
            .used
            .range(..first + len)
            .next_back()
            .is_some_and(|(at, len)| at + len > first);
        assert!(!overlapping, "{first} is in use");
        assert!(
            first as usize / CHUNK == (first + len - 1) as usize / CHUNK,
            "the extent spans two chunks"
        );
        self.arena.assign_run(ArenaExtent { first, len }, 7);
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
            Step::Take(want, min_len) => {
                let Some(extent) = self.arena.allocate(*want, *min_len) else {
                    return;
                };
                assert!(extent.len >= 1 && extent.len as usize <= *want);
                self.enter(extent.first, extent.len);
            }
            Step::Behind(pick, want) => {
                let Some((first, len)) = self.pick(*pick) else {
                    return;
                };
                let count = self.arena.allocate_at(first + len, *want);
                assert!(count as usize <= *want);
                if count > 0 {
                    self.enter(first + len, count);
                }
            }
            Step::Give(pick) => {
                let Some((first, len)) = self.pick(*pick) else {
                    return;
                };
                self.used.remove(&first);
                self.arena.deallocate(ArenaExtent { first, len });
            }
            Step::GiveTail(pick, freed) => {
                let Some((first, len)) = self.pick(*pick) else {
                    return;
                };
                let freed = (*freed).min(len);
                self.used.remove(&first);
                if freed < len {
                    self.used.insert(first, len - freed);
                }
                self.arena.deallocate(ArenaExtent {
                    first: first + len - freed,
                    len: freed,
                });
            }
        }
        self.most = self.most.max(counts(&self.arena).1);
    }
}

proptest! {
    #![proptest_config(property_config(500))]

    #[test]
    fn extents_are_disjoint_and_free_neighbours_merge(
        script in vec(steps(), 1..120),
        chunks in 1..8usize,
    ) {
        let mut test_arena = TestArena::default();
        limit(&mut test_arena.arena, chunks);
        for step in &script {
            test_arena.step(step);
            check(&test_arena.arena, &test_arena.used);
        }
        for (first, len) in std::mem::take(&mut test_arena.used) {
            test_arena.arena.deallocate(ArenaExtent { first, len });
        }
        check(&test_arena.arena, &test_arena.used);
        prop_assert!(counts(&test_arena.arena).0 <= CHUNK && capacity(&test_arena.arena) <= 2 * CHUNK, "memory is retained");
    }
}

#[test]
fn fragmented_free_memory_is_reused() {
    let mut test_arena = TestArena::default();
    for round in 0..200usize {
        for _ in 0..60 {
            test_arena.step(&Step::Take(1 + (round * 37) % 90, 64));
        }
        for pick in 0..58 {
            test_arena.step(&Step::Give(pick * 13 + round));
        }
    }
    let (free, used) = counts(&test_arena.arena);
    assert!(
        free + used <= 2 * test_arena.most + 2 * CHUNK,
        "{free} free, {used} used, {} at most",
        test_arena.most
    );
    check(&test_arena.arena, &test_arena.used);
}

#[test]
fn full_arena_allocates_again_after_deallocation() {
    let mut test_arena = TestArena::default();
    limit(&mut test_arena.arena, 2);
    while let Some(extent) = test_arena.arena.allocate(50, 16) {
        test_arena.enter(extent.first, extent.len);
    }
    assert_eq!(counts(&test_arena.arena), (0, 2 * CHUNK));
    test_arena.step(&Step::Give(3));
    assert!(test_arena.arena.allocate(10, 1).is_some());
}
