//! Load of active requests, step by step. Bookings use ids through the ledger, and workers come
//! through discovery and the fleet.

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
use warmroute_core::block::{BlockHashes, LocalHash, SequenceHash};
use warmroute_core::fleet::{Fleet, FleetMember};
use warmroute_core::load::ledger::{
    BookingLedger, LedgerChange, LedgerError, LedgerRules, RequestAttempt,
};
use warmroute_core::load::{
    BookingEnd, LoadBooking, LoadListener, LoadTracker, LoadView, PromptSequences, RankLoad,
    ReservationEvent,
};
use warmroute_core::worker::{
    BlockSize, DpRank, RankSlot, Worker, WorkerEndpoint, WorkerId, WorkerRank,
};
use warmroute_server::cluster::replica::{
    Batch, LocalView, PeerAction, PeerTable, PeerUpdate, ReplicaEvent as Message, ReplicaId,
    ReplicaOutbox, SnapshotPart,
};
use warmroute_server::fleet::discovery::{self, WorkerModel};

use super::frame::{CaseCheck, CheckReport, GoldenDeviation, run_cases};

const UNKNOWN_RANK_REASON: &str =
    "only the fleet opens slots; a booking for another rank is rejected and not counted";

/// Deviation in which the reference adds an unknown rank on first use.
macro_rules! unknown_rank {
    ($case:literal, $at:literal, $ours:expr, $theirs:expr) => {
        GoldenDeviation {
            case: $case,
            at: $at,
            ours: $ours,
            theirs: $theirs,
            reason: UNKNOWN_RANK_REASON,
        }
    };
}

/// Load of an idle rank.
macro_rules! idle {
    ($worker:literal) => {
        concat!(
            r#"{"worker_id":"#,
            $worker,
            r#","dp_rank":0,"active_blocks":0,"active_prefill_tokens":0,"active_requests":0}"#
        )
    };
}

