//! Asks engines what they say of themselves: when a worker joins, and from time to time. Engines without these pages are as
//! good as others; nothing waits for an answer but the next question to the same engine.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::config::LearnConfig;
use crate::discovery::zmq::ZmqEndpoint;
use crate::engine_client::config::EnginesConfig;
use crate::engine_client::{CacheConfig, EngineClient, EngineError, EventsOfRank};
use crate::learned::Learned;
use crate::metrics::{Metrics, OutcomeLabel};
use crate::router::Router;
use crate::worker::{Attach, BlockSize, Endpoint, EventSource, Ranks, WorkerId};

/// What is known of every engine that said anything, by worker and where it was asked.
pub(super) type Said = Arc<HashMap<(WorkerId, Endpoint), Learned>>;

/// How often it is looked whether a worker has joined.
const LOOK: Duration = Duration::from_millis(500);
/// Engines asked at once.
const AT_ONCE: usize = 16;

/// Who did not answer is asked again so soon.
const SOON: Duration = Duration::from_secs(5);

/// Who asks.
pub(super) struct Learner {
    pub(super) router: Arc<Router>,
    pub(super) client: EngineClient,
    pub(super) engines: EnginesConfig,
    pub(super) settings: LearnConfig,
    pub(super) metrics: Arc<Metrics>,
    pub(super) said: watch::Sender<Said>,
}

impl Learner {
    /// Asks for ever.
    pub(super) async fn run(&self) -> anyhow::Result<()> {
        // When each is to be asked again.
        let mut due_at: HashMap<(WorkerId, Endpoint), Instant> = HashMap::new();
        let mut looks = tokio::time::interval(LOOK);
        loop {
            looks.tick().await;
            let fleet = self.router.fleet();
            let workers: Vec<_> = fleet.workers().map(|worker| (worker.id, worker.endpoint)).collect();
            due_at.retain(|key, _| workers.contains(key));
            let now = Instant::now();
            let due: Vec<_> =
                workers.iter().copied().filter(|key| due_at.get(key).is_none_or(|due| *due <= now)).collect();
            if due.is_empty() {
                continue;
            }
            let answers: Vec<_> = stream::iter(due)
                .map(|key| async move { (key, self.ask(key.1).await) })
                .buffer_unordered(AT_ONCE)
                .collect()
                .await;
            // Who was not there may only be starting.
            let wait = |pages: &Pages| if pages.are_missing() { SOON } else { self.settings.interval.get() };
            due_at.extend(answers.iter().map(|(key, pages)| (*key, now + wait(pages))));
            self.said.send_if_modified(|said| {
                let mut next = HashMap::clone(said);
                next.retain(|key, _| workers.contains(key));
                for (key, pages) in answers {
                    let endpoint = key.1;
                    let learned = pages.learned(endpoint, next.get(&key));
                    if !learned.is_empty() {
                        next.insert(key, learned);
                    }
                }
                let news = next != **said;
                *said = Arc::new(next);
                news
            });
        }
    }

    async fn ask(&self, endpoint: Endpoint) -> Pages {
        let url = self.engines.url(endpoint);
        let (page, sources) = tokio::join!(self.client.metrics(&url), self.client.kv_event_sources(&url));
        Pages { caches: self.counted(page.map(|page| page.caches())), sources: self.counted(sources) }
    }

    /// The answer; empty where the engine has no such page, and none where it gave no answer.
    fn counted<T: Default>(&self, answer: Result<T, EngineError>) -> Option<T> {
        let outcome = answer.as_ref().err().map_or("ok", EngineError::label);
        self.metrics.engine_settings_asked.get_or_create(&OutcomeLabel { outcome }).inc();
        match answer {
            Err(EngineError::NotOffered(_)) => Some(T::default()),
            answer => answer.ok(),
        }
    }
}

/// What an engine answered, page by page: one that times out says nothing against what it said before.
struct Pages {
    caches: Option<Vec<CacheConfig>>,
    sources: Option<Vec<EventsOfRank>>,
}

