//! Learned latency of a tracker: accuracy of predictions, and the copy for another process.

use super::*;

/// Seconds of prefill per token of the simulated engine.
const TOKEN_SECONDS: f64 = 1e-3;

/// Tracker of two ranks whose clock the test advances.
struct ClockedTracker {
    tracker: Arc<LoadTracker>,
    now: Arc<Mutex<Instant>>,
}

impl ClockedTracker {
    fn new() -> Self {
        let now = Arc::new(Mutex::new(Instant::now()));
        let clock = now.clone();
        let tracker = LoadTracker::new(move || *clock.lock());
        for slot in 0..2 {
            tracker.join(&member(slot, slot.into(), 1));
        }
        Self { tracker, now }
    }

    fn advance(&self, seconds: f64) {
        *self.now.lock() += Duration::from_secs_f64(seconds);
    }

    fn book(&self, slot: u32, tokens: u64) -> Reservation {
        book(&self.tracker, booking(slot, u64::from(slot), &[], tokens))
    }

    /// Completes a prefill after this time and learns from it.
    fn complete(
        &self,
        reservation: &mut Reservation,
        seconds: f64,
    ) -> Option<FirstTokenObservation> {
        self.advance(seconds);
        reservation.on_first_token();
        reservation.learn_prefill(CachedTokenSource::Known)
    }

    /// Serves prompts on both ranks. The second rank takes twice as long.
    fn learn(&self, prompts: u64) {
        for number in 0..prompts {
            let tokens = 500 + 137 * (number % 20);
            for slot in 0..2 {
                let seconds = TOKEN_SECONDS * tokens as f64 * f64::from(slot + 1);
                self.complete(&mut self.book(slot, tokens), seconds);
            }
        }
    }
}

fn factors(report: &CalibrationReport) -> Vec<f64> {
    report
        .ranks
        .iter()
        .map(|rank| rank.slowdown.prefill_factor)
        .collect()
}

#[test]
fn prediction_includes_outstanding_prefills() {
    let clocked = ClockedTracker::new();
    clocked.learn(300);
    let mut first = clocked.book(0, 1_000);
    let mut second = clocked.book(0, 1_000);
    let first = clocked.complete(&mut first, 1.0).unwrap();
    let observed = clocked.complete(&mut second, 1.0);
    let second = observed.unwrap();
    assert!((first.ratio().unwrap() - 1.0).abs() < 0.1, "{first:?}");
    assert!((second.ratio().unwrap() - 1.0).abs() < 0.1, "{second:?}");
    assert!((second.observed - 2.0).abs() < 1e-6, "{second:?}");
}

#[test]
fn prefill_is_learned_once() {
    let clocked = ClockedTracker::new();
    let mut reservation = clocked.book(0, 1_000);
    assert_eq!(
        reservation.learn_prefill(CachedTokenSource::Known),
        None,
        "before the first token"
    );
    assert!(clocked.complete(&mut reservation, 1.0).is_some());
    assert_eq!(reservation.learn_prefill(CachedTokenSource::Known), None);
    let report = clocked.tracker.calibration();
    assert_eq!(report.models[0].prefill_observations, 1);
    let totals = report.ranks[0].slowdown.time_to_first_token;
    assert_eq!(totals.requests, 1);
    assert_eq!(totals.observed_seconds, 1.0);
    assert_eq!(report.models[0].time_to_first_token, totals);
}

#[test]
fn prefill_time_follows_rank_and_work() {
    let clocked = ClockedTracker::new();
    let long = booking(1, 1, &[], 4_000);
    let time = |clocked: &ClockedTracker| clocked.tracker.read(|view| view.prefill_time(&long));
    assert_eq!(time(&clocked), None, "nothing was observed");
    clocked.learn(300);
    let seconds = time(&clocked).unwrap().as_secs_f64();
    assert!((seconds - 8.0).abs() < 1.0, "{seconds}");
}

#[test]
fn restored_tracker_continues_with_learned_latency() {
    let clocked = ClockedTracker::new();
    clocked.learn(300);
    clocked.tracker.leave(&member(1, 1, 1));
    let json = serde_json::to_string(&clocked.tracker.latency_snapshot()).unwrap();
    let restored = ClockedTracker::new();
    // One rank joins before the restoration, the other one after it.
    restored.tracker.leave(&member(1, 1, 1));
    let copy = || serde_json::from_str::<LatencySnapshot>(&json).unwrap();
    assert_eq!(restored.tracker.restore_latency(copy()), 1);
    clocked.tracker.join(&member(1, 1, 1));
    restored.tracker.join(&member(1, 1, 1));
    let before = clocked.tracker.calibration();
    let after = restored.tracker.calibration();
    assert_eq!(
        before.models[0].estimate.coefficients,
        after.models[0].estimate.coefficients
    );
    assert_eq!(
        before.models[0].prefill_observations,
        after.models[0].prefill_observations
    );
    for (before, after) in factors(&before).into_iter().zip(factors(&after)) {
        assert!((before - after).abs() < 1e-9, "{before} and {after}");
    }
    assert!(factors(&after)[1] > 1.3 * factors(&after)[0], "{after:?}");
    assert_eq!(restored.tracker.restore_latency(copy()), 0);
    assert_eq!(restored.tracker.calibration(), after, "kept its own");
}

