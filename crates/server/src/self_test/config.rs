//! `engines.parity_check:`: comparison of tokens with the engines.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_settings::{DurationSetting, Problem};

/// The `engines.parity_check:` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SelfTestConfig {
    /// Whether canaries are compared with the engines.
    pub enabled: bool,
    /// Interval between comparisons.
    pub interval: DurationSetting,
    /// Timeout of one request to an engine.
    pub timeout: DurationSetting,
    /// Whether the blocks of sampled requests are compared with the events of the worker that
    /// computed them.
    pub sample_requests: bool,
}

impl Default for SelfTestConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            interval: DurationSetting::seconds(300),
            timeout: DurationSetting::seconds(5),
            sample_requests: true,
        }
    }
}

impl SelfTestConfig {
    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let cases = [
            (
                "interval",
                self.interval,
                "engines would be queried without a pause; the default is 5m",
            ),
            (
                "timeout",
                self.timeout,
                "no response could arrive within 0s; the default is 5s",
            ),
        ];
        let zero = cases
            .into_iter()
            .filter(|(_, period, _)| period.get().is_zero());
        zero.map(|(key, _, text)| Problem::of(key, text)).collect()
    }
}
