//! The index: what events and queries cost, and what it holds. One index of each side is built anew in every round, in
//! turns, and asked everything; the answers of the first round are compared one by one.

use dynamo_kv_router::SyncIndexer;
use warmroute::index::Overlaps;
use warmroute::worker::Slot;

use crate::duel::{Table, cpu};
use crate::rows::Goal;
use crate::sides::{Ours, Peer, assert_equal, our_events, peer_events, peer_prompt};
use crate::trace::Request;
use crate::workload::{self, Event};
use crate::{Bench, memory};

const RANKS: u32 = 64;
const CAPACITY: usize = 65_536;

const STORED: Goal = ("apply stored events, 64 ranks", "ns/block", Some(0.5));
const DECODED: Goal = ("apply single-block decode events", "ns/event", Some(0.3));
const QUERY: Goal = ("query, full index, 64 ranks, mean", "µs", Some(0.33));
const BOUNDED: Goal = (
    "apply with capacity 65,536 per rank, 64 ranks",
    "ns/block",
    Some(0.5),
);
const CHURN: Goal = (
    "apply with capacity 65,536 per rank, 8 ranks",
    "ns/block",
    Some(0.5),
);
const HEAP: Goal = ("heap per resident (rank, block) pair", "B", Some(0.45));

/// The rows of this file.
pub fn run(bench: &Bench, table: &mut Table) {
    let args = &bench.args;
    if args.wants_any(&[STORED.0, DECODED.0, QUERY.0, HEAP.0]) {
        let (stored, decoded) = workload::unbounded(&bench.requests, RANKS);
        eprintln!(
            "{} stored events of {} blocks, {} decode events",
            stored.len(),
            workload::blocks(&stored),
            decoded.len()
        );
        if args.wants_any(&[STORED.0, DECODED.0, QUERY.0]) {
            unbounded(bench, table, &stored, &decoded);
        }
        if args.wants(HEAP.0) {
            let (theirs, ours) = heap(&stored);
            table.enter(HEAP, &[theirs], &[ours]);
        }
    }
    for (row, ranks) in [(BOUNDED, RANKS), (CHURN, 8)] {
        if args.wants(row.0) {
            bounded(bench, table, row, ranks);
        }
    }
}

fn unbounded(bench: &Bench, table: &mut Table, stored: &[Event], decoded: &[Event]) {
    let mut rounds: [[Vec<f64>; 2]; 3] = Default::default();
    let blocks = workload::blocks(stored) as f64;
    for round in 0..=bench.args.rounds() {
        let (peer, mut ours) = (Peer::new(), Ours::new(RANKS));
        let mut measured = [[0.0; 2]; 3];
        measured[0] = [
            peer.apply(peer_events(stored)) / blocks,
            ours.apply(our_events(stored)) / blocks,
        ];
        if round == 0 {
            compare("full index", &bench.requests, &peer, &ours);
        }
        measured[1] = [
            peer_queries(&bench.requests, &peer),
            our_queries(&bench.requests, &ours),
        ];
        let events = decoded.len() as f64;
        measured[2] = [
            peer.apply(peer_events(decoded)) / events,
            ours.apply(our_events(decoded)) / events,
        ];
        if round == 0 {
            // The first round warms up, and is compared.
            compare("with answers", &bench.requests, &peer, &ours);
            continue;
        }
        for (kept, measured) in rounds.iter_mut().zip(measured) {
            kept.iter_mut()
                .zip(measured)
                .for_each(|(kept, side)| kept.push(side));
        }
    }
    for (row, [theirs, ours]) in [STORED, QUERY, DECODED].into_iter().zip(&rounds) {
        if bench.args.wants(row.0) {
            table.enter(row, theirs, ours);
        }
    }
}

/// Mean of a query over all prompts, microseconds.
fn peer_queries(requests: &[Request], peer: &Peer) -> f64 {
    let prompts: Vec<_> = requests
        .iter()
        .map(|request| peer_prompt(&request.prompt))
        .collect();
    let ask = || {
        prompts
            .iter()
            .map(|prompt| peer.tree.find_matches(prompt, false).scores.len())
            .sum::<usize>()
    };
    ask();
    cpu(ask) / prompts.len() as f64 / 1e3
}

fn our_queries(requests: &[Request], ours: &Ours) -> f64 {
    let mut found = Overlaps::new();
    let mut ask = || {
        let look = |request: &Request| {
            ours.index.overlaps(&request.prompt, &mut found);
            found.get(Slot(0)).device
        };
        requests.iter().map(look).sum::<u32>()
    };
    ask();
    cpu(ask) / requests.len() as f64 / 1e3
}

fn compare(what: &str, requests: &[Request], peer: &Peer, ours: &Ours) {
    let mut found = Overlaps::new();
    for (number, request) in requests.iter().enumerate() {
        let theirs = peer.tree.find_matches(&peer_prompt(&request.prompt), false);
        ours.index.overlaps(&request.prompt, &mut found);
        assert_equal(&format!("{what}, request {number}"), &theirs, &found);
    }
}

fn bounded(bench: &Bench, table: &mut Table, row: Goal, ranks: u32) {
    let events = workload::bounded(&bench.requests, ranks, CAPACITY);
    let blocks = workload::blocks(&events) as f64;
    eprintln!(
        "{ranks} ranks with room for {CAPACITY}: {} events of {blocks} blocks",
        events.len()
    );
    let mut rounds: [Vec<f64>; 2] = Default::default();
    for round in 0..=bench.args.rounds() {
        let (peer, mut ours) = (Peer::new(), Ours::new(ranks));
        let (theirs, mine) = (
            peer.apply(peer_events(&events)),
            ours.apply(our_events(&events)),
        );
        if round == 0 {
            compare("full caches", &bench.requests, &peer, &ours);
            continue;
        }
        rounds[0].push(theirs / blocks);
        rounds[1].push(mine / blocks);
    }
    table.enter(row, &rounds[0], &rounds[1]);
}

/// Bytes per block that a rank holds. Events go in little by little, so that no queue of them counts.
fn heap(stored: &[Event]) -> (f64, f64) {
    let pairs = workload::blocks(stored) as f64;
    let theirs = memory::held(|| {
        let peer = Peer::new();
        stored
            .chunks(256)
            .for_each(|events| _ = peer.apply(peer_events(events)));
        peer
    });
    let ours = memory::held(|| {
        let mut ours = Ours::new(RANKS);
        stored
            .chunks(256)
            .for_each(|events| _ = ours.apply(our_events(events)));
        ours
    });
    (theirs / pairs, ours / pairs)
}
