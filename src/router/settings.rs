//! How the router decides, as configured.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::disagg::Disaggregation;
use crate::health::HealthRules;
use crate::schedule::{Thresholds, Weights};
use crate::trust::TrustRules;
use crate::worker::ModelName;

/// Everything that steers a decision beside the request itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterSettings {
    /// The coefficients of the cost.
    pub weights: Weights,
    /// What counts as load.
    pub tracking: Tracking,
    /// What happens where prefill workers exist, or ought to.
    pub disaggregation: Disaggregation,
    /// Models to which `disaggregation.enforce` applies even while all of their workers have the default role.
    pub enforced: Arc<BTreeSet<ModelName>>,
    /// What counts as overload.
    pub overload: Thresholds,
    /// What happens while every eligible worker is overloaded.
    pub when_all_overloaded: WhenOverloaded,
    /// When a worker is taken out.
    pub health: HealthRules,
    /// What is made of event sources that may be out of date.
    pub trust: TrustRules,
    /// Blocks that a worker rank may have in the index per tier, where its number of KV blocks is not known; none: without limit.
    pub most_blocks_per_tier: Option<u64>,
    /// How many further endpoints a route names at most, for Envoy to try when it cannot reach the chosen one.
    pub fallbacks: usize,
    /// Whether a route names the cost of every candidate.
    pub scores: bool,
}

/// `load:`: what counts as load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tracking {
    /// Blocks of live requests' prompts.
    pub active_blocks: bool,
    /// Blocks of their answers, as far as answers pass through us.
    pub output_blocks: bool,
    /// Prompt tokens still to be computed.
    pub prefill_tokens: bool,
    /// Equal blocks of live requests on one worker rank are counted once.
    pub assume_kv_reuse: bool,
    /// Prompt tokens shrink as the time passes that such a prompt took before.
    pub prefill_durations: bool,
}

impl Default for Tracking {
    fn default() -> Self {
        Self {
            active_blocks: true,
            output_blocks: false,
            prefill_tokens: true,
            assume_kv_reuse: true,
            prefill_durations: false,
        }
    }
}

/// What happens while every eligible worker is overloaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhenOverloaded {
    /// The cheapest of them gets the request.
    #[default]
    Route,
    /// The client gets 429 and may try again.
    Reject,
}
