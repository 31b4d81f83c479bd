//! Template of discovered workers: all settings except id and address. With an address it becomes a
//! worker entry, which is resolved as a listed worker.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::num::NonZeroU16;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_core::worker::{
    BootstrapAddress, EndpointKind, ModelName, RankRange, SocketAttach, WorkerEndpoint, WorkerId,
    WorkerRole,
};

use super::config::{KvEventsConfig, KvTransferConfig, WorkerConfig};
use super::zmq::ZmqEndpoint;

/// Settings of discovered workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TemplateConfig {
    /// Served model; may be omitted if only one model is configured.
    pub model: Option<ModelName>,
    /// Role: `aggregated`, `prefill` or `decode`.
    pub role: WorkerRole,
    /// Data-parallel ranks behind one address.
    pub data_parallel: RankRange,
    /// `ip:port` of a front end that the workers share, such as the cluster address of its Service:
    /// the endpoint of each worker, in place of its own address, with `via: front_end`.
    pub front_end: Option<WorkerEndpoint>,
    /// Ports of the KV events; without them, the worker has none or discovery queries the engine.
    pub kv_events: Option<EventPorts>,
    /// Maximum number of tokens per engine step.
    pub max_num_batched_tokens: Option<u64>,
    /// KV blocks per rank, in blocks of the model's `block_size`.
    pub total_kv_blocks: Option<u64>,
    /// Labels that requests may require or prefer.
    pub taints: BTreeSet<String>,
    /// Loaded LoRA adapters.
    pub adapters: BTreeSet<String>,
    /// Topology labels: domain to value.
    pub topology: BTreeMap<String, String>,
    /// Topology constraint on the decode worker that receives KV from this worker.
    pub kv_transfer: Option<KvTransferConfig>,
    /// Bootstrap address (SGLang); defaults to port 8998 of the worker's host.
    pub bootstrap: Option<BootstrapAddress>,
}

/// Ports of the KV events at the worker's address. Rank r uses port + r.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EventPorts {
    /// Event port of rank 0.
    pub port: NonZeroU16,
    /// Replay port of rank 0.
    #[serde(default)]
    pub replay_port: Option<NonZeroU16>,
    /// Topic prefix; empty matches everything.
    #[serde(default)]
    pub topic: String,
}

impl TemplateConfig {
    /// Returns the worker entry for an address. `rank` is set if each rank has its own address.
    pub fn worker(&self, id: WorkerId, address: SocketAddr, rank: Option<u32>) -> WorkerConfig {
        let tcp = |port: NonZeroU16| ZmqEndpoint::Tcp {
            host: address.ip().to_string(),
            port: port.get(),
        };
        let kv_events = self.kv_events.as_ref().map(|events| KvEventsConfig {
            endpoint: Some(tcp(events.port)),
            topic: events.topic.clone(),
            attach: SocketAttach::Connect,
            replay_endpoint: events.replay_port.map(tcp),
            ranks: Vec::new(),
        });
        let data_parallel = rank.map_or(self.data_parallel, |start| RankRange {
            start,
            ..RankRange::ONE
        });
        WorkerConfig {
            id,
            name: None,
            endpoint: self.front_end.unwrap_or(WorkerEndpoint(address)),
            via: match self.front_end {
                Some(_) => EndpointKind::FrontEnd,
                None => EndpointKind::Direct,
            },
            model: self.model.clone(),
            role: self.role,
            data_parallel,
            kv_events,
            max_num_batched_tokens: self.max_num_batched_tokens,
            total_kv_blocks: self.total_kv_blocks,
            taints: self.taints.clone(),
            adapters: self.adapters.clone(),
            topology: self.topology.clone(),
            kv_transfer: self.kv_transfer.clone(),
            bootstrap: self.bootstrap.clone(),
            draining: false,
        }
    }
}
