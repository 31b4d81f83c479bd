//! When somebody who failed is asked again: not for a while after several failures in a row, then by one request alone, and
//! by all again when that one was answered.

use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Breaker {
    /// Everybody may ask.
    Closed {
        /// Failures in a row.
        failures: u32,
    },
    /// Nobody may ask until then.
    Open(Instant),
    /// One asks since then. Should it be given up, the next one may after a rest.
    HalfOpen(Instant),
}

impl Default for Breaker {
    fn default() -> Self {
        Breaker::Closed { failures: 0 }
    }
}

impl Breaker {
    /// Whether it may be asked now; who is told so asks.
    pub(super) fn admits(&mut self, now: Instant, rest: Duration) -> bool {
        let due = match *self {
            Breaker::Closed { .. } => return true,
            Breaker::Open(until) => now >= until,
            Breaker::HalfOpen(since) => now.saturating_duration_since(since) >= rest,
        };
        if due {
            *self = Breaker::HalfOpen(now);
        }
        due
    }

    pub(super) fn succeeded(&mut self) {
        *self = Breaker::default();
    }

    pub(super) fn failed(&mut self, now: Instant, most: u32, rest: Duration) {
        *self = match *self {
            Breaker::Closed { failures } if failures + 1 < most.max(1) => Breaker::Closed {
                failures: failures + 1,
            },
            // Those who asked before it was opened do not make it longer.
            Breaker::Open(until) => Breaker::Open(until),
            Breaker::Closed { .. } | Breaker::HalfOpen(_) => Breaker::Open(now + rest),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REST: Duration = Duration::from_secs(5);

    #[test]
    fn who_fails_rests_and_is_tried_by_one() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut breaker = Breaker::default();
        breaker.failed(at(0), 3, REST);
        breaker.failed(at(0), 3, REST);
        assert!(breaker.admits(at(0), REST), "two of three");
        breaker.succeeded();
        (0..2).for_each(|_| breaker.failed(at(0), 3, REST));
        assert!(breaker.admits(at(0), REST), "not in a row");
        breaker.failed(at(1), 3, REST);
        // Those under way fail late.
        breaker.failed(at(4), 3, REST);
        assert_eq!(
            [5, 6, 6].map(|second| breaker.admits(at(second), REST)),
            [false, true, false]
        );
        breaker.failed(at(7), 3, REST);
        assert_eq!(
            [11, 12, 13].map(|second| breaker.admits(at(second), REST)),
            [false, true, false]
        );
        // The one that tried was given up.
        assert_eq!(
            [16, 17].map(|second| breaker.admits(at(second), REST)),
            [false, true]
        );
        breaker.succeeded();
        assert_eq!(
            [17, 17].map(|second| breaker.admits(at(second), REST)),
            [true, true]
        );
        assert_eq!(breaker, Breaker::Closed { failures: 0 });
    }
}
