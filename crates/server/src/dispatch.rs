//! Entry point of every request, from any API: session, queue, router. A waiting request is a
//! future; dropping it leaves nothing behind. The audit compares the predictions with the
//! responses.

mod active_request;
pub mod audit;
mod dispatcher;
mod health_log;
pub mod queue;
mod queue_metadata;
mod session;
mod stored_responses;
mod timed_router;

pub use active_request::ActiveRequest;
pub use dispatcher::{DispatchError, Dispatcher};
pub use health_log::{log_health_changes, log_tick_changes};
pub use session::{RequestSession, SessionAffinity, SessionRouting};
pub use stored_responses::{RESPONSE_RULES, ResponseReference};
pub use timed_router::{RoutingTimes, TimedRouter};

#[cfg(test)]
mod tests;
