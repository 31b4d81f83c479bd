//! The load of live requests, step by step: bookings by id through the ledger, workers through discovery and the fleet.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prost::Message as _;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use warmroute::block::{BlockHashes, LocalHash, SequenceHash};
use warmroute::discovery::{self, ServedModel};
use warmroute::fleet::{Fleet, Member};
use warmroute::load::ledger::{Attempt, Change, Ledger, Refused, Rules};
use warmroute::load::{Booking, LoadTracker, LoadView, News, RankLoad, Sequences, Until};
use warmroute::replica::{
    Batch, Outcome, Own, Peers, ReplicaId, SnapshotPart, Told as Message, Wish, World,
};
use warmroute::worker::{BlockSize, DpRank, Slot, WorkerId, WorkerRank};

use super::frame::{Check, Deviation, Report, run_cases};

const ONLY_THE_FLEET: &str =
    "only the fleet opens slots; a booking for anybody else is refused and counts nowhere";

/// A place where the reference begins to serve an unknown rank: what we say there, and what it says.
macro_rules! lazy {
    ($case:literal, $at:literal, $ours:expr, $theirs:expr) => {
        Deviation {
            case: $case,
            at: $at,
            ours: $ours,
            theirs: $theirs,
            reason: ONLY_THE_FLEET,
        }
    };
}

/// The load of a rank that runs nothing.
macro_rules! idle {
    ($worker:literal) => {
        concat!(
            r#"{"worker_id":"#,
            $worker,
            r#","dp_rank":0,"active_blocks":0,"active_prefill_tokens":0,"active_requests":0}"#
        )
    };
}

