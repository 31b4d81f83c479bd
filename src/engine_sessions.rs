//! Tells engines of the sessions that are bound to them, so that an engine with sessions of its own keeps their caches:
//! one is opened when a session comes to a worker, and closed when it leaves. This follows the session table from behind
//! and is on nobody's way: a request never waits for it, and a call that fails is counted and has no other effect.
//!
//! SGLang: `POST /open_session` with `{"capacity_of_str_len": 65536, "session_id": "…"}`, and `"streaming"` and `"timeout"`
//! where they are configured; it answers 200 and the id, or an error where the id is open already. `POST /close_session`
//! with `{"session_id": "…"}`. The id is the one that the client's requests name. Groups are not opened: an engine's session
//! is one conversation, and a group is many. Of several routers the one tells that bound the session, or has inherited it.

pub mod config;

mod lanes;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, FuturesUnordered, StreamExt as _};
use parking_lot::Mutex;
use reqwest::header::CONTENT_TYPE;
use reqwest::redirect::Policy;
use reqwest::{Client, StatusCode};
use serde_json::json;
use tokio::sync::Notify;
use tracing::debug;

use crate::metrics::{EngineSessionLabels, Metrics};
use crate::router::Router;
use crate::sessions::{Moved, Sessions, Stay};
use crate::worker::WorkerId;
use config::{EngineKind, EngineSessionsConfig};
use lanes::{Lanes, Place, Word};

/// Calls at once while all sessions are closed at the end.
const AT_ONCE_AT_THE_END: usize = 64;

/// Tells engines of sessions.
pub struct EngineSessions {
    config: EngineSessionsConfig,
    client: Client,
    sessions: Arc<Sessions>,
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    news: Arc<Notify>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// Where the engine of a bound session was when it came: its worker may have left the fleet by the time it leaves.
    bound: HashMap<(WorkerId, String), Place>,
    /// What engines may have open because of us.
    open: HashSet<Place>,
}

/// A call that has ended.
struct Told {
    place: Place,
    /// Nobody answered.
    silence: bool,
}

/// Why an engine was not told.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("no answer within the timeout")]
    Timeout,
    #[error("nobody is there: {0}")]
    Unreachable(reqwest::Error),
    #[error("the connection failed: {0}")]
    Connection(reqwest::Error),
    #[error("status {0}")]
    Status(StatusCode),
}

impl Failure {
    fn label(&self) -> &'static str {
        match self {
            Failure::Timeout => "timeout",
            Failure::Unreachable(_) => "unreachable",
            Failure::Connection(_) => "connection",
            Failure::Status(_) => "status",
        }
    }

    /// Whether the engine cannot have done what it was told: nobody heard it, or there is nothing that could do it. Any
    /// other refusal may come from somebody between us, or mean that the session is open already.
    fn is_certain(&self) -> bool {
        let absent = [StatusCode::NOT_FOUND, StatusCode::METHOD_NOT_ALLOWED, StatusCode::NOT_IMPLEMENTED];
        match self {
            Failure::Unreachable(_) => true,
            Failure::Status(status) => absent.contains(status),
            Failure::Timeout | Failure::Connection(_) => false,
        }
    }

    /// Whether nobody answered.
    fn is_silence(&self) -> bool {
        !matches!(self, Failure::Status(_))
    }
}

impl From<reqwest::Error> for Failure {
    fn from(error: reqwest::Error) -> Self {
        match error {
            error if error.is_connect() => Failure::Unreachable(error),
            error if error.is_timeout() => Failure::Timeout,
            error => Failure::Connection(error),
        }
    }
}

impl EngineSessions {
    /// Listens to the sessions from now on; [`EngineSessions::run`] tells the engines.
    pub fn new(
        config: EngineSessionsConfig,
        sessions: Arc<Sessions>,
        router: Arc<Router>,
        metrics: Arc<Metrics>,
    ) -> reqwest::Result<Arc<Self>> {
        // Engines are reached directly, as Envoy reaches them.
        let builder = crate::tls::client().redirect(Policy::none()).tcp_nodelay(true);
        let client = builder.timeout(config.timeout.get()).build()?;
        let news = Arc::new(Notify::new());
        let heard = news.clone();
        sessions.on_move(move || heard.notify_one());
        Ok(Arc::new(Self { config, client, sessions, router, metrics, news, known: Mutex::default() }))
    }

    /// Tells engines, for ever.
    pub async fn run(&self) {
        let mut lanes = Lanes::default();
        let mut running = FuturesUnordered::new();
        loop {
            self.follow(&mut lanes);
            while let Some((place, word)) = lanes.next() {
                running.push(self.tell(place, word));
            }
            tokio::select! {
                () = self.news.notified() => {}
                Some(told) = running.next() => self.ended(&told, &mut lanes),
            }
        }
    }

    /// Whoever left the fleet is told to close its sessions as long as it answers.
    fn ended(&self, told: &Told, lanes: &mut Lanes) {
        lanes.done(&told.place);
        let endpoint = told.place.endpoint;
        if told.silence && !self.router.fleet().workers().any(|worker| worker.endpoint == endpoint) {
            lanes.discard(endpoint);
            let mut known = self.known.lock();
            known.open.retain(|place| place.endpoint != endpoint);
            self.metrics.engine_sessions.set(known.open.len() as i64);
        }
    }

