//! Fleets in virtual time: every request goes to the least loaded rank that is not avoided, as in
//! the router.

use std::collections::BTreeSet;

use super::*;

const SERVICE_TIME: Duration = Duration::from_secs(1);
const STEP: Duration = Duration::from_millis(50);

/// Behaviour of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RankBehavior {
    Delivers,
    /// Answers at once with this outcome.
    Fails(RequestOutcome),
    Hangs,
}

/// One request in progress.
struct SentRequest {
    tracked: TrackedRequest,
    worker: u64,
    ends_at: Option<Instant>,
    outcome: RequestOutcome,
}

struct SimulatedFleet {
    fixture: Fixture,
    behaviors: Vec<RankBehavior>,
    running: Vec<SentRequest>,
    held: Vec<(Instant, u64)>,
    /// Worker and time of every request.
    sent: Vec<(u64, Instant)>,
    ejected: BTreeSet<u64>,
}

impl SimulatedFleet {
    fn new(behaviors: Vec<RankBehavior>) -> Self {
        Self {
            fixture: Fixture::new(behaviors.len() as u64),
            behaviors,
            running: Vec::new(),
            held: Vec::new(),
            sent: Vec::new(),
            ejected: BTreeSet::new(),
        }
    }

    fn load(&self, worker: u64) -> usize {
        let running = self
            .running
            .iter()
            .filter(|request| request.worker == worker);
        let held = self.held.iter().filter(|(_, held)| *held == worker);
        running.count() + held.count()
    }

    fn choose(&self) -> u64 {
        let unhealthy = self.fixture.health.unhealthy_ranks(&[], self.fixture.now);
        let is_ready = |worker: &u64| {
            let health = unhealthy.get(&rank(*worker)).copied();
            let health = health.unwrap_or(HealthState::Healthy);
            WorkerAvailability::from(health) == WorkerAvailability::Ready
        };
        let workers = 1..=self.behaviors.len() as u64;
        let ready: Vec<u64> = workers.clone().filter(is_ready).collect();
        let candidates = if ready.is_empty() {
            workers.collect()
        } else {
            ready
        };
        let rotated = self.sent.len();
        let by_load = |worker: &u64| {
            let turn = (*worker as usize + rotated) % self.behaviors.len();
            (self.load(*worker), turn)
        };
        candidates.into_iter().min_by_key(by_load).unwrap()
    }

    fn send(&mut self, is_client_fault: bool) {
        let worker = self.choose();
        let fixture = &self.fixture;
        let must_probe = fixture.health(worker) == HealthState::ProbeDue;
        let expected = Some(SERVICE_TIME);
        let tracked = fixture
            .health
            .start(rank(worker), expected, must_probe, fixture.now);
        let (outcome, ends_at) = match self.behaviors[worker as usize - 1] {
            RankBehavior::Hangs => (RequestOutcome::Cancelled, None),
            _ if is_client_fault => (RequestOutcome::Rejected, Some(fixture.now)),
            RankBehavior::Delivers => (RequestOutcome::Delivered, Some(fixture.now + SERVICE_TIME)),
            RankBehavior::Fails(outcome) => (outcome, Some(fixture.now)),
        };
        self.sent.push((worker, fixture.now));
        self.running.push(SentRequest {
            tracked: tracked.unwrap(),
            worker,
            ends_at,
            outcome,
        });
    }

    fn advance(&mut self) {
        let now = self.fixture.now;
        self.held.retain(|(until, _)| *until > now);
        let is_done = |request: &mut SentRequest| request.ends_at.is_some_and(|at| at <= now);
        let done: Vec<_> = self.running.extract_if(.., is_done).collect();
        for mut request in done {
            let transitions = request.tracked.report(request.outcome, &[], now);
            self.note(transitions);
            if let Some(hold_time) = request.tracked.on_end(now) {
                self.held.push((now + hold_time, request.worker));
            }
        }
        let transitions = self.fixture.health.on_tick(now);
        self.note(transitions);
        self.fixture.now += STEP;
    }

    fn note(&mut self, transitions: Vec<HealthTransition>) {
        for transition in transitions {
            if let HealthChange::Ejected(_) = transition.change {
                self.ejected.insert(transition.rank.worker.0);
            }
        }
    }

    /// Sends 20 requests per second.
    fn run(&mut self, time: Duration) {
        let end = self.fixture.now + time;
        while self.fixture.now < end {
            self.send(false);
            self.advance();
        }
    }

