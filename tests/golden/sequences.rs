//! The load of live requests, step by step.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use warmroute::block::{BlockHashes, LocalHash, SequenceHash};
use warmroute::load::{Booking, LoadTracker, Reservation, Until};
use warmroute::worker::{BlockSize, DpRank, Slot, WorkerId, WorkerRank};

use super::frame::{Report, run_cases};

const OUTPUT: &str = "output blocks are not counted yet";
const DURATION: &str = "prefill does not shrink with time yet: no durations are estimated";
const EXPIRY: &str = "a reservation ends when it is dropped; there is nothing to expire";
const REPLICA: &str = "loads of peers are not mirrored yet";

/// Cases that are not run.
const NOT_RUN: &[(&str, &str)] = &[
    ("unknown request ids", OUTPUT),
    ("output block with decay fraction weights unique suffix (prompt+outputs)", OUTPUT),
    ("decay when prompts are identical (no unique prompt suffix)", OUTPUT),
    ("decayed prompt weight persists for a later identical request", OUTPUT),
    ("mixed modeled and unmodeled prefills: only the anchor decays", DURATION),
    ("unmodeled anchor never decays", DURATION),
    ("out-of-order modeled completion shifts the anchor forward", DURATION),
    ("forced expiry across workers", EXPIRY),
    ("exactly 300 s old is not expired; 300.001 s is", EXPIRY),
    ("replica events from a peer mirror state", REPLICA),
    ("replica free for wrong worker ignored; duplicate add ignored", REPLICA),
    ("replica add lazily registers unknown worker rank", REPLICA),
    ("lazy worker registration on add", "only the fleet opens slots; a booking for anybody else counts nowhere"),
    ("register/upsert/reconcile topology", "membership is the fleet's, and tested there"),
];

/// All fields of the steps that are run; a flattened struct cannot refuse others itself.
const FIELDS: &[&str] = &[
    "op",
    "request_id",
    "worker_id",
    "dp_rank",
    "prompt_sequence_hashes",
    "effective_prefill_tokens",
    "track_prefill_tokens",
    "expected_output_tokens",
    "expected_prefill_duration_ms",
    "lora_name",
    "query_sequence_hashes",
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    description: String,
    #[serde(rename = "block_size")]
    _block_size: u32,
    initial_workers: Vec<Worker>,
    #[serde(rename = "replica_sync")]
    _replica_sync: bool,
    #[serde(rename = "router_id")]
    _router_id: u64,
    #[serde(rename = "stale_request_expiry_s")]
    _stale_request_expiry_s: u64,
    steps: Vec<Value>,
}

#[derive(Deserialize)]
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
    #[serde(rename = "elapsed_ms_since_start")]
    _elapsed: u64,
}

#[derive(Deserialize, Debug, PartialEq)]
#[serde(deny_unknown_fields)]
struct State {
    worker_id: u64,
    dp_rank: u32,
    active_blocks: u64,
    active_prefill_tokens: u64,
    active_requests: u64,
}

#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum Op {
    AddRequest {
        #[serde(flatten)]
        request: Request,
        track_prefill_tokens: bool,
        expected_output_tokens: Option<u64>,
        expected_prefill_duration_ms: Option<u64>,
        #[serde(rename = "lora_name")]
        _lora_name: Option<String>,
    },
    AddRequestIfRegistered(Request),
    MarkPrefillCompleted {
        request_id: String,
    },
    Free {
        request_id: String,
    },
    ProjectWorkerLoads {
        query_sequence_hashes: Vec<u64>,
    },
}

#[derive(Deserialize)]
struct Request {
    request_id: String,
    worker_id: u64,
    dp_rank: u32,
    prompt_sequence_hashes: Option<Vec<u64>>,
    effective_prefill_tokens: u64,
}

impl Request {
    /// Its booking, but for the slot.
    fn booking(&self) -> Booking {
        Booking {
            slot: Slot(0),
            rank: rank(self.worker_id, self.dp_rank),
            sequences: chained(self.prompt_sequence_hashes.as_deref().unwrap_or(&[])).into(),
            prompt_tokens: self.effective_prefill_tokens,
            cached_tokens: 0,
            track_prefill: true,
            prefill_time: None,
            until: Until::End,
        }
    }
}

fn rank(worker: u64, rank: u32) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker), rank: DpRank(rank) }
}

/// The cases number the blocks of a prompt; real sequence hashes also tell what comes before.
fn chained(blocks: &[u64]) -> Vec<SequenceHash> {
    let locals = blocks.iter().copied().map(LocalHash).collect();
    BlockHashes::chain(blocks.len() * 16, BlockSize::new(16).unwrap(), locals).sequences().to_vec()
}

