//! Asks engines what they say of themselves: when a worker joins, when it may be another engine than before, and from time to
//! time. Engines without these pages are as good as others; nobody waits for an answer but readiness at the start, and that
//! once.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::watch;
use tokio::time::Instant;

use super::App;
use super::lives::{self, Life, SOON};
use super::reload::Next;
use crate::config::{Config, LearnConfig};
use crate::discovery::zmq::ZmqEndpoint;
use crate::engine_client::config::EnginesConfig;
use crate::engine_client::{CacheConfig, EngineClient, EngineError, EngineModel, EventsOfRank};
use crate::learned::Learned;
use crate::lifecycle::supervise;
use crate::metrics::{Metrics, OutcomeLabel};
use crate::router::Router;
use crate::worker::{Attach, BlockSize, Endpoint, EventSource, ModelName, Ranks, WorkerId};

/// A worker, and where it was asked.
pub(super) type Asked = (WorkerId, Endpoint);

/// What engines say of themselves.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Said {
    /// What is known of every engine that said anything.
    pub(super) learned: HashMap<Asked, Learned>,
    /// Who was asked, answer or not.
    pub(super) asked: HashSet<Asked>,
    /// Whether nobody is asked.
    pub(super) off: bool,
}

/// How often it is looked whether a worker has joined.
const LOOK: Duration = Duration::from_millis(250);
/// Engines asked at once.
const AT_ONCE: usize = 16;

/// Whom to ask, and how.
struct Task {
    settings: LearnConfig,
    engines: EnginesConfig,
    client: EngineClient,
}

/// Who asks.
struct Learner {
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    said: watch::Sender<Arc<Said>>,
}

/// A worker that is asked.
struct Known {
    life: Life,
    /// When it is asked next; none while it is.
    due: Option<Instant>,
    /// When it was asked last, if ever.
    asked: Option<Instant>,
}

type Asking = FuturesUnordered<BoxFuture<'static, (Asked, Pages)>>;

impl App {
    /// Asks engines for what they know best, from now on; what they say is told to `said`.
    pub(super) fn learn(
        &mut self,
        config: &Config,
        router: &Arc<Router>,
        said: watch::Sender<Arc<Said>>,
    ) {
        let task = |config: &Config, client: &EngineClient| {
            let (settings, engines, client) =
                (config.learn.clone(), config.engines.clone(), client.clone());
            Arc::new(Task {
                settings,
                engines,
                client,
            })
        };
        let (tasks, tasks_of_learner) = watch::channel(task(config, &self.reloader.client()));
        self.reloader.part("learn", move |next: &Next| {
            let (tasks, task) = (tasks.clone(), task(&next.config, &next.client));
            Ok(Box::new(move || {
                tasks.send_if_modified(|running| {
                    let news = !running.is_like(&task);
                    *running = task;
                    news
                });
            }))
        });
        let metrics = self.reloader.metrics.clone();
        let learner = Arc::new(Learner {
            router: router.clone(),
            metrics: metrics.clone(),
            said,
        });
        let stop = self.stop.clone();
        self.background.spawn(async move {
            supervise("settings of engines", &metrics, stop, || {
                let (learner, tasks) = (learner.clone(), tasks_of_learner.clone());
                async move { learner.run(tasks).await }
            })
            .await;
        });
    }
}

impl Task {
    fn is_like(&self, other: &Self) -> bool {
        self.settings == other.settings
            && self.engines == other.engines
            && self.client.is_same(&other.client)
    }
}

