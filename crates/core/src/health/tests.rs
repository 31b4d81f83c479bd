use proptest::prelude::*;
use strum::VariantArray;
use warmroute_property_tests::property_config;

use super::*;
use crate::worker::DpRank;

mod delivery;
mod fleet;
mod prompts;

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn rank(worker: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker),
        rank: DpRank(0),
    }
}

/// Returns the outcomes that count as failures.
fn failures() -> impl Iterator<Item = RequestOutcome> {
    let all = RequestOutcome::VARIANTS.iter().copied();
    all.filter(|outcome| outcome.is_failure())
}

/// Ranks of one model with a clock.
struct Fixture {
    health: Arc<HealthTracker>,
    now: Instant,
}

impl Fixture {
    fn new(workers: u64) -> Self {
        let health = HealthTracker::new(HealthRules::default());
        let now = Instant::now();
        let group = PeerGroup {
            model: "m".into(),
            is_prefill: false,
        };
        let members = (1..=workers).map(|worker| (rank(worker), group.clone()));
        health.set_members(members, now);
        Self { health, now }
    }

    fn report(&self, worker: u64, outcome: RequestOutcome) -> Vec<HealthChange> {
        self.report_prompt(worker, outcome, &[])
    }

    fn report_prompt(
        &self,
        worker: u64,
        outcome: RequestOutcome,
        prompt: &[u64],
    ) -> Vec<HealthChange> {
        let prompt: Vec<_> = prompt.iter().copied().map(SequenceHash).collect();
        changes(self.health.report(rank(worker), outcome, &prompt, self.now))
    }

    fn repeat(&self, worker: u64, outcome: RequestOutcome, count: usize) -> Vec<HealthChange> {
        (0..count)
            .flat_map(|_| self.report(worker, outcome))
            .collect()
    }

    fn health(&self, worker: u64) -> HealthState {
        self.health.rank_health(rank(worker), self.now)
    }

    fn start(&self, worker: u64, expected: Option<Duration>) -> TrackedRequest {
        self.health
            .start(rank(worker), expected, false, self.now)
            .unwrap()
    }

    fn probe(&self, worker: u64) -> Option<TrackedRequest> {
        self.health.start(rank(worker), None, true, self.now)
    }

    fn finish(&self, mut request: TrackedRequest, outcome: RequestOutcome) -> Vec<HealthChange> {
        changes(request.report(outcome, &[], self.now))
    }

    fn set_signal(&self, worker: u64, signal: HealthSignal, is_failing: bool) {
        let worker = WorkerId(worker);
        let health = &self.health;
        health.with_model(|model| model.set_signal(worker, signal, is_failing));
    }

    fn tick(&self) -> Vec<HealthChange> {
        changes(self.health.on_tick(self.now))
    }

    /// Delivers a request of one second on a rank, so that its group knows the time.
    fn deliver(&mut self, worker: u64) {
        let request = self.start(worker, Some(seconds(1)));
        self.now += seconds(1);
        self.finish(request, RequestOutcome::Delivered);
    }
}

fn changes(transitions: Vec<HealthTransition>) -> Vec<HealthChange> {
    transitions
        .into_iter()
        .map(|transition| transition.change)
        .collect()
}

#[test]
fn unreachable_rank_is_ejected_without_comparison() {
    let fixture = Fixture::new(2);
    for worker in [1, 2] {
        assert_eq!(fixture.repeat(worker, RequestOutcome::Unreachable, 2), []);
        assert_eq!(
            fixture.report(worker, RequestOutcome::Unreachable),
            [HealthChange::Ejected(seconds(1))]
        );
    }
    assert_eq!(fixture.health.unhealthy_ranks(&[], fixture.now).len(), 2);
}

#[test]
fn delivery_resets_unreachable_requests() {
    let fixture = Fixture::new(1);
    for outcome in [
        RequestOutcome::Unreachable,
        RequestOutcome::Unreachable,
        RequestOutcome::Delivered,
        RequestOutcome::Unreachable,
        RequestOutcome::Unreachable,
    ] {
        assert_eq!(fixture.report(1, outcome), []);
    }
    assert_eq!(fixture.health(1), HealthState::Healthy);
}

