//! Client of prefill workers. A call can be cancelled until its first byte is sent. Afterwards, it
//! runs to its end even if the client disconnects, because an engine keeps the blocks of an
//! interrupted prefill for a decode worker that never fetches them. The reservations of the request
//! last as long as the engine works on it.

mod in_flight;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use dashmap::{DashMap, DashSet};
use http_body::{Body, Frame, SizeHint};
use in_flight::InFlightPrefill;
use reqwest::header::HeaderMap;
use thiserror::Error;
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinHandle};
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};
use warmroute_core::health::RequestOutcome;
use warmroute_core::worker::WorkerEndpoint;
use warmroute_engines::engine_client::config::EnginesConfig;
use warmroute_engines::engine_client::{EngineClient, EngineError, ForwardedRequest};
use warmroute_metrics::{Metrics, count_outcome};

use super::handoff::{HandoffError, PrefillBody, PrefillResponse};

/// Maximum number of workers with a recorded completion, before old records are removed.
const MAX_REMEMBERED_WORKERS: usize = 4096;

/// Error of a prefill.
#[derive(Clone, Debug, Error)]
pub enum PrefillError {
    /// The engine rejected the request. Other engines would reject it, too.
    #[error("rejected: {0}")]
    Rejected(EngineError),
    /// The engine does not offer prefills, or refuses the credentials.
    #[error("not offered: {0}")]
    NotOffered(EngineError),
    /// The response is too long or unreadable.
    #[error("unusable response: {0}")]
    Unusable(EngineError),
    /// The engine is overloaded.
    #[error("busy: {0}")]
    Busy(EngineError),
    /// The limit of concurrent prefills is reached.
    #[error("too many concurrent prefills")]
    LimitReached,
    /// The connection failed, the call timed out, or the engine failed.
    #[error("failed: {0}")]
    Failed(EngineError),
}

impl PrefillError {
    fn from_engine_error(error: EngineError) -> Self {
        match error {
            EngineError::Busy => Self::LimitReached,
            EngineError::Status {
                status: 408 | 425 | 429 | 503 | 529,
                ..
            } => Self::Busy(error),
            EngineError::Status {
                status: 400 | 413 | 422,
                ..
            } => Self::Rejected(error),
            EngineError::Status {
                status: 400..=499, ..
            }
            | EngineError::NotOffered(_) => Self::NotOffered(error),
            EngineError::TooLarge(_) | EngineError::Unreadable(_) => Self::Unusable(error),
            error => Self::Failed(error),
        }
    }

    /// Returns the outcome for the health of the worker; `None` if the error does not depend on the
    /// worker. `is_active` returns whether the worker has completed other calls in the meantime.
    pub fn health_outcome(&self, is_active: impl FnOnce() -> bool) -> Option<RequestOutcome> {
        match self {
            PrefillError::Rejected(_) | PrefillError::NotOffered(_) => {
                Some(RequestOutcome::Rejected)
            }
            PrefillError::Busy(_) => Some(RequestOutcome::Overloaded),
            PrefillError::Failed(EngineError::Timeout) if is_active() => {
                Some(RequestOutcome::Overloaded)
            }
            PrefillError::Failed(EngineError::Timeout) => Some(RequestOutcome::NoResponse),
            PrefillError::Failed(EngineError::Status { .. }) => Some(RequestOutcome::ServerError),
            PrefillError::Failed(_) => Some(RequestOutcome::Unreachable),
            PrefillError::LimitReached | PrefillError::Unusable(_) => None,
        }
    }

    /// Returns the metric label.
    pub fn label(&self) -> &'static str {
        match self {
            PrefillError::Rejected(_) => "rejected",
            PrefillError::NotOffered(_) => "not_offered",
            PrefillError::Unusable(_) => "unusable_response",
            PrefillError::Busy(_) => "busy",
            PrefillError::LimitReached => "concurrency_limit",
            PrefillError::Failed(EngineError::Timeout) => "timeout",
            PrefillError::Failed(_) => "failed",
        }
    }
}

