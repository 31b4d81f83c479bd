//! Prefill and decode on different workers: choice of the workers, bookings, and missing workers.

use std::collections::BTreeMap;

use super::*;
use crate::block::{EngineHash, StorageTier};
use crate::health::RequestOutcome;
use crate::index::{KvEvent, StoredBlock};
use crate::policy::{
    ConditionalPrefillConfig, Constraints, DisaggregationConfig, LocalPrefillReason, WorkerPin,
};
use crate::worker::{DpRank, KvTransferRule, TransferEnforcement};

mod learned;
mod sequential;

fn with_role(id: u64, role: WorkerRole) -> Worker {
    Worker { role, ..worker(id) }
}

fn pools() -> Vec<Worker> {
    vec![
        with_role(1, WorkerRole::Prefill),
        with_role(2, WorkerRole::Prefill),
        with_role(11, WorkerRole::Decode),
        with_role(12, WorkerRole::Decode),
    ]
}

fn enforcing(enforce: bool) -> RouterSettings {
    RouterSettings {
        disaggregation: DisaggregationConfig {
            enforce,
            conditional: None,
        },
        ..RouterSettings::default()
    }
}

fn pinned(id: u64) -> Option<WorkerPin> {
    Some(WorkerPin {
        worker: WorkerId(id),
        rank: None,
    })
}

#[test]
fn prefill_and_decode_are_booked_on_separate_workers() {
    let router = router_of(pools(), RouterSettings::default());
    let mut booked = router.route(request(&[vec![1, 2, 3]])).unwrap();
    let decode = booked.route.to.rank.worker.0;
    let prefill = booked.route.prefill().unwrap().to.rank.worker.0;
    assert!(decode > 10 && prefill < 10);
    assert_eq!(
        booked.route.target().prefill.unwrap().rank.worker.0,
        prefill
    );
    assert_eq!(
        booked.route.target().predicted_cached_tokens,
        None,
        "the cached tokens after a transfer are unknown"
    );
    assert_eq!(load_of(&router, prefill), (0, 13, 1));
    assert_eq!(load_of(&router, decode), (3, 0, 1));
    booked.reservation.on_first_token();
    assert_eq!(load_of(&router, prefill), (0, 0, 0));
    assert_eq!(load_of(&router, decode), (3, 0, 1));
    drop(booked);
    assert_eq!(load_of(&router, decode), (0, 0, 0));
}

#[test]
fn decode_workers_prefill_unless_enforced() {
    let decoders = || {
        pools()
            .into_iter()
            .filter(|worker| worker.role == WorkerRole::Decode)
    };
    let not_enforcing = router_of(decoders(), enforcing(false));
    let booked = not_enforcing.route(request(&[vec![1, 2]])).unwrap();
    assert_eq!(booked.route.phases, PhaseAssignment::Aggregated);
    assert_eq!(
        load_of(&not_enforcing, booked.route.to.rank.worker.0),
        (2, 9, 1)
    );
    drop(booked);

    let strict = router_of(decoders(), enforcing(true));
    assert_eq!(
        strict.route(request(&[vec![1, 2]])).unwrap_err(),
        RouteError::NoPrefill
    );
    strict.set_workers(pools());
    assert!(
        strict
            .route(request(&[vec![1, 2]]))
            .unwrap()
            .route
            .prefill()
            .is_some(),
        "the workers are back"
    );
    strict.set_workers(decoders());
    assert_eq!(
        strict.route(request(&[vec![1, 2]])).unwrap_err(),
        RouteError::NoPrefill
    );
}

#[test]
fn new_settings_apply_to_later_requests() {
    let router = router_of([with_role(11, WorkerRole::Decode)], enforcing(false));
    let mut before = router.prepare(request(&[vec![1, 2]]));
    router.set_settings(enforcing(true));
    assert_eq!(
        router.route(request(&[vec![1, 2]])).unwrap_err(),
        RouteError::NoPrefill
    );
    let placed = router.place(&mut before, &BusyThreshold::default());
    assert!(
        matches!(placed, PlaceOutcome::Placed(_)),
        "a prepared request uses its settings"
    );
    router.set_settings(enforcing(false));
    assert!(router.route(request(&[vec![1, 2]])).is_ok());
}

