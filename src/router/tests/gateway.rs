//! What a gateway says and wants to hear: whom it allows, who else would do, and who served in the end.

use super::*;
use crate::disagg::Disaggregation;
use crate::health::HealthRules;
use crate::index::{KvEvent, RankWriter, StoredBlock};
use crate::predict::{Policy, Predictor, Ttl};
use crate::schedule::{Ineligible, Pin, Subset};
use crate::tier::Tier;
use crate::trust::Standing;
use crate::worker::{DpRank, EventSource};

fn at(id: u64) -> Worker {
    Worker {
        endpoint: endpoint(id),
        ..worker(id)
    }
}

fn with_role(id: u64, role: Role) -> Worker {
    Worker { role, ..at(id) }
}

fn endpoint(id: u64) -> Endpoint {
    format!("10.0.0.{id}:8000").parse().unwrap()
}

fn rank(id: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(id),
        rank: DpRank(0),
    }
}

fn subset(ids: &[u64]) -> Option<Subset> {
    Some(ids.iter().map(|id| endpoint(*id)).collect())
}

fn pin(id: u64) -> Option<Pin> {
    Some(Pin {
        worker: WorkerId(id),
        rank: None,
    })
}

fn within(ids: &[u64]) -> RouteRequest {
    let mut request = request(&[vec![1, 2, 3]]);
    request.constraints.endpoints = subset(ids);
    request
}

fn load_of(router: &Router, id: u64) -> (u64, u64, u64) {
    let load = router
        .load()
        .snapshot()
        .into_iter()
        .find(|load| load.rank.worker == WorkerId(id))
        .unwrap();
    (
        load.active_blocks,
        load.active_prefill_tokens,
        load.active_requests,
    )
}

/// A worker rank's engine has so many blocks of the prompt 1, 2, 3.
fn holds(router: &Router, id: u64, blocks: u64) -> RankWriter {
    let mut writer = router.index().join(router.fleet().slot(rank(id)).unwrap());
    let blocks = (1..=blocks).map(|at| StoredBlock {
        engine: crate::block::EngineHash(at),
        local: LocalHash(at),
    });
    writer.apply(&KvEvent::Stored {
        parent: None,
        blocks: blocks.collect(),
        tier: Tier::Device,
    });
    router.set_trust(rank(id), Standing::EXACT);
    writer
}

#[test]
fn a_subset_that_leaves_nobody_is_refused_and_never_passed_on() {
    let other_model = || Worker {
        model: "other".into(),
        ..at(1)
    };
    let bare = Some(Subset::parse(["10.0.0.2"]));
    type Case = (
        &'static str,
        Vec<Worker>,
        Option<Subset>,
        Result<u64, RouteError>,
    );
    let cases: [Case; 8] = [
        ("one of two", vec![at(1), at(2)], subset(&[2]), Ok(2)),
        ("by address", vec![at(1), at(2)], bare, Ok(2)),
        (
            "empty",
            vec![at(1)],
            subset(&[]),
            Err(RouteError::Unsatisfied),
        ),
        (
            "nobody listed",
            vec![at(1)],
            subset(&[7]),
            Err(RouteError::Unsatisfied),
        ),
        (
            "no fleet",
            vec![],
            subset(&[1]),
            Err(RouteError::Unsatisfied),
        ),
        (
            "no worker of the model",
            vec![other_model()],
            subset(&[1]),
            Err(RouteError::Unsatisfied),
        ),
        (
            "no fleet, no subset",
            vec![],
            None,
            Err(RouteError::NoFleet),
        ),
        (
            "no worker of the model, no subset",
            vec![other_model()],
            None,
            Err(RouteError::NoCandidate),
        ),
    ];
    for (what, workers, endpoints, expected) in cases {
        let router = router_of(workers, RouterSettings::default());
        for prompt in [
            request(&[vec![1]]).prompt,
            Prompt::Estimated {
                tokens: 0,
                because: Reason::NoBody,
            },
        ] {
            let mut request = RouteRequest::new(Some("m".into()), prompt);
            request.constraints.endpoints = endpoints.clone();
            assert_eq!(
                router
                    .ask(request.clone())
                    .map(|route| route.to.rank.worker.0),
                expected,
                "{what}"
            );
            assert_eq!(
                router.explain(request.clone()).reason,
                expected
                    .err()
                    .map(RouteError::reason)
                    .or_else(|| router.ask(request.clone()).unwrap().reason),
                "{what}"
            );
            assert_eq!(
                router
                    .route(request)
                    .map(|booked| booked.route.to.rank.worker.0),
                expected,
                "{what}"
            );
        }
    }
}

