//! Gathers what is judged elsewhere: asks the engines, listens to their events while a canary is computed, and asks Envoy.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::{StreamExt as _, stream};
use serde_json::json;
use tokio::net::{TcpStream, UnixStream};

use super::engine::facts::{
    Attached, Canary, ConfiguredCache, Met, OverdueStep, RankFacts, Told, WorkerFacts, WorkerOrigin,
};
use super::progress::{DoctorProgress, OpenPart};
use crate::app;
use crate::config::{ApproximatePolicy, Config, WorkerSource};
use crate::engine_client::{EngineClient, EngineError, EngineUrl, EventsOfRank, MetricsPage};
use crate::intake::Model;
use crate::kv_events::listen::{self, Ear, Heard};
use crate::learned::Given;
use crate::openai::{self, Api};
use crate::parity::Verdict;
use crate::prefill::{By, PrefillConfig, Protocol};
use crate::self_test::Subject;
use crate::worker::{Attach, DpRank, EventSource, ModelName, Role, Worker};

/// Workers that are looked at side by side.
const AT_ONCE: usize = 32;
/// Time for a worker beside its ranks, as a multiple of the patience with one answer.
const STEPS: u32 = 6;
/// Time for each rank of a worker.
const RANK: Duration = Duration::from_secs(2);
/// A subscription takes effect a little after it was asked for.
const SETTLES: Duration = Duration::from_millis(300);
/// How often a canary is sent anew while its blocks do not come.
const TRIES: u32 = 2;
/// Blocks of a canary.
const BLOCKS: usize = 4;
/// What a canary is made of, one token each for most tokenizers.
const WORDS: [&str; 16] = [
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "red", "blue",
    "green", "north", "south", "west",
];

/// Who gathers.
pub(super) struct Gatherer<'c> {
    pub(super) config: &'c Config,
    pub(super) client: EngineClient,
    pub(super) models: HashMap<ModelName, Arc<Model>>,
    /// How long events and publishers are waited for.
    pub(super) patience: Duration,
    /// Whether a canary is sent.
    pub(super) canaries: bool,
    /// The open parts, reported while doctor waits.
    pub(super) progress: DoctorProgress,
}

