//! `index:`: index of the workers' caches.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_core::freshness::{FreshnessRules, ResyncMode};
use warmroute_engines::shared_cache::SharedCacheConfig;
use warmroute_settings::{DurationSetting, Problem};

use super::ApproximateConfig;
use crate::cluster::remote_index::config::RemoteIndexConfig;
use crate::cluster::warm_start::config::WarmStartConfig;

/// The `index:` section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct IndexSection {
    /// Maximum number of blocks of one worker rank in each tier below the device. It also applies
    /// to the device if the number of its KV blocks is unknown; otherwise the limit is four times
    /// that number.
    pub max_blocks_per_tier: u64,
    /// Handling of event sources that may be out of date.
    pub freshness: FreshnessConfig,
    /// Prediction of caches without KV events.
    pub approximate: ApproximateConfig,
    /// Cache that all workers share. `None`: there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_cache: Option<SharedCacheConfig>,
    /// Source of the index at startup. `None`: the index is built only from the events of the
    /// engines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warm_start: Option<WarmStartConfig>,
    /// True if this process answers queries of processes that keep no index of their own.
    pub serve: bool,
    /// Servers that are queried instead of keeping an index in this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteIndexConfig>,
}

impl Default for IndexSection {
    fn default() -> Self {
        Self {
            max_blocks_per_tier: 1 << 20,
            freshness: FreshnessConfig::default(),
            approximate: ApproximateConfig::default(),
            shared_cache: None,
            warm_start: None,
            serve: false,
            remote: None,
        }
    }
}

impl IndexSection {
    /// Checks the keys of the section itself.
    pub fn problems(&self) -> Option<Problem> {
        let text = "the index would hold nothing; the default is 1048576";
        let is_zero = self.max_blocks_per_tier == 0;
        is_zero.then(|| Problem::of("max_blocks_per_tier", text))
    }
}

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
