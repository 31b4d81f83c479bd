//! Asks a prefill worker to compute a prompt. Until the first byte has been sent the question can be taken back; from then on
//! it runs to its end whoever has left, because an engine that is cut off in the middle of a prefill keeps its blocks for a
//! decode worker that never comes. What the request holds of the load is held as long as the engine works on it.

mod under_way;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use dashmap::{DashMap, DashSet};
use http_body::{Body, Frame, SizeHint};
use reqwest::header::HeaderMap;
use thiserror::Error;
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinHandle};
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};
use under_way::UnderWay;

use super::handover::{HandedOver, NotHandedOver, Question};
use crate::engine_client::config::EnginesConfig;
use crate::engine_client::{EngineClient, EngineError, Forwarded};
use crate::health::Outcome;
use crate::metrics::{Metrics, OutcomeLabel};
use crate::worker::Endpoint;

/// Workers of which it is remembered when they last answered, before those are forgotten that have not for long.
const MOST_REMEMBERED: usize = 4096;

/// Why there was no prefill.
#[derive(Clone, Debug, Error)]
pub enum Failure {
    /// The engine found the request wrong, so that it would be refused everywhere.
    #[error("refused: {0}")]
    Refused(EngineError),
    /// This engine does not do it, or not for us.
    #[error("not offered: {0}")]
    NotOffered(EngineError),
    /// Its answer is of no use: too long, or nothing that engines say.
    #[error("of no use: {0}")]
    Useless(EngineError),
    /// The engine has too much to do.
    #[error("busy: {0}")]
    Busy(EngineError),
    /// As many prefills are under way as are allowed.
    #[error("too many prefills under way")]
    Full,
    /// Nobody there, no answer in time, or a mistake of its own.
    #[error("failed: {0}")]
    Failed(EngineError),
}

impl Failure {
    fn of(error: EngineError) -> Self {
        match error {
            EngineError::Busy => Self::Full,
            EngineError::Status {
                status: 408 | 425 | 429 | 503 | 529,
                ..
            } => Self::Busy(error),
            EngineError::Status {
                status: 400 | 413 | 422,
                ..
            } => Self::Refused(error),
            EngineError::Status {
                status: 400..=499, ..
            }
            | EngineError::NotOffered(_) => Self::NotOffered(error),
            EngineError::TooLarge(_) | EngineError::Unreadable(_) => Self::Useless(error),
            error => Self::Failed(error),
        }
    }

    /// What it says of the worker; nothing where it was never asked, or has only been asked for too much. `lives` says whether
    /// it has done other things meanwhile.
    pub fn outcome(&self, lives: impl FnOnce() -> bool) -> Option<Outcome> {
        match self {
            Failure::Refused(_) => Some(Outcome::Inconclusive),
            Failure::Busy(_) => Some(Outcome::Overloaded),
            Failure::Failed(EngineError::Timeout) if lives() => Some(Outcome::Overloaded),
            Failure::Failed(_) => Some(Outcome::Failure),
            Failure::Full | Failure::NotOffered(_) | Failure::Useless(_) => None,
        }
    }

    /// The name in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Failure::Refused(_) => "refused",
            Failure::NotOffered(_) => "not_offered",
            Failure::Useless(_) => "useless",
            Failure::Busy(_) => "busy",
            Failure::Full => "full",
            Failure::Failed(EngineError::Timeout) => "timeout",
            Failure::Failed(_) => "failed",
        }
    }
}

/// How a prefill ended, with what was held meanwhile; none if it was taken back.
type Ended<T> = Option<(T, Result<HandedOver, Failure>)>;

/// One prefill to be done.
#[derive(Debug)]
pub struct Asked {
    /// By whom.
    pub worker: Endpoint,
    /// The path of the request.
    pub path: String,
    /// Its headers.
    pub headers: HeaderMap,
    /// What the engine is asked.
    pub question: Question,
}

/// The way to prefill workers.
#[derive(Clone)]
pub struct Caller {
    client: EngineClient,
    engines: EnginesConfig,
    deadline: Duration,
    metrics: Arc<Metrics>,
    /// When each worker last did what it was asked.
    done: Arc<DashMap<Endpoint, Instant>>,
    /// Of whom it was said that they do no prefills.
    warned: Arc<DashSet<Endpoint>>,
    /// The calls under way, those of clients who have left among them.
    under_way: TaskTracker,
    /// Whether a prompt may be computed twice by one worker, where its connection was just being closed.
    repeats: bool,
}