    /// Closes what is open, and gives up on what takes longer than `within`. Where there are heirs, what is in use is left
    /// to them.
    pub async fn close_all(&self, within: Duration, has_heirs: bool) {
        self.follow(&mut Lanes::default());
        let open: Vec<Place> = {
            let known = self.known.lock();
            let used: HashSet<&Place> = known.bound.values().filter(|_| has_heirs).collect();
            known.open.iter().filter(|place| !used.contains(place)).cloned().collect()
        };
        let closing = stream::iter(open).for_each_concurrent(AT_ONCE_AT_THE_END, |place| async {
            self.tell(place, Word::Close).await;
        });
        if tokio::time::timeout(within, closing).await.is_err() {
            let left = self.known.lock().open.len();
            debug!(left, "sessions stay open on engines that do not answer");
        }
    }

    /// Turns the moves of sessions into calls.
    fn follow(&self, lanes: &mut Lanes) {
        for moved in self.sessions.moves() {
            match moved {
                Moved::Came(stay) | Moved::Left(stay) | Moved::HandedOver(stay) | Moved::Inherited(stay)
                    if stay.group => {}
                Moved::Came(stay) => {
                    if let Some(place) = self.came(stay)
                        && !lanes.open(place)
                    {
                        self.count(Word::Open, "overflow");
                    }
                }
                Moved::Inherited(stay) => {
                    if let Some(place) = self.came(stay) {
                        // Whoever is gone has opened it, so it is closed at its end whatever becomes of this.
                        self.known.lock().open.insert(place.clone());
                        lanes.open(place);
                    }
                }
                Moved::Left(stay) => {
                    let mut known = self.known.lock();
                    let place = known.bound.remove(&(stay.target.worker, stay.id));
                    if let Some(place) = place {
                        let is_open = known.open.contains(&place);
                        lanes.close(place, is_open);
                    }
                }
                Moved::HandedOver(stay) => {
                    let mut known = self.known.lock();
                    if let Some(place) = known.bound.remove(&(stay.target.worker, stay.id)) {
                        known.open.remove(&place);
                        lanes.forget(&place);
                        self.metrics.engine_sessions.set(known.open.len() as i64);
                    }
                }
            }
        }
    }

    fn came(&self, stay: Stay) -> Option<Place> {
        let worker = stay.target.worker;
        let endpoint = self.router.fleet().worker(worker)?.endpoint;
        let place = Place { endpoint, id: stay.id.clone() };
        self.known.lock().bound.insert((worker, stay.id), place.clone());
        Some(place)
    }

    /// One call.
    async fn tell(&self, place: Place, word: Word) -> Told {
        // Open from the moment it may have been opened, closed only when there is nothing left to close.
        let known = match word {
            Word::Open => self.known.lock().open.insert(place.clone()),
            Word::Close => self.known.lock().open.contains(&place),
        };
        if word == Word::Close && !known {
            return Told { place, silence: false };
        }
        let told = self.call(&place, word).await;
        let is_open = match (word, &told) {
            (Word::Open, Err(failure)) => !failure.is_certain(),
            (Word::Open, Ok(())) => true,
            (Word::Close, _) => false,
        };
        if !is_open {
            self.known.lock().open.remove(&place);
        }
        self.metrics.engine_sessions.set(self.known.lock().open.len() as i64);
        match &told {
            Ok(()) => self.count(word, "ok"),
            Err(failure) => {
                debug!(endpoint = %place.endpoint, session = place.id, ?word, %failure, "an engine was not told");
                self.count(word, failure.label());
            }
        }
        Told { place, silence: told.is_err_and(|failure| failure.is_silence()) }
    }

    async fn call(&self, place: &Place, word: Word) -> Result<(), Failure> {
        let EngineKind::Sglang = self.config.kind;
        let (path, body) = match word {
            Word::Open => ("open_session", self.opening(&place.id)),
            Word::Close => ("close_session", json!({ "session_id": place.id })),
        };
        let request = self.client.post(format!("http://{}/{path}", place.endpoint));
        let response = request.header(CONTENT_TYPE, "application/json").body(body.to_string()).send().await?;
        if response.status().is_success() { Ok(()) } else { Err(Failure::Status(response.status())) }
    }

    fn opening(&self, id: &str) -> serde_json::Value {
        let mut body = json!({ "capacity_of_str_len": self.config.capacity, "session_id": id });
        if self.config.streaming {
            body["streaming"] = true.into();
        }
        if let Some(idle) = self.config.idle {
            body["timeout"] = idle.get().as_secs_f64().into();
        }
        body
    }

    fn count(&self, word: Word, outcome: &'static str) {
        let call = match word {
            Word::Open => "open",
            Word::Close => "close",
        };
        self.metrics.engine_session_calls.get_or_create(&EngineSessionLabels { call, outcome }).inc();
    }
}
