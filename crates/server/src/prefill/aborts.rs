//! Aborts requests in engines with SGLang's `abort_request`. Envoy never cancels a mirrored copy,
//! so without an abort the engine computes it and keeps the result until its own timeout. The abort
//! is repeated, because it may arrive before the copy, and engines ignore an abort of an unknown
//! request.

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

use warmroute_core::worker::WorkerEndpoint;
use warmroute_engines::engine_client::config::EnginesConfig;
use warmroute_engines::engine_client::{EngineClient, EngineError, EngineUrl};
use warmroute_metrics::{Metrics, count_outcome};

/// Delays of the repeated aborts. A copy may be several megabytes long, and Envoy may have to
/// connect first.
const SEND_DELAYS: [Duration; 4] = [
    Duration::ZERO,
    Duration::from_millis(500),
    Duration::from_secs(2),
    Duration::from_secs(10),
];

/// Number of sends that a shutdown waits for.
const SENDS_BEFORE_SHUTDOWN: usize = 2;

/// Maximum number of concurrent calls to one engine.
const MAX_CONCURRENT_CALLS: usize = 16;

/// Maximum number of queued aborts for one engine. All clients may disconnect at once.
const MAX_QUEUED_ABORTS: usize = 4096;

/// Client for aborts.
pub struct AbortClient {
    client: EngineClient,
    engines: EnginesConfig,
    metrics: Arc<Metrics>,
    task_tracker: TaskTracker,
    /// Limits of the engines with running aborts. Aborts for different engines do not wait for each
    /// other.
    limits_by_worker: Mutex<HashMap<WorkerEndpoint, Weak<WorkerAbortLimits>>>,
}

/// Limits of the aborts for one engine.
struct WorkerAbortLimits {
    call_permits: Semaphore,
    queue_permits: Arc<Semaphore>,
}

/// One request to abort.
struct AbortRequest {
    engine: EngineUrl,
    limits: Arc<WorkerAbortLimits>,
    /// Body of the call.
    body: Bytes,
    /// Credentials of the client that sent the request.
    credentials: Option<HeaderValue>,
    /// Slot in the queue.
    _queue_permit: OwnedSemaphorePermit,
}

impl AbortClient {
    /// Creates a client, which connects at the first abort. Running aborts count in `task_tracker`.
    pub fn new(
        engines: &EnginesConfig,
        metrics: Arc<Metrics>,
        task_tracker: TaskTracker,
    ) -> Result<Arc<Self>, EngineError> {
        let client = EngineClient::new(&client_config(engines))?;
        Ok(Arc::new(Self {
            client,
            engines: engines.clone(),
            metrics,
            task_tracker,
            limits_by_worker: Mutex::default(),
        }))
    }

    /// Returns a client for another configuration: this client, if nothing relevant changes.
    pub fn reconfigure(
        self: &Arc<Self>,
        engines: &EnginesConfig,
    ) -> Result<Arc<Self>, EngineError> {
        let client = self.client.with_config(&client_config(engines))?;
        if client == self.client && self.engines == *engines {
            return Ok(self.clone());
        }
        let metrics = self.metrics.clone();
        let task_tracker = self.task_tracker.clone();
        Ok(Arc::new(Self {
            client,
            engines: engines.clone(),
            metrics,
            task_tracker,
            limits_by_worker: Mutex::default(),
        }))
    }

    /// Aborts one request in an engine. `credentials` are the client's own, used if the
    /// configuration has no token for engines. The abort counts as running from this call on, not
    /// from the first poll.
    pub(super) fn abort(
        self: Arc<Self>,
        worker: WorkerEndpoint,
        request: Option<Arc<str>>,
        credentials: Option<HeaderValue>,
    ) -> impl Future<Output = ()> + Send + use<> {
        let tracker_token = self.task_tracker.token();
        let limits = self.limits_of(worker);
        let queue_permit = limits.queue_permits.clone().try_acquire_owned();
        async move {
            match (request, queue_permit) {
                // A request id of a client may be a prefix of other ids, and engines abort all
                // requests with the prefix.
                (None, _) => self.count("client_request_id"),
                (Some(_), Err(_)) => self.count("overflow"),
                (Some(request), Ok(_queue_permit)) => {
                    let engine = self.engines.url(worker);
                    let body =
                        Bytes::from(json!({"rid": &*request, "abort_all": false}).to_string());
                    self.send_repeatedly(
                        AbortRequest {
                            engine,
                            limits,
                            body,
                            credentials,
                            _queue_permit,
                        },
                        tracker_token,
                    )
                    .await;
                }
            }
        }
    }

    async fn send_repeatedly(&self, abort: AbortRequest, tracker_token: TaskTrackerToken) {
        let mut tracker_token = Some(tracker_token);
        let started = Instant::now();
        let mut is_received = false;
        let mut failure = "";
        for (sent, delay) in SEND_DELAYS.into_iter().enumerate() {
            if sent == SENDS_BEFORE_SHUTDOWN {
                tracker_token = None;
            }
            sleep_until(started + delay).await;
            match self.send_once(&abort).await {
                Ok(()) if is_received => {}
                Ok(()) => {
                    is_received = true;
                    self.count("accepted");
                }
                Err(error) => {
                    debug!(engine = %abort.engine, %error, "abort failed");
                    failure = error.label();
                    if !error.is_transient() {
                        break;
                    }
                }
            }
        }
        drop(tracker_token);
        if !is_received {
            self.count(failure);
        }
    }

    async fn send_once(&self, abort: &AbortRequest) -> Result<(), EngineError> {
        // The semaphore is never closed.
        let _permit = abort.limits.call_permits.acquire().await;
        self.client
            .notify(
                &abort.engine,
                "abort_request",
                abort.body.clone(),
                abort.credentials.clone(),
            )
            .await
    }

    fn limits_of(&self, worker: WorkerEndpoint) -> Arc<WorkerAbortLimits> {
        let mut limits_by_worker = self.limits_by_worker.lock();
        if let Some(limits) = limits_by_worker.get(&worker).and_then(Weak::upgrade) {
            return limits;
        }
        limits_by_worker.retain(|_, limits| limits.strong_count() > 0);
        let limits = Arc::new(WorkerAbortLimits {
            call_permits: Semaphore::new(MAX_CONCURRENT_CALLS),
            queue_permits: Arc::new(Semaphore::new(MAX_QUEUED_ABORTS)),
        });
        limits_by_worker.insert(worker, Arc::downgrade(&limits));
        limits
    }

    fn count(&self, outcome: &'static str) {
        count_outcome(&self.metrics.prefill.aborts, outcome);
    }
}

/// Returns the configuration without its limit of calls, so that aborts and other calls do not
/// delay each other. [`MAX_CONCURRENT_CALLS`] limits aborts.
fn client_config(engines: &EnginesConfig) -> EnginesConfig {
    EnginesConfig {
        max_concurrency: u32::MAX,
        ..engines.clone()
    }
}

#[cfg(test)]
mod tests;