impl Caller {
    /// The way to prefill workers, each of whom has so long.
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
            done: Arc::default(),
            warned: Arc::default(),
            under_way: TaskTracker::new(),
            repeats: false,
        })
    }

    /// The same, with somewhere to see which calls are under way.
    #[must_use]
    pub fn tracked(self, under_way: TaskTracker) -> Self {
        Self { under_way, ..self }
    }

    /// The same, for engines whom it does no harm to compute a prompt twice.
    #[must_use]
    pub fn repeating(self, repeats: bool) -> Self {
        Self { repeats, ..self }
    }

    /// The way under another configuration: by the same connections and with the same limit, if nothing changes for these.
    pub fn renewed(&self, engines: EnginesConfig, deadline: Duration) -> Result<Self, EngineError> {
        Ok(Self {
            client: self.client.renewed(&engines)?,
            engines,
            deadline,
            ..self.clone()
        })
    }

    /// How long one prefill may take.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Whether a worker has done since then what it was asked: it is slow, but not dead.
    pub fn lives(&self, worker: Endpoint, since: Instant) -> bool {
        self.done.get(&worker).is_some_and(|done| *done >= since)
    }

    /// A worker has done what it was asked.
    pub fn did(&self, worker: Endpoint) {
        // Workers come and go, and those that went are of no interest.
        if self.done.len() > MOST_REMEMBERED {
            self.done.retain(|_, done| done.elapsed() < self.deadline);
        }
        self.done.insert(worker, Instant::now());
    }

    /// A worker does not do what it is there for: said once of each.
    pub(super) fn warn_of(&self, worker: Endpoint, error: &EngineError) {
        if self.warned.insert(worker) {
            warn!(%worker, %error, "a prefill worker does no prefills for us: see its command line, and its credentials");
        }
    }

    /// A worker has computed a prompt and handed nothing over.
    pub(super) fn in_vain(&self, worker: Endpoint, why: NotHandedOver) {
        self.count(why.label());
        if self.warned.insert(worker) {
            warn!(
                %worker, %why,
                "a prefill worker computed a prompt in vain. An answer that ends with its first token is no harm; if \
                 prefill_calls of this outcome grow, was it started with a KV connector?"
            );
        }
        debug!(%worker, %why, "prefilled in vain");
    }

    /// Has a prefill done; `held` is what the request holds as long as the engine works on it. Dropping the future takes the
    /// question back if nothing of it was sent yet; otherwise the prefill goes on, and `held` with it. Whatever its end is,
    /// `judge` hears of it, and since when it was asked.
    pub async fn prefill<T: Send + 'static>(
        &self,
        asked: Asked,
        held: T,
        judge: impl FnOnce(&mut T, &Result<HandedOver, Failure>, Instant) + Send + 'static,
    ) -> (T, Result<HandedOver, Failure>) {
        let (here, left) = oneshot::channel::<()>();
        let task = self
            .under_way
            .spawn(self.clone().carry(asked, (held, judge), (left, None)));
        let answered = task.await;
        drop(here);
        match answered {
            Ok(Some(answered)) => answered,
            // Only who leaves takes it back, and a task that panics takes the process's panic hook with it.
            Ok(None) => std::future::pending().await,
            Err(ended) => ended_badly(ended).await,
        }
    }

    /// Starts a prefill and returns when the worker has begun. Dropping the future takes the question back as above. `on_response` receives the
    /// response.
    pub async fn begin(
        &self,
        asked: Asked,
        on_response: impl FnOnce(&HandedOver) + Send + 'static,
    ) -> Result<Begun, Failure> {
        let ((here, left), (begun, has_begun)) = (oneshot::channel(), oneshot::channel());
        let judge = |(): &mut (), answer: &Result<HandedOver, Failure>, _| {
            if let Ok(handed) = answer {
                on_response(handed);
            }
        };
        let mut task =
            self.under_way
                .spawn(self.clone().carry(asked, ((), judge), (left, Some(begun))));
        tokio::select! {
            biased;
            Ok(()) = has_begun => Ok(Begun { here: Some(here), task: Some(task) }),
            ended = &mut task => match ended {
                Ok(Some(((), Err(failure)))) => Err(failure),
                // It cannot have ended well before it began.
                Ok(Some(((), Ok(_))) | None) => Err(Failure::Full),
                Err(ended) => ended_badly(ended).await,
            },
        }
    }

    async fn carry<T>(
        self,
        Asked {
            worker,
            path,
            headers,
            question,
        }: Asked,
        (mut held, judge): (
            T,
            impl FnOnce(&mut T, &Result<HandedOver, Failure>, Instant),
        ),
        (left, begun): (oneshot::Receiver<()>, Option<oneshot::Sender<()>>),
    ) -> Ended<T> {
        let under_way = UnderWay::begin(self.metrics.clone());
        let sending = Arc::new(Sending::default());
        let asked_at = Instant::now();
        let (body, pending) = question.send();
        let noticed = |body, begun| {
            reqwest::Body::wrap(Noticed {
                body: Some(body),
                sending: sending.clone(),
                begun,
            })
        };
        // What is computed twice is only given up later. A room that is entered twice is another matter.
        let again = (self.repeats && begun.is_none()).then(|| noticed(body.clone(), None));
        let (engine, body) = (self.engines.url(worker), noticed(body, begun));
        let call = Forwarded {
            engine: &engine,
            path: &path,
            headers,
            body,
            again,
            deadline: self.deadline,
        };
        let call = self.client.forward(call);
        tokio::pin!(call);
        let answer = tokio::select! {
            biased;
            answer = &mut call => answer,
            // The other side's drop.
            Err(_) = left => {
                let taken_back = sending.take_back();
                self.count(if taken_back { "left_before_start" } else { "left_after_start" });
                if taken_back {
                    return None;
                }
                call.await
            }
        };
        let answer = answer
            .map(|answer| pending.answered(answer))
            .map_err(Failure::of);
        under_way.ended(answer.as_ref().map_or_else(Failure::label, |_| "done"));
        if answer.is_ok() {
            self.did(worker);
        }
        judge(&mut held, &answer, asked_at);
        Some((held, answer))
    }

    fn count(&self, outcome: &'static str) {
        self.metrics
            .prefill_calls
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }
}

