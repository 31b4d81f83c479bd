use proptest::prelude::*;

use super::*;

const WORKER: WorkerId = WorkerId(7);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A worker that was just taken out.
fn out(start: Instant) -> Arc<Health> {
    let health = Health::new(HealthRules::default());
    let changes: Vec<_> = (0..3)
        .map(|_| health.report(WORKER, Outcome::Failure, start))
        .collect();
    assert_eq!(changes, [None, None, Some(Change::TakenOut(seconds(1)))]);
    health
}

#[test]
fn failures_in_a_row_take_a_worker_out_and_any_success_between_them_does_not() {
    let health = Health::new(HealthRules::default());
    let now = Instant::now();
    for outcome in [
        Outcome::Failure,
        Outcome::Failure,
        Outcome::Success,
        Outcome::Failure,
        Outcome::Failure,
    ] {
        assert_eq!(health.report(WORKER, outcome, now), None);
    }
    assert_eq!(health.report(WORKER, Outcome::Overloaded, now), None);
    assert_eq!(health.standing(WORKER, now), Condition::Well);
    assert_eq!(
        health.report(WORKER, Outcome::Failure, now),
        Some(Change::TakenOut(seconds(1)))
    );
    assert_eq!(health.standing(WORKER, now), Condition::Out);
    assert_eq!(health.standing(WorkerId(8), now), Condition::Well);
    assert_eq!(health.unwell(now), [(WORKER, Condition::Out)].into());
}

#[test]
fn each_failed_probe_doubles_the_time_out_up_to_the_limit() {
    let mut now = Instant::now();
    let health = out(now);
    for period in [2, 4, 8, 16, 32, 60, 60] {
        now += seconds(60);
        let probe = health.claim_probe(WORKER, now).unwrap();
        assert_eq!(
            probe.report(Outcome::Failure, now),
            Some(Change::KeptOut(seconds(period)))
        );
        assert_eq!(
            health.standing(WORKER, now + seconds(period) - Duration::from_nanos(1)),
            Condition::Out
        );
        assert_eq!(
            health.standing(WORKER, now + seconds(period)),
            Condition::Due
        );
    }
    let probe = health.claim_probe(WORKER, now + seconds(60)).unwrap();
    assert_eq!(probe.report(Outcome::Success, now), Some(Change::Back));
    assert_eq!(health.standing(WORKER, now), Condition::Well);
    assert!(health.all_well());
    (0..3).for_each(|_| _ = health.report(WORKER, Outcome::Failure, now));
    assert_eq!(
        health.standing(WORKER, now + seconds(1)),
        Condition::Due,
        "the time out begins anew"
    );
}

#[test]
fn a_probe_without_a_verdict_is_given_back() {
    let start = Instant::now();
    let health = out(start);
    let due = start + seconds(1);
    assert!(health.claim_probe(WORKER, start).is_none());
    let probe = health.claim_probe(WORKER, due).unwrap();
    assert_eq!(health.standing(WORKER, due), Condition::Out);
    assert!(health.claim_probe(WORKER, due).is_none());
    drop(probe);
    let probe = health.claim_probe(WORKER, due).unwrap();
    assert_eq!(probe.report(Outcome::Overloaded, due), None);
    assert_eq!(health.standing(WORKER, due), Condition::Due);
}

#[test]
fn a_success_of_any_request_brings_a_worker_back_and_a_failure_does_not_keep_it_out_longer() {
    let start = Instant::now();
    let health = out(start);
    assert_eq!(health.report(WORKER, Outcome::Failure, start), None);
    assert_eq!(health.standing(WORKER, start + seconds(1)), Condition::Due);
    assert_eq!(
        health.report(WORKER, Outcome::Success, start),
        Some(Change::Back)
    );
    assert_eq!(health.standing(WORKER, start), Condition::Well);
}

#[test]
fn the_verdict_on_a_forgotten_worker_does_not_count_for_the_next_of_its_id() {
    let start = Instant::now();
    let health = out(start);
    let probe = health.claim_probe(WORKER, start + seconds(1)).unwrap();
    health.forget(WORKER);
    assert!(health.all_well());
    (0..3).for_each(|_| _ = health.report(WORKER, Outcome::Failure, start));
    let second = health.claim_probe(WORKER, start + seconds(1)).unwrap();
    assert_eq!(probe.report(Outcome::Success, start), None);
    assert_eq!(
        health.standing(WORKER, start + seconds(1)),
        Condition::Out,
        "the second probe is under way"
    );
    drop(second);
    assert_eq!(health.standing(WORKER, start + seconds(1)), Condition::Due);
}

