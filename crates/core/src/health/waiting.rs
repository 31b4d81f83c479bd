//! Requests that wait for their first content, and the time after which they are overdue.

use std::time::{Duration, Instant};

/// A request is overdue after this multiple of its expected time to the first content.
const OVERDUE_FACTOR: f64 = 4.0;

/// Limits of the time after which a request is overdue.
const MIN_OVERDUE_AFTER: Duration = Duration::from_secs(3);
const MAX_OVERDUE_AFTER: Duration = Duration::from_secs(600);

/// A cancelled request counts as a failure if it waited for this multiple of its expected time, and
/// for at least [`MIN_CANCELLED_WAIT`].
const CANCELLED_FACTOR: f64 = 2.0;
const MIN_CANCELLED_WAIT: Duration = Duration::from_secs(1);

/// Times that are shorter say nothing about the quality of estimates.
const MIN_COMPARED: Duration = Duration::from_millis(750);

/// Limits of the ratio of observed to estimated times.
const MIN_RATIO: f64 = 0.1;
const MAX_RATIO: f64 = 4.0;

/// The recent maximum of the ratio decays by this factor with each delivery.
const RATIO_RETENTION: f64 = 0.97;

/// Weight of one request in the mean times of a group.
const TIME_SHARE: f64 = 0.1;

/// Request without content so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitingRequest {
    pub(super) sent_at: Instant,
    /// Time to the first content, as the latency model estimates it.
    pub(super) estimate: Duration,
    pub(super) has_response: bool,
    pub(super) is_overdue: bool,
}

/// Times to the first content of the requests that a group delivered.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ContentTimes {
    mean: MeanTime,
    /// Recent maximum of the ratio of observed to estimated times. The latency model may have learned
    /// little so far, and it learns nothing from responses that are one document.
    ratio: Option<f64>,
}

impl WaitingRequest {
    pub(super) fn new(estimate: Duration, now: Instant) -> Self {
        Self {
            sent_at: now,
            estimate,
            has_response: false,
            is_overdue: false,
        }
    }

    /// Returns whether the request is overdue now and was not before. Its rank made progress last at
    /// `progress_at`.
    pub(super) fn mark_if_overdue(
        &mut self,
        progress_at: Option<Instant>,
        times: ContentTimes,
        now: Instant,
    ) -> bool {
        let since = progress_at.map_or(self.sent_at, |at| at.max(self.sent_at));
        let limit = times.limit(self.estimate, OVERDUE_FACTOR, MIN_OVERDUE_AFTER);
        let is_overdue = now.saturating_duration_since(since) > limit;
        is_overdue && !std::mem::replace(&mut self.is_overdue, true)
    }

    pub(super) fn is_cancelled_late(&self, times: ContentTimes, now: Instant) -> bool {
        let limit = times.limit(self.estimate, CANCELLED_FACTOR, MIN_CANCELLED_WAIT);
        let waited = now.saturating_duration_since(self.sent_at);
        waited >= limit
    }
}

impl ContentTimes {
    /// Adds a request that was delivered.
    pub(super) fn add(&mut self, observed: Duration, estimate: Duration) {
        self.mean.add(observed);
        if observed.max(estimate) >= MIN_COMPARED {
            let ratio = observed.as_secs_f64() / estimate.max(MIN_COMPARED).as_secs_f64();
            let recent = self.ratio.map_or(ratio, |recent| RATIO_RETENTION * recent);
            self.ratio = Some(recent.max(ratio).clamp(MIN_RATIO, MAX_RATIO));
        }
    }

    /// Returns whether a delivery was observed.
    pub(super) fn is_observed(self) -> bool {
        self.mean.get().is_some()
    }

    /// Returns the expected time to the first content of a request with this estimate.
    fn expected(self, estimate: Duration) -> Duration {
        let corrected = estimate
            .min(MAX_OVERDUE_AFTER)
            .mul_f64(self.ratio.unwrap_or(1.0));
        corrected.max(self.mean.get().unwrap_or_default())
    }

    /// Returns `factor` times the expected time, but at least `min`.
    fn limit(self, estimate: Duration, factor: f64, min: Duration) -> Duration {
        let limit = self.expected(estimate).mul_f64(factor);
        limit.clamp(min, MAX_OVERDUE_AFTER)
    }
}

/// Exponential moving average of a time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MeanTime(Option<f64>);

impl MeanTime {
    pub(super) fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        let mean = self.0.get_or_insert(seconds);
        *mean += TIME_SHARE * (seconds - *mean);
    }

    pub(super) fn get(self) -> Option<Duration> {
        Duration::try_from_secs_f64(self.0?).ok()
    }
}
