//! Resumed readers: after any history, a resumed reader has the same state as one that received all
//! batches.

use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;
use warmroute_core::index::dump::{self, DumpReader, order_free_content};

const RANK: WorkerRank = WorkerRank {
    worker: WorkerId(1),
    rank: DpRank(0),
};

/// Next action of an engine.
#[derive(Clone, Debug)]
enum EngineAction {
    /// Stores new blocks after a stored block, or at the start of a prompt.
    Store {
        parent: Option<prop::sample::Index>,
        blocks: u64,
        tier: &'static str,
        size: u32,
        salt: Option<&'static str>,
    },
    /// Stores some of the newest blocks in another cache group.
    Group {
        id: u32,
        kind: &'static str,
        window: Option<u32>,
    },
    /// Defines the main cache group.
    Main {
        id: u32,
    },
    /// Evicts a block.
    Evict(prop::sample::Index),
    Clear,
    /// Restarts.
    Restart,
}

fn engine_action() -> impl Strategy<Value = EngineAction> {
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
        8 => store.prop_map(|(parent, blocks, tier, size, salt)| EngineAction::Store { parent, blocks, tier, size, salt }),
        2 => (0..3u32, kind, any::<Option<u8>>())
            .prop_map(|(id, kind, window)| EngineAction::Group { id, kind, window: window.map(u32::from) }),
        1 => (0..3u32).prop_map(|id| EngineAction::Main { id }),
        4 => any::<prop::sample::Index>().prop_map(EngineAction::Evict),
        1 => Just(EngineAction::Clear),
        1 => Just(EngineAction::Restart),
    ]
}

/// Returns a batch that stores one block of two tokens in a cache group.
fn group_store(block: u64, id: u32, kind: &str, window: Option<u32>) -> Vec<u8> {
    let nil = None::<u64>;
    let none = None::<&str>;
    let stored = (
        "BlockStored",
        [block],
        nil,
        [block, block],
        2u32,
        nil,
        "GPU",
        none,
        nil,
        id,
        kind,
        window,
        nil,
    );
    batch_of(stored)
}

