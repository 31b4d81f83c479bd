//! Workers, their data-parallel ranks, and the addresses Envoy reaches them at. All types are plain
//! values. Discovery creates them, the fleet arranges them, and all other code only reads them.

mod rank_range;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroU32};
use std::str::FromStr;
use std::sync::Arc;

use serde::de::{self, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use strum::{Display, IntoStaticStr};

pub use rank_range::RankRange;

/// Stable identity of a worker, assigned by discovery: the value of `x-worker-instance-id`. JSON
/// and YAML contain it as text, because many parsers round numbers above 2^53. Numbers are accepted
/// as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u64);

#[cfg(feature = "schema")]
impl schemars::JsonSchema for WorkerId {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "WorkerId".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": ["integer", "string"],
            "minimum": 0,
            "maximum": u64::MAX,
            "pattern": "^[0-9]+$",
        })
    }
}

impl Serialize for WorkerId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            self.0.serialize(serializer)
        }
    }
}

impl<'de> Deserialize<'de> for WorkerId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            deserializer.deserialize_any(WorkerIdVisitor)
        } else {
            u64::deserialize(deserializer).map(WorkerId)
        }
    }
}

struct WorkerIdVisitor;

impl Visitor<'_> for WorkerIdVisitor {
    type Value = WorkerId;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number from 0 to 18446744073709551615")
    }

    fn visit_u64<E: de::Error>(self, id: u64) -> Result<WorkerId, E> {
        Ok(WorkerId(id))
    }

    fn visit_str<E: de::Error>(self, id: &str) -> Result<WorkerId, E> {
        id.parse()
            .map(WorkerId)
            .map_err(|_| E::invalid_value(Unexpected::Str(id), &self))
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Index of a data-parallel replica in a worker. Each has its own KV cache.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct DpRank(pub u32);

impl fmt::Display for DpRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Rank of a worker: the unit that owns a KV cache and receives requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WorkerRank {
    /// Id of the worker.
    pub worker: WorkerId,
    /// Rank in the worker.
    pub rank: DpRank,
}

impl WorkerRank {
    /// Creates a rank from the worker id and the rank number.
    pub const fn new(worker: u64, rank: u32) -> Self {
        Self {
            worker: WorkerId(worker),
            rank: DpRank(rank),
        }
    }
}

impl fmt::Display for WorkerRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.worker, self.rank)
    }
}

/// Dense process-local number of a worker rank. It indexes the tables of the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RankSlot(pub u32);

impl RankSlot {
    /// Returns the slot as an array index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Phases of a request that a worker serves.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    Display,
    IntoStaticStr,
)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(transform = allow_role_alias))]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum WorkerRole {
    /// Both prefill and decode.
    #[default]
    #[serde(alias = "both")]
    Aggregated,
    /// Only prefill.
    Prefill,
    /// Only decode.
    Decode,
}

#[cfg(feature = "schema")]
fn allow_role_alias(schema: &mut schemars::Schema) {
    if let Some(roles) = schema
        .get_mut("oneOf")
        .and_then(|roles| roles.as_array_mut())
    {
        let alias =
            schemars::json_schema!({"const": "both", "description": "The same as `aggregated`."});
        roles.push(alias.into());
    }
}

impl WorkerRole {
    /// Returns the name used in configuration, metrics and logs.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// `ip:port` that Envoy sends requests to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(extend("pattern" = ":[0-9]+$")))]
#[serde(transparent)]
pub struct WorkerEndpoint(pub SocketAddr);

impl WorkerEndpoint {
    /// Returns the canonical form: an IPv4-mapped IPv6 address becomes IPv4.
    pub fn canonical(self) -> Self {
        Self(SocketAddr::new(self.0.ip().to_canonical(), self.0.port()))
    }
}

impl fmt::Display for WorkerEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for WorkerEndpoint {
    type Err = std::net::AddrParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(WorkerEndpoint)
    }
}

/// Whether an endpoint belongs to one worker or is a front end that workers share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum EndpointKind {
    /// The worker itself, or a front end of this worker alone.
    #[default]
    Direct,
    /// A front end that other workers share. It sends a request to the worker that the routing
    /// headers name.
    FrontEnd,
}

