//! Output of the router, shared by the protocol, the metrics and the logs.

use std::sync::Arc;

use serde::Serialize;
use strum::IntoStaticStr;

use super::reason::Reason;
use crate::fleet::FleetMember;
use crate::freshness::IndexFreshness;
use crate::index::TierBlocks;
use crate::policy::{Choice, Constraints, CostTerm, EligibilityError, LocalPrefillReason};
use crate::worker::{BlockSize, EndpointKind, ModelName, WorkerEndpoint, WorkerRank};

/// Routing mode, from the most to the least precise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Mode {
    /// Chosen by the blocks that the engine will see and the engines' events.
    Exact,
    /// Chosen by the start of the prompt and the engines' events.
    Partial,
    /// Chosen by the blocks that the engine will see and the predicted caches.
    Approximate,
    /// Chosen by load alone.
    LoadOnly,
    /// No choice: Envoy's own load balancer decides.
    Passthrough,
}

impl Mode {
    /// Returns the name in the response header and in metrics.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Worker rank and its endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RankEndpoint {
    /// Worker rank.
    pub rank: WorkerRank,
    /// Endpoint of the worker.
    pub endpoint: WorkerEndpoint,
    /// Whether the endpoint belongs to the worker alone.
    #[serde(skip)]
    pub via: EndpointKind,
    /// Whether the worker has more than one rank.
    pub several_ranks: bool,
}

impl RankEndpoint {
    /// Returns the rank and endpoint of a member.
    pub fn of(member: &FleetMember) -> Self {
        let FleetMember { rank, worker, .. } = member;
        Self {
            rank: *rank,
            endpoint: worker.endpoint,
            via: worker.via,
            several_ranks: worker.ranks.size.get() > 1,
        }
    }

    /// Returns whether a response from this address comes from the worker. A shared front end may
    /// have several addresses, and sends each request to the worker that its headers name.
    pub fn is_served_from(&self, address: WorkerEndpoint) -> bool {
        match self.via {
            EndpointKind::Direct => self.endpoint.canonical() == address.canonical(),
            EndpointKind::FrontEnd => true,
        }
    }
}

/// Routing result for Envoy.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteTarget {
    /// Chosen worker rank; `None` leaves the choice to Envoy.
    pub to: Option<RankEndpoint>,
    /// Endpoints to try next if the chosen one cannot be reached, best first.
    pub fallbacks: Vec<WorkerEndpoint>,
    /// Cost of each candidate, if configured; lower is better.
    pub scores: Vec<(WorkerEndpoint, f64)>,
    /// Prefill worker, if the prefill is remote.
    pub prefill: Option<RankEndpoint>,
    /// Routing mode.
    pub mode: Mode,
    /// Cached prompt tokens that the engine is expected to report, if known.
    pub predicted_cached_tokens: Option<u64>,
    /// One-line explanation.
    pub why: Option<Arc<str>>,
}

/// Assignment of the phases to workers.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PhaseAssignment {
    /// One worker runs both phases, and there are no prefill workers.
    Aggregated,
    /// Another worker runs the prefill.
    Remote(Box<PrefillRoute>),
    /// One worker runs both phases although prefill workers exist.
    Local(LocalPrefillReason),
}

impl PhaseAssignment {
    /// Returns the name in metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            PhaseAssignment::Aggregated => "aggregated",
            PhaseAssignment::Remote(_) => "remote_prefill",
            PhaseAssignment::Local(bypass) => bypass.as_str(),
        }
    }
}

/// Route of the prefill phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PrefillRoute {
    /// Prefill worker.
    pub to: RankEndpoint,
    /// Cached prefix of the prompt, per tier.
    pub overlap: TierBlocks,
    /// Cached prompt tokens.
    pub cached_tokens: u64,
    /// Maximum of cached prompt tokens over the prefill candidates.
    pub best_cached_tokens: u64,
    /// Mean of cached prompt tokens over the prefill candidates.
    pub chance_cached_tokens: u64,
    /// Routing mode of the prefill choice.
    #[serde(skip)]
    pub mode: Mode,
    /// Reason for a mode other than exact.
    #[serde(skip)]
    pub reason: Option<Reason>,
    /// Freshness of the worker's event source.
    pub freshness: IndexFreshness,
    /// Choice with its cost.
    pub choice: Choice,
}

