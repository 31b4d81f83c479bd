//! Source of the fleet, which a reload may change: a fixed list, a workers file, DNS names, or
//! pods.

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use warmroute_core::engine_settings::ConfiguredSettings;
use warmroute_core::worker::{ModelName, Worker};
use warmroute_engines::kv_events::MediaTokens;
use warmroute_metrics::Metrics;
use warmroute_runtime::lifecycle::file_watcher::SETTINGS_WATCH;

use super::external_discovery::{ExternalDiscovery, ExternalSource, ExternalWatch};
use crate::config::{Config, ModelConfig, WorkerSource};
use crate::fleet::discovery::file::WorkersFile;
use crate::fleet::discovery::worker_list_filter::{REMOVAL_GRACE_PERIOD, WorkerListFilter};
use crate::fleet::discovery::{self, WorkerModel};
use crate::request::SharedClusterRules;

/// Settings of a model that its workers need.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FleetModelSettings {
    /// Media tokens, which event sources need.
    pub(super) media: MediaTokens,
    /// Configured settings, to be compared with those that engines report.
    pub(super) configured: ConfiguredSettings,
}

/// Settings by model.
pub(super) type SettingsByModel = HashMap<ModelName, FleetModelSettings>;

/// Fleet source of a configuration.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FleetSource {
    source: WorkerSource,
    models: Vec<WorkerModel>,
    fleet_models: Arc<SettingsByModel>,
}

/// A complete desired fleet.
#[derive(Clone, Debug)]
pub(super) struct DesiredFleet {
    pub(super) workers: Vec<Worker>,
    pub(super) models: Arc<SettingsByModel>,
}

impl From<&Config> for FleetSource {
    fn from(config: &Config) -> Self {
        let fleet_model = |model: &ModelConfig| FleetModelSettings {
            media: model.media_tokens(),
            configured: ConfiguredSettings {
                block_size: model.block_size,
                media_model: model
                    .multimodal
                    .as_ref()
                    .and_then(|media| media.model.clone()),
            },
        };
        let models = config.models.iter();
        let fleet_models = models.map(|model| (model.name.clone(), fleet_model(model)));
        Self {
            source: config.worker_source(),
            models: config.served_models(),
            fleet_models: Arc::new(fleet_models.collect()),
        }
    }
}

impl FleetSource {
    /// Returns the time without workers after which they are removed: at least two further queries
    /// of a source that is polled.
    fn removal_grace_period(&self) -> Duration {
        let intervals = match &self.source {
            WorkerSource::Dns(names) => &names[..],
            _ => &[],
        };
        let polls = intervals.iter().map(|name| name.refresh_interval.get() * 2);
        polls.max().unwrap_or_default().max(REMOVAL_GRACE_PERIOD)
    }
}

/// Components that the watch of a source needs.
#[derive(Clone)]
pub(super) struct FleetSourceDeps {
    pub(super) discovery: Arc<dyn ExternalDiscovery>,
    pub(super) cluster_rules: SharedClusterRules,
    pub(super) metrics: Arc<Metrics>,
    /// Outlives a failure of the task, so that the grace period also applies to the first answer after it.
    pub(super) list_filter: Arc<Mutex<WorkerListFilter>>,
}

impl FleetSourceDeps {
    fn watch(
        &self,
        source: ExternalSource,
        models: Vec<WorkerModel>,
        on_workers: impl FnMut(Vec<Worker>) + Send + 'static,
    ) -> BoxFuture<'static, anyhow::Result<Infallible>> {
        self.discovery.watch(ExternalWatch {
            source,
            models,
            metrics: self.metrics.clone(),
            cluster_rules: self.cluster_rules.clone(),
            on_workers: Box::new(on_workers),
        })
    }
}

