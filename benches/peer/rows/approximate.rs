//! Without events: what both sides believe of caches by their own decisions. Every request of the trace is asked for,
//! recorded where it goes, and ends after some others have begun, as live requests do. The peer works in threads of its
//! own, so the time is the CPU of the whole process.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use dynamo_kv_router::approx::PruneConfig;
use dynamo_kv_router::indexer::{
    ApproximateLruBlock, ApproximateLruLease, ApproximateRetentionConfig, KvIndexerInterface,
    ThreadPoolIndexer,
};
use dynamo_kv_router::protocols::{LocalBlockHash, WorkerWithDpRank};
use dynamo_kv_router::scheduling::AttemptId;
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, OverlapScores, SyncIndexer};
use tokio::runtime::Runtime;
use warmroute::index::Overlaps;
use warmroute::predict::{Lease, Policy, Predictor, Ttl};
use warmroute::worker::{DpRank, Slot, WorkerId, WorkerRank};

use crate::duel::{Table, process_cpu};
use crate::rows::Goal;
use crate::sides::{assert_equal, peer_prompt};
use crate::trace::Request;
use crate::{Bench, memory, workload};

const TIME: Option<f64> = Some(0.03);
const HEAP: Option<f64> = Some(0.3);

/// Longer than any run.
const NEVER: Duration = Duration::from_secs(24 * 3600);
/// Room for everything.
const ANY: usize = 1 << 22;
/// Requests that are under way at a time.
const LIVE: usize = 256;
/// Blocks that a rank holds where there is little room.
const CAPACITY: usize = 65_536;

struct Case {
    time: Goal,
    heap: Goal,
    keep: Keep,
    ranks: u32,
}

/// How blocks leave.
#[derive(Clone, Copy)]
enum Keep {
    Ttl,
    Lru { capacity: usize },
}

const CASES: [Case; 3] = [
    Case {
        time: (
            "approximate mode, TTL, 64 ranks: query + record",
            "µs CPU",
            TIME,
        ),
        heap: ("approximate mode, TTL, heap per pair", "B", HEAP),
        keep: Keep::Ttl,
        ranks: 64,
    },
    Case {
        time: (
            "approximate mode, LRU, 64 ranks: query + record + end",
            "µs CPU",
            TIME,
        ),
        heap: ("approximate mode, LRU, heap per pair", "B", HEAP),
        keep: Keep::Lru { capacity: ANY },
        ranks: 64,
    },
    Case {
        time: ("approximate mode, LRU that evicts, 8 ranks", "µs CPU", TIME),
        heap: (
            "approximate mode, LRU that evicts, heap per pair",
            "B",
            HEAP,
        ),
        keep: Keep::Lru { capacity: CAPACITY },
        ranks: 8,
    },
];

/// The rows of this file.
pub fn run(bench: &Bench, table: &mut Table) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime starts");
    for case in &CASES {
        if !bench.args.wants_any(&[case.time.0, case.heap.0]) {
            continue;
        }
        let ranks = workload::places(&bench.requests, case.ranks);
        let replay = Replay {
            requests: &bench.requests,
            ranks: &ranks,
        };
        if bench.args.wants(case.time.0) {
            time(bench, table, case, &runtime, &replay);
        }
        if bench.args.wants(case.heap.0) {
            let (mut theirs, mut ours) = (0.0, 0.0);
            let held = memory::held(|| {
                let mut peer = Peer::new(case, &runtime);
                replay.run(|request, rank| _ = peer.serve(Asked::new(request, case.keep), rank));
                theirs = peer.finish();
                peer
            });
            let theirs = held / theirs;
            let held = memory::held(|| {
                let mut predictor = Ours::new(case);
                replay.run(|request, rank| predictor.serve(request, rank));
                ours = predictor.finish();
                predictor
            });
            table.enter(case.heap, &[theirs], &[held / ours]);
        }
    }
}

/// Where each request goes.
struct Replay<'a> {
    requests: &'a [Request],
    ranks: &'a [u32],
}