#[test]
fn a_subset_holds_for_the_prefill_as_well() {
    let pools = || {
        [
            with_role(1, Role::Prefill),
            with_role(2, Role::Prefill),
            with_role(11, Role::Decode),
        ]
    };
    let unknown = || Err(RouteError::Pin(Ineligible::PinUnknown(WorkerId(9))));
    type Expected = Result<Option<u64>, RouteError>;
    type Case = (
        &'static str,
        &'static [u64],
        Option<Pin>,
        Expected,
        Expected,
    );
    let cases: [Case; 8] = [
        ("the other one", &[2, 11], None, Ok(Some(2)), Ok(Some(2))),
        (
            "nobody for the prefill",
            &[11],
            None,
            Ok(None),
            Err(RouteError::NoPrefill),
        ),
        (
            "nobody for the decode",
            &[1, 2],
            None,
            Err(RouteError::Unsatisfied),
            Err(RouteError::Unsatisfied),
        ),
        (
            "a pin inside",
            &[1, 2, 11],
            pin(1),
            Ok(Some(1)),
            Ok(Some(1)),
        ),
        (
            "a pin outside",
            &[2, 11],
            pin(1),
            Err(RouteError::Unsatisfied),
            Err(RouteError::Unsatisfied),
        ),
        (
            "a pin outside, and nobody",
            &[11],
            pin(1),
            Err(RouteError::Unsatisfied),
            Err(RouteError::Unsatisfied),
        ),
        ("a pin to nobody", &[2, 11], pin(9), unknown(), unknown()),
        (
            "an empty subset before a pin",
            &[],
            pin(9),
            Err(RouteError::Unsatisfied),
            Err(RouteError::Unsatisfied),
        ),
    ];
    for (what, ids, prefill_pin, lenient, strict) in cases {
        for (enforce, expected) in [(false, lenient), (true, strict)] {
            let disaggregation = Disaggregation {
                enforce,
                conditional: None,
            };
            let router = router_of(
                pools(),
                RouterSettings {
                    disaggregation,
                    ..RouterSettings::default()
                },
            );
            let routed = router.route(RouteRequest {
                prefill_pin,
                ..within(ids)
            });
            let prefill = routed.map(|booked| {
                booked
                    .route
                    .prefill()
                    .map(|prefill| prefill.to.rank.worker.0)
            });
            assert_eq!(prefill, expected, "{what}, {enforce}");
        }
    }
    let router = router_of(pools(), RouterSettings::default());
    let mut pinned = within(&[1]);
    pinned.constraints.pin = pin(11);
    assert_eq!(
        router.route(pinned).unwrap_err(),
        RouteError::Unsatisfied,
        "a pin outside is not the client's mistake"
    );
}

