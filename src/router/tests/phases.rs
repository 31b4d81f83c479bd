//! Prefill and decode on different workers: who does which, what is booked where, and what happens when one side is gone.

use std::collections::BTreeMap;

use super::*;
use crate::block::EngineHash;
use crate::disagg::{Bypass, Conditional, Disaggregation};
use crate::index::{KvEvent, StoredBlock};
use crate::schedule::{Constraints, Pin};
use crate::tier::Tier;
use crate::worker::{DpRank, Enforcement, KvTransfer};

fn with_role(id: u64, role: Role) -> Worker {
    Worker { role, ..worker(id) }
}

fn pools() -> Vec<Worker> {
    vec![
        with_role(1, Role::Prefill),
        with_role(2, Role::Prefill),
        with_role(11, Role::Decode),
        with_role(12, Role::Decode),
    ]
}

fn enforcing(enforce: bool) -> RouterSettings {
    RouterSettings {
        disaggregation: Disaggregation {
            enforce,
            conditional: None,
        },
        ..RouterSettings::default()
    }
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

fn pinned(id: u64) -> Option<Pin> {
    Some(Pin {
        worker: WorkerId(id),
        rank: None,
    })
}

#[test]
fn the_prefill_worker_carries_the_prompt_until_the_first_token_and_the_decode_worker_the_blocks() {
    let router = router_of(pools(), RouterSettings::default());
    let mut booked = router.route(request(&[vec![1, 2, 3]])).unwrap();
    let decode = booked.route.to.rank.worker.0;
    let prefill = booked.route.prefill().unwrap().to.rank.worker.0;
    assert!(decode > 10 && prefill < 10);
    assert_eq!(booked.route.steer().prefill.unwrap().rank.worker.0, prefill);
    assert_eq!(
        booked.route.steer().predicted_cached_tokens,
        None,
        "what is reported after a transfer is not known"
    );
    assert_eq!(load_of(&router, prefill), (0, 13, 1));
    assert_eq!(load_of(&router, decode), (3, 0, 1));
    booked.reservation.first_token();
    assert_eq!(load_of(&router, prefill), (0, 0, 0));
    assert_eq!(load_of(&router, decode), (3, 0, 1));
    drop(booked);
    assert_eq!(load_of(&router, decode), (0, 0, 0));
}

#[test]
fn without_prefill_workers_the_decode_workers_do_it_all_unless_that_is_refused() {
    let decoders = || {
        pools()
            .into_iter()
            .filter(|worker| worker.role == Role::Decode)
    };
    let lenient = router_of(decoders(), enforcing(false));
    let booked = lenient.route(request(&[vec![1, 2]])).unwrap();
    assert_eq!(booked.route.phases, Phases::Aggregated);
    assert_eq!(load_of(&lenient, booked.route.to.rank.worker.0), (2, 9, 1));
    drop(booked);

    let strict = router_of(decoders(), enforcing(true));
    assert_eq!(
        strict.route(request(&[vec![1, 2]])).unwrap_err(),
        RouteError::NoPrefill
    );
    publish(&strict, pools());
    assert!(
        strict
            .route(request(&[vec![1, 2]]))
            .unwrap()
            .route
            .prefill()
            .is_some(),
        "they came back"
    );
    publish(&strict, decoders());
    assert_eq!(
        strict.route(request(&[vec![1, 2]])).unwrap_err(),
        RouteError::NoPrefill
    );
}

#[test]
fn other_settings_hold_for_what_is_prepared_after_them() {
    let router = router_of([with_role(11, Role::Decode)], enforcing(false));
    let mut before = router.prepare(request(&[vec![1, 2]]));
    router.set_settings(enforcing(true));
    assert_eq!(
        router.route(request(&[vec![1, 2]])).unwrap_err(),
        RouteError::NoPrefill
    );
    let placed = router.place(&mut before, &Gate::default());
    assert!(
        matches!(placed, Attempt::Placed(_)),
        "what waits already is decided as it was to be"
    );
    router.set_settings(enforcing(false));
    assert!(router.route(request(&[vec![1, 2]])).is_ok());
}

#[test]
fn decode_workers_are_preferred_over_aggregated_ones_after_a_remote_prefill() {
    let router = router_of(
        [
            with_role(1, Role::Prefill),
            with_role(11, Role::Decode),
            worker(21),
        ],
        enforcing(false),
    );
    for _ in 0..4 {
        let booked = router.route(request(&[vec![1, 2]])).unwrap();
        assert_eq!(booked.route.to.rank.worker, WorkerId(11));
        std::mem::forget(booked);
    }
    let mixed = router_of([with_role(1, Role::Prefill), worker(21)], enforcing(false));
    let booked = mixed.route(request(&[vec![1, 2]])).unwrap();
    assert_eq!(
        (
            booked.route.to.rank.worker,
            booked.route.prefill().is_some()
        ),
        (WorkerId(21), true)
    );
}

#[test]
fn a_short_rest_of_a_prompt_stays_with_the_decode_worker() {
    let conditional = Some(Conditional::default());
    let settings = RouterSettings {
        disaggregation: Disaggregation {
            enforce: false,
            conditional,
        },
        ..RouterSettings::default()
    };
    let router = router_of(pools(), settings);
    let fleet = router.fleet();
    let slot = fleet
        .members()
        .find(|member| member.rank.worker == WorkerId(12))
        .unwrap()
        .slot;
    let mut writer = router.index().join(slot);
    let prompt: Vec<u64> = (0..100).collect();
    let stored = |local: u64| crate::index::StoredBlock {
        engine: crate::block::EngineHash(local),
        local: LocalHash(local),
    };
    let blocks = prompt.iter().copied().map(stored).collect();
    writer.apply(&crate::index::KvEvent::Stored {
        parent: None,
        blocks,
        tier: crate::tier::Tier::Device,
    });

    let kept = router
        .route(request(std::slice::from_ref(&prompt)))
        .unwrap();
    assert_eq!(kept.route.phases, Phases::Kept(Bypass::LittleToCompute));
    assert_eq!(
        kept.route.to.rank.worker,
        WorkerId(12),
        "where the prompt is cached"
    );
    assert_eq!(
        load_of(&router, 12),
        (100, 1, 1),
        "the uncached tail is its own prefill"
    );
    let unknown = router.route(request(&[(1000..1100).collect()])).unwrap();
    assert!(unknown.route.prefill().is_some(), "all of it is uncached");
}

#[test]
fn pins_hold_per_phase_and_one_that_cannot_be_kept_is_the_clients_mistake() {
    let router = router_of(pools(), RouterSettings::default());
    let with = |decode: Option<Pin>, prefill: Option<Pin>| {
        let mut request = request(&[vec![1, 2]]);
        request.constraints.pin = decode;
        request.prefill_pin = prefill;
        router.route(request).map(|booked| {
            (
                booked.route.to.rank.worker.0,
                booked
                    .route
                    .prefill()
                    .map(|prefill| prefill.to.rank.worker.0),
            )
        })
    };
    for _ in 0..8 {
        assert_eq!(with(pinned(12), pinned(1)), Ok((12, Some(1))));
    }
    // The older header names one worker for every phase; it is meant for the one that decodes.
    assert_eq!(
        with(pinned(11), pinned(11)).map(|(decode, _)| decode),
        Ok(11)
    );
    assert!(matches!(with(pinned(99), None), Err(RouteError::Pin(_))));
    assert!(matches!(with(None, pinned(99)), Err(RouteError::Pin(_))));
    assert!(
        matches!(with(None, pinned(11)), Err(RouteError::Pin(_))),
        "a decode worker does no prefill"
    );
    assert!(
        matches!(with(pinned(1), None), Err(RouteError::Pin(_))),
        "a prefill worker does not decode"
    );
    let wrong_rank = Some(Pin {
        worker: WorkerId(11),
        rank: Some(DpRank(3)),
    });
    assert!(matches!(with(wrong_rank, None), Err(RouteError::Pin(_))));
}

#[test]
fn the_place_of_the_prefill_worker_binds_the_decode_worker() {
    let placed = |id: u64, role: Role, zone: &str| Worker {
        topology: BTreeMap::from([("zone".to_owned(), zone.to_owned())]),
        kv_transfer: (role == Role::Prefill).then(|| KvTransfer {
            domain: "zone".into(),
            enforcement: Enforcement::Required,
        }),
        ..with_role(id, role)
    };
    let workers = || {
        vec![
            placed(1, Role::Prefill, "a"),
            placed(11, Role::Decode, "a"),
            placed(12, Role::Decode, "b"),
        ]
    };
    let router = router_of(workers(), enforcing(false));
    let booked: Vec<_> = (0..6)
        .map(|at| router.route(request(&[vec![at, at]])).unwrap())
        .collect();
    assert!(
        booked
            .iter()
            .all(|booked| booked.route.to.rank.worker == WorkerId(11)),
        "however busy it is"
    );
    drop(booked);

    let apart = || vec![placed(1, Role::Prefill, "c"), placed(11, Role::Decode, "a")];
    let lenient = router_of(apart(), enforcing(false))
        .route(request(&[vec![1]]))
        .unwrap();
    assert_eq!(lenient.route.phases, Phases::Kept(Bypass::OutOfReach));
    let strict = router_of(apart(), enforcing(true)).route(request(&[vec![1]]));
    assert_eq!(strict.unwrap_err(), RouteError::NoPrefill);
}

#[test]
fn what_has_no_prompt_needs_no_prefill_worker_and_no_patience() {
    let unread = |because| RouteRequest::new(None, Prompt::Estimated { tokens: 0, because });
    let when_all_overloaded = WhenOverloaded::Reject;
    let settings = RouterSettings {
        when_all_overloaded,
        ..enforcing(true)
    };
    let router = router_of([with_role(11, Role::Decode)], settings);
    assert_eq!(
        router.route(unread(Reason::BodyTooLarge)).unwrap_err(),
        RouteError::NoPrefill
    );
    for because in [Reason::NotInference, Reason::NoBody] {
        assert_eq!(
            router.route(unread(because)).unwrap().route.phases,
            Phases::Aggregated
        );
    }
    let mut booked = router.route(unread(Reason::NoBody)).unwrap();
    router.answered(
        &mut booked,
        Answer {
            status: 503,
            from: AnswerFrom::Chosen,
        },
    );
    assert!(
        router.route(unread(Reason::NoBody)).is_ok(),
        "however overloaded it is"
    );
    publish(&router, pools());
    assert!(
        router
            .route(unread(Reason::NotInference))
            .unwrap()
            .route
            .prefill()
            .is_none()
    );
}

#[test]
fn where_every_worker_does_both_phases_no_prefill_worker_is_missing() {
    let router = router_of([worker(1)], enforcing(true));
    let mut asked = request(&[vec![1, 2]]);
    assert_eq!(
        router.route(asked.clone()).unwrap().route.phases,
        Phases::Aggregated
    );
    asked.prefill_pin = pinned(7);
    assert!(matches!(
        router.route(asked).unwrap_err(),
        RouteError::Pin(_)
    ));
}

#[test]
fn overloaded_prefill_workers_are_overload_and_not_their_absence() {
    let when_all_overloaded = WhenOverloaded::Reject;
    let overload = crate::schedule::Thresholds {
        prefill_tokens: Some(1),
        ..Default::default()
    };
    let router = router_of(
        pools(),
        RouterSettings {
            when_all_overloaded,
            overload,
            ..enforcing(true)
        },
    );
    let _held: Vec<_> = (0..2)
        .map(|at| router.route(request(&[vec![at, at]])).unwrap())
        .collect();
    assert!(matches!(
        router.route(request(&[vec![9]])).unwrap_err(),
        RouteError::Overloaded(_)
    ));
}

#[test]
fn a_failure_after_a_remote_prefill_is_nobodys_and_a_success_is_both_workers() {
    let clock = Clock::default();
    let workers = [with_role(1, Role::Prefill), with_role(11, Role::Decode)];
    let router = clocked(workers, RouterSettings::default(), &clock);
    let answered = |status, from| {
        let mut booked = router.route(request(&[vec![1, 2]])).unwrap();
        assert!(booked.route.prefill().is_some());
        let probes = booked.probes.len();
        router.answered(&mut booked, Answer { status, from });
        probes
    };
    for _ in 0..5 {
        answered(500, AnswerFrom::Chosen);
    }
    assert_eq!(router.out(), []);
    for _ in 0..3 {
        router
            .health
            .report(WorkerId(1), crate::health::Outcome::Failure, clock.now());
    }
    assert_eq!(router.out(), [WorkerId(1)]);
    clock.advance(Duration::from_secs(1));
    assert_eq!(answered(500, AnswerFrom::Chosen), 1);
    assert_eq!(router.out(), [WorkerId(1)], "the probe told nothing");
    assert_eq!(
        answered(200, AnswerFrom::Chosen),
        1,
        "so the next one is a probe again"
    );
    assert_eq!(router.out(), []);
}

#[test]
fn who_keeps_its_prefill_does_not_wait_for_a_prefill_worker() {
    let gate = Gate {
        prefill_tokens: Some(10),
        ..Gate::default()
    };
    let attempt = |conditional: Option<Conditional>, prefill_pin| {
        let disaggregation = Disaggregation {
            enforce: false,
            conditional,
        };
        let router = router_of(
            pools(),
            RouterSettings {
                disaggregation,
                ..RouterSettings::default()
            },
        );
        let occupy = |id: u64| {
            let mut long = request(&[(id * 100..id * 100 + 20).collect()]);
            long.prefill_pin = pinned(id);
            router.route(long).unwrap()
        };
        let _held = [occupy(1), occupy(2)];
        let mut prepared = router.prepare(RouteRequest {
            prefill_pin,
            ..request(&[vec![7]])
        });
        match router.place(&mut prepared, &gate) {
            Attempt::Placed(booked) => Some(booked.route.phases),
            attempt => {
                assert!(matches!(attempt, Attempt::Busy), "{attempt:?}");
                None
            }
        }
    };
    let always = Some(Conditional {
        uncached_share: 1.5,
        ..Conditional::default()
    });
    assert_eq!(attempt(None, None), None);
    assert_eq!(
        attempt(always, None),
        Some(Phases::Kept(Bypass::LittleToCompute))
    );
    assert_eq!(attempt(always, pinned(1)), None);
    let never = Some(Conditional {
        uncached_tokens: 0,
        ..Conditional::default()
    });
    assert_eq!(attempt(never, None), None);
}

#[test]
fn a_placed_request_leaves_no_prediction_before_it_is_sent_and_only_the_answering_rank_grows() {
    let clock = Clock::default();
    let fallback = crate::predict::Ttl {
        ttl: Duration::from_secs(60),
        most_blocks_per_rank: 100,
    };
    let policy = crate::predict::Policy::Lru {
        default_blocks: Some(100),
        fallback,
    };
    let told = clock.clone();
    let without_events = Some(crate::predict::Predictor::new(policy, move || told.now()));
    let workers = [with_role(1, Role::Prefill), with_role(11, Role::Decode)];
    let router = clocked(workers, RouterSettings::default(), &clock);
    let router = router.predicting(Predictions {
        without_events,
        ..Predictions::default()
    });
    router
        .fleet()
        .members()
        .for_each(|member| router.predictions().open(member));
    let held = || {
        let mut held: Vec<_> = router
            .predictions()
            .stats()
            .map(|rank| {
                (
                    rank.rank.worker.0,
                    rank.in_flight,
                    rank.blocks,
                    rank.generated,
                )
            })
            .collect();
        held.sort_unstable();
        held
    };
    let mut prepared = router.prepare(request(&[vec![1, 2], vec![3]]));
    let Attempt::Placed(mut booked) = router.place(&mut prepared, &Gate::default()) else {
        panic!("it is free")
    };
    assert_eq!(held(), [(1, 0, 0, 0), (11, 0, 0, 0)]);
    router.expect_booked(&mut booked);
    assert_eq!(held(), [(1, 3, 0, 0), (11, 3, 0, 0)]);
    router.confirm_prefill(&mut booked);
    assert_eq!(held(), [(1, 0, 3, 0), (11, 3, 0, 0)]);
    router.settle_predictions(&mut booked, 200);
    booked.grow();
    assert_eq!(held(), [(1, 0, 3, 0), (11, 0, 3, 1)]);
}

fn first(failed: &[u64]) -> RouteRequest {
    let failed = failed.iter().map(|id| WorkerId(*id)).collect();
    RouteRequest {
        step: Step::PrefillFirst { failed },
        ..request(&[vec![1, 2, 3]])
    }
}

fn taking_over(done: Prefilled) -> RouteRequest {
    RouteRequest {
        step: Step::Decode(Box::new(done)),
        ..request(&[vec![1, 2, 3]])
    }
}

#[test]
fn what_is_done_first_is_booked_alone_and_who_takes_over_is_chosen_by_the_load_of_then() {
    let router = router_of(pools(), RouterSettings::default());
    let prefilling = router.route(first(&[])).unwrap();
    let prefill = prefilling.route.prefill().unwrap().to.rank.worker.0;
    assert_eq!(load_of(&router, prefill), (0, 13, 1));
    assert_eq!(
        (load_of(&router, 11), load_of(&router, 12)),
        ((0, 0, 0), (0, 0, 0)),
        "nobody decodes yet"
    );

    // Meanwhile another request fills the worker that would have been chosen.
    let foreseen = prefilling.route.to.rank.worker;
    let pin = Constraints {
        pin: pinned(foreseen.0),
        ..Constraints::default()
    };
    let other = router
        .route(RouteRequest {
            constraints: pin,
            ..request(&[(10..20).collect()])
        })
        .unwrap();
    let done = router.prefilled_by(&prefilling.route).unwrap();
    drop(prefilling);
    assert_eq!(done.prefill.to.rank.worker.0, prefill);
    let mut decoding = router.route(taking_over(done)).unwrap();
    let decode = decoding.route.to.rank.worker;
    assert_ne!(decode, foreseen);
    assert_eq!(
        load_of(&router, decode.0),
        (3, 0, 1),
        "its blocks, and nothing to compute"
    );
    assert_eq!(
        decoding.route.prefill().unwrap().to.rank.worker.0,
        prefill,
        "the answer says who did it"
    );
    assert!(
        !decoding.reservation.first_token(),
        "there is no prefill left to end"
    );
    drop((decoding, other));
    assert_eq!(
        router
            .load()
            .snapshot()
            .iter()
            .map(|load| load.active_requests)
            .sum::<u64>(),
        0
    );
}

#[test]
fn who_failed_a_prefill_does_not_get_it_again_and_after_the_last_the_decode_worker_does_it_unless_that_is_refused()
 {
    let lenient = router_of(pools(), enforcing(false));
    let by = |failed: &[u64]| {
        Some(
            lenient
                .route(first(failed))
                .unwrap()
                .route
                .prefill()?
                .to
                .rank
                .worker
                .0,
        )
    };
    assert_eq!([by(&[1]), by(&[2]), by(&[1, 2])], [Some(2), Some(1), None]);
    let together = |router: &Router| {
        router
            .route(RouteRequest {
                step: Step::Together(Bypass::PrefillFailed),
                ..request(&[vec![1, 2]])
            })
            .unwrap()
    };
    let booked = together(&lenient);
    assert_eq!(booked.route.phases, Phases::Kept(Bypass::PrefillFailed));
    assert_eq!(
        load_of(&lenient, booked.route.to.rank.worker.0),
        (2, 9, 1),
        "with its prefill"
    );
    let none = router_of([worker(21)], enforcing(false));
    assert_eq!(
        together(&none).route.phases,
        Phases::Aggregated,
        "there is nobody who could have done it"
    );
    assert_eq!(
        router_of(pools(), enforcing(true))
            .route(first(&[1, 2]))
            .unwrap_err(),
        RouteError::NoPrefill
    );
}

#[test]
fn who_takes_over_stands_where_the_prefill_worker_can_reach_it() {
    let at = |worker: Worker, zone: &str| Worker {
        topology: BTreeMap::from([("zone".to_owned(), zone.to_owned())]),
        kv_transfer: Some(KvTransfer {
            domain: "zone".to_owned(),
            enforcement: Enforcement::Required,
        }),
        ..worker
    };
    let workers = [
        at(with_role(1, Role::Prefill), "a"),
        at(with_role(11, Role::Decode), "b"),
        at(with_role(12, Role::Decode), "a"),
    ];
    let router = router_of(workers.clone(), enforcing(false));
    let booked = router.route(first(&[])).unwrap();
    let done = router.prefilled_by(&booked.route).unwrap();
    assert_eq!(
        router
            .route(taking_over(done.clone()))
            .unwrap()
            .route
            .to
            .rank
            .worker,
        WorkerId(12)
    );
    publish(&router, workers.into_iter().take(2));
    assert_eq!(
        router.route(taking_over(done)).unwrap_err(),
        RouteError::NoCandidate,
        "out of reach"
    );
}

#[test]
fn where_decode_workers_can_do_nothing_else_nobody_else_does_it_for_a_missing_prefill_worker_but_who_does_both()
 {
    let asks = |step| RouteRequest {
        step,
        decoders: Decoders::OnlyDecode,
        ..request(&[vec![1, 2]])
    };
    let conditional = Some(Conditional {
        uncached_share: 2.0,
        ..Conditional::default()
    });
    let settings = RouterSettings {
        disaggregation: Disaggregation {
            enforce: false,
            conditional,
        },
        ..RouterSettings::default()
    };
    let decoders = || {
        pools()
            .into_iter()
            .filter(|worker| worker.role == Role::Decode)
    };
    let router = router_of(pools(), settings);
    assert!(
        router
            .route(asks(Step::Both))
            .unwrap()
            .route
            .prefill()
            .is_some(),
        "however little it is"
    );
    let together = || asks(Step::Together(Bypass::NotHandedOver));
    assert_eq!(router.route(together()).unwrap_err(), RouteError::NoPrefill);
    publish(&router, decoders());
    assert_eq!(
        router.route(asks(Step::Both)).unwrap_err(),
        RouteError::NoPrefill
    );
    publish(&router, decoders().chain([worker(21)]));
    assert_eq!(
        router.route(asks(Step::Both)).unwrap().route.to.rank.worker,
        WorkerId(21)
    );
    assert_eq!(
        router.route(together()).unwrap().route.to.rank.worker,
        WorkerId(21)
    );
}

#[test]
fn enforce_holds_for_workers_of_the_default_role() {
    let enforced = Arc::new(["m".into()].into());
    let router = router_of(
        [worker(1)],
        RouterSettings {
            enforced,
            ..enforcing(true)
        },
    );
    assert_eq!(
        router.route(request(&[vec![1, 2]])).unwrap_err(),
        RouteError::NoPrefill
    );
    publish(&router, [worker(1), with_role(2, Role::Prefill)]);
    assert!(
        router
            .route(request(&[vec![1, 2]]))
            .unwrap()
            .route
            .prefill()
            .is_some()
    );
}

#[test]
fn hit_rate_is_that_of_the_prefill_worker() {
    let router = router_of(
        [with_role(1, Role::Prefill), with_role(11, Role::Decode)],
        RouterSettings::default(),
    );
    let slot = router
        .fleet()
        .members()
        .find(|member| member.worker.role == Role::Prefill)
        .unwrap()
        .slot;
    let mut writer = router.index().join(slot);
    let block = |at| StoredBlock {
        engine: EngineHash(at),
        local: LocalHash(at),
    };
    let stored = KvEvent::Stored {
        parent: None,
        blocks: [1, 2].map(block).to_vec(),
        tier: Tier::Device,
    };
    writer.apply(&stored);
    let route = router.route(request(&[vec![1, 2, 3, 4]])).unwrap().route;
    let computed_by = route.computed_by();
    assert_eq!(
        (computed_by.rank.worker, computed_by.overlap.device),
        (WorkerId(1), 2)
    );
    assert_eq!(
        (computed_by.cached_tokens, computed_by.best_cached_tokens),
        (8, 8)
    );
    assert_eq!((route.hit_rate(), route.overlap.device), (0.5, 0));
}