#[test]
fn rank_is_ejected_if_only_its_peers_deliver() {
    let cases = [
        (RequestOutcome::ServerError, 3),
        (RequestOutcome::Empty, 3),
        (RequestOutcome::Rejected, 6),
        (RequestOutcome::NoOutput, 6),
        (RequestOutcome::Overloaded, 6),
    ];
    for (outcome, failures) in cases {
        let fixture = Fixture::new(4);
        assert_eq!(fixture.report(1, outcome), [], "{outcome:?}");
        fixture.report(2, RequestOutcome::Delivered);
        assert_eq!(fixture.repeat(1, outcome, failures - 2), [], "{outcome:?}");
        assert_eq!(
            fixture.report(1, outcome),
            [HealthChange::Ejected(seconds(1))],
            "{outcome:?}"
        );
        let report = fixture.health.with_model(|model| model.report(fixture.now));
        assert_eq!(
            report[0].evidence.failures,
            FailureCounts::from([(outcome, failures as u32)])
        );
        assert_eq!(report[0].evidence.peers_delivered, 1);
    }
}

#[test]
fn rank_that_fails_often_is_ejected() {
    let fixture = Fixture::new(4);
    let mut ejected = 0;
    for _ in 0..20 {
        ejected += fixture.report(1, RequestOutcome::ServerError).len();
        fixture.report(1, RequestOutcome::Delivered);
        fixture.repeat(2, RequestOutcome::Delivered, 3);
    }
    assert!(ejected > 0);
}

#[test]
fn failures_of_all_ranks_eject_none() {
    for outcome in failures() {
        if outcome == RequestOutcome::Unreachable {
            continue;
        }
        let fixture = Fixture::new(4);
        fixture.repeat(1, RequestOutcome::Delivered, 400);
        for _ in 0..50 {
            for worker in 1..=4 {
                let changes = fixture.report(worker, outcome);
                let is_ejection =
                    |change: &HealthChange| matches!(change, HealthChange::Ejected(_));
                assert!(!changes.iter().any(is_ejection), "{outcome:?} {changes:?}");
            }
        }
        assert_eq!(
            fixture.health.unhealthy_ranks(&[], fixture.now),
            BTreeMap::new()
        );
    }
}

#[test]
fn suspect_is_ejected_when_a_peer_delivers() {
    let fixture = Fixture::new(3);
    fixture.repeat(1, RequestOutcome::ServerError, 2);
    assert_eq!(
        fixture.report(1, RequestOutcome::ServerError),
        [HealthChange::Suspected]
    );
    assert_eq!(fixture.health(1), HealthState::Suspect);
    assert_eq!(
        fixture.report(2, RequestOutcome::Delivered),
        [HealthChange::Ejected(seconds(1))]
    );
}

#[test]
fn suspicion_is_withdrawn_when_a_peer_fails() {
    let fixture = Fixture::new(3);
    fixture.repeat(1, RequestOutcome::ServerError, 3);
    assert_eq!(
        fixture.report(2, RequestOutcome::ServerError),
        [HealthChange::Cleared]
    );
    assert_eq!(fixture.health(1), HealthState::Healthy);
}

#[test]
fn suspicion_ends_without_outcomes_of_peers() {
    let mut fixture = Fixture::new(3);
    fixture.repeat(1, RequestOutcome::ServerError, 3);
    fixture.now += seconds(4);
    assert_eq!(fixture.tick(), []);
    fixture.now += seconds(1);
    assert_eq!(fixture.tick(), [HealthChange::Cleared]);
}

#[test]
fn at_most_half_of_ranks_are_ejected_for_answers() {
    for (workers, expected) in [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)] {
        let fixture = Fixture::new(workers);
        for _ in 0..20 {
            for worker in 1..workers {
                fixture.report(worker, RequestOutcome::ServerError);
                fixture.repeat(workers, RequestOutcome::Delivered, 20);
            }
        }
        assert_eq!(
            fixture.health.unhealthy_ranks(&[], fixture.now).len(),
            expected,
            "{workers}"
        );
    }
}

#[test]
fn clean_history_reduces_necessary_failures() {
    let cases = [
        (RequestOutcome::ServerError, 2),
        (RequestOutcome::Rejected, 4),
    ];
    for (outcome, failures) in cases {
        let fixture = Fixture::new(4);
        fixture.repeat(2, RequestOutcome::Delivered, 400);
        assert_eq!(fixture.report(1, outcome), [], "{outcome:?}");
        fixture.report(2, RequestOutcome::Delivered);
        assert_eq!(fixture.repeat(1, outcome, failures - 2), [], "{outcome:?}");
        let ejected = HealthChange::Ejected(seconds(1));
        assert_eq!(fixture.report(1, outcome), [ejected], "{outcome:?}");
    }
}

