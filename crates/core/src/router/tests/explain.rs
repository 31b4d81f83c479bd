//! Explanations: the same figures as the next decision, every exclusion reason, and no side
//! effects.

use super::*;
use crate::block::{EngineHash, StorageTier};
use crate::freshness::SourceStatus;
use crate::health::{HealthState, RequestOutcome};
use crate::index::{KvEvent, RankWriter, StoredBlock};
use crate::policy::{
    ConditionalPrefillConfig, DisaggregationConfig, EndpointSubset, LocalPrefillReason,
    OverloadThresholds, PolicySettings, Weights, WorkerPin,
};
use crate::predict::{EvictionPolicy, Predictor, TtlPolicy};
use crate::worker::DpRank;

mod phases;

fn unit_weights() -> RouterSettings {
    RouterSettings {
        policy: PolicySettings::linear(Weights::UNIT),
        ..RouterSettings::default()
    }
}

fn rank(id: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(id),
        rank: DpRank(0),
    }
}

fn with_role(id: u64, role: WorkerRole) -> Worker {
    Worker { role, ..worker(id) }
}

/// Stores blocks in a worker's cache. They stay as long as the writer exists.
fn holds(router: &Router, id: u64, locals: std::ops::Range<u64>, tier: StorageTier) -> RankWriter {
    let slot = router.fleet().slot(rank(id)).unwrap();
    let mut writer = router.index().create_writer(slot);
    store(&mut writer, locals, tier);
    writer
}

fn store(writer: &mut RankWriter, locals: std::ops::Range<u64>, tier: StorageTier) {
    let parent = locals.start.checked_sub(1).map(EngineHash);
    let stored = |local: u64| StoredBlock {
        engine: EngineHash(local),
        local: LocalHash(local),
    };
    writer.apply(&KvEvent::Stored {
        parent,
        blocks: locals.map(stored).collect(),
        tier,
    });
}

fn booked_at(router: &Router, id: u64, locals: Vec<u64>) -> Placement {
    let mut request = request(&[locals]);
    request.constraints.allowed = Some([WorkerId(id)].into());
    router.route(request).unwrap()
}

/// Reports failures until the worker is ejected.
fn eject(router: &Router, id: u64) {
    let rank = WorkerRank {
        worker: WorkerId(id),
        rank: DpRank(0),
    };
    for _ in 0..3 {
        router
            .feedback
            .health
            .report(rank, RequestOutcome::Unreachable, &[], router.load().now());
    }
}

fn worker_row(phase: &PhaseExplanation, id: u64) -> &WorkerExplanation {
    phase
        .workers
        .iter()
        .find(|row| row.rank == rank(id))
        .unwrap()
}

fn why(explanation: &RouteExplanation, id: u64) -> Option<&str> {
    worker_row(explanation.phases.last().unwrap(), id)
        .excluded
        .as_deref()
}