impl Replay<'_> {
    fn run(&self, mut serve: impl FnMut(&Request, u32)) {
        self.requests
            .iter()
            .zip(self.ranks)
            .for_each(|(request, rank)| serve(request, *rank));
    }
}

fn time(bench: &Bench, table: &mut Table, case: &Case, runtime: &Runtime, replay: &Replay<'_>) {
    let per_request = bench.requests.len() as f64 * 1e3;
    let mut rounds: [Vec<f64>; 2] = Default::default();
    for _ in 0..bench.args.rounds().min(3) {
        let mut peer = Peer::new(case, runtime);
        // In its own types before the clock runs: that we have others is not its fault.
        let asked: Vec<Asked> = bench
            .requests
            .iter()
            .map(|request| Asked::new(request, case.keep))
            .collect();
        let start = process_cpu();
        asked
            .into_iter()
            .zip(replay.ranks)
            .for_each(|(asked, rank)| _ = peer.serve(asked, *rank));
        peer.finish();
        rounds[0].push((process_cpu() - start) / per_request);
        drop(peer);
        let mut ours = Ours::new(case);
        let start = process_cpu();
        replay.run(|request, rank| ours.serve(request, rank));
        ours.finish();
        rounds[1].push((process_cpu() - start) / per_request);
    }
    compare(case, runtime, replay);
    table.enter(case.time, &rounds[0], &rounds[1]);
}

/// Both sides must believe the same before every request, where nothing leaves. Which blocks go first is each side's own
/// affair; then they must hold as many.
fn compare(case: &Case, runtime: &Runtime, replay: &Replay<'_>) {
    let (mut peer, mut ours) = (Peer::new(case, runtime), Ours::new(case));
    let evicts = matches!(case.keep, Keep::Lru { capacity: CAPACITY });
    let mut number = 0;
    replay.run(|request, rank| {
        let theirs = peer.serve(Asked::new(request, case.keep), rank);
        ours.serve(request, rank);
        if !evicts {
            assert_equal(
                &format!("{}, request {number}", case.time.0),
                &theirs,
                &ours.found,
            );
        }
        number += 1;
    });
    let (theirs, mine) = (peer.finish(), ours.finish());
    if evicts {
        assert!(
            (theirs - mine).abs() < 0.01 * theirs,
            "the peer holds {theirs} blocks, we {mine}"
        );
    } else if let Keep::Lru { .. } = case.keep {
        assert_eq!(theirs, mine, "blocks that are held");
    }
}

/// A request in the peer's types.
struct Asked {
    locals: Vec<LocalBlockHash>,
    record: Recorded,
}

/// What it is told of a decision.
enum Recorded {
    Sequences(Vec<u64>),
    Blocks(Vec<ApproximateLruBlock>),
}

impl Asked {
    fn new(request: &Request, keep: Keep) -> Self {
        let locals = peer_prompt(&request.prompt);
        let sequences = request.prompt.sequences().iter().map(|sequence| sequence.0);
        let block = |(&local_hash, sequence_hash)| ApproximateLruBlock {
            local_hash,
            sequence_hash,
        };
        let record = match keep {
            Keep::Ttl => Recorded::Sequences(sequences.collect()),
            Keep::Lru { .. } => Recorded::Blocks(locals.iter().zip(sequences).map(block).collect()),
        };
        Self { locals, record }
    }
}

struct Peer<'a> {
    indexer: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    runtime: &'a Runtime,
    live: VecDeque<ApproximateLruLease>,
    keep: Keep,
    attempts: u64,
}

