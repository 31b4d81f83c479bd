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
use tokio::time::Instant;
use warmroute_core::engine_settings::EngineSettings;
use warmroute_core::fleet::Fleet;
use warmroute_core::health::HealthSignal;
use warmroute_core::router::Router;
use warmroute_core::worker::{ModelName, WorkerEndpoint, WorkerId};
use warmroute_engines::engine_client::EngineError;
use warmroute_metrics::{Metrics, OutcomeLabel};
use warmroute_runtime::lifecycle::supervise;

use super::App;
use super::incarnation::{self, Incarnation, REQUERY_DELAY};
use super::poll_config::PollConfig;
use crate::config::{Config, EngineDiscoveryConfig};
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
/// Maximum time between two scans of an unchanged fleet.
const MAX_SCAN_AGE: Duration = Duration::from_secs(1);
/// Maximum number of concurrent queries.
const MAX_CONCURRENT_QUERIES: usize = 16;

type SettingsPollConfig = PollConfig<EngineDiscoveryConfig>;

/// Poller of engine settings.
struct EngineSettingsPoller {
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    reports: watch::Sender<Arc<EngineReports>>,
}

/// Polling state of an engine.
struct PolledEngine {
    incarnation: Incarnation,
    /// Time of the next query; `None` during a query.
    next_query: Option<Instant>,
    /// Time of the last query.
    last_query: Option<Instant>,
    /// Whether the engine has listed its model.
    has_listed_model: bool,
}

type PendingQueries = FuturesUnordered<BoxFuture<'static, (EngineKey, EngineResponses)>>;

impl App {
    /// Starts the poller, which publishes to `reports`.
    pub(super) fn poll_engine_settings(
        &mut self,
        config: &Config,
        router: &Arc<Router>,
        reports: watch::Sender<Arc<EngineReports>>,
    ) {
        let config_rx =
            self.watch_poll_config("learn", config, |config| config.engines.discovery.clone());
        let metrics = self.reloader.metrics.clone();
        let poller = Arc::new(EngineSettingsPoller {
            router: router.clone(),
            metrics: metrics.clone(),
            reports,
        });
        let stop = self.stop.clone();
        self.background.spawn(async move {
            supervise("engine_settings", &metrics, stop, || {
                let poller = poller.clone();
                let config_rx = config_rx.clone();
                async move { poller.run(config_rx).await }
            })
            .await;
        });
    }
}