#[test]
fn explanation_shows_all_terms_and_runner_up() {
    let weights = Weights {
        decode_active_request_weight: 2.0,
        ..Weights::UNIT
    };
    let settings = RouterSettings {
        policy: PolicySettings::linear(weights),
        ..RouterSettings::default()
    };
    let router = router_of((1..=3).map(worker), settings);
    let mut first = holds(&router, 1, 0..6, StorageTier::Device);
    store(&mut first, 6..8, StorageTier::HostPinned);
    let _second = holds(&router, 2, 0..4, StorageTier::Device);
    let _busy = booked_at(&router, 1, vec![90, 91, 92]);
    let explanation = router.explain(request(&[(0..10).collect()]));
    let [phase] = &explanation.phases[..] else {
        panic!("{explanation:?}")
    };
    assert_eq!(
        (explanation.prompt_tokens, explanation.prompt_blocks),
        (41, 10)
    );

    let one = worker_row(phase, 1);
    assert_eq!(
        (one.overlap.device, one.overlap.host, one.cached_tokens),
        (6, 2, 32)
    );
    let load = one.load;
    assert_eq!((load.active_requests, load.active_blocks), (1, 3));
    assert_eq!(load.active_prefill_tokens, 13);
    // 10 blocks and the tail of 1 token are new.
    assert_eq!((one.prefill_tokens, one.decode_blocks), (13 + 41, 3 + 11));
    let cost = one.cost.unwrap();
    let terms = |names: [&str; 3]| names.map(|name| cost.terms.get(name).unwrap());
    assert_eq!(
        terms(["prefill_blocks", "device_credit", "host_credit"]),
        [13.5, 6.0, 1.5]
    );
    assert_eq!(terms(["prefill", "decode", "requests"]), [6.0, 13.0, 2.0]);
    assert_eq!(cost.total, 21.0);
    let totals = [1, 2, 3].map(|id| worker_row(phase, id).cost.unwrap().total);
    assert_eq!(totals, [21.0, 16.25, 20.25]);
    assert_eq!(
        (phase.winner, phase.runner_up, phase.margin),
        (Some(rank(2)), Some(rank(3)), Some(4.0))
    );
    assert_eq!((phase.used, phase.ties), (true, 1));
    let summary = "Worker rank 2/0 serves the request, because it costs 16.250, 4.000 less than 3/0; caches were not \
                    compared, because no event source of any candidate has caught up.";
    assert_eq!(explanation.summary, summary);

    router.set_source_status(rank(2), SourceStatus::EXACT);
    let summary = router.explain(request(&[(0..10).collect()])).summary;
    assert!(
        summary.ends_with("; it holds 4 of 10 blocks, while 1/0 holds 8 and costs 4.750 more."),
        "{summary}"
    );
}

#[test]
fn explanation_reports_ties_and_preserves_randomness() {
    let router = router_of((1..=4).map(worker), unit_weights());
    let mut winners = BTreeSet::new();
    for _ in 0..40 {
        let explanation = router.explain(request(&[vec![1]]));
        let phase = &explanation.phases[0];
        assert_eq!((phase.ties, phase.margin), (4, Some(0.0)));
        assert!(phase.runner_up.is_some() && phase.runner_up != phase.winner);
        assert!(
            explanation
                .summary
                .contains("chosen at random among 4 candidates that all cost 2.25"),
            "{}",
            explanation.summary
        );
        let booked = router.route(request(&[vec![1]])).unwrap();
        assert_eq!(Some(booked.route.to.rank), phase.winner);
        winners.insert(booked.route.to.rank);
    }
    assert_eq!(winners.len(), 4, "samples vary");
}

type RequestChange = fn(&mut RouteRequest);

/// Excludes worker 2 by its role, by a pin, by a list of workers or by a subset.
fn exclusions_by_constraint() -> Vec<(Vec<Worker>, RequestChange, &'static str)> {
    let two_ranks = Worker {
        ranks: RankRange {
            start: 0,
            size: 2.try_into().unwrap(),
        },
        ..worker(2)
    };
    let remote_worker = Worker {
        endpoint: "127.0.0.1:9999".parse().unwrap(),
        ..worker(2)
    };
    vec![
        (
            vec![worker(1), with_role(2, WorkerRole::Prefill)],
            |_| {},
            "does not run this phase",
        ),
        (
            vec![worker(1), worker(2)],
            |request| {
                request.constraints.pin = Some(WorkerPin {
                    worker: WorkerId(1),
                    rank: None,
                })
            },
            "the request is pinned to another worker",
        ),
        (
            vec![worker(1), two_ranks],
            |request| {
                request.constraints.pin = Some(WorkerPin {
                    worker: WorkerId(2),
                    rank: Some(DpRank(1)),
                })
            },
            "is not the rank the request is pinned to",
        ),
        (
            vec![worker(1), worker(2)],
            |request| request.constraints.allowed = Some([WorkerId(1)].into()),
            "is not among the allowed workers",
        ),
        (
            vec![worker(1), remote_worker],
            |request| {
                request.constraints.endpoints = Some(EndpointSubset::parse(["127.0.0.1:8000"]))
            },
            "is not in Envoy's subset",
        ),
    ]
}

