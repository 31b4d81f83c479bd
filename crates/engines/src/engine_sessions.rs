//! Mirrors sessions to engines that have sessions of their own, so that an engine retains their
//! caches. A session is opened when it is bound to a worker, and closed when it leaves the worker.
//! Requests of a session wait until the open call has ended, at most for the timeout of a call. A
//! failed call is counted and has no other effect.
//!
//! SGLang: an open call is `POST /open_session` with the keys `capacity_of_str_len` and
//! `session_id`, and with `streaming` and `timeout` if they are configured. The response is 200
//! with the id, or an error if the id is already open. A close call is `POST /close_session` with
//! the key `session_id`. The id is the one in the client's requests. Session groups are not opened,
//! because an engine's session is one conversation. If there are several replicas, the one that
//! bound or inherited the session makes the calls.

pub mod config;

mod call_queues;

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
use call_queues::{CallQueues, EngineSession, SessionCall};
use config::{EngineSessionsConfig, SessionEngineKind};
use warmroute_core::router::Router;
use warmroute_core::sessions::{SessionBinding, SessionMove, SessionStore};
use warmroute_core::worker::{WorkerId, WorkerRank};
use warmroute_metrics::{EngineSessionLabels, Metrics};

/// Maximum number of concurrent calls during shutdown.
const MAX_CALLS_AT_SHUTDOWN: usize = 64;

/// Maximum number of concurrent calls to all engines.
const MAX_CALLS: u32 = 4096;

/// Addresses and credentials of engines.
#[derive(Clone, Debug)]
pub struct EngineAccess {
    client: EngineClient,
    engines: EnginesConfig,
}

impl EngineAccess {
    /// Creates an access that shares the connections of `client`, with a separate limit of
    /// concurrent calls.
    pub fn new(client: &EngineClient, engines: &EnginesConfig) -> Self {
        Self {
            client: client.with_credentials(engines.token_file.clone(), MAX_CALLS),
            engines: engines.clone(),
        }
    }
}

/// Opens and closes sessions on engines.
pub struct EngineSessions {
    config: EngineSessionsConfig,
    access: ArcSwap<EngineAccess>,
    sessions: Arc<SessionStore>,
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    wake: Arc<Notify>,
    /// Locked before `state` while session moves are turned into calls.
    queues: Mutex<CallQueues>,
    state: Mutex<SessionsByEngine>,
}

#[derive(Default)]
struct SessionsByEngine {
    /// Engine session of each bound session. The worker may have left the fleet when the session
    /// leaves.
    bound: HashMap<BoundSession, EngineSession>,
    /// Bound sessions of each engine session. Engines have no tenants, so two tenants may use the
    /// same id.
    users: HashMap<EngineSession, HashSet<BoundSession>>,
    /// State of the open call of each engine session.
    opening: HashMap<EngineSession, SessionOpening>,
    /// Engine sessions that may be open because of calls of this process.
    open: HashSet<EngineSession>,
}

/// A session at a worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct BoundSession {
    worker: WorkerId,
    tenant: Option<Arc<str>>,
    id: String,
}

impl BoundSession {
    fn from_binding(binding: &SessionBinding) -> Self {
        Self {
            worker: binding.target.worker,
            tenant: binding.tenant.clone(),
            id: binding.id.clone(),
        }
    }
}

impl SessionsByEngine {
    /// Adds a session. Returns false if another session already uses its id on the engine.
    fn bind(&mut self, session: BoundSession, engine_session: &EngineSession) -> bool {
        self.release(&session);
        self.bound.insert(session.clone(), engine_session.clone());
        let users = self.users.entry(engine_session.clone()).or_default();
        users.insert(session);
        users.len() == 1
    }

    /// Removes a session. Returns its engine session if no other session uses the id.
    fn release(&mut self, session: &BoundSession) -> Option<EngineSession> {
        let engine_session = self.bound.remove(session)?;
        if let Some(users) = self.users.get_mut(&engine_session) {
            users.remove(session);
            if !users.is_empty() {
                return None;
            }
        }
        self.users.remove(&engine_session);
        self.opening.remove(&engine_session);
        Some(engine_session)
    }
}

/// State of the call that opens a session at an engine.
struct SessionOpening {
    /// The idle time that the client set.
    idle: Option<Duration>,
    /// Maximum time that requests wait, so that a hanging engine delays only the first requests of
    /// a session.
    deadline: Instant,
    /// True after the call has ended, successfully or not.
    is_done: watch::Sender<bool>,
}

/// A finished call.
struct SessionCallDone {
    session: EngineSession,
    /// Set if the engine did not respond.
    is_unanswered: bool,
}

/// Returns true if the engine cannot have opened the session: it has no such endpoint, or the call
/// was not sent. After any other error the session may be open. The error may come from a proxy, or
/// the session was already open, or the request was processed.
fn is_not_opened(error: &EngineError) -> bool {
    matches!(
        error,
        EngineError::NotOffered(_) | EngineError::Client(_) | EngineError::Busy
    )
}

/// Returns true if the engine did not respond.
fn is_unanswered(error: &EngineError) -> bool {
    matches!(error, EngineError::Timeout | EngineError::Unreachable(_))
}