    /// Returns the share of requests that a worker received since a time.
    fn share(&self, worker: u64, since: Instant) -> f64 {
        let sent = || self.sent.iter().filter(|(_, at)| *at >= since);
        let received = sent().filter(|(to, _)| *to == worker).count();
        received as f64 / sent().count() as f64
    }
}

#[test]
fn failing_rank_gets_less_than_fair_share() {
    let kinds = [
        RankBehavior::Fails(RequestOutcome::Rejected),
        RankBehavior::Fails(RequestOutcome::ServerError),
        RankBehavior::Fails(RequestOutcome::Overloaded),
        RankBehavior::Fails(RequestOutcome::Empty),
        RankBehavior::Fails(RequestOutcome::Unreachable),
        RankBehavior::Hangs,
    ];
    for workers in [2, 4, 16] {
        for kind in kinds {
            let mut behaviors = vec![RankBehavior::Delivers; workers];
            behaviors[0] = kind;
            let mut fleet = SimulatedFleet::new(behaviors);
            let start = fleet.fixture.now;
            fleet.run(seconds(5));
            let early = fleet.share(1, start);
            let fair = 1.0 / workers as f64;
            assert!(early <= fair + 0.01, "{kind:?} {workers} {early}");
            fleet.run(seconds(10));
            let later = fleet.fixture.now;
            fleet.run(seconds(30));
            let share = fleet.share(1, later);
            assert!(share < 0.02, "{kind:?} {workers} {share}");
            assert_eq!(fleet.ejected, [1].into(), "{kind:?} {workers}");

            fleet.behaviors[0] = RankBehavior::Delivers;
            for request in &mut fleet.running {
                request.ends_at.get_or_insert(fleet.fixture.now);
            }
            fleet.run(seconds(30));
            assert_eq!(fleet.fixture.health(1), HealthState::Healthy, "{kind:?}");
        }
    }
}

#[test]
fn fleet_that_only_fails_keeps_serving() {
    for outcome in failures() {
        let mut fleet = SimulatedFleet::new(vec![RankBehavior::Fails(outcome); 4]);
        fleet.run(seconds(20));
        let start = fleet.fixture.now;
        fleet.run(seconds(20));
        assert!(fleet.sent.iter().any(|(_, at)| *at >= start));
        if outcome != RequestOutcome::Unreachable {
            assert!(
                fleet
                    .fixture
                    .health
                    .unhealthy_ranks(&[], fleet.fixture.now)
                    .len()
                    <= 2
            );
        }
    }
}

fn any_behavior() -> impl Strategy<Value = RankBehavior> {
    // Only clients cancel.
    let failures = failures().filter(|outcome| *outcome != RequestOutcome::Cancelled);
    let failures = proptest::sample::select(failures.collect::<Vec<_>>());
    prop_oneof![
        Just(RankBehavior::Delivers),
        failures.prop_map(RankBehavior::Fails),
        Just(RankBehavior::Hangs),
    ]
}

proptest! {
    #![proptest_config(property_config(64))]

    /// Rank 1 delivers. Its peers behave in any way, and clients send invalid requests to all ranks
    /// in turn.
    #[test]
    fn delivering_rank_is_never_ejected(
        peers in proptest::collection::vec(any_behavior(), 0..7),
        invalid_every in 2..20_usize,
    ) {
        let mut behaviors = vec![RankBehavior::Delivers];
        behaviors.extend(peers);
        let mut fleet = SimulatedFleet::new(behaviors);
        for request in 0..1200 {
            fleet.send(request % invalid_every == 0);
            fleet.advance();
        }
        prop_assert!(!fleet.ejected.contains(&1));
    }

    /// The share of failed requests falls to that of the ranks that may not be ejected.
    #[test]
    fn share_of_failed_requests_converges(
        faults in proptest::collection::vec(any_behavior(), 1..4),
        healthy in 4..8_usize,
    ) {
        let mut behaviors = vec![RankBehavior::Delivers; healthy];
        behaviors.extend(faults.clone());
        let mut fleet = SimulatedFleet::new(behaviors);
        fleet.run(seconds(60));
        let start = fleet.fixture.now;
        fleet.run(seconds(60));
        for (at, fault) in faults.iter().enumerate() {
            if *fault != RankBehavior::Delivers {
                let share = fleet.share((healthy + at + 1) as u64, start);
                prop_assert!(share < 0.02, "{fault:?} {share}");
            }
        }
        prop_assert!((1..=healthy as u64).all(|worker| !fleet.ejected.contains(&worker)));
    }
}