impl EndpointKind {
    /// Returns whether the endpoint belongs to the worker alone.
    pub fn is_direct(&self) -> bool {
        *self == EndpointKind::Direct
    }
}

/// Name of a model as the engine serves it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct ModelName(pub Arc<str>);

impl ModelName {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for ModelName {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Tokens per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct BlockSize(pub NonZeroU32);

impl BlockSize {
    /// Creates a block size. Returns `None` for zero.
    pub fn new(tokens: u32) -> Option<Self> {
        NonZeroU32::new(tokens).map(Self)
    }

    /// Returns the number of tokens.
    pub fn tokens(self) -> usize {
        self.0.get() as usize
    }
}

/// Side of a ZMQ connection that binds. vLLM's publisher binds only if its endpoint contains `*`,
/// `::`, `ipc` or `inproc`. Otherwise it connects, and the subscriber has to bind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum SocketAttach {
    /// The engine binds, and warmroute connects.
    #[default]
    Connect,
    /// Warmroute binds, and the engine connects.
    Bind,
}

/// Address at which one worker rank publishes its KV events.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct EventSource {
    /// ZMQ endpoint of the events, `tcp://ip:port` or `ipc://path`.
    pub endpoint: String,
    /// Topic prefix to subscribe to. Empty subscribes to all topics.
    pub topic: String,
    /// Side that binds.
    pub attach: SocketAttach,
    /// ZMQ endpoint for the replay of recent events. It is a ROUTER socket that the engine binds.
    pub replay: Option<String>,
}

/// Capacity reported by a worker. Unknown values stay unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WorkerCapacity {
    /// Maximum number of tokens per engine step.
    pub max_num_batched_tokens: Option<u64>,
    /// KV blocks of one rank, in the block size configured for the model.
    pub total_kv_blocks: Option<u64>,
}

/// Constraint of a prefill worker on the decode worker that receives its KV: both must have the
/// same value in a topology domain.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KvTransferRule {
    /// Topology domain: a key of both workers' `topology`.
    pub domain: String,
    /// Strength of the constraint.
    pub enforcement: TransferEnforcement,
}

/// Strength of a constraint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferEnforcement {
    /// Other workers are excluded.
    Required,
    /// Other workers cost more. The weight is between 0 and 1.
    Preferred(f64),
}

/// SGLang bootstrap address, at which decode workers fetch KV from a prefill worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BootstrapAddress {
    /// Host name or address at which decode workers reach it; defaults to the host of the endpoint.
    #[serde(default)]
    pub host: Option<String>,
    /// Bootstrap port (`--disaggregation-bootstrap-port`).
    #[serde(default = "default_bootstrap_port")]
    pub port: NonZeroU16,
}

fn default_bootstrap_port() -> NonZeroU16 {
    BootstrapAddress::DEFAULT_PORT
}

impl BootstrapAddress {
    /// Default port of SGLang.
    pub const DEFAULT_PORT: NonZeroU16 = NonZeroU16::MIN.saturating_add(8997);
}

/// Serving engine process, as reported by discovery.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worker {
    /// Identity of the worker.
    pub id: WorkerId,
    /// Display name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Address that Envoy sends requests to.
    pub endpoint: WorkerEndpoint,
    /// Receiver of these requests.
    #[serde(skip_serializing_if = "EndpointKind::is_direct")]
    pub via: EndpointKind,
    /// Model that it serves.
    pub model: ModelName,
    /// Phases that it serves.
    pub role: WorkerRole,
    /// Tokens per block of its cache.
    pub block_size: BlockSize,
    /// Data-parallel ranks.
    pub ranks: RankRange,
    /// Reported capacity.
    pub capacity: WorkerCapacity,
    /// Labels that requests may require or prefer.
    pub taints: BTreeSet<String>,
    /// Loaded LoRA adapters.
    pub adapters: BTreeSet<String>,
    /// Location by topology domain, for example `zone` to `a`.
    pub topology: BTreeMap<String, String>,
    /// Constraint on the decode worker after a prefill.
    pub kv_transfer: Option<KvTransferRule>,
    /// Bootstrap address. Defaults to SGLang's default port on the worker's host.
    pub bootstrap: Option<BootstrapAddress>,
    /// Sources of KV events, by rank. Empty if the worker publishes none.
    pub event_sources: Vec<EventSource>,
    /// Whether the worker accepts no new requests. Running requests continue.
    pub draining: bool,
}