#[test]
fn a_draining_worker_finishes_what_it_has_and_gets_nothing_new() {
    let draining = |id| Worker {
        draining: true,
        ..at(id)
    };
    let router = router_of([at(1), at(2)], RouterSettings::default());
    let held = router.route(within(&[1])).unwrap();
    publish(&router, [draining(1), at(2)]);
    assert_eq!(load_of(&router, 1).2, 1, "it is the same worker");
    for _ in 0..8 {
        assert_eq!(
            router.route(request(&[vec![1]])).unwrap().route.to.rank,
            rank(2)
        );
    }
    let mut pinned = request(&[vec![1]]);
    pinned.constraints.pin = pin(1);
    assert_eq!(router.route(pinned).unwrap_err(), RouteError::Unsatisfied);
    assert_eq!(
        router.route(within(&[1])).unwrap_err(),
        RouteError::Unsatisfied
    );
    assert!(!router.is_usable(rank(1)) && router.is_usable(rank(2)) && !router.is_usable(rank(3)));
    drop(held);
    publish(&router, [draining(1), draining(2)]);
    assert_eq!(
        router.route(request(&[vec![1]])).unwrap_err(),
        RouteError::NoCandidate
    );
    publish(&router, [at(1), draining(2)]);
    assert_eq!(
        router.route(request(&[vec![1]])).unwrap().route.to.rank,
        rank(1),
        "it takes requests again"
    );
}

#[test]
fn fallbacks_are_the_next_best_endpoints_that_are_well() {
    let clock = Clock::default();
    let health = HealthRules {
        failures: 1,
        ..HealthRules::default()
    };
    let settings = |fallbacks, scores| RouterSettings {
        fallbacks,
        scores,
        health,
        ..RouterSettings::default()
    };
    let twin = Worker {
        endpoint: endpoint(1),
        ..worker(6)
    };
    let ranked = |id| Worker {
        ranks: Ranks {
            start: 0,
            size: 2.try_into().unwrap(),
        },
        ..at(id)
    };
    let fleet = || [ranked(1), at(2), at(3), at(4), at(5), twin.clone()];
    let route = |fallbacks, scores| {
        let router = clocked(fleet(), settings(fallbacks, scores), &clock);
        let _cached: Vec<_> = [(1, 3), (2, 1), (3, 2)]
            .map(|(id, blocks)| holds(&router, id, blocks))
            .into();
        let only = |id: u64| {
            let mut request = request(&[vec![9]]);
            request.constraints.allowed = Some([WorkerId(id)].into());
            request
        };
        // The fourth is out, the fifth has too much to do.
        let dead = Answer {
            status: 503,
            from: AnswerFrom::Gateway,
        };
        router.answered(&mut router.route(only(4)).unwrap(), dead);
        router.answered(
            &mut router.route(only(5)).unwrap(),
            Answer {
                from: AnswerFrom::Chosen,
                ..dead
            },
        );
        let first = router.route(request(&[vec![1, 2, 3]])).unwrap().route;
        // One that is due to be tried may be chosen, but is nobody to fall back to.
        clock.advance(Duration::from_millis(1001));
        let later = router.ask(request(&[vec![1, 2, 3]])).unwrap();
        (first, later)
    };
    let (none, _) = route(0, false);
    assert_eq!(
        (none.to.rank, none.fallbacks.len(), none.scores.len()),
        (rank(1), 0, 0)
    );
    assert_eq!(none.steer().fallbacks, []);
    let (one, _) = route(1, false);
    assert_eq!(one.steer().fallbacks, [endpoint(3)]);
    let (all, later) = route(9, true);
    assert_eq!(
        (all.to.rank, all.steer().fallbacks),
        (rank(1), vec![endpoint(3), endpoint(2)])
    );
    let scored: Vec<_> = all
        .steer()
        .scores
        .iter()
        .map(|(endpoint, _)| *endpoint)
        .collect();
    assert_eq!(
        scored,
        [endpoint(1), endpoint(3), endpoint(2)],
        "all candidates, each endpoint once"
    );
    assert_eq!(all.scores[0].1, all.choice.cost.total);
    assert!(all.scores.is_sorted_by(|a, b| a.1 <= b.1));
    assert_eq!(
        later.steer().fallbacks,
        [endpoint(3), endpoint(2), endpoint(5)]
    );
    assert_eq!(later.scores.len(), 5);
}

