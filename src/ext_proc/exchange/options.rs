//! What exchanges are allowed to do, what answers say of how they were routed, and what one exchange is given at its start.

use std::sync::Arc;

use crate::ext_proc::config::Observe;
use crate::ext_proc::contract::Contract;
use crate::ext_proc::headers;
use crate::ext_proc::message::Modes;
use crate::ext_proc::mutation::HeaderChanges;
use crate::openai::paths::Paths;
use crate::router::Steer;
use crate::worker::{DpRank, WorkerId, WorkerRank};

/// What exchanges are allowed to do.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Which path is which API, and so whose body is wanted.
    pub paths: Arc<Paths>,
    /// Largest request body that is gathered.
    pub body_limit: usize,
    /// The headers that name the way.
    pub contract: Contract,
    /// Whether Envoy looks for its route again.
    pub clear_route_cache: bool,
    /// How bodies travel where the gateway does not tell.
    pub assumed: Modes,
    /// What is seen of answers.
    pub observe: Observe,
    /// Whether the blocks of answers count as load, so that all of them have to be seen.
    pub output_blocks: bool,
    /// Whether conformance tests are helped.
    pub conformance: bool,
    /// What answers say.
    pub answers: Answers,
}

/// What answers say of how the request was routed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Answers {
    /// The step of the ladder.
    pub mode: bool,
    /// The chosen worker rank.
    pub worker: bool,
    /// The prediction.
    pub prediction: bool,
    /// In short why.
    pub why: bool,
}

/// What one exchange is given at its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// By which name another filter can say that it saw the first token, where there is such a filter.
    pub probed_as: Option<String>,
    /// Whether all of the answer is looked at.
    pub sampled: bool,
    /// The name of the request where the gateway gives it none.
    pub request_id: String,
    /// The pool that the authority of the call selects.
    pub pool: Option<Arc<str>>,
}

/// The worker that sends a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServingWorker {
    /// The worker.
    pub worker: WorkerId,
    /// Its data-parallel rank; `None` if several ranks share the endpoint.
    pub rank: Option<DpRank>,
}

impl From<WorkerRank> for ServingWorker {
    fn from(rank: WorkerRank) -> Self {
        Self {
            worker: rank.worker,
            rank: Some(rank.rank),
        }
    }
}

impl Options {
    /// What the response says of how the request was routed.
    pub(super) fn tell(
        &self,
        steer: &Steer,
        served_by: Option<ServingWorker>,
        changes: &mut HeaderChanges,
    ) {
        if self.answers.mode {
            changes.set(headers::MODE, steer.mode.as_str().to_owned());
        }
        let served_by = served_by.or_else(|| steer.to.map(|to| to.rank.into()));
        if let Some(ServingWorker { worker, rank }) = served_by.filter(|_| self.answers.worker) {
            changes.set(headers::WORKER_ID, worker.to_string());
            if let Some(rank) = rank {
                changes.set(headers::DP_RANK, rank.to_string());
            }
        }
        if let Some(to) = steer.prefill.filter(|_| self.answers.worker) {
            changes.set(headers::PREFILL_ID, to.rank.worker.to_string());
            changes.set(headers::PREFILL_RANK, to.rank.rank.to_string());
        }
        if let Some(tokens) = steer
            .predicted_cached_tokens
            .filter(|_| self.answers.prediction)
        {
            changes.set(headers::PREDICTED, tokens.to_string());
        }
        if let Some(why) = steer.why.as_ref().filter(|_| self.answers.why) {
            changes.set(headers::WHY, why.to_string());
        }
    }
}
