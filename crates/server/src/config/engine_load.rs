//! `engines.load`: scrapes of the engines' own load gauges.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_settings::{DurationSetting, Problem};

/// Smallest allowed interval. Engines update their counters at most once per step.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

/// The `engines.load` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EngineLoadConfig {
    /// True to read running requests, waiting requests and KV usage from each worker's metrics page.
    pub enabled: bool,
    /// Interval between two scrapes of one worker. It is longer with more than 200 workers per
    /// second of the interval.
    pub interval: DurationSetting,
}

impl Default for EngineLoadConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            interval: DurationSetting::seconds(1),
        }
    }
}

impl EngineLoadConfig {
    /// Checks the values.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.interval.get() < MIN_INTERVAL {
            let text = format!(
                "`interval` is {}, but must be at least 100ms; the default is 1s. To scrape no engine, set `enabled: false`",
                self.interval
            );
            problems.push(Problem::of("interval", text));
        }
        problems
    }
}
