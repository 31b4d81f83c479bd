//! Explanations: the same numbers as the decision that follows, every reason why somebody is no candidate, and no trace.

use super::*;
use crate::block::EngineHash;
use crate::disagg::{Bypass, Conditional, Disaggregation};
use crate::health::Outcome;
use crate::index::{KvEvent, RankWriter, StoredBlock};
use crate::predict::{Policy, Predictor, Ttl};
use crate::schedule::{Pin, Subset, Thresholds, Weights};
use crate::tier::Tier;
use crate::trust::Standing;
use crate::worker::DpRank;

fn unit_weights() -> RouterSettings {
    RouterSettings {
        weights: Weights::UNIT,
        ..RouterSettings::default()
    }
}

fn rank(id: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(id),
        rank: DpRank(0),
    }
}

fn with_role(id: u64, role: Role) -> Worker {
    Worker { role, ..worker(id) }
}

/// Puts blocks into a worker's cache; they stay while the writer is there.
fn holds(router: &Router, id: u64, locals: std::ops::Range<u64>, tier: Tier) -> RankWriter {
    let slot = router.fleet().slot(rank(id)).unwrap();
    let mut writer = router.index().join(slot);
    store(&mut writer, locals, tier);
    writer
}

fn store(writer: &mut RankWriter, locals: std::ops::Range<u64>, tier: Tier) {
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

fn booked_at(router: &Router, id: u64, locals: Vec<u64>) -> Booked {
    let mut request = request(&[locals]);
    request.constraints.allowed = Some([WorkerId(id)].into());
    router.route(request).unwrap()
}

/// Until it is out.
fn fails(router: &Router, id: u64) {
    for _ in 0..3 {
        router
            .health
            .report(WorkerId(id), Outcome::Failure, router.load().now());
    }
}

fn judged(phase: &PhaseExplained, id: u64) -> &Judged {
    phase
        .judged
        .iter()
        .find(|judged| judged.rank == rank(id))
        .unwrap()
}

fn why(explanation: &Explanation, id: u64) -> Option<&str> {
    judged(explanation.phases.last().unwrap(), id)
        .excluded
        .as_deref()
}

#[test]
fn an_explanation_shows_tiers_load_every_term_the_runner_up_and_the_margin() {
    let weights = Weights {
        decode_active_request_weight: 2.0,
        ..Weights::UNIT
    };
    let router = router_of(
        (1..=3).map(worker),
        RouterSettings {
            weights,
            ..RouterSettings::default()
        },
    );
    let mut first = holds(&router, 1, 0..6, Tier::Device);
    store(&mut first, 6..8, Tier::HostPinned);
    let _second = holds(&router, 2, 0..4, Tier::Device);
    let _busy = booked_at(&router, 1, vec![90, 91, 92]);
    let explanation = router.explain(request(&[(0..10).collect()]));
    let [phase] = &explanation.phases[..] else {
        panic!("{explanation:?}")
    };
    assert_eq!(
        (explanation.prompt_tokens, explanation.prompt_blocks),
        (41, 10)
    );

    let one = judged(phase, 1);
    assert_eq!(
        (one.overlap.device, one.overlap.host, one.cached_tokens),
        (6, 2, 32)
    );
    assert_eq!(
        (
            one.load.active_requests,
            one.load.active_prefill_tokens,
            one.load.active_blocks
        ),
        (1, 13, 3)
    );
    // 10 blocks and the tail of 1 token are new.
    assert_eq!((one.prefill_tokens, one.decode_blocks), (13 + 41, 3 + 11));
    let cost = one.cost.unwrap();
    assert_eq!(
        (cost.prefill_blocks, cost.device_credit, cost.host_credit),
        (13.5, 6.0, 1.5)
    );
    assert_eq!(
        (
            cost.prefill_cost,
            cost.decode_cost,
            cost.request_cost,
            cost.total
        ),
        (6.0, 13.0, 2.0, 21.0)
    );
    let totals = [1, 2, 3].map(|id| judged(phase, id).cost.unwrap().total);
    assert_eq!(totals, [21.0, 16.25, 20.25]);
    assert_eq!(
        (phase.winner, phase.runner_up, phase.margin),
        (Some(rank(2)), Some(rank(3)), Some(4.0))
    );
    assert_eq!((phase.taken, phase.ties), (true, 1));
    let sentence = "Worker rank 2/0 serves the request, because it costs 16.250, 4.000 less than 3/0; caches were not \
                    compared, because no event source of any candidate has caught up.";
    assert_eq!(explanation.sentence, sentence);

    router.set_trust(rank(2), Standing::EXACT);
    let sentence = router.explain(request(&[(0..10).collect()])).sentence;
    assert!(
        sentence.ends_with("; it holds 4 of 10 blocks, while 1/0 holds 8 and costs 4.750 more."),
        "{sentence}"
    );
}

#[test]
fn ties_are_told_and_the_next_request_draws_what_was_drawn() {
    let router = router_of((1..=4).map(worker), unit_weights());
    let mut winners = BTreeSet::new();
    for _ in 0..40 {
        let explanation = router.explain(request(&[vec![1]]));
        let phase = &explanation.phases[0];
        assert_eq!((phase.ties, phase.margin), (4, Some(0.0)));
        assert!(phase.runner_up.is_some() && phase.runner_up != phase.winner);
        assert!(
            explanation
                .sentence
                .contains("drawn among 4 candidates that all cost 2.25"),
            "{}",
            explanation.sentence
        );
        let booked = router.route(request(&[vec![1]])).unwrap();
        assert_eq!(Some(booked.route.to.rank), phase.winner);
        winners.insert(booked.route.to.rank);
    }
    assert_eq!(winners.len(), 4, "the draws are draws");
}

#[test]
fn every_reason_for_exclusion_is_told() {
    let taint = |worker: Worker| Worker {
        taints: ["gpu".to_owned()].into(),
        ..worker
    };
    let two_ranks = Worker {
        ranks: Ranks {
            start: 0,
            size: 2.try_into().unwrap(),
        },
        ..worker(2)
    };
    let adapted = Worker {
        adapters: ["tuned".to_owned()].into(),
        ..worker(1)
    };
    let elsewhere = Worker {
        endpoint: "127.0.0.1:9999".parse().unwrap(),
        ..worker(2)
    };
    type Wish = fn(&mut RouteRequest);
    let cases: [(Vec<Worker>, Wish, &str); 9] = [
        (
            vec![worker(1), with_role(2, Role::Prefill)],
            |_| {},
            "does not do this phase",
        ),
        (
            vec![worker(1), worker(2)],
            |request| {
                request.constraints.pin = Some(Pin {
                    worker: WorkerId(1),
                    rank: None,
                })
            },
            "the request is pinned to another worker",
        ),
        (
            vec![worker(1), two_ranks],
            |request| {
                request.constraints.pin = Some(Pin {
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
            vec![worker(1), elsewhere],
            |request| request.constraints.endpoints = Some(Subset::parse(["127.0.0.1:8000"])),
            "is not in Envoy's subset",
        ),
        (
            vec![taint(worker(1)), worker(2)],
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
            |request| request.constraints.exclusive = Some(rank(1)),
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
    ];
    for (workers, wish, expected) in cases {
        let router = router_of(workers, unit_weights());
        let mut wished = request(&[vec![1]]);
        wish(&mut wished);
        let explanation = router.explain(wished.clone());
        let phase = explanation.phases.last().unwrap();
        assert_eq!(why(&explanation, 2), Some(expected));
        assert!(judged(phase, 2).cost.is_none(), "{expected}");
        let left: Vec<_> = phase
            .judged
            .iter()
            .filter(|judged| judged.excluded.is_none())
            .collect();
        assert!(
            left.iter().all(|judged| judged.cost.is_some()) && !left.is_empty(),
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
fn the_busy_the_ill_and_the_gone_are_told() {
    let router = router_of((1..=4).map(worker), unit_weights());
    let now = router.load().now();
    router.overload.mark(WorkerId(2), now);
    fails(&router, 3);
    router.load().close(router.fleet().slot(rank(4)).unwrap());
    let explanation = router.explain(request(&[vec![1]]));
    assert_eq!(why(&explanation, 1), None);
    assert_eq!(why(&explanation, 2), Some("is overloaded"));
    assert_eq!(why(&explanation, 3), Some("is unhealthy"));
    assert_eq!(why(&explanation, 4), Some("it has just left the fleet"));
    assert!(
        explanation
            .sentence
            .contains("it is the only candidate (cost 2.250)"),
        "{}",
        explanation.sentence
    );
    let phase = &explanation.phases[0];
    assert_eq!(
        (phase.winner, phase.runner_up, phase.margin),
        (Some(rank(1)), None, None)
    );

    let mixed = [
        with_role(1, Role::Prefill),
        with_role(2, Role::Decode),
        worker(3),
    ];
    let explanation = router_of(mixed, unit_weights()).explain(request(&[vec![1]]));
    assert_eq!(
        why(&explanation, 3),
        Some("workers that only decode go before it")
    );
}

#[test]
fn prefill_and_decode_are_explained_apart_each_with_its_runner_up() {
    let pools = || {
        [
            (1, Role::Prefill),
            (2, Role::Prefill),
            (11, Role::Decode),
            (12, Role::Decode),
        ]
        .map(|(id, role)| with_role(id, role))
    };
    let router = router_of(pools(), unit_weights());
    let _warm = holds(&router, 2, 0..3, Tier::Device);
    router.set_trust(rank(2), Standing::EXACT);
    let _busy = booked_at(&router, 11, vec![50, 51]);
    let explanation = router.explain(request(&[(0..4).collect()]));
    let [prefill, decode] = &explanation.phases[..] else {
        panic!("{explanation:?}")
    };
    assert_eq!((prefill.role, decode.role), (Role::Prefill, Role::Decode));
    assert_eq!(
        (prefill.winner, prefill.runner_up),
        (Some(rank(2)), Some(rank(1)))
    );
    assert_eq!(
        (decode.winner, decode.runner_up, decode.margin),
        (Some(rank(12)), Some(rank(11)), Some(2.0))
    );
    let computed_by = explanation.computed_by.unwrap();
    assert_eq!(
        (computed_by.rank, computed_by.cached_tokens),
        (rank(2), judged(prefill, 2).cached_tokens)
    );
    assert!(prefill.taken && decode.taken && prefill.margin.unwrap() >= 3.0);
    assert_eq!(
        judged(prefill, 11).excluded.as_deref(),
        Some("does not do this phase")
    );
    assert_eq!(
        judged(decode, 1).excluded.as_deref(),
        Some("does not do this phase")
    );
    assert_eq!(
        judged(decode, 12).prefill_tokens,
        0,
        "no prefill in this phase"
    );
    assert!(
        explanation
            .sentence
            .starts_with("Worker rank 2/0 does the prefill, because"),
        "{}",
        explanation.sentence
    );
    assert!(
        explanation
            .sentence
            .contains("; worker rank 12/0 decodes, because"),
        "{}",
        explanation.sentence
    );
    assert!(
        explanation.sentence.ends_with("; it holds 3 of 4 blocks."),
        "{}",
        explanation.sentence
    );
    let route = router.route(request(&[(0..4).collect()])).unwrap().route;
    assert_eq!(
        (Some(route.to.rank), route.prefill().map(|leg| leg.to.rank)),
        (decode.winner, prefill.winner)
    );

    (1..=2).for_each(|id| fails(&router, id));
    let explanation = router.explain(request(&[vec![1]]));
    assert!(
        explanation.phases[0].taken,
        "when nobody is healthy everybody is"
    );
}

#[test]
fn a_prefill_that_is_not_sent_elsewhere_says_why() {
    let workers = || [with_role(1, Role::Prefill), with_role(11, Role::Decode)];
    let conditional = Some(Conditional::default());
    let keeping = Disaggregation {
        enforce: false,
        conditional,
    };
    let router = router_of(
        workers(),
        RouterSettings {
            disaggregation: keeping,
            ..RouterSettings::default()
        },
    );
    let _warm = holds(&router, 11, 0..9, Tier::Device);
    let explanation = router.explain(request(&[(0..10).collect()]));
    let [prefill, decode] = &explanation.phases[..] else {
        panic!("{explanation:?}")
    };
    assert_eq!(
        (prefill.winner, prefill.taken, decode.taken),
        (Some(rank(1)), false, true)
    );
    assert_eq!(
        explanation.route.as_ref().unwrap().phases,
        Phases::Kept(Bypass::LittleToCompute)
    );
    assert!(
        explanation
            .sentence
            .contains("so little is left to compute"),
        "{}",
        explanation.sentence
    );

    let router = router_of(workers(), unit_weights());
    router.overload.mark(WorkerId(1), router.load().now());
    let settings = RouterSettings {
        when_all_overloaded: WhenOverloaded::Reject,
        ..RouterSettings::default()
    };
    let rejecting = router_of(workers(), settings);
    rejecting.overload.mark(WorkerId(1), rejecting.load().now());
    assert!(
        router.explain(request(&[vec![1]])).phases[0].taken,
        "the operator lets overloaded workers be chosen"
    );
    let explanation = rejecting.explain(request(&[vec![1]]));
    let [prefill, decode] = &explanation.phases[..] else {
        panic!("{explanation:?}")
    };
    assert_eq!(
        (prefill.winner, judged(prefill, 1).excluded.as_deref()),
        (None, Some("is overloaded"))
    );
    assert_eq!(
        (decode.role, decode.winner),
        (Role::Aggregated, Some(rank(11)))
    );
    assert!(
        explanation
            .sentence
            .contains("no prefill worker can be chosen"),
        "{}",
        explanation.sentence
    );
}

#[test]
fn without_a_choice_everybody_is_shown_and_the_sentence_says_why() {
    let nobody = router_of([], unit_weights()).explain(request(&[vec![1]]));
    assert_eq!(
        (nobody.mode, nobody.reason, nobody.phases.len()),
        (Mode::Passthrough, Some(Reason::NoFleet), 0)
    );
    assert_eq!(
        nobody.sentence,
        "Nobody is chosen, because no worker is known; Envoy's own load balancer would choose."
    );

    let router = router_of([worker(1), worker(2)], unit_weights());
    let mut other = request(&[vec![1]]);
    other.model = Some("other".into());
    assert_eq!(router.explain(other).reason, Some(Reason::NoCandidate));

    let mut pinned = request(&[vec![1, 2]]);
    pinned.constraints.pin = Some(Pin {
        worker: WorkerId(9),
        rank: None,
    });
    let explanation = router.explain(pinned);
    assert_eq!(
        (explanation.reason, explanation.prompt_tokens),
        (Some(Reason::BadPin), 9)
    );
    assert_eq!(
        why(&explanation, 1),
        Some("the request is pinned to another worker")
    );
    assert!(
        explanation
            .sentence
            .ends_with("the request would be refused."),
        "{}",
        explanation.sentence
    );
    assert!(explanation.route.is_none());

    let disaggregation = Disaggregation {
        enforce: true,
        conditional: None,
    };
    let decodes = Worker {
        role: Role::Decode,
        ..worker(1)
    };
    let strict = router_of(
        [decodes],
        RouterSettings {
            disaggregation,
            ..RouterSettings::default()
        },
    );
    let explanation = strict.explain(request(&[vec![1]]));
    assert_eq!(explanation.reason, Some(Reason::NoPrefill));
    let [prefill, decode] = &explanation.phases[..] else {
        panic!("{explanation:?}")
    };
    assert_eq!(
        judged(prefill, 1).excluded.as_deref(),
        Some("does not do this phase")
    );
    assert_eq!(
        (
            judged(decode, 1).excluded.as_deref(),
            judged(decode, 1).cost
        ),
        (None, None),
        "it would do"
    );
}

#[test]
fn an_explanation_takes_no_probe_records_no_blocks_and_latches_nothing() {
    let clock = Clock::default();
    let overload = Thresholds {
        decode_blocks: Some(0.5),
        ..Thresholds::default()
    };
    let sized = Worker {
        capacity: Capacity {
            total_kv_blocks: Some(4),
            ..Capacity::default()
        },
        ..worker(1)
    };
    let policy = Policy::Ttl(Ttl {
        ttl: Duration::from_secs(60),
        most_blocks_per_rank: 100,
    });
    let told = clock.clone();
    let without_events = Some(Predictor::new(policy, move || told.now()));
    let router = clocked(
        [sized],
        RouterSettings {
            overload,
            ..RouterSettings::default()
        },
        &clock,
    );
    let router = router.predicting(Predictions {
        without_events,
        ..Predictions::default()
    });
    router
        .fleet()
        .members()
        .for_each(|member| router.predictions().open(member));

    fails(&router, 1);
    clock.advance(Duration::from_secs(1));
    for _ in 0..3 {
        let explanation = router.explain(request(&[vec![1, 2]]));
        assert_eq!(explanation.mode, Mode::Approximate);
        assert_eq!(
            judged(&explanation.phases[0], 1).overlap,
            crate::index::TierBlocks::default()
        );
    }
    let probing = router.route(request(&[vec![1, 2]])).unwrap();
    assert_eq!(probing.probes.len(), 1, "the probe was still there");
    let held = router.explain(request(&[vec![1, 2]]));
    assert_eq!(
        judged(&held.phases[0], 1).overlap.device,
        2,
        "a real request leaves its blocks"
    );

    // Above the threshold, as an explanation sees it; then just at it, where only who was seen above stays out.
    let third = router.route(request(&[vec![3]])).unwrap();
    let overloaded =
        |router: &Router| why(&router.explain(request(&[vec![9]])), 1).map(str::to_owned);
    let standings = || {
        let fleet = router.fleet();
        let members: Vec<_> = fleet.members().collect();
        router
            .standings(&members, &router.settings())
            .overloaded
            .contains(WorkerId(1))
    };
    drop(probing.probes);
    assert_eq!(
        judged(&router.explain(request(&[vec![9]])).phases[0], 1)
            .load
            .active_blocks,
        3
    );
    drop(third);
    assert_eq!(
        (standings(), overloaded(&router)),
        (false, None),
        "what explanations saw above was not noted"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_next_decision_has_the_numbers_of_the_explanation(
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
        let role = |role: u8| [Role::Aggregated, Role::Prefill, Role::Decode][usize::from(role)];
        let workers: Vec<_> = roles.iter().zip(1..).map(|(at, id)| with_role(id, role(*at))).collect();
        let router = router_of(workers.clone(), RouterSettings { weights, ..RouterSettings::default() });
        let writers: Vec<_> = workers.iter().zip(&cached).map(|(worker, blocks)| {
            holds(&router, worker.id.0, 0..*blocks, Tier::Device)
        }).collect();
        let mut live = Vec::new();
        for (at, locals) in loads {
            let mut request = request(&[locals]);
            request.constraints.allowed = Some([workers[at % workers.len()].id].into());
            live.extend(router.route(request));
        }
        let mut wished = request(&[prompt]);
        wished.constraints.pin = pinned.then_some(Pin { worker: WorkerId(1), rank: None });
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

/// What the decision says and what the explanation said before it.
fn agrees(explanation: &Explanation, route: &Route) -> Result<(), TestCaseError> {
    let explained = explanation.route.as_ref().unwrap();
    prop_assert_eq!(explained.short(), route.short());
    prop_assert_eq!(
        (explanation.mode, explanation.reason),
        (route.mode, route.reason)
    );
    let taken: Vec<_> = explanation
        .phases
        .iter()
        .filter(|phase| phase.taken)
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
            .judged
            .iter()
            .find(|judged| judged.rank == to.rank)
            .unwrap();
        prop_assert_eq!(won.cost, Some(choice.cost));
        prop_assert_eq!(
            (won.overlap, won.decode_blocks),
            (overlap, choice.potential_decode_blocks)
        );
        let cheapest = phase
            .judged
            .iter()
            .filter_map(|judged| Some(judged.cost?.total))
            .fold(f64::INFINITY, f64::min);
        prop_assert!(explanation.weights.router_temperature > 0.0 || choice.cost.total == cheapest);
    }
    let decode = explanation.phases.last().unwrap();
    let won = decode
        .judged
        .iter()
        .find(|judged| judged.rank == route.to.rank)
        .unwrap();
    prop_assert_eq!(won.cached_tokens, route.predicted_cached_tokens);
    Ok(())
}

#[test]
fn the_short_form_leaves_out_what_changes_nothing() {
    let router = router_of([worker(1)], unit_weights());
    let short = router
        .explain(request(&[vec![1, 2]]))
        .route
        .unwrap()
        .short();
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
        with_role(1, Role::Prefill),
        tainted(with_role(11, Role::Decode)),
    ];
    let router = router_of(
        workers,
        RouterSettings {
            weights,
            ..RouterSettings::default()
        },
    );
    let mut cache = holds(&router, 1, 0..1, Tier::Device);
    store(&mut cache, 1..2, Tier::HostPinned);
    router.set_trust(rank(1), Standing::EXACT);
    let _busy = booked_at(&router, 11, vec![8]);
    let mut wished = request(&[vec![0, 1, 2]]);
    wished
        .constraints
        .preferred_taints
        .insert("gpu".into(), 1.0);
    let short = router.explain(wished).route.unwrap().short();
    let factor = (-1.0_f64.tanh()).exp();
    let expected = format!(
        "worker=11/0 cost={:.3} prefill=0.000 decode=4.000 requests=1.000 taints={factor:.3} blocks=3 device=0 \
         cached_tokens=0 candidates=1 ties=1 prefill_worker=1/0 prefill_cost=3.750 prefill_cached_tokens=8",
        5.0 * factor
    );
    assert_eq!(short, expected);
}
