//! Times at which a worker is queried: when it joins, when the engine behind it may have been
//! replaced or restarted, so that earlier findings may not hold, and periodically.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use warmroute_core::router::Router;
use warmroute_core::worker::{Worker, WorkerEndpoint, WorkerId, WorkerRank};

/// Delay before a worker is queried again after it did not respond or may have been restarted, so
/// that a starting engine is queried soon after it begins to serve. It limits the rate for an engine
/// that restarts repeatedly.
const REQUERY_DELAY: Duration = Duration::from_secs(5);

/// State of a worker that changes with a restart.
#[derive(Debug)]
pub(super) struct WorkerIncarnation {
    endpoint: WorkerEndpoint,
    /// True if the worker is ejected.
    pub(super) is_ejected: bool,
    /// Engine restarts observed in its KV events.
    restarts: u64,
}

impl WorkerIncarnation {
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
    fn may_differ_from(&self, before: &WorkerIncarnation) -> bool {
        let is_readmitted = before.is_ejected && !self.is_ejected;
        is_readmitted || before.restarts != self.restarts || before.endpoint != self.endpoint
    }
}

/// Schedule of the queries of one worker. A new worker is due at once.
#[derive(Debug, Default)]
pub(super) struct WorkerSchedule {
    incarnation: Option<WorkerIncarnation>,
    last_query: Option<Instant>,
    next_query: Option<Instant>,
    is_running: bool,
}

impl WorkerSchedule {
    /// Records the current incarnation. Returns whether the engine may have been replaced, and then
    /// schedules a query.
    pub(super) fn observe(&mut self, incarnation: WorkerIncarnation) -> bool {
        let before = self.incarnation.take();
        let may_differ = before.is_some_and(|before| incarnation.may_differ_from(&before));
        self.incarnation = Some(incarnation);
        if may_differ {
            self.advance_next_query(self.last_query.map(|last| last + REQUERY_DELAY));
        }
        may_differ
    }

    /// Returns whether the worker is to be queried now.
    pub(super) fn is_due(&self) -> bool {
        !self.is_running && self.next_query.is_none_or(|next| next <= Instant::now())
    }

    /// Returns whether the worker was queried before.
    pub(super) fn was_queried(&self) -> bool {
        self.last_query.is_some()
    }

    /// Records the start of a query, and schedules the next one.
    pub(super) fn start(&mut self, interval: Duration) {
        let now = Instant::now();
        self.last_query = Some(now);
        self.next_query = Some(now + interval);
        self.is_running = true;
    }

    /// Records the end of a query. After a transient failure, the next one follows after a short pause.
    pub(super) fn finish(&mut self, is_transient_failure: bool) {
        self.is_running = false;
        if is_transient_failure {
            self.next_query = Some(Instant::now() + REQUERY_DELAY);
        }
    }

    /// Moves the next query to `latest`, if it is later. `None` means now.
    fn advance_next_query(&mut self, latest: Option<Instant>) {
        // `None` is the earliest time.
        self.next_query = self.next_query.min(latest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(300);

    fn incarnation(restarts: u64) -> WorkerIncarnation {
        WorkerIncarnation {
            endpoint: "127.0.0.1:8000".parse().unwrap(),
            is_ejected: false,
            restarts,
        }
    }

    fn delay(schedule: &WorkerSchedule) -> Duration {
        schedule.next_query.unwrap() - schedule.last_query.unwrap()
    }

    #[test]
    fn query_rate_is_limited_during_repeated_restarts() {
        let mut schedule = WorkerSchedule::default();
        assert!(!schedule.observe(incarnation(0)), "the worker is new");
        assert!(schedule.is_due());
        schedule.start(INTERVAL);
        schedule.finish(false);
        assert_eq!(delay(&schedule), INTERVAL);
        for restarts in 1..4 {
            assert!(schedule.observe(incarnation(restarts)));
            assert!(!schedule.is_due(), "the worker was queried a moment ago");
            assert_eq!(delay(&schedule), REQUERY_DELAY);
        }
        schedule.last_query = Some(Instant::now() - REQUERY_DELAY);
        assert!(schedule.observe(incarnation(4)));
        assert!(schedule.is_due());
    }

    #[test]
    fn worker_restarted_during_query_is_queried_again() {
        let mut schedule = WorkerSchedule::default();
        schedule.observe(incarnation(0));
        schedule.start(INTERVAL);
        schedule.observe(incarnation(1));
        assert!(!schedule.is_due(), "a query is running");
        schedule.finish(false);
        assert_eq!(delay(&schedule), REQUERY_DELAY);
    }

    #[test]
    fn only_transient_failure_shortens_query_delay() {
        for is_transient in [false, true] {
            let mut schedule = WorkerSchedule::default();
            schedule.start(INTERVAL);
            schedule.finish(is_transient);
            assert_eq!(delay(&schedule) < INTERVAL, is_transient);
        }
    }
}
