//! Incarnation of a worker: detects that the engine behind it may have been replaced or restarted,
//! so that earlier findings may not hold.

use std::collections::HashSet;
use std::time::Duration;

use warmroute_core::router::Router;
use warmroute_core::worker::{Worker, WorkerEndpoint, WorkerId, WorkerRank};

/// Delay before a worker is queried again after it did not respond or may have been restarted, so
/// that a starting engine is queried soon after it begins to serve.
pub(super) const REQUERY_DELAY: Duration = Duration::from_secs(5);

/// Returns the delay before a possibly restarted worker is queried, given the time since its last
/// query. It limits the rate for an engine that restarts repeatedly.
pub(super) fn requery_delay(since: Option<Duration>) -> Duration {
    since.map_or(Duration::ZERO, |since| REQUERY_DELAY.saturating_sub(since))
}

/// State of a worker that changes with a restart.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Incarnation {
    endpoint: WorkerEndpoint,
    /// True if the worker is ejected.
    pub(super) is_ejected: bool,
    /// Engine restarts observed in its KV events.
    restarts: u64,
}

/// Returns the ejected workers.
pub(super) fn ejected_workers(router: &Router) -> HashSet<WorkerId> {
    router.ejected_workers().into_iter().collect()
}

impl Incarnation {
    /// Returns the current incarnation of a worker.
    pub(super) fn of(worker: &Worker, router: &Router, ejected: &HashSet<WorkerId>) -> Self {
        let facts = |rank| {
            router.sources().facts(WorkerRank {
                worker: worker.id,
                rank,
            })
        };
        let restarts = worker
            .ranks
            .iter()
            .filter_map(facts)
            .map(|facts| facts.restarts)
            .sum();
        Self {
            endpoint: worker.endpoint,
            is_ejected: ejected.contains(&worker.id),
            restarts,
        }
    }

    /// Returns whether the engine may have been replaced since `before`: the worker was readmitted,
    /// restarted, or changed its endpoint.
    pub(super) fn may_differ_from(&self, before: &Incarnation) -> bool {
        let is_readmitted = before.is_ejected && !self.is_ejected;
        is_readmitted || before.restarts != self.restarts || before.endpoint != self.endpoint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_restarts_delay_queries() {
        let seconds = Duration::from_secs;
        let cases = [
            (None, 0),
            (Some(0), 5),
            (Some(2), 3),
            (Some(5), 0),
            (Some(300), 0),
        ];
        for (since, expected) in cases {
            assert_eq!(
                requery_delay(since.map(seconds)),
                seconds(expected),
                "{since:?}"
            );
        }
    }
}
