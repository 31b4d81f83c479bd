//! Requests of a simulation: their progress, and the measured times.

use warmroute_core::load::PredictionTotals;

use crate::router_driver::DecisionTime;
use crate::traces::ReplayedRequest;
use crate::worker_faults::FaultLog;

/// Completed request. Times are in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CompletedRequest {
    /// Arrival at the router.
    pub(crate) arrival_ms: f64,
    /// First token.
    pub(crate) first_token_ms: f64,
    /// Last token.
    pub(crate) end_ms: f64,
    /// Length of the prompt.
    pub(crate) input_tokens: usize,
    /// Generated tokens, at least 1.
    pub(crate) output_tokens: usize,
    /// Prompt tokens that were in the cache of the engine.
    pub(crate) cached_tokens: usize,
}

/// Request that the simulation did not complete.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct UnfinishedRequest {
    /// Arrival at the router.
    pub(crate) arrival_ms: f64,
    /// First token, if there is one.
    pub(crate) first_token_ms: Option<f64>,
}

/// Requests of a simulation that are measured.
#[derive(Debug)]
pub(crate) struct SimulationResult {
    /// Completed requests.
    pub(crate) completed: Vec<CompletedRequest>,
    /// Other requests.
    pub(crate) unfinished: Vec<UnfinishedRequest>,
    /// Decisions of the router.
    pub(crate) decisions: DecisionTime,
    /// Predicted and observed times to first token.
    pub(crate) predictions: PredictionTotals,
    /// Observations about a faulty worker.
    pub(crate) fault_log: FaultLog,
}

/// Position of a request in its session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionPosition {
    /// Number of the session.
    pub(crate) session: usize,
    /// Number of the request in the session.
    pub(crate) turn: usize,
}

/// Request that has been created.
pub(crate) struct RequestState<'w> {
    /// The request.
    pub(crate) request: &'w ReplayedRequest,
    /// Position in a session; `None` for independent requests.
    pub(crate) position: Option<SessionPosition>,
    /// `None` before the arrival and after the end.
    pub(crate) progress: Option<RequestProgress>,
}

/// Progress of a running request.
pub(crate) struct RequestProgress {
    /// Arrival at the router.
    pub(crate) arrival_ms: f64,
    /// First token, if there is one.
    pub(crate) first_token_ms: Option<f64>,
    /// Generated tokens.
    pub(crate) output_tokens: usize,
    /// Prompt tokens that were in the cache of the engine.
    pub(crate) cached_tokens: usize,
    /// Worker that computes the prompt, if another one generates the answer.
    pub(crate) prefill_worker: Option<usize>,
}

impl RequestProgress {
    /// Creates the state of a request that has just arrived.
    pub(crate) fn new(arrival_ms: f64) -> Self {
        Self {
            arrival_ms,
            first_token_ms: None,
            output_tokens: 0,
            cached_tokens: 0,
            prefill_worker: None,
        }
    }
}
