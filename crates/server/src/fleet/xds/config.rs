//! Configuration of endpoint publication to Envoy.

use std::collections::{BTreeSet, HashSet};
use std::net::SocketAddr;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_core::worker::{ModelName, Worker, WorkerRole};
use warmroute_runtime::tls::{ListenerExposure, TlsConfig};
use warmroute_settings::{ADDRESS_PATTERN, Problem, all_within};

/// The `envoy:` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EnvoyConfig {
    /// Endpoint file for Envoy's `path_config_source`. Its directory must be the
    /// `watched_directory`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoints_file: Option<PathBuf>,
    /// Name of the cluster that contains all workers.
    #[serde(default = "workers")]
    pub cluster: String,
    /// Envoy's admin address, used only by `warmroute doctor`.
    #[serde(default)]
    pub admin_url: Option<String>,
    /// xDS server; disabled if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xds: Option<XdsConfig>,
}

/// The `envoy.xds:` section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct XdsConfig {
    /// TCP address; if omitted, the service is added to the ext_proc listener.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = ADDRESS_PATTERN))]
    pub address: Option<SocketAddr>,
    /// TLS of that address; plaintext if omitted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// True to accept unauthenticated clients on an address other than loopback.
    pub unprotected: bool,
    /// Additional clusters, each with a subset of the workers.
    pub clusters: Vec<ClusterConfig>,
}

/// A cluster with a subset of the workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterConfig {
    /// Name of the cluster in Envoy, or its `service_name`.
    pub name: String,
    /// Model of the workers; any if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelName>,
    /// Roles of the workers; any if empty.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub roles: BTreeSet<WorkerRole>,
}

impl ClusterConfig {
    /// Returns whether the cluster contains a worker.
    pub fn includes(&self, worker: &Worker) -> bool {
        self.model
            .as_ref()
            .is_none_or(|model| *model == worker.model)
            && (self.roles.is_empty() || self.roles.contains(&worker.role))
    }
}

fn workers() -> String {
    "workers".to_owned()
}

impl EnvoyConfig {
    /// Returns all clusters.
    pub fn clusters(&self) -> Vec<ClusterConfig> {
        let all = ClusterConfig {
            name: self.cluster.clone(),
            model: None,
            roles: BTreeSet::new(),
        };
        let additional = self.xds.iter().flat_map(|xds| xds.clusters.iter().cloned());
        std::iter::once(all).chain(additional).collect()
    }

    /// Returns semantic errors. `models` are the configured models.
    pub fn problems(&self, models: &[ModelName]) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.cluster.is_empty() {
            let text = "the cluster has no name; write the one Envoy's `eds_cluster_config` has, \
                `workers` by default";
            problems.push(Problem::of("cluster", text));
        }
        let page = self
            .admin_url
            .as_deref()
            .filter(|url| !url.starts_with("http://") && !url.starts_with("https://"));
        if let Some(url) = page {
            let text = format!(
                "`{url}` is not the address of a page; write for example http://127.0.0.1:9900"
            );
            problems.push(Problem::of("admin_url", text));
        }
        if self.endpoints_file.is_none() && self.xds.is_none() && self.admin_url.is_none() {
            let text = "no endpoints would be published; set `endpoints_file`, or `xds: {}` for an \
                xDS server";
            problems.push(Problem::at([], text));
        }
        let xds = self
            .xds
            .iter()
            .flat_map(|xds| xds.problems(&self.cluster, models));
        problems.extend(all_within("xds", xds));
        problems
    }
}

impl XdsConfig {
    fn problems(&self, all: &str, models: &[ModelName]) -> Vec<Problem> {
        let mut problems = Vec::new();
        if let Some(tls) = &self.tls {
            if self.address.is_none() {
                let text = "`tls` requires `address`; on the ext_proc listener, \
                    `listeners.ext_proc.tls` applies";
                problems.push(Problem::of("tls", text));
            }
            problems.extend(all_within("tls", tls.problems()));
        }
        let exposure = self.address.map(|listen| ListenerExposure {
            key: "address",
            listen,
            tls: self.tls.as_ref(),
            unprotected: self.unprotected,
            allowed_actions: "see the workers and delay their changes",
        });
        problems.extend(exposure.and_then(|exposure| exposure.problem()));
        problems.extend(self.cluster_problems(all, models));
        problems
    }

    /// Returns the problems of the additional clusters. `all` is the cluster of all workers.
    fn cluster_problems(&self, all: &str, models: &[ModelName]) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut names = HashSet::from([all]);
        for (at, cluster) in self.clusters.iter().enumerate() {
            let mut refuse = |key: &str, text: String| {
                problems.push(Problem::at(
                    ["clusters".into(), at.into(), key.into()],
                    text,
                ))
            };
            if cluster.name.is_empty() {
                refuse(
                    "name",
                    "the cluster name is empty; write the name that Envoy requests".to_owned(),
                );
            } else if !names.insert(&cluster.name) {
                refuse(
                    "name",
                    format!(
                        "there is a cluster `{}` already; names must differ",
                        cluster.name
                    ),
                );
            }
            if let Some(model) = cluster
                .model
                .as_ref()
                .filter(|model| !models.contains(model))
            {
                let known = models
                    .iter()
                    .map(ModelName::as_str)
                    .collect::<Vec<_>>()
                    .join(", ");
                refuse(
                    "model",
                    format!(
                        "no model of the name `{model}` is configured under `models`; known are \
                        {known}"
                    ),
                );
            }
        }
        problems
    }
}
