//! Circuit breaker of one server: open after several consecutive failures, half-open after a rest
//! for one request, and closed again after a success.

use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CircuitBreaker {
    /// Every request may call.
    Closed {
        /// Consecutive failures.
        failures: u32,
    },
    /// No request may call until then.
    Open(Instant),
    /// One request calls since then. If it is cancelled, the next one may call after a rest.
    HalfOpen(Instant),
}

impl Default for CircuitBreaker {
    fn default() -> Self {
        CircuitBreaker::Closed { failures: 0 }
    }
}

impl CircuitBreaker {
    /// Whether a request may call now. A half-open breaker then counts it as the one call.
    pub(super) fn admits(&mut self, now: Instant, rest: Duration) -> bool {
        let is_due = match *self {
            CircuitBreaker::Closed { .. } => return true,
            CircuitBreaker::Open(until) => now >= until,
            CircuitBreaker::HalfOpen(since) => now.saturating_duration_since(since) >= rest,
        };
        if is_due {
            *self = CircuitBreaker::HalfOpen(now);
        }
        is_due
    }

    pub(super) fn record_success(&mut self) {
        *self = CircuitBreaker::default();
    }

    pub(super) fn record_failure(&mut self, now: Instant, max_failures: u32, rest: Duration) {
        *self = match *self {
            CircuitBreaker::Closed { failures } if failures + 1 < max_failures.max(1) => {
                CircuitBreaker::Closed {
                    failures: failures + 1,
                }
            }
            // Calls started before the breaker opened do not extend the rest.
            CircuitBreaker::Open(until) => CircuitBreaker::Open(until),
            CircuitBreaker::Closed { .. } | CircuitBreaker::HalfOpen(_) => {
                CircuitBreaker::Open(now + rest)
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REST: Duration = Duration::from_secs(5);

    #[test]
    fn breaker_opens_and_half_opens() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut breaker = CircuitBreaker::default();
        breaker.record_failure(at(0), 3, REST);
        breaker.record_failure(at(0), 3, REST);
        assert!(breaker.admits(at(0), REST), "two of three");
        breaker.record_success();
        (0..2).for_each(|_| breaker.record_failure(at(0), 3, REST));
        assert!(breaker.admits(at(0), REST), "not in a row");
        breaker.record_failure(at(1), 3, REST);
        // Earlier calls fail late.
        breaker.record_failure(at(4), 3, REST);
        assert_eq!(
            [5, 6, 6].map(|second| breaker.admits(at(second), REST)),
            [false, true, false]
        );
        breaker.record_failure(at(7), 3, REST);
        assert_eq!(
            [11, 12, 13].map(|second| breaker.admits(at(second), REST)),
            [false, true, false]
        );
        // The one call was cancelled.
        assert_eq!(
            [16, 17].map(|second| breaker.admits(at(second), REST)),
            [false, true]
        );
        breaker.record_success();
        assert_eq!(
            [17, 17].map(|second| breaker.admits(at(second), REST)),
            [true, true]
        );
        assert_eq!(breaker, CircuitBreaker::Closed { failures: 0 });
    }
}