/// A router to workers that are predicted, with the blocks that each should have.
fn predicted(workers: impl IntoIterator<Item = Worker>) -> Router {
    let fallback = Ttl {
        ttl: Duration::from_secs(60),
        most_blocks_per_rank: 100,
    };
    let policy = Policy::Lru {
        default_blocks: Some(100),
        fallback,
    };
    let without_events = Some(Predictor::new(policy, Instant::now));
    let router = router_of(workers, RouterSettings::default());
    let router = router.predicting(Predictions {
        without_events,
        ..Predictions::default()
    });
    router
        .fleet()
        .members()
        .for_each(|member| router.predictions().open(member));
    router
}

fn expected_at(router: &Router) -> Vec<(u64, u64, u64)> {
    let mut held: Vec<_> = router
        .predictions()
        .stats()
        .map(|rank| (rank.rank.worker.0, rank.blocks, rank.generated))
        .collect();
    held.sort_unstable();
    held
}

fn in_flight_at(router: &Router) -> Vec<(u64, u64)> {
    let mut held: Vec<_> = router
        .predictions()
        .stats()
        .map(|rank| (rank.rank.worker.0, rank.in_flight))
        .collect();
    held.sort_unstable();
    held
}

/// The chosen worker answers a request with 200, to its end.
fn accept(router: &Router, mut booked: Booked) {
    router.answered(
        &mut booked,
        Answer {
            status: 200,
            from: AnswerFrom::Chosen,
        },
    );
}

#[test]
fn what_was_booked_and_expected_moves_to_who_served() {
    let router = predicted([at(1), at(2)]);
    let known = router.route(RouteRequest {
        prompt: request(&[vec![1, 2]]).prompt,
        ..within(&[2])
    });
    accept(&router, known.unwrap());
    let mut booked = router.route(within(&[1])).unwrap();
    booked.reservation.output_block(None);
    assert_eq!(
        (load_of(&router, 1), load_of(&router, 2)),
        ((4, 13, 1), (0, 0, 0))
    );
    assert_eq!(expected_at(&router), [(1, 0, 0), (2, 2, 0)]);
    assert_eq!(in_flight_at(&router), [(1, 3), (2, 0)]);
    let mapped = "[::ffff:10.0.0.1]:8000".parse().unwrap();
    for unchanged in [endpoint(1), mapped] {
        assert_eq!(router.served(&mut booked, unchanged), Moved::Unchanged);
    }
    assert_eq!(router.served(&mut booked, endpoint(2)), Moved::To(rank(2)));
    assert_eq!(router.served(&mut booked, endpoint(2)), Moved::Unchanged);
    assert_eq!(
        (load_of(&router, 1), load_of(&router, 2)),
        ((0, 0, 0), (4, 5, 1)),
        "two blocks are cached there"
    );
    assert_eq!(in_flight_at(&router), [(1, 0), (2, 3)]);
    router.settle_predictions(&mut booked, 200);
    assert_eq!(
        (expected_at(&router), in_flight_at(&router)),
        (vec![(1, 0, 0), (2, 3, 0)], vec![(1, 0), (2, 0)])
    );
    assert_eq!(
        booked.route.to,
        Destination {
            rank: rank(2),
            endpoint: endpoint(2),
            several_ranks: false
        }
    );
    booked.grow();
    assert_eq!(expected_at(&router)[1], (2, 3, 1));
    (0..20).for_each(|_| router.prefilled(&booked, Duration::from_secs(9)));
    assert!(
        router.prefill_time_errors().is_empty(),
        "a time with a vain try in it is no time of a prefill"
    );
    let other = Answer {
        status: 200,
        from: AnswerFrom::Other(WorkerId(2)),
    };
    (0..3).for_each(|_| drop(router.answered(&mut booked, other)));
    assert_eq!(router.out(), [WorkerId(1)], "the chosen one is to blame");
    drop(booked);
    assert_eq!(
        (load_of(&router, 1), load_of(&router, 2)),
        ((0, 0, 0), (0, 0, 0))
    );
}