/// Follows the configured source until its sender is dropped, and sends each fleet to `desired`.
pub(super) async fn follow_fleet_source(
    mut source: watch::Receiver<FleetSource>,
    desired: mpsc::UnboundedSender<DesiredFleet>,
    deps: FleetSourceDeps,
) -> anyhow::Result<()> {
    loop {
        let now = source.borrow_and_update().clone();
        let FleetSource {
            models,
            fleet_models,
            ..
        } = now.clone();
        let grace_period = now.removal_grace_period();
        let (reported_tx, mut reported_rx) = mpsc::unbounded_channel();
        let mut running = pin!(run_source(now, reported_tx, &deps));
        loop {
            let due = deps.list_filter.lock().next_due();
            let workers = tokio::select! {
                never = &mut running => match never? {},
                changed = source.changed() => {
                    changed?;
                    break;
                }
                Some(workers) = reported_rx.recv() => {
                    let mut list_filter = deps.list_filter.lock();
                    list_filter.update(workers, &models, grace_period, Instant::now())
                }
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    deps.list_filter.lock().remove_expired(Instant::now())
                }
            };
            // If the controller is gone, the process is shutting down.
            _ = desired.send(DesiredFleet {
                workers,
                models: fleet_models.clone(),
            });
        }
    }
}

async fn run_source(
    source: FleetSource,
    reported: mpsc::UnboundedSender<Vec<Worker>>,
    deps: &FleetSourceDeps,
) -> anyhow::Result<Infallible> {
    if !matches!(source.source, WorkerSource::Kubernetes(_)) {
        deps.cluster_rules.store(Arc::default());
    }
    if !matches!(source.source, WorkerSource::File(_)) {
        deps.metrics.workers.file_last_reload_successful.set(None);
    }
    let send = move |workers| _ = reported.send(workers);
    match source.source {
        WorkerSource::Fixed(workers) => {
            send(workers);
            std::future::pending().await
        }
        WorkerSource::File(path) => {
            let file = WorkersFile {
                path,
                models: source.models,
                timing: SETTINGS_WATCH,
            };
            Ok(discovery::file::watch(file, deps.metrics.clone(), send).await)
        }
        WorkerSource::Kubernetes(pools) => {
            deps.watch(ExternalSource::Kubernetes(pools), source.models, send)
                .await
        }
        WorkerSource::Dns(names) => {
            deps.watch(ExternalSource::Dns(names), source.models, send)
                .await
        }
    }
}

#[cfg(test)]
mod tests {
    use warmroute_core::worker::{BlockSize, WorkerId};

    use super::*;
    use crate::app::external_discovery::NoExternalDiscovery;

    fn source(ids: &[u64]) -> FleetSource {
        let block_size = BlockSize::new(16).unwrap();
        let worker = |&id: &u64| {
            let endpoint = ([10, 0, 0, id as u8], 8000).into();
            Worker::new(
                WorkerId(id),
                warmroute_core::worker::WorkerEndpoint(endpoint),
                "m".into(),
                block_size,
            )
        };
        FleetSource {
            source: WorkerSource::Fixed(ids.iter().map(worker).collect()),
            models: vec![WorkerModel {
                name: "m".into(),
                block_size,
                uses_bootstrap: false,
            }],
            fleet_models: Arc::default(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn reload_to_empty_list_is_confirmed() {
        let (source_tx, source_rx) = watch::channel(source(&[1, 2]));
        let (desired_tx, mut desired) = mpsc::unbounded_channel();
        let deps = FleetSourceDeps {
            discovery: Arc::new(NoExternalDiscovery),
            cluster_rules: SharedClusterRules::default(),
            metrics: Arc::new(Metrics::new()),
            list_filter: Arc::default(),
        };
        let following = tokio::spawn(follow_fleet_source(source_rx, desired_tx, deps));
        let mut next = async || desired.recv().await.unwrap().workers.len();
        assert_eq!(next().await, 2);
        let start = Instant::now();
        source_tx.send_replace(source(&[]));
        assert_eq!(next().await, 2);
        assert_eq!(next().await, 0);
        assert!(start.elapsed() >= REMOVAL_GRACE_PERIOD);
        following.abort();
    }
}
