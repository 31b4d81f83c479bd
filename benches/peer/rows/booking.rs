//! A whole decision, from 256 tokens to a booked worker rank, and its release. On both sides, one
//! rank holds the prompt and must be chosen. The peer runs a decision in several tasks, so the time
//! is the CPU time of the process. The wall-clock time, including wake-ups, is a separate row.

use dynamo_kv_router::identity::RoutingPartitionId;
use dynamo_kv_router::indexer::KvIndexerInterface;
use dynamo_kv_router::protocols::RoutingConstraints;
use dynamo_kv_router::services::indexer::backend::Indexer;
use dynamo_kv_router::services::selection::{
    PromptRequest, SelectAndReserveRequest, SelectionCacheConfig, SelectionCore, WorkerRequest,
};
use dynamo_kv_router::{KvRouterConfig, WorkerSelectionPolicy};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use warmroute_core::block::{BlockHashes, CacheSalt};
use warmroute_core::fleet::Fleet;
use warmroute_core::freshness::SourceStatus;
use warmroute_core::index::{PrefixIndex, RankWriter};
use warmroute_core::load::LoadTracker;
use warmroute_core::router::{Mode, RoutePrompt, RouteRequest, Router, RouterSettings};
use warmroute_core::worker::{RankSlot, Worker, WorkerEndpoint, WorkerId};

use crate::rows::StaticMeasure;
use crate::sides::{our_events, peer_events};
use crate::trace::BLOCK;
use crate::workload::{CacheChange, WorkerEvent};
use crate::{PeerBench, memory};
use warmroute_testbed::comparison::{ComparisonTable, measure_wall, process_cpu_nanos};

const GOAL: Option<f64> = Some(0.1);

const ROWS: [(u64, StaticMeasure, StaticMeasure); 4] = [
    (
        8,
        StaticMeasure::new("choose + book + release, 8 ranks", "µs CPU", GOAL),
        StaticMeasure::new("choose + book + release, 8 ranks, wall", "µs", None),
    ),
    (
        64,
        StaticMeasure::new("choose + book + release, 64 ranks", "µs CPU", GOAL),
        StaticMeasure::new("choose + book + release, 64 ranks, wall", "µs", None),
    ),
    (
        512,
        StaticMeasure::new("choose + book + release, 512 ranks", "µs CPU", GOAL),
        StaticMeasure::new("choose + book + release, 512 ranks, wall", "µs", None),
    ),
    (
        2_048,
        StaticMeasure::new("choose + book + release, 2,048 ranks", "µs CPU", GOAL),
        StaticMeasure::new("choose + book + release, 2,048 ranks, wall", "µs", None),
    ),
];

/// Prompt lengths in tokens for the rows that count allocations.
const COUNTED: [(u32, StaticMeasure); 4] = [
    (
        256,
        StaticMeasure::new(
            "allocations of a warm decision, 256 tokens, 64 ranks",
            "calls",
            None,
        ),
    ),
    (
        4_096,
        StaticMeasure::new(
            "allocations of a warm decision, 4k tokens, 64 ranks",
            "calls",
            None,
        ),
    ),
    (
        32_768,
        StaticMeasure::new(
            "allocations of a warm decision, 32k tokens, 64 ranks",
            "calls",
            None,
        ),
    ),
    (
        131_072,
        StaticMeasure::new(
            "allocations of a warm decision, 128k tokens, 64 ranks",
            "calls",
            None,
        ),
    ),
];

const TIMES: u32 = 500;

/// The rank that holds the prompt.
const WARM: u32 = 1;

/// Measures the rows of this module.
pub fn run(bench: &PeerBench, table: &mut ComparisonTable) {
    for (ranks, cpu, wall) in ROWS {
        if bench.args.wants_any(&[cpu.name, wall.name]) {
            if !raise_file_limit(ranks) {
                eprintln!(
                    "{}: skipped: the peer needs more open files than allowed",
                    cpu.name
                );
                continue;
            }
            measure_row(bench, table, cpu, wall, ranks);
        }
    }
    for (tokens, row) in COUNTED {
        if bench.args.wants(row.name) {
            count(table, row, tokens);
        }
    }
}

