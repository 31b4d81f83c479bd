//! Collects the facts about the engines: queries their endpoints, and receives their KV events
//! while they compute a canary.

mod canary;
mod configured;
mod prefill;
mod rank;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::{StreamExt as _, stream};
use reqwest::header::HeaderMap;
use warmroute_core::parity::CanaryVerdict;
use warmroute_core::worker::{DpRank, ModelName, Worker, WorkerRole};
use warmroute_doctor::engine::facts::{
    ConfiguredCache, OverdueStep, WorkerFacts, WorkerOrigin, record_agreeing_workers,
};
use warmroute_doctor::engine::is_reachable;
use warmroute_engines::engine_client::{EngineClient, EngineError, EngineUrl};

use super::progress::{DoctorProgress, OpenPart};
use configured::has_remote_decoders;
use warmroute_server::config::{CanaryHeaders, Config};
use warmroute_server::request::ConfiguredModel;
use warmroute_server::self_test::CanarySuite;

/// Maximum number of workers checked concurrently.
const MAX_CONCURRENT: usize = 32;
/// Time limit of a worker without its ranks, as a multiple of the timeout of one response.
const STEP_FACTOR: u32 = 6;
/// Additional time limit per rank.
const RANK_TIME: Duration = Duration::from_secs(2);

/// Collector of facts about the workers.
pub(super) struct FactCollector<'c> {
    pub(super) config: &'c Config,
    pub(super) workers: &'c [Worker],
    pub(super) client: EngineClient,
    pub(super) models: HashMap<ModelName, Arc<ConfiguredModel>>,
    /// Timeout for responses, events and publishers.
    pub(super) timeout: Duration,
    /// True if canaries are sent.
    pub(super) sends_canaries: bool,
    /// Progress, which is reported while doctor waits.
    pub(super) progress: DoctorProgress,
}

impl FactCollector<'_> {
    /// Returns the facts about every worker, in the order of `workers`.
    pub(super) async fn collect_workers(&self) -> Vec<WorkerFacts> {
        let workers = self.workers;
        let facts = stream::iter(workers).map(async |worker| {
            let deadline = self.timeout * STEP_FACTOR + RANK_TIME * worker.ranks.size.get();
            WorkerFacts {
                origin: self.worker_origin(worker, workers),
                has_remote_decoders: has_remote_decoders(worker, workers),
                ..self.collect_within(worker, deadline).await
            }
        });
        let mut facts: Vec<_> = facts.buffered(MAX_CONCURRENT).collect().await;
        record_agreeing_workers(&mut facts);
        facts
    }

    /// Returns the facts of the steps that are complete at the deadline.
    async fn collect_within(&self, worker: &Worker, deadline: Duration) -> WorkerFacts {
        let part = self.progress.open(
            format!("worker {} at {}", worker.id, worker.endpoint),
            "/health",
        );
        let mut facts = self.initial_facts(worker);
        if tokio::time::timeout(deadline, self.collect_steps(&mut facts, &part))
            .await
            .is_err()
        {
            facts.overdue_step = Some(OverdueStep {
                name: part.current(),
                deadline,
            });
        }
        facts
    }

    /// Returns the facts before any request to the engine.
    fn initial_facts(&self, worker: &Worker) -> WorkerFacts {
        let model = self.model_config(&worker.model);
        WorkerFacts {
            origin: WorkerOrigin::Listed,
            configured: ConfiguredCache {
                block_size: model.and_then(|model| model.block_size),
                total_kv_blocks: worker.capacity.total_kv_blocks,
            },
            has_discovered_sources: false,
            worker: worker.clone(),
            adapters: model.map_or(Vec::new(), |model| model.adapters.clone()),
            has_discovery: self.config.engines.discovery.enabled,
            image_model: self.image_model(&worker.model),
            needs_capacity: self.needs_capacity(),
            health: Err(EngineError::Timeout),
            clock: None,
            models: Err(EngineError::Timeout),
            metrics: Err(EngineError::Timeout),
            publishers: Err(EngineError::Timeout),
            parity: CanaryVerdict::Untested,
            has_agreeing_worker: false,
            bootstrap: None,
            kv_handoff: None,
            has_remote_decoders: false,
            ranks: Vec::new(),
            overdue_step: None,
        }
    }

    /// Fills in the facts step by step, so that those of complete steps remain after a timeout.
    async fn collect_steps(&self, facts: &mut WorkerFacts, part: &OpenPart) {
        let engine = &self.config.engines.http.url(facts.worker.endpoint);
        facts.health = self.client.health(engine).await;
        if !is_reachable(facts) {
            return;
        }
        part.step("/v1/models, /metrics and KV event publishers");
        self.collect_settings(engine, facts).await;
        let model = self.models.get(&facts.worker.model);
        if let Some(suite) = model.and_then(|model| CanarySuite::new(model)) {
            part.step("comparison of tokens");
            let timeout = self.config.engines.parity_check.timeout.get();
            let client = self
                .client
                .with_headers(self.canary_headers(&facts.worker, None));
            facts.parity = suite.compare(&client, engine, timeout).await;
        }
        self.collect_ranks(engine, facts, part).await;
        if facts.worker.role == WorkerRole::Prefill {
            part.step("prefill");
            self.collect_prefill(engine, facts).await;
        }
    }

    /// Fills in the responses of the engine's status pages, and the settings that they report.
    async fn collect_settings(&self, engine: &EngineUrl, facts: &mut WorkerFacts) {
        let (models, mut metrics, mut publishers, date) = tokio::join!(
            self.client.models(engine),
            self.client.metrics(engine),
            self.client.kv_event_sources(engine),
            self.client.server_time(engine),
        );
        // The pages of a shared front end do not describe one worker.
        if !facts.worker.via.is_direct() {
            metrics = Err(EngineError::NotOffered(404));
            publishers = Err(EngineError::NotOffered(404));
        }
        (facts.worker, facts.has_discovered_sources) = self.with_discovered_settings(
            &facts.worker,
            metrics.as_ref().ok(),
            publishers.as_ref().ok(),
        );
        facts.clock = date.map(|engine_time| (engine_time, SystemTime::now()));
        facts.models = models;
        facts.metrics = metrics;
        facts.publishers = publishers;
    }

    /// Returns the routing headers of a canary.
    pub(super) fn canary_headers(&self, worker: &Worker, rank: Option<DpRank>) -> HeaderMap {
        CanaryHeaders::new(self.config).headers(worker, rank, self.workers)
    }

    async fn collect_ranks(&self, engine: &EngineUrl, facts: &mut WorkerFacts, part: &OpenPart) {
        let worker = facts.worker.clone();
        // With several ranks, each request must name its rank.
        let reported = facts.metrics.as_ref().map_or(0, |page| page.caches().len());
        let has_several_ranks = reported > 1 || worker.ranks.size.get() > 1;
        // Ranks may share an engine, so canaries run one after another: the events of one canary
        // must not be attributed to another.
        for rank in worker.ranks.iter() {
            part.step(format!("rank {rank}: KV events and canary"));
            let rank_facts = self
                .collect_rank(engine, &worker, rank, has_several_ranks)
                .await;
            facts.ranks.push(rank_facts);
        }
    }
}
