//! Routing of one request. [`Router::prepare`] looks up everything that does not depend on load.
//! [`Router::place`] computes the cost of the candidates of each phase and books the best ones in
//! one critical section. Neither waits, and neither fails for a reason that Envoy could not route
//! around. The result is a [`Placement`]: the route, and RAII guards that release everything the
//! request holds.
//!
//! The methods of [`Router`] are grouped by responsibility:
//!
//! - `state`: parts of the router, remote index, overload and health of workers.
//! - `decide`: decisions.
//! - `feedback`: responses, first tokens and predictions of placed requests.
//! - `served`: requests that Envoy sent to another worker.
//! - `parity_checks`: checks of predicted tokens.
//! - `explain`: explanations without side effects.
//! - `external`: bookings of API clients.

mod cache_lookup;
mod context;
mod decide;
mod event_sources;
mod explain;
mod external;
mod feedback;
mod last_block;
mod parity_checks;
mod phase_decider;
mod phase_plan;
mod placement;
mod pools;
mod predictions;
mod ranking;
mod reason;
mod recomputation;
mod remote;
mod request;
mod route;
mod route_builder;
mod served;
mod settings;
mod state;
mod worker_feedback;

pub use context::RoutingContext;
pub use event_sources::{
    EngineSettingsByWorker, EventSources, SharedCommonSettings, SharedSource, SharedWindows,
};
pub use explain::{PhaseExplanation, RouteExplanation, WorkerExplanation};
pub use external::{ExternalBooking, ExternalRouteOptions, WorkerEstimate};
pub use feedback::{ResponseOrigin, TickChanges, WorkerResponse};
pub use last_block::{LastBlockEvidence, LastBlockReuse};
pub use phase_decider::InFlightEstimates;
pub use placement::Placement;
pub use predictions::{PredictorSet, PromptPrediction, RequestPredictions, RoutedPrompts};
pub use reason::Reason;
pub use remote::{RemoteAnswer, RemoteOverlaps, RemoteRank, RemoteRanks};
pub use request::{
    CompletedPrefill, DecodeCapability, PhaseSelection, RequestPriority, RoutePrompt, RouteRequest,
    SharedBlocks,
};
pub use route::{
    ComputingRank, Mode, PhaseAssignment, PrefillRoute, RankEndpoint, Route, RouteError,
    RouteTarget,
};
pub use served::RelocationOutcome;
pub use settings::{LoadTracking, OverloadAction, RouterSettings};
pub use state::Router;
pub use worker_feedback::RouterListener;

#[cfg(test)]
mod tests;
