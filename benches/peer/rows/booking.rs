//! A whole decision: from 256 tokens to a booked worker rank, and the release of it. Each side knows that one rank holds
//! the prompt, and must choose that. The peer hands a decision to tasks of its own, so the time is the CPU of the process;
//! by the wall clock, with the wake-ups that a request waits for, it is a row of its own.

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
use warmroute::block::{BlockHashes, Salt};
use warmroute::fleet::Fleet;
use warmroute::index::{PrefixIndex, RankWriter};
use warmroute::load::LoadTracker;
use warmroute::router::{Mode, Prompt, RouteRequest, Router, RouterSettings};
use warmroute::trust::Standing;
use warmroute::worker::{Endpoint, Slot, Worker, WorkerId};

use crate::duel::{Table, process_cpu, wall};
use crate::rows::Goal;
use crate::sides::{our_events, peer_events};
use crate::workload::{BLOCK, Change, Event};
use crate::{Bench, memory};

const GOAL: Option<f64> = Some(0.1);

const ROWS: [(u64, Goal, Goal); 4] = [
    (
        8,
        ("choose + book + release, 8 ranks", "µs CPU", GOAL),
        ("choose + book + release, 8 ranks, wall", "µs", None),
    ),
    (
        64,
        ("choose + book + release, 64 ranks", "µs CPU", GOAL),
        ("choose + book + release, 64 ranks, wall", "µs", None),
    ),
    (
        512,
        ("choose + book + release, 512 ranks", "µs CPU", GOAL),
        ("choose + book + release, 512 ranks, wall", "µs", None),
    ),
    (
        2_048,
        ("choose + book + release, 2,048 ranks", "µs CPU", GOAL),
        ("choose + book + release, 2,048 ranks, wall", "µs", None),
    ),
];

/// Prompts, in tokens, whose decisions are counted in calls of the allocator.
const COUNTED: [(u32, Goal); 4] = [
    (
        256,
        (
            "allocations of a warm decision, 256 tokens, 64 ranks",
            "calls",
            None,
        ),
    ),
    (
        4_096,
        (
            "allocations of a warm decision, 4k tokens, 64 ranks",
            "calls",
            None,
        ),
    ),
    (
        32_768,
        (
            "allocations of a warm decision, 32k tokens, 64 ranks",
            "calls",
            None,
        ),
    ),
    (
        131_072,
        (
            "allocations of a warm decision, 128k tokens, 64 ranks",
            "calls",
            None,
        ),
    ),
];

const TIMES: u32 = 500;

/// The rank that holds the prompt.
const WARM: u32 = 1;

/// The rows of this file.
pub fn run(bench: &Bench, table: &mut Table) {
    for (ranks, cpu, wall) in ROWS {
        if bench.args.wants_any(&[cpu.0, wall.0]) {
            if !has_files(ranks) {
                eprintln!(
                    "{}: left out, because the peer opens more files than are allowed",
                    cpu.0
                );
                continue;
            }
            duel(bench, table, (cpu, wall), ranks);
        }
    }
    for (tokens, row) in COUNTED {
        if bench.args.wants(row.0) {
            count(table, row, tokens);
        }
    }
}

