//! Scrapes the load gauges of engines, with one task per worker. A setting caps the scrapes per
//! second over all workers; above it, the interval is longer.
//!
//! Engines without these gauges are supported and are tried again once a minute.

mod scrape_interval;
mod worker_scraper;

use std::collections::{HashMap, HashSet};
use std::future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use warmroute_core::fleet::Fleet;
use warmroute_core::router::Router;
use warmroute_metrics::Metrics;
use warmroute_runtime::lifecycle::supervise;

use super::App;
use super::poll_config::PollConfig;
use super::settings_poller::EngineKey;
use crate::config::{Config, EngineLoadConfig};
use scrape_interval::{effective_interval, start_delay};
use worker_scraper::WorkerScraper;

/// Interval of checks for new workers.
const SCAN_INTERVAL: Duration = Duration::from_millis(250);

type LoadPollConfig = PollConfig<EngineLoadConfig>;

/// State that the tasks of all workers share.
struct LoadPollContext {
    config: Arc<LoadPollConfig>,
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    /// Current interval in nanoseconds.
    interval: AtomicU64,
}

/// Running tasks. Dropping the value ends them.
#[derive(Default)]
struct ScrapeTasks {
    running: JoinSet<()>,
    by_engine: HashMap<EngineKey, AbortHandle>,
}

impl App {
    /// Starts the poller of the engines' load.
    pub(super) fn poll_engine_load(&mut self, config: &Config, router: &Arc<Router>) {
        let config_rx =
            self.watch_poll_config("engine load", config, |config| config.engines.load.clone());
        let router = router.clone();
        let metrics = self.reloader.metrics.clone();
        let stop = self.stop.clone();
        self.background.spawn(async move {
            supervise("engine_load", &metrics, stop, || {
                run(router.clone(), metrics.clone(), config_rx.clone())
            })
            .await;
        });
    }
}

/// Scrapes the engines until the task is cancelled. After a change of the settings, all tasks start
/// again.
async fn run(
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    mut config_rx: watch::Receiver<Arc<LoadPollConfig>>,
) -> anyhow::Result<()> {
    loop {
        let config = config_rx.borrow_and_update().clone();
        let context = LoadPollContext {
            interval: AtomicU64::default(),
            router: router.clone(),
            metrics: metrics.clone(),
            config,
        };
        tokio::select! {
            changed = config_rx.changed() => changed?,
            ended = scrape_fleet(Arc::new(context)) => ended?,
        }
    }
}

/// Runs one task for each worker of the current fleet. Ends only with an error.
async fn scrape_fleet(context: Arc<LoadPollContext>) -> anyhow::Result<()> {
    if !context.config.settings.enabled {
        return future::pending().await;
    }
    let mut tasks = ScrapeTasks::default();
    let mut known: Option<Arc<Fleet>> = None;
    let mut ticks = tokio::time::interval(SCAN_INTERVAL);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            Some(ended) = tasks.running.join_next() => {
                if ended.is_err_and(|error| error.is_panic()) {
                    anyhow::bail!("a scrape panicked");
                }
            }
        }
        let fleet = context.router.fleet();
        if !known
            .as_ref()
            .is_some_and(|known| Arc::ptr_eq(known, &fleet))
        {
            tasks.reconcile(&fleet, &context);
            known = Some(fleet);
        }
    }
}

impl LoadPollContext {
    fn interval(&self) -> Duration {
        Duration::from_nanos(self.interval.load(Ordering::Relaxed))
    }
}

impl ScrapeTasks {
    /// Ends the tasks of engines that left, and starts those of new ones.
    fn reconcile(&mut self, fleet: &Fleet, context: &Arc<LoadPollContext>) {
        let engines: HashSet<EngineKey> = fleet
            .workers()
            // A shared front end does not report the load of single workers.
            .filter(|worker| worker.via.is_direct())
            .map(|worker| (worker.id, worker.endpoint))
            .collect();
        let settings = &context.config.settings;
        let interval = effective_interval(settings.interval.get(), engines.len());
        let nanos = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX);
        context.interval.store(nanos, Ordering::Relaxed);
        self.by_engine.retain(|engine, task| {
            let stays = engines.contains(engine);
            if !stays {
                task.abort();
            }
            stays
        });
        let added: Vec<_> = engines
            .into_iter()
            .filter(|engine| !self.by_engine.contains_key(engine))
            .collect();
        let count = added.len();
        for engine in added {
            let delay = start_delay(count, rand::random());
            let scraper = WorkerScraper::new(engine, context.clone());
            let task = self.running.spawn(scraper.run(delay));
            self.by_engine.insert(engine, task);
        }
    }
}

#[cfg(test)]
mod tests;
