//! `index.freshness:`: handling of event sources that may be out of date.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_core::freshness::{FreshnessRules, ResyncMode};
use warmroute_settings::{DurationSetting, Problem};

/// The `index.freshness:` section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FreshnessConfig {
    /// Factor, from 0 to 1, for the credit of cached blocks while their event source is stale or
    /// catching up.
    pub stale_credit: f64,
    /// Conditions under which a silent source counts as stale.
    pub stale_after: SilenceConfig,
    /// Handling of the blocks of a rank when batches are permanently lost.
    pub on_lost_events: ResyncMode,
}

/// The `index.freshness.stale_after:` section. Both conditions must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SilenceConfig {
    /// Number of completed requests that must have stored blocks, without an event batch since the
    /// first of them.
    pub requests: u32,
    /// Time since the first of these requests.
    pub duration: DurationSetting,
}

impl Default for FreshnessConfig {
    fn default() -> Self {
        let FreshnessRules {
            stale_credit,
            resync,
            ..
        } = FreshnessRules::default();
        Self {
            stale_credit,
            stale_after: SilenceConfig::default(),
            on_lost_events: resync,
        }
    }
}

impl Default for SilenceConfig {
    fn default() -> Self {
        let FreshnessRules {
            silence_requests,
            silence_after,
            ..
        } = FreshnessRules::default();
        Self {
            requests: silence_requests,
            duration: DurationSetting(silence_after),
        }
    }
}

impl FreshnessConfig {
    /// Returns the rules for the core.
    pub fn rules(&self) -> FreshnessRules {
        FreshnessRules {
            stale_credit: self.stale_credit,
            silence_requests: self.stale_after.requests,
            silence_after: self.stale_after.duration.get(),
            resync: self.on_lost_events,
        }
    }

    /// Checks the values.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if !(0.0..=1.0).contains(&self.stale_credit) {
            let text = format!(
                "`stale_credit` is {}, but must be from 0 to 1",
                self.stale_credit
            );
            problems.push(Problem::of("stale_credit", text));
        }
        if self.stale_after.requests == 0 {
            let text = "0 requests would make every idle engine silent; the default is 3";
            problems.push(Problem::of("requests", text).within("stale_after"));
        }
        problems
    }
}
