//! Who can serve: workers, their data-parallel ranks, and how Envoy reaches them. Everything here is a plain value;
//! discovery makes them, the fleet arranges them, and the rest of the program only reads them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroU32};
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use serde::de::{self, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Stable identity of a worker, given by discovery; the value of `x-worker-instance-id`. JSON and YAML hold it as text,
/// because many readers round numbers above 2^53; a number is accepted, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u64);

impl Serialize for WorkerId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for WorkerId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WorkerIdVisitor)
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

/// Index of a data-parallel replica inside a worker, with a KV cache of its own.
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

/// The unit that owns a KV cache and receives a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WorkerRank {
    /// The worker.
    pub worker: WorkerId,
    /// The rank inside it.
    pub rank: DpRank,
}

impl fmt::Display for WorkerRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.worker, self.rank)
    }
}

/// Dense in-process number of a worker rank, so that the tables of the core are arrays and not maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slot(pub u32);

impl Slot {
    /// The slot as an array index.
    pub fn at(self) -> usize {
        self.0 as usize
    }
}

/// What a worker does of a request.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Prefill and decode.
    #[default]
    Aggregated,
    /// Prefill only.
    Prefill,
    /// Decode only.
    Decode,
}

impl Role {
    /// The name used in configuration, metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Aggregated => "aggregated",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// `ip:port` Envoy sends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Endpoint(pub SocketAddr);

impl Endpoint {
    /// The one way to write it: IPv4 inside of IPv6 is IPv4.
    pub fn canonical(self) -> Self {
        Self(SocketAddr::new(self.0.ip().to_canonical(), self.0.port()))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Endpoint {
    type Err = std::net::AddrParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Endpoint)
    }
}

/// Name of a model as the engine serves it; cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ModelName(pub Arc<str>);

impl ModelName {
    /// The name as text.
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
#[serde(transparent)]
pub struct BlockSize(pub NonZeroU32);

impl BlockSize {
    /// A block size, unless it is zero.
    pub fn new(tokens: u32) -> Option<Self> {
        NonZeroU32::new(tokens).map(Self)
    }

    /// The size as a count of tokens.
    pub fn tokens(self) -> usize {
        self.0.get() as usize
    }
}

/// The data-parallel ranks of one worker: `start .. start + size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Ranks {
    /// First rank.
    pub start: u32,
    /// How many.
    pub size: NonZeroU32,
}

impl Ranks {
    /// One rank, number 0: an engine without data parallelism.
    pub const ONE: Ranks = Ranks {
        start: 0,
        size: NonZeroU32::MIN,
    };

    /// More than any engine has; a larger number is an error that would allocate tables without end.
    pub const MOST: u32 = 1024;

    /// The ranks in order.
    pub fn iter(self) -> impl Iterator<Item = DpRank> {
        self.range().map(DpRank)
    }

    /// Whether the rank belongs to the worker.
    pub fn contains(self, rank: DpRank) -> bool {
        self.range().contains(&rank.0)
    }

    fn range(self) -> Range<u32> {
        self.start..self.start.saturating_add(self.size.get())
    }
}

/// Which side of a ZMQ connection we are. vLLM's publisher binds only where its endpoint holds `*`, `::`, `ipc` or
/// `inproc`; in every other case it connects, and then the subscriber has to bind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attach {
    /// We connect; the engine bound.
    #[default]
    Connect,
    /// We bind; the engine connects.
    Bind,
}

/// Where one worker rank publishes its KV events.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct EventSource {
    /// ZMQ endpoint of the events, `tcp://ip:port` or `ipc://path`.
    pub endpoint: String,
    /// Topic prefix to subscribe to; empty takes everything.
    pub topic: String,
    /// Which side binds.
    pub attach: Attach,
    /// ZMQ endpoint (ROUTER side, always bound by the engine) that repeats recent events.
    pub replay: Option<String>,
}

/// What a worker reported of its size; unknown stays unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Capacity {
    /// Most tokens one engine step takes.
    pub max_num_batched_tokens: Option<u64>,
    /// KV blocks of one rank, as large as the model's are configured to be.
    pub total_kv_blocks: Option<u64>,
}

/// What a prefill worker demands of the decode worker that takes over its KV: to be in the same place of a topology domain.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KvTransfer {
    /// The domain, a key of both workers' topology.
    pub domain: String,
    /// How much it matters.
    pub enforcement: Enforcement,
}

