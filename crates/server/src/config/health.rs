//! `routing.outlier_detection:`: ejection of worker ranks that fail where others deliver.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_core::health::HealthRules;
use warmroute_settings::{DurationSetting, Problem};

/// Upper limit of the ejection time. A longer time would keep repaired workers out of service.
const MAX_EJECTION_TIME: Duration = Duration::from_secs(24 * 60 * 60);

/// The `routing.outlier_detection:` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HealthConfig {
    /// Failed requests in a row that eject a worker rank while other ranks of its model deliver.
    /// Failures are lost connections, 5xx, empty responses and responses that are overdue. A 4xx or
    /// a reported overload counts half. Lost connections need no comparison. 0: no ejection.
    pub consecutive_failures: u32,
    /// Ejection time before one request probes the worker. It doubles after each failed probe.
    pub base_ejection_time: DurationSetting,
    /// Maximum ejection time.
    pub max_ejection_time: DurationSetting,
}

impl Default for HealthConfig {
    fn default() -> Self {
        let HealthRules {
            consecutive_failures,
            base_ejection_time,
            max_ejection_time,
        } = HealthRules::default();
        Self {
            consecutive_failures,
            base_ejection_time: DurationSetting(base_ejection_time),
            max_ejection_time: DurationSetting(max_ejection_time),
        }
    }
}

impl HealthConfig {
    /// Returns the rules for the core.
    pub fn rules(&self) -> HealthRules {
        HealthRules {
            consecutive_failures: self.consecutive_failures,
            base_ejection_time: self.base_ejection_time.get(),
            max_ejection_time: self.max_ejection_time.get(),
        }
    }

    /// Checks the values.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.base_ejection_time.get().is_zero() {
            let text = "an ejection of 0s has no effect; the default is 1s, and `consecutive_failures: 0` turns this off";
            problems.push(Problem::of("base_ejection_time", text));
        }
        if self.max_ejection_time < self.base_ejection_time {
            let text = format!(
                "{} is less than `base_ejection_time` ({}); it must be at least as long",
                self.max_ejection_time, self.base_ejection_time
            );
            problems.push(Problem::of("max_ejection_time", text));
        }
        if self.max_ejection_time.get() > MAX_EJECTION_TIME {
            problems.push(Problem::of(
                "max_ejection_time",
                format!(
                    "{} is more than a day; the default is 20s",
                    self.max_ejection_time
                ),
            ));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_ejection_times_name_their_key() {
        assert_eq!(HealthConfig::default().rules(), HealthRules::default());
        assert!(HealthConfig::default().problems().is_empty());
        for (text, key) in [
            (r#"{"base_ejection_time": "0s"}"#, "base_ejection_time"),
            (r#"{"base_ejection_time": "2m"}"#, "max_ejection_time"),
            (r#"{"max_ejection_time": "25h"}"#, "max_ejection_time"),
        ] {
            let config: HealthConfig = serde_json::from_str(text).unwrap();
            assert_eq!(config.problems().len(), 1, "{text}");
            assert_eq!(config.problems()[0].path, [key.into()], "{text}");
        }
    }
}
