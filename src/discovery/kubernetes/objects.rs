//! The objects of Kubernetes, as far as they are of interest: what is not read is not kept, and may be anything.

use std::collections::BTreeMap;
use std::net::IpAddr;

use kube::core::{ApiResource, GroupVersionKind, NotUsed, Object};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

/// A pod.
pub(super) type Pod = Object<PodSpec, PodStatus>;

/// `InferencePool` of the Gateway API inference extension.
pub(super) type InferencePool = Object<PoolSpec, NotUsed>;

/// `InferenceObjective` of llm-d: a priority with a name.
pub(super) type Objective = Object<ObjectiveSpec, NotUsed>;

/// `InferenceModelRewrite` of llm-d: models that are served by others.
pub(super) type Rewrite = Object<RewriteSpec, NotUsed>;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ObjectiveSpec {
    pub(super) priority: i64,
    pub(super) pool_ref: PoolRef,
}

/// Which pool an object is for.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PoolRef {
    pub(super) group: Option<String>,
    pub(super) kind: Option<String>,
    pub(super) name: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct RewriteSpec {
    pub(super) pool_ref: PoolRef,
    pub(super) rules: Vec<Rule>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Rule {
    pub(super) matches: Vec<Match>,
    pub(super) targets: Vec<Target>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Match {
    pub(super) model: Option<ModelMatch>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ModelMatch {
    /// `Exact`, and so where it is left out.
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) value: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Target {
    pub(super) model_rewrite: String,
    pub(super) weight: Option<i64>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PodSpec {
    pub(super) node_name: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PodStatus {
    pub(super) phase: String,
    #[serde(rename = "podIP", deserialize_with = "pod_ip")]
    pub(super) pod_ip: Option<IpAddr>,
    pub(super) conditions: Vec<Condition>,
}

/// The error names the field and the value: the API server accepts addresses with leading zeros.
fn pod_ip<'de, D: Deserializer<'de>>(input: D) -> Result<Option<IpAddr>, D::Error> {
    let Some(text) = Option::<String>::deserialize(input)? else {
        return Ok(None);
    };
    let parsed = text
        .parse()
        .map_err(|_| D::Error::custom(format_args!("podIP `{text}` is not an IP address")));
    parsed.map(Some)
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Condition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
    pub(super) reason: Option<String>,
    pub(super) message: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PoolSpec {
    pub(super) selector: Selector,
    pub(super) target_ports: Vec<TargetPort>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Selector {
    pub(super) match_labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct TargetPort {
    pub(super) number: u16,
}

pub(super) fn pods() -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", "Pod"), "pods")
}

/// The API group of InferencePools.
pub(super) const POOLS: &str = "inference.networking.k8s.io";

/// The API groups of what pools say of requests; where the first has it, the other is not read.
pub(super) const GROUPS: [&str; 2] = ["llm-d.ai", "inference.networking.x-k8s.io"];

/// A kind of object that need not be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) kind: &'static str,
    pub(super) plural: &'static str,
}

pub(super) const OBJECTIVES: Kind = Kind {
    kind: "InferenceObjective",
    plural: "inferenceobjectives",
};
pub(super) const REWRITES: Kind = Kind {
    kind: "InferenceModelRewrite",
    plural: "inferencemodelrewrites",
};

impl Kind {
    pub(super) fn of(self, group: &str) -> ApiResource {
        ApiResource::from_gvk_with_plural(
            &GroupVersionKind::gvk(group, "v1alpha2", self.kind),
            self.plural,
        )
    }
}

pub(super) fn inference_pools() -> ApiResource {
    let kind = GroupVersionKind::gvk(POOLS, "v1", "InferencePool");
    ApiResource::from_gvk_with_plural(&kind, "inferencepools")
}
