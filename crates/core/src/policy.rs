//! Routing policy: chooses the cheapest candidate for a request. The choice is a pure function of
//! the input, the candidates, the settings and a random number generator. Each policy is one file
//! with a cost function. `choose` selects the candidate with the lowest cost. `conditional_prefill`
//! decides between a remote and a local prefill.

mod candidate;
mod choose;
mod conditional_prefill;
mod cost;
mod eligibility;
mod in_flight;
mod least_loaded;
mod linear;
mod lmetric;
mod overload;
mod overrides;
mod pins;
mod round_robin;
mod seconds;
mod settings;
mod sticky;
mod subset;
mod weights;

pub use candidate::{Candidate, PolicyInput};
pub use choose::{Choice, choose, costs, seconds_cost};
pub use conditional_prefill::{
    ConditionalPrefillConfig, ConditionalPrefillInputs, ConditionalPrefillPolicy,
    DisaggregationConfig, LocalPrefillReason, PhaseCosts,
};
pub use cost::{Cost, CostTerm, CostTerms, PolicyTerms};
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
pub use seconds::SecondsSettings;
pub use settings::{PolicyName, PolicySettings, RoutingPolicy};
pub use sticky::StickySettings;
pub use subset::EndpointSubset;
pub use weights::Weights;

#[cfg(test)]
mod tests;
