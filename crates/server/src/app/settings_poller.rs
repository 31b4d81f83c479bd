//! Polls the settings of engines: when a worker joins, when it may have been restarted, and
//! periodically.
//!
//! Engines without these endpoints are supported. Only readiness waits for responses, once at
//! startup.

mod responses;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::watch;
use warmroute_core::engine_settings::EngineSettings;
use warmroute_core::health::HealthSignal;
use warmroute_core::router::Router;
use warmroute_core::worker::{ModelName, WorkerEndpoint, WorkerId};
use warmroute_engines::engine_client::EngineError;
use warmroute_metrics::{Metrics, count_outcome};

use super::background::BackgroundTasks;
use super::poll_config::{PollConfig, PollConfigReceiver};
use super::reload::Reloader;
use super::worker_schedule::{WorkerIncarnation, WorkerSchedule};
use crate::config::EngineDiscoveryConfig;
use responses::{EngineResponses, ListedModels};

pub use responses::parse_engine_settings;

/// Worker id, and the endpoint that is queried.
pub(super) type EngineKey = (WorkerId, WorkerEndpoint);

/// Settings reported by all engines.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct EngineReports {
    /// Settings of each engine that reported any.
    pub(super) settings: HashMap<EngineKey, EngineSettings>,
    /// Engines that were queried, with or without a response.
    pub(super) queried: HashSet<EngineKey>,
    /// True if polling is disabled.
    pub(super) is_disabled: bool,
}

/// Interval of checks for new workers.
const SCAN_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum number of concurrent queries.
const MAX_CONCURRENT_QUERIES: usize = 16;

/// Poller of engine settings.
struct EngineSettingsPoller {
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    reports: watch::Sender<Arc<EngineReports>>,
}

/// Polling state of an engine.
#[derive(Default)]
struct PolledEngine {
    schedule: WorkerSchedule,
    /// Whether the engine has listed its model.
    has_listed_model: bool,
}

type PendingQueries = FuturesUnordered<BoxFuture<'static, (EngineKey, EngineResponses)>>;

/// Starts the poller, which publishes to `reports`.
pub(super) fn start(
    tasks: &mut BackgroundTasks,
    reloader: &Reloader,
    reports: watch::Sender<Arc<EngineReports>>,
) {
    let config_rx = PollConfig::watch(reloader, |config, _| config.engines.discovery.clone());
    let poller = Arc::new(EngineSettingsPoller {
        router: reloader.router().clone(),
        metrics: reloader.metrics.clone(),
        reports,
    });
    tasks.supervise("engine_settings", move || {
        poller.clone().run(config_rx.clone())
    });
}