/// Raises the limit of open files. The peer opens sockets for the events of every worker, and
/// rejects a worker if it cannot open them.
fn raise_file_limit(ranks: u64) -> bool {
    let needed = ranks * 16 + 4_096;
    let allowed = || getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if allowed() < needed {
        _ = setrlimit(
            Resource::Nofile,
            Rlimit {
                current: Some(needed),
                maximum: Some(needed),
            },
        );
    }
    allowed() >= needed
}

fn prompt(tokens: u32) -> Vec<u32> {
    (1..=tokens).collect()
}

fn measure_row(
    bench: &PeerBench,
    table: &mut ComparisonTable,
    cpu: StaticMeasure,
    by_wall: StaticMeasure,
    ranks: u64,
) {
    let tokens = prompt(256);
    let mut peer = PeerRouter::new(ranks, &tokens);
    let ours = OurRouter::new(ranks, &tokens);
    let mut rounds: [[Vec<f64>; 2]; 2] = Default::default();
    let per_decision = f64::from(TIMES) * 1e3;
    for round in 0..=bench.args.rounds() {
        let mut took = [[0.0; 2]; 2];
        let start = process_cpu_nanos();
        took[1][0] = measure_wall(|| (0..TIMES).for_each(|_| peer.decide(&tokens)));
        took[0][0] = process_cpu_nanos() - start;
        let start = process_cpu_nanos();
        took[1][1] = measure_wall(|| (0..TIMES).for_each(|_| ours.decide(&tokens)));
        took[0][1] = process_cpu_nanos() - start;
        if round > 0 {
            for (kept, took) in rounds.iter_mut().flatten().zip(took.iter().flatten()) {
                kept.push(took / per_decision);
            }
        }
    }
    for (row, [theirs, ours]) in [cpu, by_wall].into_iter().zip(&rounds) {
        if bench.args.wants(row.name) {
            table.add(row, theirs, ours);
        }
    }
}

/// Counts the allocations of a decision. They must not grow with the prompt.
fn count(table: &mut ComparisonTable, row: StaticMeasure, tokens: u32) {
    let tokens = prompt(tokens);
    let mut peer = PeerRouter::new(64, &tokens);
    let ours = OurRouter::new(64, &tokens);
    let request = ours.request(&tokens);
    peer.decide(&tokens);
    ours.route(request.clone());
    let theirs = memory::count_allocations(|| peer.decide(&tokens));
    let mine = memory::count_allocations(|| ours.route(request));
    eprintln!(
        "    of {} bytes by the peer (which includes hashing), of {} by warmroute",
        theirs.bytes, mine.bytes
    );
    table.add(row, &[theirs.calls as f64], &[mine.calls as f64]);
}

/// Returns the event that stores the prompt on the warm rank.
fn stored_event(tokens: &[u32], rank: u32) -> WorkerEvent {
    let hashes = BlockHashes::from_tokens(tokens, BLOCK, &CacheSalt::default());
    let blocks = hashes
        .locals()
        .iter()
        .copied()
        .zip(hashes.sequences().iter().copied())
        .collect();
    WorkerEvent {
        rank,
        change: CacheChange::Stored {
            parent: None,
            blocks,
        },
    }
}

struct PeerRouter {
    core: SelectionCore,
    runtime: Runtime,
    decisions: u64,
}

