//! Reachability of the workers: whether they answer requests through Envoy and queries of this
//! process.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::RequestOutcome;
use crate::worker::WorkerId;

/// A worker that answered before counts as unreachable if it does not answer for this time.
const MIN_FAILING_TIME: Duration = Duration::from_secs(5);

/// Last answers and failures of each worker.
#[derive(Debug, Default)]
pub struct ReachabilityTable(Mutex<BTreeMap<WorkerId, ReachabilityHistory>>);

#[derive(Clone, Copy, Debug, Default)]
struct ReachabilityHistory {
    answered_at: Option<Instant>,
    /// First failure since the last answer.
    failing_since: Option<Instant>,
    failed_at: Option<Instant>,
}

impl ReachabilityTable {
    /// Records whether a worker answered. Any response is an answer.
    pub fn record(&self, worker: WorkerId, has_answered: bool, now: Instant) {
        let mut table = self.0.lock();
        let history = table.entry(worker).or_default();
        if has_answered {
            history.answered_at = Some(now);
            history.failing_since = None;
        } else {
            history.failing_since.get_or_insert(now);
            history.failed_at = Some(now);
        }
    }

    /// Records the outcome of a request.
    pub fn record_outcome(&self, worker: WorkerId, outcome: RequestOutcome, now: Instant) {
        match outcome {
            RequestOutcome::Unreachable => self.record(worker, false, now),
            RequestOutcome::Delivered
            | RequestOutcome::ServerError
            | RequestOutcome::Rejected
            | RequestOutcome::Empty
            | RequestOutcome::NoOutput
            | RequestOutcome::Overloaded => self.record(worker, true, now),
            RequestOutcome::NoResponse
            | RequestOutcome::NoContent
            | RequestOutcome::Cancelled
            | RequestOutcome::Inconclusive => {}
        }
    }

    /// Removes all workers but those for which `is_member` returns true.
    pub fn retain(&self, is_member: impl Fn(WorkerId) -> bool) {
        self.0.lock().retain(|worker, _| is_member(*worker));
    }

    /// Returns the unreachable workers, and the time since the first failure.
    pub fn unreachable(&self, now: Instant) -> BTreeMap<WorkerId, Duration> {
        let table = self.0.lock();
        table
            .iter()
            .filter_map(|(worker, history)| {
                let since = history.unreachable_since()?;
                Some((*worker, now.saturating_duration_since(since)))
            })
            .collect()
    }
}

impl ReachabilityHistory {
    fn unreachable_since(self) -> Option<Instant> {
        let since = self.failing_since?;
        let failed_at = self.failed_at?;
        let is_long = self.answered_at.is_none_or(|answered| {
            failed_at.saturating_duration_since(answered) >= MIN_FAILING_TIME
        });
        is_long.then_some(since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: WorkerId = WorkerId(1);

    /// Records answers and failures at these seconds. Returns the seconds for which the worker is unreachable at
    /// second 100.
    fn unreachable_seconds(answers: &[(u64, bool)]) -> Option<u64> {
        let table = ReachabilityTable::default();
        let start = Instant::now();
        let at = |second| start + Duration::from_secs(second);
        for (second, has_answered) in answers {
            table.record(WORKER, *has_answered, at(*second));
        }
        let unreachable = table.unreachable(at(100));
        unreachable.get(&WORKER).map(Duration::as_secs)
    }

    #[test]
    fn worker_without_any_answer_is_unreachable() {
        assert_eq!(unreachable_seconds(&[]), None);
        assert_eq!(unreachable_seconds(&[(40, false)]), Some(60));
        assert_eq!(unreachable_seconds(&[(40, false), (41, false)]), Some(60));
    }

    #[test]
    fn one_failure_between_answers_has_no_effect() {
        assert_eq!(unreachable_seconds(&[(40, true), (41, false)]), None);
        let failing = [(40, true), (41, false), (46, false)];
        assert_eq!(unreachable_seconds(&failing), Some(59));
        let again = [(40, true), (41, false), (46, false), (47, true)];
        assert_eq!(unreachable_seconds(&again), None);
    }

    #[test]
    fn response_of_any_status_is_an_answer() {
        let table = ReachabilityTable::default();
        let now = Instant::now();
        table.record_outcome(WORKER, RequestOutcome::Unreachable, now);
        assert_eq!(table.unreachable(now).len(), 1);
        table.record_outcome(WORKER, RequestOutcome::Cancelled, now);
        assert_eq!(table.unreachable(now).len(), 1);
        table.record_outcome(WORKER, RequestOutcome::ServerError, now);
        assert_eq!(table.unreachable(now).len(), 0);
        table.record_outcome(WORKER, RequestOutcome::Unreachable, now);
        table.retain(|_| false);
        assert_eq!(table.unreachable(now).len(), 0);
    }
}
