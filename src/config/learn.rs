//! `learn:`: asking engines for what they know best.

use serde::{Deserialize, Serialize};

use crate::settings::{Period, Problem};

/// `learn:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LearnConfig {
    /// Whether workers are asked for the settings of their caches and where their events come from.
    pub enabled: bool,
    /// How often each is asked again.
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
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let zero = self.interval.get().is_zero();
        let text = "asking every 0s would never rest; the default is 1m";
        zero.then(|| Problem::of("interval", text))
            .into_iter()
            .collect()
    }
}
