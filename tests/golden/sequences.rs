//! The load of live requests, step by step: bookings by id through the ledger, workers through discovery and the fleet.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::Value;
use warmroute::block::{BlockHashes, LocalHash, SequenceHash};
use warmroute::discovery::{self, ServedModel};
use warmroute::fleet::Fleet;
use warmroute::load::ledger::{Attempt, Change, Ledger, PeerChange, PeerEvent, Peers, Refused, Rules};
use warmroute::load::{Booking, LoadTracker, Until};
use warmroute::worker::{BlockSize, DpRank, Slot, WorkerId, WorkerRank};

/// Where we differ on purpose. A case is recognised by its steps, not by its name: the rank that a step books is unknown.
/// It is refused, which is asserted, and then the rank's row is missing and the request's later steps change nothing.
const LAZY: &str = "only the fleet opens slots; a booking for anybody else is refused and counts nowhere";

/// What came of a file of cases.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) cases: usize,
    pub(super) passed: usize,
    /// Cases whose difference was asserted, with its reason.
    pub(super) deviations: Vec<(String, &'static str)>,
}

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

#[derive(Deserialize, Debug, PartialEq, PartialOrd)]
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
    MarkPrefillCompleted { request_id: String },
    AddOutputBlock { request_id: String, decay_fraction: Option<f64> },
    Free { request_id: String },
    ProjectWorkerLoads { query_sequence_hashes: Vec<u64> },
    AdvanceClock { ms: u64 },
    ForceExpireAllWorkers,
    ApplyReplicaEvents { events: Vec<Told> },
    RegisterWorker(Worker),
    UpsertWorker(Worker),
    ReconcileWorkers { ranges: Vec<(u64, u32, u32)> },
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
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
    WorkerRank { worker: WorkerId(worker), rank: DpRank(rank) }
}

fn named(request: &str) -> Attempt<'_> {
    Attempt { request, number: 0 }
}

/// The cases number the blocks of a prompt; real sequence hashes also tell what comes before.
fn chained(blocks: &[u64]) -> Vec<SequenceHash> {
    let locals = blocks.iter().copied().map(LocalHash).collect();
    BlockHashes::chain(blocks.len() * 16, BlockSize::new(16).unwrap(), locals).sequences().to_vec()
}

/// The workers as discovery reads them, or that it refuses them.
fn discover(workers: &[Worker], block_size: u32) -> Result<Vec<warmroute::worker::Worker>, ()> {
    let model = ServedModel { name: "m".into(), block_size: BlockSize::new(block_size).unwrap() };
    let list = workers.iter().enumerate().map(|(at, Worker { worker_id, dp_start, dp_size })| {
        let ranks = format!("{{start: {dp_start}, size: {dp_size}}}");
        format!("- {{id: {worker_id}, endpoint: '10.0.0.1:{}', data_parallel: {ranks}}}\n", at + 1)
    });
    let text = if workers.is_empty() { "[]".to_owned() } else { list.collect() };
    discovery::parse(Path::new("workers"), text.as_bytes(), &[model]).map_err(|_| ())
}

struct Bench {
    block_size: u32,
    peers: Peers,
    now: Arc<Mutex<Instant>>,
    start: Instant,
    tracker: Arc<LoadTracker>,
    ledger: Ledger,
    fleet: Fleet,
    workers: Vec<Worker>,
    /// Requests and ranks that only the reference knows.
    ghosts: BTreeMap<String, WorkerRank>,
}

impl Bench {
    fn new(case: &Case) -> Self {
        let start = Instant::now();
        let now = Arc::new(Mutex::new(start));
        let clock = now.clone();
        let tracker = LoadTracker::new(move || *clock.lock());
        let silence = Duration::from_secs(case.stale_request_expiry_s);
        let ledger = Ledger::new(tracker.clone(), Rules { silence, ..Rules::default() });
        let mut bench = Self {
            block_size: case.block_size,
            peers: Peers { own: case.router_id, mirror: case.replica_sync },
            now,
            start,
            tracker,
            ledger,
            fleet: Fleet::empty(),
            workers: Vec::new(),
            ghosts: BTreeMap::new(),
        };
        bench.serve(case.initial_workers.clone()).unwrap();
        bench
    }

    /// Changes the fleet, and the load with it, as the keeper does.
    fn serve(&mut self, workers: Vec<Worker>) -> Result<(), ()> {
        let change = self.fleet.reconcile(discover(&workers, self.block_size)?);
        change.removed.iter().for_each(|member| self.tracker.close(member.slot));
        change.added.iter().for_each(|member| self.tracker.open(member.slot, member.rank));
        (self.fleet, self.workers) = (change.fleet, workers);
        Ok(())
    }