/// Session store that records moves.
pub struct RecordedSessions {
    /// The store.
    pub sessions: Arc<SessionStore>,
    /// Notified when moves are available.
    pub moves: Arc<Notify>,
}

impl EngineSessions {
    /// Creates the mirror. [`EngineSessions::run`] makes the calls.
    pub fn new(
        config: EngineSessionsConfig,
        access: EngineAccess,
        recorded: RecordedSessions,
        router: Arc<Router>,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let access = ArcSwap::from_pointee(access);
        Arc::new(Self {
            config,
            access,
            sessions: recorded.sessions,
            router,
            metrics,
            wake: recorded.moves,
            queues: Mutex::default(),
            state: Mutex::default(),
        })
    }

    /// Returns the maximum time that a request waits for its session to be opened.
    pub fn deadline(&self) -> Duration {
        self.config.timeout.get()
    }

    /// Replaces addresses and credentials for later calls.
    pub fn set_access(&self, access: EngineAccess) {
        self.access.store(Arc::new(access));
    }

    /// Waits until the call that opens the session on that worker has ended, or its deadline has
    /// passed. Returns at once if there is no such call.
    pub async fn wait_until_open(&self, rank: WorkerRank, id: String, tenant: Option<Arc<str>>) {
        self.process_moves();
        let session = BoundSession {
            worker: rank.worker,
            tenant,
            id,
        };
        let opening = {
            let SessionsByEngine { bound, opening, .. } = &*self.state.lock();
            let opening = bound
                .get(&session)
                .and_then(|engine_session| opening.get(engine_session));
            opening.map(|opening| (opening.deadline, opening.is_done.subscribe()))
        };
        if let Some((deadline, mut is_done)) = opening {
            // An error means that the session has left the worker.
            let _ = timeout_at(deadline, is_done.wait_for(|is_done| *is_done)).await;
        }
    }

    /// Makes the calls. Runs until the future is dropped.
    pub async fn run(&self) {
        // Calls in progress when the previous run ended are repeated.
        self.queues.lock().restart();
        self.state
            .lock()
            .opening
            .values()
            .for_each(|opening| _ = opening.is_done.send_replace(true));
        let mut running = FuturesUnordered::new();
        loop {
            self.process_moves();
            while let Some((engine_session, call)) = self.next_call() {
                running.push(self.run_call(engine_session, call));
            }
            tokio::select! {
                () = self.wake.notified() => {}
                Some(done) = running.next() => self.finish_call(&done),
            }
        }
    }

    fn next_call(&self) -> Option<(EngineSession, SessionCall)> {
        self.queues.lock().next_call()
    }

    /// Records the end of a call. If a worker has left the fleet, its sessions are closed as long
    /// as it responds.
    fn finish_call(&self, done: &SessionCallDone) {
        let mut queues = self.queues.lock();
        queues.finish_call(&done.session);
        let endpoint = done.session.endpoint;
        if done.is_unanswered
            && !self
                .router
                .fleet()
                .workers()
                .any(|worker| worker.endpoint == endpoint)
        {
            queues.discard_engine(endpoint);
            let mut state = self.state.lock();
            state
                .open
                .retain(|engine_session| engine_session.endpoint != endpoint);
            let of_engine = state
                .opening
                .iter()
                .filter(|(engine_session, _)| engine_session.endpoint == endpoint);
            of_engine.for_each(|(_, opening)| _ = opening.is_done.send_replace(true));
            self.count_open(&state);
        }
    }

    /// Closes the open sessions within a time limit. If other replicas inherit the sessions, those
    /// in use stay open.
    pub async fn close_all(&self, within: Duration, keep_active: bool) {
        self.process_moves();
        let open: Vec<EngineSession> = {
            let state = self.state.lock();
            let used: HashSet<&EngineSession> =
                state.bound.values().filter(|_| keep_active).collect();
            state
                .open
                .iter()
                .filter(|engine_session| !used.contains(engine_session))
                .cloned()
                .collect()
        };
        let closing =
            stream::iter(open).for_each_concurrent(MAX_CALLS_AT_SHUTDOWN, |engine_session| async {
                self.run_call(engine_session, SessionCall::Close).await;
            });
        if tokio::time::timeout(within, closing).await.is_err() {
            let left = self.state.lock().open.len();
            debug!(left, "sessions stay open on unresponsive engines");
        }
    }