#[test]
fn failures_of_clients_restore_necessary_failures() {
    let fixture = Fixture::new(4);
    fixture.repeat(2, RequestOutcome::Delivered, 400);
    fixture.repeat(3, RequestOutcome::Rejected, 1);
    for _ in 0..50 {
        fixture.repeat(3, RequestOutcome::Rejected, 1);
        fixture.repeat(3, RequestOutcome::Delivered, 19);
    }
    fixture.report(1, RequestOutcome::ServerError);
    fixture.report(2, RequestOutcome::Delivered);
    assert_eq!(fixture.report(1, RequestOutcome::ServerError), []);
}

#[test]
fn failed_probes_double_ejection_time_to_limit() {
    let mut fixture = Fixture::new(1);
    fixture.repeat(1, RequestOutcome::Unreachable, 3);
    for period in [2, 4, 8, 16, 20, 20] {
        fixture.now += seconds(20);
        let probe = fixture.probe(1).unwrap();
        assert_eq!(fixture.health(1), HealthState::Probing);
        assert!(fixture.probe(1).is_none());
        assert_eq!(
            fixture.finish(probe, RequestOutcome::Unreachable),
            [HealthChange::EjectionExtended(seconds(period))]
        );
        assert_eq!(fixture.health(1), HealthState::Ejected);
    }
    fixture.now += seconds(20);
    let probe = fixture.probe(1).unwrap();
    assert_eq!(
        fixture.finish(probe, RequestOutcome::Delivered),
        [HealthChange::Readmitted]
    );
    assert!(fixture.health.is_all_healthy());
}

#[test]
fn due_probe_is_forced_unless_worker_is_down() {
    let mut fixture = Fixture::new(2);
    fixture.report(1, RequestOutcome::ServerError);
    fixture.report(2, RequestOutcome::Delivered);
    fixture.repeat(1, RequestOutcome::ServerError, 4);
    for (after, health) in [
        (1, HealthState::ProbeDue),
        (4, HealthState::ProbeDue),
        (1, HealthState::ProbeForced),
    ] {
        fixture.now += seconds(after);
        assert_eq!(fixture.health(1), health);
    }
    fixture
        .health
        .on_health_check(WorkerId(1), false, fixture.now);
    assert_eq!(fixture.health(1), HealthState::ProbeDue);
    fixture.now += seconds(5);
    let probe = fixture.probe(1).unwrap();
    assert_eq!(
        fixture.finish(probe, RequestOutcome::Delivered),
        [HealthChange::Readmitted]
    );
}

#[test]
fn inconclusive_probe_becomes_due_again() {
    let mut fixture = Fixture::new(1);
    fixture.repeat(1, RequestOutcome::Unreachable, 3);
    assert!(fixture.probe(1).is_none());
    fixture.now += seconds(1);
    drop(fixture.probe(1).unwrap());
    for outcome in [RequestOutcome::Overloaded, RequestOutcome::Rejected] {
        let probe = fixture.probe(1).unwrap();
        assert_eq!(fixture.finish(probe, outcome), []);
        assert_eq!(fixture.health(1), HealthState::ProbeDue);
    }
}

#[test]
fn rejection_fails_probe_of_rejecting_rank() {
    let mut fixture = Fixture::new(2);
    fixture.report(1, RequestOutcome::Rejected);
    fixture.report(2, RequestOutcome::Delivered);
    fixture.repeat(1, RequestOutcome::Rejected, 5);
    fixture.now += seconds(1);
    let probe = fixture.probe(1).unwrap();
    assert_eq!(
        fixture.finish(probe, RequestOutcome::Rejected),
        [HealthChange::EjectionExtended(seconds(2))]
    );
}

#[test]
fn probe_of_removed_rank_does_not_affect_successor() {
    let mut fixture = Fixture::new(1);
    fixture.repeat(1, RequestOutcome::Unreachable, 3);
    fixture.now += seconds(1);
    let probe = fixture.probe(1).unwrap();
    fixture.health.set_members(std::iter::empty(), fixture.now);
    assert!(fixture.health.is_all_healthy());
    let group = PeerGroup {
        model: "m".into(),
        is_prefill: false,
    };
    let member = (rank(1), group);
    fixture
        .health
        .set_members([member].into_iter(), fixture.now);
    fixture.repeat(1, RequestOutcome::Unreachable, 3);
    fixture.now += seconds(1);
    let second = fixture.probe(1).unwrap();
    drop(probe);
    assert_eq!(fixture.health(1), HealthState::Probing);
    drop(second);
    assert_eq!(fixture.health(1), HealthState::ProbeDue);
}

