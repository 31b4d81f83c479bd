//! Clock and policy of a predictor.

use std::time::Instant;

use super::eviction_age::{EvictionAge, MeanEvictionAge};
use super::policy::{EvictionPolicy, TtlPolicy};

/// Clock and policy shared by all ranks.
pub(super) struct PredictorRules {
    pub(super) policy: EvictionPolicy,
    /// Whether the ranks also publish events.
    pub(super) beside_events: bool,
    pub(super) start: Instant,
    pub(super) clock: Box<dyn Fn() -> Instant + Send + Sync>,
    /// Age of the blocks that the ranks evicted.
    pub(super) eviction_age: MeanEvictionAge,
}

impl PredictorRules {
    /// Returns the mean age of recently evicted blocks.
    pub(super) fn eviction_age(&self) -> EvictionAge {
        self.eviction_age.at(self.expiry_step())
    }

    /// Returns the number of complete time steps since the start.
    pub(super) fn current_step(&self) -> u64 {
        let passed = (self.clock)().saturating_duration_since(self.start);
        (passed.as_nanos() / TtlPolicy::STEP.as_nanos()) as u64
    }

    /// Returns the time step at which a block recorded now expires.
    pub(super) fn expiry_step(&self) -> u64 {
        let passed = (self.clock)().saturating_duration_since(self.start);
        passed
            .saturating_add(self.policy.ttl())
            .as_nanos()
            .div_ceil(TtlPolicy::STEP.as_nanos()) as u64
    }
}