/// The peer follows the events of every worker by sockets of its own; without them it takes nobody.
fn has_files(ranks: u64) -> bool {
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

fn duel(bench: &Bench, table: &mut Table, (cpu, by_wall): (Goal, Goal), ranks: u64) {
    let tokens = prompt(256);
    let mut peer = Peer::new(ranks, &tokens);
    let ours = Ours::new(ranks, &tokens);
    let mut rounds: [[Vec<f64>; 2]; 2] = Default::default();
    let per_decision = f64::from(TIMES) * 1e3;
    for round in 0..=bench.args.rounds() {
        let mut took = [[0.0; 2]; 2];
        let start = process_cpu();
        took[1][0] = wall(|| (0..TIMES).for_each(|_| peer.decide(&tokens)));
        took[0][0] = process_cpu() - start;
        let start = process_cpu();
        took[1][1] = wall(|| (0..TIMES).for_each(|_| ours.decide(&tokens)));
        took[0][1] = process_cpu() - start;
        if round > 0 {
            for (kept, took) in rounds.iter_mut().flatten().zip(took.iter().flatten()) {
                kept.push(took / per_decision);
            }
        }
    }
    for (row, [theirs, ours]) in [cpu, by_wall].into_iter().zip(&rounds) {
        if bench.args.wants(row.0) {
            table.enter(row, theirs, ours);
        }
    }
}

/// A decision asks the allocator as often for a long prompt as for a short one, or it would grow with the prompt.
fn count(table: &mut Table, row: Goal, tokens: u32) {
    let tokens = prompt(tokens);
    let mut peer = Peer::new(64, &tokens);
    let ours = Ours::new(64, &tokens);
    let request = ours.request(&tokens);
    peer.decide(&tokens);
    ours.route(request.clone());
    let theirs = memory::asked(|| peer.decide(&tokens));
    let mine = memory::asked(|| ours.route(request));
    eprintln!(
        "    of {} bytes by the peer (which hashes as well), of {} by us",
        theirs.bytes, mine.bytes
    );
    table.enter(row, &[theirs.calls as f64], &[mine.calls as f64]);
}

/// The event by which the warm rank tells of the prompt.
fn stored(tokens: &[u32], rank: u32) -> Event {
    let hashes = BlockHashes::of(tokens, BLOCK, &Salt::default());
    let blocks = hashes
        .locals()
        .iter()
        .copied()
        .zip(hashes.sequences().iter().copied())
        .collect();
    Event {
        rank,
        change: Change::Stored {
            parent: None,
            blocks,
        },
    }
}

struct Peer {
    core: SelectionCore,
    runtime: Runtime,
    decisions: u64,
}

impl Peer {
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
                core.upsert_worker(worker).await.expect("it takes workers");
            }
            let partition = RoutingPartitionId::new("default", "default");
            let indexer = core
                .partition(&partition)
                .expect("it has workers")
                .indexer()
                .clone();
            for event in peer_events(&[stored(tokens, WARM)]) {
                indexer
                    .apply_event_routed(event)
                    .await
                    .expect("it takes events");
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
            "the peer chooses who holds the prompt"
        );
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Its listeners would go on, and take time from whoever is measured next.
        self.core.shutdown();
    }
}

struct Ours {
    router: Router,
    _writers: Vec<RankWriter>,
}

fn worker(id: u64) -> Worker {
    let address = std::net::SocketAddr::from(([10, 0, (id >> 8) as u8, id as u8], 8000));
    Worker::new(WorkerId(id), Endpoint(address), "m".into(), BLOCK)
}

impl Ours {
    fn new(ranks: u64, tokens: &[u32]) -> Self {
        let (index, load) = (
            PrefixIndex::new(),
            LoadTracker::new(std::time::Instant::now),
        );
        let fleet = Fleet::empty().reconcile((0..ranks).map(worker).collect());
        for member in &fleet.added {
            load.open(member.slot, member.rank);
        }
        let mut writers: Vec<_> = (0..ranks)
            .map(|slot| index.join(Slot(slot as u32)))
            .collect();
        let warm = fleet
            .added
            .iter()
            .find(|member| member.rank.worker == WorkerId(u64::from(WARM)));
        let slot = warm.expect("it is in the fleet").slot;
        for (slot, event) in our_events(&[stored(tokens, slot.0)]) {
            writers[slot as usize].apply(&event);
        }
        let router = Router::new(index, load, RouterSettings::default(), 7);
        router.publish(fleet.fleet.into());
        // As it is when all sources have caught up.
        fleet
            .added
            .iter()
            .for_each(|member| router.set_trust(member.rank, Standing::EXACT));
        Self {
            router,
            _writers: writers,
        }
    }

    fn request(&self, tokens: &[u32]) -> RouteRequest {
        let hashes = BlockHashes::of(tokens, BLOCK, &Salt::default());
        RouteRequest::new(Some("m".into()), Prompt::Hashed(vec![hashes]))
    }

    fn decide(&self, tokens: &[u32]) {
        self.route(self.request(tokens));
    }

    fn route(&self, request: RouteRequest) {
        let booked = self.router.route(request).expect("somebody is chosen");
        assert_eq!(
            booked.route.to.rank.worker,
            WorkerId(u64::from(WARM)),
            "we choose who holds the prompt"
        );
        assert_eq!(booked.route.mode, Mode::Exact, "by what was told");
    }
}
