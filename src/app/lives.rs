//! What tells one life of a worker from the next: what was found out of the one need not hold for the other.

use std::collections::HashSet;

use crate::router::Router;
use crate::worker::{Endpoint, Worker, WorkerId, WorkerRank};

/// A worker as it lives now.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Life {
    endpoint: Endpoint,
    /// Whether it is out because it failed.
    pub(super) out: bool,
    /// Lives of its engine that began while its events were heard.
    restarts: u64,
}

/// All who are out.
pub(super) fn out(router: &Router) -> HashSet<WorkerId> {
    router.out().into_iter().collect()
}

impl Life {
    /// How a worker lives.
    pub(super) fn of(worker: &Worker, router: &Router, out: &HashSet<WorkerId>) -> Self {
        let facts = |rank| router.sources().facts(WorkerRank { worker: worker.id, rank });
        let restarts = worker.ranks.iter().filter_map(facts).map(|facts| facts.restarts).sum();
        Self { endpoint: worker.endpoint, out: out.contains(&worker.id), restarts }
    }

    /// Whether it may be another engine than before: it came back, began anew, or is somewhere else.
    pub(super) fn is_another_than(&self, before: &Life) -> bool {
        let back = before.out && !self.out;
        back || before.restarts != self.restarts || before.endpoint != self.endpoint
    }
}