impl Learner {
    /// Asks for ever.
    async fn run(&self, mut tasks: watch::Receiver<Arc<Task>>) -> anyhow::Result<()> {
        let mut known: HashMap<Asked, Known> = HashMap::new();
        let mut asking = Asking::new();
        let mut looks = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                _ = looks.tick() => {}
                Some((key, pages)) = asking.next(), if !asking.is_empty() => {
                    if let Some(known) = known.get_mut(&key) {
                        let wait = if pages.may_come_soon() { SOON } else { tasks.borrow().settings.interval.get() };
                        known.due = Some(Instant::now() + wait);
                        self.take(key, pages);
                    }
                }
                changed = tasks.changed() => {
                    changed?;
                    // They are asked otherwise, or others are.
                    (known, asking) = (HashMap::new(), Asking::new());
                }
            }
            // Not as seen: what came since is still to be answered with a new beginning.
            let task = tasks.borrow().clone();
            if !task.settings.enabled {
                self.said
                    .send_if_modified(|said| !std::mem::replace(said, off()).off);
                continue;
            }
            self.retain(&mut known);
            for (key, model) in self.due(&mut known, AT_ONCE.saturating_sub(asking.len())) {
                asking.push(Box::pin(ask(
                    task.clone(),
                    self.metrics.clone(),
                    (key, model),
                )));
            }
        }
    }

    /// Forgets those who left, and what they said.
    fn retain(&self, known: &mut HashMap<Asked, Known>) {
        let fleet = self.router.fleet();
        let stays = |key: &Asked| {
            fleet
                .worker(key.0)
                .is_some_and(|worker| worker.endpoint == key.1)
        };
        known.retain(|key, _| stays(key));
        self.said.send_if_modified(|said| {
            let all = || said.learned.keys().chain(&said.asked);
            if !said.off && all().all(stays) {
                return false;
            }
            let said = Arc::make_mut(said);
            said.off = false;
            said.learned.retain(|key, _| stays(key));
            said.asked.retain(|key| stays(key));
            true
        });
    }

    /// Who is to be asked now, at most so many; those who never were come first.
    fn due(&self, known: &mut HashMap<Asked, Known>, most: usize) -> Vec<(Asked, ModelName)> {
        let (fleet, now, out) = (
            self.router.fleet(),
            Instant::now(),
            lives::out(&self.router),
        );
        let mut due = Vec::new();
        for worker in fleet.workers() {
            let (key, life) = (
                (worker.id, worker.endpoint),
                Life::of(worker, &self.router, &out),
            );
            let known = known.entry(key).or_insert_with(|| Known {
                life: life.clone(),
                due: Some(now),
                asked: None,
            });
            // Who begins anew while it is asked is asked once more.
            if known.due.is_some() {
                if life.is_another_than(&known.life) {
                    let soon = now + lives::pause(known.asked.map(|asked| now - asked));
                    known.due = known.due.map(|due| due.min(soon));
                }
                known.life = life;
            }
            if known.due.is_some_and(|due| due <= now) {
                due.push((known.asked.is_some(), key, worker.model.clone()));
            }
        }
        due.sort_by_key(|(asked, ..)| *asked);
        due.truncate(most);
        for (_, key, _) in &due {
            if let Some(known) = known.get_mut(key) {
                (known.due, known.asked) = (None, Some(now));
            }
        }
        due.into_iter()
            .map(|(_, key, model)| (key, model))
            .collect()
    }

    /// Takes note of an answer.
    fn take(&self, key: Asked, pages: Pages) {
        self.said.send_if_modified(|said| {
            let learned = pages.learned(key.1, said.learned.get(&key));
            let news = said
                .learned
                .get(&key)
                .map_or(!learned.is_empty(), |known| *known != learned);
            if !news && said.asked.contains(&key) {
                return false;
            }
            let said = Arc::make_mut(said);
            said.asked.insert(key);
            match learned.is_empty() {
                true => said.learned.remove(&key),
                false => said.learned.insert(key, learned),
            };
            true
        });
    }
}

/// Nobody is asked, and nothing said.
pub(super) fn off() -> Arc<Said> {
    Arc::new(Said {
        off: true,
        ..Said::default()
    })
}

async fn ask(
    task: Arc<Task>,
    metrics: Arc<Metrics>,
    (key, model): (Asked, ModelName),
) -> (Asked, Pages) {
    let (client, url) = (&task.client, task.engines.url(key.1));
    let (page, sources, models) = tokio::join!(
        client.metrics(&url),
        client.kv_event_sources(&url),
        client.models(&url)
    );
    let pages = Pages {
        caches: counted(&metrics, page.map(|page| page.caches())),
        sources: counted(&metrics, sources),
        model: counted(&metrics, models.map(|models| own(models, &model))),
    };
    (key, pages)
}

