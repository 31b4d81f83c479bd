//! An OpenAI-compatible engine without a model, close enough to vLLM to test and measure routers.
//! Requests are tokenized with the real tokenizer. Their blocks are stored in a paged prefix cache
//! that publishes every change as vLLM does. A continuous-batching scheduler simulates the time of
//! their computation. Only the generated text is artificial.
//!
//! [`run`] serves one engine. `cargo run --example engine_sim` runs it as a process.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod aborts;
mod adapters;
mod auth;
mod bootstrap;
mod cache;
#[cfg(test)]
mod captured_events;
mod choices;
mod config;
mod ctx_request_ids;
mod disaggregation;
mod error;
mod faults;
mod fetch;
mod http;
mod json_connection;
mod kv_origin;
mod leases;
mod metrics;
mod publisher;
mod rank;
mod render;
mod request;
mod response;
mod running_request;
mod scheduler;
mod stored_responses;
mod tokens;
mod wire;

use std::io::{self, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use anyhow::Context as _;
use axum::http::{HeaderMap, StatusCode};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

pub use config::EngineConfig;

use aborts::AbortRegistry;
use adapters::LoadedAdapters;
use bootstrap::BootstrapRooms;
use cache::{BlockCache, BlockKeys};
use ctx_request_ids::CtxRequestIds;
use disaggregation::{SideChannelAddress, TransferCounters, TransferProtocol};
use error::OpenAiError;
use faults::FaultState;
use publisher::{BatchDrops, KvEventPublisher};
use rank::EngineRank;
use request::GenerationRequest;
use scheduler::StepScheduler;
use stored_responses::StoredResponses;
use tokens::SimTokenizer;

/// Request headers that select a rank, the engine's own header first.
const RANK_HEADERS: [&str; 2] = ["x-data-parallel-rank", "x-dp-rank"];

/// Request header that selects a worker behind a front end.
const WORKER_HEADER: &str = "x-worker-instance-id";

/// State shared by the HTTP handlers.
#[derive(Debug)]
struct SimEngine {
    config: EngineConfig,
    tokenizer: Arc<SimTokenizer>,
    ranks: Vec<Arc<EngineRank>>,
    faults: Arc<FaultState>,
    round_robin: AtomicUsize,
    next_request_id: AtomicU64,
    /// Counter for TensorRT-LLM's `ctx_request_id`.
    next_ctx_request_id: AtomicU64,
    ctx_request_ids: CtxRequestIds,
    transfer_counters: TransferCounters,
    /// Addresses from which the ranks' leased blocks can be fetched, in rank order.
    side_channels: Vec<SideChannelAddress>,
    bootstrap_rooms: Arc<BootstrapRooms>,
    aborts: AbortRegistry,
    stored_responses: StoredResponses,
    adapters: LoadedAdapters,
}

/// Runs an engine on `listener` until the returned future is dropped or fails. When the engine is
/// ready, it prints one JSON line with its socket addresses, unless it is configured as quiet.
///
/// The future is boxed, so that its code is generated once and not in each program that runs it.
pub fn run(config: EngineConfig, listener: TcpListener) -> BoxFuture<'static, anyhow::Result<()>> {
    serve(config, listener).boxed()
}

async fn serve(config: EngineConfig, listener: TcpListener) -> anyhow::Result<()> {
    config.check()?;
    let address = listener.local_addr()?;
    let mut engine = SimEngine::start(config).await?;
    let mut tasks = JoinSet::new();
    for rank in &engine.ranks {
        tasks.spawn(rank.clone().run(engine.faults.clone()));
        tasks.spawn(rank.clone().expire_leases());
    }
    let bootstrap = engine
        .open_transfer_listeners(address.ip(), &mut tasks)
        .await?;
    let engine = Arc::new(engine);
    if !engine.config.quiet {
        engine.print_addresses(address, bootstrap)?;
    }
    tokio::select! {
        result = http::serve(engine.clone(), listener) => result.map(|never| match never {}).context("serving HTTP"),
        result = tasks.join_next() => anyhow::bail!("a rank stopped: {result:?}"),
    }
}

