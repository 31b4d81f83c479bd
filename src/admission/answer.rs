//! What admission asks of whoever places requests, and what it answers to those who come.

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use super::classes::{Gate, LimitKind};
use super::lanes::Pending;

/// Places one request, at once or not at all.
pub trait Placing: Send + Sync + 'static {
    /// What is to be placed.
    type Request: Send + 'static;
    /// A placed request; dropping it gives its place back.
    type Placed: Send + 'static;
    /// Why a request can be placed nowhere, now or later.
    type Refusal: Send + 'static;

    /// How many workers there are, for limits per worker. With none nobody waits.
    fn workers(&self) -> usize;

    /// Places a request where a worker is not busy by `gate`. It runs while the queue is locked: it must be quick, and must
    /// not come back to admission but for [`Admission::nudge`](super::Admission::nudge).
    fn place(
        &self,
        request: &mut Self::Request,
        gate: &Gate,
    ) -> Attempt<Self::Placed, Self::Refusal>;

    /// The request waited for long: looks again what the caches hold of it. Runs where `place` runs.
    fn refresh(&self, request: &mut Self::Request);
}

/// What came of placing a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Attempt<P, R> {
    /// It has its place.
    Placed(P),
    /// All workers it could go to are busy.
    Busy,
    /// There is no worker it could go to.
    Refused(R),
}

/// Why a request was not placed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Rejected<R> {
    /// There is no worker it could go to.
    #[error("{0}")]
    Refused(R),
    /// It would have to wait, and no more may wait in its class.
    #[error("too many {kind} wait in class `{class}`: {current}, and {limit} may")]
    Overflow {
        /// Its class.
        class: Arc<str>,
        /// Of what there is too much.
        kind: LimitKind,
        /// How much waits.
        current: u64,
        /// How much may wait.
        limit: u64,
        /// When to come back.
        retry_after: Duration,
    },
    /// It waited as long as it may.
    #[error("no worker was free for it within {}ms (class `{class}`)", waited.as_millis())]
    Deadline {
        /// Its class.
        class: Arc<str>,
        /// How long it waited.
        waited: Duration,
        /// When to come back.
        retry_after: Duration,
    },
    /// Placing it panicked. Nothing is booked.
    #[error("placing the request failed by a mistake of the router's own")]
    Failed,
}

/// How one class stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Its name.
    pub class: Arc<str>,
    /// What waits now.
    pub pending: Pending,
    /// What became of those that came.
    pub tally: Tally,
}

/// What became of the requests of a class, since the start. Those placed without having to wait are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Had to wait.
    pub waited: u64,
    /// Rejected because too many requests waited.
    pub over_requests: u64,
    /// Rejected because too many prompt tokens waited.
    pub over_prompt_tokens: u64,
    /// Rejected because too many cached tokens waited.
    pub over_cached_tokens: u64,
    /// Waited until their deadline.
    pub expired: u64,
    /// Left while waiting.
    pub left: u64,
}

impl Tally {
    pub(super) fn overflow(&mut self, kind: LimitKind) {
        match kind {
            LimitKind::Requests => self.over_requests += 1,
            LimitKind::PromptTokens => self.over_prompt_tokens += 1,
            LimitKind::CachedTokens => self.over_cached_tokens += 1,
        }
    }
}