#[test]
fn passed_check_after_a_failed_one_ends_the_rest() {
    let start = Instant::now();
    let health = out(start);
    // Taken out for 1 s, then for 2 and for 4.
    let mut now = start;
    for period in [1, 2] {
        now += seconds(period);
        assert!(
            health
                .claim_probe(WORKER, now)
                .unwrap()
                .report(Outcome::Failure, now)
                .is_some()
        );
    }
    assert!(
        !health.checked(WORKER, true, now),
        "the endpoint answers while requests fail"
    );
    assert_eq!(health.standing(WORKER, now), Condition::Out);
    assert!(!health.checked(WORKER, false, now));
    assert!(health.checked(WORKER, true, now));
    assert_eq!(health.standing(WORKER, now), Condition::Due);
    assert!(!health.checked(WORKER, true, now), "only once");
    // One request tries it, and where that fails the rest begins at its shortest.
    let probe = health.claim_probe(WORKER, now).unwrap();
    assert_eq!(health.standing(WORKER, now), Condition::Out);
    assert_eq!(
        probe.report(Outcome::Failure, now),
        Some(Change::KeptOut(seconds(2)))
    );
    assert!(
        !health.checked(WorkerId(77), false, now) && !health.checked(WorkerId(77), true, now),
        "it is well"
    );
}

#[test]
fn flapping_health_endpoint_does_not_defeat_the_back_off() {
    let start = Instant::now();
    let health = out(start);
    let mut early = Vec::new();
    for flap in 0..5 {
        let now = start + Duration::from_millis(100 * flap);
        assert!(!health.checked(WORKER, false, now));
        early.push(health.checked(WORKER, true, now));
        if let Some(probe) = health.claim_probe(WORKER, now) {
            probe.report(Outcome::Failure, now);
        }
    }
    assert_eq!(early, [true, true, true, false, false]);
    // The failures after 0, 100 and 200 ms have doubled the rest of 1 s.
    let last = start + Duration::from_millis(200);
    assert_eq!(
        health.standing(WORKER, last + seconds(8) - Duration::from_nanos(1)),
        Condition::Out
    );
    assert_eq!(health.standing(WORKER, last + seconds(8)), Condition::Due);
}

#[test]
fn refused_request_neither_forgives_nor_ends_a_probe() {
    let start = Instant::now();
    let health = Health::new(HealthRules {
        failures: 2,
        ..HealthRules::default()
    });
    for _ in 0..2 {
        health.report(WORKER, Outcome::Failure, start);
        assert_eq!(health.report(WORKER, Outcome::of_status(404), start), None);
    }
    assert_eq!(
        health.standing(WORKER, start),
        Condition::Out,
        "two failures in a row"
    );
    let probe = health.claim_probe(WORKER, start + seconds(1)).unwrap();
    assert_eq!(
        probe.report(Outcome::of_status(422), start + seconds(1)),
        None
    );
    assert_eq!(health.standing(WORKER, start + seconds(1)), Condition::Due);
}

#[test]
fn no_failure_takes_a_worker_out_where_that_is_turned_off() {
    let health = Health::new(HealthRules {
        failures: 0,
        ..HealthRules::default()
    });
    assert!((0..10).all(|_| {
        health
            .report(WORKER, Outcome::Failure, Instant::now())
            .is_none()
    }));
    assert!(health.all_well());
}

#[test]
fn a_status_tells_failure_from_overload_and_from_a_wrong_request() {
    for (status, outcome) in [
        (200, Outcome::Success),
        (304, Outcome::Inconclusive),
        (404, Outcome::Inconclusive),
        (429, Outcome::Overloaded),
        (499, Outcome::Inconclusive),
        (500, Outcome::Failure),
        (502, Outcome::Failure),
        (503, Outcome::Overloaded),
        (504, Outcome::Failure),
        (529, Outcome::Overloaded),
    ] {
        assert_eq!(Outcome::of_status(status), outcome, "{status}");
    }
}

#[derive(Clone, Debug)]
enum Op {
    Report(u64, Outcome),
    Claim(u64),
    Verdict(usize, Outcome),
    GiveBack(usize),
    Forget(u64),
    Check(u64, bool),
    Wait(u64),
}

