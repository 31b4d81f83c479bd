//! Configured coefficients of the cost.

use serde::{Deserialize, Serialize};

/// Coefficients of the cost terms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Weights {
    /// Credit for each block cached on the device.
    pub overlap_score_credit: f64,
    /// Decay of that credit with the prefill backlog of a rank above the least loaded one.
    pub overlap_score_credit_decay: f64,
    /// Weight of the prefill term relative to the decode term.
    pub prefill_load_scale: f64,
    /// Cost of each running request.
    pub decode_active_request_weight: f64,
    /// Credit for each block cached in host memory.
    pub host_cache_hit_weight: f64,
    /// Credit for each block cached on disk or in external storage.
    pub disk_cache_hit_weight: f64,
    /// Credit for each block in a cache shared by all workers.
    pub shared_cache_multiplier: f64,
    /// Sampling temperature; 0 chooses the minimum.
    pub router_temperature: f64,
}

/// Best of 27 weightings by end-to-end latency under load on two public traces. A cached block
/// outweighs seven blocks of decode load, so a warm worker keeps its prefixes until it is far
/// busier than the others.
impl Default for Weights {
    fn default() -> Self {
        Self {
            prefill_load_scale: 8.0,
            decode_active_request_weight: 64.0,
            ..Self::UNIT
        }
    }
}

impl Weights {
    /// Defaults of the reference implementation: prefill counts as much as decode, and running
    /// requests cost nothing. Tests use them to compute expected costs.
    pub const UNIT: Self = Self {
        overlap_score_credit: 1.0,
        overlap_score_credit_decay: 0.0,
        prefill_load_scale: 1.0,
        decode_active_request_weight: 0.0,
        host_cache_hit_weight: 0.75,
        disk_cache_hit_weight: 0.25,
        shared_cache_multiplier: 0.0,
        router_temperature: 0.0,
    };

    /// Weights for long agent sessions: a cached block counts twice.
    pub const AGENTIC: Self = Self {
        overlap_score_credit: 2.0,
        prefill_load_scale: 4.0,
        decode_active_request_weight: 64.0,
        ..Self::UNIT
    };

    /// Checks the ranges. Returns the name of the invalid weight and the problem.
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
            .try_for_each(|(name, value, max)| check_range(name, value, max))
    }
}

/// Rejects a value that is not a finite number from 0 to `max`.
pub(super) fn check_range(
    name: &'static str,
    value: f64,
    max: f64,
) -> Result<(), (&'static str, String)> {
    if value.is_finite() && (0.0..=max).contains(&value) {
        return Ok(());
    }
    let range = if max == f64::INFINITY {
        "finite and at least 0".into()
    } else {
        format!("from 0 to {max}")
    };
    Err((name, format!("is {value}, but must be {range}")))
}