const DEVIATIONS: &[Deviation] = &[
    lazy!(
        "lazy worker registration on add",
        "result of step 0",
        r#""NotServing""#,
        r#""ok""#
    ),
    lazy!(
        "lazy worker registration on add",
        "state after step 0",
        concat!("[", idle!(1), "]"),
        concat!(
            "[",
            idle!(1),
            r#",{"worker_id":9,"dp_rank":0,"active_blocks":2,"active_prefill_tokens":32,"active_requests":1}]"#
        )
    ),
    lazy!(
        "lazy worker registration on add",
        "result of step 1",
        r#""NoChange""#,
        r#""Applied""#
    ),
    lazy!(
        "lazy worker registration on add",
        "state after step 1",
        concat!("[", idle!(1), "]"),
        concat!("[", idle!(1), ",", idle!(9), "]")
    ),
    lazy!(
        "replica add lazily registers unknown worker rank",
        "state after step 0",
        concat!("[", idle!(1), "]"),
        concat!(
            "[",
            idle!(1),
            r#",{"worker_id":5,"dp_rank":3,"active_blocks":2,"active_prefill_tokens":32,"active_requests":1}]"#
        )
    ),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    description: String,
    block_size: u32,
    initial_workers: Vec<Worker>,
    replica_sync: bool,
    router_id: u64,
    stale_request_expiry_s: u64,
    steps: Vec<Step>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Worker {
    worker_id: u64,
    dp_start: u32,
    dp_size: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    step: Op,
    result: Value,
    state_after: Vec<State>,
    elapsed_ms_since_start: u64,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct State {
    worker_id: u64,
    dp_rank: u32,
    active_blocks: u64,
    active_prefill_tokens: u64,
    active_requests: u64,
}

#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
enum Op {
    AddRequest(Request),
    AddRequestIfRegistered(Plain),
    MarkPrefillCompleted {
        request_id: String,
    },
    AddOutputBlock {
        request_id: String,
        decay_fraction: Option<f64>,
    },
    Free {
        request_id: String,
    },
    ProjectWorkerLoads {
        query_sequence_hashes: Vec<u64>,
    },
    AdvanceClock {
        ms: u64,
    },
    ForceExpireAllWorkers {},
    ApplyReplicaEvents {
        events: Vec<Told>,
    },
    RegisterWorker(Worker),
    UpsertWorker(Worker),
    ReconcileWorkers {
        ranges: Vec<(u64, u32, u32)>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    request_id: String,
    worker_id: u64,
    dp_rank: u32,
    prompt_sequence_hashes: Option<Vec<u64>>,
    effective_prefill_tokens: u64,
    track_prefill_tokens: bool,
    /// Told to the load with each block of the answer, as what is left of it.
    #[serde(rename = "expected_output_tokens")]
    _expected_output_tokens: Option<u64>,
    expected_prefill_duration_ms: Option<u64>,
    #[serde(rename = "lora_name")]
    _lora_name: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Plain {
    request_id: String,
    worker_id: u64,
    dp_rank: u32,
    prompt_sequence_hashes: Option<Vec<u64>>,
    effective_prefill_tokens: u64,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Told {
    AddRequest {
        request_id: String,
        router_id: u64,
        worker: (u64, u32),
        token_sequence: Option<Vec<u64>>,
        prefill_tokens: u64,
    },
    MarkPrefillCompleted {
        request_id: String,
        router_id: u64,
        worker: (u64, u32),
    },
    Free {
        request_id: String,
        router_id: u64,
        worker: (u64, u32),
    },
}

#[derive(Serialize)]
struct Projection {
    worker_id: u64,
    dp_rank: u32,
    active_decode_blocks: u64,
    active_prefill_tokens: u64,
    active_requests: u64,
    additional_active_blocks: u64,
    potential_decode_blocks: u64,
}

fn rank((worker, rank): (u64, u32)) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker),
        rank: DpRank(rank),
    }
}

fn named(request: &str) -> Attempt<'_> {
    Attempt { request, number: 0 }
}

/// The cases number the blocks of a prompt; real sequence hashes also tell what comes before.
fn chained(blocks: &[u64]) -> Vec<SequenceHash> {
    let locals = blocks.iter().copied().map(LocalHash).collect();
    BlockHashes::chain(blocks.len() * 16, BlockSize::new(16).unwrap(), locals)
        .sequences()
        .to_vec()
}

/// The workers as discovery reads them, or that it refuses them.
fn discover(workers: &[Worker], block_size: u32) -> Result<Vec<warmroute::worker::Worker>, ()> {
    let model = ServedModel {
        name: "m".into(),
        block_size: BlockSize::new(block_size).unwrap(),
        meets: false,
    };
    let list = workers.iter().enumerate().map(
        |(
            at,
            Worker {
                worker_id,
                dp_start,
                dp_size,
            },
        )| {
            let ranks = format!("{{start: {dp_start}, size: {dp_size}}}");
            format!(
                "- {{id: {worker_id}, endpoint: '10.0.0.1:{}', data_parallel: {ranks}}}\n",
                at + 1
            )
        },
    );
    let text = if workers.is_empty() {
        "[]".to_owned()
    } else {
        list.collect()
    };
    discovery::parse(Path::new("workers"), text.as_bytes(), &[model]).map_err(|_| ())
}

/// A silent router loses its bookings after this time, which no case waits for.
const LEASE: Duration = Duration::from_secs(3600);

/// Another router of the same workers, with its bookings and the messages that it sends.
struct Other {
    tracker: Arc<LoadTracker>,
    ledger: Ledger,
    slots: BTreeMap<WorkerRank, Slot>,
    news: Arc<Mutex<Vec<News>>>,
    own: Own,
}

impl Other {
    fn new(router: u64, now: Arc<Mutex<Instant>>) -> Self {
        let tracker = LoadTracker::new(move || *now.lock());
        let news = Arc::<Mutex<Vec<News>>>::default();
        let noted = news.clone();
        tracker.on_news(move |news| noted.lock().push(news));
        let ledger = Ledger::new(tracker.clone(), Rules::default());
        let own = Own::new(ReplicaId(router), format!("router {router}"));
        Self {
            tracker,
            ledger,
            slots: BTreeMap::new(),
            news,
            own,
        }
    }

    fn run(&mut self, told: Told) {
        match told {
            Told::AddRequest {
                request_id,
                worker,
                token_sequence,
                prefill_tokens,
                ..
            } => {
                let rank = rank(worker);
                let next = Slot(self.slots.len() as u32);
                let slot = *self.slots.entry(rank).or_insert(next);
                if slot == next {
                    self.tracker.open(slot, rank);
                }
                let blocks = token_sequence.unwrap_or_default();
                // A second booking of the same request is refused.
                let _ = self.ledger.add(
                    named(&request_id),
                    vec![booking(slot, rank, &blocks, prefill_tokens)],
                );
            }
            Told::MarkPrefillCompleted {
                request_id, worker, ..
            } if self.is_on(&request_id, worker) => {
                self.ledger.mark_prefill_completed(named(&request_id));
            }
            Told::Free {
                request_id, worker, ..
            } if self.is_on(&request_id, worker) => {
                self.ledger.free(named(&request_id));
            }
            // Only the router that booked a request reports on it, so it never names another worker.
            Told::MarkPrefillCompleted { .. } | Told::Free { .. } => {}
        }
    }

    fn is_on(&self, request: &str, worker: (u64, u32)) -> bool {
        self.ledger
            .get(named(request))
            .is_some_and(|held| held.parts().any(|(_, booked)| booked == rank(worker)))
    }

    fn batches(&mut self) -> Vec<Batch> {
        for news in std::mem::take(&mut *self.news.lock()) {
            self.own.note(&Message::Load(news));
        }
        self.own.batches()
    }
}

impl Told {
    fn router(&self) -> u64 {
        match self {
            Told::AddRequest { router_id, .. }
            | Told::MarkPrefillCompleted { router_id, .. }
            | Told::Free { router_id, .. } => *router_id,
        }
    }
}

fn booking(slot: Slot, rank: WorkerRank, blocks: &[u64], tokens: u64) -> Booking {
    Booking {
        slot,
        rank,
        sequences: chained(blocks).into_iter().collect(),
        prompt_tokens: tokens,
        cached_tokens: 0,
        track_prefill: true,
        prefill_time: None,
        until: Until::End,
    }
}

struct Bench {
    block_size: u32,
    /// Messages of other routers are applied where replicas are synchronized.
    peers: Option<Peers>,
    others: BTreeMap<u64, Other>,
    random: SmallRng,
    now: Arc<Mutex<Instant>>,
    start: Instant,
    tracker: Arc<LoadTracker>,
    ledger: Ledger,
    fleet: Fleet,
    workers: Vec<Worker>,
}

impl Bench {
    fn new(case: &Case) -> Self {
        let start = Instant::now();
        let now = Arc::new(Mutex::new(start));
        let clock = now.clone();
        let tracker = LoadTracker::new(move || *clock.lock());
        let silence = Duration::from_secs(case.stale_request_expiry_s);
        let ledger = Ledger::new(
            tracker.clone(),
            Rules {
                silence,
                ..Rules::default()
            },
        );
        let mut bench = Self {
            block_size: case.block_size,
            peers: case
                .replica_sync
                .then(|| Peers::new(ReplicaId(case.router_id), LEASE)),
            others: BTreeMap::new(),
            random: SmallRng::seed_from_u64(1),
            now,
            start,
            tracker,
            ledger,
            fleet: Fleet::empty(),
            workers: Vec::new(),
        };
        bench.serve(case.initial_workers.clone()).unwrap();
        bench
    }

    /// Changes the fleet, and the load with it, as the keeper does.
    fn serve(&mut self, workers: Vec<Worker>) -> Result<(), ()> {
        let change = self.fleet.reconcile(discover(&workers, self.block_size)?);
        change
            .removed
            .iter()
            .for_each(|member| self.tracker.close(member.slot));
        change
            .added
            .iter()
            .for_each(|member| self.tracker.open(member.slot, member.rank));
        (self.fleet, self.workers) = (change.fleet, workers);
        self.with_peers(|peers, world, now, _| peers.look(world, now));
        Ok(())
    }

    /// The booking of a request; a rank that is not there has no slot, so any number will do.
    fn booking(&self, on: (u64, u32), blocks: Option<&[u64]>, tokens: u64) -> Booking {
        let slot = self.fleet.slot(rank(on)).unwrap_or(Slot(u32::MAX));
        booking(slot, rank(on), blocks.unwrap_or(&[]), tokens)
    }

    /// Takes a step; what comes of it, in the words of the reference.
    fn run(&mut self, step: Op, expected: &Value) -> Value {
        match step {
            Op::AddRequest(request) => {
                let on = (request.worker_id, request.dp_rank);
                let blocks = request.prompt_sequence_hashes.as_deref();
                let booking = Booking {
                    track_prefill: request.track_prefill_tokens,
                    prefill_time: request
                        .expected_prefill_duration_ms
                        .map(Duration::from_millis),
                    ..self.booking(on, blocks, request.effective_prefill_tokens)
                };
                self.add(&request.request_id, booking, expected)
            }
            Op::AddRequestIfRegistered(request) => {
                let on = (request.worker_id, request.dp_rank);
                let blocks = request.prompt_sequence_hashes.as_deref();
                let booking = self.booking(on, blocks, request.effective_prefill_tokens);
                self.add(&request.request_id, booking, expected)
            }
            Op::MarkPrefillCompleted { request_id } => {
                changed(self.ledger.mark_prefill_completed(named(&request_id)))
            }
            Op::AddOutputBlock {
                request_id,
                decay_fraction,
            } => match self.ledger.output_block(named(&request_id), decay_fraction) {
                Change::Applied => json!("ok"),
                _ => json!({ "error": format!("Request {request_id} not found") }),
            },
            Op::Free { request_id } => changed(self.ledger.free(named(&request_id))),
            Op::ProjectWorkerLoads {
                query_sequence_hashes,
            } => self.project(&query_sequence_hashes),
            Op::AdvanceClock { ms } => {
                *self.now.lock() += Duration::from_millis(ms);
                Value::Null
            }
            Op::ForceExpireAllWorkers {} => {
                self.ledger.expire();
                Value::Null
            }
            Op::ApplyReplicaEvents { events } => {
                events.into_iter().for_each(|told| self.follow(told));
                Value::Null
            }
            Op::RegisterWorker(worker) => {
                self.reconcile([&self.workers[..], &[worker]].concat(), expected)
            }
            Op::UpsertWorker(worker) => {
                let others = self
                    .workers
                    .iter()
                    .filter(|known| known.worker_id != worker.worker_id);
                self.reconcile(others.chain([&worker]).cloned().collect(), expected)
            }
            Op::ReconcileWorkers { ranges } => {
                let worker = |(worker_id, dp_start, dp_size)| Worker {
                    worker_id,
                    dp_start,
                    dp_size,
                };
                self.reconcile(ranges.into_iter().map(worker).collect(), expected)
            }
        }
    }

    /// A booking for a rank that is not there is refused.
    fn add(&mut self, request: &str, booking: Booking, expected: &Value) -> Value {
        let asked = booking.rank;
        match self.ledger.add(named(request), vec![booking]) {
            Ok(_) => json!("ok"),
            Err(Refused::NotServing { rank }) => {
                assert_eq!(rank, asked);
                let shown = format!(
                    "WorkerWithDpRank {{ worker_id: {}, dp_rank: {} }}",
                    rank.worker.0, rank.rank.0
                );
                if is_error(expected) {
                    return json!({ "error": format!("Worker {shown} not found") });
                }
                json!("NotServing")
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    /// Discovery refuses lists in its own words.
    fn reconcile(&mut self, workers: Vec<Worker>, expected: &Value) -> Value {
        match self.serve(workers) {
            Ok(()) => json!("ok"),
            Err(()) if is_error(expected) => expected.clone(),
            Err(()) => json!("refused"),
        }
    }

    /// Another router does what the event says and sends it to this one.
    fn follow(&mut self, told: Told) {
        let now = self.now.clone();
        let router = told.router();
        let other = self
            .others
            .entry(router)
            .or_insert_with(|| Other::new(router, now));
        other.run(told);
        let batches = other.batches();
        for batch in batches {
            self.receive(router, &batch);
            // A message may arrive twice.
            self.receive(router, &batch);
        }
    }

    fn receive(&mut self, router: u64, batch: &Batch) {
        let batch = Batch::decode(&batch.encode_to_vec()[..]).unwrap();
        let outcome =
            self.with_peers(|peers, world, now, random| peers.hear(batch, world, now, random));
        if !outcome.wishes.contains(&Wish::Ask(ReplicaId(router))) {
            return;
        }
        for part in self.others[&router].own.snapshot(&[]) {
            let part = SnapshotPart::decode(&part.encode_to_vec()[..]).unwrap();
            self.with_peers(|peers, world, now, random| peers.take(part, world, now, random));
        }
    }

    /// Changes what is known of other routers, as the task of the replica does.
    fn with_peers(
        &mut self,
        work: impl FnOnce(&mut Peers, &World<'_>, Instant, &mut SmallRng) -> Outcome,
    ) -> Outcome {
        let Some(peers) = &mut self.peers else {
            return Outcome::default();
        };
        let fleet = &self.fleet;
        let world = World {
            load: &self.tracker,
            generation: fleet.generation(),
            slot: &|rank| fleet.slot(rank),
            key: None,
            sessions: None,
            overloaded: &|_, _| (),
            first_token: &|_| (),
            routed: &|_| (),
            booked: &|_| (),
        };
        let now = *self.now.lock();
        work(peers, &world, now, &mut self.random)
    }

    fn project(&self, query: &[u64]) -> Value {
        let query = Sequences::from_iter(chained(query));
        let project = |view: &LoadView<'_>| {
            let additional = view.additional(&query);
            let row = |member: &Member| {
                let load = view.load(member.slot, member.rank).unwrap();
                let additional = additional.of(member.slot);
                Projection {
                    worker_id: member.rank.worker.0,
                    dp_rank: member.rank.rank.0,
                    active_decode_blocks: load.active_blocks,
                    active_prefill_tokens: load.active_prefill_tokens,
                    active_requests: load.active_requests,
                    additional_active_blocks: additional,
                    potential_decode_blocks: load.active_blocks + additional,
                }
            };
            let mut rows: Vec<_> = self.fleet.members().map(row).collect();
            rows.sort_by_key(|row| (row.worker_id, row.dp_rank));
            rows
        };
        json!(self.tracker.look(project))
    }

    fn state(&self) -> Vec<State> {
        let state = |load: RankLoad| State {
            worker_id: load.rank.worker.0,
            dp_rank: load.rank.rank.0,
            active_blocks: load.active_blocks,
            active_prefill_tokens: load.active_prefill_tokens,
            active_requests: load.active_requests,
        };
        sorted(self.tracker.snapshot().into_iter().map(state).collect())
    }
}

fn is_error(expected: &Value) -> bool {
    expected
        .as_object()
        .is_some_and(|fields| fields.keys().eq(["error"]))
}

fn changed(change: Change) -> Value {
    json!(if change == Change::Applied {
        "Applied"
    } else {
        "NoChange"
    })
}

fn sorted(mut state: Vec<State>) -> Vec<State> {
    state.sort_by_key(|row| (row.worker_id, row.dp_rank));
    state
}

pub(crate) fn run(text: &str) -> Report {
    run_cases(
        text,
        DEVIATIONS,
        |case: &Case| case.description.clone(),
        check,
    )
}

fn check(case: Case, check: &mut Check) {
    let mut bench = Bench::new(&case);
    for (at, step) in case.steps.into_iter().enumerate() {
        let result = bench.run(step.step, &step.result);
        check.same(format_args!("result of step {at}"), result, step.result);
        check.same(
            format_args!("state after step {at}"),
            bench.state(),
            sorted(step.state_after),
        );
        let elapsed = bench.tracker.now() - bench.start;
        assert_eq!(elapsed.as_millis(), u128::from(step.elapsed_ms_since_start));
    }
}
