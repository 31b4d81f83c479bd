//! Sequential prefills: each phase is booked while its worker has the request.

use super::*;
use crate::freshness::SourceStatus;

fn first(failed: &[u64]) -> RouteRequest {
    let failed = failed.iter().map(|id| WorkerId(*id)).collect();
    RouteRequest {
        phases: PhaseSelection::PrefillFirst { failed },
        ..request(&[vec![1, 2, 3]])
    }
}

fn decode_request(done: CompletedPrefill) -> RouteRequest {
    RouteRequest {
        phases: PhaseSelection::Decode(Box::new(done)),
        ..request(&[vec![1, 2, 3]])
    }
}

#[test]
fn sequential_prefill_books_each_phase_separately() {
    let router = router_of(pools(), RouterSettings::default());
    let prefilling = router.route(first(&[])).unwrap();
    let prefill = prefilling.route.prefill().unwrap().to.rank.worker.0;
    assert_eq!(load_of(&router, prefill), (0, 13, 1));
    assert_eq!(
        (load_of(&router, 11), load_of(&router, 12)),
        ((0, 0, 0), (0, 0, 0)),
        "the decode is not booked yet"
    );

    // Meanwhile another request fills the worker that would have been chosen.
    let first_choice = prefilling.route.to.rank.worker;
    let pin = Constraints {
        pin: pinned(first_choice.0),
        ..Constraints::default()
    };
    let other = router
        .route(RouteRequest {
            constraints: pin,
            ..request(&[(10..20).collect()])
        })
        .unwrap();
    let done = router.completed_prefill(&prefilling.route).unwrap();
    drop(prefilling);
    assert_eq!(done.prefill.to.rank.worker.0, prefill);
    let mut decoding = router.route(decode_request(done)).unwrap();
    let decode = decoding.route.to.rank.worker;
    assert_ne!(decode, first_choice);
    assert_eq!(
        load_of(&router, decode.0),
        (3, 0, 1),
        "its blocks, and no prefill"
    );
    assert_eq!(
        decoding.route.prefill().unwrap().to.rank.worker.0,
        prefill,
        "the route names the prefill worker"
    );
    assert!(
        !decoding.reservation.on_first_token(),
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
fn duration_of_sequential_prefill_is_learned() {
    let clock = Clock::default();
    let router = clocked(pools(), RouterSettings::default(), &clock);
    for member in router.fleet().members() {
        router.set_source_status(member.rank, SourceStatus::EXACT);
    }
    let estimate = || router.load().read(|view| view.estimate(&"m".into()));
    let prior = estimate();
    let mut prefilling = router.route(first(&[])).unwrap();
    let done = router.completed_prefill(&prefilling.route).unwrap();
    let time = Duration::from_secs(1);
    clock.advance(time);
    router.complete_remote_prefill(&mut prefilling);
    assert_eq!(load_of(&router, done.prefill.to.rank.worker.0), (0, 0, 0));
    drop(prefilling);
    let after_prefill = estimate().coefficients;
    assert!(after_prefill.prefill_token > prior.coefficients.prefill_token);

    let mut decoding = router.route(decode_request(done)).unwrap();
    clock.advance(time);
    decoding.reservation.on_first_token();
    router.learn_first_token(&mut decoding);
    assert_eq!(estimate().coefficients, after_prefill);
    assert!(estimate().transfer_token > prior.transfer_token);
}

#[test]
fn failed_prefill_workers_are_excluded_from_retry() {
    let not_enforcing = router_of(pools(), enforcing(false));
    let by = |failed: &[u64]| {
        Some(
            not_enforcing
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
                phases: PhaseSelection::Local(LocalPrefillReason::PrefillFailed),
                ..request(&[vec![1, 2]])
            })
            .unwrap()
    };
    let booked = together(&not_enforcing);
    assert_eq!(
        booked.route.phases,
        PhaseAssignment::Local(LocalPrefillReason::PrefillFailed)
    );
    assert_eq!(
        load_of(&not_enforcing, booked.route.to.rank.worker.0),
        (2, 9, 1),
        "with its prefill"
    );
    let none = router_of([worker(21)], enforcing(false));
    assert_eq!(
        together(&none).route.phases,
        PhaseAssignment::Aggregated,
        "no worker can run the prefill"
    );
    assert_eq!(
        router_of(pools(), enforcing(true))
            .route(first(&[1, 2]))
            .unwrap_err(),
        RouteError::NoPrefill
    );
}

#[test]
fn decode_worker_is_in_reach_of_prefill_worker() {
    let at = |worker: Worker, zone: &str| Worker {
        topology: BTreeMap::from([("zone".to_owned(), zone.to_owned())]),
        kv_transfer: Some(KvTransferRule {
            domain: "zone".to_owned(),
            enforcement: TransferEnforcement::Required,
        }),
        ..worker
    };
    let workers = [
        at(with_role(1, WorkerRole::Prefill), "a"),
        at(with_role(11, WorkerRole::Decode), "b"),
        at(with_role(12, WorkerRole::Decode), "a"),
    ];
    let router = router_of(workers.clone(), enforcing(false));
    let booked = router.route(first(&[])).unwrap();
    let done = router.completed_prefill(&booked.route).unwrap();
    assert_eq!(
        router
            .route(decode_request(done.clone()))
            .unwrap()
            .route
            .to
            .rank
            .worker,
        WorkerId(12)
    );
    router.set_workers(workers.into_iter().take(2));
    assert_eq!(
        router.route(decode_request(done)).unwrap_err(),
        RouteError::NoCandidate,
        "out of reach"
    );
}

#[test]
fn decode_only_workers_never_compute_prompts() {
    let request_for = |step| RouteRequest {
        phases: step,
        decode_capability: DecodeCapability::DecodeOnly,
        ..request(&[vec![1, 2]])
    };
    let conditional = Some(ConditionalPrefillConfig {
        uncached_share: 2.0,
        ..ConditionalPrefillConfig::default()
    });
    let settings = RouterSettings {
        disaggregation: DisaggregationConfig {
            enforce: false,
            conditional,
        },
        ..RouterSettings::default()
    };
    let decoders = || {
        pools()
            .into_iter()
            .filter(|worker| worker.role == WorkerRole::Decode)
    };
    let router = router_of(pools(), settings);
    assert!(
        router
            .route(request_for(PhaseSelection::Both))
            .unwrap()
            .route
            .prefill()
            .is_some(),
        "even for a short prompt"
    );
    let together = || request_for(PhaseSelection::Local(LocalPrefillReason::NotSplittable));
    assert_eq!(router.route(together()).unwrap_err(), RouteError::NoPrefill);
    router.set_workers(decoders());
    assert_eq!(
        router.route(request_for(PhaseSelection::Both)).unwrap_err(),
        RouteError::NoPrefill
    );
    router.set_workers(decoders().chain([worker(21)]));
    assert_eq!(
        router
            .route(request_for(PhaseSelection::Both))
            .unwrap()
            .route
            .to
            .rank
            .worker,
        WorkerId(21)
    );
    assert_eq!(
        router.route(together()).unwrap().route.to.rank.worker,
        WorkerId(21)
    );
}