impl SimEngine {
    async fn start(config: EngineConfig) -> anyhow::Result<Self> {
        let files = config.files.clone();
        let tokenizer = tokio::task::spawn_blocking(move || SimTokenizer::load(&files)).await??;
        let capacity = &config.capacity;
        let mut ranks = Vec::new();
        for number in capacity.dp_start..capacity.dp_start + capacity.dp_size {
            let publisher = KvEventPublisher::open(config.events.sockets(number)?).await?;
            let cache = BlockCache::new(capacity.block_size, capacity.num_blocks)
                .with_speculative_decoding(config.api.speculative_decoding);
            let cache = if config.api.no_prefix_caching {
                cache.disable_prefix_cache()
            } else {
                cache
            };
            let scheduler = StepScheduler::new(cache, capacity.limits());
            let rank = EngineRank::new(
                number,
                scheduler,
                publisher,
                config.timing,
                config.events.event_encoding,
            );
            let protocol = config.disaggregation.protocol();
            let uses_leases = protocol.is_some_and(TransferProtocol::uses_leases);
            ranks.push(Arc::new(if uses_leases {
                rank.with_lease(config.disaggregation.kv_lease)
            } else {
                rank
            }));
        }
        let faults = Arc::new(FaultState::new(config.faults.clone()));
        let drops = config.faults.drop_events.unwrap_or_default();
        let adapters = LoadedAdapters::new(&config.loras);
        let engine = Self {
            config,
            tokenizer: Arc::new(tokenizer),
            ranks,
            faults,
            round_robin: AtomicUsize::new(0),
            next_request_id: AtomicU64::new(0),
            next_ctx_request_id: AtomicU64::new(0),
            ctx_request_ids: CtxRequestIds::default(),
            transfer_counters: TransferCounters::default(),
            side_channels: Vec::new(),
            bootstrap_rooms: Arc::default(),
            aborts: AbortRegistry::default(),
            stored_responses: StoredResponses::default(),
            adapters,
        };
        engine.drop_events(drops);
        Ok(engine)
    }

    /// Opens the listeners for KV transfer. Returns the address of the bootstrap server if there is
    /// one.
    async fn open_transfer_listeners(
        &mut self,
        host: IpAddr,
        tasks: &mut JoinSet<()>,
    ) -> anyhow::Result<Option<SocketAddr>> {
        let disaggregation = &self.config.disaggregation;
        let protocol = disaggregation.protocol();
        if protocol == Some(TransferProtocol::SglangPrefill) {
            let listener = TcpListener::bind((host, disaggregation.bootstrap_port))
                .await
                .context("cannot listen for the bootstrap server")?;
            let address = listener.local_addr()?;
            let rooms = self.bootstrap_rooms.clone();
            tasks.spawn(async move { log_listener_end(&bootstrap::serve(rooms, listener).await) });
            return Ok(Some(address));
        }
        if !protocol.is_some_and(TransferProtocol::uses_leases) {
            return Ok(None);
        }
        let advertised_host = match &disaggregation.kv_side_channel_host {
            Some(host) => host.clone(),
            None if host.is_unspecified() => "127.0.0.1".to_owned(),
            None => host.to_string(),
        };
        let start_id: u128 = rand::random();
        for (at, rank) in self.ranks.iter().enumerate() {
            let base_port = disaggregation.kv_side_channel_port;
            let port = if base_port == 0 {
                0
            } else {
                base_port
                    .checked_add(u16::try_from(at)?)
                    .context("side channel port out of range")?
            };
            let listener = TcpListener::bind((host, port))
                .await
                .context("cannot listen for the side channel")?;
            let engine = engine_id(start_id, (self.ranks.len() > 1).then_some(rank.number));
            self.side_channels.push(SideChannelAddress {
                engine: engine.clone(),
                host: advertised_host.clone(),
                port: listener.local_addr()?.port(),
            });
            let rank = rank.clone();
            tasks.spawn(async move {
                log_listener_end(&fetch::serve_blocks(engine, rank, listener).await)
            });
        }
        Ok(None)
    }

    fn print_addresses(
        &self,
        address: SocketAddr,
        bootstrap: Option<SocketAddr>,
    ) -> anyhow::Result<()> {
        let line = json!({
            "listening": address.to_string(),
            "id": self.config.id,
            "model": self.config.model,
            "kv_event_sources": self.event_sources(),
            "bootstrap": bootstrap.map(|address| address.to_string()),
        });
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{line}")?;
        stdout
            .flush()
            .context("cannot print the listening addresses")
    }

    /// Returns the rank requested by the headers, or by the body if there is no such header.
    fn resolve_rank(
        &self,
        headers: &HeaderMap,
        body_rank: Option<u32>,
    ) -> Result<Option<Arc<EngineRank>>, String> {
        if self.config.api.front_end {
            return self.pinned_worker(headers);
        }
        let header = RANK_HEADERS.iter().find_map(|name| headers.get(*name));
        let (requested, number) = match header {
            Some(value) => (
                format!("{value:?}"),
                value
                    .to_str()
                    .ok()
                    .and_then(|text| text.parse::<u32>().ok()),
            ),
            None if body_rank.is_some() => (format!("{body_rank:?}"), body_rank),
            None => return Ok(None),
        };
        let rank = self.ranks.iter().find(|rank| Some(rank.number) == number);
        rank.cloned()
            .map(Some)
            .ok_or_else(|| format!("data parallel rank {requested} is not served here"))
    }

    /// Returns the worker that a request to the front end names. Its id is that of the engine plus
    /// the rank.
    fn pinned_worker(&self, headers: &HeaderMap) -> Result<Option<Arc<EngineRank>>, String> {
        let Some(value) = headers.get(WORKER_HEADER) else {
            return Ok(None);
        };
        let id = value
            .to_str()
            .ok()
            .and_then(|text| text.parse::<u64>().ok());
        let is_pinned =
            |rank: &&Arc<EngineRank>| id == self.config.id.checked_add(u64::from(rank.number));
        let pinned = self.ranks.iter().find(is_pinned);
        pinned
            .cloned()
            .map(Some)
            .ok_or_else(|| format!("{value:?} does not identify a known worker"))
    }

