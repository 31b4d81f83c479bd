//! Routing of one request. [`Router::prepare`] looks up everything that does not depend on load.
//! [`Router::place`] computes the cost of the candidates of each phase and books the best ones in
//! one critical section. Neither waits, and neither fails for a reason that Envoy could not route
//! around. The result is a [`Placement`]: the route, and RAII guards that release everything the
//! request holds.

mod cache_lookup;
mod confirm;
mod context;
mod decide;
mod event_sources;
mod explain;
mod external;
mod feedback;
mod held;
mod last_block;
mod listener;
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
mod remote_query;
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
pub use listener::RouterListener;
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

#[cfg(test)]
mod tests;