#[test]
fn what_somebody_holds_who_makes_other_tokens_is_not_booked_as_cached() {
    let router = router_of([at(1), at(2)], RouterSettings::default());
    let _writers = [holds(&router, 1, 3), holds(&router, 2, 3)];
    router.parity().configure([("m".into(), Arc::default())]);
    let standing = router.parity().of(&"m".into()).unwrap();
    for _ in 0..8 {
        standing.seen(WorkerId(1), crate::parity::Evidence::Confirmed);
        standing.seen(
            WorkerId(2),
            crate::parity::Evidence::Unconfirmed { block: 0 },
        );
    }
    // Ours are 13 tokens in 3 blocks; what the client made itself is as it is.
    for (foretold, prefill) in [
        (crate::parity::Foretold::Prompt, 13),
        (crate::parity::Foretold::Nothing, 1),
    ] {
        let asked = RouteRequest {
            model: Some("m".into()),
            foretold,
            ..within(&[1])
        };
        let mut booked = router.route(asked).unwrap();
        assert_eq!(load_of(&router, 1).1, 1);
        assert_eq!(router.served(&mut booked, endpoint(2)), Moved::To(rank(2)));
        assert_eq!(load_of(&router, 2).1, prefill);
    }
}

#[test]
fn a_booking_is_released_when_nobody_we_know_served() {
    let router = predicted([at(1), at(2)]);
    let mut booked = router.route(within(&[1])).unwrap();
    assert_eq!(router.served(&mut booked, endpoint(9)), Moved::Away);
    assert_eq!(router.served(&mut booked, endpoint(9)), Moved::Unchanged);
    assert_eq!(
        (load_of(&router, 1), load_of(&router, 2)),
        ((0, 0, 0), (0, 0, 0))
    );
    assert_eq!(
        (expected_at(&router), booked.route.to.rank),
        (vec![(1, 0, 0), (2, 0, 0)], rank(1))
    );
    booked.grow();
    assert_eq!(
        router.served(&mut booked, endpoint(2)),
        Moved::Away,
        "there is nothing to move any more"
    );
    drop(booked);
    let mut left = router.route(within(&[1])).unwrap();
    publish(&router, [at(2)]);
    assert_eq!(
        router.served(&mut left, endpoint(2)),
        Moved::To(rank(2)),
        "the chosen one has left the fleet"
    );
    assert_eq!(load_of(&router, 2), (3, 13, 1));
}

#[test]
fn of_several_ranks_behind_one_endpoint_the_named_one_serves_or_the_idlest() {
    let ranked = |id| Worker {
        ranks: Ranks {
            start: 0,
            size: 2.try_into().unwrap(),
        },
        ..at(id)
    };
    let on = |id, rank| WorkerRank {
        worker: WorkerId(id),
        rank: DpRank(rank),
    };
    let pinned = |id, rank| {
        let mut request = request(&[vec![1, 2, 3]]);
        request.constraints.pin = Some(Pin {
            worker: WorkerId(id),
            rank: Some(DpRank(rank)),
        });
        request
    };
    let router = router_of([at(1), ranked(2), ranked(3)], RouterSettings::default());
    let mut named = router.route(pinned(2, 1)).unwrap();
    assert_eq!(
        router.served(&mut named, endpoint(2)),
        Moved::Unchanged,
        "which rank it was is not told"
    );
    let _busy = router.route(pinned(3, 1)).unwrap();
    assert_eq!(
        router.served(&mut named, endpoint(3)),
        Moved::To(on(3, 1)),
        "the header named that rank"
    );
    let mut unnamed = router.route(within(&[1])).unwrap();
    assert_eq!(
        router.served(&mut unnamed, endpoint(3)),
        Moved::To(on(3, 0))
    );
    assert!(unnamed.route.to.several_ranks);
}

