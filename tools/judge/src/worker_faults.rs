//! Faults of the first worker of a fleet, and what they cost.

use serde::Serialize;

/// Number of the worker with the fault.
pub(crate) const FAULTY_WORKER: usize = 0;
/// Length of the first part of a fault, in which the router collects evidence, in milliseconds.
const EARLY_MS: f64 = 5000.0;
/// Time after the start of a fault from which the worker should receive almost no requests.
const LATE_MS: f64 = 15_000.0;
/// Length of the window in which the repaired worker must receive requests again.
const RECOVERY_WINDOW_MS: f64 = 5000.0;
/// Part of its fair share that the repaired worker must receive in the window.
const RECOVERY_SHARE: f64 = 0.5;

/// Fault of a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum WorkerFault {
    /// The worker leaves the fleet, and returns with an empty cache.
    Loss,
    /// The worker answers each new request at once, without content.
    ImmediateResponse {
        /// HTTP status of the answers.
        status: u16,
    },
    /// The worker accepts requests and computes nothing.
    Hang,
    /// The worker is slower than its GPU.
    Slowdown {
        /// Factor on every duration.
        factor: f64,
    },
}

/// Period in which the first worker has a fault, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FaultPeriod {
    /// The fault.
    pub(crate) fault: WorkerFault,
    /// Start.
    pub(crate) start_s: f64,
    /// End.
    pub(crate) end_s: f64,
}

/// Request that was sent to a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentRequest {
    /// Time in milliseconds.
    pub(crate) time_ms: f64,
    /// Number of the worker.
    pub(crate) worker: usize,
}

/// Observations from which [`FaultMetrics`] are computed.
#[derive(Debug, Default)]
pub(crate) struct FaultLog {
    /// All requests, in order of time.
    pub(crate) sent: Vec<SentRequest>,
    /// Arrival times of failed requests, in milliseconds.
    pub(crate) failed_ms: Vec<f64>,
    /// Number of the worker of each ejection.
    pub(crate) ejected: Vec<usize>,
}

/// Metrics of a fault.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct FaultMetrics {
    /// Share of failed requests among those of the period.
    pub(crate) failed_share: f64,
    /// Share of the requests of the first 5 s that the faulty worker received.
    pub(crate) early_share: f64,
    /// Share of the requests after 15 s that the faulty worker received.
    pub(crate) late_share: f64,
    /// Number of ejections of other workers.
    pub(crate) healthy_ejections: usize,
    /// Time from the end of the fault until the worker receives at least half of its fair share
    /// over 5 s, in seconds; infinite if it does not return.
    pub(crate) recovery_s: f64,
}

impl FaultMetrics {
    /// Computes the metrics of a period in a fleet of `workers`.
    pub(crate) fn new(period: FaultPeriod, workers: usize, log: &FaultLog) -> Self {
        let start_ms = period.start_s * 1e3;
        let end_ms = period.end_s * 1e3;
        let failed = log.failed_ms.iter();
        let failed = failed.filter(|time_ms| (start_ms..end_ms).contains(*time_ms));
        let fair_share = 1.0 / workers as f64;
        let is_back = |time_ms: f64| {
            log.share(time_ms, time_ms + RECOVERY_WINDOW_MS) >= RECOVERY_SHARE * fair_share
        };
        let recovered_ms = log
            .times_of_faulty_worker()
            .find(|time_ms| *time_ms >= end_ms && is_back(*time_ms));
        Self {
            failed_share: failed.count() as f64 / log.count(start_ms, end_ms).max(1) as f64,
            early_share: log.share(start_ms, end_ms.min(start_ms + EARLY_MS)),
            late_share: log.share(start_ms + LATE_MS, end_ms),
            healthy_ejections: log
                .ejected
                .iter()
                .filter(|worker| **worker != FAULTY_WORKER)
                .count(),
            recovery_s: recovered_ms.map_or(f64::INFINITY, |time_ms| (time_ms - end_ms) / 1e3),
        }
    }
}

impl FaultLog {
    fn between(&self, from_ms: f64, to_ms: f64) -> &[SentRequest] {
        let position = |limit_ms| self.sent.partition_point(|sent| sent.time_ms < limit_ms);
        let from = position(from_ms);
        &self.sent[from..position(to_ms).max(from)]
    }

    fn count(&self, from_ms: f64, to_ms: f64) -> usize {
        self.between(from_ms, to_ms).len()
    }

    /// Returns the share of requests that the faulty worker received.
    fn share(&self, from_ms: f64, to_ms: f64) -> f64 {
        let sent = self.between(from_ms, to_ms);
        let faulty = sent.iter().filter(|sent| sent.worker == FAULTY_WORKER);
        faulty.count() as f64 / sent.len().max(1) as f64
    }

    fn times_of_faulty_worker(&self) -> impl Iterator<Item = f64> {
        let faulty = self.sent.iter();
        let faulty = faulty.filter(|sent| sent.worker == FAULTY_WORKER);
        faulty.map(|sent| sent.time_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_return_follow_sent_requests() {
        let period = FaultPeriod {
            fault: WorkerFault::Hang,
            start_s: 10.0,
            end_s: 40.0,
        };
        // One request per second. The faulty one of two workers receives every other request until
        // second 15, and again from second 45.
        let sent = (0..60).map(|second| SentRequest {
            time_ms: f64::from(second) * 1e3,
            worker: usize::from(second % 2 == 1 || (15..45).contains(&second)),
        });
        let log = FaultLog {
            sent: sent.collect(),
            failed_ms: vec![10_000.0, 12_000.0, 14_000.0],
            ejected: vec![0, 1],
        };
        let metrics = FaultMetrics::new(period, 2, &log);
        assert_eq!(metrics.failed_share, 0.1);
        assert_eq!(metrics.early_share, 0.6);
        assert_eq!(metrics.late_share, 0.0);
        assert_eq!(metrics.healthy_ejections, 1);
        assert_eq!(metrics.recovery_s, 6.0);
        let empty = FaultMetrics::new(period, 2, &FaultLog::default());
        assert_eq!(empty.recovery_s, f64::INFINITY);
    }
}
