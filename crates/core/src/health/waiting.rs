//! Requests that wait for their first content, and the time after which they are overdue.

use std::time::{Duration, Instant};

use super::pool::TIME_SHARE;

/// A request is overdue after this multiple of its expected time to the first content.
const OVERDUE_FACTOR: f64 = 4.0;

/// Limits of the time after which a request is overdue.
const MIN_OVERDUE_AFTER: Duration = Duration::from_secs(3);
const MAX_OVERDUE_AFTER: Duration = Duration::from_secs(600);

/// A cancelled request counts as a failure if it waited for this multiple of its expected time, and
/// for at least [`MIN_CANCELLED_WAIT`].
const CANCELLED_FACTOR: f64 = 2.0;
const MIN_CANCELLED_WAIT: Duration = Duration::from_secs(1);

/// Maximum of a [`DelayFactor`].
const MAX_DELAY: f64 = 4.0;

/// Shorter expected times count as this time in a [`DelayFactor`].
const MIN_EXPECTED: Duration = Duration::from_millis(750);

/// Request without content so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitingRequest {
    pub(super) sent_at: Instant,
    pub(super) expected: Duration,
    pub(super) has_response: bool,
    pub(super) is_overdue: bool,
}

/// Recent maximum of the ratio of observed to expected times to the first content of a pool, at
/// least 1. It extends the limits: as long as the latency model has learned little, expected times
/// may be far too short.
#[derive(Clone, Copy, Debug)]
pub(super) struct DelayFactor(f64);

impl WaitingRequest {
    /// Creates a request whose first content is expected after `expected`.
    pub(super) fn new(expected: Duration, now: Instant) -> Self {
        Self {
            sent_at: now,
            expected,
            has_response: false,
            is_overdue: false,
        }
    }

    /// Returns whether the request is overdue now and was not before. Its rank made progress last at
    /// `progress_at`.
    pub(super) fn becomes_overdue(
        &mut self,
        progress_at: Option<Instant>,
        delay: DelayFactor,
        now: Instant,
    ) -> bool {
        let since = progress_at.map_or(self.sent_at, |at| at.max(self.sent_at));
        let limit = delay.extend(self.expected, OVERDUE_FACTOR, MIN_OVERDUE_AFTER);
        let is_overdue = now.saturating_duration_since(since) > limit;
        is_overdue && !std::mem::replace(&mut self.is_overdue, true)
    }

    pub(super) fn is_cancelled_late(&self, delay: DelayFactor, now: Instant) -> bool {
        let limit = delay.extend(self.expected, CANCELLED_FACTOR, MIN_CANCELLED_WAIT);
        let waited = now.saturating_duration_since(self.sent_at);
        !self.is_overdue && waited >= limit
    }
}

impl Default for DelayFactor {
    fn default() -> Self {
        Self(1.0)
    }
}

impl DelayFactor {
    /// Adds a request that was delivered.
    pub(super) fn add(&mut self, observed: Duration, expected: Duration) {
        let ratio = observed.as_secs_f64() / expected.max(MIN_EXPECTED).as_secs_f64();
        let ratio = ratio.clamp(1.0, MAX_DELAY);
        let mean = self.0 + TIME_SHARE * (ratio - self.0);
        self.0 = ratio.max(mean);
    }

    /// Returns `factor` times an expected time, but at least `min`, for a pool with these delays.
    fn extend(self, expected: Duration, factor: f64, min: Duration) -> Duration {
        let limit = expected.min(MAX_OVERDUE_AFTER).mul_f64(factor).max(min);
        limit.mul_f64(self.0).min(MAX_OVERDUE_AFTER)
    }
}
