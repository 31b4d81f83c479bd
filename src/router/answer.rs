//! Question and answer of the router, and the words of the degradation ladder: plain values that the protocol side, the
//! metrics and the logs share.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::reason::Reason;
use crate::disagg::Bypass;
use crate::fleet::Member;
use crate::index::TierBlocks;
use crate::schedule::{Choice, Constraints, Ineligible};
use crate::trust::Trust;
use crate::worker::{BlockSize, Endpoint, ModelName, WorkerRank};

/// Step of the degradation ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Chosen by the blocks the engine will see, against what the engines said they hold.
    Exact,
    /// Chosen by the beginning of the prompt only, against what the engines said they hold.
    Partial,
    /// Chosen by the blocks the engine will see, against what earlier routes should have left there.
    Approximate,
    /// Chosen by load alone.
    LoadOnly,
    /// Not chosen: Envoy's own load balancer decides.
    Passthrough,
}

impl Mode {
    /// The name used in the response header and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Mode::Exact => "exact",
            Mode::Partial => "partial",
            Mode::Approximate => "approximate",
            Mode::LoadOnly => "load_only",
            Mode::Passthrough => "passthrough",
        }
    }
}

/// Where Envoy has to send a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Destination {
    /// The chosen worker rank.
    pub rank: WorkerRank,
    /// Its endpoint.
    pub endpoint: Endpoint,
    /// Whether the worker has more ranks than this one.
    pub several_ranks: bool,
}

impl Destination {
    /// A member of the fleet.
    pub fn of(member: &Member) -> Self {
        let Member { rank, worker, .. } = member;
        Self {
            rank: *rank,
            endpoint: worker.endpoint,
            several_ranks: worker.ranks.size.get() > 1,
        }
    }
}

/// What Envoy is told.
#[derive(Clone, Debug, PartialEq)]
pub struct Steer {
    /// The destination; `None` leaves the choice to Envoy.
    pub to: Option<Destination>,
    /// Where to try next when the destination cannot be reached, best first.
    pub fallbacks: Vec<Endpoint>,
    /// What each candidate costs, where that is wanted; lower is better.
    pub scores: Vec<(Endpoint, f64)>,
    /// Who does the prefill before it.
    pub prefill: Option<Destination>,
    /// The step of the ladder.
    pub mode: Mode,
    /// Cached prompt tokens the engine is expected to report, where that is known.
    pub predicted_cached_tokens: Option<u64>,
    /// Why, in short.
    pub why: Option<Arc<str>>,
}

/// Which workers do which phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phases {
    /// One worker does both, and there is no other way.
    Aggregated,
    /// Another worker does the prefill.
    Remote(Box<Prefill>),
    /// One worker does both although prefill workers are there.
    Kept(Bypass),
}

impl Phases {
    /// The name in metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            Phases::Aggregated => "aggregated",
            Phases::Remote(_) => "remote_prefill",
            Phases::Kept(bypass) => bypass.as_str(),
        }
    }
}

/// The worker that does the prefill, and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prefill {
    /// Where to.
    pub to: Destination,
    /// What it holds of the prompt.
    pub overlap: TierBlocks,
    /// Prompt tokens it will not compute.
    pub cached_tokens: u64,
    /// The same for the prefill worker that holds most.
    pub best_cached_tokens: u64,
    /// The mean over all prefill candidates.
    pub chance_cached_tokens: u64,
    /// The routing mode of the choice of the prefill worker.
    #[serde(skip)]
    pub mode: Mode,
    /// Why not a higher step.
    #[serde(skip)]
    pub reason: Option<Reason>,
    /// How far its event source can be believed.
    pub trust: Trust,
    /// The choice with its cost.
    pub choice: Choice,
}

