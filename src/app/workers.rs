//! Where the fleet comes from, and from where after a reload: a list that only a reload changes, a file that is followed,
//! names that are asked for, or pods.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::config::{Config, ModelConfig, WorkerSource};
use crate::discovery::config::DiscoveryConfig;
use crate::discovery::kubernetes::{self, Rules};
use crate::discovery::{self, ServedModel, file::WorkersFile};
use crate::intake::rewrite::{RewriteRule, RewriteTarget};
use crate::intake::{Cluster, SharedCluster};
use crate::kv_events::MediaTokens;
use crate::learned::Given;
use crate::metrics::Metrics;
use crate::worker::{ModelName, Worker};

/// The tokens that stand for media, by model.
pub(super) type Media = HashMap<ModelName, MediaTokens>;

/// What is configured of that which engines tell of themselves, by model.
pub(super) type AllGiven = HashMap<ModelName, Given>;

/// What a configuration says of the fleet.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Wanted {
    source: WorkerSource,
    models: Vec<ServedModel>,
    follow: DiscoveryConfig,
    media: Arc<Media>,
    given: Arc<AllGiven>,
}

/// A complete fleet as it is to be.
#[derive(Clone, Debug)]
pub(super) struct Desired {
    pub(super) workers: Vec<Worker>,
    /// How to read the events of newcomers, and of the others if that changed.
    pub(super) media: Arc<Media>,
    /// What engines may contradict.
    pub(super) given: Arc<AllGiven>,
}

impl From<&Config> for Wanted {
    fn from(config: &Config) -> Self {
        let media = config
            .models
            .iter()
            .map(|model| (model.name.clone(), model.media_tokens()))
            .collect();
        let given = |model: &ModelConfig| Given {
            block_size: model.block_size,
            media_model: model.media.as_ref().and_then(|media| media.model.clone()),
        };
        let given = config
            .models
            .iter()
            .map(|model| (model.name.clone(), given(model)))
            .collect();
        Self {
            source: config.worker_source(),
            models: config.served_models(),
            follow: config.discovery.clone(),
            media: Arc::new(media),
            given: Arc::new(given),
        }
    }
}

/// Follows what is wanted until nobody wants anything any more; each fleet goes to `desired`.
pub(super) async fn follow(
    mut wanted: watch::Receiver<Wanted>,
    desired: mpsc::UnboundedSender<Desired>,
    cluster: SharedCluster,
    metrics: Arc<Metrics>,
) -> anyhow::Result<()> {
    loop {
        let now = wanted.borrow_and_update().clone();
        tokio::select! {
            never = tell(now, &desired, &cluster, &metrics) => match never? {},
            changed = wanted.changed() => changed?,
        }
    }
}

async fn tell(
    wanted: Wanted,
    desired: &mpsc::UnboundedSender<Desired>,
    cluster: &SharedCluster,
    metrics: &Arc<Metrics>,
) -> anyhow::Result<Infallible> {
    if !matches!(wanted.source, WorkerSource::Kubernetes(_)) {
        cluster.store(Arc::default());
    }
    let (media, given) = (wanted.media, wanted.given);
    // Where the keeper is gone everything ends.
    let send = |workers| {
        _ = desired.send(Desired {
            workers,
            media: media.clone(),
            given: given.clone(),
        })
    };
    match wanted.source {
        WorkerSource::Fixed(workers) => {
            send(workers);
            std::future::pending().await
        }
        WorkerSource::File(path) => {
            let file = WorkersFile {
                path,
                models: wanted.models,
                follow: wanted.follow,
            };
            Ok(discovery::file::watch(file, metrics.clone(), send).await)
        }
        WorkerSource::Kubernetes(pools) => {
            let rules =
                kubernetes::watch_rules(&pools, |rules| cluster.store(Arc::new(said(rules))));
            tokio::select! {
                never = kubernetes::watch(pools.clone(), wanted.models, metrics.clone(), send) => never,
                never = rules => never,
            }
        }
        WorkerSource::Dns(names) => {
            discovery::dns::watch(names, wanted.models, metrics.clone(), send).await
        }
    }
}

/// What the objects beside InferencePools say, as the way in takes it.
fn said(rules: Rules) -> Cluster {
    let shown = serde_json::to_value(&rules).unwrap_or_default();
    let name = |name: String| ModelName::from(name.as_str());
    let target = |(model, weight)| RewriteTarget {
        model: name(model),
        weight,
    };
    let objectives = rules
        .objectives
        .into_iter()
        .map(|objective| (objective.pool, objective.name, objective.priority));
    let rewrites = rules.rewrites.into_iter().map(|rule| {
        let (models, to) = (
            rule.models.into_iter().map(name),
            rule.to.into_iter().map(target),
        );
        (
            rule.pool,
            RewriteRule {
                models: models.collect(),
                to: to.collect(),
            },
        )
    });
    Cluster::new(objectives, rewrites).shown_as(shown)
}
