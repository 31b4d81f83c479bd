use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;

const WORKER: WorkerId = WorkerId(7);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Returns a tracker with a worker that was just ejected.
fn ejected(start: Instant) -> Arc<HealthTracker> {
    let health = HealthTracker::new(HealthRules::default());
    let changes: Vec<_> = (0..3)
        .map(|_| health.report(WORKER, WorkerOutcome::Failure, start))
        .collect();
    assert_eq!(
        changes,
        [None, None, Some(HealthChange::Ejected(seconds(1)))]
    );
    health
}

#[test]
fn only_consecutive_failures_eject_worker() {
    let health = HealthTracker::new(HealthRules::default());
    let now = Instant::now();
    for outcome in [
        WorkerOutcome::Failure,
        WorkerOutcome::Failure,
        WorkerOutcome::Success,
        WorkerOutcome::Failure,
        WorkerOutcome::Failure,
    ] {
        assert_eq!(health.report(WORKER, outcome, now), None);
    }
    assert_eq!(health.report(WORKER, WorkerOutcome::Overloaded, now), None);
    assert_eq!(health.worker_health(WORKER, now), WorkerHealth::Healthy);
    assert_eq!(
        health.report(WORKER, WorkerOutcome::Failure, now),
        Some(HealthChange::Ejected(seconds(1)))
    );
    assert_eq!(health.worker_health(WORKER, now), WorkerHealth::Ejected);
    assert_eq!(
        health.worker_health(WorkerId(8), now),
        WorkerHealth::Healthy
    );
    assert_eq!(
        health.unhealthy_workers(now),
        [(WORKER, WorkerHealth::Ejected)].into()
    );
}

#[test]
fn failed_probes_double_ejection_time_to_limit() {
    let mut now = Instant::now();
    let health = ejected(now);
    for period in [2, 4, 8, 16, 32, 60, 60] {
        now += seconds(60);
        let probe = health.claim_probe(WORKER, now).unwrap();
        assert_eq!(
            probe.report(WorkerOutcome::Failure, now),
            Some(HealthChange::EjectionExtended(seconds(period)))
        );
        assert_eq!(
            health.worker_health(WORKER, now + seconds(period) - Duration::from_nanos(1)),
            WorkerHealth::Ejected
        );
        assert_eq!(
            health.worker_health(WORKER, now + seconds(period)),
            WorkerHealth::ProbeDue
        );
    }
    let probe = health.claim_probe(WORKER, now + seconds(60)).unwrap();
    assert_eq!(
        probe.report(WorkerOutcome::Success, now),
        Some(HealthChange::Readmitted)
    );
    assert_eq!(health.worker_health(WORKER, now), WorkerHealth::Healthy);
    assert!(health.is_all_healthy());
    (0..3).for_each(|_| _ = health.report(WORKER, WorkerOutcome::Failure, now));
    assert_eq!(
        health.worker_health(WORKER, now + seconds(1)),
        WorkerHealth::ProbeDue,
        "the ejection time starts again"
    );
}

#[test]
fn inconclusive_probe_is_returned() {
    let start = Instant::now();
    let health = ejected(start);
    let due = start + seconds(1);
    assert!(health.claim_probe(WORKER, start).is_none());
    let probe = health.claim_probe(WORKER, due).unwrap();
    assert_eq!(health.worker_health(WORKER, due), WorkerHealth::Ejected);
    assert!(health.claim_probe(WORKER, due).is_none());
    drop(probe);
    let probe = health.claim_probe(WORKER, due).unwrap();
    assert_eq!(probe.report(WorkerOutcome::Overloaded, due), None);
    assert_eq!(health.worker_health(WORKER, due), WorkerHealth::ProbeDue);
}

#[test]
fn any_success_readmits_and_failure_does_not_extend() {
    let start = Instant::now();
    let health = ejected(start);
    assert_eq!(health.report(WORKER, WorkerOutcome::Failure, start), None);
    assert_eq!(
        health.worker_health(WORKER, start + seconds(1)),
        WorkerHealth::ProbeDue
    );
    assert_eq!(
        health.report(WORKER, WorkerOutcome::Success, start),
        Some(HealthChange::Readmitted)
    );
    assert_eq!(health.worker_health(WORKER, start), WorkerHealth::Healthy);
}

#[test]
fn probe_of_removed_worker_does_not_affect_successor() {
    let start = Instant::now();
    let health = ejected(start);
    let probe = health.claim_probe(WORKER, start + seconds(1)).unwrap();
    health.remove(WORKER);
    assert!(health.is_all_healthy());
    (0..3).for_each(|_| _ = health.report(WORKER, WorkerOutcome::Failure, start));
    let second = health.claim_probe(WORKER, start + seconds(1)).unwrap();
    assert_eq!(probe.report(WorkerOutcome::Success, start), None);
    assert_eq!(
        health.worker_health(WORKER, start + seconds(1)),
        WorkerHealth::Ejected,
        "the second probe is in progress"
    );
    drop(second);
    assert_eq!(
        health.worker_health(WORKER, start + seconds(1)),
        WorkerHealth::ProbeDue
    );
}