/// Result of a prefill, with the resources that it held; `None` if it was cancelled.
type PrefillEnd<T> = Option<(T, Result<PrefillResponse, PrefillError>)>;

/// Signals between a call and its caller.
struct CallSignals {
    /// Closed when the client has disconnected.
    client_rx: oneshot::Receiver<()>,
    /// Notified at the first byte.
    started_tx: Option<oneshot::Sender<()>>,
}

/// One prefill call.
#[derive(Debug)]
pub struct PrefillCall {
    /// The prefill worker.
    pub worker: WorkerEndpoint,
    /// Path of the request.
    pub path: String,
    /// Headers of the request.
    pub headers: HeaderMap,
    /// Body of the request.
    pub body: PrefillBody,
}

/// Client of prefill workers.
#[derive(Clone)]
pub struct PrefillClient {
    client: EngineClient,
    engines: EnginesConfig,
    deadline: Duration,
    metrics: Arc<Metrics>,
    /// Time of the last completed call of each worker.
    last_completed: Arc<DashMap<WorkerEndpoint, Instant>>,
    /// Workers about which a warning was logged.
    warned_workers: Arc<DashSet<WorkerEndpoint>>,
    /// The running calls, including those whose client has disconnected.
    task_tracker: TaskTracker,
    /// Whether a worker may compute a prompt twice after its connection was closed.
    may_repeat: bool,
}

impl PrefillClient {
    /// Creates a client with a deadline for each prefill.
    pub fn new(
        engines: EnginesConfig,
        deadline: Duration,
        metrics: Arc<Metrics>,
    ) -> Result<Self, EngineError> {
        Ok(Self {
            client: EngineClient::new(&engines)?,
            engines,
            deadline,
            metrics,
            last_completed: Arc::default(),
            warned_workers: Arc::default(),
            task_tracker: TaskTracker::new(),
            may_repeat: false,
        })
    }

    /// Counts running calls in `task_tracker`.
    #[must_use]
    pub fn with_tracker(self, task_tracker: TaskTracker) -> Self {
        Self {
            task_tracker,
            ..self
        }
    }

    /// Allows repeated calls, for engines where computing a prompt twice is harmless.
    #[must_use]
    pub fn with_repeats(self, may_repeat: bool) -> Self {
        Self { may_repeat, ..self }
    }

    /// Returns the client for another configuration. It shares the connections and the limit,
    /// unless they change.
    pub fn reconfigure(
        &self,
        engines: EnginesConfig,
        deadline: Duration,
    ) -> Result<Self, EngineError> {
        Ok(Self {
            client: self.client.with_config(&engines)?,
            engines,
            deadline,
            ..self.clone()
        })
    }

    /// Returns the deadline of one prefill.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Returns whether a worker has completed a call since `since`. Such a worker is slow but not
    /// dead.
    pub fn completed_since(&self, worker: WorkerEndpoint, since: Instant) -> bool {
        self.last_completed
            .get(&worker)
            .is_some_and(|done| *done >= since)
    }

    /// Records that a worker has completed a call.
    pub fn record_completion(&self, worker: WorkerEndpoint) {
        // Removes workers that have probably left the fleet.
        if self.last_completed.len() > MAX_REMEMBERED_WORKERS {
            self.last_completed
                .retain(|_, done| done.elapsed() < self.deadline);
        }
        self.last_completed.insert(worker, Instant::now());
    }

    /// Warns once per worker that it does not offer prefills.
    pub(super) fn warn_not_offered(&self, worker: WorkerEndpoint, error: &EngineError) {
        if self.warned_workers.insert(worker) {
            warn!(%worker, %error, "prefill worker offers no prefill; check its command line and its credentials");
        }
    }