/// The answer to one request, and why.
#[derive(Clone, Debug, Serialize)]
pub struct Route {
    /// Where to; where it was served, once that is known.
    pub to: Destination,
    /// Other candidates that are healthy and not overloaded, cheapest first, no two with the same endpoint.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fallbacks: Vec<Destination>,
    /// What each candidate costs, cheapest first; of ranks with the same endpoint the cheapest.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub scores: Vec<(Endpoint, f64)>,
    /// The routing mode of the choice of the worker that computes the prompt.
    pub mode: Mode,
    /// Why not a higher step.
    pub reason: Option<Reason>,
    /// Whether the engine may compute something for the request.
    #[serde(skip)]
    pub computes: bool,
    /// The model the candidates serve.
    pub model: ModelName,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// How long the answer will be, where the client said so.
    pub expected_output_tokens: Option<u64>,
    /// Prompt tokens, or the estimate.
    pub prompt_tokens: u64,
    /// Complete blocks of the prompt, as far as they are known.
    pub prompt_blocks: u64,
    /// What the chosen worker rank holds of them.
    pub overlap: TierBlocks,
    /// How far its event source can be believed.
    pub trust: Trust,
    /// Prompt tokens the engine will report as cached: it always computes at least the last one itself.
    pub predicted_cached_tokens: u64,
    /// The same for the candidate that holds most.
    pub best_cached_tokens: u64,
    /// The mean over all candidates.
    pub chance_cached_tokens: u64,
    /// Prompt tokens that an engine could find cached at best.
    pub reusable_tokens: u64,
    /// Blocks of the shared cache beyond those on the device of the worker that computes the prompt.
    #[serde(skip_serializing_if = "is_zero")]
    pub shared_beyond_device: u64,
    /// How many candidates were costed.
    pub candidates: usize,
    /// Bookings of other replicas that were reckoned with, though no word of them has come.
    #[serde(skip_serializing_if = "is_none")]
    pub unheard: u32,
    /// The choice with its cost.
    pub choice: Choice,
    /// Which workers do which phase.
    pub phases: Phases,
    /// Time for the overlaps.
    #[serde(skip)]
    pub index_time: Duration,
    /// Time for choosing and booking.
    #[serde(skip)]
    pub choose_time: Duration,
}

fn is_zero(blocks: &u64) -> bool {
    *blocks == 0
}

fn is_none(count: &u32) -> bool {
    *count == 0
}

/// The worker rank that computes the prompt: the prefill worker where there is one. Prediction, cache report and verdict
/// describe its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ComputedBy {
    /// Its name.
    pub rank: WorkerRank,
    /// Blocks of the prompt that it holds.
    pub overlap: TierBlocks,
    /// Prompt tokens that it does not compute.
    pub cached_tokens: u64,
    /// The same for the candidate that holds most.
    pub best_cached_tokens: u64,
    /// The mean over all candidates.
    pub chance_cached_tokens: u64,
}

/// Why there is no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// Nobody is known. Envoy chooses.
    #[error("no worker is known")]
    NoFleet,
    /// Nobody fits. Envoy chooses.
    #[error("no known worker serves the model in that role")]
    NoCandidate,
    /// The request names a worker that will not do.
    #[error("{0}")]
    Pin(Ineligible),
    /// Everybody who would do has too much to do, and the operator wants that refused.
    #[error("{0}")]
    Overloaded(Ineligible),
    /// Nobody satisfies what the request demands.
    #[error("no worker satisfies what the request demands")]
    Unsatisfied,
    /// No prefill worker can be chosen, and the operator wants that refused.
    #[error("no prefill worker can be chosen")]
    NoPrefill,
}

impl Steer {
    /// The choice is Envoy's.
    pub const PASSTHROUGH: Steer = Steer {
        to: None,
        fallbacks: Vec::new(),
        scores: Vec::new(),
        prefill: None,
        mode: Mode::Passthrough,
        predicted_cached_tokens: None,
        why: None,
    };
}

impl RouteError {
    pub(super) fn of(error: Ineligible, constraints: &Constraints) -> Self {
        let demands = constraints.allowed.is_some()
            || constraints.endpoints.is_some()
            || constraints.pool.is_some()
            || constraints.pin.is_some()
            || !constraints.required_taints.is_empty();
        match error {
            Ineligible::PinUnknown(_)
            | Ineligible::PinRankUnknown { .. }
            | Ineligible::PinRankMissing { .. }
            | Ineligible::PinnedWorkerNotAllowed(_) => RouteError::Pin(error),
            Ineligible::PinnedWorkerOverloaded(_) | Ineligible::AllEligibleWorkersOverloaded => {
                RouteError::Overloaded(error)
            }
            Ineligible::NoEndpoints if demands => RouteError::Unsatisfied,
            Ineligible::NoEndpoints => RouteError::NoCandidate,
        }
    }

    /// Where a gateway says who may be chosen, it wants to hear that nobody can: Envoy must not choose somebody else.
    pub(super) fn under(self, constraints: &Constraints) -> Self {
        match self {
            RouteError::NoFleet | RouteError::NoCandidate
                if constraints.endpoints.is_some() || constraints.pool.is_some() =>
            {
                RouteError::Unsatisfied
            }
            _ => self,
        }
    }

