//! Kubernetes objects, reduced to the fields that warmroute reads.

use std::collections::BTreeMap;
use std::net::IpAddr;

use kube::core::{ApiResource, GroupVersionKind, NotUsed, Object};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

/// A pod.
pub(super) type Pod = Object<PodSpec, PodStatus>;

/// An `InferencePool` of the Gateway API inference extension.
pub(super) type InferencePool = Object<PoolSpec, NotUsed>;

/// An `InferenceObjective` of llm-d: a named priority.
pub(super) type InferenceObjective = Object<ObjectiveSpec, NotUsed>;

/// An `InferenceModelRewrite` of llm-d: a mapping from requested to served models.
pub(super) type InferenceModelRewrite = Object<RewriteSpec, NotUsed>;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ObjectiveSpec {
    pub(super) priority: i64,
    pub(super) pool_ref: PoolRef,
}

/// Reference to the pool that an object configures.
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
    pub(super) rules: Vec<RewriteRuleSpec>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct RewriteRuleSpec {
    pub(super) matches: Vec<RewriteMatch>,
    pub(super) targets: Vec<RewriteTargetSpec>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct RewriteMatch {
    pub(super) model: Option<ModelMatch>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ModelMatch {
    /// Match type; `Exact` if omitted.
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) value: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct RewriteTargetSpec {
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
    pub(super) conditions: Vec<PodCondition>,
}

/// Parses the address of a pod. The error names field and value, because the API server accepts
/// addresses with leading zeros, which Rust rejects.
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
pub(super) struct PodCondition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
    pub(super) reason: Option<String>,
    pub(super) message: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PoolSpec {
    pub(super) selector: LabelSelector,
    pub(super) target_ports: Vec<TargetPort>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct LabelSelector {
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

/// API group of InferencePools.
pub(super) const POOL_GROUP: &str = "inference.networking.k8s.io";

/// API groups of the optional kinds, in order of preference.
pub(super) const RULE_GROUPS: [&str; 2] = ["llm-d.ai", "inference.networking.x-k8s.io"];

/// A kind that may not be installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OptionalKind {
    pub(super) kind: &'static str,
    pub(super) plural: &'static str,
}

pub(super) const OBJECTIVES: OptionalKind = OptionalKind {
    kind: "InferenceObjective",
    plural: "inferenceobjectives",
};
pub(super) const REWRITES: OptionalKind = OptionalKind {
    kind: "InferenceModelRewrite",
    plural: "inferencemodelrewrites",
};

impl OptionalKind {
    pub(super) fn in_group(self, group: &str) -> ApiResource {
        ApiResource::from_gvk_with_plural(
            &GroupVersionKind::gvk(group, "v1alpha2", self.kind),
            self.plural,
        )
    }
}

pub(super) fn inference_pools() -> ApiResource {
    let kind = GroupVersionKind::gvk(POOL_GROUP, "v1", "InferencePool");
    ApiResource::from_gvk_with_plural(&kind, "inferencepools")
}
