//! List of the routing policies, with their settings and cost functions.

use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr, VariantArray};

use super::candidate::{Candidate, PolicyInput};
use super::cost::CostModelVisitor;
use super::least_loaded::LeastLoadedModel;
use super::linear::LinearModel;
use super::lmetric::LmetricModel;
use super::round_robin::RoundRobinModel;
use super::seconds::{SecondsModel, SecondsSettings};
use super::sticky::{StickyModel, StickySettings};
use super::weights::Weights;

/// Policy that computes the cost of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, IntoStaticStr)]
#[serde(tag = "name", rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum RoutingPolicy {
    /// Time that the choice costs all requests.
    Seconds(SecondsSettings),
    /// Weighted sum of prefill, decode and requests, in blocks.
    Linear,
    /// Prefill tokens times requests.
    Lmetric,
    /// Fewest queued and uncached tokens among warm ranks, unless their queues are much longer than
    /// the shortest.
    Sticky(StickySettings),
    /// Fewest running requests.
    LeastLoaded,
    /// Ranks in turn.
    RoundRobin,
}

/// Name of a policy or of a preset of `linear`, in the configuration and in requests.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    EnumString,
    IntoStaticStr,
    VariantArray,
)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum PolicyName {
    /// Least time that the choice costs all requests, by learned latencies.
    Seconds,
    /// Least weighted sum of uncached prompt tokens and running blocks, with the weights of the
    /// reference implementation.
    Linear,
    /// `linear` with the default weights of warmroute.
    LinearTuned,
    /// `linear` with the weights for coding agents.
    Agentic,
    /// Least product of prefill tokens and requests.
    Lmetric,
    /// Fewest queued and uncached tokens among warm ranks, unless their queues are much longer than
    /// the shortest.
    Sticky,
    /// Fewest running requests.
    LeastLoaded,
    /// Ranks in turn.
    RoundRobin,
}

/// Policy of a choice with its weights. All policies use the temperature, `linear` and `seconds` use
/// the weights of the tiers, and only `linear` uses the other weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PolicySettings {
    /// The policy.
    #[serde(rename = "policy")]
    pub routing: RoutingPolicy,
    /// The weights.
    pub weights: Weights,
}

impl PolicyName {
    /// All names, in the order of the documentation.
    pub const ALL: &'static [PolicyName] = Self::VARIANTS;

    /// Returns the name in the configuration.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl RoutingPolicy {
    /// Returns the name of the policy.
    pub fn as_str(&self) -> &'static str {
        self.into()
    }

    /// Returns whether the cost depends on the booked work of the ranks and the learned latency.
    pub(crate) fn needs_timing(&self) -> bool {
        matches!(self, RoutingPolicy::Seconds(_))
    }
}

impl PolicySettings {
    /// Creates the policy `linear` with weights.
    pub fn linear(weights: Weights) -> Self {
        Self {
            routing: RoutingPolicy::Linear,
            weights,
        }
    }

    /// Creates a policy with its default settings. `linear` and its presets replace three of the
    /// `weights`.
    pub fn named(name: PolicyName, weights: &Weights) -> Self {
        let with_coefficients = |preset: Weights| Weights {
            overlap_score_credit: preset.overlap_score_credit,
            prefill_load_scale: preset.prefill_load_scale,
            decode_active_request_weight: preset.decode_active_request_weight,
            ..*weights
        };
        let other = |routing| Self {
            routing,
            weights: *weights,
        };
        match name {
            PolicyName::Seconds => other(RoutingPolicy::Seconds(SecondsSettings::default())),
            PolicyName::Linear => Self::linear(with_coefficients(Weights::UNIT)),
            PolicyName::LinearTuned => Self::linear(with_coefficients(Weights::default())),
            PolicyName::Agentic => Self::linear(with_coefficients(Weights::AGENTIC)),
            PolicyName::Lmetric => other(RoutingPolicy::Lmetric),
            PolicyName::Sticky => other(RoutingPolicy::Sticky(StickySettings::default())),
            PolicyName::LeastLoaded => other(RoutingPolicy::LeastLoaded),
            PolicyName::RoundRobin => other(RoutingPolicy::RoundRobin),
        }
    }

    /// Creates the cost function of the policy and applies `visitor` to it.
    pub(super) fn visit_cost_model<V: CostModelVisitor>(
        &self,
        input: &PolicyInput,
        candidates: &[Candidate],
        visitor: V,
    ) -> V::Output {
        let weights = &self.weights;
        let count = candidates.len();
        match self.routing {
            RoutingPolicy::Seconds(seconds) => {
                visitor.visit(&SecondsModel::new(input, count, seconds, weights))
            }
            RoutingPolicy::Linear => visitor.visit(&LinearModel::new(input, candidates, weights)),
            RoutingPolicy::Lmetric => visitor.visit(&LmetricModel { input }),
            RoutingPolicy::Sticky(sticky) => {
                visitor.visit(&StickyModel::new(input, candidates, sticky))
            }
            RoutingPolicy::LeastLoaded => visitor.visit(&LeastLoadedModel),
            RoutingPolicy::RoundRobin => visitor.visit(&RoundRobinModel::new(input, count)),
        }
    }
}

impl Default for PolicySettings {
    /// `linear_tuned`. The default of the configuration is `seconds`.
    fn default() -> Self {
        Self::linear(Weights::default())
    }
}
