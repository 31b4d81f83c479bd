//! Concurrent writers and readers.
//!
//! Every writer plays a script whose states are known in advance, and counts the events that it has
//! begun and ended. A reader must see a state between the number of ended events before its query
//! and the number of begun events after it. Anything else is a torn read.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

const WRITERS: usize = 4;
const EVENTS: usize = 3000;

/// Script of one rank: its events, and the expected result of each query after each event.
struct Script {
    events: Vec<KvEvent>,
    /// Indexed by query, then by the number of events played.
    expected: Vec<Vec<TierBlocks>>,
    begun: AtomicUsize,
    ended: AtomicUsize,
}

fn queries() -> Vec<BlockHashes> {
    let line = |branch: u64| {
        (0..24)
            .map(|at| LocalHash(if at < 8 { at } else { at + branch * 100 }))
            .collect::<Vec<_>>()
    };
    (0..3).map(|branch| prompt(&line(branch))).collect()
}

/// Generates a script that stores and removes parts of the queried prompts, so that all writers
/// change the same runs.
fn script(seed: u64, queries: &[BlockHashes]) -> Script {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut model = super::model::Rank::default();
    let mut script = Script {
        events: vec![],
        expected: vec![vec![]; queries.len()],
        begun: 0.into(),
        ended: 0.into(),
    };
    let record = |model: &super::model::Rank, script: &mut Script| {
        for (query, expected) in queries.iter().zip(&mut script.expected) {
            expected.push(model.overlap(query.locals()));
        }
    };
    record(&model, &mut script);
    while script.events.len() < EVENTS {
        let query = &queries[rng.random_range(0..queries.len())];
        let event = random_event(&mut rng, seed, query);
        model.apply(&event);
        script.events.push(event);
        record(&model, &mut script);
    }
    script
}

/// Generates an event about the blocks of one query.
fn random_event(rng: &mut StdRng, seed: u64, query: &BlockHashes) -> KvEvent {
    let engine = |at: usize| EngineHash(query.sequences()[at].0 ^ seed);
    let from = rng.random_range(0..query.len());
    let to = rng.random_range(from..query.len()) + 1;
    let tier = if rng.random_range(0..5) == 0 {
        StorageTier::HostPinned
    } else {
        StorageTier::Device
    };
    // Every second rank has a hybrid model. Groups 0 and 2 have the same requirement.
    let group = rng.random_range(0..if seed.is_multiple_of(2) { 9 } else { 1 });
    match rng.random_range(0..20) {
        0 => KvEvent::Cleared,
        1..6 if group > 2 => {
            let group = group % 3;
            let blocks = (from..to).map(engine).collect();
            let need = GroupNeed::Trailing {
                blocks: 2 - group % 2,
                stride: std::num::NonZeroU32::MIN,
            };
            match rng.random_range(0..4) {
                0 => KvEvent::GroupRemoved { group, blocks },
                _ => KvEvent::GroupStored {
                    group,
                    need,
                    blocks,
                },
            }
        }
        1..12 => {
            let from = if rng.random() { 0 } else { from };
            let block = |at: usize| StoredBlock {
                engine: engine(at),
                local: query.locals()[at],
            };
            let parent = from.checked_sub(1).map(engine);
            KvEvent::Stored {
                parent,
                blocks: (from..to).map(block).collect(),
                tier,
            }
        }
        12..16 => KvEvent::Removed {
            blocks: (from..to).map(engine).collect(),
            tier,
        },
        _ => KvEvent::Removed {
            blocks: (from..query.len()).rev().map(engine).collect(),
            tier,
        },
    }
}

fn play(index: &Arc<PrefixIndex>, slot: RankSlot, script: &Script) {
    let mut writer = index.create_writer(slot);
    for (at, event) in script.events.iter().enumerate() {
        script.begun.store(at + 1, Ordering::SeqCst);
        // For readers, replacing the writer is equivalent to a clear.
        if *event == KvEvent::Cleared && at % 2 == 0 {
            drop(writer);
            writer = index.create_writer(slot);
        } else {
            writer.apply(event);
        }
        script.ended.store(at + 1, Ordering::SeqCst);
    }
    // Keeps the last state readable until the readers have finished.
    std::mem::forget(writer);
}

fn read(
    index: &PrefixIndex,
    queries: &[BlockHashes],
    scripts: &[Script],
    done: &AtomicBool,
) -> usize {
    let mut overlaps = Overlaps::new();
    let mut reads = 0;
    while !done.load(Ordering::SeqCst) || reads == 0 {
        for (number, query) in queries.iter().enumerate() {
            let from: Vec<_> = scripts
                .iter()
                .map(|script| script.ended.load(Ordering::SeqCst))
                .collect();
            index.query_overlaps(query, &mut overlaps);
            for (rank, script) in scripts.iter().enumerate() {
                let to = script.begun.load(Ordering::SeqCst);
                let seen = overlaps.get(RankSlot(rank as u32));
                let explained = script.expected[number][from[rank]..=to].contains(&seen);
                assert!(
                    explained,
                    "rank {rank} query {number}: {seen:?} is no state from {} to {to}",
                    from[rank]
                );
            }
            reads += 1;
        }
    }
    reads
}

#[test]
fn concurrent_readers_see_whole_events() {
    let queries = queries();
    let scripts: Vec<_> = (0..WRITERS)
        .map(|seed| script(seed as u64 + 1, &queries))
        .collect();
    let index = PrefixIndex::new();
    let done = AtomicBool::new(false);
    let reads: usize = thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| scope.spawn(|| read(&index, &queries, &scripts, &done)))
            .collect();
        let writers: Vec<_> = scripts
            .iter()
            .enumerate()
            .map(|(slot, script)| {
                scope.spawn({
                    let index = &index;
                    move || play(index, RankSlot(slot as u32), script)
                })
            })
            .collect();
        let played: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        // Before any unwrap: a writer that panicked must not leave the readers running.
        done.store(true, Ordering::SeqCst);
        played.into_iter().for_each(|played| played.unwrap());
        readers
            .into_iter()
            .map(|reader| reader.join().unwrap())
            .sum()
    });
    assert!(reads > 0);
    let mut overlaps = Overlaps::new();
    for (number, query) in queries.iter().enumerate() {
        index.query_overlaps(query, &mut overlaps);
        for (rank, script) in scripts.iter().enumerate() {
            assert_eq!(
                Some(&overlaps.get(RankSlot(rank as u32))),
                script.expected[number].last()
            );
        }
    }
    for shard in &index.shards {
        trie::tests::check(&shard.read());
    }
}
