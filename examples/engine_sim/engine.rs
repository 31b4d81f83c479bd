//! An OpenAI-compatible engine without a model, close enough to vLLM to test and measure routers with: requests are
//! tokenised for real, their blocks live in a real paged prefix cache whose every change is published as vLLM publishes
//! it, and a continuous-batching scheduler spends simulated time on them. Only the words it says are made up.
//!
//! Other examples include it by `#[path = "engine_sim/engine.rs"] mod engine;` and call [`run`].

#[path = "engine/aborts.rs"]
mod aborts;
#[path = "engine/answer.rs"]
mod answer;
#[path = "engine/ask.rs"]
mod ask;
#[path = "engine/cache.rs"]
mod cache;
#[cfg(test)]
#[path = "engine/captured.rs"]
mod captured;
#[path = "engine/choices.rs"]
mod choices;
#[path = "engine/claims.rs"]
mod claims;
#[path = "engine/config.rs"]
mod config;
#[path = "engine/faults.rs"]
mod faults;
#[path = "engine/fetch.rs"]
mod fetch;
#[path = "engine/guard.rs"]
mod guard;
#[path = "engine/handover.rs"]
mod handover;
#[path = "engine/http.rs"]
mod http;
#[path = "engine/leases.rs"]
mod leases;
#[path = "engine/line.rs"]
mod line;
#[path = "engine/metrics.rs"]
mod metrics;
#[path = "engine/origin.rs"]
mod origin;
#[path = "engine/publisher.rs"]
mod publisher;
#[path = "engine/rank.rs"]
mod rank;
#[path = "engine/render.rs"]
mod render;
#[path = "engine/rooms.rs"]
mod rooms;
#[path = "engine/scheduler.rs"]
mod scheduler;
#[path = "engine/tokens.rs"]
mod tokens;
#[path = "engine/under_way.rs"]
mod under_way;
#[path = "engine/wire.rs"]
mod wire;

