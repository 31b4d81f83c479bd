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
    /// Interval between two scrapes of one worker.
    pub interval: DurationSetting,
    /// Maximum duration of a scrape.
    pub timeout: DurationSetting,
    /// Maximum number of scrapes per second over all workers. With more workers, the interval is
    /// longer.
    pub max_scrapes_per_second: u32,
}

impl Default for EngineLoadConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            interval: DurationSetting::seconds(1),
            timeout: DurationSetting::seconds(1),
            max_scrapes_per_second: 200,
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
        if self.timeout.get().is_zero() {
            let text = "every scrape would time out after 0s; the default is 1s";
            problems.push(Problem::of("timeout", text));
        }
        if self.max_scrapes_per_second == 0 {
            let text = "no engine could be scraped; the default is 200. To scrape no engine, set `enabled: false`";
            problems.push(Problem::of("max_scrapes_per_second", text));
        }
        problems
    }
}
