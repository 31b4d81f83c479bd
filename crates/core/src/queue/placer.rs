//! Interface between the queue and the router that places requests.

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use super::classes::{BusyThreshold, QueueLimitKind};
use super::lanes::QueueDepth;

/// Places one request, at once or not at all.
pub trait Placer: Send + Sync + 'static {
    /// Request to place.
    type Request: Send + 'static;
    /// Placed request; dropping it releases the placement.
    type Placed: Send + 'static;
    /// Error for a request that cannot be placed now or later.
    type Error: Send + 'static;

    /// Returns the number of workers, for limits per worker. With 0, no request is queued.
    fn workers(&self) -> usize;

    /// Places a request on a worker that is not busy by `threshold`. Runs under the queue lock: it
    /// must be fast and must not call the queue, except to wake it.
    fn place(
        &self,
        request: &mut Self::Request,
        threshold: &BusyThreshold,
    ) -> PlaceOutcome<Self::Placed, Self::Error>;

    /// Refreshes the overlaps of a request that has waited for long. Runs under the same conditions
    /// as `place`.
    fn refresh(&self, request: &mut Self::Request);
}

/// Outcome of placing a request.
#[derive(Debug, PartialEq, Eq)]
pub enum PlaceOutcome<P, R> {
    /// The request was placed.
    Placed(P),
    /// All candidates are busy.
    Busy,
    /// There is no candidate.
    Refused(R),
}

impl<P, R> PlaceOutcome<P, R> {
    /// Converts the placed request.
    pub fn map_placed<T>(self, convert: impl FnOnce(P) -> T) -> PlaceOutcome<T, R> {
        match self {
            PlaceOutcome::Placed(placed) => PlaceOutcome::Placed(convert(placed)),
            PlaceOutcome::Busy => PlaceOutcome::Busy,
            PlaceOutcome::Refused(error) => PlaceOutcome::Refused(error),
        }
    }
}

/// Reason why a request was not placed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AdmissionError<R> {
    /// There is no candidate.
    #[error("{0}")]
    Refused(R),
    /// The queue limit of the class is reached.
    #[error("queue limit of class `{class}` reached: {current} of {limit} {kind} are queued")]
    Overflow {
        /// Queue class.
        class: Arc<str>,
        /// Kind of the limit.
        kind: QueueLimitKind,
        /// Queued amount.
        current: u64,
        /// Limit over all workers.
        limit: u64,
        /// Time after which the client should retry.
        retry_after: Duration,
    },
    /// The queue deadline has passed.
    #[error("no worker became available within {}ms (queue class `{class}`)", waited.as_millis())]
    DeadlineExceeded {
        /// Queue class.
        class: Arc<str>,
        /// Time spent in the queue.
        waited: Duration,
        /// Time after which the client should retry.
        retry_after: Duration,
    },
    /// Placing the request panicked. Nothing is booked.
    #[error("placing the request failed because of an internal error")]
    Panicked,
}

/// Status of one class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassStatus {
    /// Name of the class.
    pub class: Arc<str>,
    /// Queued amounts.
    pub depth: QueueDepth,
    /// Counters since the start.
    pub counters: ClassCounters,
}

/// Counters of one class since the start. Requests placed without queueing are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCounters {
    /// Requests that were queued.
    pub waited: u64,
    /// Requests rejected at the limit on requests.
    pub over_requests: u64,
    /// Requests rejected at the limit on prompt tokens.
    pub over_prompt_tokens: u64,
    /// Requests rejected at the limit on cached tokens.
    pub over_cached_tokens: u64,
    /// Requests that reached the queue deadline.
    pub expired: u64,
    /// Requests whose client left while they were queued.
    pub cancelled: u64,
}

impl ClassCounters {
    /// Counts a request that exceeded a limit.
    pub fn count_overflow(&mut self, kind: QueueLimitKind) {
        match kind {
            QueueLimitKind::Requests => self.over_requests += 1,
            QueueLimitKind::PromptTokens => self.over_prompt_tokens += 1,
            QueueLimitKind::CachedTokens => self.over_cached_tokens += 1,
        }
    }
}
