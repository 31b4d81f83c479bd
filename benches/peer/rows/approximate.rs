//! Approximate mode: both sides predict caches from their own decisions. Every request of the trace
//! is queried, recorded for the rank it goes to, and ended after some others have begun. The peer
//! uses several threads, so the time is the CPU time of the process.

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
use warmroute_core::index::Overlaps;
use warmroute_core::predict::{EvictionPolicy, PredictionLease, Predictor, TtlPolicy};
use warmroute_core::worker::{DpRank, RankSlot, WorkerId, WorkerRank};

use crate::rows::StaticMeasure;
use crate::sides::{assert_equal, peer_prompt};
use crate::trace::TraceRequest;
use crate::{PeerBench, memory, workload};
use warmroute_testbed::comparison::{ComparisonTable, process_cpu_nanos};

const TIME: Option<f64> = Some(0.03);
const HEAP: Option<f64> = Some(0.3);

/// A TTL that exceeds the duration of any run.
const UNREACHED_TTL: Duration = Duration::from_secs(24 * 3600);
/// A capacity that is never reached.
const UNREACHED_CAPACITY: usize = 1 << 22;
/// Concurrent requests.
const CONCURRENT: usize = 256;
/// Blocks per rank in the case with eviction.
const CAPACITY: usize = 65_536;

struct ApproximateCase {
    time: StaticMeasure,
    heap: StaticMeasure,
    eviction: EvictionMode,
    ranks: u32,
}

/// Eviction policy.
#[derive(Clone, Copy)]
enum EvictionMode {
    Ttl,
    Lru { capacity: usize },
}

const CASES: [ApproximateCase; 3] = [
    ApproximateCase {
        time: StaticMeasure::new(
            "approximate mode, TTL, 64 ranks: query + record",
            "µs CPU",
            TIME,
        ),
        heap: StaticMeasure::new("approximate mode, TTL, heap per pair", "B", HEAP),
        eviction: EvictionMode::Ttl,
        ranks: 64,
    },
    ApproximateCase {
        time: StaticMeasure::new(
            "approximate mode, LRU, 64 ranks: query + record + end",
            "µs CPU",
            TIME,
        ),
        heap: StaticMeasure::new("approximate mode, LRU, heap per pair", "B", HEAP),
        eviction: EvictionMode::Lru {
            capacity: UNREACHED_CAPACITY,
        },
        ranks: 64,
    },
    ApproximateCase {
        time: StaticMeasure::new("approximate mode, LRU that evicts, 8 ranks", "µs CPU", TIME),
        heap: StaticMeasure::new(
            "approximate mode, LRU that evicts, heap per pair",
            "B",
            HEAP,
        ),
        eviction: EvictionMode::Lru { capacity: CAPACITY },
        ranks: 8,
    },
];

/// Measures the rows of this module.
pub fn run(bench: &PeerBench, table: &mut ComparisonTable) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime starts");
    for case in &CASES {
        if !bench.args.wants_any(&[case.time.name, case.heap.name]) {
            continue;
        }
        let ranks = workload::place_all(&bench.requests, case.ranks);
        let replay = TraceReplay {
            requests: &bench.requests,
            ranks: &ranks,
        };
        if bench.args.wants(case.time.name) {
            time(bench, table, case, &runtime, &replay);
        }
        if bench.args.wants(case.heap.name) {
            let mut theirs = 0.0;
            let mut ours = 0.0;
            let held = memory::heap_bytes(|| {
                let mut peer = PeerPredictor::new(case, &runtime);
                replay.run(|request, rank| {
                    _ = peer.serve(PeerRequest::new(request, case.eviction), rank)
                });
                theirs = peer.finish();
                peer
            });
            let theirs = held / theirs;
            let held = memory::heap_bytes(|| {
                let mut predictor = OurPredictor::new(case);
                replay.run(|request, rank| predictor.serve(request, rank));
                ours = predictor.finish();
                predictor
            });
            table.add(case.heap, &[theirs], &[held / ours]);
        }
    }
}

