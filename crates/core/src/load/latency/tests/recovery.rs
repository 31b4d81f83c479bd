//! Trials of a rank that stays slow.

use super::super::recovery::{FactorRange, RecoveryTrials};
use super::super::totals::TimeSums;
use super::*;

/// Factor of the slow rank.
const FACTOR: f64 = 2.0;

fn prefill(trials: &mut RecoveryTrials, ratio: f64, now: Instant) -> bool {
    let times = TimeSums {
        observed: ratio,
        expected: 1.0,
    };
    let range = FactorRange {
        own: FACTOR,
        fastest: 1.0,
    };
    trials.record(SlowPhase::Prefill, times, range, now)
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
fn two_fast_prefills_show_recovery() {
    let start = Instant::now();
    let mut trials = RecoveryTrials::slow_for_long();
    assert!(!prefill(&mut trials, 1.0, start));
    let soon = start + Duration::from_millis(100);
    assert!(!prefill(&mut trials, 1.0, soon), "of the same step");
    assert!(prefill(&mut trials, 1.0, start + Duration::from_secs(1)));
}

#[test]
fn uncertain_prefills_show_recovery_later() {
    let start = Instant::now();
    let mut trials = RecoveryTrials::slow_for_long();
    let ratio = 1.25;
    let mut recovered = (1..=6).map(|seconds| {
        let now = start + Duration::from_secs(seconds);
        prefill(&mut trials, ratio, now)
    });
    assert_eq!(recovered.position(|recovered| recovered), Some(5));
}