impl Gatherer<'_> {
    /// Everything about every worker, in their order.
    pub(super) async fn workers(&self, workers: &[Worker]) -> Vec<WorkerFacts> {
        let from_afar = |prefill: &Worker| {
            let takes_over =
                |other: &&Worker| other.model == prefill.model && other.role != Role::Prefill;
            workers
                .iter()
                .filter(takes_over)
                .any(|other| other.endpoint.0.ip() != prefill.endpoint.0.ip())
        };
        let origin = |worker: &Worker| match (self.config.worker_source(), &worker.name) {
            (WorkerSource::Kubernetes(_), Some(name)) => {
                let several = workers
                    .iter()
                    .filter(|other| other.name == worker.name)
                    .count()
                    > 1;
                let port = if several {
                    format!(":{}", worker.endpoint.0.port())
                } else {
                    String::new()
                };
                let pool = worker.pools().next().unwrap_or_default();
                WorkerOrigin::Pod {
                    pod: format!("{name}{port}"),
                    pool: pool.to_owned(),
                }
            }
            _ => WorkerOrigin::Listed,
        };
        let examined = stream::iter(workers).map(async |worker| WorkerFacts {
            origin: origin(worker),
            fetched_from_afar: from_afar(worker),
            ..self.worker(worker).await
        });
        examined.buffered(AT_ONCE).collect().await
    }

    async fn worker(&self, worker: &Worker) -> WorkerFacts {
        self.worker_within(
            worker,
            self.patience * STEPS + RANK * worker.ranks.size.get(),
        )
        .await
    }

    /// The facts of all steps that are complete at the deadline.
    async fn worker_within(&self, worker: &Worker, deadline: Duration) -> WorkerFacts {
        let part = self.progress.open(
            format!("worker {} at {}", worker.id, worker.endpoint),
            "/health",
        );
        let mut facts = self.unknown(worker);
        if tokio::time::timeout(deadline, self.examine(&mut facts, &part))
            .await
            .is_err()
        {
            facts.overdue = Some(OverdueStep {
                name: part.current(),
                deadline,
            });
        }
        facts
    }

    /// A worker as it is configured.
    fn unknown(&self, worker: &Worker) -> WorkerFacts {
        WorkerFacts {
            origin: WorkerOrigin::Listed,
            configured: self.configured(worker),
            sources_learned: false,
            windows: self
                .models
                .get(&worker.model)
                .map(|model| model.windows)
                .unwrap_or_default(),
            worker: worker.clone(),
            adapters: self.adapters(&worker.model),
            images_of: self.images_of(&worker.model),
            blocks_wanted: self.blocks_wanted(),
            health: Err(EngineError::Timeout),
            date: None,
            models: Err(EngineError::Timeout),
            metrics: Err(EngineError::Timeout),
            publishers: Err(EngineError::Timeout),
            tokens: Verdict::Untested,
            met: None,
            handed_over: None,
            fetched_from_afar: false,
            ranks: Vec::new(),
            overdue: None,
        }
    }

    /// Fills the facts step by step, so that those of complete steps remain when a later one takes too long.
    async fn examine(&self, facts: &mut WorkerFacts, part: &OpenPart) {
        let engine = &self.config.engines.url(facts.worker.endpoint);
        facts.health = self.client.health(engine).await;
        if !super::engine::is_there(facts) {
            return;
        }
        part.step("/v1/models, /metrics and KV event publishers");
        let (models, metrics, publishers, date) = tokio::join!(
            self.client.models(engine),
            self.client.metrics(engine),
            self.client.kv_event_sources(engine),
            self.client.time(engine),
        );
        let (worker, sources_learned) = self.completed(
            &facts.worker,
            metrics.as_ref().ok(),
            publishers.as_ref().ok(),
        );
        facts.worker = worker.clone();
        facts.sources_learned = sources_learned;
        facts.date = date.map(|theirs| (theirs, SystemTime::now()));
        (facts.models, facts.metrics, facts.publishers) = (models, metrics, publishers);
        if let Some(subject) = self
            .models
            .get(&worker.model)
            .and_then(|model| Subject::new(model))
        {
            part.step("comparison of tokens");
            facts.tokens = subject
                .test(&self.client, engine, self.config.self_test.deadline.get())
                .await;
        }
        // A single rank serves every request; with several ranks each request names its rank.
        let told = facts.metrics.as_ref().map_or(0, |page| page.caches().len());
        let several = told > 1 || worker.ranks.size.get() > 1;
        // Ranks share an engine, so canaries run one after another: the events of one must not count for another.
        for rank in worker.ranks.iter() {
            part.step(format!("rank {rank}: KV events and canary"));
            facts
                .ranks
                .push(self.rank(engine, &worker, rank, several).await);
        }
        if worker.role == Role::Prefill {
            part.step("prefill");
            facts.met = if self.meets(&worker) {
                Some(self.met(&worker).await)
            } else {
                None
            };
            facts.handed_over = self.handed_over(engine, &worker).await;
        }
    }

    /// How prefills of a worker's model are carried out.
    fn way(&self, worker: &Worker) -> Option<&PrefillConfig> {
        self.config
            .models
            .iter()
            .find(|known| known.name == worker.model)?
            .prefill
            .as_ref()
    }

    /// Whether a worker does nothing but with another one that it meets.
    fn meets(&self, worker: &Worker) -> bool {
        worker.role != Role::Aggregated && self.way(worker).is_some_and(|way| way.by == By::Mirror)
    }

    /// Whether somebody is there where decode workers are to meet it.
    async fn met(&self, worker: &Worker) -> Met {
        let (host, port) = worker.meeting_place();
        let connecting = TcpStream::connect((host.trim_matches(['[', ']']), port));
        match tokio::time::timeout(self.patience, connecting).await {
            Ok(Ok(_)) => Met::Somebody,
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => Met::Nobody,
            Ok(Err(error)) => Met::Unknown(error.to_string()),
            Err(_) => Met::Unknown("no answer".to_owned()),
        }
    }

    /// What it says of a prompt whose KV it is to keep for another worker, as vLLM is asked.
    async fn handed_over(
        &self,
        engine: &EngineUrl,
        worker: &Worker,
    ) -> Option<Told<serde_json::Value>> {
        let way = self
            .way(worker)
            .filter(|way| way.by == By::Call && way.protocol == Protocol::Vllm);
        way.filter(|_| self.canaries && !worker.draining)?;
        let (text, _) = self.prompt(engine, worker).await;
        let mut body: serde_json::Value = serde_json::from_slice(&text).ok()?;
        body["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
        Some(
            self.client
                .post(
                    engine,
                    "v1/completions",
                    body.to_string().into(),
                    self.patience,
                )
                .await,
        )
    }

    fn configured(&self, worker: &Worker) -> ConfiguredCache {
        let model = self
            .config
            .models
            .iter()
            .find(|known| known.name == worker.model);
        ConfiguredCache {
            block_size: model.and_then(|model| model.block_size),
            total_kv_blocks: worker.capacity.total_kv_blocks,
        }
    }

    /// The worker with what a running warmroute would learn of it, and whether that is where its events come from.
    fn completed(
        &self,
        worker: &Worker,
        metrics: Option<&MetricsPage>,
        publishers: Option<&Vec<EventsOfRank>>,
    ) -> (Worker, bool) {
        let mut completed = worker.clone();
        if self.config.learn.enabled {
            let caches = metrics.map(MetricsPage::caches).unwrap_or_default();
            let publishers = publishers.map(Vec::as_slice).unwrap_or_default();
            app::learned(worker.endpoint, &caches, publishers)
                .fill(&mut completed, &Given::default());
        }
        let learned = worker.event_sources.is_empty() && !completed.event_sources.is_empty();
        (completed, learned)
    }

    fn adapters(&self, model: &ModelName) -> Vec<ModelName> {
        let found = self.config.models.iter().find(|known| known.name == *model);
        found
            .map(|known| known.adapters.clone())
            .unwrap_or_default()
    }

    /// After which model our names for images are called; none where there are no images, or where engines are asked.
    fn images_of(&self, model: &ModelName) -> Option<String> {
        let media = self
            .config
            .models
            .iter()
            .find(|known| known.name == *model)?
            .media
            .as_ref()?;
        media.image.as_ref()?;
        let served = (!self.config.learn.enabled).then(|| model.to_string());
        media.model.clone().or(served)
    }

    /// Whether a setting asks how many KV blocks a worker has.
    fn blocks_wanted(&self) -> bool {
        let approximate = &self.config.approximate;
        let by_blocks =
            approximate.policy == ApproximatePolicy::Lru && approximate.default_blocks.is_none();
        by_blocks || self.config.overload.decode_blocks.is_some()
    }

    async fn rank(
        &self,
        engine: &EngineUrl,
        worker: &Worker,
        rank: DpRank,
        several: bool,
    ) -> RankFacts {
        let source = worker.event_source(rank).cloned();
        let (mut ear, mut attached) = (None, None);
        if let Some(source) = &source {
            let (heard_by, how) = self.attach(worker, source).await;
            (ear, attached) = (heard_by, Some(how));
        }
        let (mut heard, mut canary) = (Vec::new(), None);
        // Who has to meet another would refuse it.
        if self.canaries && !worker.draining && !self.meets(worker) {
            let sent = self.canary(engine, worker, several.then_some(rank.0), ear.as_mut());
            let (answer, messages) = sent.await;
            (canary, heard) = (Some(answer), messages);
        }
        let last = heard.iter().map(|heard| heard.seq).max();
        let replay = match source.as_ref().and_then(|source| source.replay.as_deref()) {
            // From behind everything there is: only whether it answers is asked.
            Some(endpoint) => Some(
                listen::replayed(
                    endpoint,
                    last.unwrap_or(u64::from(u32::MAX)),
                    self.max_message(),
                )
                .await,
            ),
            None => None,
        };
        RankFacts {
            rank,
            source,
            attached,
            heard,
            canary,
            replay,
            patience: self.patience,
        }
    }

    /// The largest message that a running warmroute receives.
    fn max_message(&self) -> usize {
        self.config.kv_events.max_message.bytes()
    }

    /// Attaches as it is configured; where that fails, looks whether the other way round would do.
    async fn attach(&self, worker: &Worker, source: &EventSource) -> (Option<Ear>, Attached) {
        let opened = Ear::open(&source.endpoint, source.attach, self.max_message()).await;
        match (source.attach, opened) {
            (Attach::Connect, Ok(ear)) => (Some(ear), Attached::As(Attach::Connect)),
            (Attach::Connect, Err(why)) => (None, Attached::Refused(why)),
            (Attach::Bind, Err(why)) => {
                let here = source
                    .endpoint
                    .replacen("//*:", "//127.0.0.1:", 1)
                    .replacen("//0.0.0.0:", "//127.0.0.1:", 1);
                match Ear::open(&here, Attach::Connect, self.max_message()).await {
                    Ok(ear) => (Some(ear), Attached::Connectable(here)),
                    Err(_) => (None, Attached::Taken(why)),
                }
            }
            (Attach::Bind, Ok(mut ear)) => {
                if ear.visited(self.patience).await {
                    return (Some(ear), Attached::As(Attach::Bind));
                }
                drop(ear);
                let port = source.endpoint.rsplit(':').next().unwrap_or_default();
                let there = format!("tcp://{}:{port}", worker.endpoint.0.ip());
                match Ear::open(&there, Attach::Connect, self.max_message()).await {
                    Ok(ear) => (Some(ear), Attached::Elsewhere(there)),
                    Err(_) => (None, Attached::Nobody),
                }
            }
        }
    }

    /// Sends a canary and hears what comes of it; again, as another one, where nothing does. Then the same once more, to see
    /// whether it is found.
    async fn canary(
        &self,
        engine: &EngineUrl,
        worker: &Worker,
        rank: Option<u32>,
        mut ear: Option<&mut Ear>,
    ) -> (Told<Canary>, Vec<Heard>) {
        let mut heard = Vec::new();
        let tries = if ear.is_some() { TRIES } else { 1 };
        for turn in 1..=tries {
            let (body, tokens) = self.prompt(engine, worker).await;
            if let Some(ear) = ear.as_deref_mut() {
                heard.extend(hear(ear, SETTLES, |_| false).await);
            }
            let first = match self
                .client
                .complete(engine, body.clone(), rank, self.patience)
                .await
            {
                Ok(usage) => usage,
                Err(error) => return (Err(error), heard),
            };
            let mut news = Vec::new();
            if let Some(ear) = ear.as_deref_mut() {
                let wanted = |one: &Heard| tokens.as_ref().is_none_or(|tokens| begins(one, tokens));
                news = hear(ear, self.patience / tries, wanted).await;
            }
            let came = !news.is_empty();
            heard.extend(news);
            if came || turn == tries {
                let second = self
                    .client
                    .complete(engine, body, rank, self.patience)
                    .await;
                let cached = second.as_ref().ok().and_then(|usage| usage.cached_tokens);
                return (
                    Ok(Canary {
                        tokens,
                        prompt_tokens: first.prompt_tokens,
                        cached,
                    }),
                    heard,
                );
            }
        }
        (Err(crate::engine_client::EngineError::Timeout), heard)
    }

    /// A prompt that nobody sent before, with its tokens as we have them, or else the engine.
    async fn prompt(
        &self,
        engine: &EngineUrl,
        worker: &Worker,
    ) -> (bytes::Bytes, Option<Vec<u32>>) {
        let words: Vec<&str> = (0..worker.block_size.tokens() * BLOCKS + 8)
            .map(|_| WORDS[rand::random_range(0..WORDS.len())])
            .collect();
        let text = format!(
            "A canary of warmroute, {:016x}: {}",
            rand::random::<u64>(),
            words.join(" ")
        );
        let model = worker.model.as_str();
        let body =
            json!({"model": model, "prompt": text, "max_tokens": 1, "temperature": 0}).to_string();
        let encoder = self
            .models
            .get(&worker.model)
            .and_then(|model| model.encoder.as_ref());
        let ours = encoder.and_then(|encoder| {
            let request = openai::parse(Api::Completions, body.as_bytes()).ok()?;
            encoder.encode(&request).ok()?.prompts.into_iter().next()
        });
        let tokens = match ours {
            Some(tokens) => Some(tokens),
            None => {
                let asked = json!({"model": model, "prompt": text}).to_string();
                let told = self
                    .client
                    .tokenize(engine, asked.into(), self.client.deadline())
                    .await;
                told.ok().map(|told| told.tokens)
            }
        };
        (body.into(), tokens)
    }
}