impl PeerRouter {
    fn new(ranks: u64, tokens: &[u32]) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime starts");
        let config = KvRouterConfig {
            use_kv_events: true,
            router_queue_threshold: None,
            ..Default::default()
        };
        let policy = |config: &KvRouterConfig, label| {
            WorkerSelectionPolicy::reference(config.clone(), label)
        };
        let core = SelectionCore::try_new_local(
            config,
            1,
            CancellationToken::new(),
            SelectionCacheConfig::default(),
            std::sync::Arc::new(move |config, role, _| {
                policy(config, role.default_selector_label())
            }),
        )
        .expect("its core starts");
        runtime.block_on(async {
            for worker_id in 0..ranks {
                let worker = WorkerRequest {
                    worker_id,
                    endpoint: Some(format!("http://worker-{worker_id}:8000")),
                    kv_events_endpoint: Some(format!("tcp://127.0.0.1:{}", 40_000 + worker_id)),
                    block_size: Some(16),
                    max_num_batched_tokens: Some(8_192),
                    ..WorkerRequest::default()
                };
                core.upsert_worker(worker)
                    .await
                    .expect("the peer accepts workers");
            }
            let partition = RoutingPartitionId::new("default", "default");
            let indexer = core
                .partition(&partition)
                .expect("it has workers")
                .indexer()
                .clone();
            for event in peer_events(&[stored_event(tokens, WARM)]) {
                indexer
                    .apply_event_routed(event)
                    .await
                    .expect("the peer accepts events");
            }
            if let Indexer::Single { primary, .. } = &indexer {
                primary.flush().await;
            }
        });
        Self {
            core,
            runtime,
            decisions: 0,
        }
    }

    fn decide(&mut self, tokens: &[u32]) {
        self.decisions += 1;
        let id = format!("bench-{}", self.decisions);
        let request = SelectAndReserveRequest {
            model_name: "default".to_string(),
            routing_group: "default".to_string(),
            selection_id: Some(id.clone()),
            prompt: PromptRequest {
                token_ids: Some(tokens.to_vec()),
                ..PromptRequest::default()
            },
            router_config_override: None,
            expected_output_tokens: None,
            priority_jump: None,
            strict_priority: None,
            session_id: None,
            session_context: None,
            affinity_target: None,
            pinned_worker: None,
            allowed_worker_ids: None,
            routing_constraints: RoutingConstraints::default(),
        };
        let chosen = self.runtime.block_on(async {
            let chosen = self
                .core
                .select_and_reserve(request)
                .await
                .expect("it selects");
            self.core.free_reservation(&id).await.expect("it frees");
            chosen
        });
        assert_eq!(
            chosen.worker_id,
            u64::from(WARM),
            "the peer chooses the warm rank"
        );
    }
}

impl Drop for PeerRouter {
    fn drop(&mut self) {
        // Otherwise the listeners would keep running and use CPU time during the next measurement.
        self.core.shutdown();
    }
}

struct OurRouter {
    router: Router,
    _writers: Vec<RankWriter>,
}

fn worker(id: u64) -> Worker {
    let address = std::net::SocketAddr::from(([10, 0, (id >> 8) as u8, id as u8], 8000));
    Worker::new(WorkerId(id), WorkerEndpoint(address), "m".into(), BLOCK)
}

impl OurRouter {
    fn new(ranks: u64, tokens: &[u32]) -> Self {
        let index = PrefixIndex::new();
        let load = LoadTracker::new(std::time::Instant::now);
        let fleet = Fleet::empty().reconcile((0..ranks).map(worker).collect());
        for member in &fleet.added {
            load.join(member);
        }
        let mut writers: Vec<_> = (0..ranks)
            .map(|slot| index.create_writer(RankSlot(slot as u32)))
            .collect();
        let warm = fleet
            .added
            .iter()
            .find(|member| member.rank.worker == WorkerId(u64::from(WARM)));
        let slot = warm.expect("it is in the fleet").slot;
        for (slot, event) in our_events(&[stored_event(tokens, slot.0)]) {
            writers[slot as usize].apply(&event);
        }
        let router = Router::new(index, load, RouterSettings::default(), 7);
        router.set_fleet(fleet.fleet.into());
        // Sets the state after all event sources have caught up.
        fleet
            .added
            .iter()
            .for_each(|member| router.set_source_status(member.rank, SourceStatus::EXACT));
        Self {
            router,
            _writers: writers,
        }
    }

    fn request(&self, tokens: &[u32]) -> RouteRequest {
        let hashes = BlockHashes::from_tokens(tokens, BLOCK, &CacheSalt::default());
        RouteRequest::new(Some("m".into()), RoutePrompt::Hashed(vec![hashes]))
    }

    fn decide(&self, tokens: &[u32]) {
        self.route(self.request(tokens));
    }

    fn route(&self, request: RouteRequest) {
        let placement = self.router.route(request).expect("a worker is chosen");
        assert_eq!(
            placement.route.to.rank.worker,
            WorkerId(u64::from(WARM)),
            "warmroute chooses the warm rank"
        );
        assert_eq!(placement.route.mode, Mode::Exact, "the index is exact");
    }
}
