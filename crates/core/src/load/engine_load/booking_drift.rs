//! Difference between the requests that an engine reports and those that are booked. Only a
//! difference that persists counts, because requests in flight make every single report differ.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Number of successive reports that must show a difference.
const PERSISTENT_REPORTS: u64 = 3;

/// Difference at one report.
#[derive(Clone, Copy, Debug)]
pub(super) struct DriftSample {
    pub(super) received_at: Instant,
    /// Reported requests minus bookings.
    pub(super) drift: i64,
    pub(super) valid_for: Duration,
    /// See [`EngineLoadSample::max_lag`](super::EngineLoadSample::max_lag).
    pub(super) max_lag: Option<Duration>,
}

/// Sliding-window minimum of the differences of a rank. The window covers the last
/// [`PERSISTENT_REPORTS`] reports and the maximum lag of the engine. The first report counts at
/// once, so that a restarted router does not treat busy engines as idle.
#[derive(Debug, Default)]
pub(super) struct BookingDrift {
    /// Samples of the window that may still become the minimum: number of the report, time and
    /// difference. Differences increase from front to back.
    window: VecDeque<WindowEntry>,
    /// Number of the last report.
    last_report: u64,
    /// End of the validity of the last report.
    valid_until: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct WindowEntry {
    report: u64,
    received_at: Instant,
    drift: i64,
}

impl BookingDrift {
    /// Adds a report. If the previous one is not valid any more, the history starts again.
    pub(super) fn record(&mut self, sample: DriftSample) {
        let now = sample.received_at;
        let is_continuous = self.valid_until.is_some_and(|end| end >= now);
        self.valid_until = Some(now + sample.valid_for);
        self.last_report += 1;
        let Some(max_lag) = sample.max_lag.filter(|_| is_continuous) else {
            self.window.clear();
            return self.push(sample);
        };
        let oldest_report = (self.last_report + 1).saturating_sub(PERSISTENT_REPORTS);
        let is_old = |entry: &WindowEntry| {
            let age = now.saturating_duration_since(entry.received_at);
            entry.report < oldest_report && age > max_lag
        };
        while self.window.front().is_some_and(is_old) {
            self.window.pop_front();
        }
        self.push(sample);
    }

    /// Returns the number of requests to assume in addition to the bookings.
    pub(super) fn unbooked_requests(&self) -> u64 {
        let least = self.window.front().map_or(0, |entry| entry.drift);
        u64::try_from(least).unwrap_or(0)
    }

    fn push(&mut self, sample: DriftSample) {
        if sample.max_lag.is_none() {
            return;
        }
        while self
            .window
            .back()
            .is_some_and(|entry| entry.drift >= sample.drift)
        {
            self.window.pop_back();
        }
        self.window.push_back(WindowEntry {
            report: self.last_report,
            received_at: sample.received_at,
            drift: sample.drift,
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use warmroute_property_tests::property_config;

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(1);

    /// Returns the assumed requests after each report.
    fn assumed(drifts: &[i64], max_lag: Option<Duration>) -> Vec<u64> {
        let start = Instant::now();
        let mut history = BookingDrift::default();
        let record = |(index, drift): (usize, &i64)| {
            history.record(DriftSample {
                received_at: start + INTERVAL * index as u32,
                drift: *drift,
                valid_for: 3 * INTERVAL,
                max_lag,
            });
            history.unbooked_requests()
        };
        drifts.iter().enumerate().map(record).collect()
    }

    #[test]
    fn unbounded_lag_disables_correction() {
        assert_eq!(assumed(&[3, 3, 3, 3], None), [0; 4]);
    }

    #[test]
    fn history_starts_again_after_gap() {
        let start = Instant::now();
        let mut history = BookingDrift::default();
        for (seconds, drift) in [(0, 0), (1, 0), (60, 5)] {
            history.record(DriftSample {
                received_at: start + INTERVAL * seconds,
                drift,
                valid_for: 3 * INTERVAL,
                max_lag: Some(Duration::ZERO),
            });
        }
        assert_eq!(history.unbooked_requests(), 5);
    }

    proptest! {
        #![proptest_config(property_config(256))]

        #[test]
        fn result_is_the_minimum_of_the_window(
            drifts in prop::collection::vec(-4_i64..9, 1..60),
            lag in 0_u64..20,
        ) {
            let window = (lag as usize + 1).max(3);
            let expected: Vec<u64> = (1..=drifts.len())
                .map(|end| {
                    let least = drifts[end.saturating_sub(window)..end].iter().min().unwrap();
                    u64::try_from(*least).unwrap_or(0)
                })
                .collect();
            prop_assert_eq!(assumed(&drifts, Some(Duration::from_secs(lag))), expected);
        }
    }
}