#[test]
fn health_check_ends_only_ejections_of_dead_workers() {
    let cases = [
        (RequestOutcome::Unreachable, 3, true),
        (RequestOutcome::ServerError, 3, true),
        (RequestOutcome::Rejected, 6, false),
        (RequestOutcome::NoResponse, 3, false),
    ];
    for (outcome, failures, expected) in cases {
        let fixture = Fixture::new(2);
        fixture.report(1, outcome);
        fixture.report(2, RequestOutcome::Delivered);
        fixture.repeat(1, outcome, failures - 1);
        assert_eq!(fixture.health(1), HealthState::Ejected, "{outcome:?}");
        let check = |is_healthy| {
            let health = &fixture.health;
            health.on_health_check(WorkerId(1), is_healthy, fixture.now)
        };
        // A check that passes from the start shows no restart.
        assert!(!check(true));
        assert!(!check(false));
        assert_eq!(check(true), expected, "{outcome:?}");
    }
}

#[test]
fn signal_reduces_necessary_failures() {
    for signal in [HealthSignal::LoadScrape, HealthSignal::ModelList] {
        let fixture = Fixture::new(3);
        fixture.set_signal(1, signal, true);
        assert_eq!(
            fixture.report(1, RequestOutcome::ServerError),
            [HealthChange::Suspected]
        );
    }
    let fixture = Fixture::new(3);
    fixture.set_signal(1, HealthSignal::LoadScrape, true);
    assert_eq!(
        fixture.report(1, RequestOutcome::ServerError),
        [HealthChange::Suspected]
    );
    fixture.set_signal(2, HealthSignal::EventSource, true);
    fixture.set_signal(2, HealthSignal::EventSource, false);
    assert_eq!(
        fixture.report(2, RequestOutcome::Rejected),
        [HealthChange::Cleared]
    );
    assert_eq!(fixture.health(2), HealthState::Healthy);
}

#[test]
fn overdue_request_makes_rank_suspect() {
    let mut fixture = Fixture::new(3);
    fixture.deliver(2);
    let waiting = fixture.start(1, Some(seconds(1)));
    fixture.now += seconds(4);
    assert_eq!(fixture.tick(), []);
    fixture.now += Duration::from_millis(1);
    assert_eq!(fixture.tick(), [HealthChange::Suspected]);
    assert_eq!(fixture.tick(), []);
    assert_eq!(
        fixture.report(2, RequestOutcome::Delivered),
        [HealthChange::Ejected(seconds(1))]
    );
    // The answer arrives late.
    assert_eq!(
        fixture.finish(waiting, RequestOutcome::Delivered),
        [HealthChange::Readmitted]
    );
}

#[test]
fn delivering_rank_has_no_overdue_request() {
    let mut fixture = Fixture::new(2);
    fixture.deliver(1);
    let _waiting = fixture.start(1, Some(seconds(1)));
    for _ in 0..10 {
        fixture.now += seconds(3);
        assert_eq!(fixture.tick(), []);
        fixture.report(1, RequestOutcome::Delivered);
    }
}

#[test]
fn rank_that_completes_responses_has_no_overdue_request() {
    let mut fixture = Fixture::new(2);
    fixture.deliver(2);
    let _waiting = fixture.start(1, Some(seconds(1)));
    for _ in 0..3 {
        fixture.now += seconds(3);
        fixture
            .health
            .with_model(|model| model.on_progress(rank(1), fixture.now));
        assert_eq!(fixture.tick(), []);
    }
    fixture.now += seconds(5);
    assert_eq!(fixture.tick(), [HealthChange::Suspected]);
}

#[test]
fn generating_rank_has_no_overdue_request() {
    let mut fixture = Fixture::new(2);
    fixture.deliver(2);
    let mut generating = fixture.start(1, None);
    let _waiting = fixture.start(1, Some(seconds(1)));
    for _ in 0..100 {
        fixture.now += Duration::from_millis(100);
        generating.on_output(fixture.now);
        assert_eq!(fixture.tick(), []);
    }
    fixture.now += seconds(5);
    assert_eq!(fixture.tick(), [HealthChange::Suspected]);
}

#[test]
fn expected_time_delays_overdue_request() {
    let mut fixture = Fixture::new(2);
    fixture.deliver(1);
    let _waiting = fixture.start(1, Some(seconds(30)));
    fixture.now += seconds(120);
    assert_eq!(fixture.tick(), []);
    fixture.now += seconds(1);
    assert_eq!(fixture.tick(), [HealthChange::Suspected]);
}