/// Prefix of the taints derived from the topology: `dynamo.topology/<domain>=<value>`.
const TOPOLOGY_TAINT: &str = "dynamo.topology/";

/// Returns the taint of a topology domain and value.
pub fn topology_taint(domain: &str, value: &str) -> String {
    format!("{TOPOLOGY_TAINT}{domain}={value}")
}

/// Prefix of the taints derived from the pool: `pool=<name>`.
const POOL_TAINT: &str = "pool=";

/// Returns the taint of the workers in a pool.
pub fn pool_taint(pool: &str) -> String {
    format!("{POOL_TAINT}{pool}")
}

impl Worker {
    /// Returns the name for logs: the display name, or the endpoint if it has none.
    pub fn display_name(&self) -> String {
        match &self.name {
            Some(name) => name.clone(),
            None => self.endpoint.to_string(),
        }
    }

    /// Returns whether responses from this address come from the worker alone.
    pub fn owns(&self, address: WorkerEndpoint) -> bool {
        self.via.is_direct() && self.endpoint.canonical() == address.canonical()
    }

    /// Returns whether the worker is in a pool.
    pub fn is_in_pool(&self, pool: &str) -> bool {
        self.pools().any(|own| own == pool)
    }

    /// Iterates over the pools of the worker.
    pub fn pools(&self) -> impl Iterator<Item = &str> {
        self.taints
            .iter()
            .filter_map(|taint| taint.strip_prefix(POOL_TAINT))
    }

    /// Creates an aggregated worker with one rank and no further properties.
    pub fn new(
        id: WorkerId,
        endpoint: WorkerEndpoint,
        model: ModelName,
        block_size: BlockSize,
    ) -> Self {
        Self {
            id,
            name: None,
            endpoint,
            via: EndpointKind::Direct,
            model,
            role: WorkerRole::Aggregated,
            block_size,
            ranks: RankRange::ONE,
            capacity: WorkerCapacity::default(),
            taints: BTreeSet::new(),
            adapters: BTreeSet::new(),
            topology: BTreeMap::new(),
            kv_transfer: None,
            bootstrap: None,
            event_sources: Vec::new(),
            draining: false,
        }
    }

    /// Returns whether the worker has a taint, as a label or through its topology.
    pub fn has_taint(&self, taint: &str) -> bool {
        let domain_value = || taint.strip_prefix(TOPOLOGY_TAINT)?.split_once('=');
        self.taints.contains(taint)
            || domain_value().is_some_and(|(domain, value)| {
                self.topology.get(domain).is_some_and(|own| own == value)
            })
    }

    /// Returns the host and port at which decode workers bootstrap.
    pub fn bootstrap_address(&self) -> (String, u16) {
        let (host, port) = match &self.bootstrap {
            Some(BootstrapAddress { host, port }) => (host.clone(), *port),
            None => (None, BootstrapAddress::DEFAULT_PORT),
        };
        (
            host.unwrap_or_else(|| self.endpoint.0.ip().to_string()),
            port.get(),
        )
    }

    /// Returns the event source of one rank.
    pub fn event_source(&self, rank: DpRank) -> Option<&EventSource> {
        self.event_sources
            .get(rank.0.checked_sub(self.ranks.start)? as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_ids_are_written_as_json_text() {
        let id = WorkerId(u64::MAX);
        assert_eq!(
            serde_json::to_value(id).unwrap(),
            serde_json::json!("18446744073709551615")
        );
        for text in ["18446744073709551615", "\"18446744073709551615\""] {
            assert_eq!(
                serde_json::from_str::<WorkerId>(text).unwrap(),
                id,
                "{text}"
            );
        }
        for text in [
            "-1",
            "1.5",
            "\"x\"",
            "\"-1\"",
            "18446744073709551616",
            "null",
        ] {
            assert!(serde_json::from_str::<WorkerId>(text).is_err(), "{text}");
        }
    }
}