/// How much a demand matters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Enforcement {
    /// Nobody else will do.
    Required,
    /// Others cost more; the weight is from 0 to 1.
    Preferred(f64),
}

/// Where a prefill worker is met by decode workers that take over its KV.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Bootstrap {
    /// Its name or address; none: that of its endpoint.
    pub host: Option<String>,
    /// Its port.
    pub port: NonZeroU16,
}

impl Bootstrap {
    /// SGLang's, where it is not told another.
    pub const USUAL_PORT: NonZeroU16 = NonZeroU16::MIN.saturating_add(8997);
}

/// One serving engine process, as discovery reports it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worker {
    /// Identity.
    pub id: WorkerId,
    /// What its operators call it; only shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Where Envoy sends.
    pub endpoint: Endpoint,
    /// What it serves.
    pub model: ModelName,
    /// Which phases it does.
    pub role: Role,
    /// Tokens per block of its cache.
    pub block_size: BlockSize,
    /// Its data-parallel ranks.
    pub ranks: Ranks,
    /// Its size.
    pub capacity: Capacity,
    /// Labels that requests may require or prefer.
    pub taints: BTreeSet<String>,
    /// LoRA adapters it has loaded.
    pub adapters: BTreeSet<String>,
    /// Where it stands: topology domain to value, such as `zone` to `a`.
    pub topology: BTreeMap<String, String>,
    /// What it demands of the decode worker when it does a prefill.
    pub kv_transfer: Option<KvTransfer>,
    /// Where decode workers meet it, where that is not at SGLang's own port of its host.
    pub bootstrap: Option<Bootstrap>,
    /// Per rank, in rank order: where its KV events come from. Empty: it publishes none.
    pub event_sources: Vec<EventSource>,
    /// Whether it takes no new requests. Those it has go on.
    pub draining: bool,
}

/// What a taint begins with that stands for a place in the topology: `dynamo.topology/<domain>=<value>`.
const TOPOLOGY_TAINT: &str = "dynamo.topology/";

/// The taint that stands for a place in the topology.
pub fn topology_taint(domain: &str, value: &str) -> String {
    format!("{TOPOLOGY_TAINT}{domain}={value}")
}

/// What a taint begins with that says of which pool a worker is: `pool=<name>`.
const POOL_TAINT: &str = "pool=";

/// The taint of who is of a pool.
pub fn pool_taint(pool: &str) -> String {
    format!("{POOL_TAINT}{pool}")
}

impl Worker {
    /// Whether it is of a pool.
    pub fn is_of(&self, pool: &str) -> bool {
        self.pools().any(|own| own == pool)
    }

    /// The pools that it is of.
    pub fn pools(&self) -> impl Iterator<Item = &str> {
        self.taints
            .iter()
            .filter_map(|taint| taint.strip_prefix(POOL_TAINT))
    }

    /// A worker of one rank that does both phases, of which nothing else is known.
    pub fn new(id: WorkerId, endpoint: Endpoint, model: ModelName, block_size: BlockSize) -> Self {
        Self {
            id,
            name: None,
            endpoint,
            model,
            role: Role::Aggregated,
            block_size,
            ranks: Ranks::ONE,
            capacity: Capacity::default(),
            taints: BTreeSet::new(),
            adapters: BTreeSet::new(),
            topology: BTreeMap::new(),
            kv_transfer: None,
            bootstrap: None,
            event_sources: Vec::new(),
            draining: false,
        }
    }

    /// Whether the worker has a taint, by its label or by where it stands.
    pub fn carries(&self, taint: &str) -> bool {
        let place = || taint.strip_prefix(TOPOLOGY_TAINT)?.split_once('=');
        self.taints.contains(taint)
            || place().is_some_and(|(domain, value)| {
                self.topology.get(domain).is_some_and(|own| own == value)
            })
    }

    /// Host and port where decode workers meet it.
    pub fn meeting_place(&self) -> (String, u16) {
        let (host, port) = match &self.bootstrap {
            Some(Bootstrap { host, port }) => (host.clone(), *port),
            None => (None, Bootstrap::USUAL_PORT),
        };
        (
            host.unwrap_or_else(|| self.endpoint.0.ip().to_string()),
            port.get(),
        )
    }

    /// The event source of one rank, if it has one.
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