/// The answer; empty where the engine has no such page.
fn counted<T: Default>(
    metrics: &Metrics,
    answer: Result<T, EngineError>,
) -> Result<T, EngineError> {
    let outcome = answer.as_ref().err().map_or("ok", EngineError::label);
    metrics
        .engine_settings_asked
        .get_or_create(&OutcomeLabel { outcome })
        .inc();
    match answer {
        Err(EngineError::NotOffered(_)) => Ok(T::default()),
        answer => answer,
    }
}

/// What a worker serves, and no adapter beside it.
fn own(models: Vec<EngineModel>, name: &ModelName) -> Option<EngineModel> {
    let mut bases = models.into_iter().filter(|model| model.parent.is_none());
    let first = bases.next()?;
    if first.id == name.as_str() {
        Some(first)
    } else {
        bases
            .find(|model| model.id == name.as_str())
            .or(Some(first))
    }
}

/// What an engine answered, page by page: one that times out says nothing against what it said before.
struct Pages {
    caches: Result<Vec<CacheConfig>, EngineError>,
    sources: Result<Vec<EventsOfRank>, EngineError>,
    model: Result<Option<EngineModel>, EngineError>,
}

impl Pages {
    /// Whether something was not said that may be said soon: the engine is starting, or has much to do.
    fn may_come_soon(&self) -> bool {
        let errors = [
            self.caches.as_ref().err(),
            self.sources.as_ref().err(),
            self.model.as_ref().err(),
        ];
        errors.into_iter().flatten().any(EngineError::passes)
    }

    /// What is known now, with what was known before.
    fn learned(self, endpoint: Endpoint, before: Option<&Learned>) -> Learned {
        let before = before.cloned().unwrap_or_default();
        let now = learned(
            endpoint,
            self.caches.as_deref().unwrap_or_default(),
            self.sources.as_deref().unwrap_or_default(),
        );
        let cached = if self.caches.is_ok() { &now } else { &before };
        let event_sources = if self.sources.is_ok() {
            now.event_sources.clone()
        } else {
            before.event_sources.clone()
        };
        let (root, max_model_len) = match self.model {
            Ok(model) => model.map_or((None, None), |model| (model.root, model.max_model_len)),
            Err(_) => (before.root.clone(), before.max_model_len),
        };
        Learned {
            block_size: cached.block_size,
            total_kv_blocks: cached.total_kv_blocks,
            ranks: cached.ranks,
            event_sources,
            root,
            max_model_len,
        }
    }
}

/// What two pages of an engine say.
pub fn learned(endpoint: Endpoint, caches: &[CacheConfig], sources: &[EventsOfRank]) -> Learned {
    let mut sizes = caches.iter().map(|cache| cache.block_size);
    let size = sizes
        .next()
        .flatten()
        .filter(|first| sizes.all(|size| size == Some(*first)));
    let published = sources.iter().filter(|source| source.enabled);
    let event_sources: BTreeMap<u32, EventSource> = published
        .filter_map(|source| Some((source.rank, of_rank(endpoint, source)?)))
        .collect();
    Learned {
        block_size: size.and_then(BlockSize::new),
        total_kv_blocks: blocks_per_rank(caches),
        ranks: ranks(caches.iter().filter_map(CacheConfig::rank), caches.len()),
        event_sources,
        ..Learned::default()
    }
}

/// KV blocks of the rank that has the fewest. If several ranks share a metrics page, each line of vLLM has the sum of their
/// blocks, but the tokens of its own rank.
fn blocks_per_rank(caches: &[CacheConfig]) -> Option<u64> {
    let count = caches.len() as u64;
    let is_sum = count > 1
        && caches
            .windows(2)
            .all(|pair| pair[0].num_gpu_blocks == pair[1].num_gpu_blocks);
    let of_rank = |cache: &CacheConfig| match cache.size_tokens.zip(cache.block_size) {
        Some((tokens, size)) if is_sum => Some(tokens / u64::from(size)),
        _ if is_sum => cache.num_gpu_blocks.map(|sum| sum / count),
        _ => cache.num_gpu_blocks,
    };
    caches
        .iter()
        .filter_map(of_rank)
        .filter(|blocks| *blocks > 0)
        .min()
}