impl<'a> Peer<'a> {
    fn new(case: &Case, runtime: &'a Runtime) -> Self {
        let ttl = PruneConfig { ttl: NEVER };
        let retention = match case.keep {
            Keep::Ttl => ApproximateRetentionConfig::Ttl(ttl),
            Keep::Lru { .. } => ApproximateRetentionConfig::Lru { fallback_ttl: ttl },
        };
        let indexer = ThreadPoolIndexer::new_with_metrics_and_approximate_retention(
            ConcurrentRadixTreeCompressed::new(),
            1,
            16,
            None,
            Some(retention),
        );
        if let Keep::Lru { capacity } = case.keep {
            for rank in 0..u64::from(case.ranks) {
                let set = indexer.set_approximate_lru_capacity(
                    WorkerWithDpRank::new(rank, 0),
                    1,
                    Some(capacity),
                );
                runtime.block_on(set).expect("a capacity can be set");
            }
        }
        Self {
            indexer,
            runtime,
            live: VecDeque::new(),
            keep: case.keep,
            attempts: 0,
        }
    }

    fn serve(&mut self, asked: Asked, rank: u32) -> OverlapScores {
        let worker = WorkerWithDpRank::new(u64::from(rank), 0);
        let found = self.indexer.backend().find_matches(&asked.locals, false);
        match asked.record {
            Recorded::Sequences(sequences) => {
                let record = self.indexer.process_routing_decision_hash_slices(
                    worker,
                    &asked.locals,
                    &sequences,
                );
                self.runtime.block_on(record).expect("it records");
            }
            Recorded::Blocks(blocks) => self.lease(worker, blocks),
        }
        found
    }

    fn lease(&mut self, worker: WorkerWithDpRank, blocks: Vec<ApproximateLruBlock>) {
        self.attempts += 1;
        let attempt = AttemptId::for_benchmark(self.attempts);
        let lease = self
            .indexer
            .begin_approximate_lru_request(worker, 1, attempt)
            .expect("it keeps leases");
        self.runtime
            .block_on(lease.acquire(blocks, 0))
            .expect("it records");
        self.live.push_back(lease);
        if self.live.len() > LIVE {
            self.live
                .pop_front()
                .into_iter()
                .for_each(|lease| lease.release_now());
        }
    }

    /// Ends all requests, waits for its threads, and says how many blocks it holds.
    fn finish(&mut self) -> f64 {
        self.live.drain(..).for_each(|lease| lease.release_now());
        self.runtime.block_on(self.indexer.flush());
        match self.keep {
            Keep::Ttl => {
                let sizes = self.runtime.block_on(self.indexer.shard_sizes());
                sizes.iter().map(|size| size.block_count).sum::<usize>() as f64
            }
            Keep::Lru { .. } => {
                let stats = self.runtime.block_on(self.indexer.approximate_lru_stats());
                stats.expect("it counts").resident_blocks as f64
            }
        }
    }
}

struct Ours {
    predictor: std::sync::Arc<Predictor>,
    live: VecDeque<Lease>,
    found: Overlaps,
}

fn name(rank: u32) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(u64::from(rank)),
        rank: DpRank(0),
    }
}

impl Ours {
    fn new(case: &Case) -> Self {
        let ttl = Ttl {
            ttl: NEVER,
            most_blocks_per_rank: u64::MAX,
        };
        let (policy, capacity) = match case.keep {
            Keep::Ttl => (Policy::Ttl(ttl), None),
            Keep::Lru { capacity } => (
                Policy::Lru {
                    default_blocks: None,
                    fallback: ttl,
                },
                Some(capacity as u64),
            ),
        };
        let predictor = Predictor::new(policy, Instant::now);
        for rank in 0..case.ranks {
            predictor.open(Slot(rank), name(rank), capacity);
        }
        Self {
            predictor,
            live: VecDeque::new(),
            found: Overlaps::new(),
        }
    }

    fn serve(&mut self, request: &Request, rank: u32) {
        self.predictor.overlaps(&request.prompt, &mut self.found);
        self.live.push_back(
            self.predictor
                .record(Slot(rank), name(rank), &request.prompt),
        );
        if self.live.len() > LIVE {
            drop(self.live.pop_front());
        }
    }

    /// Ends all requests, and says how many blocks it holds.
    fn finish(&mut self) -> f64 {
        self.live.clear();
        self.predictor.stats().blocks as f64
    }
}