/// Excludes worker 2 by a taint, by the session or by an adapter.
fn exclusions_by_preference() -> Vec<(Vec<Worker>, RequestChange, &'static str)> {
    let tainted = Worker {
        taints: ["gpu".to_owned()].into(),
        ..worker(1)
    };
    let adapted = Worker {
        adapters: ["tuned".to_owned()].into(),
        ..worker(1)
    };
    vec![
        (
            vec![tainted, worker(2)],
            |request| {
                request
                    .constraints
                    .required_taints
                    .extend(["gpu".to_owned()])
            },
            "lacks the required taint `gpu`",
        ),
        (
            vec![worker(1), worker(2)],
            |request| request.constraints.bound_rank = Some(rank(1)),
            "the session is bound to another worker rank",
        ),
        (
            vec![worker(1), worker(2)],
            |request| request.affinity = Some(rank(1)),
            "the session is bound to another worker rank",
        ),
        (
            vec![adapted, worker(2)],
            |request| request.constraints.adapter = Some("tuned".into()),
            "has not loaded the adapter, and others have",
        ),
    ]
}

#[test]
fn explanation_reports_every_exclusion_reason() {
    let mut cases = exclusions_by_constraint();
    cases.extend(exclusions_by_preference());
    for (workers, change, expected) in cases {
        let router = router_of(workers, unit_weights());
        let mut wished = request(&[vec![1]]);
        change(&mut wished);
        let explanation = router.explain(wished.clone());
        let phase = explanation.phases.last().unwrap();
        assert_eq!(why(&explanation, 2), Some(expected));
        assert!(worker_row(phase, 2).cost.is_none(), "{expected}");
        let left: Vec<_> = phase
            .workers
            .iter()
            .filter(|row| row.excluded.is_none())
            .collect();
        assert!(
            left.iter().all(|row| row.cost.is_some()) && !left.is_empty(),
            "{expected}: {phase:?}"
        );
        assert_eq!(
            phase.winner,
            Some(router.route(wished).unwrap().route.to.rank),
            "{expected}"
        );
    }
}

#[test]
fn explanation_lists_overloaded_ejected_and_removed_workers() {
    let router = router_of((1..=4).map(worker), unit_weights());
    let now = router.load().now();
    router.feedback.overload.mark(WorkerId(2), now);
    eject(&router, 3);
    let fleet = router.fleet();
    let leaving = fleet.member(fleet.slot(rank(4)).unwrap());
    router.load().leave(leaving.unwrap());
    let explanation = router.explain(request(&[vec![1]]));
    assert_eq!(why(&explanation, 1), None);
    assert_eq!(why(&explanation, 2), Some("is overloaded"));
    assert_eq!(why(&explanation, 3), Some("is unhealthy"));
    assert_eq!(why(&explanation, 4), Some("it has just left the fleet"));
    assert!(
        explanation
            .summary
            .contains("it is the only candidate (cost 2.250)"),
        "{}",
        explanation.summary
    );
    let phase = &explanation.phases[0];
    assert_eq!(
        (phase.winner, phase.runner_up, phase.margin),
        (Some(rank(1)), None, None)
    );

    let mixed = [
        with_role(1, WorkerRole::Prefill),
        with_role(2, WorkerRole::Decode),
        worker(3),
    ];
    let explanation = router_of(mixed, unit_weights()).explain(request(&[vec![1]]));
    assert_eq!(why(&explanation, 3), Some("decode workers take precedence"));
}

/// Creates a router with one small worker, predictions without events and an overload threshold.
fn router_of_small_worker(clock: &Clock) -> Router {
    let overload = OverloadThresholds {
        decode_blocks: Some(0.5),
        ..OverloadThresholds::default()
    };
    let sized = Worker {
        capacity: WorkerCapacity {
            total_kv_blocks: Some(4),
            ..WorkerCapacity::default()
        },
        ..worker(1)
    };
    let policy = EvictionPolicy::Ttl(TtlPolicy {
        ttl: Duration::from_secs(60),
        max_blocks_per_rank: 100,
    });
    let clock_copy = clock.clone();
    let predictor = Predictor::new(policy, move || clock_copy.now());
    let router = clocked(
        [sized],
        RouterSettings {
            overload,
            ..RouterSettings::default()
        },
        clock,
    );
    with_predictor(router, predictor)
}

