//! Queued requests, and the properties that define their class and their order.

use std::time::Instant;

use super::classes::ClassId;
use crate::worker::WorkerRank;

/// Set of workers that a request competes for. Requests of different lanes do not block each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QueueLane {
    /// Any worker.
    #[default]
    AnyWorker,
    /// One worker rank.
    Pinned(WorkerRank),
    /// A set of workers, by a hash of the constraints that select it.
    WorkerSet(u64),
}

/// Properties of a request that define its class and order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueueMetadata {
    /// Class or class family that the request names.
    pub class: Option<String>,
    /// Workers that it competes for.
    pub lane: QueueLane,
    /// Higher values go first, regardless of the policy.
    pub strict_priority: i64,
    /// Priority boost within the policy; negative values count as 0.
    pub priority_jump: f64,
    /// Length of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// Cached prompt tokens on the worker that has most.
    pub cached_tokens: u64,
}

impl QueueMetadata {
    /// Returns the prompt tokens that no worker has cached.
    pub fn uncached_tokens(&self) -> u64 {
        self.prompt_tokens.saturating_sub(self.cached_tokens)
    }

    /// Returns the tokens that the request takes from the quantum of its class.
    pub fn cost(&self) -> u64 {
        self.uncached_tokens().max(1)
    }
}

/// Queued request.
#[derive(Clone, Debug)]
pub struct QueueEntry<T> {
    /// Properties of the request.
    pub metadata: QueueMetadata,
    /// Class that it waits in.
    pub class: ClassId,
    /// Arrival in the queue.
    pub arrived_at: Instant,
    /// The request itself.
    pub payload: T,
}