#[test]
fn a_remote_prefill_stays_where_it_was() {
    let workers = [
        with_role(1, Role::Prefill),
        with_role(11, Role::Decode),
        with_role(12, Role::Decode),
    ];
    let router = predicted(workers);
    let mut booked = router.route(within(&[1, 11])).unwrap();
    assert_eq!(in_flight_at(&router), [(1, 3), (11, 3), (12, 0)]);
    assert_eq!(
        router.served(&mut booked, endpoint(12)),
        Moved::To(rank(12))
    );
    assert_eq!(
        [1, 11, 12].map(|id| load_of(&router, id)),
        [(0, 13, 1), (0, 0, 0), (3, 0, 1)]
    );
    assert_eq!(in_flight_at(&router), [(1, 3), (11, 0), (12, 3)]);
    router.settle_predictions(&mut booked, 200);
    assert_eq!(expected_at(&router), [(1, 3, 0), (11, 0, 0), (12, 3, 0)]);
    assert_eq!(booked.route.prefill().unwrap().to.rank, rank(1));
    booked.reservation.first_token();
    assert_eq!(
        [1, 11, 12].map(|id| load_of(&router, id)),
        [(0, 0, 0), (0, 0, 0), (3, 0, 1)]
    );
}

#[test]
fn the_beginning_of_a_prompt_counts_as_far_as_it_is_known() {
    let known = || {
        BlockHashes::chain(
            12,
            BlockSize::new(4).unwrap(),
            [1, 2, 3].map(LocalHash).into(),
        )
    };
    let beginning = |known| {
        let prompt = Prompt::Beginning {
            known,
            tokens: 41,
            because: Reason::BodyCut,
        };
        RouteRequest::new(None, prompt)
    };
    let source = EventSource {
        endpoint: "tcp://127.0.0.1:1".to_owned(),
        topic: String::new(),
        attach: crate::worker::Attach::Connect,
        replay: None,
    };
    let router = router_of(
        [1, 2].map(|id| Worker {
            event_sources: vec![source.clone()],
            ..at(id)
        }),
        RouterSettings::default(),
    );
    let cold = router.ask(beginning(known())).unwrap();
    assert_eq!(
        (cold.mode, cold.reason),
        (Mode::LoadOnly, Some(Reason::IndexCold))
    );
    let _cached = holds(&router, 2, 3);
    let explained = router.explain(beginning(known()));
    assert!(
        explained
            .sentence
            .contains("only the beginning of the prompt was compared"),
        "{}",
        explained.sentence
    );
    assert!(
        explained.sentence.contains("it holds 3 of 3 blocks"),
        "{}",
        explained.sentence
    );
    let Booked {
        route, reservation, ..
    } = router.route(beginning(known())).unwrap();
    assert_eq!(
        (route.to.rank, route.mode, route.reason),
        (rank(2), Mode::Partial, Some(Reason::BodyCut))
    );
    assert_eq!(
        (route.prompt_tokens, route.prompt_blocks, route.hit_rate()),
        (41, 3, 1.0)
    );
    assert_eq!(
        route.predicted_cached_tokens, 12,
        "its last token is not the last of the prompt"
    );
    assert_eq!(
        (
            route.choice.required_blocks,
            route.choice.cost.prefill_blocks
        ),
        (11, 41.0 / 4.0)
    );
    assert_eq!(load_of(&router, 2), (3, 29, 1));
    assert!(route.short().ends_with("reason=body_cut"));
    drop(reservation);
    let nothing = BlockHashes::chain(2, BlockSize::new(4).unwrap(), vec![]);
    let unknown = router.ask(beginning(nothing)).unwrap();
    assert_eq!(
        (unknown.mode, unknown.reason, unknown.prompt_tokens),
        (Mode::LoadOnly, Some(Reason::BodyCut), 41)
    );
    let short = Prompt::Beginning {
        known: known(),
        tokens: 1,
        because: Reason::BodyCut,
    };
    assert_eq!(
        short.tokens(),
        12,
        "it is as long as what is known, whatever the estimate"
    );

    let predicted = predicted([at(1)]);
    accept(
        &predicted,
        predicted.route(request(&[vec![1, 2, 3, 4]])).unwrap(),
    );
    let route = predicted.ask(beginning(known())).unwrap();
    assert_eq!(
        (route.mode, route.reason),
        (Mode::Approximate, Some(Reason::BodyCut))
    );
    assert_eq!(route.steer().predicted_cached_tokens, Some(12));
}