/// Hears until something is wanted, or so long.
async fn hear(ear: &mut Ear, within: Duration, wanted: impl Fn(&Heard) -> bool) -> Vec<Heard> {
    let mut heard = Vec::new();
    let hearing = async {
        while let Some(one) = ear.next().await {
            let last = wanted(&one);
            heard.push(one);
            if last {
                return;
            }
        }
        // The connection is lost; nothing more will come.
    };
    _ = tokio::time::timeout(within, hearing).await;
    heard
}

/// Whether a message stores blocks that begin like this prompt.
fn begins(heard: &Heard, tokens: &[u32]) -> bool {
    use crate::kv_events::wire::Event;
    let Ok(batch) = &heard.batch else {
        return false;
    };
    batch.events.iter().any(|event| match event {
        Event::Stored(stored) => {
            !stored.tokens.ids.is_empty() && tokens.starts_with(&stored.tokens.ids)
        }
        _ => false,
    })
}

/// Envoy's page.
pub(super) async fn config_dump(
    url: &str,
    ca_file: Option<&Path>,
    patience: Duration,
) -> Result<String, String> {
    let url = format!("{}/config_dump?include_eds", url.trim_end_matches('/'));
    let client =
        super::super::pages::client(&url, ca_file).map_err(|error| format!("{error:#}"))?;
    let client = client
        .timeout(patience)
        .build()
        .map_err(|error| error.to_string())?;
    let answer = client
        .get(&url)
        .send()
        .await
        .map_err(|error| format!("{url}: {}", causes(&error)))?;
    let status = answer.status();
    if !status.is_success() {
        return Err(format!("{url} answers {status}"));
    }
    answer
        .text()
        .await
        .map_err(|error| format!("{url}: {}", causes(&error)))
}