    /// Warns once per worker that it computed a prompt and returned no KV transfer parameters.
    pub(super) fn warn_no_handoff(&self, worker: WorkerEndpoint, error: HandoffError) {
        self.count(error.label());
        if self.warned_workers.insert(worker) {
            warn!(
                %worker, %error,
                "prefill without KV handoff. An output that ends with its first token is harmless. \
                If prefill_calls with this outcome grow, check whether the worker has a KV \
                connector"
            );
        }
        debug!(%worker, %error, "prefill without KV handoff");
    }

    /// Runs a prefill and holds `resources` as long as the engine works on it. Dropping the future
    /// cancels the call if nothing was sent yet. Otherwise, the call continues with `resources`.
    /// `on_end` receives the result and the start time in every case.
    pub async fn run<T: Send + 'static>(
        &self,
        call: PrefillCall,
        resources: T,
        on_end: impl FnOnce(&mut T, &Result<PrefillResponse, PrefillError>, Instant) + Send + 'static,
    ) -> (T, Result<PrefillResponse, PrefillError>) {
        let (client_tx, client_rx) = oneshot::channel::<()>();
        let signals = CallSignals {
            client_rx,
            started_tx: None,
        };
        let task = self
            .task_tracker
            .spawn(self.clone().call(call, resources, on_end, signals));
        let response = task.await;
        drop(client_tx);
        match response {
            Ok(Some(response)) => response,
            // Only a dropped future cancels the call.
            Ok(None) => std::future::pending().await,
            Err(end) => resume_join_error(end).await,
        }
    }

    /// Starts a prefill and returns when its first byte is sent. Dropping the future cancels the
    /// call as in [`Self::run`]. `on_response` receives the response.
    pub async fn start(
        &self,
        call: PrefillCall,
        on_response: impl FnOnce(&PrefillResponse) + Send + 'static,
    ) -> Result<RunningPrefill, PrefillError> {
        let (client_tx, client_rx) = oneshot::channel();
        let (started_tx, started_rx) = oneshot::channel();
        let signals = CallSignals {
            client_rx,
            started_tx: Some(started_tx),
        };
        let on_end = |(): &mut (), answer: &Result<PrefillResponse, PrefillError>, _| {
            if let Ok(response) = answer {
                on_response(response);
            }
        };
        let mut task = self
            .task_tracker
            .spawn(self.clone().call(call, (), on_end, signals));
        tokio::select! {
            biased;
            Ok(()) = started_rx => Ok(RunningPrefill { client_tx: Some(client_tx), task: Some(task) }),
            end = &mut task => match end {
                Ok(Some(((), Err(failure)))) => Err(failure),
                // A call cannot succeed before it has started.
                Ok(Some(((), Ok(_))) | None) => Err(PrefillError::LimitReached),
                Err(end) => resume_join_error(end).await,
            },
        }
    }

    async fn call<T>(
        self,
        call: PrefillCall,
        mut resources: T,
        on_end: impl FnOnce(&mut T, &Result<PrefillResponse, PrefillError>, Instant),
        signals: CallSignals,
    ) -> PrefillEnd<T> {
        let worker = call.worker;
        let started_tx = signals.started_tx;
        let in_flight = InFlightPrefill::begin(self.metrics.clone());
        let sending = Arc::new(SendState::default());
        let started = Instant::now();
        let (body, into_response) = call.body.into_parts();
        let notifying = |body, started_tx| {
            reqwest::Body::wrap(NotifyingBody {
                body: Some(body),
                sending: sending.clone(),
                started_tx,
            })
        };
        // Computing a prompt twice only costs time. A bootstrap room must not be entered twice.
        let repeat =
            (self.may_repeat && started_tx.is_none()).then(|| notifying(body.clone(), None));
        let engine = self.engines.url(worker);
        let body = notifying(body, started_tx);
        let forwarded = ForwardedRequest {
            engine: &engine,
            path: &call.path,
            headers: call.headers,
            body,
            retry_body: repeat,
            deadline: self.deadline,
        };
        let forwarded = self.client.forward(forwarded);
        tokio::pin!(forwarded);
        let answer = tokio::select! {
            biased;
            answer = &mut forwarded => answer,
            // The sender was dropped, so the client has disconnected.
            Err(_) = signals.client_rx => {
                let is_cancelled = sending.cancel();
                self.count(if is_cancelled { "cancelled_before_start" } else { "cancelled_after_start" });
                if is_cancelled {
                    return None;
                }
                forwarded.await
            }
        };
        let answer = answer
            .map(into_response)
            .map_err(PrefillError::from_engine_error);
        in_flight.finish(
            answer
                .as_ref()
                .map_or_else(PrefillError::label, |_| "completed"),
        );
        if answer.is_ok() {
            self.record_completion(worker);
        }
        on_end(&mut resources, &answer, started);
        Some((resources, answer))
    }

    fn count(&self, outcome: &'static str) {
        count_outcome(&self.metrics.prefill.calls, outcome);
    }
}

