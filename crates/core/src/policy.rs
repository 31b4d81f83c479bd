//! Routing policy: chooses the cheapest candidate for a request. The choice is a pure function of
//! the input, the candidates, the weights and a random number generator. `cost` computes the cost
//! of one candidate, and `choose` selects one. `conditional_prefill` decides between a remote and a
//! local prefill.

mod candidate;
mod choose;
mod conditional_prefill;
mod cost;
mod eligibility;
mod in_flight;
mod overload;
mod overrides;
mod pins;
mod subset;
mod weights;

pub use candidate::{Candidate, PolicyInput};
pub use choose::{Choice, choose, costs};
pub use conditional_prefill::{
    ConditionalPrefillConfig, ConditionalPrefillInputs, ConditionalPrefillPolicy,
    DisaggregationConfig, LocalPrefillReason,
};
pub use cost::Cost;
pub use eligibility::{
    Constraints, EligibilityError, ExclusionReason, MissingTopologyError, WorkerAvailability,
    eligible_members, exclusion_reasons, taint_preference,
};
pub use in_flight::InFlightEstimate;
pub use overload::{
    LatchMode, OverloadThresholds, OverloadTracker, OverloadedWorkers, RankOccupancy,
};
pub use overrides::RouterOverrides;
pub use pins::{RequestedWorkers, WorkerPin};
pub use subset::EndpointSubset;
pub use weights::Weights;

#[cfg(test)]
mod tests;