/// The ranks that tell of themselves, if they follow one another.
fn ranks(told: impl Iterator<Item = u32>, count: usize) -> Option<Ranks> {
    let mut all: Vec<u32> = told.collect();
    all.sort_unstable();
    all.dedup();
    let start = *all.first()?;
    let is_whole = count <= Ranks::MOST as usize
        && all.len() == count
        && all.iter().zip(start..).all(|(rank, at)| *rank == at);
    let size = NonZeroU32::new(u32::try_from(all.len()).ok()?)?;
    is_whole.then_some(Ranks { start, size })
}

/// A source that can be connected to from here. An engine publishes at its own host, whatever it calls that; but vLLM does
/// so only where the endpoint is a wildcard or a path, and connects to a subscriber in every other case. Whoever that is, it
/// is not us unless the configuration says so.
fn of_rank(worker: Endpoint, source: &EventsOfRank) -> Option<EventSource> {
    let binds = ["*", "::"]
        .iter()
        .any(|mark| source.endpoint.contains(mark))
        || source.endpoint.starts_with("ipc:");
    if !binds {
        return None;
    }
    let replay = source
        .replay_endpoint
        .as_deref()
        .and_then(|replay| reachable(worker, replay));
    let endpoint = reachable(worker, &source.endpoint)?;
    Some(EventSource {
        endpoint,
        topic: source.topic.clone(),
        attach: Attach::Connect,
        replay,
    })
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
    let here = ZmqEndpoint::Tcp {
        host: own.to_string(),
        port: *port,
    };
    (*port != 0 && (endpoint.is_wildcard() || is_local)).then(|| here.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine_client::MetricsPage;

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
        assert_eq!(
            reachable(local, "ipc:///run/events").as_deref(),
            Some("ipc:///run/events")
        );
    }

    #[test]
    fn who_begins_anew_again_and_again_is_asked_once_in_a_while() {
        let load = crate::load::LoadTracker::new(std::time::Instant::now);
        let settings = crate::router::RouterSettings::default();
        let router = Arc::new(Router::new(
            crate::index::PrefixIndex::new(),
            load,
            settings,
            1,
        ));
        let endpoint = "127.0.0.1:8000".parse().unwrap();
        let worker = crate::worker::Worker::new(
            WorkerId(1),
            endpoint,
            "m".into(),
            BlockSize::new(16).unwrap(),
        );
        let rank = crate::worker::WorkerRank {
            worker: worker.id,
            rank: worker.ranks.iter().next().unwrap(),
        };
        router.publish(Arc::new(
            crate::fleet::Fleet::empty().reconcile(vec![worker]).fleet,
        ));
        let source = Arc::new(parking_lot::Mutex::new(crate::trust::Source::new(0.0)));
        router.sources().watch(rank, source.clone());
        let learner = Learner {
            router,
            metrics: Arc::new(Metrics::new()),
            said: watch::Sender::new(off()),
        };
        let (mut known, key) = (HashMap::new(), (WorkerId(1), endpoint));
        assert_eq!(learner.due(&mut known, 1).len(), 1, "it has just come");
        let later = Instant::now() + Duration::from_secs(300);
        known.get_mut(&key).unwrap().due = Some(later);
        for _ in 0..3 {
            source.lock().restarted();
            assert!(
                learner.due(&mut known, 1).is_empty(),
                "it was asked a moment ago"
            );
        }
        let due = known[&key].due.unwrap();
        assert!(due <= Instant::now() + SOON, "but it is asked soon");
        known.get_mut(&key).unwrap().asked = Some(Instant::now() - SOON);
        source.lock().restarted();
        assert_eq!(learner.due(&mut known, 1).len(), 1);
    }

    #[test]
    fn a_page_without_an_answer_takes_nothing_back() {
        let worker: Endpoint = "10.0.0.7:8000".parse().unwrap();
        let cache = CacheConfig {
            engine: "0".to_owned(),
            block_size: Some(16),
            num_gpu_blocks: Some(90),
            size_tokens: None,
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
        let model = EngineModel {
            id: "m".to_owned(),
            root: Some("org/m".to_owned()),
            parent: None,
            max_model_len: Some(4096),
        };
        let silent = || EngineError::Timeout;
        let whole = Pages {
            caches: Ok(vec![cache]),
            sources: Ok(vec![source("tcp://*:5557")]),
            model: Ok(Some(model)),
        };
        assert!(!whole.may_come_soon());
        let first = whole.learned(worker, None);
        assert_eq!(
            (first.total_kv_blocks, first.event_sources.len()),
            (Some(90), 1)
        );
        assert_eq!(
            (first.root.as_deref(), first.max_model_len),
            (Some("org/m"), Some(4096))
        );
        for sources in [Err(silent()), Ok(vec![source("tcp://*:5557")])] {
            let half = Pages {
                caches: Err(silent()),
                sources,
                model: Err(silent()),
            };
            assert!(half.may_come_soon());
            assert_eq!(half.learned(worker, Some(&first)), first);
        }
        // What it says no more it is not asked for soon: it has no such page.
        let no_events = Pages {
            caches: Err(EngineError::Unreadable("")),
            sources: Ok(Vec::new()),
            model: Ok(None),
        };
        assert!(!no_events.may_come_soon());
        let no_events = no_events.learned(worker, Some(&first));
        assert_eq!(
            (no_events.total_kv_blocks, no_events.event_sources.len()),
            (Some(90), 0)
        );
        assert_eq!(no_events.root, None);
        // It connects, and nobody can be connected to.
        assert!(learned(worker, &[], &[source("tcp://127.0.0.1:5557")]).is_empty());
    }

    #[test]
    fn a_worker_is_known_by_its_model_and_not_by_an_adapter() {
        let model = |id: &str, parent: Option<&str>| EngineModel {
            id: id.to_owned(),
            root: Some(format!("root of {id}")),
            parent: parent.map(str::to_owned),
            max_model_len: None,
        };
        let served = || {
            vec![
                model("m-lora", Some("m")),
                model("alias", None),
                model("m", None),
            ]
        };
        for (name, expected) in [
            ("m", "m"),
            ("alias", "alias"),
            ("other", "alias"),
            ("m-lora", "alias"),
        ] {
            assert_eq!(own(served(), &name.into()).unwrap().id, expected, "{name}");
        }
        assert_eq!(own(Vec::new(), &"m".into()), None);
    }

    #[test]
    fn pages_become_settings_where_all_ranks_agree() {
        let cache = |engine: &str, size, blocks| CacheConfig {
            engine: engine.to_owned(),
            block_size: Some(size),
            num_gpu_blocks: Some(blocks),
            size_tokens: None,
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
        assert_eq!(
            (found.block_size, found.total_kv_blocks),
            (BlockSize::new(16), Some(90))
        );
        assert_eq!(
            found.ranks.map(|ranks| (ranks.start, ranks.size.get())),
            Some((0, 2))
        );
        assert_eq!(found.event_sources.keys().collect::<Vec<_>>(), [&0]);
        // Each line of vLLM has the blocks of all ranks and the tokens of one rank.
        let sum = [cache("0", 32, 6000), cache("1", 32, 6000)];
        assert_eq!(learned(worker, &sum, &[]).total_kv_blocks, Some(3000));
        let exact = sum.clone().map(|cache| CacheConfig {
            size_tokens: Some(64_000),
            ..cache
        });
        assert_eq!(learned(worker, &exact, &[]).total_kv_blocks, Some(2000));
        assert_eq!(
            learned(worker, &exact[..1], &[]).total_kv_blocks,
            Some(6000),
            "a rank with a page of its own"
        );
        let page = MetricsPage::read(include_str!(
            "../../tests/data/engines/metrics-vllm-dp2.txt"
        ));
        assert_eq!(
            learned(worker, &page.caches(), &[]).total_kv_blocks,
            Some(256),
            "a captured page"
        );
        let odd = learned(worker, &[cache("0", 16, 1), cache("2", 32, 1)], &[]);
        assert_eq!((odd.block_size, odd.ranks), (None, None));
        assert!(learned(worker, &[], &[]).is_empty());
    }
}