/// Returns a batch that stores these blocks. Every token of a block is the number of the block.
fn store_batch(action: &EngineAction, stored: &[u64], parent: Option<u64>) -> Vec<u8> {
    let EngineAction::Store {
        tier, size, salt, ..
    } = action
    else {
        panic!("{action:?} stores nothing");
    };
    let tokens: Vec<u64> = stored
        .iter()
        .flat_map(|block| vec![*block; *size as usize])
        .collect();
    let keys: Vec<Vec<&str>> = vec![salt.iter().copied().collect(); stored.len()];
    let nil = None::<u64>;
    let none = None::<&str>;
    let event = (
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
    batch_of(event)
}

/// Returns the numbers and payloads of the batches for these actions.
fn publish_all(actions: &[EngineAction]) -> Vec<(u64, Vec<u8>)> {
    let mut number = 0;
    let mut names = Vec::<u64>::new();
    let mut last_block = 0;
    let mut batches = Vec::new();
    for action in actions {
        let payload = match action {
            EngineAction::Store { parent, blocks, .. } => {
                let parent = parent
                    .filter(|_| !names.is_empty())
                    .map(|at| *at.get(&names));
                let stored: Vec<u64> = (last_block + 1..=last_block + blocks).collect();
                last_block += blocks;
                names.extend(&stored);
                store_batch(action, &stored, parent)
            }
            EngineAction::Group { id, kind, window } => {
                let newest = names.last().copied().unwrap_or_default();
                group_store(newest, *id, kind, *window)
            }
            EngineAction::Main { id } => {
                last_block += 1;
                names.push(last_block);
                group_store(last_block, *id, "full_attention", None)
            }
            EngineAction::Evict(_) if names.is_empty() => continue,
            EngineAction::Evict(at) => {
                batch_of(("BlockRemoved", [names.swap_remove(at.index(names.len()))]))
            }
            EngineAction::Clear => batch_of(("AllBlocksCleared",)),
            EngineAction::Restart => {
                number = 0;
                continue;
            }
        };
        batches.push((number, payload));
        number += 1;
    }
    batches
}

impl TestStream {
    fn receive_all(&mut self, batches: &[(u64, Vec<u8>)]) {
        for (number, payload) in batches {
            self.receive(*number, payload);
        }
    }

    /// Returns a copy of the rank, encoded and decoded.
    fn copy(&self) -> RankDump {
        let held = self
            .applier
            .position
            .snapshot(|| Some(self.writer.lock().snapshot(RANK)))
            .unwrap();
        let mut bytes = Vec::new();
        dump::write_header(&mut bytes).unwrap();
        held.write(&mut bytes).unwrap();
        dump::write_end(&mut bytes, 1).unwrap();
        DumpReader::new(&bytes[..]).unwrap().read_single().unwrap()
    }

    fn resume(&self) -> Self {
        let mut next = Self::resume_from(ResyncMode::Keep, Some(&self.copy()));
        assert!(next.applier.finish_resume() && !next.applier.finish_resume());
        next
    }
}

proptest! {
    #![proptest_config(property_config(2_000))]

    #[test]
    fn resumed_reader_ends_like_uninterrupted_reader(
        actions in prop::collection::vec(engine_action(), 1..40),
        cut in any::<prop::sample::Index>(),
        lost in 0..3usize,
    ) {
        let batches = publish_all(&actions);
        prop_assume!(!batches.is_empty());
        let (before, after) = batches.split_at(1 + cut.index(batches.len()));
        let after = &after[lost.min(after.len())..];
        let mut uninterrupted = TestStream::new(ResyncMode::Keep);
        uninterrupted.receive_all(before);
        if uninterrupted.copy().position().is_none() {
            // The rank has blocks of an incompatible size.
            prop_assert_eq!(uninterrupted.status().0, IndexFreshness::Absent);
            return Ok(());
        }
        let mut resumed = uninterrupted.resume();
        prop_assert_eq!(resumed.monitor.status(), uninterrupted.monitor.status());
        uninterrupted.receive_all(after);
        resumed.receive_all(after);
        prop_assert_eq!(resumed.monitor.status(), uninterrupted.monitor.status());
        let content = |stream: &TestStream| (order_free_content(&stream.copy()), stream.copy().position().cloned());
        prop_assert_eq!(content(&resumed), content(&uninterrupted));
    }
}

#[test]
fn reader_with_partial_blocks_has_no_position() {
    let halves = ("BlockStored", [1u64, 2], None::<u64>, [1u64, 2], 1u32);
    let mut stream = TestStream::new(ResyncMode::Keep);
    stream.store(None, &[7]);
    assert!(stream.copy().position().is_some());
    stream.next = 0;
    stream.send(&batch_of(halves));
    assert_eq!(stream.copy().position(), None);
}

#[test]
fn resumed_reader_keeps_stale_and_incomplete_state() {
    let mut stream = TestStream::new(ResyncMode::Keep);
    stream.store(None, &[1, 2]);
    stream.lose(1);
    stream.store(None, &[3]);
    assert_eq!(stream.status(), STALE);
    let mut next = stream.resume();
    assert_eq!(
        (next.status(), next.facts().stale_blocks),
        (STALE, stream.facts().stale_blocks)
    );
    next.store(None, &[1, 2]);
    assert_eq!(next.status(), INCOMPLETE, "the engine may hold lost blocks");

    let mut stream = TestStream::new(ResyncMode::Keep);
    stream.lose(5_000);
    stream.store(None, &[1]);
    assert_eq!(stream.resume().status(), INCOMPLETE);
}

#[test]
fn resumed_reader_detects_restart_and_gap_without_replay() {
    let mut stream = TestStream::new(ResyncMode::Keep);
    for block in 1..=5 {
        stream.store(None, &[block]);
    }
    let mut next = stream.resume();
    next.store(None, &[6]);
    assert_eq!(
        (next.status(), next.holds(&[1])),
        (EXACT, 1),
        "no batch is missing"
    );

    let mut next = stream.resume();
    next.lose(1);
    next.store(None, &[6]);
    assert_eq!(
        (next.status(), next.holds(&[1])),
        (STALE, 1),
        "one batch is missing"
    );

    for number in [0, 2, 4] {
        let mut next = stream.resume();
        next.next = number;
        next.store(None, &[6]);
        assert_eq!(
            (next.facts().restarts, next.holds(&[1])),
            (1, 0),
            "the engine restarted, at batch {number}"
        );
    }
}