    /// The booking of a request; a rank that is not there has no slot, so any number will do.
    fn booking(&self, on: (u64, u32), blocks: Option<&[u64]>, tokens: u64) -> Booking {
        Booking {
            slot: self.fleet.slot(rank(on)).unwrap_or(Slot(u32::MAX)),
            rank: rank(on),
            sequences: chained(blocks.unwrap_or(&[])).into(),
            prompt_tokens: tokens,
            cached_tokens: 0,
            track_prefill: true,
            prefill_time: None,
            until: Until::End,
        }
    }

    /// Books where the reference would begin to serve an unknown rank.
    fn add(&mut self, request: &str, booking: Booking, expected: &Value) {
        let (rank, result) = (booking.rank, self.ledger.add(named(request), vec![booking]));
        match result {
            Err(Refused::NotServing { rank: refused }) => {
                assert_eq!((refused, expected), (rank, &Value::from("ok")));
                self.ghosts.insert(request.into(), rank);
            }
            result => assert_eq!(result.is_ok(), expected == "ok", "{result:?}"),
        }
    }

    /// A change is that of the reference, except that of a request we refused.
    fn changed(&self, request: &str, change: Change, expected: &str) {
        match self.ghosts.contains_key(request) {
            true => assert_eq!(change, Change::None, "{request} was refused"),
            false => assert_eq!(if change == Change::Applied { "Applied" } else { "NoChange" }, expected, "{request}"),
        }
    }

    fn run(&mut self, step: &Step) {
        let text = || step.result.as_str().unwrap();
        let ok = |result: Result<(), ()>| assert_eq!(result.is_ok(), step.result == "ok", "{}", step.result);
        match &step.step {
            Op::AddRequest(request) => {
                let on = (request.worker_id, request.dp_rank);
                let blocks = request.prompt_sequence_hashes.as_deref();
                let booking = Booking {
                    track_prefill: request.track_prefill_tokens,
                    prefill_time: request.expected_prefill_duration_ms.map(Duration::from_millis),
                    ..self.booking(on, blocks, request.effective_prefill_tokens)
                };
                self.add(&request.request_id, booking, &step.result);
            }
            Op::AddRequestIfRegistered(request) => {
                let on = (request.worker_id, request.dp_rank);
                let blocks = request.prompt_sequence_hashes.as_deref();
                let booking = self.booking(on, blocks, request.effective_prefill_tokens);
                ok(self.ledger.add(named(&request.request_id), vec![booking]).map(drop).map_err(drop));
            }
            Op::MarkPrefillCompleted { request_id } => {
                let change = self.ledger.mark_prefill_completed(named(request_id));
                self.changed(request_id, change, text());
            }
            Op::AddOutputBlock { request_id, decay_fraction } => {
                let change = self.ledger.output_block(named(request_id), *decay_fraction);
                self.changed(request_id, change, if step.result == "ok" { "Applied" } else { "NoChange" });
            }
            Op::Free { request_id } => {
                let change = self.ledger.free(named(request_id));
                self.changed(request_id, change, text());
                self.ghosts.remove(request_id);
            }
            Op::ProjectWorkerLoads { query_sequence_hashes } => self.project(query_sequence_hashes, &step.result),
            Op::AdvanceClock { ms } => *self.now.lock() += Duration::from_millis(*ms),
            Op::ForceExpireAllWorkers => {
                self.ledger.expire();
            }
            Op::ApplyReplicaEvents { events } => events.iter().for_each(|told| self.follow(told)),
            Op::RegisterWorker(worker) => ok(self.serve([&self.workers[..], &[worker.clone()]].concat())),
            Op::UpsertWorker(worker) => {
                let others = self.workers.iter().filter(|known| known.worker_id != worker.worker_id);
                ok(self.serve(others.chain([worker]).cloned().collect()));
            }
            Op::ReconcileWorkers { ranges } => {
                let worker = |&(worker_id, dp_start, dp_size)| Worker { worker_id, dp_start, dp_size };
                ok(self.serve(ranges.iter().map(worker).collect()));
            }
        }
        let elapsed = self.tracker.now() - self.start;
        assert_eq!(elapsed.as_millis(), u128::from(step.elapsed_ms_since_start));
    }

