//! Writers and readers at once. Every writer plays a script whose every state is known beforehand, and counts the events
//! it has begun and ended. What a reader sees of a rank must be the state after one of the events between the count of
//! ended ones before its query and the count of begun ones after it; anything else is a torn read.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

const WRITERS: usize = 4;
const EVENTS: usize = 3000;

/// One rank's script: what to do, and what each query must say after it.
struct Script {
    events: Vec<KvEvent>,
    /// By query, then by number of events played.
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

/// Stores and removes stretches of the queries' prompts, so that all writers work on the same runs.
fn script(seed: u64, queries: &[BlockHashes]) -> Script {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut model = super::model::Rank::default();
    let mut script = Script {
        events: vec![],
        expected: vec![vec![]; queries.len()],
        begun: 0.into(),
        ended: 0.into(),
    };
    let note = |model: &super::model::Rank, script: &mut Script| {
        for (query, expected) in queries.iter().zip(&mut script.expected) {
            expected.push(model.overlap(query.locals()));
        }
    };
    note(&model, &mut script);
    while script.events.len() < EVENTS {
        let query = &queries[rng.random_range(0..queries.len())];
        let engine = |at: usize| EngineHash(query.sequences()[at].0 ^ seed);
        let from = rng.random_range(0..query.len());
        let to = rng.random_range(from..query.len()) + 1;
        let tier = if rng.random_range(0..5) == 0 {
            Tier::HostPinned
        } else {
            Tier::Device
        };
        // Every second rank is one of a hybrid model; groups 0 and 2 are alike.
        let group = rng.random_range(0..if seed.is_multiple_of(2) { 9 } else { 1 });
        let event = match rng.random_range(0..20) {
            0 => KvEvent::Cleared,
            1..6 if group > 2 => {
                let (group, blocks) = (group % 3, (from..to).map(engine).collect());
                let need = GroupNeed::Last {
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
        };
        model.apply(&event);
        script.events.push(event);
        note(&model, &mut script);
    }
    script
}

fn play(index: &Arc<PrefixIndex>, slot: Slot, script: &Script) {
    let mut writer = index.join(slot);
    for (at, event) in script.events.iter().enumerate() {
        script.begun.store(at + 1, Ordering::SeqCst);
        // A writer that leaves and comes back is to readers the same as a clear.
        if *event == KvEvent::Cleared && at % 2 == 0 {
            drop(writer);
            writer = index.join(slot);
        } else {
            writer.apply(event);
        }
        script.ended.store(at + 1, Ordering::SeqCst);
    }
    // Keeps the last state readable until the readers are done with it.
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
            index.overlaps(query, &mut overlaps);
            for (rank, script) in scripts.iter().enumerate() {
                let to = script.begun.load(Ordering::SeqCst);
                let seen = overlaps.get(Slot(rank as u32));
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
fn readers_never_see_a_state_that_no_order_of_events_explains() {
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
                    move || play(index, Slot(slot as u32), script)
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
        index.overlaps(query, &mut overlaps);
        for (rank, script) in scripts.iter().enumerate() {
            assert_eq!(
                Some(&overlaps.get(Slot(rank as u32))),
                script.expected[number].last()
            );
        }
    }
    for shard in &index.shards {
        trie::tests::check(&shard.read());
    }
}
