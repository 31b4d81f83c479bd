//! Compares watches on prompts with lookups after every event.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::index::EventCursor;

/// The watched prompts share a first block.
const PROMPTS: [[u64; 5]; 2] = [[1, 2, 3, 4, 5], [1, 2, 9, 2, 8]];

fn hashes(locals: &[u64]) -> BlockHashes {
    prompt(&locals.iter().copied().map(LocalHash).collect::<Vec<_>>())
}

/// Returns the engine hash of a block: its path.
fn name(prompt: usize, block: usize) -> u64 {
    PROMPTS[prompt][..=block]
        .iter()
        .fold(7, |name, local| name * 31 + local)
}

/// Run of one prompt that is stored or removed.
#[derive(Clone, Debug)]
struct Step {
    prompt: usize,
    from: usize,
    to: usize,
    stored: bool,
    tier: StorageTier,
}

impl Step {
    fn event(&self) -> KvEvent {
        let Step {
            prompt,
            from,
            to,
            stored,
            tier,
        } = *self;
        let blocks = from.min(to)..=from.max(to);
        if !stored {
            return KvEvent::Removed {
                blocks: blocks.map(|at| EngineHash(name(prompt, at))).collect(),
                tier,
            };
        }
        let parent = blocks
            .start()
            .checked_sub(1)
            .map(|before| EngineHash(name(prompt, before)));
        let block = |at| StoredBlock {
            engine: EngineHash(name(prompt, at)),
            local: LocalHash(PROMPTS[prompt][at]),
        };
        KvEvent::Stored {
            parent,
            blocks: blocks.map(block).collect(),
            tier,
        }
    }
}

fn step() -> impl Strategy<Value = Step> {
    let tier = prop_oneof![5 => Just(StorageTier::Device), 1 => Just(StorageTier::HostPinned)];
    (
        0..2usize,
        0..5usize,
        0..5usize,
        prop::bool::weighted(0.6),
        tier,
    )
        .prop_map(|(prompt, from, to, stored, tier)| Step {
            prompt,
            from,
            to,
            stored,
            tier,
        })
}

/// Returns the leading blocks held in any tier, as reported by a new watch.
fn held_now(index: &Arc<PrefixIndex>, prompt: usize) -> usize {
    index
        .watch(&hashes(&PROMPTS[prompt]), RankSlot(0))
        .unwrap()
        .max_held()
}

proptest! {
    #[test]
    fn watch_reports_the_longest_prefix_ever_held(before in vec(step(), 0..4), after in vec(step(), 0..30)) {
        let index = PrefixIndex::new();
        let mut writer = index.create_writer(RankSlot(0));
        before.iter().for_each(|step| _ = writer.apply(&step.event()));
        let watches = [0, 1].map(|at| index.watch(&hashes(&PROMPTS[at]), RankSlot(0)).unwrap());
        let mut expected = [0, 1].map(|at| held_now(&index, at));
        for (at, prompt) in PROMPTS.iter().enumerate() {
            prop_assert!(expected[at] as u32 >= device(&index, RankSlot(0), prompt));
        }
        for step in &after {
            writer.apply(&step.event());
            for at in [0, 1] {
                expected[at] = expected[at].max(held_now(&index, at));
                prop_assert_eq!(watches[at].max_held(), expected[at], "after {:?}", step);
            }
        }
    }
}

#[test]
fn watch_keeps_blocks_that_were_evicted_at_once() {
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(0));
    writer.apply(&stored(None, &[(1, 100)], StorageTier::Device));
    let watch = index.watch(&hashes(&[1, 2, 3, 4]), RankSlot(0)).unwrap();
    assert_eq!(watch.max_held(), 1);
    writer.apply(&stored(
        Some(100),
        &[(2, 200), (3, 300)],
        StorageTier::Device,
    ));
    writer.apply(&removed(&[300, 200, 100]));
    assert_eq!(
        (watch.max_held(), device(&index, RankSlot(0), &[1, 2, 3, 4])),
        (3, 0)
    );
    // Another prompt with an equal block further on.
    writer.apply(&stored(None, &[(7, 700), (4, 701)], StorageTier::Device));
    assert_eq!(watch.max_held(), 3);
}

#[test]
fn watch_ends_with_its_writer() {
    let index = PrefixIndex::new();
    assert!(
        index.watch(&hashes(&[1]), RankSlot(0)).is_none(),
        "the slot has no writer"
    );
    let writer = index.create_writer(RankSlot(0));
    let watch = index.watch(&hashes(&[1]), RankSlot(0)).unwrap();
    assert!(watch.is_current(&index, RankSlot(0)));
    drop(writer);
    assert!(!watch.is_current(&index, RankSlot(0)));
    let mut writer = index.create_writer(RankSlot(0));
    writer.apply(&stored(None, &[(1, 100)], StorageTier::Device));
    assert!(!watch.is_current(&index, RankSlot(0)));
    assert_eq!(
        (watch.max_held(), index.event_cursor(RankSlot(0))),
        (0, Some(EventCursor { stores: 1, gaps: 0 }))
    );
}

#[test]
fn watch_that_begins_during_stores_misses_none() {
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(0));
    for round in 0..500_u64 {
        let locals: Vec<u64> = (round * 100..round * 100 + 8).collect();
        let watch = std::thread::scope(|scope| {
            let storing = scope.spawn(|| {
                for (at, &local) in locals.iter().enumerate() {
                    let parent = at.checked_sub(1).map(|before| locals[before]);
                    writer.apply(&stored(parent, &[(local, local)], StorageTier::Device));
                }
            });
            while !storing.is_finished()
                && device(&index, RankSlot(0), &locals) < (round % 9) as u32
            {
                std::hint::spin_loop();
            }
            index.watch(&hashes(&locals), RankSlot(0)).unwrap()
        });
        assert_eq!(watch.max_held(), 8);
    }
}
