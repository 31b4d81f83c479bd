//! Configuration of discovery by Kubernetes.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_core::worker::{RankRange, WorkerId, pool_taint};
use warmroute_settings::{DurationSetting, Problem, all_within};

use crate::fleet::discovery::config::WorkerConfig;
use crate::fleet::discovery::template::TemplateConfig;

/// Maximum number of ports of a pod, as in an InferencePool.
const MAX_PORTS: usize = 8;

/// The `workers.kubernetes:` section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KubernetesConfig {
    /// Pools, whose pods are the workers.
    pub pools: Vec<PodsConfig>,
    /// Kubeconfig with the API server and credentials. If omitted, the user's kubeconfig, or else
    /// the service account of the pod.
    #[serde(default)]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig; the current context if omitted.
    #[serde(default)]
    pub context: Option<String>,
    /// Time after which the API server ends a watch. A request without a response fails after this
    /// time plus 5 s.
    #[serde(default = "watch_timeout")]
    pub watch_timeout: DurationSetting,
    /// Interval at which the optional kinds InferenceObjective and InferenceModelRewrite are probed
    /// again if they are not installed or not allowed.
    #[serde(default = "resync_interval")]
    pub resync_interval: DurationSetting,
}

fn watch_timeout() -> DurationSetting {
    DurationSetting::seconds(30)
}

fn resync_interval() -> DurationSetting {
    DurationSetting::seconds(300)
}

/// A pool of pods: the name of an InferencePool, or a selector and ports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PodsConfig {
    /// Name of an InferencePool, which contains selector and ports.
    #[serde(default)]
    pub name: Option<String>,
    /// Labels of the pods; all must match.
    #[serde(default)]
    pub selector: BTreeMap<String, String>,
    /// Ports of each pod. Several ports belong to the data-parallel ranks, in this order.
    #[serde(default)]
    pub ports: Vec<NonZeroU16>,
    /// Namespace of the pods and of the InferencePool; defaults to the namespace of the
    /// credentials.
    #[serde(default)]
    pub namespace: Option<String>,
    /// Source of the worker ids, unless a label contains them.
    #[serde(default)]
    pub instance_ids: WorkerIdSource,
    /// Template of the workers.
    #[serde(default)]
    pub worker: TemplateConfig,
}

/// Source of the worker ids of pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkerIdSource {
    /// Pod uid and port; never reused.
    #[default]
    PodUid,
    /// Pod name, from which Dynamo workers compute their id with Kubernetes discovery. One id per
    /// pod.
    Dynamo,
}

/// Returns the label selector of the labels in the syntax of the Kubernetes API.
pub fn label_selector(labels: &BTreeMap<String, String>) -> String {
    labels
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect::<Vec<_>>()
        .join(",")
}

impl PodsConfig {
    /// Returns a worker of the template at a placeholder address.
    pub fn sample_worker(&self) -> WorkerConfig {
        let port = self.ports.first().map_or(80, |port| port.get());
        let rank = (self.ports.len() > 1).then_some(0);
        let mut worker = self.worker.worker(
            WorkerId(0),
            (Ipv4Addr::new(192, 0, 2, 1), port).into(),
            rank,
        );
        worker.taints.insert(pool_taint(&self.title()));
        worker
    }

    /// Returns the display name: the InferencePool or the selector, with the configured namespace
    /// as prefix.
    pub fn title(&self) -> String {
        let name = self
            .name
            .clone()
            .unwrap_or_else(|| label_selector(&self.selector));
        match &self.namespace {
            Some(namespace) => format!("{namespace}/{name}"),
            None => name,
        }
    }

    /// Returns whether this entry selects every pod that `other` selects.
    pub fn includes(&self, other: &Self) -> bool {
        let identity = |pods: &Self| {
            (
                pods.namespace.clone(),
                pods.name.clone(),
                pods.selector.clone(),
            )
        };
        identity(self) == identity(other)
            && other.ports.iter().all(|port| self.ports.contains(port))
    }

    fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut refuse = |key: &str, text: &str| problems.push(Problem::of(key, text));
        match (&self.name, self.selector.is_empty(), self.ports.is_empty()) {
            (Some(name), _, _) if name.is_empty() => {
                refuse("name", "the name is empty; write that of an InferencePool")
            }
            (Some(_), true, true) | (None, false, false) => {}
            (Some(_), false, _) => refuse(
                "selector",
                "the InferencePool has the selector; leave it out, or leave out `name`",
            ),
            (Some(_), _, false) => refuse(
                "ports",
                "the InferencePool has the ports; leave them out, or leave out `name`",
            ),
            (None, true, _) => refuse(
                "selector",
                "neither `name` nor `selector` is set; set the name of an InferencePool, or the \
                labels of the pods",
            ),
            (None, _, true) => refuse(
                "ports",
                "the ports of the pods are missing; list those that the engines listen at",
            ),
        }
        if self.ports.len() > MAX_PORTS {
            refuse(
                "ports",
                "there are more than 8 ports; a pod has at most 8, one for each data-parallel rank",
            );
        }
        let repeated = self
            .ports
            .iter()
            .enumerate()
            .any(|(at, port)| self.ports[..at].contains(port));
        if repeated {
            refuse("ports", "duplicate port; each port is a separate worker");
        }
        if self.ports.len() > 1 && self.instance_ids == WorkerIdSource::Dynamo {
            refuse(
                "instance_ids",
                "Dynamo has one id per pod, but each port is a separate worker; set one port",
            );
        }
        if self.ports.len() > 1 && self.worker.data_parallel != RankRange::ONE {
            let text = "with several ports, each port is one rank; remove this, or set the one \
                port that all ranks share";
            problems.push(Problem::of("data_parallel", text).within("worker"));
        }
        problems
    }
}

impl KubernetesConfig {
    /// Returns the delay before optional kinds are probed again, with jitter so that replicas do
    /// not probe at the same time.
    pub fn probe_delay(&self) -> Duration {
        self.resync_interval
            .get()
            .mul_f64(rand::random_range(0.8..1.2))
    }

    /// Returns semantic errors.
    pub fn problems(&self) -> Vec<Problem> {
        let pools = self.pools.iter().enumerate();
        let found = pools.flat_map(|(at, pool)| all_within(at, pool.problems()));
        let mut problems: Vec<Problem> = all_within("pools", found).collect();
        if self.pools.is_empty() {
            problems.push(Problem::of(
                "pools",
                "no pool is configured; set the name of an InferencePool, or labels and ports of \
                pods",
            ));
        }
        if self.watch_timeout.get().is_zero() {
            problems.push(Problem::of(
                "watch_timeout",
                "no connection would last 0s; the default is 30s",
            ));
        }
        if self.resync_interval.get().is_zero() {
            problems.push(Problem::of(
                "resync_interval",
                "the API server would be queried without a pause; the default is 5m",
            ));
        }
        if self.context.is_some() && self.kubeconfig.is_none() {
            problems.push(Problem::of("context", "`context` requires `kubeconfig`"));
        }
        problems
    }
}