#[test]
fn explanation_changes_no_state() {
    let clock = Clock::default();
    let router = router_of_small_worker(&clock);
    eject(&router, 1);
    clock.advance(Duration::from_secs(1));
    for _ in 0..3 {
        let explanation = router.explain(request(&[vec![1, 2]]));
        assert_eq!(explanation.mode, Mode::Approximate);
        assert_eq!(
            worker_row(&explanation.phases[0], 1).overlap,
            crate::index::TierBlocks::default()
        );
    }
    let probing = router.route(request(&[vec![1, 2]])).unwrap();
    let health = |router: &Router| router.unhealthy_ranks().into_values().collect::<Vec<_>>();
    assert_eq!(
        health(&router),
        [HealthState::Probing],
        "the probe was still available"
    );
    let held = router.explain(request(&[vec![1, 2]]));
    assert_eq!(
        worker_row(&held.phases[0], 1).overlap.device,
        2,
        "a real request stores its blocks"
    );

    // First above the threshold, then exactly at it, where only a latched rank stays overloaded.
    let third = router.route(request(&[vec![3]])).unwrap();
    let overloaded =
        |router: &Router| why(&router.explain(request(&[vec![9]])), 1).map(str::to_owned);
    let is_overloaded = || {
        let fleet = router.fleet();
        let members: Vec<_> = fleet.members().collect();
        router
            .availability(&members, &router.prepare(request(&[vec![9]])))
            .overloaded
            .contains(WorkerId(1))
    };
    drop(probing.tracked);
    assert_eq!(
        worker_row(&router.explain(request(&[vec![9]])).phases[0], 1)
            .load
            .active_blocks,
        3
    );
    drop(third);
    assert_eq!(
        (is_overloaded(), overloaded(&router)),
        (false, None),
        "explanations do not latch"
    );
}

proptest! {
    #![proptest_config(warmroute_property_tests::property_config(512))]

    #[test]
    fn next_decision_matches_explanation(
        roles in vec(0..3u8, 1..8),
        cached in vec(0..8u64, 8),
        loads in vec((0..8usize, vec(0..6u64, 0..5)), 0..6),
        prompt in vec(0..3u64, 0..8),
        (temperature, decay, pinned, affine) in (0..2u8, 0..2u8, any::<bool>(), any::<bool>()),
    ) {
        let weights = Weights {
            router_temperature: f64::from(temperature),
            overlap_score_credit_decay: f64::from(decay),
            decode_active_request_weight: 0.5,
            ..Weights::UNIT
        };
        let role = |role: u8| [WorkerRole::Aggregated, WorkerRole::Prefill, WorkerRole::Decode][usize::from(role)];
        let workers: Vec<_> = roles.iter().zip(1..).map(|(at, id)| with_role(id, role(*at))).collect();
        let router = router_of(workers.clone(), RouterSettings { policy: PolicySettings::linear(weights), ..RouterSettings::default() });
        let writers: Vec<_> = workers.iter().zip(&cached).map(|(worker, blocks)| {
            holds(&router, worker.id.0, 0..*blocks, StorageTier::Device)
        }).collect();
        let mut live = Vec::new();
        for (at, locals) in loads {
            let mut request = request(&[locals]);
            request.constraints.allowed = Some([workers[at % workers.len()].id].into());
            live.extend(router.route(request));
        }
        let mut wished = request(&[prompt]);
        wished.constraints.pin = pinned.then_some(WorkerPin { worker: WorkerId(1), rank: None });
        wished.affinity = affine.then(|| rank(2));
        let before = router.load().snapshot();
        let explanation = router.explain(wished.clone());
        prop_assert_eq!(router.load().snapshot(), before);
        prop_assert_eq!(&serde_json::to_value(router.explain(wished.clone()))?, &serde_json::to_value(&explanation)?);
        match router.route(wished) {
            Ok(booked) => agrees(&explanation, &booked.route)?,
            Err(error) => prop_assert_eq!(explanation.reason, Some(error.reason())),
        }
        drop((live, writers));
    }
}