#[test]
fn passed_health_check_after_failure_ends_ejection() {
    let start = Instant::now();
    let health = ejected(start);
    // Ejected for 1 s, then for 2 s and for 4 s.
    let mut now = start;
    for period in [1, 2] {
        now += seconds(period);
        assert!(
            health
                .claim_probe(WORKER, now)
                .unwrap()
                .report(WorkerOutcome::Failure, now)
                .is_some()
        );
    }
    assert!(
        !health.on_health_check(WORKER, true, now),
        "the endpoint answers while requests fail"
    );
    assert_eq!(health.worker_health(WORKER, now), WorkerHealth::Ejected);
    assert!(!health.on_health_check(WORKER, false, now));
    assert!(health.on_health_check(WORKER, true, now));
    assert_eq!(health.worker_health(WORKER, now), WorkerHealth::ProbeDue);
    assert!(!health.on_health_check(WORKER, true, now), "only once");
    // One request probes it. After a failure the ejection time starts at its minimum.
    let probe = health.claim_probe(WORKER, now).unwrap();
    assert_eq!(health.worker_health(WORKER, now), WorkerHealth::Ejected);
    assert_eq!(
        probe.report(WorkerOutcome::Failure, now),
        Some(HealthChange::EjectionExtended(seconds(2)))
    );
    assert!(
        !health.on_health_check(WorkerId(77), false, now)
            && !health.on_health_check(WorkerId(77), true, now),
        "the worker is healthy"
    );
}

#[test]
fn flapping_health_checks_do_not_defeat_backoff() {
    let start = Instant::now();
    let health = ejected(start);
    let mut early = Vec::new();
    for flap in 0..5 {
        let now = start + Duration::from_millis(100 * flap);
        assert!(!health.on_health_check(WORKER, false, now));
        early.push(health.on_health_check(WORKER, true, now));
        if let Some(probe) = health.claim_probe(WORKER, now) {
            probe.report(WorkerOutcome::Failure, now);
        }
    }
    assert_eq!(early, [true, true, true, false, false]);
    // The failures after 0, 100 and 200 ms doubled the ejection time of 1 s.
    let last = start + Duration::from_millis(200);
    assert_eq!(
        health.worker_health(WORKER, last + seconds(8) - Duration::from_nanos(1)),
        WorkerHealth::Ejected
    );
    assert_eq!(
        health.worker_health(WORKER, last + seconds(8)),
        WorkerHealth::ProbeDue
    );
}

#[test]
fn client_error_does_not_affect_health() {
    let start = Instant::now();
    let health = HealthTracker::new(HealthRules {
        consecutive_failures: 2,
        ..HealthRules::default()
    });
    for _ in 0..2 {
        health.report(WORKER, WorkerOutcome::Failure, start);
        assert_eq!(
            health.report(WORKER, WorkerOutcome::from_status(404), start),
            None
        );
    }
    assert_eq!(
        health.worker_health(WORKER, start),
        WorkerHealth::Ejected,
        "two failures in a row"
    );
    let probe = health.claim_probe(WORKER, start + seconds(1)).unwrap();
    assert_eq!(
        probe.report(WorkerOutcome::from_status(422), start + seconds(1)),
        None
    );
    assert_eq!(
        health.worker_health(WORKER, start + seconds(1)),
        WorkerHealth::ProbeDue
    );
}

#[test]
fn disabled_ejection_ignores_failures() {
    let health = HealthTracker::new(HealthRules {
        consecutive_failures: 0,
        ..HealthRules::default()
    });
    assert!((0..10).all(|_| {
        health
            .report(WORKER, WorkerOutcome::Failure, Instant::now())
            .is_none()
    }));
    assert!(health.is_all_healthy());
}

#[test]
fn status_codes_map_to_outcomes() {
    for (status, outcome) in [
        (200, WorkerOutcome::Success),
        (304, WorkerOutcome::Inconclusive),
        (404, WorkerOutcome::Inconclusive),
        (429, WorkerOutcome::Overloaded),
        (499, WorkerOutcome::Inconclusive),
        (500, WorkerOutcome::Failure),
        (502, WorkerOutcome::Failure),
        (503, WorkerOutcome::Overloaded),
        (504, WorkerOutcome::Failure),
        (529, WorkerOutcome::Overloaded),
    ] {
        assert_eq!(WorkerOutcome::from_status(status), outcome, "{status}");
    }
}

#[derive(Clone, Debug)]
enum Op {
    Report(u64, WorkerOutcome),
    Claim(u64),
    ReportProbe(usize, WorkerOutcome),
    Return(usize),
    Remove(u64),
    Check(u64, bool),
    Wait(u64),
}

