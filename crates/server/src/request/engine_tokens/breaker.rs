//! Circuit breaker of one server: open after several consecutive failures, half-open for one
//! request after a cooldown, and closed again after a success.

use std::time::{Duration, Instant};

/// Number of consecutive failures that open the breaker.
const MAX_FAILURES: u32 = 3;

/// Time for which an open breaker admits no request.
const COOLDOWN: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CircuitBreaker {
    /// Every request may be sent.
    Closed {
        /// Consecutive failures.
        failures: u32,
    },
    /// No request may be sent until this time.
    Open(Instant),
    /// One request was sent at this time. If it is cancelled, the next one may be sent after
    /// another cooldown.
    HalfOpen(Instant),
}

impl Default for CircuitBreaker {
    fn default() -> Self {
        CircuitBreaker::Closed { failures: 0 }
    }
}

impl CircuitBreaker {
    /// Returns whether a request may be sent now. After a cooldown, the request becomes the one
    /// call of the half-open breaker.
    pub(super) fn admits(&mut self, now: Instant) -> bool {
        let is_due = match *self {
            CircuitBreaker::Closed { .. } => return true,
            CircuitBreaker::Open(until) => now >= until,
            CircuitBreaker::HalfOpen(since) => now.saturating_duration_since(since) >= COOLDOWN,
        };
        if is_due {
            *self = CircuitBreaker::HalfOpen(now);
        }
        is_due
    }

    pub(super) fn record_success(&mut self) {
        *self = CircuitBreaker::default();
    }

    pub(super) fn record_failure(&mut self, now: Instant) {
        *self = match *self {
            CircuitBreaker::Closed { failures } if failures + 1 < MAX_FAILURES => {
                CircuitBreaker::Closed {
                    failures: failures + 1,
                }
            }
            // Calls started before the breaker opened do not extend the cooldown.
            CircuitBreaker::Open(until) => CircuitBreaker::Open(until),
            CircuitBreaker::Closed { .. } | CircuitBreaker::HalfOpen(_) => {
                CircuitBreaker::Open(now + COOLDOWN)
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn breaker_opens_and_half_opens() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut breaker = CircuitBreaker::default();
        breaker.record_failure(at(0));
        breaker.record_failure(at(0));
        assert!(breaker.admits(at(0)), "two of three failures");
        breaker.record_success();
        (0..2).for_each(|_| breaker.record_failure(at(0)));
        assert!(breaker.admits(at(0)), "the failures are not consecutive");
        breaker.record_failure(at(1));
        // A call that started earlier fails late.
        breaker.record_failure(at(4));
        assert_eq!(
            [5, 6, 6].map(|second| breaker.admits(at(second))),
            [false, true, false]
        );
        breaker.record_failure(at(7));
        assert_eq!(
            [11, 12, 13].map(|second| breaker.admits(at(second))),
            [false, true, false]
        );
        // The one call was cancelled.
        assert_eq!(
            [16, 17].map(|second| breaker.admits(at(second))),
            [false, true]
        );
        breaker.record_success();
        assert_eq!(
            [17, 17].map(|second| breaker.admits(at(second))),
            [true, true]
        );
        assert_eq!(breaker, CircuitBreaker::Closed { failures: 0 });
    }
}
