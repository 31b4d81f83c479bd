//! `routing:`: selection of the worker for a request.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_core::health::HealthRules;
use warmroute_core::policy::{
    DisaggregationConfig, OverloadThresholds, PolicyName, PolicySettings,
};
use warmroute_core::queue::BusyThreshold;
use warmroute_core::router::{LoadTracking, OverloadAction};
use warmroute_settings::{DurationSetting, Problem};

use super::TrackingHashConfig;
use super::policy::{PolicyConfig, WeightsConfig};
use crate::request::pool_routes::PoolRoutesConfig;
use crate::request::rewrite::RewritesConfig;

/// The `routing:` section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RoutingSection {
    /// Policy of all models that do not configure one. Default: `seconds`, or `linear_tuned` if a
    /// weight of `linear` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyConfig>,
    /// Weights of the policy.
    pub weights: WeightsConfig,
    /// Quantities that count as load.
    pub load: LoadTracking,
    /// Hash that identifies prompt blocks in the load tracker.
    pub block_hash: TrackingHashConfig,
    /// Thresholds above which a worker receives no requests.
    pub overload: OverloadConfig,
    /// Ejection of workers after consecutive failures.
    pub outlier_detection: HealthRules,
    /// Requirement and conditions of remote prefills.
    pub disaggregation: DisaggregationConfig,
    /// Assignment of requests to pools of workers.
    pub pool_routes: PoolRoutesConfig,
    /// Rewrites of the requested model to another one.
    pub model_rewrites: RewritesConfig,
}

impl RoutingSection {
    /// Returns the policy of models that do not configure one.
    pub fn default_policy(&self) -> PolicyConfig {
        let default = if self.weights.linear_weight().is_some() {
            PolicyName::LinearTuned
        } else {
            PolicyName::Seconds
        };
        self.policy.unwrap_or(PolicyConfig::named(default))
    }

    /// Returns the settings of a policy with the configured weights.
    pub fn policy_settings(&self, policy: &PolicyConfig) -> PolicySettings {
        policy.settings(&self.weights)
    }
}