fn any_op() -> impl Strategy<Value = Op> {
    let outcome = || {
        prop_oneof![4 => Just(Outcome::Failure), 1 => Just(Outcome::Success), 1 => Just(Outcome::Overloaded),
            1 => Just(Outcome::Inconclusive)]
    };
    prop_oneof![
        4 => (0u64..2, outcome()).prop_map(|(worker, outcome)| Op::Report(worker, outcome)),
        4 => (0u64..2).prop_map(Op::Claim),
        2 => (0usize..4, outcome()).prop_map(|(at, outcome)| Op::Verdict(at, outcome)),
        1 => (0usize..4).prop_map(Op::GiveBack),
        1 => (0u64..2).prop_map(Op::Forget),
        2 => (0u64..2, any::<bool>()).prop_map(|(worker, is_healthy)| Op::Check(worker, is_healthy)),
        4 => (0u64..5).prop_map(Op::Wait),
    ]
}

/// One worker as the rules describe it.
#[derive(Clone, Copy, Default)]
struct Model {
    failures: u32,
    /// Second it is out until, and for how long it was taken out.
    out: Option<(u64, u64)>,
    /// Which of all probes is under way.
    probe: Option<usize>,
    /// Whether the last health check since it went out failed, and how many rests checks have ended.
    is_down: bool,
    early_ends: u32,
}

impl Model {
    fn apply(&mut self, outcome: Outcome, now: u64, by_probe: bool) {
        match outcome {
            Outcome::Success => *self = Model::default(),
            Outcome::Failure if by_probe => {
                let period = self.out.map_or(1, |(_, period)| (2 * period).min(4));
                self.out = Some((now + period, period));
                self.probe = None;
            }
            Outcome::Failure => {
                self.failures += 1;
                if self.out.is_none() && self.failures >= 2 {
                    self.out = Some((now + 1, 1));
                }
            }
            Outcome::Overloaded | Outcome::Inconclusive if by_probe => self.probe = None,
            Outcome::Overloaded | Outcome::Inconclusive => {}
        }
    }

    fn condition(&self, now: u64) -> Condition {
        match self.out {
            None => Condition::Well,
            Some((until, _)) if until <= now && self.probe.is_none() => Condition::Due,
            Some(_) => Condition::Out,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn health_is_that_of_the_model_and_no_worker_is_tried_twice_at_once(ops in prop::collection::vec(any_op(), 1..40)) {
        let rules = HealthRules { failures: 2, first: seconds(1), most: seconds(4) };
        let (health, start, mut now) = (Health::new(rules), Instant::now(), 0);
        let mut models = [Model::default(); 2];
        let mut probes: Vec<(usize, Probe)> = Vec::new();
        let mut claims = 0;
        for op in ops {
            let at = start + seconds(now);
            match op {
                Op::Report(worker, outcome) => {
                    health.report(WorkerId(worker), outcome, at);
                    models[worker as usize].apply(outcome, now, false);
                }
                Op::Claim(worker) => {
                    let model = &mut models[worker as usize];
                    let due = model.condition(now) == Condition::Due;
                    let probe = health.claim_probe(WorkerId(worker), at);
                    prop_assert_eq!(probe.is_some(), due);
                    if let Some(probe) = probe {
                        model.probe = Some(claims);
                        probes.push((claims, probe));
                        claims += 1;
                    }
                }
                Op::Verdict(nth, outcome) if nth < probes.len() => {
                    let (number, probe) = probes.remove(nth);
                    let model = &mut models[probe.worker().0 as usize];
                    if model.probe == Some(number) {
                        model.apply(outcome, now, true);
                    }
                    probe.report(outcome, at);
                }
                Op::GiveBack(nth) if nth < probes.len() => {
                    let (number, probe) = probes.remove(nth);
                    let model = &mut models[probe.worker().0 as usize];
                    model.probe = model.probe.filter(|under_way| *under_way != number);
                }
                Op::Verdict(..) | Op::GiveBack(_) => {}
                Op::Forget(worker) => {
                    health.forget(WorkerId(worker));
                    models[worker as usize] = Model::default();
                }
                Op::Check(worker, is_healthy) => {
                    let model = &mut models[worker as usize];
                    let is_back = model.out.is_some() && is_healthy && model.is_down && model.early_ends < 3;
                    if let Some((until, period)) = model.out.filter(|_| is_back) {
                        model.out = Some((until.min(now), if model.early_ends == 0 { 1 } else { period }));
                        model.early_ends += 1;
                    }
                    model.is_down = model.out.is_some() && !is_healthy;
                    prop_assert_eq!(health.checked(WorkerId(worker), is_healthy, at), is_back);
                }
                Op::Wait(seconds) => now += seconds,
            }
            let mut unwell = 0;
            for (worker, model) in models.iter().enumerate() {
                let found = health.standing(WorkerId(worker as u64), start + seconds(now));
                prop_assert_eq!(found, model.condition(now));
                unwell += usize::from(found != Condition::Well);
            }
            prop_assert_eq!(health.unwell(start + seconds(now)).len(), unwell);
        }
    }
}