/// Route of one request, with the figures that explain it.
#[derive(Clone, Debug, Serialize)]
pub struct Route {
    /// Chosen worker; the one that served the request, once that is known.
    pub to: RankEndpoint,
    /// Further candidates that are healthy and not overloaded, by cost, with distinct endpoints.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fallbacks: Vec<RankEndpoint>,
    /// Cost of each candidate, in ascending order. Among ranks with the same endpoint, the
    /// cheapest.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub scores: Vec<(WorkerEndpoint, f64)>,
    /// Routing mode of the choice of the worker that computes the prompt.
    pub mode: Mode,
    /// Reason for a mode other than exact.
    pub reason: Option<Reason>,
    /// Whether the engine may compute something for the request.
    #[serde(skip)]
    pub computes: bool,
    /// Model that the candidates serve.
    pub model: ModelName,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Expected length of the answer, if the client stated it.
    pub expected_output_tokens: Option<u64>,
    /// Prompt tokens, possibly estimated.
    pub prompt_tokens: u64,
    /// Complete known blocks of the prompt.
    pub prompt_blocks: u64,
    /// Blocks of the prompt that the chosen rank holds, per tier.
    pub overlap: TierBlocks,
    /// Freshness of its event source.
    pub freshness: IndexFreshness,
    /// Prompt tokens that the engine is expected to report as cached. It always computes at least
    /// the last token.
    pub predicted_cached_tokens: u64,
    /// Maximum over all candidates.
    pub best_cached_tokens: u64,
    /// Mean over all candidates.
    pub chance_cached_tokens: u64,
    /// Prompt tokens that an engine could find cached at best.
    pub reusable_tokens: u64,
    /// Blocks of the shared cache beyond those on the device of the worker that computes the
    /// prompt.
    #[serde(skip_serializing_if = "is_zero")]
    pub shared_beyond_device: u64,
    /// Number of candidates.
    pub candidates: usize,
    /// Estimated bookings of other replicas that were added to the loads.
    #[serde(skip_serializing_if = "is_none")]
    pub in_flight: u32,
    /// Choice with its cost.
    pub choice: Choice,
    /// Assignment of the phases.
    pub phases: PhaseAssignment,
}

fn is_zero(blocks: &u64) -> bool {
    *blocks == 0
}

fn is_none(count: &u32) -> bool {
    *count == 0
}

/// Worker rank that computes the prompt: the prefill worker if there is one. Forecast, cache report
/// and audit describe its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ComputingRank {
    /// Worker rank.
    pub rank: WorkerRank,
    /// Blocks of the prompt that it holds, per tier.
    pub overlap: TierBlocks,
    /// Cached prompt tokens.
    pub cached_tokens: u64,
    /// Maximum over all candidates.
    pub best_cached_tokens: u64,
    /// Mean over all candidates.
    pub chance_cached_tokens: u64,
}

/// Reason why there is no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// The fleet is empty. Envoy chooses.
    #[error("no worker is known")]
    NoFleet,
    /// No worker serves the model in this role. Envoy chooses.
    #[error("no known worker serves the model in that role")]
    NoCandidate,
    /// The request is pinned to a worker that cannot serve it.
    #[error("{0}")]
    Pin(EligibilityError),
    /// All candidates are overloaded, and the operator configured a rejection.
    #[error("{0}")]
    Overloaded(EligibilityError),
    /// No worker meets the demands of the request.
    #[error("no worker satisfies the constraints of the request")]
    Unsatisfied,
    /// No prefill worker can be chosen, and the operator requires one.
    #[error("no prefill worker can be chosen")]
    NoPrefill,
}

impl RouteTarget {
    /// Leaves the choice to Envoy.
    pub const PASSTHROUGH: RouteTarget = RouteTarget {
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
    pub(super) fn from_eligibility(error: EligibilityError, constraints: &Constraints) -> Self {
        let has_demands = constraints.allowed.is_some()
            || constraints.endpoints.is_some()
            || constraints.pool.is_some()
            || constraints.pin.is_some()
            || !constraints.required_taints.is_empty();
        match error {
            EligibilityError::PinUnknown(_)
            | EligibilityError::PinRankUnknown { .. }
            | EligibilityError::PinRankMissing { .. }
            | EligibilityError::PinnedWorkerNotAllowed(_) => RouteError::Pin(error),
            EligibilityError::PinnedWorkerOverloaded(_)
            | EligibilityError::AllEligibleWorkersOverloaded => RouteError::Overloaded(error),
            EligibilityError::NoEndpoints if has_demands => RouteError::Unsatisfied,
            EligibilityError::NoEndpoints => RouteError::NoCandidate,
        }
    }

    /// Converts the error for a gateway that restricts the endpoints. It must receive an error,
    /// because Envoy must not choose another endpoint.
    pub(super) fn for_gateway(self, constraints: &Constraints) -> Self {
        match self {
            RouteError::NoFleet | RouteError::NoCandidate
                if constraints.endpoints.is_some() || constraints.pool.is_some() =>
            {
                RouteError::Unsatisfied
            }
            _ => self,
        }
    }

    /// Returns the reason for metrics and headers.
    pub fn reason(self) -> Reason {
        match self {
            RouteError::NoFleet => Reason::NoWorkers,
            RouteError::NoCandidate => Reason::NoCandidate,
            RouteError::Pin(_) => Reason::InvalidPin,
            RouteError::Overloaded(_) => Reason::Overloaded,
            RouteError::Unsatisfied => Reason::ConstraintsUnsatisfied,
            RouteError::NoPrefill => Reason::NoPrefill,
        }
    }
}

impl Route {
    /// Returns whether the response shows the health of the engine. Other requests, for example for
    /// a list of models, are answered by its front end alone.
    pub fn is_inference(&self) -> bool {
        self.computes && self.reason != Some(Reason::NoBody)
    }

