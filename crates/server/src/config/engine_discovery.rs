//! `engines.discovery:`: queries to engines for their settings.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_settings::{DurationSetting, Problem};

/// The `engines.discovery:` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EngineDiscoveryConfig {
    /// True to query each worker for its cache settings and the addresses of its event sources.
    pub enabled: bool,
    /// Interval between two queries to one worker.
    pub interval: DurationSetting,
}

impl Default for EngineDiscoveryConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            interval: DurationSetting::seconds(300),
        }
    }
}

impl EngineDiscoveryConfig {
    /// Checks the values.
    pub fn problems(&self) -> Vec<Problem> {
        let zero = self.interval.get().is_zero();
        let text = "an interval of 0s would query without pause; the default is 5m";
        zero.then(|| Problem::of("interval", text))
            .into_iter()
            .collect()
    }
}
