//! Configured settings of the router.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::freshness::FreshnessRules;
use crate::health::HealthRules;
use crate::policy::{DisaggregationConfig, OverloadThresholds, PolicySettings};
use crate::worker::ModelName;

/// Settings of all decisions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterSettings {
    /// Routing policy.
    pub policy: PolicySettings,
    /// Policies of single models, instead of `policy`.
    pub model_policies: Arc<BTreeMap<ModelName, PolicySettings>>,
    /// Load that is tracked.
    pub tracking: LoadTracking,
    /// Disaggregation of prefill and decode.
    pub disaggregation: DisaggregationConfig,
    /// Models to which `routing.disaggregation.enforce` applies even while all their workers have
    /// the default role.
    pub prefill_required_models: Arc<BTreeSet<ModelName>>,
    /// Overload thresholds.
    pub overload: OverloadThresholds,
    /// Action if all eligible workers are overloaded.
    pub when_all_overloaded: OverloadAction,
    /// Ejection rules.
    pub health: HealthRules,
    /// Rules for event sources that may be out of date.
    pub freshness: FreshnessRules,
    /// Maximum number of indexed blocks per rank and tier, if the rank's KV capacity is unknown;
    /// `None` is unlimited.
    pub max_blocks_per_tier: Option<u64>,
    /// Maximum number of fallback endpoints in a route.
    pub max_fallbacks: usize,
    /// Whether a route contains the cost of every candidate.
    pub reports_scores: bool,
}

impl RouterSettings {
    /// Returns the policy of a model.
    pub fn policy_of(&self, model: &ModelName) -> &PolicySettings {
        self.model_policies.get(model).unwrap_or(&self.policy)
    }
}

/// `load:`: load that is tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct LoadTracking {
    /// Prompt blocks of running requests.
    pub active_blocks: bool,
    /// Output blocks of running requests, as far as their responses pass through warmroute.
    pub output_blocks: bool,
    /// Prompt tokens still to be computed.
    pub prefill_tokens: bool,
    /// Counts equal blocks of running requests on one rank once.
    pub assume_kv_reuse: bool,
    /// Reduces outstanding prompt tokens over time, by the observed prefill times.
    pub prefill_decay: bool,
}

impl Default for LoadTracking {
    fn default() -> Self {
        Self {
            active_blocks: true,
            output_blocks: false,
            prefill_tokens: true,
            assume_kv_reuse: true,
            prefill_decay: false,
        }
    }
}

/// Action if all eligible workers are overloaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OverloadAction {
    /// Routes to the cheapest of them.
    #[default]
    Route,
    /// Answers 429; the client may retry.
    Reject,
}
