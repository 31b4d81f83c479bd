//! Settings of discovery: one worker as its operator writes it, and how the workers file is followed.

use std::collections::{BTreeMap, BTreeSet};
use std::num::{NonZeroU16, NonZeroU32};

use serde::{Deserialize, Serialize};

use super::zmq::ZmqEndpoint;
use crate::settings::{Period, Problem};
use crate::worker::{Attach, BlockSize, Bootstrap, Endpoint, ModelName, Role, WorkerId};

/// One entry of the list of workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerConfig {
    /// Instance id.
    pub id: WorkerId,
    /// What its operators call it; only shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// `ip:port` Envoy sends to.
    pub endpoint: Endpoint,
    /// What it serves; may be left out where only one model is configured.
    #[serde(default)]
    pub model: Option<ModelName>,
    /// Which phases it does.
    #[serde(default)]
    pub role: Role,
    /// Tokens per block of its cache; the model's where left out, and never another.
    #[serde(default)]
    pub block_size: Option<BlockSize>,
    /// Its data-parallel ranks.
    #[serde(default)]
    pub data_parallel: DataParallel,
    /// Where it publishes its KV events; none: it does not.
    #[serde(default)]
    pub kv_events: Option<KvEventsConfig>,
    /// Most tokens one engine step takes.
    #[serde(default)]
    pub max_num_batched_tokens: Option<u64>,
    /// KV blocks of one rank, of the model's `block_size`.
    #[serde(default)]
    pub total_kv_blocks: Option<u64>,
    /// Labels that requests may require or prefer.
    #[serde(default)]
    pub taints: BTreeSet<String>,
    /// LoRA adapters it has loaded.
    #[serde(default)]
    pub adapters: BTreeSet<String>,
    /// Where it stands: topology domain to value.
    #[serde(default)]
    pub topology: BTreeMap<String, String>,
    /// What it demands of the decode worker when it does a prefill.
    #[serde(default)]
    pub kv_transfer: Option<KvTransferConfig>,
    /// Where decode workers meet it (SGLang); port 8998 of its endpoint's host where left out.
    #[serde(default)]
    pub bootstrap: Option<BootstrapConfig>,
    /// Whether it takes no new requests.
    #[serde(default)]
    pub draining: bool,
}

/// Where a prefill worker is met.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootstrapConfig {
    /// Its name or address, as decode workers reach it; that of its endpoint where left out.
    #[serde(default)]
    pub host: Option<String>,
    /// Its port (`--disaggregation-bootstrap-port`).
    #[serde(default = "usual_port")]
    pub port: NonZeroU16,
}

fn usual_port() -> NonZeroU16 {
    Bootstrap::USUAL_PORT
}

/// That the decode worker which takes over the KV shall stand in the same place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvTransferConfig {
    /// The topology domain whose value both shall have.
    pub domain: String,
    /// How much it matters.
    pub enforcement: EnforcementConfig,
    /// From 0 to 1, where it is only preferred.
    #[serde(default)]
    pub weight: Option<f64>,
}

/// How much a demand matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnforcementConfig {
    /// Nobody else will do.
    Required,
    /// Others cost more.
    Preferred,
}

/// The data-parallel ranks `start .. start + size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataParallel {
    /// First rank.
    pub start: u32,
    /// How many.
    pub size: NonZeroU32,
}

impl Default for DataParallel {
    fn default() -> Self {
        Self {
            start: 0,
            size: NonZeroU32::MIN,
        }
    }
}

/// Where the KV events of a worker come from: one endpoint from which each rank's is counted on, as vLLM does it (rank r
/// uses port + r), or one source per rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvEventsConfig {
    /// ZMQ endpoint of the events of rank 0.
    #[serde(default)]
    pub endpoint: Option<ZmqEndpoint>,
    /// Topic prefix; empty takes everything.
    #[serde(default)]
    pub topic: String,
    /// Which side of the connection we are.
    #[serde(default)]
    pub attach: Attach,
    /// ZMQ endpoint of rank 0 that repeats recent events.
    #[serde(default)]
    pub replay: Option<ZmqEndpoint>,
    /// Sources per rank, in rank order, in place of `endpoint` and `replay`.
    #[serde(default)]
    pub ranks: Vec<RankSource>,
}

/// Where the KV events of one rank come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankSource {
    /// ZMQ endpoint of the events.
    pub endpoint: ZmqEndpoint,
    /// ZMQ endpoint that repeats recent events.
    #[serde(default)]
    pub replay: Option<ZmqEndpoint>,
}

/// `discovery:`: how the workers file is followed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DiscoveryConfig {
    /// How often the file is read even though nothing was heard of it: the net below lost notifications.
    pub poll: Period,
    /// How long the file must be quiet before it is read, so that a write in pieces is read once.
    pub debounce: Period,
}

impl Default for DiscoveryConfig {
    fn default() -> Self {
        Self {
            poll: Period::seconds(5),
            debounce: Period::millis(100),
        }
    }
}

impl DiscoveryConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let zero = self.poll.get().is_zero();
        let text = "polling every 0s would never rest; the default is 5s";
        zero.then(|| Problem::of("poll", text))
            .into_iter()
            .collect()
    }
}
