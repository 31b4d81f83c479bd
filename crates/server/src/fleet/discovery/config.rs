//! Configuration of listed workers and of the workers file.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_core::worker::{
    BootstrapAddress, EndpointKind, ModelName, RankRange, SocketAttach, WorkerEndpoint, WorkerId,
    WorkerRole,
};

use super::zmq::ZmqEndpoint;

/// Entry of `workers.list` or of a workers file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkerConfig {
    /// Instance id.
    pub id: WorkerId,
    /// Display name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// `ip:port` that Envoy sends requests to.
    pub endpoint: WorkerEndpoint,
    /// Receiver of the requests at `endpoint`: `direct`, or `front_end` for a front end that several
    /// workers share, such as Dynamo's. A response then belongs to the worker that the headers name.
    #[serde(default, skip_serializing_if = "EndpointKind::is_direct")]
    pub via: EndpointKind,
    /// Served model; may be omitted if only one model is configured.
    #[serde(default)]
    pub model: Option<ModelName>,
    /// Role: `aggregated`, `prefill` or `decode`.
    #[serde(default)]
    pub role: WorkerRole,
    /// Data-parallel ranks.
    #[serde(default)]
    pub data_parallel: RankRange,
    /// Source of the KV events; without it, the worker has none or discovery queries the engine.
    #[serde(default)]
    pub kv_events: Option<KvEventsConfig>,
    /// Maximum number of tokens per engine step.
    #[serde(default)]
    pub max_num_batched_tokens: Option<u64>,
    /// KV blocks per rank, in blocks of the model's `block_size`.
    #[serde(default)]
    pub total_kv_blocks: Option<u64>,
    /// Labels that requests may require or prefer.
    #[serde(default)]
    pub taints: BTreeSet<String>,
    /// Loaded LoRA adapters.
    #[serde(default)]
    pub adapters: BTreeSet<String>,
    /// Topology labels: domain to value.
    #[serde(default)]
    pub topology: BTreeMap<String, String>,
    /// Topology constraint on the decode worker that receives KV from this worker.
    #[serde(default)]
    pub kv_transfer: Option<KvTransferConfig>,
    /// Bootstrap address (SGLang); defaults to port 8998 of the endpoint's host.
    #[serde(default)]
    pub bootstrap: Option<BootstrapAddress>,
    /// True if the worker accepts no new requests.
    #[serde(default)]
    pub draining: bool,
}

/// Topology constraint on a KV transfer: both workers must have the same value for a domain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KvTransferConfig {
    /// Topology domain.
    pub domain: String,
    /// Strictness of the constraint.
    pub enforcement: EnforcementConfig,
    /// Weight from 0 to 1 of a preferred constraint.
    #[serde(default)]
    pub weight: Option<f64>,
}

/// Strictness of a topology constraint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EnforcementConfig {
    /// Workers in other domains are excluded.
    Required,
    /// Workers in other domains cost more.
    Preferred,
}

/// Source of the KV events of a worker: either the endpoint of rank 0, from which the others are
/// derived by vLLM's rule (rank r uses port + r), or one source per rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KvEventsConfig {
    /// ZMQ endpoint of the events of rank 0.
    #[serde(default)]
    pub endpoint: Option<ZmqEndpoint>,
    /// Topic prefix; empty matches everything.
    #[serde(default)]
    pub topic: String,
    /// Whether warmroute connects to the endpoint or binds it.
    #[serde(default)]
    pub attach: SocketAttach,
    /// ZMQ replay endpoint of rank 0.
    #[serde(default)]
    pub replay_endpoint: Option<ZmqEndpoint>,
    /// Sources by rank, instead of `endpoint` and `replay_endpoint`.
    #[serde(default)]
    pub ranks: Vec<RankSource>,
}

/// Source of the KV events of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RankSource {
    /// ZMQ endpoint of the events.
    pub endpoint: ZmqEndpoint,
    /// ZMQ replay endpoint.
    #[serde(default)]
    pub replay_endpoint: Option<ZmqEndpoint>,
}
