//! Decisions of the routing policies, and their selection by model and request.

use super::*;
use crate::policy::{PolicyName, PolicySettings, Weights};

fn settings(name: PolicyName) -> RouterSettings {
    RouterSettings {
        policy: PolicySettings::named(name, &Weights::default()),
        ..RouterSettings::default()
    }
}

fn chosen(placement: &Placement) -> WorkerId {
    placement.route.to.rank.worker
}

/// Returns a prompt that shares no block with others.
fn cold_prompt(number: u64) -> RouteRequest {
    request(&[(0..500).map(|block| number * 1_000 + block).collect()])
}

#[test]
fn first_requests_of_idle_fleet_use_all_workers() {
    let router = router_of((0..6).map(worker), settings(PolicyName::Seconds));
    let placements: Vec<_> = (0..20)
        .map(|number| router.route(cold_prompt(number)).unwrap())
        .collect();
    let used: BTreeSet<WorkerId> = placements.iter().map(chosen).collect();
    assert_eq!(used.len(), 6);
}

#[test]
fn burst_of_equal_prompts_uses_few_workers() {
    let clock = Clock::default();
    let router = clocked((0..8).map(worker), settings(PolicyName::Seconds), &clock);
    let prompt = request(&[(0..8_000).collect()]);
    let placements: Vec<_> = (0..16)
        .map(|_| {
            clock.advance(Duration::from_millis(3));
            router.route(prompt.clone()).unwrap()
        })
        .collect();
    let used: BTreeSet<WorkerId> = placements.iter().map(chosen).collect();
    assert!(used.len() <= 4, "{used:?}");
}

/// Serves cold prompts one by one and returns the number of requests of each worker. The worker
/// `slow` takes twice as long as the others.
fn serve_one_by_one(
    router: &Router,
    clock: &Clock,
    prompts: std::ops::Range<u64>,
    slow: Option<u64>,
) -> [u32; 4] {
    let mut counts = [0; 4];
    for number in prompts {
        let mut placement = router.route(cold_prompt(number)).unwrap();
        let WorkerId(worker) = chosen(&placement);
        counts[worker as usize] += 1;
        let factor = if slow == Some(worker) { 2 } else { 1 };
        clock.advance(Duration::from_millis(250 * factor));
        placement.reservation.on_first_token();
        router.learn_first_token(&mut placement);
    }
    counts
}

/// Returns the workers of 64 requests that arrive within 64 ms. They have a new shared prefix,
/// which is nine tenths of each prompt and takes two seconds.
fn workers_of_burst(router: &Router, clock: &Clock) -> BTreeSet<WorkerId> {
    let placements: Vec<_> = (0..64)
        .map(|number| {
            clock.advance(Duration::from_millis(1));
            let own = (number + 1) * 10_000..(number + 1) * 10_000 + 200;
            router
                .route(request(&[(0..1_800).chain(own).collect()]))
                .unwrap()
        })
        .collect();
    placements.iter().map(chosen).collect()
}

#[test]
fn burst_with_new_shared_prefix_uses_most_idle_workers() {
    let clock = Clock::default();
    let router = clocked((0..8).map(worker), settings(PolicyName::Seconds), &clock);
    for number in 0..30 {
        let mut placement = router.route(cold_prompt(number)).unwrap();
        clock.advance(Duration::from_millis(560));
        placement.reservation.on_first_token();
        router.learn_first_token(&mut placement);
    }
    let used = workers_of_burst(&router, &clock);
    assert!(used.len() >= 7, "{used:?}");
}

#[test]
fn slow_worker_is_avoided_after_thirty_requests() {
    let clock = Clock::default();
    let router = clocked((0..4).map(worker), settings(PolicyName::Seconds), &clock);
    let run = |from, slow| serve_one_by_one(&router, &clock, from..from + 120, slow);
    let equal = run(0, None);
    assert!(equal.iter().all(|count| *count >= 10), "{equal:?}");
    let slow = run(1_000, Some(2));
    assert!(slow[2] <= 30, "{slow:?}");
    let later = run(2_000, Some(2));
    assert!(later[2] < 10, "{later:?}");
}