#[test]
fn invalid_snapshot_is_not_restored() {
    let clocked = ClockedTracker::new();
    clocked.learn(30);
    let valid = serde_json::to_value(clocked.tracker.latency_snapshot()).unwrap();
    let paths = [
        ("/version", serde_json::json!(9)),
        ("/models/0/latency/output_tokens", serde_json::json!(-1.0)),
        (
            "/models/0/latency/coefficients/decode_step_seconds",
            serde_json::json!(-0.1),
        ),
        (
            "/models/0/latency/coefficients/prefill_token_seconds",
            serde_json::json!(1e308),
        ),
        (
            "/models/0/latency/prefill/values/0",
            serde_json::json!(1e300),
        ),
        ("/models/0/latency/transfer/tokens", serde_json::json!(-1e6)),
    ];
    for (path, value) in paths {
        let mut invalid = valid.clone();
        *invalid.pointer_mut(path).unwrap() = value;
        *invalid
            .pointer_mut("/ranks/0/slowdown/prefill_factor")
            .unwrap() = serde_json::json!(0.0);
        let snapshot = serde_json::from_value(invalid).unwrap();
        let tracker = ClockedTracker::new().tracker;
        assert_eq!(tracker.restore_latency(snapshot), 0, "{path}");
        assert_eq!(
            tracker.calibration().ranks[0].slowdown.prefill_factor,
            1.0,
            "{path}"
        );
    }
}

#[test]
fn calibration_page_names_units_of_coefficients() {
    let clocked = ClockedTracker::new();
    clocked.learn(3);
    let report = clocked.tracker.calibration();
    let estimate = report.models[0].estimate;
    let page = serde_json::to_value(&report).unwrap();
    for (key, seconds) in [
        ("prefill_base_seconds", estimate.coefficients.prefill_base),
        ("prefill_token_seconds", estimate.coefficients.prefill_token),
        ("prefill_pair_seconds", estimate.coefficients.prefill_pair),
        ("decode_step_seconds", estimate.coefficients.decode_step),
        (
            "decode_request_seconds",
            estimate.coefficients.decode_request,
        ),
        (
            "decode_context_token_seconds",
            estimate.coefficients.decode_context_token,
        ),
        ("transfer_token_seconds", estimate.transfer_token),
    ] {
        assert_eq!(page["models"][0][key], seconds, "{key}");
    }
}

/// Returns the changes of speed while an update follows each second.
fn changes_in(clocked: &ClockedTracker, seconds: u32) -> Vec<(u64, SpeedChange, SlowPhase)> {
    let mut changes = Vec::new();
    for _ in 0..=seconds {
        let transitions = clocked.tracker.update_speeds().into_iter();
        changes.extend(transitions.map(|one| (one.rank.worker.0, one.change, one.speed.phase)));
        clocked.advance(1.0);
    }
    changes
}

#[test]
fn slow_rank_is_reported_once_until_it_recovers() {
    let clocked = ClockedTracker::new();
    let serve = |slow: f64, prompts: u64| {
        for _ in 0..prompts {
            clocked.complete(&mut clocked.book(0, 1_000), 1.0);
            clocked.complete(&mut clocked.book(1, 1_000), slow);
        }
    };
    serve(1.0, 50);
    assert_eq!(changes_in(&clocked, 9), []);
    serve(8.0, 50);
    assert_eq!(changes_in(&clocked, 1), [], "not for long enough");
    assert_eq!(
        changes_in(&clocked, 9),
        [(1, SpeedChange::Slowed, SlowPhase::Prefill)]
    );
    let slow = clocked.tracker.slow_ranks();
    let [
        SlowRank {
            speed, age_seconds, ..
        },
    ] = slow[..]
    else {
        panic!("{slow:?}")
    };
    assert_eq!((speed.phase, age_seconds), (SlowPhase::Prefill, 12));
    assert!(speed.factor > 4.0 * speed.median, "{speed:?}");
    serve(0.9, 100);
    assert_eq!(
        changes_in(&clocked, 9),
        [(1, SpeedChange::Recovered, SlowPhase::Prefill)]
    );
    assert_eq!(clocked.tracker.slow_ranks(), []);
}

/// Returns the changes of speed after the prefills of short prompts took `seconds`, and on one rank
/// then eight times as long.
fn changes_of_short_prefills(seconds: f64) -> Vec<(u64, SpeedChange, SlowPhase)> {
    let clocked = ClockedTracker::new();
    for slow in [seconds, 8.0 * seconds] {
        for _ in 0..100 {
            clocked.complete(&mut clocked.book(0, 10), seconds);
            clocked.complete(&mut clocked.book(1, 10), slow);
        }
    }
    changes_in(&clocked, 9)
}

#[test]
fn factor_of_very_short_prefills_is_not_reported() {
    assert_eq!(changes_of_short_prefills(0.001), []);
}

#[test]
fn slow_fixed_part_of_prefills_is_reported() {
    assert_eq!(
        changes_of_short_prefills(0.02),
        [(1, SpeedChange::Slowed, SlowPhase::Prefill)]
    );
}

#[test]
fn varying_speed_is_not_reported() {
    let clocked = ClockedTracker::new();
    for number in 0..2_000_u64 {
        let tokens = 500 + 137 * (number % 20);
        for slot in 0..2 {
            // From half to twice the time.
            let noise = 2.0_f64.powf((number * 7 + u64::from(slot) * 3) as f64 % 11.0 / 5.0 - 1.0);
            let seconds = TOKEN_SECONDS * tokens as f64 * noise;
            clocked.complete(&mut clocked.book(slot, tokens), seconds);
        }
        assert_eq!(clocked.tracker.update_speeds(), []);
    }
}
