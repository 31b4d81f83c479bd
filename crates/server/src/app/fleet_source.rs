//! Source of the fleet, which a reload may change: a fixed list, a workers file, DNS names, or
//! pods.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, watch};
use warmroute_core::engine_settings::ConfiguredSettings;
use warmroute_core::worker::{ModelName, Worker};
use warmroute_engines::kv_events::MediaTokens;
use warmroute_metrics::Metrics;

use super::external_discovery::{ExternalDiscovery, ExternalSource, ExternalWatch};
use crate::config::{Config, ModelConfig, WorkerSource};
use crate::fleet::discovery::config::DiscoveryConfig;
use crate::fleet::discovery::file::WorkersFile;
use crate::fleet::discovery::{self, WorkerModel};
use crate::request::SharedClusterRules;

/// Media placeholder tokens by model.
pub(super) type MediaTokensByModel = HashMap<ModelName, MediaTokens>;

/// Configured engine settings by model.
pub(super) type ConfiguredSettingsByModel = HashMap<ModelName, ConfiguredSettings>;

/// Fleet source of a configuration.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FleetSource {
    source: WorkerSource,
    models: Vec<WorkerModel>,
    follow: DiscoveryConfig,
    media: Arc<MediaTokensByModel>,
    configured: Arc<ConfiguredSettingsByModel>,
}

/// A complete desired fleet.
#[derive(Clone, Debug)]
pub(super) struct DesiredFleet {
    pub(super) workers: Vec<Worker>,
    /// Media tokens of the models, which event sources need.
    pub(super) media: Arc<MediaTokensByModel>,
    /// Configured settings, to be compared with those that engines report.
    pub(super) configured: Arc<ConfiguredSettingsByModel>,
}

impl From<&Config> for FleetSource {
    fn from(config: &Config) -> Self {
        let media = config
            .models
            .iter()
            .map(|model| (model.name.clone(), model.media_tokens()))
            .collect();
        let configured = |model: &ModelConfig| ConfiguredSettings {
            block_size: model.block_size,
            media_model: model
                .multimodal
                .as_ref()
                .and_then(|media| media.model.clone()),
        };
        let configured = config
            .models
            .iter()
            .map(|model| (model.name.clone(), configured(model)))
            .collect();
        Self {
            source: config.worker_source(),
            models: config.served_models(),
            follow: config.workers.file_watch.clone(),
            media: Arc::new(media),
            configured: Arc::new(configured),
        }
    }
}

/// Components that the watch of a source needs.
#[derive(Clone)]
pub(super) struct FleetSourceDeps {
    pub(super) discovery: Arc<dyn ExternalDiscovery>,
    pub(super) cluster_rules: SharedClusterRules,
    pub(super) metrics: Arc<Metrics>,
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
        tokio::select! {
            never = run_source(now, desired.clone(), &deps) => match never? {},
            changed = source.changed() => changed?,
        }
    }
}

async fn run_source(
    source: FleetSource,
    desired: mpsc::UnboundedSender<DesiredFleet>,
    deps: &FleetSourceDeps,
) -> anyhow::Result<Infallible> {
    if !matches!(source.source, WorkerSource::Kubernetes(_)) {
        deps.cluster_rules.store(Arc::default());
    }
    if !matches!(source.source, WorkerSource::File(_)) {
        deps.metrics.workers.file_last_reload_successful.set(None);
    }
    let media = source.media;
    let configured = source.configured;
    // If the controller is gone, the process is shutting down.
    let send = move |workers| {
        _ = desired.send(DesiredFleet {
            workers,
            media: media.clone(),
            configured: configured.clone(),
        })
    };
    match source.source {
        WorkerSource::Fixed(workers) => {
            send(workers);
            std::future::pending().await
        }
        WorkerSource::File(path) => {
            let file = WorkersFile {
                path,
                models: source.models,
                settings: source.follow,
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
