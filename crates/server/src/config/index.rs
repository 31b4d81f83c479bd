//! `index:`: index of the workers' caches.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_engines::shared_cache::SharedCacheConfig;
use warmroute_settings::Problem;

use super::{ApproximateConfig, FreshnessConfig};
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
