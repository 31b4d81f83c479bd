//! Recovery of a worker that was slow for a while, and the cost of one that does not answer, in
//! virtual time.

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;
use crate::load::CompleteOutput;
use crate::policy::{PolicyName, PolicySettings, Weights};

/// Blocks of a long and of a short prompt. No two requests share one.
const LONG_PROMPT: u64 = 40;
const SHORT_PROMPT: u64 = 2;

/// Seconds of a prefill on a healthy worker: fixed part, and per block.
const PREFILL_SECONDS: f64 = 0.008;
const BLOCK_SECONDS: f64 = 0.0004;

/// Tokens of an answer, and seconds of a decode step on a healthy worker.
const ANSWER_TOKENS: u64 = 17;
const STEP_SECONDS: f64 = 0.005;

/// Factor of the slow worker.
const SLOW_FACTOR: f64 = 8.0;

fn settings(name: PolicyName) -> RouterSettings {
    RouterSettings {
        policy: PolicySettings::named(name, &Weights::default()),
        ..RouterSettings::default()
    }
}

/// Request that a simulated engine runs.
struct RunningRequest {
    placement: Placement,
    /// Total time of its decode steps.
    decode_time: Duration,
}

/// Router with simulated engines, which compute one prefill after another.
struct VirtualFleet {
    router: Router,
    clock: Clock,
    rng: StdRng,
    /// Requests per second.
    rate: f64,
    /// Number of workers that can be slow, the first ones.
    slow_workers: usize,
    /// Share of the prefills that wait for other work of the machine.
    delayed_share: f64,
    /// Time at which each engine has computed its queue.
    free_at: Vec<Instant>,
    /// Running requests by the time of their next event.
    running: BTreeMap<(Instant, u64), RunningRequest>,
    requests: u64,
}

impl VirtualFleet {
    fn new(workers: usize, rate: f64, seed: u64) -> Self {
        let clock = Clock::default();
        let workers = 0..workers as u64;
        let free_at = workers.clone().map(|_| clock.now()).collect();
        Self {
            router: clocked(workers.map(worker), settings(PolicyName::Seconds), &clock),
            clock,
            rng: StdRng::seed_from_u64(seed),
            rate,
            slow_workers: 1,
            delayed_share: 0.0,
            free_at,
            running: BTreeMap::new(),
            requests: 0,
        }
    }

    /// Sends requests for this time, while the slow workers have this factor. Returns the number of requests
    /// of each worker, and the maximum number of prefills that worker 0 had at once.
    fn run(&mut self, seconds: f64, factor: f64) -> (Vec<u32>, usize) {
        let end = self.clock.now() + Duration::from_secs_f64(seconds);
        let mut counts = vec![0; self.free_at.len()];
        let mut most = 0;
        loop {
            let distance = self.rng.random_range(0.5..1.5) / self.rate;
            let arrival = self.clock.now() + Duration::from_secs_f64(distance);
            self.complete_until(arrival);
            if arrival > end {
                return (counts, most);
            }
            let at = self.send(factor);
            counts[at] += 1;
            let is_prefill_of_worker_0 = |request: &&RunningRequest| {
                let placement = &request.placement;
                worker_of(placement) == 0 && !placement.reservation.has_first_token()
            };
            most = most.max(self.running.values().filter(is_prefill_of_worker_0).count());
        }
    }

    /// Handles the events until this time.
    fn complete_until(&mut self, time: Instant) {
        while let Some(entry) = self.running.first_entry()
            && entry.key().0 <= time
        {
            let (at, number) = *entry.key();
            self.clock.set(at);
            let mut request = entry.remove();
            let reservation = &mut request.placement.reservation;
            if reservation.has_first_token() {
                let tokens = Some(ANSWER_TOKENS);
                reservation.learn_output(CompleteOutput::Stream { tokens });
                continue;
            }
            reservation.on_first_token();
            self.router.learn_first_token(&mut request.placement);
            self.running
                .insert((at + request.decode_time, number), request);
        }
        self.clock.set(time);
    }

