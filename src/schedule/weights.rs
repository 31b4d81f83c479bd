//! The coefficients of the cost, as configured.

use serde::{Deserialize, Serialize};

/// How much each part of the cost counts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Weights {
    /// Credit for each block cached on the device.
    pub overlap_score_credit: f64,
    /// How quickly that credit fades with the prefill backlog of a worker rank above the least loaded one.
    pub overlap_score_credit_decay: f64,
    /// Weight of the prefill part against the decode part.
    pub prefill_load_scale: f64,
    /// Cost of each live request.
    pub decode_active_request_weight: f64,
    /// Credit for each block cached in host memory.
    pub host_cache_hit_weight: f64,
    /// Credit for each block cached on disk or in external storage.
    pub disk_cache_hit_weight: f64,
    /// Credit for each block in a cache shared by all workers.
    pub shared_cache_multiplier: f64,
    /// 0 takes the cheapest; more makes the choice more random.
    pub router_temperature: f64,
}

/// The best of 27 weightings on two public traces, for end-to-end latency under load. A cached block outweighs seven blocks
/// of decode load, so a warm worker keeps its prefixes until it is far busier than the others.
impl Default for Weights {
    fn default() -> Self {
        Self {
            overlap_score_credit: 1.0,
            overlap_score_credit_decay: 0.0,
            prefill_load_scale: 8.0,
            decode_active_request_weight: 64.0,
            host_cache_hit_weight: 0.75,
            disk_cache_hit_weight: 0.25,
            shared_cache_multiplier: 0.0,
            router_temperature: 0.0,
        }
    }
}

impl Weights {
    /// The defaults of the reference: the prefill part counts as much as the decode part, and live requests cost nothing.
    /// Tests compute their expected costs with it.
    #[cfg(test)]
    pub(crate) const UNIT: Self = Self {
        overlap_score_credit: 1.0,
        overlap_score_credit_decay: 0.0,
        prefill_load_scale: 1.0,
        decode_active_request_weight: 0.0,
        host_cache_hit_weight: 0.75,
        disk_cache_hit_weight: 0.25,
        shared_cache_multiplier: 0.0,
        router_temperature: 0.0,
    };

    /// Refuses values outside their range: the name of the weight and what is wrong with it.
    pub fn validate(&self) -> Result<(), (&'static str, String)> {
        let unbounded = f64::INFINITY;
        let rules = [
            ("overlap_score_credit", self.overlap_score_credit, unbounded),
            (
                "overlap_score_credit_decay",
                self.overlap_score_credit_decay,
                unbounded,
            ),
            ("prefill_load_scale", self.prefill_load_scale, unbounded),
            (
                "decode_active_request_weight",
                self.decode_active_request_weight,
                unbounded,
            ),
            ("host_cache_hit_weight", self.host_cache_hit_weight, 1.0),
            ("disk_cache_hit_weight", self.disk_cache_hit_weight, 1.0),
            ("shared_cache_multiplier", self.shared_cache_multiplier, 1.0),
            ("router_temperature", self.router_temperature, unbounded),
        ];
        rules
            .into_iter()
            .try_for_each(|(name, value, most)| within(name, value, most))
    }
}

/// Refuses a value that is not a number from 0 to `most`.
pub(super) fn within(
    name: &'static str,
    value: f64,
    most: f64,
) -> Result<(), (&'static str, String)> {
    if value.is_finite() && (0.0..=most).contains(&value) {
        return Ok(());
    }
    let range = if most == f64::INFINITY {
        "finite and at least 0".into()
    } else {
        format!("from 0 to {most}")
    };
    Err((name, format!("is {value}, but must be {range}")))
}