    /// The reason as metrics name it.
    pub fn reason(self) -> Reason {
        match self {
            RouteError::NoFleet => Reason::NoFleet,
            RouteError::NoCandidate => Reason::NoCandidate,
            RouteError::Pin(_) => Reason::BadPin,
            RouteError::Overloaded(_) => Reason::Overloaded,
            RouteError::Unsatisfied => Reason::Unsatisfied,
            RouteError::NoPrefill => Reason::NoPrefill,
        }
    }
}

impl Route {
    /// Whether the answer shows how the engine is. Other requests, for example for a list of models, are answered by its
    /// front end alone.
    pub fn is_inference(&self) -> bool {
        self.computes && self.reason != Some(Reason::NoBody)
    }

    /// What Envoy is told of it.
    pub fn steer(&self) -> Steer {
        let remote = self.prefill().is_some();
        // What a decode worker reports as cached after a transfer differs from engine to engine.
        let told = matches!(self.mode, Mode::Exact | Mode::Partial | Mode::Approximate) && !remote;
        Steer {
            to: Some(self.to),
            fallbacks: self.fallbacks.iter().map(|to| to.endpoint).collect(),
            scores: self.scores.clone(),
            prefill: self.prefill().map(|prefill| prefill.to),
            mode: self.mode,
            predicted_cached_tokens: told.then_some(self.predicted_cached_tokens),
            why: None,
        }
    }

    /// The prefill worker, if another than the chosen one does the prefill.
    pub fn prefill(&self) -> Option<&Prefill> {
        match &self.phases {
            Phases::Remote(prefill) => Some(prefill),
            Phases::Aggregated | Phases::Kept(_) => None,
        }
    }

    /// Why, in one line of keys and values, with the numbers that an explanation shows. What changes nothing is left out.
    pub fn short(&self) -> String {
        let (cost, held) = (&self.choice.cost, self.overlap);
        let mut line = format!(
            "worker={} cost={:.3} prefill={:.3} decode={:.3}",
            self.to.rank, cost.total, cost.prefill_cost, cost.decode_cost
        );
        if cost.request_cost != 0.0 {
            line.push_str(&format!(" requests={:.3}", cost.request_cost));
        }
        if cost.taint_factor != 1.0 {
            line.push_str(&format!(" taints={:.3}", cost.taint_factor));
        }
        line.push_str(&format!(
            " blocks={} device={}",
            self.prompt_blocks, held.device
        ));
        let lower = [
            ("host", held.host),
            ("disk", held.disk),
            ("external", held.external),
        ];
        for (tier, blocks) in lower.into_iter().filter(|(_, blocks)| *blocks > 0) {
            line.push_str(&format!(" {tier}={blocks}"));
        }
        if matches!(self.trust, Trust::Stale | Trust::CatchingUp) {
            line.push_str(&format!(" trust={}", self.trust.as_str()));
        }
        let (cached, candidates, ties) = (
            self.predicted_cached_tokens,
            self.candidates,
            self.choice.ties,
        );
        line.push_str(&format!(
            " cached_tokens={cached} candidates={candidates} ties={ties}"
        ));
        if self.unheard > 0 {
            line.push_str(&format!(" unheard={}", self.unheard));
        }
        if let Some(reason) = self.reason {
            line.push_str(&format!(" reason={}", reason.as_str()));
        }
        match &self.phases {
            Phases::Remote(prefill) => line.push_str(&format!(
                " prefill_worker={} prefill_cost={:.3} prefill_cached_tokens={}",
                prefill.to.rank, prefill.choice.cost.total, prefill.cached_tokens
            )),
            Phases::Kept(bypass) => line.push_str(&format!(" kept={}", bypass.as_str())),
            Phases::Aggregated => {}
        }
        line
    }

    /// The worker rank that computes the prompt, with what it holds of it.
    pub fn computed_by(&self) -> ComputedBy {
        match self.prefill() {
            Some(prefill) => ComputedBy {
                rank: prefill.to.rank,
                overlap: prefill.overlap,
                cached_tokens: prefill.cached_tokens,
                best_cached_tokens: prefill.best_cached_tokens,
                chance_cached_tokens: prefill.chance_cached_tokens,
            },
            None => ComputedBy {
                rank: self.to.rank,
                overlap: self.overlap,
                cached_tokens: self.predicted_cached_tokens,
                best_cached_tokens: self.best_cached_tokens,
                chance_cached_tokens: self.chance_cached_tokens,
            },
        }
    }

    /// Share of the prompt's blocks that the worker rank holds that computes the prompt.
    pub fn hit_rate(&self) -> f64 {
        let held = f64::from(self.computed_by().overlap.total());
        if self.prompt_blocks == 0 {
            0.0
        } else {
            held / self.prompt_blocks as f64
        }
    }
}