    /// Sends one request. Returns its worker.
    fn send(&mut self, factor: f64) -> usize {
        self.requests += 1;
        let first = self.requests * LONG_PROMPT;
        let is_long = self.requests.is_multiple_of(3);
        let blocks = if is_long { LONG_PROMPT } else { SHORT_PROMPT };
        let prompt = request(&[(first..first + blocks).collect()]);
        let placement = self.router.route(prompt).unwrap();
        let at = worker_of(&placement);
        let factor = if at < self.slow_workers { factor } else { 1.0 };
        let mut noisy = |seconds: f64| {
            Duration::from_secs_f64(seconds * factor * self.rng.random_range(0.9..1.3))
        };
        let prefill_time = noisy(PREFILL_SECONDS + BLOCK_SECONDS * blocks as f64);
        let decode_time = noisy(STEP_SECONDS * (ANSWER_TOKENS - 1) as f64);
        let delay = if self.rng.random_bool(self.delayed_share) {
            self.rng.random_range(0.05..0.3)
        } else {
            0.0
        };
        let free_at = &mut self.free_at[at];
        *free_at = (*free_at).max(self.clock.now()) + prefill_time + Duration::from_secs_f64(delay);
        let request = RunningRequest {
            placement,
            decode_time,
        };
        self.running.insert((*free_at, self.requests), request);
        at
    }

    /// Returns the prefill and the decode factor of each worker.
    fn factors(&self) -> Vec<[f64; 2]> {
        let ranks = self.router.load().calibration().ranks;
        let slowdowns = ranks.iter().map(|rank| rank.slowdown);
        slowdowns
            .map(|slowdown| [slowdown.prefill_factor, slowdown.decode_factor])
            .collect()
    }
}

fn worker_of(placement: &Placement) -> usize {
    let WorkerId(worker) = placement.route.to.rank.worker;
    worker as usize
}

proptest! {
    #![proptest_config(property_config(320))]

    /// The worker is slow for 30 s. 30 s after its recovery, its factors must be at most 1.25 times the
    /// highest of the others. A minute later, its share must exceed a quarter of the mean.
    #[test]
    fn slow_worker_recovers_within_thirty_seconds(
        seed in any::<u64>(),
        rate in 1.0..30.0,
        workers in 2..=16_usize,
    ) {
        let mut fleet = VirtualFleet::new(workers, rate, seed);
        // Each worker has been observed often enough to have a factor.
        fleet.run(30.0 + 40.0 * workers as f64 / rate, 1.0);
        fleet.run(15.0, SLOW_FACTOR);
        let was_avoided = fleet.factors()[0][0] > 2.0;
        let (slow, most) = fleet.run(15.0, SLOW_FACTOR);
        let fair_share = 15.0 * rate / workers as f64;
        if was_avoided {
            prop_assert!(slow[0] <= 4, "{slow:?}");
            prop_assert!(most <= 1, "{most} at once");
        }
        // Ties are random, so the number of a normal worker has a deviation of a square root.
        let most_of_fair_share = fair_share + 4.0 * (1.0 + fair_share.sqrt());
        prop_assert!(f64::from(slow[0]) <= most_of_fair_share, "{slow:?}");
        fleet.run(30.0, 1.0);
        let factors = fleet.factors();
        for phase in 0..2 {
            let others = factors[1..].iter().map(|factors| factors[phase]).fold(0.0, f64::max);
            prop_assert!(factors[0][phase] <= 1.25 * others, "{phase}: {factors:?}");
        }
        fleet.run(60.0, 1.0);
        let (after, _) = fleet.run(60.0 * workers as f64 / rate, 1.0);
        let mean = f64::from(after.iter().sum::<u32>()) / workers as f64;
        prop_assert!(f64::from(after[0]) > 0.25 * mean, "{after:?}");
    }
}

#[test]
fn workers_that_stay_slow_get_few_trials() {
    let mut fleet = VirtualFleet::new(8, 10.0, 4);
    fleet.slow_workers = 4;
    fleet.run(240.0, SLOW_FACTOR);
    let (counts, _) = fleet.run(240.0, SLOW_FACTOR);
    let slow = &counts[..4];
    assert!(slow.iter().sum::<u32>() <= 22, "{counts:?}");
    assert!(slow.iter().all(|count| *count >= 1), "{counts:?}");
}

#[test]
fn age_of_factor_grows_without_requests() {
    let mut fleet = VirtualFleet::new(2, 10.0, 1);
    let age = |fleet: &VirtualFleet| fleet.router.load().calibration().ranks[0].age_seconds;
    assert_eq!(age(&fleet), None);
    fleet.run(20.0, 1.0);
    let before = age(&fleet).unwrap();
    fleet.clock.advance(Duration::from_secs(100));
    assert!((age(&fleet).unwrap() - before - 100.0).abs() < 1e-6);
}