/// Requests and the rank of each request.
struct TraceReplay<'a> {
    requests: &'a [TraceRequest],
    ranks: &'a [u32],
}

impl TraceReplay<'_> {
    fn run(&self, mut serve: impl FnMut(&TraceRequest, u32)) {
        self.requests
            .iter()
            .zip(self.ranks)
            .for_each(|(request, rank)| serve(request, *rank));
    }
}

fn time(
    bench: &PeerBench,
    table: &mut ComparisonTable,
    case: &ApproximateCase,
    runtime: &Runtime,
    replay: &TraceReplay<'_>,
) {
    let per_request = bench.requests.len() as f64 * 1e3;
    let mut rounds: [Vec<f64>; 2] = Default::default();
    for _ in 0..bench.args.rounds().min(3) {
        let mut peer = PeerPredictor::new(case, runtime);
        // The requests are converted before the measurement, so that the conversion does not count
        // for the peer.
        let requests: Vec<PeerRequest> = bench
            .requests
            .iter()
            .map(|request| PeerRequest::new(request, case.eviction))
            .collect();
        let start = process_cpu_nanos();
        requests
            .into_iter()
            .zip(replay.ranks)
            .for_each(|(request, rank)| _ = peer.serve(request, *rank));
        peer.finish();
        rounds[0].push((process_cpu_nanos() - start) / per_request);
        drop(peer);
        let mut ours = OurPredictor::new(case);
        let start = process_cpu_nanos();
        replay.run(|request, rank| ours.serve(request, rank));
        ours.finish();
        rounds[1].push((process_cpu_nanos() - start) / per_request);
    }
    compare(case, runtime, replay);
    table.add(case.time, &rounds[0], &rounds[1]);
}

/// Asserts that both sides predict the same before every request if nothing is evicted. With
/// eviction, the order may differ, so only the numbers of blocks must agree.
fn compare(case: &ApproximateCase, runtime: &Runtime, replay: &TraceReplay<'_>) {
    let mut peer = PeerPredictor::new(case, runtime);
    let mut ours = OurPredictor::new(case);
    let evicts = matches!(case.eviction, EvictionMode::Lru { capacity: CAPACITY });
    let mut number = 0;
    replay.run(|request, rank| {
        let theirs = peer.serve(PeerRequest::new(request, case.eviction), rank);
        ours.serve(request, rank);
        if !evicts {
            assert_equal(
                &format!("{}, request {number}", case.time.name),
                &theirs,
                &ours.found,
            );
        }
        number += 1;
    });
    let theirs = peer.finish();
    let mine = ours.finish();
    if evicts {
        assert!(
            (theirs - mine).abs() < 0.01 * theirs,
            "the peer holds {theirs} blocks, warmroute {mine}"
        );
    } else if let EvictionMode::Lru { .. } = case.eviction {
        assert_eq!(theirs, mine, "number of held blocks");
    }
}

/// A request in the peer's types.
struct PeerRequest {
    locals: Vec<LocalBlockHash>,
    record: PeerRecord,
}

/// The recorded decision.
enum PeerRecord {
    Sequences(Vec<u64>),
    Blocks(Vec<ApproximateLruBlock>),
}

impl PeerRequest {
    fn new(request: &TraceRequest, eviction: EvictionMode) -> Self {
        let locals = peer_prompt(&request.prompt);
        let sequences = request.prompt.sequences().iter().map(|sequence| sequence.0);
        let block = |(&local_hash, sequence_hash)| ApproximateLruBlock {
            local_hash,
            sequence_hash,
        };
        let record = match eviction {
            EvictionMode::Ttl => PeerRecord::Sequences(sequences.collect()),
            EvictionMode::Lru { .. } => {
                PeerRecord::Blocks(locals.iter().zip(sequences).map(block).collect())
            }
        };
        Self { locals, record }
    }
}

struct PeerPredictor<'a> {
    indexer: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    runtime: &'a Runtime,
    live: VecDeque<ApproximateLruLease>,
    eviction: EvictionMode,
    attempts: u64,
}