    fn follow(&mut self, told: &Told) {
        let (request, router, change) = match told {
            Told::AddRequest { request_id, router_id, worker, token_sequence, prefill_tokens } => {
                if self.peers.mirror && *router_id != self.peers.own && self.fleet.slot(rank(*worker)).is_none() {
                    self.ghosts.insert(request_id.clone(), rank(*worker));
                }
                let booking = self.booking(*worker, token_sequence.as_deref(), *prefill_tokens);
                (request_id, *router_id, PeerChange::Add(booking))
            }
            Told::MarkPrefillCompleted { request_id, router_id, worker } => {
                (request_id, *router_id, PeerChange::PrefillCompleted(rank(*worker)))
            }
            Told::Free { request_id, router_id, worker } => (request_id, *router_id, PeerChange::Free(rank(*worker))),
        };
        let event = PeerEvent { router, request: request.clone(), attempt: 0, change };
        let change = self.ledger.follow(&self.peers, event);
        assert!(change == Change::None || !self.ghosts.contains_key(request), "{request} was refused");
    }

    fn project(&self, query: &[u64], expected: &Value) {
        let query = chained(query);
        let rows: Vec<Projection> = serde_json::from_value(expected.clone()).unwrap();
        assert_eq!(rows.len(), self.fleet.members().count());
        let checked = self.tracker.book_with(|view| {
            for row in rows {
                let rank = rank((row.worker_id, row.dp_rank));
                let slot = self.fleet.slot(rank).unwrap();
                let load = view.load(slot, rank).unwrap();
                let additional = view.additional_blocks(slot, &query);
                assert_eq!(load.active_blocks, row.active_decode_blocks);
                assert_eq!(load.active_prefill_tokens, row.active_prefill_tokens);
                assert_eq!(load.active_requests, row.active_requests);
                assert_eq!(additional, row.additional_active_blocks);
                assert_eq!(load.active_blocks + additional, row.potential_decode_blocks);
            }
            Err::<Vec<Booking>, _>("only looked")
        });
        assert!(checked.is_err());
    }

    fn state(&self) -> Vec<State> {
        let state = self.tracker.snapshot().into_iter().map(|load| State {
            worker_id: load.rank.worker.0,
            dp_rank: load.rank.rank.0,
            active_blocks: load.active_blocks,
            active_prefill_tokens: load.active_prefill_tokens,
            active_requests: load.active_requests,
        });
        sorted(state.collect())
    }
}

fn sorted(mut state: Vec<State>) -> Vec<State> {
    state.sort_by_key(|row| (row.worker_id, row.dp_rank));
    state
}

/// Runs one case; the reason if it differs on purpose.
fn play(case: Case) -> Option<&'static str> {
    let mut bench = Bench::new(&case);
    let mut unknown: Vec<WorkerRank> = Vec::new();
    for (at, step) in case.steps.into_iter().enumerate() {
        let place = format!("{}, step {at}", case.description);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bench.run(&step)));
        assert!(caught.is_ok(), "{place}");
        unknown.extend(bench.ghosts.values());
        let is_unknown = |row: &State| unknown.contains(&rank((row.worker_id, row.dp_rank)));
        let (ghosts, expected): (Vec<_>, Vec<_>) = step.state_after.into_iter().partition(is_unknown);
        assert!(ghosts.is_empty() || bench.state().iter().all(|row| !is_unknown(row)), "{place}");
        let ghost = |rank: &WorkerRank| ghosts.iter().any(|row| row.worker_id == rank.worker.0);
        assert!(bench.ghosts.values().all(ghost), "{place}: the reference does not serve it either");
        assert_eq!(bench.state(), sorted(expected), "{place}");
    }
    (!unknown.is_empty()).then_some(LAZY)
}

/// Runs all cases of a file.
pub(super) fn run(text: &str) -> Report {
    let mut report = Report::default();
    for case in super::cases::<Case>(text) {
        report.cases += 1;
        let name = case.description.clone();
        match play(case) {
            None => report.passed += 1,
            Some(reason) => report.deviations.push((name, reason)),
        }
    }
    report
}

#[test]
fn the_load_is_counted_as_the_field_counts_it() {
    let report = run(include_str!("sequences.json"));
    let named: Vec<&str> = report.deviations.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(named, ["lazy worker registration on add", "replica add lazily registers unknown worker rank"]);
    assert!(report.deviations.iter().all(|(_, reason)| *reason == LAZY));
    assert_eq!((report.cases, report.passed), (26, 24));
}