/// Worker A has one short prompt that it does not answer, and worker B a long one that it has just
/// received. By tokens alone, A would be chosen.
#[test]
fn waiting_requests_cost_time_in_each_policy() {
    let policies = [
        PolicyName::Seconds,
        PolicyName::Linear,
        PolicyName::LinearTuned,
        PolicyName::Agentic,
        PolicyName::Lmetric,
        PolicyName::Sticky,
    ];
    for policy in policies {
        let mut fleet = VirtualFleet::new(2, 10.0, 2);
        fleet.router.set_settings(settings(policy));
        fleet.run(20.0, 1.0);
        fleet.complete_until(fleet.clock.now() + Duration::from_secs(5));
        let prompt = |from: u64, count: u64| request(&[(from..from + count).collect()]);
        let silent = fleet.router.route(prompt(0, 40)).unwrap();
        let chosen = |fleet: &VirtualFleet| {
            let mut long = prompt(1_000, 2_000);
            let other = WorkerId(1 - worker_of(&silent) as u64);
            long.constraints.allowed = Some([other].into());
            let _busy = fleet.router.route(long).unwrap();
            fleet
                .router
                .preview(prompt(5_000, 40))
                .unwrap()
                .to
                .rank
                .worker
        };
        let silent_worker = silent.route.to.rank.worker;
        assert_eq!(chosen(&fleet), silent_worker, "{policy:?}: at first");
        fleet.clock.advance(Duration::from_secs(60));
        assert_ne!(chosen(&fleet), silent_worker, "{policy:?}: after 60 s");
        let loads = fleet.router.load().snapshot();
        let tokens = loads[worker_of(&silent)].active_prefill_tokens;
        assert_eq!(tokens, 161, "{policy:?}: pages show the booked tokens");
    }
}

#[test]
fn late_request_of_working_engine_costs_nothing() {
    let mut fleet = VirtualFleet::new(2, 10.0, 3);
    fleet.run(20.0, 1.0);
    let mut late = fleet.router.route(request(&[(0..40).collect()])).unwrap();
    fleet.clock.advance(Duration::from_secs(30));
    let member = fleet
        .router
        .fleet()
        .members()
        .nth(worker_of(&late))
        .cloned()
        .unwrap();
    let delay = |fleet: &VirtualFleet| {
        let timing = fleet
            .router
            .load()
            .read(|view| view.timing(member.slot, member.rank));
        timing.unwrap().delay
    };
    assert!(delay(&fleet) > 5.0);
    let mut other = request(&[(100..140).collect()]);
    other.constraints.allowed = Some([member.rank.worker].into());
    let mut other = fleet.router.route(other).unwrap();
    other.reservation.on_first_token();
    assert_eq!(delay(&fleet), 0.0);
    late.reservation.on_first_token();
    assert_eq!(delay(&fleet), 0.0);
}

/// Sends 200 requests to two workers. Asserts that each gets 40 to 60 % of them.
fn assert_prompts_are_shared(fleet: &mut VirtualFleet, case: &str) {
    let rate = fleet.rate;
    let (counts, _) = fleet.run(200.0 / rate, 1.0);
    let share = f64::from(counts[0]) / f64::from(counts[0] + counts[1]);
    assert!(
        (0.4..0.6).contains(&share),
        "{rate}/s, {case}: {counts:?}, {:?}",
        fleet.factors()
    );
}

#[test]
fn idle_fleet_shares_cold_prompts() {
    for rate in [1.0, 4.0, 10.0] {
        for (former, seed) in [0.6, 1.0, 1.2, 1.5, 3.0].into_iter().zip(0..) {
            let mut fleet = VirtualFleet::new(2, rate, seed);
            fleet.run(100.0, 1.0);
            fleet.run(60.0, former);
            fleet.run(60.0, 1.0);
            assert_prompts_are_shared(&mut fleet, &format!("formerly {former}, seed {seed}"));
        }
    }
}

/// Both workers become faster or stay as fast, and one of ten prefills is late.
#[test]
fn equal_workers_share_prompts_despite_late_prefills() {
    for rate in [4.0, 10.0] {
        for (former, seed) in [1.0, 2.0, 3.0, 5.0].into_iter().cycle().zip(0..40) {
            let mut fleet = VirtualFleet::new(2, rate, seed);
            fleet.slow_workers = 2;
            fleet.delayed_share = 0.1;
            fleet.run(300.0 / rate, former);
            fleet.run(100.0 / rate, 1.0);
            assert_prompts_are_shared(&mut fleet, &format!("formerly {former}, seed {seed}"));
        }
    }
}

/// At first, the decode factor of the worker is just above that of the others. While it is slow, its
/// decode steps are discarded as stalls, so that it has only ratings of the time before.
#[test]
fn old_ratings_permit_no_trials() {
    let rate = 4.225930279186158;
    let mut fleet = VirtualFleet::new(4, rate, 712332555405014581);
    fleet.run(30.0 + 160.0 / rate, 1.0);
    fleet.run(15.0, SLOW_FACTOR);
    let (counts, _) = fleet.run(15.0, SLOW_FACTOR);
    assert!(counts[0] <= 4, "{counts:?}");
}