    /// Returns the routing result for Envoy.
    pub fn target(&self) -> RouteTarget {
        let is_remote = self.prefill().is_some();
        // After a KV transfer, engines report the cached tokens of a decode worker differently.
        let is_predicted =
            matches!(self.mode, Mode::Exact | Mode::Partial | Mode::Approximate) && !is_remote;
        RouteTarget {
            to: Some(self.to),
            fallbacks: self.fallbacks.iter().map(|to| to.endpoint).collect(),
            scores: self.scores.clone(),
            prefill: self.prefill().map(|prefill| prefill.to),
            mode: self.mode,
            predicted_cached_tokens: is_predicted.then_some(self.predicted_cached_tokens),
            why: None,
        }
    }

    /// Returns the prefill route, if another worker runs the prefill.
    pub fn prefill(&self) -> Option<&PrefillRoute> {
        match &self.phases {
            PhaseAssignment::Remote(prefill) => Some(prefill),
            PhaseAssignment::Aggregated | PhaseAssignment::Local(_) => None,
        }
    }

    /// Returns the figures of the route as `key=value` pairs in one line. Neutral values are
    /// omitted.
    pub fn summary_line(&self) -> String {
        let cost = &self.choice.cost;
        let overlap = self.overlap;
        let mut line = format!("worker={} cost={:.3}", self.to.rank, cost.total);
        for CostTerm { name, value } in cost.terms.summands() {
            if value != 0.0 || name != "requests" {
                line.push_str(&format!(" {name}={value:.3}"));
            }
        }
        if cost.taint_factor != 1.0 {
            line.push_str(&format!(" taints={:.3}", cost.taint_factor));
        }
        line.push_str(&format!(
            " blocks={} device={}",
            self.prompt_blocks, overlap.device
        ));
        let lower = [
            ("host", overlap.host),
            ("disk", overlap.disk),
            ("external", overlap.external),
        ];
        for (tier, blocks) in lower.into_iter().filter(|(_, blocks)| *blocks > 0) {
            line.push_str(&format!(" {tier}={blocks}"));
        }
        if matches!(
            self.freshness,
            IndexFreshness::Stale | IndexFreshness::CatchingUp
        ) {
            line.push_str(&format!(" freshness={}", self.freshness.as_str()));
        }
        line.push_str(&format!(
            " cached_tokens={} candidates={} ties={}",
            self.predicted_cached_tokens, self.candidates, self.choice.ties
        ));
        if self.in_flight > 0 {
            line.push_str(&format!(" in_flight={}", self.in_flight));
        }
        if let Some(reason) = self.reason {
            line.push_str(&format!(" reason={}", reason.as_str()));
        }
        match &self.phases {
            PhaseAssignment::Remote(prefill) => line.push_str(&format!(
                " prefill_worker={} prefill_cost={:.3} prefill_cached_tokens={}",
                prefill.to.rank, prefill.choice.cost.total, prefill.cached_tokens
            )),
            PhaseAssignment::Local(reason) => line.push_str(&format!(" local={}", reason.as_str())),
            PhaseAssignment::Aggregated => {}
        }
        line
    }

    /// Returns the worker rank that computes the prompt, with its cached prefix.
    pub fn computed_by(&self) -> ComputingRank {
        match self.prefill() {
            Some(prefill) => ComputingRank {
                rank: prefill.to.rank,
                overlap: prefill.overlap,
                cached_tokens: prefill.cached_tokens,
                best_cached_tokens: prefill.best_cached_tokens,
                chance_cached_tokens: prefill.chance_cached_tokens,
            },
            None => ComputingRank {
                rank: self.to.rank,
                overlap: self.overlap,
                cached_tokens: self.predicted_cached_tokens,
                best_cached_tokens: self.best_cached_tokens,
                chance_cached_tokens: self.chance_cached_tokens,
            },
        }
    }

    /// Returns the share of the prompt's blocks that the computing rank holds.
    pub fn hit_rate(&self) -> f64 {
        let held = f64::from(self.computed_by().overlap.total());
        if self.prompt_blocks == 0 {
            0.0
        } else {
            held / self.prompt_blocks as f64
        }
    }
}