fn any_op() -> impl Strategy<Value = Op> {
    let outcome = || {
        prop_oneof![4 => Just(WorkerOutcome::Failure), 1 => Just(WorkerOutcome::Success), 1 => Just(WorkerOutcome::Overloaded),
            1 => Just(WorkerOutcome::Inconclusive)]
    };
    prop_oneof![
        4 => (0u64..2, outcome()).prop_map(|(worker, outcome)| Op::Report(worker, outcome)),
        4 => (0u64..2).prop_map(Op::Claim),
        2 => (0usize..4, outcome()).prop_map(|(at, outcome)| Op::ReportProbe(at, outcome)),
        1 => (0usize..4).prop_map(Op::Return),
        1 => (0u64..2).prop_map(Op::Remove),
        2 => (0u64..2, any::<bool>()).prop_map(|(worker, is_healthy)| Op::Check(worker, is_healthy)),
        4 => (0u64..5).prop_map(Op::Wait),
    ]
}

/// Model of one worker.
#[derive(Clone, Copy, Default)]
struct Model {
    failures: u32,
    /// Second at which the ejection ends, and its duration.
    ejection: Option<(u64, u64)>,
    /// Number of the probe in progress.
    probe: Option<usize>,
    /// Whether the last health check since the ejection failed.
    is_down: bool,
    /// Number of ejections that a health check ended.
    early_ends: u32,
}

impl Model {
    fn apply(&mut self, outcome: WorkerOutcome, now: u64, by_probe: bool) {
        match outcome {
            WorkerOutcome::Success => *self = Model::default(),
            WorkerOutcome::Failure if by_probe => {
                let period = self.ejection.map_or(1, |(_, period)| (2 * period).min(4));
                self.ejection = Some((now + period, period));
                self.probe = None;
            }
            WorkerOutcome::Failure => {
                self.failures += 1;
                if self.ejection.is_none() && self.failures >= 2 {
                    self.ejection = Some((now + 1, 1));
                }
            }
            WorkerOutcome::Overloaded | WorkerOutcome::Inconclusive if by_probe => {
                self.probe = None
            }
            WorkerOutcome::Overloaded | WorkerOutcome::Inconclusive => {}
        }
    }

    fn health(&self, now: u64) -> WorkerHealth {
        match self.ejection {
            None => WorkerHealth::Healthy,
            Some((until, _)) if until <= now && self.probe.is_none() => WorkerHealth::ProbeDue,
            Some(_) => WorkerHealth::Ejected,
        }
    }
}

proptest! {
    #![proptest_config(property_config(10_000))]

    #[test]
    fn health_matches_model_with_single_probes(ops in prop::collection::vec(any_op(), 1..40)) {
        let rules = HealthRules { consecutive_failures: 2, base_ejection_time: seconds(1), max_ejection_time: seconds(4) };
        let health = HealthTracker::new(rules);
        let start = Instant::now();
        let mut now = 0;
        let mut models = [Model::default(); 2];
        let mut probes: Vec<(usize, HealthProbe)> = Vec::new();
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
                    let due = model.health(now) == WorkerHealth::ProbeDue;
                    let probe = health.claim_probe(WorkerId(worker), at);
                    prop_assert_eq!(probe.is_some(), due);
                    if let Some(probe) = probe {
                        model.probe = Some(claims);
                        probes.push((claims, probe));
                        claims += 1;
                    }
                }
                Op::ReportProbe(nth, outcome) if nth < probes.len() => {
                    let (number, probe) = probes.remove(nth);
                    let model = &mut models[probe.worker().0 as usize];
                    if model.probe == Some(number) {
                        model.apply(outcome, now, true);
                    }
                    probe.report(outcome, at);
                }
                Op::Return(nth) if nth < probes.len() => {
                    let (number, probe) = probes.remove(nth);
                    let model = &mut models[probe.worker().0 as usize];
                    model.probe = model.probe.filter(|in_progress| *in_progress != number);
                }
                Op::ReportProbe(..) | Op::Return(_) => {}
                Op::Remove(worker) => {
                    health.remove(WorkerId(worker));
                    models[worker as usize] = Model::default();
                }
                Op::Check(worker, is_healthy) => {
                    let model = &mut models[worker as usize];
                    let is_back = model.ejection.is_some() && is_healthy && model.is_down && model.early_ends < 3;
                    if let Some((until, period)) = model.ejection.filter(|_| is_back) {
                        model.ejection = Some((until.min(now), if model.early_ends == 0 { 1 } else { period }));
                        model.early_ends += 1;
                    }
                    model.is_down = model.ejection.is_some() && !is_healthy;
                    prop_assert_eq!(health.on_health_check(WorkerId(worker), is_healthy, at), is_back);
                }
                Op::Wait(seconds) => now += seconds,
            }
            let mut unhealthy = 0;
            for (worker, model) in models.iter().enumerate() {
                let found = health.worker_health(WorkerId(worker as u64), start + seconds(now));
                prop_assert_eq!(found, model.health(now));
                unhealthy += usize::from(found != WorkerHealth::Healthy);
            }
            prop_assert_eq!(health.unhealthy_workers(start + seconds(now)).len(), unhealthy);
        }
    }
}
