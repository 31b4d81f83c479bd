//! Settings of starting and stopping.

use serde::{Deserialize, Serialize};

use crate::settings::Period;

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
        Self { min_initial_workers: 1, event_sources_deadline: Period::seconds(30) }
    }
}

/// `drain:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DrainConfig {
    /// How long open exchanges may go on after the signal to stop; 0s cuts them at once.
    pub deadline: Period,
}

impl Default for DrainConfig {
    fn default() -> Self {
        Self { deadline: Period::seconds(30) }
    }
}