struct Bench {
    tracker: Arc<LoadTracker>,
    slots: Vec<WorkerRank>,
    live: BTreeMap<String, Reservation>,
}

impl Bench {
    fn new(workers: &[Worker]) -> Self {
        let ranks = workers.iter().flat_map(|worker| {
            (worker.dp_start..worker.dp_start + worker.dp_size).map(|number| rank(worker.worker_id, number))
        });
        let bench =
            Self { tracker: LoadTracker::new(std::time::Instant::now), slots: ranks.collect(), live: BTreeMap::new() };
        for (slot, rank) in bench.slots.iter().enumerate() {
            bench.tracker.open(Slot(slot as u32), *rank);
        }
        bench
    }

    /// Books; `false` if the rank is not there.
    fn book(&mut self, id: &str, booking: Booking) -> bool {
        let Some(slot) = self.slots.iter().position(|known| *known == booking.rank) else { return false };
        let booking = Booking { slot: Slot(slot as u32), ..booking };
        let reservation = self.tracker.book_with(|_| Ok::<_, ()>(vec![booking])).unwrap();
        assert!(self.live.insert(id.into(), reservation).is_none());
        true
    }

    fn run(&mut self, step: &Step, case: &str) {
        match &step.step {
            Op::AddRequest {
                request,
                track_prefill_tokens,
                expected_output_tokens,
                expected_prefill_duration_ms,
                ..
            } => {
                assert_eq!((*expected_output_tokens, *expected_prefill_duration_ms), (None, None), "{case}");
                let booking = Booking { track_prefill: *track_prefill_tokens, ..request.booking() };
                assert!(self.book(&request.request_id, booking), "{case}");
            }
            Op::AddRequestIfRegistered(request) => {
                let booked = self.book(&request.request_id, request.booking());
                assert_eq!(booked, step.result == "ok", "{case}");
            }
            Op::MarkPrefillCompleted { request_id } => {
                self.live.get_mut(request_id).into_iter().for_each(|held| drop(held.first_token()));
            }
            Op::Free { request_id } => {
                self.live.remove(request_id);
            }
            Op::ProjectWorkerLoads { query_sequence_hashes } => self.project(query_sequence_hashes, &step.result, case),
        }
        let state = self.tracker.snapshot().into_iter().map(|load| State {
            worker_id: load.rank.worker.0,
            dp_rank: load.rank.rank.0,
            active_blocks: load.active_blocks,
            active_prefill_tokens: load.active_prefill_tokens,
            active_requests: load.active_requests,
        });
        assert_eq!(state.collect::<Vec<_>>(), step.state_after, "{case}");
    }

    fn project(&self, query: &[u64], expected: &Value, case: &str) {
        let query = chained(query);
        let rows = expected.as_array().unwrap();
        assert_eq!(rows.len(), self.slots.len(), "{case}");
        let checked = self.tracker.book_with(|view| {
            for row in rows {
                let number = |key: &str| row[key].as_u64().unwrap();
                let rank = rank(number("worker_id"), number("dp_rank") as u32);
                let slot = Slot(self.slots.iter().position(|known| *known == rank).unwrap() as u32);
                let load = view.load(slot, rank).unwrap();
                let additional = view.additional_blocks(slot, &query);
                assert_eq!(load.active_blocks, number("active_decode_blocks"), "{case}");
                assert_eq!(load.active_prefill_tokens, number("active_prefill_tokens"), "{case}");
                assert_eq!(load.active_requests, number("active_requests"), "{case}");
                assert_eq!(additional, number("additional_active_blocks"), "{case}");
                assert_eq!(load.active_blocks + additional, number("potential_decode_blocks"), "{case}");
            }
            Err::<Vec<Booking>, _>("only looked")
        });
        assert!(checked.is_err());
    }
}

pub(crate) fn run(text: &str) -> Report {
    run_cases(text, &[], |case: &Case| case.description.clone(), |case, _| {
        if NOT_RUN.iter().any(|(name, _)| *name == case.description) {
            return;
        }
        let mut bench = Bench::new(&case.initial_workers);
        for step in case.steps {
            let shown = step.to_string();
            let fields = step["step"].as_object().unwrap().keys();
            fields.for_each(|field| assert!(FIELDS.contains(&field.as_str()), "unknown field {field} in {shown}"));
            let step: Step = serde_json::from_value(step).unwrap_or_else(|problem| panic!("{problem} in {shown}"));
            bench.run(&step, &case.description);
        }
    })
}