use std::io::{self, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use anyhow::Context as _;
use axum::http::HeaderMap;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

pub(crate) use config::EngineConfig;

use aborts::Aborts;
use cache::{Cache, Lora};
use claims::Claims;
use faults::Mood;
use handover::{Counts, Door, Protocol};
use publisher::{Drops, Publisher};
use rank::Rank;
use rooms::Rooms;
use scheduler::Scheduler;
use tokens::Tokens;

/// Request headers that name a rank, the engine's own first.
const RANK_HEADERS: [&str; 2] = ["x-data-parallel-rank", "x-dp-rank"];

/// Everything the HTTP surface works on.
#[derive(Debug)]
struct Engine {
    config: EngineConfig,
    tokens: Arc<Tokens>,
    ranks: Vec<Arc<Rank>>,
    mood: Arc<Mood>,
    turn: AtomicUsize,
    names: AtomicU64,
    /// Prompts lent under a number of this engine's own.
    numbers: AtomicU64,
    claims: Claims,
    counts: Counts,
    /// Where the ranks lend, in their order.
    doors: Vec<Door>,
    rooms: Arc<Rooms>,
    aborts: Aborts,
}

/// Runs an engine on `listener` until the returned future is dropped or fails. Unless told to be quiet it prints one JSON
/// line when it is ready, with the addresses of its sockets.
pub(crate) async fn run(config: EngineConfig, listener: TcpListener) -> anyhow::Result<()> {
    config.check()?;
    let address = listener.local_addr()?;
    let mut engine = Engine::start(config).await?;
    let mut tasks = JoinSet::new();
    for rank in &engine.ranks {
        tasks.spawn(rank.clone().drive(engine.mood.clone()));
        tasks.spawn(rank.clone().expire_leases());
    }
    let bootstrap = engine.open(address.ip(), &mut tasks).await?;
    let engine = Arc::new(engine);
    if !engine.config.quiet {
        engine.announce(address, bootstrap)?;
    }
    tokio::select! {
        ended = http::serve(engine.clone(), listener) => ended.map(|never| match never {}).context("serving HTTP"),
        ended = tasks.join_next() => anyhow::bail!("a rank stopped: {ended:?}"),
    }
}

impl Engine {
    async fn start(config: EngineConfig) -> anyhow::Result<Self> {
        let files = config.files.clone();
        let tokens = tokio::task::spawn_blocking(move || Tokens::load(&files)).await??;
        let capacity = &config.capacity;
        let mut ranks = Vec::new();
        for number in capacity.dp_start..capacity.dp_start + capacity.dp_size {
            let publisher = Publisher::open(config.events.sockets(number)?).await?;
            let cache = Cache::new(capacity.block_size, capacity.num_blocks);
            let cache = if config.surface.no_prefix_caching {
                cache.forgetting()
            } else {
                cache
            };
            let scheduler = Scheduler::new(cache, capacity.limits());
            let habits = (config.pace, config.events.event_encoding);
            let rank = Rank::new(number, scheduler, publisher, habits);
            let lends = config.handover.protocol().is_some_and(Protocol::lends);
            ranks.push(Arc::new(if lends {
                rank.with_lease(config.handover.kv_lease)
            } else {
                rank
            }));
        }
        let mood = Arc::new(Mood::new(config.misbehave.clone()));
        let drops = config.misbehave.drop_events.unwrap_or_default();
        let engine = Self {
            config,
            tokens: Arc::new(tokens),
            ranks,
            mood,
            turn: AtomicUsize::new(0),
            names: AtomicU64::new(0),
            numbers: AtomicU64::new(0),
            claims: Claims::default(),
            counts: Counts::default(),
            doors: Vec::new(),
            rooms: Arc::default(),
            aborts: Aborts::default(),
        };
        engine.drop_events(drops);
        Ok(engine)
    }

    /// Opens the listeners where other engines come for blocks; returns the address of the bootstrap server if it has one.
    async fn open(
        &mut self,
        host: IpAddr,
        tasks: &mut JoinSet<()>,
    ) -> anyhow::Result<Option<SocketAddr>> {
        let handover = &self.config.handover;
        let protocol = handover.protocol();
        if protocol == Some(Protocol::SglangPrefill) {
            let listener = TcpListener::bind((host, handover.bootstrap_port))
                .await
                .context("the bootstrap server")?;
            let address = listener.local_addr()?;
            let rooms = self.rooms.clone();
            tasks.spawn(async move { ended(&rooms::receive(rooms, listener).await) });
            return Ok(Some(address));
        }
        if !protocol.is_some_and(Protocol::lends) {
            return Ok(None);
        }
        let told = match &handover.kv_side_channel_host {
            Some(told) => told.clone(),
            None if host.is_unspecified() => "127.0.0.1".to_owned(),
            None => host.to_string(),
        };
        let id: u128 = rand::random();
        for (at, rank) in self.ranks.iter().enumerate() {
            let first = handover.kv_side_channel_port;
            let port = if first == 0 {
                0
            } else {
                first
                    .checked_add(u16::try_from(at)?)
                    .context("no such port")?
            };
            let listener = TcpListener::bind((host, port))
                .await
                .context("the side channel")?;
            let engine = engine_id(id, (self.ranks.len() > 1).then_some(rank.number));
            self.doors.push(Door {
                engine: engine.clone(),
                host: told.clone(),
                port: listener.local_addr()?.port(),
            });
            let rank = rank.clone();
            tasks.spawn(async move { ended(&fetch::lend(engine, rank, listener).await) });
        }
        Ok(None)
    }

    fn announce(&self, address: SocketAddr, bootstrap: Option<SocketAddr>) -> anyhow::Result<()> {
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
            .context("cannot say where the engine listens")
    }

    /// The rank that the headers ask for, or else the body.
    fn rank_asked(
        &self,
        headers: &HeaderMap,
        in_body: Option<u32>,
    ) -> Result<Option<Arc<Rank>>, String> {
        let (asked, number) = match RANK_HEADERS.iter().find_map(|name| headers.get(*name)) {
            Some(asked) => (
                format!("{asked:?}"),
                asked
                    .to_str()
                    .ok()
                    .and_then(|text| text.parse::<u32>().ok()),
            ),
            None if in_body.is_some() => (format!("{in_body:?}"), in_body),
            None => return Ok(None),
        };
        let rank = self.ranks.iter().find(|rank| Some(rank.number) == number);
        rank.cloned()
            .map(Some)
            .ok_or_else(|| format!("data parallel rank {asked} is not served here"))
    }

    fn rank_in_turn(&self) -> Arc<Rank> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        self.ranks[turn % self.ranks.len()].clone()
    }

    /// The rank that a prefill engine of SGLang's kind gives a room to.
    fn rank_of_room(&self, room: u64) -> Arc<Rank> {
        self.ranks[(room % self.ranks.len() as u64) as usize].clone()
    }

    fn door(&self, rank: &Rank) -> Option<&Door> {
        let at = self
            .ranks
            .iter()
            .position(|other| other.number == rank.number)?;
        self.doors.get(at)
    }

    /// A name for blocks that another engine will come for: made from the answer's with vLLM. With TensorRT-LLM it is the
    /// number that was given, or else the engine's next, and every engine counts from 1.
    fn lease_name(&self, answer: &str, number: Option<u64>) -> String {
        match (self.config.handover.protocol(), number) {
            (Some(Protocol::Trtllm), Some(number)) => number.to_string(),
            (Some(Protocol::Trtllm), None) => {
                (self.numbers.fetch_add(1, Ordering::Relaxed) + 1).to_string()
            }
            _ => format!(
                "{answer}-{:08x}",
                self.names.fetch_add(1, Ordering::Relaxed)
            ),
        }
    }

    fn lora(&self, name: &str) -> Option<Lora> {
        let at = self.config.loras.iter().position(|lora| lora == name)?;
        Some(Lora {
            id: u32::try_from(at + 1).ok()?,
            name: Arc::from(name),
        })
    }

    /// Loses the next batches of every rank.
    fn drop_events(&self, drops: Drops) {
        for rank in &self.ranks {
            rank.publisher.drop_next(drops);
        }
    }

    fn next_name(&self) -> String {
        format!(
            "{:x}-{:08x}",
            self.config.id,
            self.names.fetch_add(1, Ordering::Relaxed)
        )
    }

    fn event_sources(&self) -> Value {
        let one = |rank: &Arc<Rank>| {
            json!({
                "data_parallel_rank": rank.number,
                "endpoint": rank.publisher.events,
                "replay_endpoint": rank.publisher.replay,
                "topic": self.config.events.topic,
            })
        };
        self.ranks.iter().map(one).collect()
    }

    /// The endpoint as an operator of vLLM has to write it: with a wildcard, or the engine connects.
    fn as_configured(&self, endpoint: &str) -> String {
        match self.config.events.events_attach {
            publisher::Attach::Bind => wildcard(endpoint),
            publisher::Attach::Connect => endpoint.to_owned(),
        }
    }

    /// The same as vLLM's discovery endpoint tells it: by rank, and only of ranks that publish.
    fn publishers(&self) -> Value {
        let one = |rank: &Arc<Rank>| {
            let config = json!({
                "enable_kv_cache_events": true,
                "publisher": "zmq",
                "endpoint": self.as_configured(rank.publisher.events.as_deref()?),
                "replay_endpoint": rank.publisher.replay.as_deref().map(wildcard),
                "buffer_steps": self.config.events.buffer_steps,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": self.config.events.topic,
            });
            Some((rank.number.to_string(), config))
        };
        Value::Object(self.ranks.iter().filter_map(one).collect())
    }
}

/// vLLM's name of one start of an engine, or of one of several ranks.
fn engine_id(id: u128, rank: Option<u32>) -> String {
    let hex = format!("{id:032x}");
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

fn ended(ended: &io::Result<()>) {
    tracing::error!("a listener for other engines ended: {ended:?}");
}

/// An endpoint on all addresses.
fn wildcard(endpoint: &str) -> String {
    match endpoint
        .strip_prefix("tcp://")
        .and_then(|address| address.rsplit_once(':'))
    {
        Some((_, port)) => format!("tcp://*:{port}"),
        None => endpoint.to_owned(),
    }
}