impl EngineSettingsPoller {
    /// Queries due engines until the task is cancelled.
    async fn run(
        self: Arc<Self>,
        mut config_rx: PollConfigReceiver<EngineDiscoveryConfig>,
    ) -> anyhow::Result<()> {
        let mut known: HashMap<EngineKey, PolledEngine> = HashMap::new();
        let mut queries = PendingQueries::new();
        let mut ticks = tokio::time::interval(SCAN_INTERVAL);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                Some((key, responses)) = queries.next(), if !queries.is_empty() => {
                    if let Some(known) = known.get_mut(&key) {
                        known.schedule.finish(responses.is_retryable());
                        if let Ok(models) = &responses.models {
                            let is_lost = models.lost_model(&mut known.has_listed_model);
                            self.router.set_signal(key.0, HealthSignal::ModelList, is_lost);
                        }
                        self.apply_response(key, responses);
                    }
                }
                changed = config_rx.changed() => {
                    changed?;
                    // Running queries use the old settings, so all engines are queried again.
                    known.clear();
                    queries = PendingQueries::new();
                }
            }
            // The value is not marked as seen, so that a concurrent change triggers another
            // iteration.
            let poll_config = config_rx.borrow().clone();
            if !poll_config.settings.enabled {
                self.reports.send_if_modified(|reports| {
                    !std::mem::replace(reports, disabled()).is_disabled
                });
                continue;
            }
            self.retain(&mut known);
            let limit = MAX_CONCURRENT_QUERIES.saturating_sub(queries.len());
            for (key, model) in self.due_engines(&mut known, limit) {
                if let Some(known) = known.get_mut(&key) {
                    known.schedule.start(poll_config.settings.interval.get());
                }
                queries.push(Box::pin(query_engine(
                    poll_config.clone(),
                    self.metrics.clone(),
                    key,
                    model,
                )));
            }
        }
    }

    /// Removes the engines that left the fleet, and their settings.
    fn retain(&self, known: &mut HashMap<EngineKey, PolledEngine>) {
        let fleet = self.router.fleet();
        let is_member = |key: &EngineKey| {
            fleet
                .worker(key.0)
                .is_some_and(|worker| worker.endpoint == key.1)
        };
        known.retain(|key, _| is_member(key));
        self.reports.send_if_modified(|reports| {
            let all = || reports.settings.keys().chain(&reports.queried);
            if !reports.is_disabled && all().all(is_member) {
                return false;
            }
            let reports = Arc::make_mut(reports);
            reports.is_disabled = false;
            reports.settings.retain(|key, _| is_member(key));
            reports.queried.retain(|key| is_member(key));
            true
        });
    }

    /// Returns the engines to query now, at most `limit`. Engines that were never queried come first.
    fn due_engines(
        &self,
        known: &mut HashMap<EngineKey, PolledEngine>,
        limit: usize,
    ) -> Vec<(EngineKey, ModelName)> {
        let fleet = self.router.fleet();
        let ejected = self.router.ejected_workers().into_iter().collect();
        let mut due = Vec::new();
        for worker in fleet.workers() {
            let key = (worker.id, worker.endpoint);
            let schedule = &mut known.entry(key).or_default().schedule;
            schedule.observe(WorkerIncarnation::of(worker, &self.router, &ejected));
            if schedule.is_due() {
                due.push((schedule.was_queried(), key, worker.model.clone()));
            }
        }
        due.sort_by_key(|(was_queried, ..)| *was_queried);
        due.truncate(limit);
        due.into_iter()
            .map(|(_, key, model)| (key, model))
            .collect()
    }

    /// Stores the responses of an engine.
    fn apply_response(&self, key: EngineKey, responses: EngineResponses) {
        if let Some(has_answered) = EngineError::has_answered(&responses.caches) {
            self.router.record_reachability(key.0, has_answered);
        }
        self.reports.send_if_modified(|reports| {
            let settings = responses.merge(key.1, reports.settings.get(&key));
            let changed = reports
                .settings
                .get(&key)
                .map_or(!settings.is_empty(), |known| *known != settings);
            if !changed && reports.queried.contains(&key) {
                return false;
            }
            let reports = Arc::make_mut(reports);
            reports.queried.insert(key);
            if settings.is_empty() {
                reports.settings.remove(&key);
            } else {
                reports.settings.insert(key, settings);
            }
            true
        });
    }
}

/// Returns the reports of a disabled poller.
pub(super) fn disabled() -> Arc<EngineReports> {
    Arc::new(EngineReports {
        is_disabled: true,
        ..EngineReports::default()
    })
}

async fn query_engine(
    poll_config: Arc<PollConfig<EngineDiscoveryConfig>>,
    metrics: Arc<Metrics>,
    key: EngineKey,
    model: ModelName,
) -> (EngineKey, EngineResponses) {
    let client = &poll_config.client;
    let url = poll_config.engines.url(key.1);
    // The later calls reuse the connection of the first. If the engine does not respond, they are
    // concurrent, because each may wait for its timeout.
    let page = client.metrics(&url).await;
    let (sources, models) = if page.as_ref().is_err_and(EngineError::is_transient) {
        tokio::join!(client.kv_event_sources(&url), client.models(&url))
    } else {
        let sources = client.kv_event_sources(&url).await;
        (sources, client.models(&url).await)
    };
    let responses = EngineResponses {
        caches: record_outcome(&metrics, page.map(|page| page.caches())),
        sources: record_outcome(&metrics, sources),
        models: record_outcome(
            &metrics,
            models.map(|models| ListedModels::new(models, &model)),
        ),
    };
    (key, responses)
}

/// Counts the outcome of a query. A missing endpoint counts as an empty response.
fn record_outcome<T: Default>(
    metrics: &Metrics,
    answer: Result<T, EngineError>,
) -> Result<T, EngineError> {
    let outcome = answer.as_ref().err().map_or("ok", EngineError::label);
    count_outcome(&metrics.workers.engine_setting_queries, outcome);
    match answer {
        Err(EngineError::NotOffered(_)) => Ok(T::default()),
        answer => answer,
    }
}
