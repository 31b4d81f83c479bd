//! Queries under contention: all ranks share a system prompt, or another thread writes
//! concurrently.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use dynamo_kv_router::SyncIndexer;
use warmroute_core::block::{BlockHashes, LocalHash};
use warmroute_core::index::Overlaps;
use warmroute_core::worker::RankSlot;

use crate::PeerBench;
use crate::rows::StaticMeasure;
use crate::sides::{OurIndex, PeerIndex, assert_equal, our_events, peer_events, peer_prompt};
use crate::trace::{hashes, mix};
use crate::workload::{self, CacheChange, WorkerEvent};
use warmroute_testbed::comparison::{ComparisonTable, measure_cpu, quantile};

const SHARED: StaticMeasure = StaticMeasure::new(
    "query, 2,048 ranks sharing a 128-block system prompt",
    "µs",
    Some(0.1),
);
const BUSY: StaticMeasure = StaticMeasure::new(
    "query p99 while one thread writes continuously",
    "µs",
    Some(0.5),
);

const RANKS: u32 = 2_048;
const SYSTEM: u64 = 128;
const OWN: u64 = 384;

/// Measures the rows of this module.
pub fn run(bench: &PeerBench, table: &mut ComparisonTable) {
    if bench.args.wants(SHARED.name) {
        shared(bench, table);
    }
    if bench.args.wants(BUSY.name) {
        busy(bench, table);
    }
}

/// Returns the shared system prompt, followed by blocks that only one rank has.
fn prompt(rank: u32) -> BlockHashes {
    let system = (0..SYSTEM).map(|at| LocalHash(mix(at)));
    hashes(
        system
            .chain((0..OWN).map(|at| LocalHash(mix(1 << 32 | u64::from(rank) << 10 | at))))
            .collect(),
    )
}

fn shared(bench: &PeerBench, table: &mut ComparisonTable) {
    let prompts: Vec<_> = (0..RANKS).map(prompt).collect();
    let event = |(rank, prompt): (usize, &BlockHashes)| {
        let blocks = prompt
            .locals()
            .iter()
            .copied()
            .zip(prompt.sequences().iter().copied())
            .collect();
        WorkerEvent {
            rank: rank as u32,
            change: CacheChange::Stored {
                parent: None,
                blocks,
            },
        }
    };
    let events: Vec<_> = prompts.iter().enumerate().map(event).collect();
    let peer = PeerIndex::new();
    let mut ours = OurIndex::new(RANKS);
    peer.apply(peer_events(&events));
    ours.apply(our_events(&events));
    let queried: Vec<_> = prompts.iter().step_by(8).collect();
    let theirs: Vec<_> = queried.iter().map(|prompt| peer_prompt(prompt)).collect();
    let mut found = Overlaps::new();
    for (mine, theirs) in queried.iter().zip(&theirs) {
        ours.index.query_overlaps(mine, &mut found);
        assert_equal(
            "a shared system prompt",
            &peer.tree.find_matches(theirs, false),
            &found,
        );
    }
    let per_query = queried.len() as f64 * 1e3;
    let peer = || {
        measure_cpu(|| {
            theirs
                .iter()
                .map(|prompt| peer.tree.find_matches(prompt, false).scores.len())
                .sum::<usize>()
        })
    };
    // The results are not iterated again. Both sides return a lookup by rank, and the results were
    // compared above.
    let mut query = |prompt: &&BlockHashes| {
        ours.index.query_overlaps(prompt, &mut found);
        found.get(RankSlot(0)).device
    };
    let mut mine = || measure_cpu(|| queried.iter().map(&mut query).sum::<u32>());
    table.compare(
        SHARED,
        bench.args.rounds() * 3,
        || peer() / per_query,
        || mine() / per_query,
    );
}

/// Measures queries during writes. The writer applies all stored events once. The reader queries
/// prompts of the trace until the writer is done.
fn busy(bench: &PeerBench, table: &mut ComparisonTable) {
    let (stored, _) = workload::unbounded(&bench.requests, 64);
    let prompts: Vec<_> = bench
        .requests
        .iter()
        .map(|request| peer_prompt(&request.prompt))
        .collect();
    let peer = || {
        let peer = PeerIndex::new();
        let events = peer_events(&stored);
        let query = |at: usize| peer.tree.find_matches(&prompts[at], false).scores.len();
        while_writing(prompts.len(), query, || _ = peer.apply(events))
    };
    let ours = || {
        let mut ours = OurIndex::new(64);
        let events = our_events(&stored);
        let index = ours.index.clone();
        let mut found = Overlaps::new();
        let query = |at: usize| {
            index.query_overlaps(&bench.requests[at].prompt, &mut found);
            found.get(RankSlot(0)).device as usize
        };
        while_writing(prompts.len(), query, || _ = ours.apply(events))
    };
    table.compare(BUSY, bench.args.rounds(), peer, ours);
}

/// Returns the 99th percentile of the wall-clock time of a query, in microseconds.
fn while_writing(
    prompts: usize,
    mut query: impl FnMut(usize) -> usize,
    write: impl FnOnce() + Send,
) -> f64 {
    let started = AtomicBool::new(false);
    let done = AtomicBool::new(false);
    let mut times = Vec::with_capacity(1 << 20);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            started.store(true, Relaxed);
            write();
            done.store(true, Relaxed);
        });
        while !started.load(Relaxed) {
            std::hint::spin_loop();
        }
        let mut next = 0;
        while !done.load(Relaxed) {
            next = (next + 7_919) % prompts;
            let start = Instant::now();
            std::hint::black_box(query(next));
            times.push(start.elapsed().as_nanos() as f64 / 1e3);
        }
    });
    assert!(
        times.len() > 1_000,
        "only {} queries while it wrote",
        times.len()
    );
    quantile(&times, 0.99)
}
