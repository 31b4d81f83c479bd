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

/// The `routing.overload:` section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OverloadConfig {
    /// Share of used KV blocks, from 0 to 1, above which a rank is overloaded.
    pub decode_blocks_threshold: Option<f64>,
    /// Prompt tokens waiting for prefill above which a rank is overloaded.
    pub prefill_tokens_threshold: Option<u64>,
    /// The same threshold as a multiple of the worker's `max_num_batched_tokens`.
    pub prefill_tokens_threshold_frac: Option<f64>,
    /// Time without requests for a worker that returned 429 or 503.
    pub backoff: DurationSetting,
    /// Handling of requests while every eligible worker is overloaded.
    pub when_all: OverloadAction,
}

impl Default for OverloadConfig {
    fn default() -> Self {
        let OverloadThresholds {
            decode_blocks,
            prefill,
            mark_duration: backoff,
        } = OverloadThresholds::default();
        Self {
            decode_blocks_threshold: decode_blocks,
            prefill_tokens_threshold: prefill.prefill_tokens,
            prefill_tokens_threshold_frac: prefill.prefill_fraction,
            backoff: DurationSetting(backoff),
            when_all: OverloadAction::Route,
        }
    }
}

impl OverloadConfig {
    /// Returns the thresholds for the core.
    pub fn thresholds(&self) -> OverloadThresholds {
        OverloadThresholds {
            decode_blocks: self.decode_blocks_threshold,
            prefill: BusyThreshold {
                prefill_tokens: self.prefill_tokens_threshold,
                prefill_fraction: self.prefill_tokens_threshold_frac,
            },
            mark_duration: self.backoff.get(),
        }
    }

    /// Checks the values.
    pub fn problems(&self) -> Option<Problem> {
        let (name, text) = self.thresholds().validate().err()?;
        Some(Problem::of(name, format!("`{name}` {text}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_those_of_the_section() {
        assert_eq!(
            OverloadConfig::default().thresholds(),
            OverloadThresholds::default()
        );
        let config: OverloadConfig = serde_json::from_str(r#"{"backoff": "2s"}"#).unwrap();
        assert_eq!(
            config.thresholds().mark_duration,
            std::time::Duration::from_secs(2)
        );
    }
}