/// An error with what is behind it: the outermost says little.
fn causes(error: &dyn std::error::Error) -> String {
    let next = std::iter::successors(error.source(), |cause| cause.source());
    std::iter::once(error.to_string())
        .chain(next.map(ToString::to_string))
        .collect::<Vec<_>>()
        .join(": ")
}

/// Where we are to listen, and whether somebody does.
pub(super) async fn listening(config: &Config, patience: Duration) -> Vec<(String, Option<bool>)> {
    let mut places = Vec::new();
    if let Some(path) = &config.listen.unix {
        let listens = tokio::time::timeout(patience, UnixStream::connect(path))
            .await
            .is_ok_and(|socket| socket.is_ok());
        places.push((path.display().to_string(), Some(listens)));
    }
    if let Some(mut address) = config.listen.tcp {
        if address.ip().is_unspecified() {
            address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
        }
        let listens = tokio::time::timeout(patience, TcpStream::connect(address))
            .await
            .is_ok_and(|socket| socket.is_ok());
        places.push((address.to_string(), Some(listens)));
    }
    places
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use zeromq::{PubSocket, Socket as _, SocketSend as _};

    use super::*;
    use crate::settings::Size;
    use crate::worker::{BlockSize, WorkerId};

    /// The batch that the doctor receives from an engine that publishes payloads of 2 MiB.
    async fn received(max_message: Size) -> Heard {
        let text = json!({
            "models": [{"name": "m"}],
            "workers": [{"id": 1, "endpoint": "127.0.0.1:1"}],
            "kv_events": {"max_message": max_message},
        });
        let config = Config::parse(Path::new("warmroute.yaml"), text.to_string().as_bytes());
        let config = config.unwrap_or_else(|errors| panic!("{errors:?}"));
        let client = EngineClient::new(&config.engines).unwrap();
        let patience = Duration::from_secs(5);
        let progress = DoctorProgress::default();
        let gatherer = Gatherer {
            config: &config,
            client,
            models: HashMap::new(),
            patience,
            canaries: false,
            progress,
        };
        let mut engine = PubSocket::new();
        let endpoint = engine.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let publishing = tokio::spawn(async move {
            let frames = [
                Bytes::from_static(b"kv"),
                Bytes::from_static(&[0; 8]),
                vec![0; 2 << 20].into(),
            ];
            loop {
                engine
                    .send(frames.to_vec().try_into().unwrap())
                    .await
                    .unwrap();
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        let worker = Worker::new(
            WorkerId(1),
            "127.0.0.1:1".parse().unwrap(),
            "m".into(),
            BlockSize::new(16).unwrap(),
        );
        let source = EventSource {
            endpoint,
            topic: String::new(),
            attach: Attach::Connect,
            replay: None,
        };
        let (ear, attached) = gatherer.attach(&worker, &source).await;
        assert!(matches!(attached, Attached::As(Attach::Connect)));
        let heard = tokio::time::timeout(Duration::from_secs(30), ear.unwrap().next())
            .await
            .unwrap()
            .unwrap();
        publishing.abort();
        heard
    }

    /// Answers `/health`, and begins every other answer without completing it.
    async fn stalling_engine() -> std::net::SocketAddr {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut request = vec![0; 65_536];
                    let length = socket.read(&mut request).await.unwrap_or(0);
                    let length_of_body = if request[..length].starts_with(b"GET /health ") {
                        0
                    } else {
                        1000
                    };
                    let head =
                        format!("HTTP/1.1 200 OK\r\ncontent-length: {length_of_body}\r\n\r\n");
                    _ = socket.write_all(head.as_bytes()).await;
                    std::future::pending::<()>().await;
                });
            }
        });
        address
    }

    #[tokio::test]
    async fn stalling_engine_leaves_facts_of_complete_steps() {
        let text = json!({
            "models": [{"name": "m"}],
            "workers": [{"id": 1, "endpoint": stalling_engine().await.to_string()}],
            "engines": {"deadline": "100ms"},
        });
        let config =
            Config::parse(Path::new("warmroute.yaml"), text.to_string().as_bytes()).unwrap();
        let crate::config::WorkerSource::Fixed(workers) = config.worker_source() else {
            panic!("another source")
        };
        let client = EngineClient::new(&config.engines).unwrap();
        let (patience, progress) = (Duration::from_secs(60), DoctorProgress::default());
        let gatherer = Gatherer {
            config: &config,
            client,
            models: HashMap::new(),
            patience,
            canaries: true,
            progress,
        };
        let deadline = Duration::from_secs(3);
        let facts = gatherer.worker_within(&workers[0], deadline).await;
        assert_eq!(
            facts.overdue,
            Some(OverdueStep {
                name: "rank 0: KV events and canary".to_owned(),
                deadline
            })
        );
        assert!(facts.health.is_ok(), "{:?}", facts.health);
        let found = crate::cmd::doctor::engine::examine(&facts);
        let overdue = found
            .iter()
            .find(|one| one.check == "engine.deadline")
            .unwrap();
        assert!(
            overdue
                .seen
                .starts_with("not complete within 3s: rank 0: KV events and canary"),
            "{}",
            overdue.seen
        );
    }

    #[tokio::test]
    async fn event_messages_have_the_configured_limit() {
        let limited = received(Size::mib(1)).await;
        assert_eq!(
            limited.batch,
            Err("a message exceeds the message limit".to_owned())
        );
        let whole = received(Size::mib(3)).await;
        assert_ne!(
            whole.batch, limited.batch,
            "it is received, although it is not a batch"
        );
        assert_eq!(whole.topic, "kv");
    }
}