impl Pages {
    fn are_missing(&self) -> bool {
        self.caches.is_none() && self.sources.is_none()
    }

    /// What is known now, with what was known before.
    fn learned(self, endpoint: Endpoint, before: Option<&Learned>) -> Learned {
        let (no_caches, no_sources) = (self.caches.is_none(), self.sources.is_none());
        let now = learned(endpoint, &self.caches.unwrap_or_default(), &self.sources.unwrap_or_default());
        let before = before.cloned().unwrap_or_default();
        let cached = if no_caches { &before } else { &now };
        Learned {
            block_size: cached.block_size,
            total_kv_blocks: cached.total_kv_blocks,
            ranks: cached.ranks,
            event_sources: if no_sources { before.event_sources.clone() } else { now.event_sources.clone() },
        }
    }
}

/// What two pages of an engine say.
pub fn learned(endpoint: Endpoint, caches: &[CacheConfig], sources: &[EventsOfRank]) -> Learned {
    let mut sizes = caches.iter().map(|cache| cache.block_size);
    let size = sizes.next().flatten().filter(|first| sizes.all(|size| size == Some(*first)));
    let published = sources.iter().filter(|source| source.enabled);
    let event_sources: BTreeMap<u32, EventSource> =
        published.filter_map(|source| Some((source.rank, of_rank(endpoint, source)?))).collect();
    Learned {
        block_size: size.and_then(BlockSize::new),
        total_kv_blocks: caches.iter().filter_map(|cache| cache.num_gpu_blocks).filter(|blocks| *blocks > 0).min(),
        ranks: ranks(caches.iter().filter_map(CacheConfig::rank), caches.len()),
        event_sources,
    }
}

/// The ranks that tell of themselves, if they follow one another.
fn ranks(told: impl Iterator<Item = u32>, count: usize) -> Option<Ranks> {
    let mut all: Vec<u32> = told.collect();
    all.sort_unstable();
    all.dedup();
    let start = *all.first()?;
    let is_whole =
        count <= Ranks::MOST as usize && all.len() == count && all.iter().zip(start..).all(|(rank, at)| *rank == at);
    let size = NonZeroU32::new(u32::try_from(all.len()).ok()?)?;
    is_whole.then_some(Ranks { start, size })
}

/// A source that can be connected to from here. An engine publishes at its own host, whatever it calls that; but vLLM does
/// so only where the endpoint is a wildcard or a path, and connects to a subscriber in every other case. Whoever that is, it
/// is not us unless the configuration says so.
fn of_rank(worker: Endpoint, source: &EventsOfRank) -> Option<EventSource> {
    let binds = ["*", "::"].iter().any(|mark| source.endpoint.contains(mark)) || source.endpoint.starts_with("ipc:");
    if !binds {
        return None;
    }
    let replay = source.replay_endpoint.as_deref().and_then(|replay| reachable(worker, replay));
    let endpoint = reachable(worker, &source.endpoint)?;
    Some(EventSource { endpoint, topic: source.topic.clone(), attach: Attach::Connect, replay })
}

