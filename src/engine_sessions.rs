//! Tells engines of the sessions that are bound to them, so that an engine with sessions of its own keeps their caches:
//! one is opened when a session comes to a worker, and closed when it leaves. Requests of a session wait until the call that
//! opens it has ended, for the timeout of a call at most; a call that fails is counted and has no other effect.
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

use arc_swap::ArcSwap;
use futures_util::stream::{self, FuturesUnordered, StreamExt as _};
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

use crate::engine_client::config::EnginesConfig;
use crate::engine_client::{EngineClient, EngineError};
use crate::metrics::{EngineSessionLabels, Metrics};
use crate::router::Router;
use crate::sessions::{Moved, Sessions, Stay};
use crate::worker::{WorkerId, WorkerRank};
use config::{EngineKind, EngineSessionsConfig};
use lanes::{Lanes, Place, Word};

/// Calls at once while all sessions are closed at the end.
const AT_ONCE_AT_THE_END: usize = 64;

/// Most calls to all engines at once.
const AT_ONCE_TO_ALL: u32 = 4096;

/// Addresses and credentials of engines.
#[derive(Clone, Debug)]
pub struct EngineAccess {
    client: EngineClient,
    engines: EnginesConfig,
}

impl EngineAccess {
    /// Shares the connections of `client`, with a separate limit of concurrent calls.
    pub fn new(client: &EngineClient, engines: &EnginesConfig) -> Self {
        Self {
            client: client.apart(engines.token_file.clone(), AT_ONCE_TO_ALL),
            engines: engines.clone(),
        }
    }
}

/// Tells engines of sessions.
pub struct EngineSessions {
    config: EngineSessionsConfig,
    access: ArcSwap<EngineAccess>,
    sessions: Arc<Sessions>,
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    news: Arc<Notify>,
    /// Locked before `known`, while session moves are turned into calls.
    lanes: Mutex<Lanes>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// Where the engine of a bound session was when it came: its worker may have left the fleet by the time it leaves.
    bound: HashMap<BoundSession, Place>,
    /// The sessions that use an id at an engine. Engines do not know tenants, so two tenants may use the same id.
    users: HashMap<Place, HashSet<BoundSession>>,
    /// The open calls of sessions at engines.
    opening: HashMap<Place, SessionOpening>,
    /// What engines may have open because of us.
    open: HashSet<Place>,
}

/// A session at a worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct BoundSession {
    worker: WorkerId,
    tenant: Option<Arc<str>>,
    id: String,
}

impl BoundSession {
    fn of(stay: &Stay) -> Self {
        Self {
            worker: stay.target.worker,
            tenant: stay.tenant.clone(),
            id: stay.id.clone(),
        }
    }
}

impl Known {
    /// Adds a session; false if another session already uses its id at the engine.
    fn bind(&mut self, session: BoundSession, place: &Place) -> bool {
        self.release(&session);
        self.bound.insert(session.clone(), place.clone());
        let users = self.users.entry(place.clone()).or_default();
        users.insert(session);
        users.len() == 1
    }

    /// Removes a session. Returns its place if no other session uses its id there.
    fn release(&mut self, session: &BoundSession) -> Option<Place> {
        let place = self.bound.remove(session)?;
        if let Some(users) = self.users.get_mut(&place) {
            users.remove(session);
            if !users.is_empty() {
                return None;
            }
        }
        self.users.remove(&place);
        Some(place)
    }
}

/// State of the call that opens a session at an engine.
struct SessionOpening {
    /// The idle time that the client set.
    idle: Option<Duration>,
    /// Requests wait no longer than this, so that an engine that hangs delays only the first ones of a session.
    deadline: Instant,
    /// Whether the call has ended, successfully or not.
    settled: watch::Sender<bool>,
}

/// A call that has ended.
struct Told {
    place: Place,
    /// Nobody answered.
    silence: bool,
}

/// Whether the engine cannot have opened the session: it has no such endpoint. Any other refusal may come from a proxy, or
/// mean that the session is open already, and a connection may break after the request was read.
fn is_certain(error: &EngineError) -> bool {
    matches!(
        error,
        EngineError::NotOffered(_) | EngineError::Client(_) | EngineError::Busy
    )
}

/// Whether the engine did not answer.
fn is_silence(error: &EngineError) -> bool {
    matches!(error, EngineError::Timeout | EngineError::Unreachable(_))
}