#[test]
fn unexpected_delays_extend_limit_of_overdue() {
    let mut fixture = Fixture::new(2);
    let late = fixture.start(2, Some(seconds(1)));
    fixture.now += seconds(3);
    fixture.finish(late, RequestOutcome::Delivered);
    // Four times three seconds.
    let _waiting = fixture.start(1, Some(seconds(1)));
    fixture.now += seconds(12);
    assert_eq!(fixture.tick(), []);
    fixture.now += seconds(1);
    assert_eq!(fixture.tick(), [HealthChange::Suspected]);
}

#[test]
fn overestimated_time_is_corrected() {
    let mut fixture = Fixture::new(2);
    let fast = fixture.start(2, Some(seconds(20)));
    fixture.now += Duration::from_millis(50);
    fixture.finish(fast, RequestOutcome::Delivered);
    // Four times a tenth of 20 s.
    let _waiting = fixture.start(1, Some(seconds(20)));
    fixture.now += seconds(8);
    assert_eq!(fixture.tick(), []);
    fixture.now += seconds(1);
    assert_eq!(fixture.tick(), [HealthChange::Suspected]);
}

#[test]
fn one_fast_request_keeps_correct_estimates() {
    let mut fixture = Fixture::new(2);
    for time in [seconds(20), seconds(1), seconds(2)] {
        let request = fixture.start(2, Some(seconds(20)));
        fixture.now += time;
        fixture.finish(request, RequestOutcome::Delivered);
    }
    let _waiting = fixture.start(1, Some(seconds(20)));
    fixture.now += seconds(70);
    assert_eq!(fixture.tick(), []);
}

#[test]
fn unobserved_responses_are_never_overdue() {
    let mut fixture = Fixture::new(2);
    let _waiting = fixture.start(1, Some(seconds(1)));
    fixture.now += seconds(1000);
    assert_eq!(fixture.tick(), []);
}

#[test]
fn overdue_probe_extends_ejection() {
    let mut fixture = Fixture::new(2);
    fixture.deliver(2);
    fixture.repeat(1, RequestOutcome::Unreachable, 3);
    fixture.now += seconds(1);
    let probe = fixture
        .health
        .start(rank(1), Some(seconds(1)), true, fixture.now);
    fixture.now += seconds(5);
    // The maximum: the group receives a request every two seconds.
    let extended = HealthChange::EjectionExtended(seconds(20));
    assert_eq!(fixture.tick(), [extended]);
    drop(probe);
    assert_eq!(fixture.health(1), HealthState::Ejected);
}

#[test]
fn only_late_cancellations_count() {
    let mut fixture = Fixture::new(2);
    fixture.deliver(2);
    let mut seen = Vec::new();
    for (wait, count) in [(1, 20), (2, 6)] {
        for _ in 0..count {
            let request = fixture.start(1, Some(seconds(1)));
            fixture.now += seconds(wait);
            seen.extend(fixture.finish(request, RequestOutcome::Cancelled));
        }
        let expected: &[HealthChange] = if wait == 1 {
            &[]
        } else {
            &[HealthChange::Suspected]
        };
        assert_eq!(seen, expected);
    }
}

#[test]
fn failed_request_is_held_for_service_time_of_peers() {
    let mut fixture = Fixture::new(2);
    let slow = fixture.start(2, Some(seconds(1)));
    let failed = fixture.start(1, Some(seconds(1)));
    let mut failed = failed;
    failed.report(RequestOutcome::Rejected, &[], fixture.now);
    let initial = Some(seconds(3));
    assert_eq!(failed.on_end(fixture.now), initial, "no request completed");
    fixture.now += seconds(2);
    let mut slow = slow;
    slow.report(RequestOutcome::Delivered, &[], fixture.now);
    fixture.now += seconds(2);
    assert_eq!(slow.on_end(fixture.now), None);
    let mut failed = fixture.start(1, Some(seconds(1)));
    failed.report(RequestOutcome::Rejected, &[], fixture.now);
    assert_eq!(failed.on_end(fixture.now), Some(seconds(4)));
}

#[test]
fn disabled_rules_eject_nothing() {
    let fixture = Fixture::new(2);
    fixture
        .health
        .with_model(|model| model.rules.consecutive_failures = 0);
    for outcome in failures() {
        fixture.report(2, RequestOutcome::Delivered);
        assert_eq!(fixture.repeat(1, outcome, 20), []);
    }
}