/// An endpoint of the worker's host as it is reached from here; none of another host, where the engine connects to.
fn reachable(worker: Endpoint, endpoint: &str) -> Option<String> {
    let endpoint: ZmqEndpoint = endpoint.parse().ok()?;
    let ZmqEndpoint::Tcp { host, port } = &endpoint else {
        // A path is of use on the same machine only.
        return worker.0.ip().is_loopback().then(|| endpoint.to_string());
    };
    let own = worker.0.ip();
    let address = host.parse::<std::net::IpAddr>();
    let is_local = host == "localhost" || address.is_ok_and(|ip| ip.is_loopback() || ip == own);
    let here = ZmqEndpoint::Tcp { host: own.to_string(), port: *port };
    (*port != 0 && (endpoint.is_wildcard() || is_local)).then(|| here.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_replaced_by_the_workers_address() {
        let worker: Endpoint = "10.0.0.7:8000".parse().unwrap();
        let cases = [
            ("tcp://*:5557", Some("tcp://10.0.0.7:5557")),
            ("tcp://0.0.0.0:5557", Some("tcp://10.0.0.7:5557")),
            ("tcp://[::]:5557", Some("tcp://10.0.0.7:5557")),
            ("tcp://127.0.0.1:5557", Some("tcp://10.0.0.7:5557")),
            ("tcp://localhost:5557", Some("tcp://10.0.0.7:5557")),
            ("tcp://10.0.0.7:5557", Some("tcp://10.0.0.7:5557")),
            ("tcp://10.0.0.9:5557", None),
            ("tcp://*:0", None),
            ("ipc:///run/events", None),
            ("nonsense", None),
        ];
        for (given, expected) in cases {
            assert_eq!(reachable(worker, given).as_deref(), expected, "{given}");
        }
        let local: Endpoint = "127.0.0.1:8000".parse().unwrap();
        assert_eq!(reachable(local, "ipc:///run/events").as_deref(), Some("ipc:///run/events"));
    }

    #[test]
    fn a_page_without_an_answer_takes_nothing_back() {
        let worker: Endpoint = "10.0.0.7:8000".parse().unwrap();
        let cache = CacheConfig {
            engine: "0".to_owned(),
            block_size: Some(16),
            num_gpu_blocks: Some(90),
            prefix_caching: None,
            hash_algorithm: None,
        };
        let source = |endpoint: &str| EventsOfRank {
            rank: 0,
            enabled: true,
            endpoint: endpoint.to_owned(),
            replay_endpoint: None,
            topic: String::new(),
        };
        let whole = Pages { caches: Some(vec![cache]), sources: Some(vec![source("tcp://*:5557")]) };
        let first = whole.learned(worker, None);
        assert_eq!((first.total_kv_blocks, first.event_sources.len()), (Some(90), 1));
        for silent in
            [Pages { caches: None, sources: None }, Pages { caches: None, sources: Some(vec![source("tcp://*:5557")]) }]
        {
            assert_eq!(silent.learned(worker, Some(&first)), first);
        }
        let no_events = Pages { caches: None, sources: Some(Vec::new()) }.learned(worker, Some(&first));
        assert_eq!((no_events.total_kv_blocks, no_events.event_sources.len()), (Some(90), 0));
        // It connects, and nobody can be connected to.
        assert!(learned(worker, &[], &[source("tcp://127.0.0.1:5557")]).is_empty());
    }

    #[test]
    fn pages_become_settings_where_all_ranks_agree() {
        let cache = |engine: &str, size, blocks| CacheConfig {
            engine: engine.to_owned(),
            block_size: Some(size),
            num_gpu_blocks: Some(blocks),
            prefix_caching: None,
            hash_algorithm: None,
        };
        let events = |rank, enabled| EventsOfRank {
            rank,
            enabled,
            endpoint: format!("tcp://*:{}", 5557 + rank),
            replay_endpoint: None,
            topic: String::new(),
        };
        let worker: Endpoint = "10.0.0.7:8000".parse().unwrap();
        let caches = [cache("1", 16, 100), cache("0", 16, 90)];
        let found = learned(worker, &caches, &[events(0, true), events(1, false)]);
        assert_eq!((found.block_size, found.total_kv_blocks), (BlockSize::new(16), Some(90)));
        assert_eq!(found.ranks.map(|ranks| (ranks.start, ranks.size.get())), Some((0, 2)));
        assert_eq!(found.event_sources.keys().collect::<Vec<_>>(), [&0]);
        let odd = learned(worker, &[cache("0", 16, 1), cache("2", 32, 1)], &[]);
        assert_eq!((odd.block_size, odd.ranks), (None, None));
        assert!(learned(worker, &[], &[]).is_empty());
    }
}
