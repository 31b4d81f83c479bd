//! The properties of a request that decide its class and its order in the queue.

use std::hash::{DefaultHasher, Hash, Hasher};

use warmroute_core::queue::{QueueLane, QueueMetadata};
use warmroute_core::router::{RouteRequest, Router, RoutingContext};
use warmroute_core::worker::WorkerRank;

/// Returns the queue metadata of a request.
pub(super) fn queue_metadata(router: &Router, context: &RoutingContext) -> QueueMetadata {
    let request = context.request();
    QueueMetadata {
        class: request.priority.class.clone(),
        lane: queue_lane(request),
        strict_priority: request.priority.strict,
        priority_jump: request.priority.jump,
        prompt_tokens: request.prompt.tokens(),
        cached_tokens: router.best_cached_tokens(context),
    }
}

/// Returns the lane of a request. Requests that compete for different workers do not block each
/// other.
fn queue_lane(request: &RouteRequest) -> QueueLane {
    let constraints = &request.constraints;
    let pinned = constraints.pin.and_then(|pin| {
        Some(WorkerRank {
            worker: pin.worker,
            rank: pin.rank?,
        })
    });
    if let Some(rank) = pinned
        .or(constraints.storing_rank)
        .or(constraints.bound_rank)
    {
        return QueueLane::Pinned(rank);
    }
    let mut hasher = DefaultHasher::new();
    request.model.hash(&mut hasher);
    constraints.pin.map(|pin| pin.worker).hash(&mut hasher);
    constraints.allowed.hash(&mut hasher);
    constraints.pool.hash(&mut hasher);
    constraints.endpoints.hash(&mut hasher);
    constraints.required_taints.hash(&mut hasher);
    request
        .prefill_pin
        .map(|pin| (pin.worker, pin.rank))
        .hash(&mut hasher);
    QueueLane::WorkerSet(hasher.finish())
}