/// Resumes a panic of the task. If the runtime has cancelled the task, waits forever, because the
/// runtime ends this task as well.
async fn resume_join_error<T>(end: JoinError) -> T {
    match end.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_cancelled) => std::future::pending().await,
    }
}

/// A body that notifies when its first byte is sent. At that time a connection exists, and the
/// engine will receive the request.
struct NotifyingBody {
    body: Option<Bytes>,
    sending: Arc<SendState>,
    /// Notified at the first byte.
    started_tx: Option<oneshot::Sender<()>>,
}

/// A running prefill. Dropping it means that the client has disconnected.
#[derive(Debug)]
#[must_use = "dropping it reports that the client has disconnected"]
pub struct RunningPrefill {
    client_tx: Option<oneshot::Sender<()>>,
    /// `None` after the end of the prefill.
    task: Option<JoinHandle<PrefillEnd<()>>>,
}

impl RunningPrefill {
    /// Completes once, with the result of the prefill.
    pub async fn wait(&mut self) -> Result<(), PrefillError> {
        let Some(task) = &mut self.task else {
            return std::future::pending().await;
        };
        let end = task.await;
        self.task = None;
        match end {
            Ok(Some(((), Err(failure)))) => Err(failure),
            _ => Ok(()),
        }
    }

    /// Detaches the prefill, because its result is no longer needed.
    pub fn detach(mut self) {
        if let Some(client_tx) = self.client_tx.take() {
            // The receiver is gone if the prefill has ended.
            _ = client_tx.send(());
        }
    }
}

/// State of a call: either sent or cancelled, and never both.
#[derive(Debug, Default)]
struct SendState(AtomicU8);

impl SendState {
    const STARTED: u8 = 1;
    const CANCELLED: u8 = 2;

    fn start(&self) -> bool {
        self.transition(Self::STARTED)
    }

    fn cancel(&self) -> bool {
        self.transition(Self::CANCELLED)
    }

    /// Sets the state if none is set. Returns whether the call is in `state`.
    fn transition(&self, state: u8) -> bool {
        match self
            .0
            .compare_exchange(0, state, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => true,
            Err(current) => current == state,
        }
    }
}

/// The call was cancelled before its first byte.
#[derive(Debug, Error)]
#[error("the call was cancelled")]
struct SendCancelledError;

impl Body for NotifyingBody {
    type Data = Bytes;
    type Error = SendCancelledError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, SendCancelledError>>> {
        if !self.sending.start() {
            return Poll::Ready(Some(Err(SendCancelledError)));
        }
        // Without a receiver the end of the call is awaited instead.
        _ = self.started_tx.take().map(|started_tx| started_tx.send(()));
        Poll::Ready(self.body.take().map(|body| Ok(Frame::data(body))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.body.as_ref().map_or(0, |body| body.len() as u64))
    }
}

#[cfg(test)]
mod tests;
