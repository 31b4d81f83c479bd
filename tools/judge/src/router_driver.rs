//! Drives the router of `warmroute-core` in virtual time. Like a server, it reports to the
//! router: the fleet, KV events, and the tokens and end of each response.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use aisimulate_core::engine::KvEventData;
use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};
use warmroute_core::block::{BlockHashes, CacheSalt, EngineHash, LocalHash, StorageTier};
use warmroute_core::freshness::SourceStatus;
use warmroute_core::health::{HealthChange, HealthTransition, RequestOutcome};
use warmroute_core::index::{KvEvent, PrefixIndex, RankWriter, StoredBlock};
use warmroute_core::load::{CompleteOutput, LoadTracker, PredictionTotals};
use warmroute_core::predict::{EvictionPolicy, Predictor, TtlPolicy};
use warmroute_core::router::{
    PhaseSelection, Placement, PredictorSet, ResponseOrigin, RoutePrompt, RouteRequest, Router,
    RouterSettings, WorkerResponse,
};
use warmroute_core::worker::{
    BlockSize, ModelName, Worker, WorkerCapacity, WorkerEndpoint, WorkerId, WorkerRole,
};

use crate::cases::{CacheSource, JudgeCase};
use crate::simulated_engine::{RequestNumber, RequestOutput};
use crate::traces::BLOCK_TOKENS;
use crate::virtual_clock::VirtualClock;

const MODEL: &str = "simulated";
const PORT: u16 = 8000;
/// Policy of predicted caches. The number of KV blocks is known, so the time to live has no effect.
const PREDICTION_POLICY: EvictionPolicy = EvictionPolicy::Lru {
    default_blocks: None,
    fallback: TtlPolicy {
        ttl: Duration::from_secs(120),
        max_blocks_per_rank: 1 << 20,
    },
};

/// Router, its fleet, and the placements of the running requests.
pub(crate) struct RouterDriver {
    router: Router,
    block_size: BlockSize,
    /// All workers, including a lost one. The position is the number of the worker.
    workers: Vec<Worker>,
    /// Writers of the index, by worker number. A lost worker has none.
    writers: Vec<Option<RankWriter>>,
    active: HashMap<RequestNumber, ActivePlacement>,
    cache_source: CacheSource,
    decisions: DecisionTime,
    /// Number of the worker of each ejection.
    ejected: Vec<usize>,
}

/// Placement of a running request.
struct ActivePlacement {
    placement: Placement,
    worker: usize,
    has_first_token: bool,
    output_tokens: u64,
    /// Prompt tokens that the engine had cached, once it has reported them.
    cached_tokens: Option<usize>,
}

/// Placement of the prompt: on the worker that also decodes, or on a prefill worker.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PromptPlacement {
    /// One worker computes the prompt and generates the answer.
    SingleWorker {
        /// Number of the worker.
        worker: usize,
    },
    /// A prefill worker computes the prompt.
    RemotePrefill {
        /// Number of the worker.
        worker: usize,
    },
}

/// Number of decisions and the time that they took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DecisionTime {
    /// Number of decisions.
    pub(crate) count: u32,
    /// CPU time of all decisions.
    pub(crate) total: Duration,
}

impl RouterDriver {
    /// Creates a router without workers.
    pub(crate) fn new(
        settings: RouterSettings,
        cache_source: CacheSource,
        clock: VirtualClock,
        seed: u64,
    ) -> Result<Self> {
        let load_clock = clock.clone();
        let load = LoadTracker::new(move || load_clock.now());
        let mut router = Router::new(PrefixIndex::new(), load, settings, seed);
        if cache_source == CacheSource::Predictions {
            router = router.with_predictors(PredictorSet {
                without_events: Some(Predictor::new(PREDICTION_POLICY, move || clock.now())),
                ..PredictorSet::default()
            });
        }
        Ok(Self {
            router,
            cache_source,
            block_size: BlockSize::new(BLOCK_TOKENS as u32).context("invalid block size")?,
            workers: Vec::new(),
            writers: Vec::new(),
            active: HashMap::new(),
            decisions: DecisionTime::default(),
            ejected: Vec::new(),
        })
    }

    /// Adds the workers of a case to the fleet.
    pub(crate) fn add_workers(&mut self, case: &JudgeCase) {
        let workers = (0..case.workers).map(|number| self.worker(number, case));
        self.workers = workers.collect();
        self.writers.resize_with(case.workers, || None);
        self.update_fleet(self.workers.clone());
    }

    fn worker(&self, number: usize, case: &JudgeCase) -> Worker {
        let address = Ipv4Addr::from_bits(Ipv4Addr::new(10, 0, 0, 1).to_bits() + number as u32);
        let endpoint = WorkerEndpoint((address, PORT).into());
        let capacity = WorkerCapacity {
            max_num_batched_tokens: Some(case.gpu.max_batched_tokens as u64),
            total_kv_blocks: Some((case.gpu.kv_tokens / BLOCK_TOKENS) as u64),
        };
        let id = WorkerId(number as u64);
        Worker {
            capacity,
            role: case.role(number),
            ..Worker::new(id, endpoint, ModelName::from(MODEL), self.block_size)
        }
    }

