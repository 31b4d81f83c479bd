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

use tokio_util::task::AbortOnDropHandle;
use warmroute_core::router::Router;
use warmroute_metrics::Metrics;

use super::background::BackgroundTasks;
use super::poll_config::{PollConfig, PollConfigReceiver};
use super::reload::Reloader;
use super::settings_poller::EngineKey;
use crate::config::EngineLoadConfig;
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

/// Task of each engine. Dropping the value ends them.
type ScrapeTasks = HashMap<EngineKey, AbortOnDropHandle<()>>;

/// Starts the poller of the engines' load.
pub(super) fn start(tasks: &mut BackgroundTasks, reloader: &Reloader) {
    let config_rx = PollConfig::watch(reloader, |config, _| config.engines.load.clone());
    let router = reloader.router().clone();
    let metrics = reloader.metrics.clone();
    tasks.supervise("engine_load", move || {
        run(router.clone(), metrics.clone(), config_rx.clone())
    });
}

/// Scrapes the engines until the task is cancelled. After a change of the settings, all tasks start
/// again.
async fn run(
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    mut config_rx: PollConfigReceiver<EngineLoadConfig>,
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
    let mut ticks = tokio::time::interval(SCAN_INTERVAL);
    loop {
        ticks.tick().await;
        if tasks.values().any(AbortOnDropHandle::is_finished) {
            anyhow::bail!("a scrape panicked");
        }
        reconcile(&mut tasks, &context);
    }
}

impl LoadPollContext {
    fn interval(&self) -> Duration {
        Duration::from_nanos(self.interval.load(Ordering::Relaxed))
    }
}

/// Ends the tasks of engines that left, and starts those of new ones.
fn reconcile(tasks: &mut ScrapeTasks, context: &Arc<LoadPollContext>) {
    let fleet = context.router.fleet();
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
    tasks.retain(|engine, _| engines.contains(engine));
    let added = engines.len() - tasks.len();
    for engine in engines {
        if tasks.contains_key(&engine) {
            continue;
        }
        let delay = start_delay(added, rand::random());
        let scraper = WorkerScraper::new(engine, context.clone());
        let task = tokio::spawn(scraper.run(delay));
        tasks.insert(engine, AbortOnDropHandle::new(task));
    }
}

#[cfg(test)]
mod tests;