/// Envoy would take somebody of another pool, so it is told that there is nobody, and the operator which pool it was.
#[test]
fn a_request_for_a_pool_goes_to_its_workers_or_to_nobody() {
    let of_pool = |id, pool: &str| Worker {
        taints: [format!("pool={pool}")].into(),
        ..worker(id)
    };
    let prefill = Worker {
        role: Role::Prefill,
        ..of_pool(3, "q")
    };
    let router = router_of(
        [of_pool(1, "p"), of_pool(2, "q"), prefill],
        RouterSettings::default(),
    );
    let asked = |pool: Option<&str>, model: Option<&str>| {
        let mut request = request(&[vec![1]]);
        request.constraints.pool = pool.map(Into::into);
        request.model = model.map(Into::into);
        request
    };
    let goes = |pool: Option<&str>| {
        let booked = router.route(asked(pool, None)).unwrap();
        (
            booked.route.to.rank.worker.0,
            booked
                .route
                .prefill()
                .map(|prefill| prefill.to.rank.worker.0),
        )
    };
    for _ in 0..20 {
        assert_eq!(
            (goes(Some("p")), goes(Some("q"))),
            ((1, None), (2, Some(3)))
        );
        assert!(goes(None).1.is_some());
    }
    for (pool, model) in [("none", None), ("p", Some("another"))] {
        assert_eq!(
            router.route(asked(Some(pool), model)).unwrap_err(),
            RouteError::Unsatisfied,
            "{pool} {model:?}"
        );
        let explained = router.explain(asked(Some(pool), model)).sentence;
        assert!(
            explained.contains(&format!(
                "(it is for the pool `{pool}`); the request would be refused"
            )),
            "{explained}"
        );
    }
}

#[test]
fn answers_of_the_front_end_alone_prove_nothing_of_health() {
    let failures = HealthRules {
        failures: 3,
        ..HealthRules::default()
    };
    let answers = |sent: &[(bool, u16)]| {
        let router = router_of(
            [worker(1)],
            RouterSettings {
                health: failures,
                ..RouterSettings::default()
            },
        );
        let answered = |&(computes, status): &(bool, u16)| {
            let prompt = Prompt::Estimated {
                tokens: 0,
                because: Reason::NotInference,
            };
            let request = RouteRequest {
                computes,
                ..RouteRequest::new(None, prompt)
            };
            router
                .answered(
                    &mut router.route(request).unwrap(),
                    Answer {
                        status,
                        from: AnswerFrom::Chosen,
                    },
                )
                .len()
        };
        sent.iter().map(answered).sum::<usize>()
    };
    // A list of models, and a path that is of no known API.
    let page = false;
    let unknown = true;
    assert_eq!(answers(&[(page, 500); 10]), 0);
    assert_eq!(
        answers(&[(unknown, 500), (unknown, 500), (page, 200), (unknown, 500)]),
        1,
        "a page forgives nothing"
    );
    assert_eq!(
        answers(&[
            (unknown, 500),
            (unknown, 500),
            (unknown, 200),
            (unknown, 500),
            (unknown, 500)
        ]),
        0
    );
}