#[test]
fn decode_workers_take_precedence_after_remote_prefill() {
    let router = router_of(
        [
            with_role(1, WorkerRole::Prefill),
            with_role(11, WorkerRole::Decode),
            worker(21),
        ],
        enforcing(false),
    );
    for _ in 0..4 {
        let booked = router.route(request(&[vec![1, 2]])).unwrap();
        assert_eq!(booked.route.to.rank.worker, WorkerId(11));
        std::mem::forget(booked);
    }
    let mixed = router_of(
        [with_role(1, WorkerRole::Prefill), worker(21)],
        enforcing(false),
    );
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
fn short_uncached_prompt_is_prefilled_locally() {
    let conditional = Some(ConditionalPrefillConfig::default());
    let settings = RouterSettings {
        disaggregation: DisaggregationConfig {
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
    let mut writer = router.index().create_writer(slot);
    let prompt: Vec<u64> = (0..100).collect();
    let stored = |local: u64| crate::index::StoredBlock {
        engine: crate::block::EngineHash(local),
        local: LocalHash(local),
    };
    let blocks = prompt.iter().copied().map(stored).collect();
    writer.apply(&crate::index::KvEvent::Stored {
        parent: None,
        blocks,
        tier: crate::block::StorageTier::Device,
    });

    let kept = router
        .route(request(std::slice::from_ref(&prompt)))
        .unwrap();
    assert_eq!(
        kept.route.phases,
        PhaseAssignment::Local(LocalPrefillReason::ShortPrompt)
    );
    assert_eq!(
        kept.route.to.rank.worker,
        WorkerId(12),
        "the worker with the cached prompt"
    );
    assert_eq!(
        load_of(&router, 12),
        (100, 1, 1),
        "the uncached tail is its own prefill"
    );
    let unknown = router.route(request(&[(1000..1100).collect()])).unwrap();
    assert!(
        unknown.route.prefill().is_some(),
        "the whole prompt is uncached"
    );
}

#[test]
fn pins_apply_per_phase_and_are_validated() {
    let router = router_of(pools(), RouterSettings::default());
    let with = |decode: Option<WorkerPin>, prefill: Option<WorkerPin>| {
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
    let wrong_rank = Some(WorkerPin {
        worker: WorkerId(11),
        rank: Some(DpRank(3)),
    });
    assert!(matches!(with(wrong_rank, None), Err(RouteError::Pin(_))));
}

#[test]
fn prefill_topology_constrains_decode_worker() {
    let placed = |id: u64, role: WorkerRole, zone: &str| Worker {
        topology: BTreeMap::from([("zone".to_owned(), zone.to_owned())]),
        kv_transfer: (role == WorkerRole::Prefill).then(|| KvTransferRule {
            domain: "zone".into(),
            enforcement: TransferEnforcement::Required,
        }),
        ..with_role(id, role)
    };
    let workers = || {
        vec![
            placed(1, WorkerRole::Prefill, "a"),
            placed(11, WorkerRole::Decode, "a"),
            placed(12, WorkerRole::Decode, "b"),
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
        "even if it is busy"
    );
    drop(booked);

    let workers_in_two_zones = || {
        vec![
            placed(1, WorkerRole::Prefill, "c"),
            placed(11, WorkerRole::Decode, "a"),
        ]
    };
    let not_enforcing = router_of(workers_in_two_zones(), enforcing(false))
        .route(request(&[vec![1]]))
        .unwrap();
    assert_eq!(
        not_enforcing.route.phases,
        PhaseAssignment::Local(LocalPrefillReason::TopologyMismatch)
    );
    let strict = router_of(workers_in_two_zones(), enforcing(true)).route(request(&[vec![1]]));
    assert_eq!(strict.unwrap_err(), RouteError::NoPrefill);
}

#[test]
fn request_without_prompt_skips_prefill_and_queue() {
    let without_prompt =
        |reason| RouteRequest::new(None, RoutePrompt::Estimated { tokens: 0, reason });
    let when_all_overloaded = OverloadAction::Reject;
    let settings = RouterSettings {
        when_all_overloaded,
        ..enforcing(true)
    };
    let router = router_of([with_role(11, WorkerRole::Decode)], settings);
    assert_eq!(
        router
            .route(without_prompt(Reason::BodyTooLarge))
            .unwrap_err(),
        RouteError::NoPrefill
    );
    for reason in [Reason::NotInference, Reason::NoBody] {
        assert_eq!(
            router.route(without_prompt(reason)).unwrap().route.phases,
            PhaseAssignment::Aggregated
        );
    }
    let mut booked = router.route(without_prompt(Reason::NoBody)).unwrap();
    router.on_response(
        &mut booked,
        WorkerResponse {
            status: 503,
            origin: ResponseOrigin::Chosen,
        },
    );
    assert!(
        router.route(without_prompt(Reason::NoBody)).is_ok(),
        "even if it is overloaded"
    );
    router.set_workers(pools());
    assert!(
        router
            .route(without_prompt(Reason::NotInference))
            .unwrap()
            .route
            .prefill()
            .is_none()
    );
}

#[test]
fn aggregated_workers_need_no_prefill_worker() {
    let router = router_of([worker(1)], enforcing(true));
    let mut pinned_request = request(&[vec![1, 2]]);
    assert_eq!(
        router.route(pinned_request.clone()).unwrap().route.phases,
        PhaseAssignment::Aggregated
    );
    pinned_request.prefill_pin = pinned(7);
    assert!(matches!(
        router.route(pinned_request).unwrap_err(),
        RouteError::Pin(_)
    ));
}

#[test]
fn overloaded_prefill_workers_are_reported_as_overload() {
    let when_all_overloaded = OverloadAction::Reject;
    let overload = crate::policy::OverloadThresholds {
        prefill: BusyThreshold {
            prefill_tokens: Some(1),
            prefill_fraction: None,
        },
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
fn failing_prefill_worker_alone_is_ejected() {
    let workers = [
        with_role(1, WorkerRole::Prefill),
        with_role(2, WorkerRole::Prefill),
        with_role(11, WorkerRole::Decode),
        with_role(12, WorkerRole::Decode),
    ];
    let clock = Clock::default();
    let router = clocked(workers, RouterSettings::default(), &clock);
    let (mut failed, mut total) = (0, 0);
    for at in 0..200 {
        let mut placement = router.route(request(&[vec![1000 + at, at]])).unwrap();
        let prefill = placement.route.prefill().unwrap().to.rank.worker;
        let status = if prefill == WorkerId(1) { 500 } else { 200 };
        let origin = ResponseOrigin::Chosen;
        router.on_response(&mut placement, WorkerResponse { status, origin });
        if status == 200 {
            router.report_outcome(&mut placement, RequestOutcome::Delivered);
        }
        failed += u32::from(status == 500);
        total += 1;
        router.finish(placement);
        clock.advance(Duration::from_secs(1));
        router.on_tick();
    }
    assert_eq!(router.ejected_workers(), [WorkerId(1)]);
    assert!(failed < 20, "{failed} of {total}");
}

#[test]
fn local_prefill_ignores_busy_prefill_workers() {
    let threshold = BusyThreshold {
        prefill_tokens: Some(10),
        ..BusyThreshold::default()
    };
    let attempt = |conditional: Option<ConditionalPrefillConfig>, prefill_pin| {
        let disaggregation = DisaggregationConfig {
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
        let book_on = |id: u64| {
            let mut long = request(&[(id * 100..id * 100 + 20).collect()]);
            long.prefill_pin = pinned(id);
            router.route(long).unwrap()
        };
        let _held = [book_on(1), book_on(2)];
        let mut prepared = router.prepare(RouteRequest {
            prefill_pin,
            ..request(&[vec![7]])
        });
        match router.place(&mut prepared, &threshold) {
            PlaceOutcome::Placed(booked) => Some(booked.route.phases),
            attempt => {
                assert!(matches!(attempt, PlaceOutcome::Busy), "{attempt:?}");
                None
            }
        }
    };
    let always = Some(ConditionalPrefillConfig {
        uncached_share: 1.5,
        ..ConditionalPrefillConfig::default()
    });
    assert_eq!(attempt(None, None), None);
    assert_eq!(
        attempt(always, None),
        Some(PhaseAssignment::Local(LocalPrefillReason::ShortPrompt))
    );
    assert_eq!(attempt(always, pinned(1)), None);
    let never = Some(ConditionalPrefillConfig {
        uncached_tokens: 0,
        ..ConditionalPrefillConfig::default()
    });
    assert_eq!(attempt(never, None), None);
}

#[test]
fn placed_request_is_predicted_only_when_sent() {
    let clock = Clock::default();
    let fallback = crate::predict::TtlPolicy {
        ttl: Duration::from_secs(60),
        max_blocks_per_rank: 100,
    };
    let policy = crate::predict::EvictionPolicy::Lru {
        default_blocks: Some(100),
        fallback,
    };
    let clock_copy = clock.clone();
    let predictor = Predictor::new(policy, move || clock_copy.now());
    let workers = [
        with_role(1, WorkerRole::Prefill),
        with_role(11, WorkerRole::Decode),
    ];
    let router = clocked(workers, RouterSettings::default(), &clock);
    let router = with_predictor(router, predictor);
    let held = || {
        let mut held: Vec<_> = router
            .predictors()
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
    let PlaceOutcome::Placed(mut booked) = router.place(&mut prepared, &BusyThreshold::default())
    else {
        panic!("it is free")
    };
    assert_eq!(held(), [(1, 0, 0, 0), (11, 0, 0, 0)]);
    router.predict_placement(&mut booked);
    assert_eq!(held(), [(1, 3, 0, 0), (11, 3, 0, 0)]);
    router.confirm_prefill(&mut booked);
    assert_eq!(held(), [(1, 0, 3, 0), (11, 3, 0, 0)]);
    router.resolve_predictions(&mut booked, 200);
    booked.predictions.add_output_block();
    assert_eq!(held(), [(1, 0, 3, 0), (11, 0, 3, 1)]);
}

#[test]
fn enforce_applies_to_workers_of_default_role() {
    let enforced = Arc::new(["m".into()].into());
    let router = router_of(
        [worker(1)],
        RouterSettings {
            prefill_required_models: enforced,
            ..enforcing(true)
        },
    );
    assert_eq!(
        router.route(request(&[vec![1, 2]])).unwrap_err(),
        RouteError::NoPrefill
    );
    router.set_workers([worker(1), with_role(2, WorkerRole::Prefill)]);
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
fn hit_rate_belongs_to_prefill_worker() {
    let router = router_of(
        [
            with_role(1, WorkerRole::Prefill),
            with_role(11, WorkerRole::Decode),
        ],
        RouterSettings::default(),
    );
    let slot = router
        .fleet()
        .members()
        .find(|member| member.worker.role == WorkerRole::Prefill)
        .unwrap()
        .slot;
    let mut writer = router.index().create_writer(slot);
    let block = |at| StoredBlock {
        engine: EngineHash(at),
        local: LocalHash(at),
    };
    let stored = KvEvent::Stored {
        parent: None,
        blocks: [1, 2].map(block).to_vec(),
        tier: StorageTier::Device,
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
