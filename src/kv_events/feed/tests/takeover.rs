//! Going on in the place of another reader: whatever came before, nobody can tell it from one that heard all.

use proptest::prelude::*;

use super::*;
use crate::index::dump::tests::content;
use crate::index::dump::{self, Reader};

const RANK: WorkerRank = WorkerRank {
    worker: WorkerId(1),
    rank: DpRank(0),
};

/// What an engine does next.
#[derive(Clone, Debug)]
enum Act {
    /// Stores new blocks behind a block it has, or at the start of a prompt.
    Store {
        behind: Option<prop::sample::Index>,
        blocks: u64,
        tier: &'static str,
        size: u32,
        salt: Option<&'static str>,
    },
    /// Says what it keeps of its newest blocks in another cache group.
    Group {
        id: u32,
        kind: &'static str,
        window: Option<u32>,
    },
    /// Says by which group its blocks are named.
    Main {
        id: u32,
    },
    /// Evicts a block.
    Evict(prop::sample::Index),
    Clear,
    /// A new life begins.
    Restart,
}

fn act() -> impl Strategy<Value = Act> {
    let tier = prop_oneof![3 => Just("GPU"), 1 => Just("CPU")];
    let size = prop_oneof![6 => Just(2u32), 2 => Just(4), 1 => Just(3)];
    let salt = prop_oneof![4 => Just(None), 1 => Just(Some("one")), 1 => Just(Some("another"))];
    let store = (
        any::<Option<prop::sample::Index>>(),
        1..4u64,
        tier,
        size,
        salt,
    );
    let kind = prop_oneof![
        Just("sliding_window"),
        Just("mamba"),
        Just("something"),
        Just("full_attention")
    ];
    prop_oneof![
        8 => store.prop_map(|(behind, blocks, tier, size, salt)| Act::Store { behind, blocks, tier, size, salt }),
        2 => (0..3u32, kind, any::<Option<u8>>())
            .prop_map(|(id, kind, window)| Act::Group { id, kind, window: window.map(u32::from) }),
        1 => (0..3u32).prop_map(|id| Act::Main { id }),
        4 => any::<prop::sample::Index>().prop_map(Act::Evict),
        1 => Just(Act::Clear),
        1 => Just(Act::Restart),
    ]
}

/// What an engine publishes that does all that: numbers and payloads.
fn published(acts: &[Act]) -> Vec<(u64, Vec<u8>)> {
    let (mut number, mut names, mut fresh) = (0, Vec::<u64>::new(), 0);
    let nil = None::<u64>;
    let mut batches = Vec::new();
    for act in acts {
        let payload = match act {
            Act::Store {
                behind,
                blocks,
                tier,
                size,
                salt,
            } => {
                let parent = behind
                    .filter(|_| !names.is_empty())
                    .map(|at| *at.get(&names));
                let stored: Vec<u64> = (fresh + 1..=fresh + blocks).collect();
                fresh += blocks;
                names.extend(&stored);
                let tokens: Vec<u64> = stored
                    .iter()
                    .flat_map(|block| vec![*block; *size as usize])
                    .collect();
                let keys: Vec<Vec<&str>> = stored
                    .iter()
                    .map(|_| salt.iter().copied().collect())
                    .collect();
                let none = None::<&str>;
                let stored = (
                    "BlockStored",
                    stored,
                    parent,
                    tokens,
                    size,
                    nil,
                    tier,
                    none,
                    keys,
                );
                rmp_serde::to_vec(&(1.5, [stored], 0))
            }
            Act::Group { id, kind, window } => {
                let newest = names.last().copied().unwrap_or_default();
                let (group, none) = ((id, kind, window, nil), None::<&str>);
                let (id, kind, window, place) = group;
                let stored = (
                    "BlockStored",
                    [newest],
                    nil,
                    [newest, newest],
                    2u32,
                    nil,
                    "GPU",
                    none,
                    nil,
                    id,
                    kind,
                    window,
                    place,
                );
                rmp_serde::to_vec(&(1.5, [stored], 0))
            }
            Act::Main { id } => {
                fresh += 1;
                names.push(fresh);
                let none = None::<&str>;
                let kind = "full_attention";
                let stored = (
                    "BlockStored",
                    [fresh],
                    nil,
                    [fresh, fresh],
                    2u32,
                    nil,
                    "GPU",
                    none,
                    nil,
                    id,
                    kind,
                    nil,
                    nil,
                );
                rmp_serde::to_vec(&(1.5, [stored], 0))
            }
            Act::Evict(_) if names.is_empty() => continue,
            Act::Evict(at) => rmp_serde::to_vec(&(
                1.5,
                [("BlockRemoved", [names.swap_remove(at.index(names.len()))])],
                0,
            )),
            Act::Clear => rmp_serde::to_vec(&(1.5, [("AllBlocksCleared",)], 0)),
            Act::Restart => {
                number = 0;
                continue;
            }
        };
        batches.push((number, payload.unwrap()));
        number += 1;
    }
    batches
}