    /// Replaces the fleet, in the same order of steps as the server.
    fn update_fleet(&mut self, desired: Vec<Worker>) {
        let change = self.router.fleet().reconcile(desired);
        for member in &change.removed {
            self.writers[worker_number(member.rank.worker)] = None;
            self.router.sources().remove(member.rank);
            self.router.predictors().close_rank(member);
        }
        for member in &change.added {
            self.router.load().join(member);
            self.router.set_block_limits(member);
            self.router.predictors().open_rank(member);
            if self.cache_source == CacheSource::Events {
                let writer = self.router.index().create_writer(member.slot);
                self.writers[worker_number(member.rank.worker)] = Some(writer);
                self.router
                    .set_source_status(member.rank, SourceStatus::EXACT);
            }
        }
        self.router.set_fleet(Arc::new(change.fleet));
        for member in &change.removed {
            self.router.load().leave(member);
        }
    }

    /// Routes a request. With a remote prefill, only the prefill is booked; [`Self::place_decode`]
    /// books the decode.
    pub(crate) fn place(
        &mut self,
        request: RequestNumber,
        prompt: &[u32],
    ) -> Result<PromptPlacement> {
        let mut route_request = self.route_request(prompt);
        if self.has_prefill_workers() {
            let failed = Vec::new();
            route_request.phases = PhaseSelection::PrefillFirst { failed };
        }
        let placement = self.route(route_request)?;
        let prefill = placement.route.prefill();
        let prefill = prefill.map(|prefill| worker_number(prefill.to.rank.worker));
        let decode = worker_number(placement.route.to.rank.worker);
        let worker = prefill.unwrap_or(decode);
        self.insert(request, placement, worker);
        Ok(match prefill {
            Some(worker) => PromptPlacement::RemotePrefill { worker },
            None => PromptPlacement::SingleWorker { worker },
        })
    }

    /// Routes the decode of a request whose remote prefill has completed. Returns the number of the
    /// chosen worker.
    pub(crate) fn place_decode(&mut self, request: RequestNumber, prompt: &[u32]) -> Result<usize> {
        let mut active = self
            .active
            .remove(&request)
            .context("a prefill without placement")?;
        self.router.complete_remote_prefill(&mut active.placement);
        let completed = self.router.completed_prefill(&active.placement.route);
        let completed = completed.context("the prefill worker has left")?;
        drop(active);
        let mut route_request = self.route_request(prompt);
        route_request.phases = PhaseSelection::Decode(Box::new(completed));
        let placement = self.route(route_request)?;
        let worker = worker_number(placement.route.to.rank.worker);
        self.insert(request, placement, worker);
        Ok(worker)
    }

    fn route(&mut self, request: RouteRequest) -> Result<Placement> {
        let start = thread_cpu_time();
        let placement = self.router.route(request)?;
        self.decisions.total += thread_cpu_time().saturating_sub(start);
        self.decisions.count += 1;
        Ok(placement)
    }

    /// Stores the placement of a request. The engine accepts it at once.
    fn insert(&mut self, request: RequestNumber, mut placement: Placement, worker: usize) {
        self.router.confirm_predictions(&mut placement);
        let placement = ActivePlacement {
            placement,
            worker,
            has_first_token: false,
            output_tokens: 0,
            cached_tokens: None,
        };
        self.active.insert(request, placement);
    }

    fn has_prefill_workers(&self) -> bool {
        let mut workers = self.workers.iter();
        workers.any(|worker| worker.role == WorkerRole::Prefill)
    }

    fn route_request(&self, prompt: &[u32]) -> RouteRequest {
        let hashes = BlockHashes::from_tokens(prompt, self.block_size, &CacheSalt::default());
        let model = Some(ModelName::from(MODEL));
        RouteRequest {
            is_streamed: true,
            ..RouteRequest::new(model, RoutePrompt::Hashed(vec![hashes]))
        }
    }

    /// Applies the KV events of a worker. The events of a lost worker are ignored.
    pub(crate) fn apply_kv_events(&mut self, worker: usize, events: &[KvEventData]) {
        let Some(writer) = &mut self.writers[worker] else {
            return;
        };
        for event in events {
            writer.apply(&index_event(event));
        }
    }