impl EngineSettingsPoller {
    /// Queries due engines until the task is cancelled.
    async fn run(
        &self,
        mut config_rx: watch::Receiver<Arc<SettingsPollConfig>>,
    ) -> anyhow::Result<()> {
        let mut known: HashMap<EngineKey, PolledEngine> = HashMap::new();
        let mut queries = PendingQueries::new();
        let mut ticks = tokio::time::interval(SCAN_INTERVAL);
        let mut last_scan = None;
        loop {
            tokio::select! {
                _ = ticks.tick() => {
                    let fleet = self.router.fleet();
                    if is_recent_scan(last_scan.as_ref(), &fleet) {
                        continue;
                    }
                    last_scan = Some((fleet, Instant::now()));
                }
                Some((key, responses)) = queries.next(), if !queries.is_empty() => {
                    if let Some(known) = known.get_mut(&key) {
                        let wait = if responses.is_retryable() { REQUERY_DELAY } else { config_rx.borrow().settings.interval.get() };
                        known.next_query = Some(Instant::now() + wait);
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
                    (known, queries) = (HashMap::new(), PendingQueries::new());
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
            for (key, model) in self.due_engines(
                &mut known,
                MAX_CONCURRENT_QUERIES.saturating_sub(queries.len()),
            ) {
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

    /// Returns the engines to query now, at most `limit`. Engines that were never queried come
    /// first.
    fn due_engines(
        &self,
        known: &mut HashMap<EngineKey, PolledEngine>,
        limit: usize,
    ) -> Vec<(EngineKey, ModelName)> {
        let fleet = self.router.fleet();
        let now = Instant::now();
        let ejected = incarnation::ejected_workers(&self.router);
        let mut due = Vec::new();
        for worker in fleet.workers() {
            let key = (worker.id, worker.endpoint);
            let incarnation = Incarnation::of(worker, &self.router, &ejected);
            let known = known.entry(key).or_insert_with(|| PolledEngine {
                incarnation: incarnation.clone(),
                next_query: Some(now),
                last_query: None,
                has_listed_model: false,
            });
            // An engine that restarts during a query is queried again.
            if known.next_query.is_some() {
                if incarnation.may_differ_from(&known.incarnation) {
                    let earliest =
                        now + incarnation::requery_delay(known.last_query.map(|last| now - last));
                    known.next_query = known.next_query.map(|due| due.min(earliest));
                }
                known.incarnation = incarnation;
            }
            if known.next_query.is_some_and(|due| due <= now) {
                due.push((known.last_query.is_some(), key, worker.model.clone()));
            }
        }
        due.sort_by_key(|(was_queried, ..)| *was_queried);
        due.truncate(limit);
        for (_, key, _) in &due {
            if let Some(known) = known.get_mut(key) {
                (known.next_query, known.last_query) = (None, Some(now));
            }
        }
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

/// Returns true if the last scan covered this fleet and is newer than [`MAX_SCAN_AGE`].
fn is_recent_scan(last_scan: Option<&(Arc<Fleet>, Instant)>, fleet: &Arc<Fleet>) -> bool {
    last_scan
        .is_some_and(|(scanned, at)| Arc::ptr_eq(scanned, fleet) && at.elapsed() < MAX_SCAN_AGE)
}

async fn query_engine(
    poll_config: Arc<SettingsPollConfig>,
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
        caches: count_outcome(&metrics, page.map(|page| page.caches())),
        sources: count_outcome(&metrics, sources),
        models: count_outcome(
            &metrics,
            models.map(|models| ListedModels::new(models, &model)),
        ),
    };
    (key, responses)
}

/// Counts the outcome of a query. A missing endpoint counts as an empty response.
fn count_outcome<T: Default>(
    metrics: &Metrics,
    answer: Result<T, EngineError>,
) -> Result<T, EngineError> {
    let outcome = answer.as_ref().err().map_or("ok", EngineError::label);
    metrics
        .workers
        .engine_setting_queries
        .get_or_create(&OutcomeLabel { outcome })
        .inc();
    match answer {
        Err(EngineError::NotOffered(_)) => Ok(T::default()),
        answer => answer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmroute_core::worker::BlockSize;

    #[test]
    fn repeated_restarts_limit_query_rate() {
        let load = warmroute_core::load::LoadTracker::new(std::time::Instant::now);
        let settings = warmroute_core::router::RouterSettings::default();
        let router = Arc::new(Router::new(
            warmroute_core::index::PrefixIndex::new(),
            load,
            settings,
            1,
        ));
        let endpoint = "127.0.0.1:8000".parse().unwrap();
        let worker = warmroute_core::worker::Worker::new(
            WorkerId(1),
            endpoint,
            "m".into(),
            BlockSize::new(16).unwrap(),
        );
        let rank = warmroute_core::worker::WorkerRank {
            worker: worker.id,
            rank: worker.ranks.iter().next().unwrap(),
        };
        router.set_fleet(Arc::new(
            warmroute_core::fleet::Fleet::empty()
                .reconcile(vec![worker])
                .fleet,
        ));
        let source = Arc::new(parking_lot::Mutex::new(
            warmroute_core::freshness::EventSourceState::new(Default::default()),
        ));
        router.sources().register(rank, source.clone());
        let poller = EngineSettingsPoller {
            router,
            metrics: Arc::new(Metrics::new()),
            reports: watch::Sender::new(disabled()),
        };
        let mut known = HashMap::new();
        let key = (WorkerId(1), endpoint);
        assert_eq!(
            poller.due_engines(&mut known, 1).len(),
            1,
            "the worker is new"
        );
        let later = Instant::now() + Duration::from_secs(300);
        known.get_mut(&key).unwrap().next_query = Some(later);
        for _ in 0..3 {
            source.lock().record_restart();
            assert!(
                poller.due_engines(&mut known, 1).is_empty(),
                "the engine was queried a moment ago"
            );
        }
        let due = known[&key].next_query.unwrap();
        assert!(
            due <= Instant::now() + REQUERY_DELAY,
            "the engine is queried again soon"
        );
        known.get_mut(&key).unwrap().last_query = Some(Instant::now() - REQUERY_DELAY);
        source.lock().record_restart();
        assert_eq!(poller.due_engines(&mut known, 1).len(), 1);
    }
}