const DEVIATIONS: &[GoldenDeviation] = &[
    unknown_rank!(
        "lazy worker registration on add",
        "result of step 0",
        r#""NotServing""#,
        r#""ok""#
    ),
    unknown_rank!(
        "lazy worker registration on add",
        "state after step 0",
        concat!("[", idle!(1), "]"),
        concat!(
            "[",
            idle!(1),
            r#",{"worker_id":9,"dp_rank":0,"active_blocks":2,"active_prefill_tokens":32,"active_requests":1}]"#
        )
    ),
    unknown_rank!(
        "lazy worker registration on add",
        "result of step 1",
        r#""NoChange""#,
        r#""Applied""#
    ),
    unknown_rank!(
        "lazy worker registration on add",
        "state after step 1",
        concat!("[", idle!(1), "]"),
        concat!("[", idle!(1), ",", idle!(9), "]")
    ),
    unknown_rank!(
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
struct SequenceCase {
    description: String,
    block_size: u32,
    initial_workers: Vec<SequenceWorker>,
    replica_sync: bool,
    router_id: u64,
    stale_request_expiry_s: u64,
    steps: Vec<SequenceStep>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct SequenceWorker {
    worker_id: u64,
    dp_start: u32,
    dp_size: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SequenceStep {
    step: SequenceOp,
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
enum SequenceOp {
    AddRequest(SequenceRequest),
    AddRequestIfRegistered(PlainRequest),
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
        events: Vec<RemoteEvent>,
    },
    RegisterWorker(SequenceWorker),
    UpsertWorker(SequenceWorker),
    ReconcileWorkers {
        ranges: Vec<(u64, u32, u32)>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SequenceRequest {
    request_id: String,
    worker_id: u64,
    dp_rank: u32,
    prompt_sequence_hashes: Option<Vec<u64>>,
    effective_prefill_tokens: u64,
    track_prefill_tokens: bool,
    /// Remaining expected output, reported with each output block.
    #[serde(rename = "expected_output_tokens")]
    _expected_output_tokens: Option<u64>,
    expected_prefill_duration_ms: Option<u64>,
    #[serde(rename = "lora_name")]
    _lora_name: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlainRequest {
    request_id: String,
    worker_id: u64,
    dp_rank: u32,
    prompt_sequence_hashes: Option<Vec<u64>>,
    effective_prefill_tokens: u64,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum RemoteEvent {
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
struct LoadProjection {
    worker_id: u64,
    dp_rank: u32,
    active_decode_blocks: u64,
    active_prefill_tokens: u64,
    active_requests: u64,
    additional_active_blocks: u64,
    potential_decode_blocks: u64,
}

/// Returns the worker and rank of a pair in the golden file.
fn rank(pair: (u64, u32)) -> WorkerRank {
    let (worker, rank) = pair;
    WorkerRank {
        worker: WorkerId(worker),
        rank: DpRank(rank),
    }
}

fn member(slot: RankSlot, rank: WorkerRank) -> FleetMember {
    let endpoint = WorkerEndpoint(([10, 0, 0, 1], 1).into());
    let block_size = BlockSize::new(1).unwrap();
    let worker = Worker::new(rank.worker, endpoint, "m".into(), block_size).into();
    FleetMember { slot, rank, worker }
}

fn named(request: &str) -> RequestAttempt<'_> {
    RequestAttempt { request, number: 0 }
}

/// Returns sequence hashes for block numbers. The cases number the blocks of a prompt, but real
/// sequence hashes include the preceding blocks.
fn chained(blocks: &[u64]) -> Vec<SequenceHash> {
    let locals = blocks.iter().copied().map(LocalHash).collect();
    BlockHashes::from_locals(blocks.len() * 16, BlockSize::new(16).unwrap(), locals)
        .sequences()
        .to_vec()
}

/// Parses the workers as discovery does. Fails if discovery rejects them.
fn discover(
    workers: &[SequenceWorker],
    block_size: u32,
) -> Result<Vec<warmroute_core::worker::Worker>, ()> {
    let model = WorkerModel {
        name: "m".into(),
        block_size: BlockSize::new(block_size).unwrap(),
        uses_bootstrap: false,
    };
    let list = workers.iter().enumerate().map(
        |(
            at,
            SequenceWorker {
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

/// Lease of another router's bookings. No case waits for its end.
const LEASE: Duration = Duration::from_secs(3600);

/// Another router of the same workers, with its bookings and outgoing messages.
struct OtherRouter {
    tracker: Arc<LoadTracker>,
    ledger: BookingLedger,
    slots: BTreeMap<WorkerRank, RankSlot>,
    events: Arc<Mutex<Vec<ReservationEvent>>>,
    outbox: ReplicaOutbox,
}

/// Records the changes of reservations.
struct EventLog(Arc<Mutex<Vec<ReservationEvent>>>);

impl LoadListener for EventLog {
    fn wants_reservation_events(&self) -> bool {
        true
    }

    fn on_reservation_event(&self, event: ReservationEvent) {
        self.0.lock().push(event);
    }
}

impl OtherRouter {
    fn new(router: u64, now: Arc<Mutex<Instant>>) -> Self {
        let events = Arc::<Mutex<Vec<ReservationEvent>>>::default();
        let log = Arc::new(EventLog(events.clone()));
        let tracker = LoadTracker::with_listener(move || *now.lock(), log);
        let ledger = BookingLedger::new(tracker.clone(), LedgerRules::default());
        let outbox = ReplicaOutbox::new(ReplicaId(router), format!("router {router}"), None);
        Self {
            tracker,
            ledger,
            slots: BTreeMap::new(),
            events,
            outbox,
        }
    }

    fn run(&mut self, event: RemoteEvent) {
        match event {
            RemoteEvent::AddRequest {
                request_id,
                worker,
                token_sequence,
                prefill_tokens,
                ..
            } => {
                let rank = rank(worker);
                let next = RankSlot(self.slots.len() as u32);
                let slot = *self.slots.entry(rank).or_insert(next);
                if slot == next {
                    self.tracker.join(&member(slot, rank));
                }
                let blocks = token_sequence.unwrap_or_default();
                // A second booking of the same request is rejected.
                let _ = self.ledger.add(
                    named(&request_id),
                    vec![booking(slot, rank, &blocks, prefill_tokens)],
                );
            }
            RemoteEvent::MarkPrefillCompleted {
                request_id, worker, ..
            } if self.is_on(&request_id, worker) => {
                self.ledger.mark_prefill_completed(named(&request_id));
            }
            RemoteEvent::Free {
                request_id, worker, ..
            } if self.is_on(&request_id, worker) => {
                self.ledger.free(named(&request_id));
            }
            // Only the router that booked a request reports on it, so its worker never changes.
            RemoteEvent::MarkPrefillCompleted { .. } | RemoteEvent::Free { .. } => {}
        }
    }

    fn is_on(&self, request: &str, worker: (u64, u32)) -> bool {
        self.ledger.get(named(request)).is_some_and(|held| {
            held.booked_slots()
                .any(|(_, booked)| booked == rank(worker))
        })
    }

    fn batches(&mut self) -> Vec<Batch> {
        for event in std::mem::take(&mut *self.events.lock()) {
            self.outbox.record(&Message::Load(event));
        }
        self.outbox.take_batches()
    }
}

impl RemoteEvent {
    fn router(&self) -> u64 {
        match self {
            RemoteEvent::AddRequest { router_id, .. }
            | RemoteEvent::MarkPrefillCompleted { router_id, .. }
            | RemoteEvent::Free { router_id, .. } => *router_id,
        }
    }
}

fn booking(slot: RankSlot, rank: WorkerRank, blocks: &[u64], tokens: u64) -> LoadBooking {
    LoadBooking {
        slot,
        rank,
        sequences: chained(blocks).into_iter().collect(),
        prompt_tokens: tokens,
        cached_tokens: 0,
        track_prefill: true,
        prefill_time: None,
        content_time: None,
        end: BookingEnd::RequestEnd,
    }
}

struct SequenceHarness {
    block_size: u32,
    /// State of other routers, if replica sync is enabled.
    peers: Option<PeerTable>,
    others: BTreeMap<u64, OtherRouter>,
    random: SmallRng,
    now: Arc<Mutex<Instant>>,
    start: Instant,
    tracker: Arc<LoadTracker>,
    ledger: BookingLedger,
    fleet: Fleet,
    workers: Vec<SequenceWorker>,
}

impl SequenceHarness {
    fn new(case: &SequenceCase) -> Self {
        let start = Instant::now();
        let now = Arc::new(Mutex::new(start));
        let clock = now.clone();
        let tracker = LoadTracker::new(move || *clock.lock());
        let silence = Duration::from_secs(case.stale_request_expiry_s);
        let ledger = BookingLedger::new(
            tracker.clone(),
            LedgerRules {
                idle_timeout: silence,
                ..LedgerRules::default()
            },
        );
        let mut harness = Self {
            block_size: case.block_size,
            peers: case
                .replica_sync
                .then(|| PeerTable::new(ReplicaId(case.router_id), LEASE)),
            others: BTreeMap::new(),
            random: SmallRng::seed_from_u64(1),
            now,
            start,
            tracker,
            ledger,
            fleet: Fleet::empty(),
            workers: Vec::new(),
        };
        harness.serve(case.initial_workers.clone()).unwrap();
        harness
    }

    /// Replaces the workers, and changes fleet and load as the fleet controller does.
    fn serve(&mut self, workers: Vec<SequenceWorker>) -> Result<(), ()> {
        let change = self.fleet.reconcile(discover(&workers, self.block_size)?);
        change
            .removed
            .iter()
            .for_each(|member| self.tracker.leave(member));
        let added = change.added.iter();
        added.for_each(|member| self.tracker.join(member));
        (self.fleet, self.workers) = (change.fleet, workers);
        self.with_peers(|peers, view, now, _| peers.tick(view, now));
        Ok(())
    }

    /// Creates the booking of a request. An absent rank has no slot, so any slot number will do.
    fn booking(&self, on: (u64, u32), blocks: Option<&[u64]>, tokens: u64) -> LoadBooking {
        let slot = self.fleet.slot(rank(on)).unwrap_or(RankSlot(u32::MAX));
        booking(slot, rank(on), blocks.unwrap_or(&[]), tokens)
    }

    fn add_output_block(&mut self, request_id: &str, decay_fraction: Option<f64>) -> Value {
        let request = named(request_id);
        match self.ledger.add_output_block(request, decay_fraction) {
            LedgerChange::Applied => json!("ok"),
            _ => json!({ "error": format!("Request {request_id} not found") }),
        }
    }

    /// Runs a step and returns its result in the reference's format.
    fn run(&mut self, step: SequenceOp, expected: &Value) -> Value {
        match step {
            SequenceOp::AddRequest(request) => {
                let on = (request.worker_id, request.dp_rank);
                let blocks = request.prompt_sequence_hashes.as_deref();
                let booking = LoadBooking {
                    track_prefill: request.track_prefill_tokens,
                    prefill_time: request
                        .expected_prefill_duration_ms
                        .map(Duration::from_millis),
                    ..self.booking(on, blocks, request.effective_prefill_tokens)
                };
                self.add(&request.request_id, booking, expected)
            }
            SequenceOp::AddRequestIfRegistered(request) => {
                let on = (request.worker_id, request.dp_rank);
                let blocks = request.prompt_sequence_hashes.as_deref();
                let booking = self.booking(on, blocks, request.effective_prefill_tokens);
                self.add(&request.request_id, booking, expected)
            }
            SequenceOp::MarkPrefillCompleted { request_id } => {
                changed(self.ledger.mark_prefill_completed(named(&request_id)))
            }
            SequenceOp::AddOutputBlock {
                request_id,
                decay_fraction,
            } => self.add_output_block(&request_id, decay_fraction),
            SequenceOp::Free { request_id } => changed(self.ledger.free(named(&request_id))),
            SequenceOp::ProjectWorkerLoads {
                query_sequence_hashes,
            } => self.project(&query_sequence_hashes),
            SequenceOp::AdvanceClock { ms } => {
                *self.now.lock() += Duration::from_millis(ms);
                Value::Null
            }
            SequenceOp::ForceExpireAllWorkers {} => {
                self.ledger.expire();
                Value::Null
            }
            SequenceOp::ApplyReplicaEvents { events } => {
                events.into_iter().for_each(|event| self.apply_event(event));
                Value::Null
            }
            SequenceOp::RegisterWorker(worker) => {
                self.reconcile([&self.workers[..], &[worker]].concat(), expected)
            }
            SequenceOp::UpsertWorker(worker) => {
                let is_other = |known: &&SequenceWorker| known.worker_id != worker.worker_id;
                let others = self.workers.iter().filter(is_other);
                self.reconcile(others.chain([&worker]).cloned().collect(), expected)
            }
            SequenceOp::ReconcileWorkers { ranges } => {
                let worker = |(worker_id, dp_start, dp_size)| SequenceWorker {
                    worker_id,
                    dp_start,
                    dp_size,
                };
                self.reconcile(ranges.into_iter().map(worker).collect(), expected)
            }
        }
    }

    /// Adds a booking. A booking for an absent rank is rejected.
    fn add(&mut self, request: &str, booking: LoadBooking, expected: &Value) -> Value {
        let requested = booking.rank;
        match self.ledger.add(named(request), vec![booking]) {
            Ok(_) => json!("ok"),
            Err(LedgerError::NotServing { rank }) => {
                assert_eq!(rank, requested);
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

    /// Replaces the workers. Discovery reports rejected lists with its own messages.
    fn reconcile(&mut self, workers: Vec<SequenceWorker>, expected: &Value) -> Value {
        match self.serve(workers) {
            Ok(()) => json!("ok"),
            Err(()) if is_error(expected) => expected.clone(),
            Err(()) => json!("refused"),
        }
    }

    /// Applies an event at another router, which sends it to this one.
    fn apply_event(&mut self, event: RemoteEvent) {
        let now = self.now.clone();
        let router = event.router();
        let other = self
            .others
            .entry(router)
            .or_insert_with(|| OtherRouter::new(router, now));
        other.run(event);
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
            self.with_peers(|peers, view, now, random| peers.on_batch(batch, view, now, random));
        if !outcome
            .actions
            .contains(&PeerAction::FetchSnapshot(ReplicaId(router)))
        {
            return;
        }
        for part in self.others[&router].outbox.snapshot(&[]) {
            let part = SnapshotPart::decode(&part.encode_to_vec()[..]).unwrap();
            self.with_peers(|peers, view, now, random| {
                peers.on_snapshot_part(part, view, now, random)
            });
        }
    }

    /// Changes the state of other routers as the replica task does.
    fn with_peers(
        &mut self,
        work: impl FnOnce(&mut PeerTable, &LocalView<'_>, Instant, &mut SmallRng) -> PeerUpdate,
    ) -> PeerUpdate {
        let Some(peers) = &mut self.peers else {
            return PeerUpdate::default();
        };
        let fleet = &self.fleet;
        let view = LocalView {
            load: &self.tracker,
            slot: &|rank| fleet.slot(rank),
            key: None,
            sessions: None,
            stored_responses: None,
            on_overloaded: &|_, _| (),
            on_first_token: &|_| (),
            on_routed: &|_| (),
            on_booked: &|_| (),
        };
        let now = *self.now.lock();
        work(peers, &view, now, &mut self.random)
    }

    fn project(&self, query: &[u64]) -> Value {
        let query = PromptSequences::from_iter(chained(query));
        let project = |view: &LoadView<'_>| {
            let additional = view.additional(&query);
            let row = |member: &FleetMember| {
                let load = view.load(member.slot, member.rank).unwrap();
                let additional = additional.for_slot(member.slot);
                LoadProjection {
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
        json!(self.tracker.read(project))
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

fn changed(change: LedgerChange) -> Value {
    json!(if change == LedgerChange::Applied {
        "Applied"
    } else {
        "NoChange"
    })
}

fn sorted(mut state: Vec<State>) -> Vec<State> {
    state.sort_by_key(|row| (row.worker_id, row.dp_rank));
    state
}

pub(crate) fn run(text: &str) -> CheckReport {
    run_cases(
        text,
        DEVIATIONS,
        |case: &SequenceCase| case.description.clone(),
        check,
    )
}

fn check(case: SequenceCase, check: &mut CaseCheck) {
    let mut harness = SequenceHarness::new(&case);
    for (at, step) in case.steps.into_iter().enumerate() {
        let result = harness.run(step.step, &step.result);
        check.same(format_args!("result of step {at}"), result, step.result);
        check.same(
            format_args!("state after step {at}"),
            harness.state(),
            sorted(step.state_after),
        );
        let elapsed = harness.tracker.now() - harness.start;
        assert_eq!(elapsed.as_millis(), u128::from(step.elapsed_ms_since_start));
    }
}