/// A task has not come to its end: it panicked, or the runtime ends and takes whoever waits here with it.
async fn ended_badly<T>(ended: JoinError) -> T {
    match ended.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_cancelled) => std::future::pending().await,
    }
}

/// A body that notes when it begins to be sent: then there is a connection, and the engine will see it.
struct Noticed {
    body: Option<Bytes>,
    sending: Arc<Sending>,
    /// Who wants to hear of it.
    begun: Option<oneshot::Sender<()>>,
}

/// A prefill under way. Dropped, it counts as one whose client has left.
#[derive(Debug)]
#[must_use = "dropped, its client has left"]
pub struct Begun {
    here: Option<oneshot::Sender<()>>,
    /// None once it has ended.
    task: Option<JoinHandle<Ended<()>>>,
}

impl Begun {
    /// Completes once, when it is done or has failed.
    pub async fn ended(&mut self) -> Result<(), Failure> {
        let Some(task) = &mut self.task else {
            return std::future::pending().await;
        };
        let ended = task.await;
        self.task = None;
        match ended {
            Ok(Some(((), Err(failure)))) => Err(failure),
            _ => Ok(()),
        }
    }

    /// Whoever waited for it has it.
    pub fn over(mut self) {
        if let Some(here) = self.here.take() {
            // Where it has ended nobody listens.
            _ = here.send(());
        }
    }
}

/// Whether a question is on its way. It is either sent or taken back, and never both.
#[derive(Debug, Default)]
struct Sending(AtomicU8);

impl Sending {
    const BEGUN: u8 = 1;
    const TAKEN_BACK: u8 = 2;

    fn begin(&self) -> bool {
        self.settle(Self::BEGUN)
    }

    fn take_back(&self) -> bool {
        self.settle(Self::TAKEN_BACK)
    }

    /// Whether it is so, now or before.
    fn settle(&self, state: u8) -> bool {
        match self
            .0
            .compare_exchange(0, state, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => true,
            Err(settled) => settled == state,
        }
    }
}

/// The question was taken back.
#[derive(Debug, Error)]
#[error("the question was taken back")]
struct TakenBack;

impl Body for Noticed {
    type Data = Bytes;
    type Error = TakenBack;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TakenBack>>> {
        if !self.sending.begin() {
            return Poll::Ready(Some(Err(TakenBack)));
        }
        // Nobody listens where its end is waited for.
        _ = self.begun.take().map(|begun| begun.send(()));
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