/// Compares the decision with the explanation before it.
fn agrees(explanation: &RouteExplanation, route: &Route) -> Result<(), TestCaseError> {
    let explained = explanation.route.as_ref().unwrap();
    prop_assert_eq!(explained.summary_line(), route.summary_line());
    prop_assert_eq!(
        (explanation.mode, explanation.reason),
        (route.mode, route.reason)
    );
    let taken: Vec<_> = explanation
        .phases
        .iter()
        .filter(|phase| phase.used)
        .collect();
    let prefill = route
        .prefill()
        .map(|prefill| (prefill.to, &prefill.choice, prefill.overlap));
    let legs: Vec<_> = prefill
        .into_iter()
        .chain([(route.to, &route.choice, route.overlap)])
        .collect();
    prop_assert_eq!(taken.len(), legs.len());
    for (phase, (to, choice, overlap)) in taken.into_iter().zip(legs) {
        prop_assert_eq!(phase.winner, Some(to.rank));
        prop_assert_eq!(phase.ties, choice.ties);
        let won = phase
            .workers
            .iter()
            .find(|row| row.rank == to.rank)
            .unwrap();
        prop_assert_eq!(won.cost, Some(choice.cost));
        prop_assert_eq!(
            (won.overlap, won.decode_blocks),
            (overlap, choice.potential_decode_blocks)
        );
        let cheapest = phase
            .workers
            .iter()
            .filter_map(|row| Some(row.cost?.total))
            .fold(f64::INFINITY, f64::min);
        prop_assert!(
            explanation.policy.weights.router_temperature > 0.0 || choice.cost.total == cheapest
        );
    }
    let decode = explanation.phases.last().unwrap();
    let won = decode
        .workers
        .iter()
        .find(|row| row.rank == route.to.rank)
        .unwrap();
    prop_assert_eq!(won.cached_tokens, route.predicted_cached_tokens);
    Ok(())
}

#[test]
fn summary_omits_neutral_terms() {
    let router = router_of([worker(1)], unit_weights());
    let short = router
        .explain(request(&[vec![1, 2]]))
        .route
        .unwrap()
        .summary_line();
    let plain = "worker=1/0 cost=4.250 prefill=2.250 decode=2.000 blocks=2 device=0 cached_tokens=0 candidates=1 ties=1 \
                 reason=index_cold";
    assert_eq!(short, plain);

    let weights = Weights {
        decode_active_request_weight: 1.0,
        ..Weights::UNIT
    };
    let tainted = |worker: Worker| Worker {
        taints: ["gpu".to_owned()].into(),
        ..worker
    };
    let workers = [
        with_role(1, WorkerRole::Prefill),
        tainted(with_role(11, WorkerRole::Decode)),
    ];
    let router = router_of(
        workers,
        RouterSettings {
            policy: PolicySettings::linear(weights),
            ..RouterSettings::default()
        },
    );
    let mut cache = holds(&router, 1, 0..1, StorageTier::Device);
    store(&mut cache, 1..2, StorageTier::HostPinned);
    router.set_source_status(rank(1), SourceStatus::EXACT);
    let _busy = booked_at(&router, 11, vec![8]);
    let mut wished = request(&[vec![0, 1, 2]]);
    wished
        .constraints
        .preferred_taints
        .insert("gpu".into(), 1.0);
    let short = router.explain(wished).route.unwrap().summary_line();
    let factor = (-1.0_f64.tanh()).exp();
    let expected = format!(
        "worker=11/0 cost={:.3} prefill=0.000 decode=4.000 requests=1.000 taints={factor:.3} blocks=3 device=0 \
         cached_tokens=0 candidates=1 ties=1 prefill_worker=1/0 prefill_cost=3.750 prefill_cached_tokens=8",
        5.0 * factor
    );
    assert_eq!(short, expected);
}
