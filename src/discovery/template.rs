//! What workers that are found rather than listed have in common: everything but who and where they are. An address makes
//! of it an entry as an operator would have listed it, so that all that holds of listed workers holds of found ones.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroU32};

use serde::{Deserialize, Serialize};

use super::config::{
    BootstrapConfig, DataParallel, KvEventsConfig, KvTransferConfig, WorkerConfig,
};
use super::zmq::ZmqEndpoint;
use crate::worker::{Attach, BlockSize, Endpoint, ModelName, Role, WorkerId};

/// What found workers are like.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TemplateConfig {
    /// What they serve; may be left out where only one model is configured.
    pub model: Option<ModelName>,
    /// Which phases they do.
    pub role: Role,
    /// Tokens per block of their caches; the model's where left out, and never another.
    pub block_size: Option<BlockSize>,
    /// Data-parallel ranks behind one address.
    pub ranks: Option<NonZeroU32>,
    /// Where they publish their KV events; none: they do not, or the engine is asked where.
    pub kv_events: Option<EventPorts>,
    /// Most tokens one engine step takes.
    pub max_num_batched_tokens: Option<u64>,
    /// KV blocks of one rank, of the model's `block_size`.
    pub total_kv_blocks: Option<u64>,
    /// Labels that requests may require or prefer.
    pub taints: BTreeSet<String>,
    /// LoRA adapters they have loaded.
    pub adapters: BTreeSet<String>,
    /// Where they stand: topology domain to value.
    pub topology: BTreeMap<String, String>,
    /// What they demand of the decode worker when they do a prefill.
    pub kv_transfer: Option<KvTransferConfig>,
    /// At which port decode workers meet them (SGLang); 8998 where left out.
    pub bootstrap_port: Option<NonZeroU16>,
}

/// The ports of KV events at a worker's own address. Rank r uses port + r.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventPorts {
    /// Of the events of rank 0.
    pub port: NonZeroU16,
    /// Of rank 0's repetition of recent events.
    #[serde(default)]
    pub replay_port: Option<NonZeroU16>,
    /// Topic prefix; empty takes everything.
    #[serde(default)]
    pub topic: String,
}

impl TemplateConfig {
    /// The worker at an address. Where each rank has an address of its own, `rank` is this one's.
    pub fn worker(&self, id: WorkerId, address: SocketAddr, rank: Option<u32>) -> WorkerConfig {
        let tcp = |port: NonZeroU16| ZmqEndpoint::Tcp {
            host: address.ip().to_string(),
            port: port.get(),
        };
        let kv_events = self.kv_events.as_ref().map(|events| KvEventsConfig {
            endpoint: Some(tcp(events.port)),
            topic: events.topic.clone(),
            attach: Attach::Connect,
            replay: events.replay_port.map(tcp),
            ranks: Vec::new(),
        });
        let size = if rank.is_some() { None } else { self.ranks };
        WorkerConfig {
            id,
            name: None,
            endpoint: Endpoint(address),
            model: self.model.clone(),
            role: self.role,
            block_size: self.block_size,
            data_parallel: DataParallel {
                start: rank.unwrap_or_default(),
                size: size.unwrap_or(NonZeroU32::MIN),
            },
            kv_events,
            max_num_batched_tokens: self.max_num_batched_tokens,
            total_kv_blocks: self.total_kv_blocks,
            taints: self.taints.clone(),
            adapters: self.adapters.clone(),
            topology: self.topology.clone(),
            kv_transfer: self.kv_transfer.clone(),
            bootstrap: self
                .bootstrap_port
                .map(|port| BootstrapConfig { host: None, port }),
            draining: false,
        }
    }
}
