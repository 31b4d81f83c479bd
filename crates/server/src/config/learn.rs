//! `engines.discovery:`: queries to engines for their settings.

use serde::{Deserialize, Serialize};

use warmroute_settings::{Period, Problem};

/// The `engines.discovery:` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LearnConfig {
    /// True to query each worker for its cache settings and the addresses of its event sources.
    pub enabled: bool,
    /// Interval between two queries to one worker.
    pub interval: Period,
}

impl Default for LearnConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            interval: Period::seconds(60),
        }
    }
}

impl LearnConfig {
    /// Checks the values.
    pub fn problems(&self) -> Vec<Problem> {
        let zero = self.interval.get().is_zero();
        let text = "asking every 0s would never rest; the default is 1m";
        zero.then(|| Problem::of("interval", text))
            .into_iter()
            .collect()
    }
}
