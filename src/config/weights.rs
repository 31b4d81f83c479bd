//! `schedule:`, until the schedule module brings its own.

use serde::{Deserialize, Serialize};

use crate::settings::Problem;

/// The coefficients of the cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Weights {
    /// What a cached device block is worth, in blocks of prefill.
    pub overlap_score_credit: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Self { overlap_score_credit: 1.0 }
    }
}

impl Weights {
    pub(super) fn problems(&self) -> Vec<Problem> {
        Vec::new()
    }
}
