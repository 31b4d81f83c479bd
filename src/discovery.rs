//! Discovery clients of the command line: Kubernetes and DNS.

use std::convert::Infallible;
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use warmroute_core::worker::{ModelName, Worker};
use warmroute_server::app::{self, ExternalDiscovery, ExternalSource, ExternalWatch};
use warmroute_server::config::{Config, WorkerSource};
use warmroute_server::request::ClusterRules;
use warmroute_server::request::rewrite::{RewriteRule, RewriteTarget};

use crate::kubernetes::KubernetesRules;
use crate::{dns, kubernetes};

/// Clients of Kubernetes and DNS.
#[derive(Clone, Copy, Debug)]
pub struct DiscoveryClients;

impl ExternalDiscovery for DiscoveryClients {
    fn watch(&self, watch: ExternalWatch) -> BoxFuture<'static, anyhow::Result<Infallible>> {
        let ExternalWatch {
            source,
            models,
            metrics,
            cluster_rules,
            on_workers,
        } = watch;
        match source {
            ExternalSource::Kubernetes(pools) => async move {
                let rules = kubernetes::watch_rules(&pools, |rules| {
                    cluster_rules.store(Arc::new(to_cluster_rules(rules)))
                });
                tokio::select! {
                    never = kubernetes::watch(pools.clone(), models, metrics, on_workers) => never,
                    never = rules => never,
                }
            }
            .boxed(),
            ExternalSource::Dns(names) => dns::watch(names, models, metrics, on_workers).boxed(),
        }
    }
}

/// Returns the listed workers, or those that discovery finds now.
pub async fn load_workers(config: &Config) -> anyhow::Result<Vec<Worker>> {
    match config.worker_source() {
        WorkerSource::Dns(names) => dns::resolve_once(&names, &config.served_models()).await,
        WorkerSource::Kubernetes(pools) => {
            kubernetes::list_workers(&pools, &config.served_models()).await
        }
        WorkerSource::Fixed(_) | WorkerSource::File(_) => app::listed_workers(config),
    }
}

/// Converts the Kubernetes rules for the preprocessor.
fn to_cluster_rules(rules: KubernetesRules) -> ClusterRules {
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
        let models = rule.models.into_iter().map(name);
        let to = rule.to.into_iter().map(target);
        (
            rule.pool,
            RewriteRule {
                models: models.collect(),
                targets: to.collect(),
            },
        )
    });
    ClusterRules::new(objectives, rewrites).with_status(shown)
}