impl EngineSessions {
    /// Listens to the sessions from now on; [`EngineSessions::run`] tells the engines.
    pub fn new(
        config: EngineSessionsConfig,
        access: EngineAccess,
        sessions: Arc<Sessions>,
        router: Arc<Router>,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let news = Arc::new(Notify::new());
        let heard = news.clone();
        sessions.on_move(move || heard.notify_one());
        let access = ArcSwap::from_pointee(access);
        Arc::new(Self {
            config,
            access,
            sessions,
            router,
            metrics,
            news,
            lanes: Mutex::default(),
            known: Mutex::default(),
        })
    }

    /// Longest time that a request waits for its session to be opened.
    pub fn deadline(&self) -> Duration {
        self.config.timeout.get()
    }

    /// Uses other addresses and credentials from the next call on.
    pub fn set_access(&self, access: EngineAccess) {
        self.access.store(Arc::new(access));
    }

    /// Waits until the call that opens the session at that worker has ended, successfully or not, or has taken too long. Returns at once if
    /// there is none.
    pub async fn wait_until_open(&self, rank: WorkerRank, id: String, tenant: Option<Arc<str>>) {
        self.follow();
        let session = BoundSession {
            worker: rank.worker,
            tenant,
            id,
        };
        let opening = {
            let Known { bound, opening, .. } = &*self.known.lock();
            let opening = bound.get(&session).and_then(|place| opening.get(place));
            opening.map(|opening| (opening.deadline, opening.settled.subscribe()))
        };
        if let Some((deadline, mut settled)) = opening {
            // An error means that the session has left the worker.
            let _ = timeout_at(deadline, settled.wait_for(|settled| *settled)).await;
        }
    }

    /// Tells engines, for ever.
    pub async fn run(&self) {
        // Calls in progress when the previous run ended are repeated.
        self.lanes.lock().restart();
        self.known
            .lock()
            .opening
            .values()
            .for_each(|opening| _ = opening.settled.send_replace(true));
        let mut running = FuturesUnordered::new();
        loop {
            self.follow();
            while let Some((place, word)) = self.next() {
                running.push(self.tell(place, word));
            }
            tokio::select! {
                () = self.news.notified() => {}
                Some(told) = running.next() => self.ended(&told),
            }
        }
    }

    fn next(&self) -> Option<(Place, Word)> {
        self.lanes.lock().next()
    }

    /// Whoever left the fleet is told to close its sessions as long as it answers.
    fn ended(&self, told: &Told) {
        let mut lanes = self.lanes.lock();
        lanes.done(&told.place);
        let endpoint = told.place.endpoint;
        if told.silence
            && !self
                .router
                .fleet()
                .workers()
                .any(|worker| worker.endpoint == endpoint)
        {
            lanes.discard(endpoint);
            let mut known = self.known.lock();
            known.open.retain(|place| place.endpoint != endpoint);
            let of_engine = known
                .opening
                .iter()
                .filter(|(place, _)| place.endpoint == endpoint);
            of_engine.for_each(|(_, opening)| _ = opening.settled.send_replace(true));
            self.metrics.engine_sessions.set(known.open.len() as i64);
        }
    }