    /// Handles a part of a response.
    pub(crate) fn on_output(&mut self, output: &RequestOutput) {
        let Some(active) = self.active.get_mut(&output.request) else {
            return;
        };
        active.cached_tokens = active.cached_tokens.or(output.cached_tokens);
        if output.has_token && active.has_first_token {
            self.router.on_output_tokens(&mut active.placement, 1);
            active.output_tokens += 1;
            if active.output_tokens % BLOCK_TOKENS as u64 == 0 {
                active.placement.predictions.add_output_block();
            }
        } else if output.has_token {
            active.has_first_token = true;
            active.output_tokens = 1;
            active.placement.reservation.on_first_token();
            self.router.learn_first_token(&mut active.placement);
            let router = &self.router;
            let changes = router.report_outcome(&mut active.placement, RequestOutcome::Delivered);
            self.note(&changes);
        }
        if output.is_last
            && let Some(mut ended) = self.active.remove(&output.request)
        {
            let tokens = Some(ended.output_tokens);
            let output = CompleteOutput::Stream { tokens };
            ended.placement.reservation.learn_output(output);
            if let Some(cached) = ended.cached_tokens {
                let placement = &mut ended.placement;
                self.router
                    .apply_reported_cached_tokens(placement, cached as u64);
            }
            self.router.on_completed_response(&ended.placement);
            self.router.finish(ended.placement);
        }
    }

    /// Handles a response without content.
    pub(crate) fn on_answer(&mut self, request: RequestNumber, status: u16) {
        let Some(mut active) = self.active.remove(&request) else {
            return;
        };
        let placement = &mut active.placement;
        let origin = ResponseOrigin::Chosen;
        let response = WorkerResponse { status, origin };
        let mut changes = self.router.on_response(placement, response);
        // Has no effect after a failure.
        changes.extend(self.router.report_outcome(placement, RequestOutcome::Empty));
        self.note(&changes);
        self.router.finish(active.placement);
    }

    /// Handles the disconnection of a client before the first token.
    pub(crate) fn on_disconnect(&mut self, request: RequestNumber) {
        if let Some(mut active) = self.active.remove(&request) {
            let placement = &mut active.placement;
            let changes = self
                .router
                .report_outcome(placement, RequestOutcome::Cancelled);
            self.note(&changes);
            self.router.finish(active.placement);
        }
    }

    /// Passes the time to the router.
    pub(crate) fn on_tick(&mut self) {
        let changes = self.router.on_tick();
        self.note(&changes.health);
    }

    /// Checks the health of the ejected workers.
    pub(crate) fn check_health(&self, is_healthy: impl Fn(usize) -> bool) {
        for worker in self.router.ejected_workers() {
            let is_healthy = is_healthy(worker_number(worker));
            self.router.on_health_check(worker, is_healthy);
        }
    }

    fn note(&mut self, changes: &[HealthTransition]) {
        let ejections = changes
            .iter()
            .filter(|transition| matches!(transition.change, HealthChange::Ejected(_)));
        self.ejected
            .extend(ejections.map(|ejection| worker_number(ejection.rank.worker)));
    }

    /// Removes a worker from the fleet and interrupts its requests.
    pub(crate) fn remove_worker(&mut self, worker: usize) {
        let mut desired = self.workers.clone();
        desired.remove(worker);
        self.update_fleet(desired);
        self.active.retain(|_, active| active.worker != worker);
    }

    /// Adds the removed worker to the fleet again.
    pub(crate) fn restore_workers(&mut self) {
        self.update_fleet(self.workers.clone());
    }

    /// Returns the worker numbers of all ejections.
    pub(crate) fn take_ejected(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.ejected)
    }

    /// Returns the predicted and observed times to first token.
    pub(crate) fn predictions(&self) -> PredictionTotals {
        let calibration = self.router.load().calibration();
        let model = calibration.models.first();
        model.map_or_else(PredictionTotals::default, |it| it.time_to_first_token)
    }

    /// Returns the number of decisions and their time.
    pub(crate) fn decisions(&self) -> DecisionTime {
        self.decisions
    }
}

#[cfg(test)]
impl RouterDriver {
    /// Returns the router.
    pub(crate) fn router(&self) -> &Router {
        &self.router
    }

    /// Returns the maximum of cached tokens of a prompt over all workers.
    pub(crate) fn cached_tokens(&self, prompt: &[u32]) -> u64 {
        let context = self.router.prepare(self.route_request(prompt));
        self.router.best_cached_tokens(&context)
    }
}

/// Returns the CPU time of the thread. Unlike the elapsed time, it does not depend on the load of
/// the machine.
fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn worker_number(worker: WorkerId) -> usize {
    worker.0 as usize
}

/// Converts an event of a simulated engine. The engine hashes tokens like the index.
fn index_event(event: &KvEventData) -> KvEvent {
    match event {
        KvEventData::Stored(stored) => KvEvent::Stored {
            parent: stored.parent_hash.map(EngineHash),
            blocks: stored
                .blocks
                .iter()
                .map(|block| StoredBlock {
                    engine: EngineHash(block.block_hash),
                    local: LocalHash(block.tokens_hash),
                })
                .collect(),
            tier: StorageTier::Device,
        },
        KvEventData::Removed { block_hashes } => KvEvent::Removed {
            blocks: block_hashes.iter().copied().map(EngineHash).collect(),
            tier: StorageTier::Device,
        },
    }
}
