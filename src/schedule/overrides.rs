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
            overlap_score_credit: self.overlap_score_credit.or(no_credit).unwrap_or(weights.overlap_score_credit),
            prefill_load_scale: self
                .prefill_load_scale
                .or(self.overlap_score_weight)
                .unwrap_or(weights.prefill_load_scale),
            router_temperature: self.router_temperature.unwrap_or(weights.router_temperature),
            shared_cache_multiplier: self.shared_cache_multiplier.unwrap_or(weights.shared_cache_multiplier),
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
        rules.into_iter().try_for_each(|(name, value, most)| value.map_or(Ok(()), |value| within(name, value, most)))
    }

    /// The same for the choice of the worker that decodes what another has prefilled: prefill counts nothing there, and
    /// its blocks arrive by transfer, so nothing is shared. What is cached counts only where `conditional` says that the
    /// decode worker may do the prefill itself.
    #[must_use]
    pub fn after_prefill(mut self, conditional: bool) -> Self {
        if !conditional {
            self.overlap_score_credit = Some(0.0);
        }
        self.assume_kv_reuse = Some(false);
        self.track_prefill_tokens = Some(false);
        self
    }
}
