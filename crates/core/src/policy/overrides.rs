//! Per-request overrides of the configured policy. Whether a client may set them is decided where
//! the request is parsed.

use serde::Deserialize;

use super::settings::{PolicyName, PolicySettings, RoutingPolicy};
use super::weights::{Weights, check_range};

/// Values of one request that replace configured ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterOverrides {
    /// Replaces the policy.
    pub policy: Option<PolicyName>,
    /// Replaces [`Weights::overlap_score_credit`].
    pub overlap_score_credit: Option<f64>,
    /// Replaces [`Weights::prefill_load_scale`].
    pub prefill_load_scale: Option<f64>,
    /// Replaces [`Weights::router_temperature`].
    pub router_temperature: Option<f64>,
    /// Replaces [`Weights::shared_cache_multiplier`].
    pub shared_cache_multiplier: Option<f64>,
    /// Whether the request is assumed to share blocks with running requests.
    pub assume_kv_reuse: Option<bool>,
    /// Whether the prefill of this request counts as load.
    pub track_prefill_tokens: Option<bool>,
    /// Older name of `prefill_load_scale`; 0 also removes the device credit. The newer names take
    /// precedence.
    pub overlap_score_weight: Option<f64>,
}

impl RouterOverrides {
    /// Returns the policy for this request. Weights of `linear` select that policy, unless the
    /// request names another one.
    #[must_use]
    pub fn apply(&self, configured: &PolicySettings) -> PolicySettings {
        let base = match self.policy {
            Some(name) => PolicySettings::named(name, &configured.weights),
            None if self.has_linear_weights() => PolicySettings {
                routing: RoutingPolicy::Linear,
                ..*configured
            },
            None => *configured,
        };
        PolicySettings {
            weights: self.apply_to_weights(&base.weights),
            ..base
        }
    }

    fn has_linear_weights(&self) -> bool {
        self.overlap_score_credit.is_some()
            || self.prefill_load_scale.is_some()
            || self.overlap_score_weight.is_some()
    }

    fn apply_to_weights(&self, weights: &Weights) -> Weights {
        let no_credit = self.overlap_score_weight.filter(|weight| *weight == 0.0);
        Weights {
            overlap_score_credit: self
                .overlap_score_credit
                .or(no_credit)
                .unwrap_or(weights.overlap_score_credit),
            prefill_load_scale: self
                .prefill_load_scale
                .or(self.overlap_score_weight)
                .unwrap_or(weights.prefill_load_scale),
            router_temperature: self
                .router_temperature
                .unwrap_or(weights.router_temperature),
            shared_cache_multiplier: self
                .shared_cache_multiplier
                .unwrap_or(weights.shared_cache_multiplier),
            ..*weights
        }
    }

    /// Checks the ranges. Returns the name of the invalid value and the problem.
    pub fn validate(&self) -> Result<(), (&'static str, String)> {
        let unbounded = f64::INFINITY;
        let rules = [
            ("overlap_score_credit", self.overlap_score_credit, unbounded),
            ("prefill_load_scale", self.prefill_load_scale, unbounded),
            ("router_temperature", self.router_temperature, unbounded),
            ("shared_cache_multiplier", self.shared_cache_multiplier, 1.0),
            ("overlap_score_weight", self.overlap_score_weight, unbounded),
        ];
        rules.into_iter().try_for_each(|(name, value, most)| {
            value.map_or(Ok(()), |value| check_range(name, value, most))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> RouterOverrides {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn unset_values_keep_the_configured_weights() {
        let configured = Weights {
            host_cache_hit_weight: 0.5,
            ..Weights::default()
        };
        let apply = |overrides: RouterOverrides| {
            overrides.apply(&PolicySettings::linear(configured)).weights
        };
        assert_eq!(apply(read("{}")), configured);
        let set = read(
            r#"{"overlap_score_credit": 2, "router_temperature": 0.5, "shared_cache_multiplier": 1}"#,
        );
        let expected = Weights {
            overlap_score_credit: 2.0,
            router_temperature: 0.5,
            shared_cache_multiplier: 1.0,
            ..configured
        };
        assert_eq!(apply(set), expected);
        assert!(
            serde_json::from_str::<RouterOverrides>(r#"{"host_cache_hit_weight": 1}"#).is_err()
        );
    }

    #[test]
    fn legacy_weight_scales_prefill_unless_overridden() {
        for (text, scale, credit) in [
            (r#"{"overlap_score_weight": 3}"#, 3.0, 1.0),
            (r#"{"overlap_score_weight": 0}"#, 0.0, 0.0),
            (
                r#"{"overlap_score_weight": 0, "overlap_score_credit": 2}"#,
                0.0,
                2.0,
            ),
            (
                r#"{"overlap_score_weight": 0, "prefill_load_scale": 2}"#,
                2.0,
                0.0,
            ),
        ] {
            let weights = read(text).apply(&PolicySettings::default()).weights;
            assert_eq!(
                (weights.prefill_load_scale, weights.overlap_score_credit),
                (scale, credit),
                "{text}"
            );
        }
    }

    #[test]
    fn out_of_range_values_are_rejected_by_name() {
        for (name, value) in [
            ("overlap_score_credit", "-1"),
            ("prefill_load_scale", "-0.1"),
            ("router_temperature", "-1e300"),
            ("shared_cache_multiplier", "1.1"),
            ("overlap_score_weight", "-3"),
        ] {
            assert_eq!(
                read(&format!(r#"{{"{name}": {value}}}"#))
                    .validate()
                    .unwrap_err()
                    .0,
                name
            );
        }
        assert_eq!(
            read(r#"{"shared_cache_multiplier": 1, "router_temperature": 0}"#).validate(),
            Ok(())
        );
    }
}
