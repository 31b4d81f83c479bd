//! Queries under hard conditions: of an index whose ranks all hold the same system prompt, and while somebody writes.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use dynamo_kv_router::SyncIndexer;
use warmroute::block::{BlockHashes, LocalHash};
use warmroute::index::Overlaps;
use warmroute::worker::Slot;

use crate::Bench;
use crate::duel::{Table, cpu, quantile};
use crate::rows::Goal;
use crate::sides::{Ours, Peer, assert_equal, our_events, peer_events, peer_prompt};
use crate::trace::{hashes, mix};
use crate::workload::{self, Change, Event};

const SHARED: Goal = (
    "query, 2,048 ranks sharing a 128-block system prompt",
    "µs",
    Some(0.1),
);
const BUSY: Goal = (
    "query p99 while one thread writes flat out",
    "µs",
    Some(0.5),
);

const RANKS: u32 = 2_048;
const SYSTEM: u64 = 128;
const OWN: u64 = 384;

/// The rows of this file.
pub fn run(bench: &Bench, table: &mut Table) {
    if bench.args.wants(SHARED.0) {
        shared(bench, table);
    }
    if bench.args.wants(BUSY.0) {
        busy(bench, table);
    }
}

/// The system prompt, and then what only one rank holds.
fn prompt(rank: u32) -> BlockHashes {
    let system = (0..SYSTEM).map(|at| LocalHash(mix(at)));
    hashes(
        system
            .chain((0..OWN).map(|at| LocalHash(mix(1 << 32 | u64::from(rank) << 10 | at))))
            .collect(),
    )
}

fn shared(bench: &Bench, table: &mut Table) {
    let prompts: Vec<_> = (0..RANKS).map(prompt).collect();
    let event = |(rank, prompt): (usize, &BlockHashes)| {
        let blocks = prompt
            .locals()
            .iter()
            .copied()
            .zip(prompt.sequences().iter().copied())
            .collect();
        Event {
            rank: rank as u32,
            change: Change::Stored {
                parent: None,
                blocks,
            },
        }
    };
    let events: Vec<_> = prompts.iter().enumerate().map(event).collect();
    let (peer, mut ours) = (Peer::new(), Ours::new(RANKS));
    peer.apply(peer_events(&events));
    ours.apply(our_events(&events));
    let asked: Vec<_> = prompts.iter().step_by(8).collect();
    let theirs: Vec<_> = asked.iter().map(|prompt| peer_prompt(prompt)).collect();
    let mut found = Overlaps::new();
    for (mine, theirs) in asked.iter().zip(&theirs) {
        ours.index.overlaps(mine, &mut found);
        assert_equal(
            "a shared system prompt",
            &peer.tree.find_matches(theirs, false),
            &found,
        );
    }
    let per_query = asked.len() as f64 * 1e3;
    let peer = || {
        cpu(|| {
            theirs
                .iter()
                .map(|prompt| peer.tree.find_matches(prompt, false).scores.len())
                .sum::<usize>()
        })
    };
    // Nobody goes through the answers once more: both are there to be looked up by rank, and were found to be equal.
    let mut ask = |prompt: &&BlockHashes| {
        ours.index.overlaps(prompt, &mut found);
        found.get(Slot(0)).device
    };
    let mut mine = || cpu(|| asked.iter().map(&mut ask).sum::<u32>());
    table.duel(
        SHARED,
        bench.args.rounds() * 3,
        || peer() / per_query,
        || mine() / per_query,
    );
}

/// The writer goes through all stored events once, and the reader asks for the prompts of the trace until it is done.
fn busy(bench: &Bench, table: &mut Table) {
    let (stored, _) = workload::unbounded(&bench.requests, 64);
    let prompts: Vec<_> = bench
        .requests
        .iter()
        .map(|request| peer_prompt(&request.prompt))
        .collect();
    let peer = || {
        let (peer, events) = (Peer::new(), peer_events(&stored));
        let ask = |at: usize| peer.tree.find_matches(&prompts[at], false).scores.len();
        while_writing(prompts.len(), ask, || _ = peer.apply(events))
    };
    let ours = || {
        let (mut ours, events) = (Ours::new(64), our_events(&stored));
        let (index, mut found) = (ours.index.clone(), Overlaps::new());
        let ask = |at: usize| {
            index.overlaps(&bench.requests[at].prompt, &mut found);
            found.get(Slot(0)).device as usize
        };
        while_writing(prompts.len(), ask, || _ = ours.apply(events))
    };
    table.duel(BUSY, bench.args.rounds(), peer, ours);
}

/// The 99th percentile of a query's time by the wall clock, microseconds.
fn while_writing(
    prompts: usize,
    mut ask: impl FnMut(usize) -> usize,
    write: impl FnOnce() + Send,
) -> f64 {
    let (started, done) = (AtomicBool::new(false), AtomicBool::new(false));
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
            std::hint::black_box(ask(next));
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
