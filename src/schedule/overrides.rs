//! What one request may set differently from the configuration. Whether a client is trusted to do so is decided where the
//! request is read; here is only what the values mean.

use serde::{Deserialize, Serialize};

use super::Weights;
use super::weights::within;

/// Values of one request in place of the configured ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Overrides {
    /// In place of [`Weights::overlap_score_credit`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlap_score_credit: Option<f64>,
    /// In place of [`Weights::prefill_load_scale`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_load_scale: Option<f64>,
    /// In place of [`Weights::router_temperature`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_temperature: Option<f64>,
    /// In place of [`Weights::shared_cache_multiplier`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_cache_multiplier: Option<f64>,
    /// Whether blocks of live requests are taken to be shared with this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub assume_kv_reuse: Option<bool>,
    /// Whether the prefill of this request counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub track_prefill_tokens: Option<bool>,
    /// The older name of `prefill_load_scale`; 0 also takes all credit from blocks on the device. The newer names win.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlap_score_weight: Option<f64>,
}

impl Overrides {
    /// The weights for this request.
    #[must_use]
    pub fn apply(&self, weights: &Weights) -> Weights {
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

    /// Refuses values outside their range: the name of the value and what is wrong with it.
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
            value.map_or(Ok(()), |value| within(name, value, most))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Overrides {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn only_what_a_request_sets_differs() {
        let configured = Weights {
            host_cache_hit_weight: 0.5,
            ..Weights::default()
        };
        assert_eq!(read("{}").apply(&configured), configured);
        let set = read(
            r#"{"overlap_score_credit": 2, "router_temperature": 0.5, "shared_cache_multiplier": 1}"#,
        );
        let expected = Weights {
            overlap_score_credit: 2.0,
            router_temperature: 0.5,
            shared_cache_multiplier: 1.0,
            ..configured
        };
        assert_eq!(set.apply(&configured), expected);
        assert!(serde_json::from_str::<Overrides>(r#"{"host_cache_hit_weight": 1}"#).is_err());
    }

    #[test]
    fn the_older_weight_scales_prefill_and_0_takes_the_credit_but_newer_names_win() {
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
            let weights = read(text).apply(&Weights::default());
            assert_eq!(
                (weights.prefill_load_scale, weights.overlap_score_credit),
                (scale, credit),
                "{text}"
            );
        }
    }

    #[test]
    fn values_outside_their_range_are_refused_by_name() {
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
