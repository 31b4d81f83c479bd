//! Estimator of encoding times. It decides between the stream's own thread and an encoder thread. A
//! handover costs two context switches and cache misses on both cores, which dominates if the
//! beginning of the prompt is cached or the tokenizer is fast. A long encoding on the stream's
//! thread would delay all its exchanges. Parsed and tokenized bodies are measured separately,
//! because parsing alone takes hardly any time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Maximum expected time of encoding on the stream's thread.
const MAX_INLINE_TIME: Duration = Duration::from_millis(1);
/// Longer bodies always go to an encoder thread, in case the estimate is wrong.
const MAX_INLINE_BYTES: usize = 256 << 10;
/// Inverse weight of a measurement above the moving average. Measurements below it have less
/// weight, so one slow body raises the estimate for a while.
const RISE_DIVISOR: i64 = 8;
const FALL_DIVISOR: i64 = 64;

/// Kind of processing of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EncodeKind {
    /// The text was tokenized.
    Tokenized,
    /// The body was only parsed.
    ParsedOnly,
}

/// Picoseconds per byte of each kind; 0 without a measurement.
#[derive(Debug, Default)]
pub(super) struct EncodeTimeEstimator {
    tokenized_pace: AtomicU64,
    parsed_pace: AtomicU64,
}

impl EncodeTimeEstimator {
    /// Returns whether a body is expected to be quick. Bodies of up to `inline` bytes always are.
    /// If `inline` is 0, no body is.
    pub(super) fn is_quick(&self, bytes: usize, inline: usize) -> bool {
        bytes <= inline || (inline > 0 && self.is_expected_quick(bytes))
    }

    fn is_expected_quick(&self, bytes: usize) -> bool {
        let pace = match self.tokenized_pace.load(Ordering::Relaxed) {
            0 => self.parsed_pace.load(Ordering::Relaxed),
            pace => pace,
        };
        pace > 0
            && bytes <= MAX_INLINE_BYTES
            && pace.saturating_mul(bytes as u64) / 1000 <= MAX_INLINE_TIME.as_nanos() as u64
    }

    /// Records the CPU time of encoding a body. Small bodies must not be recorded, because a fixed
    /// cost dominates their time.
    pub(super) fn record(&self, kind: EncodeKind, bytes: usize, cpu_time: Duration) {
        let pace = match kind {
            EncodeKind::Tokenized => &self.tokenized_pace,
            EncodeKind::ParsedOnly => &self.parsed_pace,
        };
        let measured = (cpu_time.as_nanos() as u64).saturating_mul(1000) / bytes.max(1) as u64;
        let measured = i64::try_from(measured).unwrap_or(i64::MAX >> 8).max(1);
        let before = pace.load(Ordering::Relaxed) as i64;
        let difference = measured - before;
        let next = match before {
            0 => measured,
            _ if difference > 0 => before + difference / RISE_DIVISOR,
            _ => before + difference / FALL_DIVISOR,
        };
        // Of two concurrent updates one is lost, which is harmless.
        pace.store(next.max(1) as u64, Ordering::Relaxed);
    }
}

/// Returns the CPU time of this thread. Unlike elapsed time, it does not grow when other threads use
/// the core.
pub(super) fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_quick_without_measurement() {
        let estimator = EncodeTimeEstimator::default();
        assert!(!estimator.is_expected_quick(1));
        assert!(
            estimator.is_quick(4, 4) && !estimator.is_quick(5, 4) && !estimator.is_quick(1, 0),
            "only bodies of up to `inline` bytes are quick"
        );
    }

    #[test]
    fn expected_time_is_proportional_to_length() {
        let estimator = EncodeTimeEstimator::default();
        estimator.record(EncodeKind::Tokenized, 10_000, Duration::from_micros(100));
        let cases = [
            (10_000, true),
            (100_000, true),
            (100_001, false),
            (MAX_INLINE_BYTES + 1, false),
        ];
        for (bytes, expected) in cases {
            assert_eq!(estimator.is_expected_quick(bytes), expected, "{bytes}");
        }
        let instant = EncodeTimeEstimator::default();
        instant.record(EncodeKind::Tokenized, 1 << 20, Duration::ZERO);
        assert!(
            instant.is_expected_quick(MAX_INLINE_BYTES)
                && !instant.is_expected_quick(MAX_INLINE_BYTES + 1)
        );
    }

    #[test]
    fn slow_body_outweighs_many_quick_ones() {
        let estimator = EncodeTimeEstimator::default();
        estimator.record(EncodeKind::Tokenized, 40_000, Duration::from_micros(400));
        estimator.record(EncodeKind::Tokenized, 40_000, Duration::from_millis(40));
        assert!(!estimator.is_expected_quick(40_000));
        let quick = (0..).take_while(|_| {
            estimator.record(EncodeKind::Tokenized, 40_000, Duration::from_micros(400));
            !estimator.is_expected_quick(40_000)
        });
        let quick = quick.count();
        assert!((50..200).contains(&quick), "{quick}");
    }

    #[test]
    fn parsed_bodies_do_not_affect_tokenized_estimate() {
        let estimator = EncodeTimeEstimator::default();
        estimator.record(EncodeKind::ParsedOnly, 10_000, Duration::from_micros(10));
        assert!(
            estimator.is_expected_quick(MAX_INLINE_BYTES),
            "no body was tokenized"
        );
        estimator.record(EncodeKind::Tokenized, 10_000, Duration::from_millis(10));
        for _ in 0..10_000 {
            estimator.record(EncodeKind::ParsedOnly, 10_000, Duration::from_micros(10));
        }
        assert!(!estimator.is_expected_quick(10_000));
    }

    #[test]
    fn mixed_times_stay_slow() {
        let estimator = EncodeTimeEstimator::default();
        for at in 0..1000 {
            // One body in ten does not continue a cached prompt.
            estimator.record(
                EncodeKind::Tokenized,
                100_000,
                Duration::from_micros(if at % 10 == 0 { 60_000 } else { 100 }),
            );
            assert!(at == 0 || !estimator.is_expected_quick(100_000), "{at}");
        }
    }
}