impl Real {
    fn hear(&mut self, batches: &[(u64, Vec<u8>)]) {
        for (number, payload) in batches {
            if let Some(gap) = self.feed.live(*number, payload) {
                self.feed.settle(gap, payload);
            }
        }
    }

    /// What another one gets of it, after the way over the wire.
    fn copied(&self) -> RankDump {
        let held = self
            .feed
            .sink
            .position
            .copy(|| Some(self.writer.lock().portrait(RANK)))
            .unwrap();
        let mut bytes = Vec::new();
        dump::begin(&mut bytes).unwrap();
        held.write(&mut bytes).unwrap();
        dump::end(&mut bytes, 1).unwrap();
        Reader::new(&bytes[..]).unwrap().single().unwrap()
    }

    fn successor(&self) -> Self {
        let mut next = Self::begun(Resync::Keep, Some(&self.copied()));
        assert!(next.feed.takes_over() && !next.feed.takes_over());
        next
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_reader_that_takes_over_anywhere_ends_where_one_does_that_heard_all(
        acts in prop::collection::vec(act(), 1..40),
        cut in any::<prop::sample::Index>(),
        lost in 0..3usize,
    ) {
        let batches = published(&acts);
        prop_assume!(!batches.is_empty());
        let (before, after) = batches.split_at(1 + cut.index(batches.len()));
        let after = &after[lost.min(after.len())..];
        let mut all = Real::new(Resync::Keep);
        all.hear(before);
        if all.copied().position().is_none() {
            // Blocks of a size that cannot be used.
            prop_assert_eq!(all.stands().0, Trust::Absent);
            return Ok(());
        }
        let mut next = all.successor();
        prop_assert_eq!(next.witness.standing(), all.witness.standing());
        all.hear(after);
        next.hear(after);
        prop_assert_eq!(next.witness.standing(), all.witness.standing());
        let of = |real: &Real| (content(&real.copied()), real.copied().position().cloned());
        prop_assert_eq!(of(&next), of(&all));
    }
}

#[test]
fn who_remembers_more_than_can_be_copied_says_so() {
    let halves = ("BlockStored", [1u64, 2], None::<u64>, [1u64, 2], 1u32);
    let mut real = Real::new(Resync::Keep);
    real.store(None, &[7]);
    assert!(real.copied().position().is_some());
    real.next = 0;
    real.send(&rmp_serde::to_vec(&(1.5, [halves], 0)).unwrap());
    assert_eq!(real.copied().position(), None);
}

#[test]
fn what_was_doubted_or_never_told_stays_so_for_who_takes_over() {
    let mut real = Real::new(Resync::Keep);
    real.store(None, &[1, 2]);
    real.lose(1);
    real.store(None, &[3]);
    assert_eq!(real.stands(), STALE);
    let mut next = real.successor();
    assert_eq!(
        (next.stands(), next.facts().doubted_blocks),
        (STALE, real.facts().doubted_blocks)
    );
    next.store(None, &[1, 2]);
    assert_eq!(next.stands(), INCOMPLETE, "what was lost may be held");

    let mut real = Real::new(Resync::Keep);
    real.lose(5_000);
    real.store(None, &[1]);
    assert_eq!(real.successor().stands(), INCOMPLETE);
}

#[test]
fn who_takes_over_without_a_replay_notices_a_new_life_and_a_gap_by_the_next_number() {
    let mut real = Real::new(Resync::Keep);
    for block in 1..=5 {
        real.store(None, &[block]);
    }
    let mut next = real.successor();
    next.store(None, &[6]);
    assert_eq!(
        (next.stands(), next.holds(&[1])),
        (EXACT, 1),
        "nothing is missing"
    );

    let mut next = real.successor();
    next.lose(1);
    next.store(None, &[6]);
    assert_eq!(
        (next.stands(), next.holds(&[1])),
        (STALE, 1),
        "something is"
    );

    for number in [0, 2, 4] {
        let mut next = real.successor();
        next.next = number;
        next.store(None, &[6]);
        assert_eq!(
            (next.facts().restarts, next.holds(&[1])),
            (1, 0),
            "another engine, at batch {number}"
        );
    }
}
