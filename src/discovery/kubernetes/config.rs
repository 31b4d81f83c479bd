//! Settings of discovery by Kubernetes.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::discovery::config::WorkerConfig;
use crate::discovery::template::TemplateConfig;
use crate::settings::{Period, Problem};
use crate::worker::{WorkerId, pool_taint};

/// Ports of one pod at most, as an InferencePool has them.
const MOST_PORTS: usize = 8;

/// `kubernetes:`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KubernetesConfig {
    /// Which pods are workers.
    pub pools: Vec<PodsConfig>,
    /// Where the API server is and who we are; those of the pod, or of the user, where left out.
    #[serde(default)]
    pub kubeconfig: Option<PathBuf>,
    /// Which context of that file; its current one where left out.
    #[serde(default)]
    pub context: Option<String>,
    /// What pods say of themselves by labels.
    #[serde(default)]
    pub labels: LabelsConfig,
    /// Time after which the API server ends a watch. A request without a response fails after this time plus 5 s.
    #[serde(default = "silence")]
    pub silence: Period,
    /// What the pools say of requests, InferenceObjectives and InferenceModelRewrites, need not be installed, nor for us to
    /// read. After how long it is looked for again then.
    #[serde(default = "look_again")]
    pub look_again: Period,
}

fn silence() -> Period {
    Period::seconds(30)
}

fn look_again() -> Period {
    Period::seconds(300)
}

/// Pods that are workers, and what these are like. Either the name of an InferencePool or a selector and ports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodsConfig {
    /// Name of an InferencePool, which tells selector and ports.
    #[serde(default)]
    pub name: Option<String>,
    /// Labels that the pods have, all of them.
    #[serde(default)]
    pub selector: BTreeMap<String, String>,
    /// Ports of each pod. Several are the data-parallel ranks of its engine, in this order.
    #[serde(default)]
    pub ports: Vec<NonZeroU16>,
    /// Namespace of the pods and of the InferencePool; ours where left out.
    #[serde(default)]
    pub namespace: Option<String>,
    /// What the instance ids are made of, where no label tells them.
    #[serde(default)]
    pub ids: Ids,
    /// What the workers are like.
    #[serde(default)]
    pub worker: TemplateConfig,
}

/// What the instance ids of pods are made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ids {
    /// The pod's uid and the port: each port of each pod has its own, which no other ever gets.
    #[default]
    PodUid,
    /// The pod's name, as the workers of Dynamo make theirs where Kubernetes is how they are found. One id for a pod.
    Dynamo,
}

/// Names of labels and annotations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LabelsConfig {
    /// What a pod does of a request: `prefill`, `decode`, `both`.
    pub role: String,
    /// Which engine it runs; becomes the taint `engine=..`.
    pub engine: String,
    /// Its instance id, where it is to be told from outside; several, one for each port, with points in between.
    pub worker_id: String,
    /// The annotation that says which of the ports are in use.
    pub active_ports: String,
}

impl Default for LabelsConfig {
    fn default() -> Self {
        Self {
            role: "llm-d.ai/role".to_owned(),
            engine: "llm-d.ai/engine-type".to_owned(),
            worker_id: "warmroute.dev/worker-id".to_owned(),
            active_ports: "llm-d.ai/active-ports".to_owned(),
        }
    }
}

/// Labels as the API server takes them.
pub(super) fn label_selector(labels: &BTreeMap<String, String>) -> String {
    labels
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect::<Vec<_>>()
        .join(",")
}

impl PodsConfig {
    /// A worker as it would be found, at an address that is nobody's.
    pub fn sample(&self) -> WorkerConfig {
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

    /// What it is called: its InferencePool, or else its selector; before it the namespace, where that is given.
    pub fn title(&self) -> String {
        let own = self
            .name
            .clone()
            .unwrap_or_else(|| label_selector(&self.selector));
        match &self.namespace {
            Some(namespace) => format!("{namespace}/{own}"),
            None => own,
        }
    }

    /// Whether it finds all that another entry finds.
    pub fn finds_all_of(&self, other: &Self) -> bool {
        let of = |pods: &Self| {
            (
                pods.namespace.clone(),
                pods.name.clone(),
                pods.selector.clone(),
            )
        };
        of(self) == of(other) && other.ports.iter().all(|port| self.ports.contains(port))
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
                "neither `name` nor `selector` is given; name an InferencePool, or labels of the pods",
            ),
            (None, _, true) => refuse(
                "ports",
                "the ports of the pods are missing; list those that the engines listen at",
            ),
        }
        if self.ports.len() > MOST_PORTS {
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
            refuse(
                "ports",
                "a port is given twice; each is a worker of its own",
            );
        }
        if self.ports.len() > 1 && self.ids == Ids::Dynamo {
            refuse(
                "ids",
                "Dynamo has one id for a pod, and each of several ports is a worker of its own; give one port",
            );
        }
        if self.ports.len() > 1 && self.worker.ranks.is_some() {
            let text = "with several ports each is one rank; leave this out, or give the one port that all ranks share";
            problems.push(Problem::of("ranks", text).within("worker"));
        }
        problems
    }
}

impl KubernetesConfig {
    /// The delay before optional kinds are probed again, with jitter so that replicas do not probe at the same time.
    pub(super) fn look_again(&self) -> Duration {
        self.look_again.get().mul_f64(rand::random_range(0.8..1.2))
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let of_pool = |(at, pool): (usize, &PodsConfig)| {
            pool.problems()
                .into_iter()
                .map(move |problem| problem.within(at).within("pools"))
        };
        let mut problems: Vec<Problem> = self.pools.iter().enumerate().flat_map(of_pool).collect();
        if self.pools.is_empty() {
            problems.push(Problem::of(
                "pools",
                "no pool is given; name an InferencePool, or labels and ports of pods",
            ));
        }
        if self.silence.get().is_zero() {
            problems.push(Problem::of(
                "silence",
                "no connection would last 0s; the default is 30s",
            ));
        }
        if self.look_again.get().is_zero() {
            problems.push(Problem::of(
                "look_again",
                "the API server would be asked without a pause; the default is 5m",
            ));
        }
        if self.context.is_some() && self.kubeconfig.is_none() {
            problems.push(Problem::of(
                "context",
                "a context is one of a `kubeconfig`; give that, too",
            ));
        }
        problems
    }
}
