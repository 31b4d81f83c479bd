//! Settings of how Envoy is told who the workers are.

use std::collections::{BTreeSet, HashSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::settings::Problem;
use crate::tls::{ListenerExposure, TlsConfig};
use crate::worker::{ModelName, Role, Worker};

/// `envoy:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnvoyConfig {
    /// The file Envoy's `path_config_source` reads; its folder must be the `watched_directory`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoints_file: Option<PathBuf>,
    /// Name of the cluster the endpoints belong to.
    #[serde(default = "workers")]
    pub cluster: String,
    /// Envoy's admin page, for `warmroute doctor`; nothing else asks it.
    #[serde(default)]
    pub admin: Option<String>,
    /// Telling Envoys by gRPC, as their xDS server; none: they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xds: Option<XdsConfig>,
}

/// `envoy.xds:`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct XdsConfig {
    /// TCP address; none: beside ext_proc, wherever that listens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// TLS of that address; none: plaintext.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// Accept every client that reaches an address that is not loopback.
    pub unprotected: bool,
    /// Further clusters, each of some of the workers. `envoy.cluster` has all.
    pub clusters: Vec<ClusterConfig>,
}

/// A cluster of some of the workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterConfig {
    /// Its name, or `service_name`, in Envoy.
    pub name: String,
    /// Only those that serve this model; none: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelName>,
    /// Only those of these roles; none: any.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub roles: BTreeSet<Role>,
}

impl ClusterConfig {
    /// Whether a worker is in it.
    pub fn has(&self, worker: &Worker) -> bool {
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
    /// All clusters that Envoys may ask for.
    pub fn clusters(&self) -> Vec<ClusterConfig> {
        let all = ClusterConfig {
            name: self.cluster.clone(),
            model: None,
            roles: BTreeSet::new(),
        };
        let some = self.xds.iter().flat_map(|xds| xds.clusters.iter().cloned());
        std::iter::once(all).chain(some).collect()
    }

    /// Makes names of files absolute.
    pub fn resolve(&mut self, folder: &Path) {
        if let Some(file) = &mut self.endpoints_file {
            *file = folder.join(&*file);
        }
        if let Some(tls) = self.xds.as_mut().and_then(|xds| xds.tls.as_mut()) {
            tls.resolve(folder);
        }
    }

    /// Mistakes of meaning; `models` are those that are served.
    pub fn problems(&self, models: &[ModelName]) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.cluster.is_empty() {
            let text = "the cluster has no name; write the one Envoy's `eds_cluster_config` has, `workers` by default";
            problems.push(Problem::of("cluster", text));
        }
        let page = self
            .admin
            .as_deref()
            .filter(|url| !url.starts_with("http://") && !url.starts_with("https://"));
        if let Some(url) = page {
            let text = format!(
                "`{url}` is not the address of a page; write for example http://127.0.0.1:9900"
            );
            problems.push(Problem::of("admin", text));
        }
        if self.endpoints_file.is_none() && self.xds.is_none() && self.admin.is_none() {
            let text = "Envoy is told nothing; give an `endpoints_file` for it to read, or `xds: {}` to tell it by gRPC";
            problems.push(Problem::at([], text));
        }
        let xds = self
            .xds
            .iter()
            .flat_map(|xds| xds.problems(&self.cluster, models));
        problems.extend(xds.map(|problem| problem.within("xds")));
        problems
    }
}

impl XdsConfig {
    fn problems(&self, all: &str, models: &[ModelName]) -> Vec<Problem> {
        let mut problems = Vec::new();
        if let Some(tls) = &self.tls {
            if self.listen.is_none() {
                let text = "TLS here is for `listen`, which is not given; beside ext_proc that of `listen.tls` holds";
                problems.push(Problem::of("tls", text));
            }
            problems.extend(
                tls.problems()
                    .into_iter()
                    .map(|problem| problem.within("tls")),
            );
        }
        let exposure = self.listen.map(|listen| ListenerExposure {
            key: "listen",
            listen,
            tls: self.tls.as_ref(),
            unprotected: self.unprotected,
            risk: "see the workers and delay their changes",
        });
        problems.extend(exposure.and_then(|exposure| exposure.problem()));
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
                    "the cluster has no name; write the one that Envoy asks for".to_owned(),
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
                        "no model of the name `{model}` is configured under `models`; known are {known}"
                    ),
                );
            }
        }
        problems
    }
}