#[test]
fn recovered_worker_is_chosen_at_light_load() {
    let clock = Clock::default();
    let router = clocked((0..4).map(worker), settings(PolicyName::Seconds), &clock);
    serve_one_by_one(&router, &clock, 0..200, Some(2));
    let avoided = serve_one_by_one(&router, &clock, 200..300, Some(2));
    assert!(avoided[2] < 10, "{avoided:?}");
    // At 4 requests/s, 30 s are enough.
    serve_one_by_one(&router, &clock, 300..420, None);
    let recovered = serve_one_by_one(&router, &clock, 420..620, None);
    assert!(recovered[2] > 30, "{recovered:?}");
}

#[test]
fn lost_worker_releases_load_and_keeps_slowdown() {
    let clock = Clock::default();
    let router = clocked((0..2).map(worker), settings(PolicyName::Seconds), &clock);
    let mut running = Vec::new();
    for number in 0..60 {
        let mut placement = router.route(cold_prompt(number)).unwrap();
        clock.advance(Duration::from_millis(400 * (1 + chosen(&placement).0)));
        placement.reservation.on_first_token();
        router.learn_first_token(&mut placement);
        placement.reservation.add_output_tokens(10);
        running.push(placement);
        if running.len() > 3 {
            drop(running.remove(0));
        }
    }
    let slowdown = |router: &Router| {
        let mut ranks = router.load().calibration().ranks.into_iter();
        let rank = ranks.find(|rank| rank.rank.worker == WorkerId(1))?;
        Some(rank.slowdown)
    };
    let before = slowdown(&router).unwrap();
    assert!(before.prefill_factor > 1.1, "{before:?}");
    router.set_workers([worker(0)]);
    assert_eq!(slowdown(&router), None);
    router.set_workers([worker(0), worker(1)]);
    assert_eq!(slowdown(&router), Some(before));
    drop(running);
    let snapshot = router.load().snapshot();
    assert!(snapshot.iter().all(|load| {
        (
            load.active_blocks,
            load.active_prefill_tokens,
            load.active_requests,
        ) == (0, 0, 0)
    }));
    let placement = router.route(cold_prompt(99)).unwrap();
    assert!(placement.route.choice.cost.total.is_finite());
}

#[test]
fn request_may_name_another_policy() {
    let router = router_of((0..3).map(worker), settings(PolicyName::Seconds));
    let mut prompt = cold_prompt(1);
    let policy_of = |prompt: &RouteRequest| {
        let placement = router.route(prompt.clone()).unwrap();
        placement.route.choice.cost.terms.policy()
    };
    assert_eq!(policy_of(&prompt), "seconds");
    prompt.overrides.policy = Some(PolicyName::RoundRobin);
    assert_eq!(policy_of(&prompt), "round_robin");
    prompt.overrides.policy = None;
    prompt.overrides.prefill_load_scale = Some(2.0);
    assert_eq!(policy_of(&prompt), "linear");
}

#[test]
fn model_policy_replaces_default_policy() {
    let mut settings = settings(PolicyName::Seconds);
    let sticky = PolicySettings::named(PolicyName::Sticky, &Weights::default());
    settings.model_policies = Arc::new([("m".into(), sticky)].into());
    let router = router_of([worker(1)], settings);
    let placement = router.route(cold_prompt(1)).unwrap();
    assert_eq!(placement.route.choice.cost.terms.policy(), "sticky");
}

#[test]
fn round_robin_uses_workers_in_turn() {
    let router = router_of((0..4).map(worker), settings(PolicyName::RoundRobin));
    let placements: Vec<_> = (0..8)
        .map(|number| router.route(cold_prompt(number)).unwrap())
        .collect();
    let order: Vec<u64> = placements
        .iter()
        .map(|placement| chosen(placement).0)
        .collect();
    assert_eq!(order, [0, 1, 2, 3, 0, 1, 2, 3]);
}