impl<'a> PeerPredictor<'a> {
    fn new(case: &ApproximateCase, runtime: &'a Runtime) -> Self {
        let ttl = PruneConfig { ttl: UNREACHED_TTL };
        let retention = match case.eviction {
            EvictionMode::Ttl => ApproximateRetentionConfig::Ttl(ttl),
            EvictionMode::Lru { .. } => ApproximateRetentionConfig::Lru { fallback_ttl: ttl },
        };
        let indexer = ThreadPoolIndexer::new_with_metrics_and_approximate_retention(
            ConcurrentRadixTreeCompressed::new(),
            1,
            16,
            None,
            Some(retention),
        );
        if let EvictionMode::Lru { capacity } = case.eviction {
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
            eviction: case.eviction,
            attempts: 0,
        }
    }

    fn serve(&mut self, request: PeerRequest, rank: u32) -> OverlapScores {
        let worker = WorkerWithDpRank::new(u64::from(rank), 0);
        let found = self.indexer.backend().find_matches(&request.locals, false);
        match request.record {
            PeerRecord::Sequences(sequences) => {
                let record = self.indexer.process_routing_decision_hash_slices(
                    worker,
                    &request.locals,
                    &sequences,
                );
                self.runtime.block_on(record).expect("it records");
            }
            PeerRecord::Blocks(blocks) => self.lease(worker, blocks),
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
        if self.live.len() > CONCURRENT {
            self.live
                .pop_front()
                .into_iter()
                .for_each(|lease| lease.release_now());
        }
    }

    /// Ends all requests, waits for the threads, and returns the number of resident blocks.
    fn finish(&mut self) -> f64 {
        self.live.drain(..).for_each(|lease| lease.release_now());
        self.runtime.block_on(self.indexer.flush());
        match self.eviction {
            EvictionMode::Ttl => {
                let sizes = self.runtime.block_on(self.indexer.shard_sizes());
                sizes.iter().map(|size| size.block_count).sum::<usize>() as f64
            }
            EvictionMode::Lru { .. } => {
                let stats = self.runtime.block_on(self.indexer.approximate_lru_stats());
                stats.expect("it counts").resident_blocks as f64
            }
        }
    }
}

struct OurPredictor {
    predictor: std::sync::Arc<Predictor>,
    live: VecDeque<PredictionLease>,
    found: Overlaps,
    buffer: Overlaps,
}

fn rank_of(rank: u32) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(u64::from(rank)),
        rank: DpRank(0),
    }
}

impl OurPredictor {
    fn new(case: &ApproximateCase) -> Self {
        let ttl = TtlPolicy {
            ttl: UNREACHED_TTL,
            max_blocks_per_rank: u64::MAX,
        };
        let (policy, capacity) = match case.eviction {
            EvictionMode::Ttl => (EvictionPolicy::Ttl(ttl), None),
            EvictionMode::Lru { capacity } => (
                EvictionPolicy::Lru {
                    default_blocks: None,
                    fallback: ttl,
                },
                Some(capacity as u64),
            ),
        };
        let predictor = Predictor::new(policy, Instant::now);
        for rank in 0..case.ranks {
            predictor.open(RankSlot(rank), rank_of(rank), capacity);
        }
        Self {
            predictor,
            live: VecDeque::new(),
            found: Overlaps::new(),
            buffer: Overlaps::new(),
        }
    }

    fn serve(&mut self, request: &TraceRequest, rank: u32) {
        self.found.replace_with([]);
        self.predictor
            .raise(&request.prompt, &mut self.found, &mut self.buffer, |_| true);
        self.live.push_back(
            self.predictor
                .record(RankSlot(rank), rank_of(rank), &request.prompt),
        );
        if self.live.len() > CONCURRENT {
            drop(self.live.pop_front());
        }
    }

    /// Ends all requests and returns the number of resident blocks.
    fn finish(&mut self) -> f64 {
        self.live.clear();
        let stats = self.predictor.stats();
        stats.iter().map(|rank| rank.blocks).sum::<u64>() as f64
    }
}
