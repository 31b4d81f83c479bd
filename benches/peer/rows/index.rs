//! The index: cost of events and queries, and memory. Every round builds one index of each side and
//! runs all queries. The results of the first round are compared one by one.

use dynamo_kv_router::SyncIndexer;
use warmroute_core::index::Overlaps;
use warmroute_core::worker::RankSlot;

use crate::rows::StaticMeasure;
use crate::sides::{OurIndex, PeerIndex, assert_equal, our_events, peer_events, peer_prompt};
use crate::trace::TraceRequest;
use crate::workload::{self, WorkerEvent};
use crate::{PeerBench, memory};
use warmroute_testbed::comparison::{ComparisonTable, measure_cpu};

const RANKS: u32 = 64;
const CAPACITY: usize = 65_536;

const STORED: StaticMeasure =
    StaticMeasure::new("apply stored events, 64 ranks", "ns/block", Some(0.5));
const DECODED: StaticMeasure =
    StaticMeasure::new("apply single-block decode events", "ns/event", Some(0.3));
const QUERY: StaticMeasure =
    StaticMeasure::new("query, full index, 64 ranks, mean", "µs", Some(0.33));
const BOUNDED: StaticMeasure = StaticMeasure::new(
    "apply with capacity 65,536 per rank, 64 ranks",
    "ns/block",
    Some(0.5),
);
const CHURN: StaticMeasure = StaticMeasure::new(
    "apply with capacity 65,536 per rank, 8 ranks",
    "ns/block",
    Some(0.5),
);
const HEAP: StaticMeasure =
    StaticMeasure::new("heap per resident (rank, block) pair", "B", Some(0.45));

/// Measures the rows of this module.
pub fn run(bench: &PeerBench, table: &mut ComparisonTable) {
    let args = &bench.args;
    if args.wants_any(&[STORED.name, DECODED.name, QUERY.name, HEAP.name]) {
        let (stored, decoded) = workload::unbounded(&bench.requests, RANKS);
        eprintln!(
            "{} stored events of {} blocks, {} decode events",
            stored.len(),
            workload::blocks(&stored),
            decoded.len()
        );
        if args.wants_any(&[STORED.name, DECODED.name, QUERY.name]) {
            unbounded(bench, table, &stored, &decoded);
        }
        if args.wants(HEAP.name) {
            let (theirs, ours) = heap(&stored);
            table.add(HEAP, &[theirs], &[ours]);
        }
    }
    for (row, ranks) in [(BOUNDED, RANKS), (CHURN, 8)] {
        if args.wants(row.name) {
            bounded(bench, table, row, ranks);
        }
    }
}

fn unbounded(
    bench: &PeerBench,
    table: &mut ComparisonTable,
    stored: &[WorkerEvent],
    decoded: &[WorkerEvent],
) {
    let mut rounds: [[Vec<f64>; 2]; 3] = Default::default();
    let blocks = workload::blocks(stored) as f64;
    for round in 0..=bench.args.rounds() {
        let peer = PeerIndex::new();
        let mut ours = OurIndex::new(RANKS);
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
            // The first round is for warm-up and comparison.
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
        if bench.args.wants(row.name) {
            table.add(row, theirs, ours);
        }
    }
}

/// Returns the mean time of a query over all prompts, in microseconds.
fn peer_queries(requests: &[TraceRequest], peer: &PeerIndex) -> f64 {
    let prompts: Vec<_> = requests
        .iter()
        .map(|request| peer_prompt(&request.prompt))
        .collect();
    let query = || {
        prompts
            .iter()
            .map(|prompt| peer.tree.find_matches(prompt, false).scores.len())
            .sum::<usize>()
    };
    query();
    measure_cpu(query) / prompts.len() as f64 / 1e3
}

fn our_queries(requests: &[TraceRequest], ours: &OurIndex) -> f64 {
    let mut found = Overlaps::new();
    let mut query = || {
        let query_one = |request: &TraceRequest| {
            ours.index.query_overlaps(&request.prompt, &mut found);
            found.get(RankSlot(0)).device
        };
        requests.iter().map(query_one).sum::<u32>()
    };
    query();
    measure_cpu(query) / requests.len() as f64 / 1e3
}

fn compare(context: &str, requests: &[TraceRequest], peer: &PeerIndex, ours: &OurIndex) {
    let mut found = Overlaps::new();
    for (number, request) in requests.iter().enumerate() {
        let theirs = peer.tree.find_matches(&peer_prompt(&request.prompt), false);
        ours.index.query_overlaps(&request.prompt, &mut found);
        assert_equal(&format!("{context}, request {number}"), &theirs, &found);
    }
}

fn bounded(bench: &PeerBench, table: &mut ComparisonTable, row: StaticMeasure, ranks: u32) {
    let events = workload::bounded(&bench.requests, ranks, CAPACITY);
    let blocks = workload::blocks(&events) as f64;
    eprintln!(
        "{ranks} ranks with room for {CAPACITY}: {} events of {blocks} blocks",
        events.len()
    );
    let mut rounds: [Vec<f64>; 2] = Default::default();
    for round in 0..=bench.args.rounds() {
        let peer = PeerIndex::new();
        let mut ours = OurIndex::new(ranks);
        let theirs = peer.apply(peer_events(&events));
        let mine = ours.apply(our_events(&events));
        if round == 0 {
            compare("full caches", &bench.requests, &peer, &ours);
            continue;
        }
        rounds[0].push(theirs / blocks);
        rounds[1].push(mine / blocks);
    }
    table.add(row, &rounds[0], &rounds[1]);
}

/// Returns the heap bytes per (rank, block) pair. Events are applied in small batches, so that
/// queued events do not count.
fn heap(stored: &[WorkerEvent]) -> (f64, f64) {
    let pairs = workload::blocks(stored) as f64;
    let theirs = memory::heap_bytes(|| {
        let peer = PeerIndex::new();
        stored
            .chunks(256)
            .for_each(|events| _ = peer.apply(peer_events(events)));
        peer
    });
    let ours = memory::heap_bytes(|| {
        let mut ours = OurIndex::new(RANKS);
        stored
            .chunks(256)
            .for_each(|events| _ = ours.apply(our_events(events)));
        ours
    });
    (theirs / pairs, ours / pairs)
}