    /// Turns session moves into calls.
    fn process_moves(&self) {
        let queues = &mut *self.queues.lock();
        for moved in self.sessions.take_moves() {
            match moved {
                SessionMove::Bound(binding)
                | SessionMove::Unbound(binding)
                | SessionMove::HandedOver(binding)
                | SessionMove::TakenOver(binding)
                    if binding.group => {}
                SessionMove::Bound(binding) => {
                    if let Some(engine_session) = self.bind_session(&binding)
                        && !queues.enqueue_open(engine_session.clone())
                    {
                        self.count_call(SessionCall::Open, "overflow");
                        self.finish_opening(&engine_session);
                    }
                }
                SessionMove::TakenOver(binding) => {
                    if let Some(engine_session) = self.bind_session(&binding) {
                        // The previous replica has opened the session, so it must be closed later
                        // even if this call fails.
                        self.state.lock().open.insert(engine_session.clone());
                        // Requests do not wait: the engine has the session open.
                        self.finish_opening(&engine_session);
                        queues.enqueue_open(engine_session);
                    }
                }
                SessionMove::Unbound(binding) => {
                    let mut state = self.state.lock();
                    if let Some(engine_session) =
                        state.release(&BoundSession::from_binding(&binding))
                    {
                        let is_open = state.open.contains(&engine_session);
                        queues.enqueue_close(engine_session, is_open);
                    }
                }
                SessionMove::HandedOver(binding) => {
                    let mut state = self.state.lock();
                    if let Some(engine_session) =
                        state.release(&BoundSession::from_binding(&binding))
                    {
                        state.open.remove(&engine_session);
                        queues.remove(&engine_session);
                        self.count_open(&state);
                    }
                }
            }
        }
    }

    /// Binds a session. Returns its engine session if an open call is needed, that is, if no other
    /// session has opened the id there.
    fn bind_session(&self, binding: &SessionBinding) -> Option<EngineSession> {
        let endpoint = self.router.fleet().worker(binding.target.worker)?.endpoint;
        let engine_session = EngineSession {
            endpoint,
            id: binding.id.clone(),
        };
        let mut state = self.state.lock();
        if !state.bind(BoundSession::from_binding(binding), &engine_session) {
            return None;
        }
        let deadline = Instant::now() + self.deadline();
        let opening = SessionOpening {
            idle: binding.idle,
            deadline,
            is_done: watch::Sender::new(false),
        };
        state.opening.insert(engine_session.clone(), opening);
        Some(engine_session)
    }

    /// Records that the call that opens a session has ended.
    fn finish_opening(&self, engine_session: &EngineSession) {
        if let Some(opening) = self.state.lock().opening.get(engine_session) {
            opening.is_done.send_replace(true);
        }
    }

    /// Makes one call.
    async fn run_call(&self, engine_session: EngineSession, call: SessionCall) -> SessionCallDone {
        // A session counts as open from the first open call until it has been closed.
        let may_be_open = match call {
            SessionCall::Open => self.state.lock().open.insert(engine_session.clone()),
            SessionCall::Close => self.state.lock().open.contains(&engine_session),
        };
        if call == SessionCall::Close && !may_be_open {
            return SessionCallDone {
                session: engine_session,
                is_unanswered: false,
            };
        }
        let done = self.send_call(&engine_session, call).await;
        let is_open = match (call, &done) {
            (SessionCall::Open, Err(error)) => !is_not_opened(error),
            (SessionCall::Open, Ok(())) => true,
            (SessionCall::Close, _) => false,
        };
        if !is_open {
            self.state.lock().open.remove(&engine_session);
        }
        self.count_open(&self.state.lock());
        if call == SessionCall::Open {
            self.finish_opening(&engine_session);
        }
        match &done {
            Ok(()) => self.count_call(call, "ok"),
            Err(error) => {
                debug!(endpoint = %engine_session.endpoint, session = engine_session.id, ?call, %error, "session call failed");
                self.count_call(call, error.label());
            }
        }
        SessionCallDone {
            session: engine_session,
            is_unanswered: done.is_err_and(|error| is_unanswered(&error)),
        }
    }

    async fn send_call(
        &self,
        engine_session: &EngineSession,
        call: SessionCall,
    ) -> Result<(), EngineError> {
        let SessionEngineKind::Sglang = self.config.kind;
        let (path, body) = match call {
            SessionCall::Open => ("open_session", self.open_body(engine_session)),
            SessionCall::Close => ("close_session", json!({ "session_id": engine_session.id })),
        };
        let access = self.access.load_full();
        let engine = access.engines.url(engine_session.endpoint);
        let done = access
            .client
            .notify(&engine, path, body.to_string().into(), None);
        timeout(self.config.timeout.get(), done)
            .await
            .map_err(|_| EngineError::Timeout)?
    }

    fn open_body(&self, engine_session: &EngineSession) -> serde_json::Value {
        let mut body =
            json!({ "capacity_of_str_len": self.config.capacity, "session_id": engine_session.id });
        if self.config.streaming {
            body["streaming"] = true.into();
        }
        let idle = self
            .state
            .lock()
            .opening
            .get(engine_session)
            .and_then(|opening| opening.idle);
        let idle = idle.or_else(|| self.config.idle_timeout.map(|idle| idle.get()));
        if let Some(idle) = idle {
            body["timeout"] = idle.as_secs_f64().into();
        }
        body
    }

    fn count_open(&self, state: &SessionsByEngine) {
        let gauge = &self.metrics.sessions.engine_sessions;
        gauge.set(state.open.len() as i64);
    }

    fn count_call(&self, call: SessionCall, outcome: &'static str) {
        let call = match call {
            SessionCall::Open => "open",
            SessionCall::Close => "close",
        };
        self.metrics
            .sessions
            .engine_calls
            .get_or_create(&EngineSessionLabels { call, outcome })
            .inc();
    }
}
