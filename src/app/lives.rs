//! What tells one life of a worker from the next: what was found out of the one need not hold for the other.

use std::collections::HashSet;
use std::time::Duration;

use crate::router::Router;
use crate::worker::{Endpoint, Worker, WorkerId, WorkerRank};

/// Who did not answer, or may be another engine than before, is asked again so soon: a worker that starts is asked when it
/// serves.
pub(super) const SOON: Duration = Duration::from_secs(5);

/// How long a worker that may be another engine is left alone, so long after it was asked last: one that seems to begin
/// anew again and again is not asked without a pause.
pub(super) fn pause(since: Option<Duration>) -> Duration {
    since.map_or(Duration::ZERO, |since| SOON.saturating_sub(since))
}

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
            out: out.contains(&worker.id),
            restarts,
        }
    }

    /// Whether it may be another engine than before: it came back, began anew, or is somewhere else.
    pub(super) fn is_another_than(&self, before: &Life) -> bool {
        let back = before.out && !self.out;
        back || before.restarts != self.restarts || before.endpoint != self.endpoint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_begins_anew_again_and_again_is_left_alone_a_little() {
        let seconds = Duration::from_secs;
        let cases = [
            (None, 0),
            (Some(0), 5),
            (Some(2), 3),
            (Some(5), 0),
            (Some(300), 0),
        ];
        for (since, expected) in cases {
            assert_eq!(pause(since.map(seconds)), seconds(expected), "{since:?}");
        }
    }
}