    /// Closes what is open, and gives up on what takes longer than `within`. Where there are heirs, what is in use is left
    /// to them.
    pub async fn close_all(&self, within: Duration, has_heirs: bool) {
        self.follow();
        let open: Vec<Place> = {
            let known = self.known.lock();
            let used: HashSet<&Place> = known.bound.values().filter(|_| has_heirs).collect();
            known
                .open
                .iter()
                .filter(|place| !used.contains(place))
                .cloned()
                .collect()
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
    fn follow(&self) {
        let lanes = &mut *self.lanes.lock();
        for moved in self.sessions.moves() {
            match moved {
                Moved::Came(stay)
                | Moved::Left(stay)
                | Moved::HandedOver(stay)
                | Moved::Inherited(stay)
                    if stay.group => {}
                Moved::Came(stay) => {
                    if let Some(place) = self.came(&stay)
                        && !lanes.open(place.clone())
                    {
                        self.count(Word::Open, "overflow");
                        self.settle(&place);
                    }
                }
                Moved::Inherited(stay) => {
                    if let Some(place) = self.came(&stay) {
                        // Whoever is gone has opened it, so it is closed at its end whatever becomes of this.
                        self.known.lock().open.insert(place.clone());
                        // Requests do not wait: the engine has the session open.
                        self.settle(&place);
                        lanes.open(place);
                    }
                }
                Moved::Left(stay) => {
                    let mut known = self.known.lock();
                    if let Some(place) = known.release(&BoundSession::of(&stay)) {
                        known.opening.remove(&place);
                        let is_open = known.open.contains(&place);
                        lanes.close(place, is_open);
                    }
                }
                Moved::HandedOver(stay) => {
                    let mut known = self.known.lock();
                    if let Some(place) = known.release(&BoundSession::of(&stay)) {
                        known.opening.remove(&place);
                        known.open.remove(&place);
                        lanes.forget(&place);
                        self.metrics.engine_sessions.set(known.open.len() as i64);
                    }
                }
            }
        }
    }

    /// Binds a session. Returns its place if it has to be opened: no other session has opened its id there.
    fn came(&self, stay: &Stay) -> Option<Place> {
        let endpoint = self.router.fleet().worker(stay.target.worker)?.endpoint;
        let place = Place {
            endpoint,
            id: stay.id.clone(),
        };
        let mut known = self.known.lock();
        if !known.bind(BoundSession::of(stay), &place) {
            return None;
        }
        let deadline = Instant::now() + self.deadline();
        let opening = SessionOpening {
            idle: stay.idle,
            deadline,
            settled: watch::Sender::new(false),
        };
        known.opening.insert(place.clone(), opening);
        Some(place)
    }

    /// Records that the call that opens a session has ended.
    fn settle(&self, place: &Place) {
        if let Some(opening) = self.known.lock().opening.get(place) {
            opening.settled.send_replace(true);
        }
    }

    /// One call.
    async fn tell(&self, place: Place, word: Word) -> Told {
        // Open from the moment it may have been opened, closed only when there is nothing left to close.
        let known = match word {
            Word::Open => self.known.lock().open.insert(place.clone()),
            Word::Close => self.known.lock().open.contains(&place),
        };
        if word == Word::Close && !known {
            return Told {
                place,
                silence: false,
            };
        }
        let told = self.call(&place, word).await;
        let is_open = match (word, &told) {
            (Word::Open, Err(error)) => !is_certain(error),
            (Word::Open, Ok(())) => true,
            (Word::Close, _) => false,
        };
        if !is_open {
            self.known.lock().open.remove(&place);
        }
        self.metrics
            .engine_sessions
            .set(self.known.lock().open.len() as i64);
        if word == Word::Open {
            self.settle(&place);
        }
        match &told {
            Ok(()) => self.count(word, "ok"),
            Err(error) => {
                debug!(endpoint = %place.endpoint, session = place.id, ?word, %error, "session call failed");
                self.count(word, error.label());
            }
        }
        Told {
            place,
            silence: told.is_err_and(|error| is_silence(&error)),
        }
    }

    async fn call(&self, place: &Place, word: Word) -> Result<(), EngineError> {
        let EngineKind::Sglang = self.config.kind;
        let (path, body) = match word {
            Word::Open => ("open_session", self.opening(place)),
            Word::Close => ("close_session", json!({ "session_id": place.id })),
        };
        let access = self.access.load_full();
        let engine = access.engines.url(place.endpoint);
        let told = access
            .client
            .tell(&engine, path, body.to_string().into(), None);
        timeout(self.config.timeout.get(), told)
            .await
            .map_err(|_| EngineError::Timeout)?
    }

    fn opening(&self, place: &Place) -> serde_json::Value {
        let mut body =
            json!({ "capacity_of_str_len": self.config.capacity, "session_id": place.id });
        if self.config.streaming {
            body["streaming"] = true.into();
        }
        let idle = self
            .known
            .lock()
            .opening
            .get(place)
            .and_then(|opening| opening.idle);
        let idle = idle.or_else(|| self.config.idle.map(|idle| idle.get()));
        if let Some(idle) = idle {
            body["timeout"] = idle.as_secs_f64().into();
        }
        body
    }

    fn count(&self, word: Word, outcome: &'static str) {
        let call = match word {
            Word::Open => "open",
            Word::Close => "close",
        };
        self.metrics
            .engine_session_calls
            .get_or_create(&EngineSessionLabels { call, outcome })
            .inc();
    }
}
