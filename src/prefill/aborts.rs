//! Telling engines that nobody waits for a request any longer: SGLang's `abort_request`. Envoy never takes a copy back, so
//! the engine would compute, and keep what it has computed, until its own patience ends. It is told more than once, because
//! the word is short and may be there before the copy is, of which the engine then knows nothing yet.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use reqwest::header::HeaderValue;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::debug;

use crate::engine_client::config::EnginesConfig;
use crate::engine_client::{EngineClient, EngineError, EngineUrl};
use crate::metrics::{Metrics, OutcomeLabel};
use crate::worker::Endpoint;

/// When an engine is told. Copies have megabytes, and Envoy may have to connect for one.
const WORDS: [Duration; 4] = [
    Duration::ZERO,
    Duration::from_millis(500),
    Duration::from_secs(2),
    Duration::from_secs(10),
];

/// How many of these the end of the process waits for.
const WAITED_FOR: usize = 2;

/// Words under way to one engine.
const AT_ONCE: usize = 16;

/// Requests of one engine that are to be aborted. All clients may leave at once, and each of them counts.
const MOST: usize = 4096;

/// The way to engines that have to be told that nobody waits.
pub struct Aborts {
    client: EngineClient,
    engines: EnginesConfig,
    metrics: Arc<Metrics>,
    under_way: TaskTracker,
    /// Those in which something is to be told; no engine waits for another.
    lanes: Mutex<HashMap<Endpoint, Weak<Lane>>>,
}

/// What is to be told to one engine.
struct Lane {
    turns: Semaphore,
    room: Arc<Semaphore>,
}

/// One request that is to be aborted.
struct Abort {
    engine: EngineUrl,
    lane: Arc<Lane>,
    /// What the engine is told.
    body: Bytes,
    /// The client's.
    credentials: Option<HeaderValue>,
    /// Its place among those that wait.
    _room: OwnedSemaphorePermit,
}

impl Aborts {
    /// The way to engines; it connects with the first word.
    pub fn new(engines: &EnginesConfig, metrics: Arc<Metrics>) -> Result<Arc<Self>, EngineError> {
        Self::tracked(engines, metrics, TaskTracker::new())
    }

    /// The same, with somewhere to see what is still to be told.
    pub fn tracked(
        engines: &EnginesConfig,
        metrics: Arc<Metrics>,
        under_way: TaskTracker,
    ) -> Result<Arc<Self>, EngineError> {
        let client = EngineClient::new(&of_our_own(engines))?;
        Ok(Arc::new(Self {
            client,
            engines: engines.clone(),
            metrics,
            under_way,
            lanes: Mutex::default(),
        }))
    }

    /// The way under another configuration: this one, if nothing changes for it.
    pub fn renewed(self: &Arc<Self>, engines: &EnginesConfig) -> Result<Arc<Self>, EngineError> {
        let client = self.client.renewed(&of_our_own(engines))?;
        if client.is_same(&self.client) && self.engines == *engines {
            return Ok(self.clone());
        }
        let (metrics, under_way) = (self.metrics.clone(), self.under_way.clone());
        Ok(Arc::new(Self {
            client,
            engines: engines.clone(),
            metrics,
            under_way,
            lanes: Mutex::default(),
        }))
    }

    /// Tells one engine that nobody waits for a request any longer. `credentials` are the client's own, for where the
    /// configuration has no token for engines. It counts as under way from the call on, not from its first poll.
    pub(super) fn abort(
        self: Arc<Self>,
        worker: Endpoint,
        request: Option<Arc<str>>,
        credentials: Option<HeaderValue>,
    ) -> impl Future<Output = ()> + Send + use<> {
        let tracked = self.under_way.token();
        let lane = self.lane(worker);
        let room = lane.room.clone().try_acquire_owned();
        async move {
            match (request, room) {
                // A name that a client chose may be the beginning of other requests' names, which would be aborted as well.
                (None, _) => self.count("not_ours"),
                (Some(_), Err(_)) => self.count("overflow"),
                (Some(request), Ok(_room)) => {
                    let engine = self.engines.url(worker);
                    let body =
                        Bytes::from(json!({"rid": &*request, "abort_all": false}).to_string());
                    self.tell(
                        Abort {
                            engine,
                            lane,
                            body,
                            credentials,
                            _room,
                        },
                        tracked,
                    )
                    .await;
                }
            }
        }
    }

    async fn tell(&self, abort: Abort, tracked: TaskTrackerToken) {
        let mut tracked = Some(tracked);
        let (began, mut heard, mut failed) = (Instant::now(), false, "");
        for (said, after) in WORDS.into_iter().enumerate() {
            if said == WAITED_FOR {
                tracked = None;
            }
            sleep_until(began + after).await;
            match self.say(&abort).await {
                Ok(()) if heard => {}
                Ok(()) => {
                    heard = true;
                    self.count("told");
                }
                Err(error) => {
                    debug!(engine = %abort.engine, %error, "a prefill could not be aborted");
                    failed = error.label();
                    if !error.passes() {
                        break;
                    }
                }
            }
        }
        drop(tracked);
        if !heard {
            self.count(failed);
        }
    }

    async fn say(&self, abort: &Abort) -> Result<(), EngineError> {
        // It is never closed.
        let _turn = abort.lane.turns.acquire().await;
        self.client
            .tell(
                &abort.engine,
                "abort_request",
                abort.body.clone(),
                abort.credentials.clone(),
            )
            .await
    }

    fn lane(&self, worker: Endpoint) -> Arc<Lane> {
        let mut lanes = self.lanes.lock();
        if let Some(lane) = lanes.get(&worker).and_then(Weak::upgrade) {
            return lane;
        }
        lanes.retain(|_, lane| lane.strong_count() > 0);
        let lane = Arc::new(Lane {
            turns: Semaphore::new(AT_ONCE),
            room: Arc::new(Semaphore::new(MOST)),
        });
        lanes.insert(worker, Arc::downgrade(&lane));
        lane
    }

    fn count(&self, outcome: &'static str) {
        self.metrics
            .prefill_aborts
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }
}

/// Words are not held up by other questions, nor these by words: what bounds them is [`AT_ONCE`].
fn of_our_own(engines: &EnginesConfig) -> EnginesConfig {
    EnginesConfig {
        in_flight: u32::MAX,
        ..engines.clone()
    }
}

#[cfg(test)]
mod tests;