    /// Returns the next rank in round-robin order.
    fn next_rank(&self) -> Arc<EngineRank> {
        let next = self.round_robin.fetch_add(1, Ordering::Relaxed);
        self.ranks[next % self.ranks.len()].clone()
    }

    /// Returns the rank to which an SGLang prefill engine assigns a room.
    fn bootstrap_room_rank(&self, room: u64) -> Arc<EngineRank> {
        self.ranks[(room % self.ranks.len() as u64) as usize].clone()
    }

    fn side_channel(&self, rank: &EngineRank) -> Option<&SideChannelAddress> {
        let at = self
            .ranks
            .iter()
            .position(|other| other.number == rank.number)?;
        self.side_channels.get(at)
    }

    /// Returns the id by which a decode engine fetches the blocks. vLLM derives it from the
    /// response id. TensorRT-LLM uses the given request id, or a counter that starts at 1 on every
    /// engine.
    fn lease_id(&self, response_id: &str, ctx_request_id: Option<u64>) -> String {
        match (self.config.disaggregation.protocol(), ctx_request_id) {
            (Some(TransferProtocol::Trtllm), Some(id)) => id.to_string(),
            (Some(TransferProtocol::Trtllm), None) => {
                (self.next_ctx_request_id.fetch_add(1, Ordering::Relaxed) + 1).to_string()
            }
            _ => format!(
                "{response_id}-{:08x}",
                self.next_request_id.fetch_add(1, Ordering::Relaxed)
            ),
        }
    }

    /// Returns the keys that separate a request's blocks. Fails for an unknown model.
    fn block_keys(&self, request: &GenerationRequest) -> Result<BlockKeys, OpenAiError> {
        let lora = match request.model.as_deref() {
            None => None,
            Some(model) if model == self.config.model => None,
            Some(model) => Some(self.adapters.find(model).ok_or_else(|| {
                OpenAiError::new(
                    StatusCode::NOT_FOUND,
                    format!("The model `{model}` does not exist."),
                )
            })?),
        };
        let salt = request.cache_salt.as_deref().map(Arc::from);
        Ok(BlockKeys {
            lora,
            salt,
            session: request.session_id.as_deref().map(Arc::from),
        })
    }

    /// Makes every rank drop its next batches of KV events.
    fn drop_events(&self, drops: BatchDrops) {
        for rank in &self.ranks {
            rank.publisher.drop_next(drops);
        }
    }

    fn generate_request_id(&self) -> String {
        format!(
            "{:x}-{:08x}",
            self.config.id,
            self.next_request_id.fetch_add(1, Ordering::Relaxed)
        )
    }

    fn event_sources(&self) -> Value {
        let source = |rank: &Arc<EngineRank>| {
            json!({
                "data_parallel_rank": rank.number,
                "endpoint": rank.publisher.events,
                "replay_endpoint": rank.publisher.replay,
                "topic": self.config.events.topic,
            })
        };
        self.ranks.iter().map(source).collect()
    }

    /// Returns the endpoint in the form of vLLM's configuration. A bound endpoint has a wildcard
    /// host, because vLLM connects to any other host.
    fn advertised_endpoint(&self, endpoint: &str) -> String {
        match self.config.events.events_attach {
            publisher::AttachMode::Bind => wildcard(endpoint),
            publisher::AttachMode::Connect => endpoint.to_owned(),
        }
    }

    /// Returns the body of vLLM's discovery endpoint: the endpoints by rank, only for ranks that
    /// publish.
    fn publishers(&self) -> Value {
        let source = |rank: &Arc<EngineRank>| {
            let config = json!({
                "enable_kv_cache_events": true,
                "publisher": "zmq",
                "endpoint": self.advertised_endpoint(rank.publisher.events.as_deref()?),
                "replay_endpoint": rank.publisher.replay.as_deref().map(wildcard),
                "buffer_steps": self.config.events.buffer_steps,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": self.config.events.topic,
            });
            Some((rank.number.to_string(), config))
        };
        Value::Object(self.ranks.iter().filter_map(source).collect())
    }
}

/// Returns vLLM's engine id, which is new after every start. If there are several ranks, their ids
/// are distinct.
fn engine_id(start_id: u128, rank: Option<u32>) -> String {
    let hex = format!("{start_id:032x}");
    let parts = [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ];
    rank.map_or_else(
        || parts.join("-"),
        |rank| format!("{}_dp{rank}", parts.join("-")),
    )
}

fn log_listener_end(result: &io::Result<()>) {
    tracing::error!(?result, "KV transfer listener ended");
}

/// Replaces the host of an endpoint by the wildcard.
fn wildcard(endpoint: &str) -> String {
    match endpoint
        .strip_prefix("tcp://")
        .and_then(|address| address.rsplit_once(':'))
    {
        Some((_, port)) => format!("tcp://*:{port}"),
        None => endpoint.to_owned(),
    }
}
