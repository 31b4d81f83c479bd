//! Trials of a rank that stays slow.

use super::super::recovery::RecoveryTrials;
use super::super::slowdown::TimeSums;
use super::*;

/// Factor of the slow rank.
const FACTOR: f64 = 2.0;

fn prefill(trials: &mut RecoveryTrials, ratio: f64, now: Instant) -> bool {
    let times = TimeSums {
        observed: ratio,
        expected: 1.0,
    };
    trials.record_prefill(times, FACTOR, 1.0, now)
}

#[test]
fn single_fast_prefill_allows_one_early_trial() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let mut trials = RecoveryTrials::slow_for_long();
    assert!(!prefill(&mut trials, FACTOR, start));
    assert!(!trials.is_due(true, after(15)));

    assert!(!prefill(&mut trials, 1.0, after(16)));
    assert!(trials.is_due(true, after(17)));
    assert!(!prefill(&mut trials, FACTOR, after(17)));
    assert!(!trials.is_due(true, after(32)), "the rank is still slow");
}

#[test]
fn three_fast_prefills_show_recovery() {
    let start = Instant::now();
    let mut trials = RecoveryTrials::slow_for_long();
    let prefills = (1..=3).map(|seconds| {
        let now = start + Duration::from_secs(seconds);
        prefill(&mut trials, 1.0, now)
    });
    assert_eq!(prefills.collect::<Vec<_>>(), [false, false, true]);
}
