//! Settings of starting and stopping.

use serde::{Deserialize, Serialize};

use crate::settings::{Period, Problem};

/// `readiness:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReadinessConfig {
    /// Workers the fleet must have before we call ourselves ready.
    pub min_initial_workers: u32,
    /// How long readiness waits for the event sources to catch up; afterwards we serve with what we know.
    pub event_sources_deadline: Period,
}

impl Default for ReadinessConfig {
    fn default() -> Self {
        Self {
            min_initial_workers: 1,
            event_sources_deadline: Period::seconds(30),
        }
    }
}

/// `drain:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DrainConfig {
    /// How long we serve as before after the signal to stop, new exchanges too, while those who ask for our health hear that
    /// we are leaving and a successor takes over; 0s not at all.
    pub grace: Period,
    /// How long open exchanges may go on after that; 0s cuts them at once.
    pub deadline: Period,
}

impl Default for DrainConfig {
    fn default() -> Self {
        // Longer than a successor needs to load its tokenizers, and than gateways need to hear of endpoints that leave.
        Self {
            grace: Period::seconds(5),
            deadline: Period::seconds(30),
        }
    }
}

/// `reload:`: how the configuration file is followed while we run. SIGHUP reads it in any case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReloadConfig {
    /// Read it when it changes.
    pub watch: bool,
    /// How often it is read even though nothing was heard of it: the net below lost notifications.
    pub poll: Period,
    /// How long it must be quiet before it is read, so that a write in pieces is read once.
    pub debounce: Period,
}

impl Default for ReloadConfig {
    fn default() -> Self {
        Self {
            watch: true,
            poll: Period::seconds(5),
            debounce: Period::millis(100),
        }
    }
}

impl ReloadConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let zero = self.poll.get().is_zero();
        let text = "polling every 0s would never rest; the default is 5s";
        zero.then(|| Problem::of("poll", text))
            .into_iter()
            .collect()
    }
}
