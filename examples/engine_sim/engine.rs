//! An OpenAI-compatible engine without a model, close enough to vLLM to test and measure routers with: requests are
//! tokenised for real, their blocks live in a real paged prefix cache whose every change is published as vLLM publishes
//! it, and a continuous-batching scheduler spends simulated time on them. Only the words it says are made up.
//!
//! Other examples include it by `#[path = "engine_sim/engine.rs"] mod engine;` and call [`run`].

#[path = "engine/answer.rs"]
mod answer;
#[path = "engine/ask.rs"]
mod ask;
#[path = "engine/cache.rs"]
mod cache;
#[cfg(test)]
#[path = "engine/captured.rs"]
mod captured;
#[path = "engine/config.rs"]
mod config;
#[path = "engine/faults.rs"]
mod faults;
#[path = "engine/guard.rs"]
mod guard;
#[path = "engine/http.rs"]
mod http;
#[path = "engine/metrics.rs"]
mod metrics;
#[path = "engine/publisher.rs"]
mod publisher;
#[path = "engine/rank.rs"]
mod rank;
#[path = "engine/render.rs"]
mod render;
#[path = "engine/scheduler.rs"]
mod scheduler;
#[path = "engine/tokens.rs"]
mod tokens;
#[path = "engine/wire.rs"]
mod wire;

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use anyhow::Context as _;
use axum::http::HeaderMap;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

pub(crate) use config::EngineConfig;

use cache::{Cache, Lora};
use faults::Mood;
use publisher::{Drops, Publisher};
use rank::Rank;
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
}

/// Runs an engine on `listener` until the returned future is dropped or fails. Unless told to be quiet it prints one JSON
/// line when it is ready, with the addresses of its sockets.
pub(crate) async fn run(config: EngineConfig, listener: TcpListener) -> anyhow::Result<()> {
    config.check()?;
    let address = listener.local_addr()?;
    let engine = Arc::new(Engine::start(config).await?);
    let mut tasks = JoinSet::new();
    for rank in &engine.ranks {
        tasks.spawn(rank.clone().drive(engine.mood.clone()));
    }
    if !engine.config.quiet {
        engine.announce(address)?;
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
            let cache = if config.surface.no_prefix_caching { cache.forgetting() } else { cache };
            let scheduler = Scheduler::new(cache, capacity.limits());
            let habits = (config.pace, config.events.event_encoding);
            ranks.push(Arc::new(Rank::new(number, scheduler, publisher, habits)));
        }
        let mood = Arc::new(Mood::new(config.misbehave.clone()));
        let drops = config.misbehave.drop_events.unwrap_or_default();
        let (turn, names) = (AtomicUsize::new(0), AtomicU64::new(0));
        let engine = Self { config, tokens: Arc::new(tokens), ranks, mood, turn, names };
        engine.drop_events(drops);
        Ok(engine)
    }

    fn announce(&self, address: SocketAddr) -> anyhow::Result<()> {
        let line = json!({
            "listening": address.to_string(),
            "id": self.config.id,
            "model": self.config.model,
            "kv_event_sources": self.event_sources(),
        });
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{line}")?;
        stdout.flush().context("cannot say where the engine listens")
    }

    /// The rank that the headers ask for, or the next in turn.
    fn rank(&self, headers: &HeaderMap) -> Result<Arc<Rank>, String> {
        let Some(asked) = RANK_HEADERS.iter().find_map(|name| headers.get(*name)) else {
            let turn = self.turn.fetch_add(1, Ordering::Relaxed);
            return Ok(self.ranks[turn % self.ranks.len()].clone());
        };
        let number = asked.to_str().ok().and_then(|text| text.parse::<u32>().ok());
        let rank = self.ranks.iter().find(|rank| Some(rank.number) == number);
        rank.cloned().ok_or_else(|| format!("data parallel rank {asked:?} is not served here"))
    }

    fn lora(&self, name: &str) -> Option<Lora> {
        let at = self.config.loras.iter().position(|lora| lora == name)?;
        Some(Lora { id: u32::try_from(at + 1).ok()?, name: Arc::from(name) })
    }

    /// Loses the next batches of every rank.
    fn drop_events(&self, drops: Drops) {
        for rank in &self.ranks {
            rank.publisher.drop_next(drops);
        }
    }

    fn next_name(&self) -> String {
        format!("{:x}-{:08x}", self.config.id, self.names.fetch_add(1, Ordering::Relaxed))
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

/// An endpoint on all addresses.
fn wildcard(endpoint: &str) -> String {
    match endpoint.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':')) {
        Some((_, port)) => format!("tcp://*:{port}"),
        None => endpoint.to_owned(),
    }
}
