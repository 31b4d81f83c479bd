//! Times between scrapes.

use std::time::Duration;

/// Delay before an engine without load gauges is tried again.
const NO_COUNTERS_DELAY: Duration = Duration::from_secs(60);
/// Maximum delay after failed scrapes, unless the interval is longer. Each attempt to connect costs
/// about as much CPU time as a scrape.
const MAX_FAILURE_DELAY: Duration = Duration::from_secs(30);
/// Maximum rate of the scrapes of all workers.
const MAX_SCRAPES_PER_SECOND: f64 = 200.0;
/// Relative deviation of a delay, so that scrapes do not synchronize.
const JITTER: f64 = 0.1;

/// Outcome of a scrape, as far as the next one depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScrapeOutcome {
    /// The engine reported its counters.
    Reported,
    /// The engine has no counters, or too large a page.
    NoGauges,
    /// The scrape failed. Contains the number of consecutive failures.
    Failed(u32),
}

/// Returns the interval between two scrapes of a worker, so that all workers together do not exceed
/// the maximum rate.
pub(super) fn effective_interval(interval: Duration, workers: usize) -> Duration {
    interval.max(duration_at_max_rate(workers))
}

/// Returns the delay before the first scrape of one of `added` new workers. `random` is in 0..1.
pub(super) fn start_delay(added: usize, random: f64) -> Duration {
    duration_at_max_rate(added).mul_f64(random.clamp(0.0, 1.0))
}

/// Returns the delay until the next scrape. `random` is in 0..1.
pub(super) fn next_delay(outcome: ScrapeOutcome, interval: Duration, random: f64) -> Duration {
    let delay = match outcome {
        ScrapeOutcome::Reported => interval,
        ScrapeOutcome::NoGauges => NO_COUNTERS_DELAY.max(interval),
        ScrapeOutcome::Failed(times) => {
            let factor = 1_u32 << times.saturating_sub(1).min(16);
            let longest = MAX_FAILURE_DELAY.max(interval);
            interval.saturating_mul(factor).min(longest)
        }
    };
    delay.mul_f64(1.0 + JITTER * (2.0 * random.clamp(0.0, 1.0) - 1.0))
}

fn duration_at_max_rate(scrapes: usize) -> Duration {
    Duration::from_secs_f64(scrapes as f64 / MAX_SCRAPES_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn interval_is_stretched_above_the_maximum_rate() {
        for (workers, expected) in [(0, 1.0), (1, 1.0), (200, 1.0), (201, 1.005), (1000, 5.0)] {
            let interval = effective_interval(SECOND, workers);
            assert_eq!(interval, Duration::from_secs_f64(expected), "{workers}");
        }
        assert_eq!(effective_interval(9 * SECOND, 1000), 9 * SECOND);
    }

    #[test]
    fn new_workers_start_within_the_maximum_rate() {
        assert_eq!(start_delay(1000, 0.0), Duration::ZERO);
        assert_eq!(start_delay(1000, 1.0), 5 * SECOND);
        assert!(start_delay(1, 1.0) <= Duration::from_millis(5));
    }

    #[test]
    fn failures_delay_the_next_scrape() {
        let delay = |outcome| next_delay(outcome, SECOND, 0.5);
        assert_eq!(delay(ScrapeOutcome::Reported), SECOND);
        assert_eq!(delay(ScrapeOutcome::NoGauges), 60 * SECOND);
        for (times, seconds) in [
            (1, 1),
            (2, 2),
            (3, 4),
            (4, 8),
            (5, 16),
            (6, 30),
            (u32::MAX, 30),
        ] {
            assert_eq!(delay(ScrapeOutcome::Failed(times)), SECOND * seconds);
        }
        let slow = next_delay(ScrapeOutcome::Failed(9), 90 * SECOND, 0.5);
        assert_eq!(slow, 90 * SECOND, "never faster than the interval");
    }

    #[test]
    fn jitter_does_not_change_the_mean_rate() {
        let early = next_delay(ScrapeOutcome::Reported, SECOND, 0.0);
        let late = next_delay(ScrapeOutcome::Reported, SECOND, 1.0);
        assert_eq!((early + late).as_millis(), 2000);
        assert_eq!((late - early).as_millis(), 200);
    }
}
