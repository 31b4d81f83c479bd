//! Explanation of a decision as values.

use std::sync::Arc;

use serde::Serialize;

use crate::freshness::SourceStatus;
use crate::index::TierBlocks;
use crate::load::{ActiveLoad, LatencyEstimate, RankTiming};
use crate::policy::{Cost, PolicySettings};
use crate::router::reason::Reason;
use crate::router::route::{ComputingRank, Mode, Route};
use crate::worker::{BlockSize, ModelName, WorkerEndpoint, WorkerRank, WorkerRole};

/// Explanation of the route of one request.
#[derive(Clone, Debug, Serialize)]
pub struct RouteExplanation {
    /// Requested model; `None` admits any worker.
    pub model: Option<ModelName>,
    /// Model that the client requested, if a rewrite replaced it by `model`.
    pub requested_model: Option<String>,
    /// Queue class of the request.
    pub class: Option<Arc<str>>,
    /// Whether the request would be queued because all candidates are busy. The explanation
    /// then shows the choice without waiting.
    pub busy: bool,
    /// Routing mode.
    pub mode: Mode,
    /// Reason for a mode other than exact, or for the missing choice.
    pub reason: Option<Reason>,
    /// Prompt tokens, possibly estimated.
    pub prompt_tokens: u64,
    /// Complete known blocks of the prompt.
    pub prompt_blocks: u64,
    /// Tokens per block, if any worker serves the model.
    pub block_size: Option<BlockSize>,
    /// Worker rank that computes the prompt, with the forecast for its cache; `None` if no worker
    /// is chosen.
    pub computed_by: Option<ComputingRank>,
    /// Policy and weights for this request. A decode choice may ignore the credit.
    #[serde(flatten)]
    pub policy: PolicySettings,
    /// Phases, prefill first.
    pub phases: Vec<PhaseExplanation>,
    /// Explanation in one sentence.
    pub summary: String,
    /// The route, if there is one.
    pub route: Option<Route>,
}

/// Explanation of one phase.
#[derive(Clone, Debug, Serialize)]
pub struct PhaseExplanation {
    /// Role of the workers in the phase.
    pub role: WorkerRole,
    /// Whether the phase is part of the route. A prefill choice that lost against a local prefill
    /// is shown as unused.
    pub used: bool,
    /// Chosen rank.
    pub winner: Option<WorkerRank>,
    /// Cheapest of the other candidates.
    pub runner_up: Option<WorkerRank>,
    /// Cost of the runner-up minus cost of the winner, in the unit of the policy; negative if
    /// sampling chose a more expensive one.
    pub margin: Option<f64>,
    /// Number of candidates with exactly the winner's cost, including it; 1 if a temperature is
    /// set.
    pub ties: usize,
    /// Learned latency, if the policy uses it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencyEstimate>,
    /// All ranks that serve the model, in slot order.
    pub workers: Vec<WorkerExplanation>,
}

/// Explanation of one worker rank.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerExplanation {
    /// Worker rank.
    pub rank: WorkerRank,
    /// Endpoint of the worker.
    pub endpoint: WorkerEndpoint,
    /// Role of the worker.
    pub role: WorkerRole,
    /// Cached blocks of the prompt, per tier.
    pub overlap: TierBlocks,
    /// Leading blocks of the prompt that its running requests hold or compute.
    pub running_blocks: u32,
    /// Status of its event source.
    pub source: SourceStatus,
    /// Prompt tokens that its engine would report as cached.
    pub cached_tokens: u64,
    /// Current load, without this request.
    pub load: ActiveLoad,
    /// Booked work and slowdown, if the policy uses them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timing: Option<RankTiming>,
    /// Prefill that would be outstanding, in tokens, without subtracting cached tokens; 0 in a
    /// phase without prefill.
    pub prefill_tokens: u64,
    /// Blocks that it would hold for running requests, including this one.
    pub decode_blocks: u64,
    /// Cost, term by term, if it was a candidate.
    pub cost: Option<Cost>,
    /// Reason why it was no candidate.
    pub excluded: Option<String>,
}
