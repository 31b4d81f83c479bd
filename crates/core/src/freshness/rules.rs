//! Effect of freshness on decisions.
//!
//! Decision 0030, Decision 0032.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::status::{IndexFreshness, SourceStatus, StaleReason};

/// Effect of freshness on decisions, and limits for silent sources.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FreshnessRules {
    /// Factor on the credit for cached blocks while their source is stale or catching up. Between 0
    /// and 1.
    pub stale_credit: f64,
    /// Minimum number of answered requests that must have stored blocks, before a source counts as
    /// silent.
    pub silence_requests: u32,
    /// Minimum time since the first of these requests.
    pub silence_after: Duration,
    /// Treatment of a rank's blocks when batches are lost for good.
    pub resync: ResyncMode,
}

impl Default for FreshnessRules {
    fn default() -> Self {
        Self {
            stale_credit: 0.5,
            silence_requests: 3,
            silence_after: Duration::from_secs(10),
            resync: ResyncMode::Keep,
        }
    }
}

impl FreshnessRules {
    /// Returns the factor on the credit for cached blocks.
    pub fn credit(&self, status: SourceStatus) -> f64 {
        match (status.freshness, status.reason) {
            // Without a source, only predictions exist, and they do not depend on its freshness.
            (IndexFreshness::Exact | IndexFreshness::Incomplete, _)
            | (IndexFreshness::Absent, None | Some(StaleReason::NoSource)) => 1.0,
            // Blocks reported before the source became unusable may be arbitrarily old.
            (IndexFreshness::Absent, Some(_)) => 0.0,
            (IndexFreshness::CatchingUp | IndexFreshness::Stale, _) => self.stale_credit,
        }
    }
}

/// Treatment of a rank's blocks when batches are lost for good.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ResyncMode {
    /// Blocks stay, marked as stale.
    #[default]
    Keep,
    /// Blocks are removed, and the index is rebuilt from the following events.
    Clear,
}
