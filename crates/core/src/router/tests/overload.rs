//! Overloaded and failing workers.

use std::time::Duration;

use super::*;
use crate::health::RequestOutcome;
use crate::load::{EngineLoadReport, EngineLoadSample};
use crate::policy::{EligibilityError, OverloadThresholds};
use crate::worker::DpRank;

const OK: WorkerResponse = WorkerResponse {
    status: 200,
    origin: ResponseOrigin::Chosen,
};
const BUSY: WorkerResponse = WorkerResponse {
    status: 503,
    origin: ResponseOrigin::Chosen,
};
const DEAD: WorkerResponse = WorkerResponse {
    status: 503,
    origin: ResponseOrigin::Gateway,
};

fn ids(router: &Router, times: u64) -> Vec<u64> {
    let mut ids: Vec<u64> = (0..times)
        .map(|at| {
            router
                .route(request(&[vec![at]]))
                .unwrap()
                .route
                .to
                .rank
                .worker
                .0
        })
        .collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn booked_at(router: &Router, id: u64) -> Placement {
    let mut request = request(&[vec![7]]);
    request.constraints.allowed = Some([WorkerId(id)].into());
    router.route(request).unwrap()
}

#[test]
fn overload_status_avoids_worker_for_mark_duration() {
    let clock = Clock::default();
    let router = clocked([worker(1), worker(2)], RouterSettings::default(), &clock);
    router.on_response(&mut booked_at(&router, 1), BUSY);
    assert_eq!(ids(&router, 50), [2]);
    clock.advance(Duration::from_millis(1001));
    assert_eq!(ids(&router, 50), [1, 2]);
}

#[test]
fn overload_action_applies_when_all_are_overloaded() {
    for (when_all_overloaded, rejected) in [
        (OverloadAction::Route, false),
        (OverloadAction::Reject, true),
    ] {
        let router = router_of(
            [worker(1)],
            RouterSettings {
                when_all_overloaded,
                ..RouterSettings::default()
            },
        );
        router.on_response(&mut booked_at(&router, 1), BUSY);
        let routed = router.route(request(&[vec![1]]));
        let expected = RouteError::Overloaded(EligibilityError::AllEligibleWorkersOverloaded);
        assert_eq!(routed.as_ref().err(), rejected.then_some(&expected));
    }
}

#[test]
fn sheddable_request_is_rejected_when_all_overloaded() {
    let router = router_of([worker(1), worker(2)], RouterSettings::default());
    let of_priority = |strict| {
        let mut request = request(&[vec![1]]);
        request.priority.strict = strict;
        router
            .route(request)
            .map(|booked| booked.route.to.rank.worker.0)
    };
    router.on_response(&mut booked_at(&router, 1), BUSY);
    assert_eq!(of_priority(-1), Ok(2));
    router.on_response(&mut booked_at(&router, 2), BUSY);
    let refused = Err(RouteError::Overloaded(
        EligibilityError::AllEligibleWorkersOverloaded,
    ));
    assert_eq!(of_priority(-1), refused);
    assert!(of_priority(0).is_ok() && of_priority(1).is_ok());
}

#[test]
fn overloaded_worker_is_avoided_until_below_threshold() {
    let overload = OverloadThresholds {
        prefill: BusyThreshold {
            prefill_tokens: Some(40),
            prefill_fraction: None,
        },
        ..OverloadThresholds::default()
    };
    let router = router_of(
        [worker(1), worker(2)],
        RouterSettings {
            overload,
            ..RouterSettings::default()
        },
    );
    let mut long = request(&[(0..10).collect()]);
    long.constraints.allowed = Some([WorkerId(1)].into());
    let held = router.route(long).unwrap();
    assert_eq!(ids(&router, 20), [2]);
    drop(held);
    assert_eq!(ids(&router, 50), [1, 2]);
}

#[test]
fn reported_kv_usage_overloads_worker_until_stale() {
    let clock = Clock::default();
    let overload = OverloadThresholds {
        decode_blocks: Some(0.9),
        ..OverloadThresholds::default()
    };
    let settings = RouterSettings {
        overload,
        ..RouterSettings::default()
    };
    let router = clocked([worker(1), worker(2)], settings, &clock);
    let fleet = router.fleet();
    let full = fleet
        .members()
        .find(|member| member.rank.worker == WorkerId(1))
        .unwrap();
    let sample = EngineLoadSample {
        report: EngineLoadReport {
            running: 0,
            waiting: 0,
            kv_usage: Some(0.95),
            received_at: router.load().now(),
        },
        booked_before: 0,
        valid_for: Duration::from_secs(3),
        max_lag: Some(Duration::ZERO),
    };
    assert_eq!(ids(&router, 50), [1, 2]);
    router
        .load()
        .record_engine_load(full.slot, full.rank, &sample);
    assert_eq!(ids(&router, 50), [2]);
    clock.advance(Duration::from_secs(3));
    assert_eq!(ids(&router, 50), [1, 2]);
}

#[test]
fn failing_worker_is_ejected_probed_and_readmitted() {
    let clock = Clock::default();
    let router = clocked([worker(1), worker(2)], RouterSettings::default(), &clock);
    for _ in 0..3 {
        router.on_response(&mut booked_at(&router, 1), DEAD);
    }
    assert_eq!(router.ejected_workers(), [WorkerId(1)]);
    assert_eq!(ids(&router, 50), [2]);

    clock.advance(Duration::from_secs(1));
    let mut probe = route_until_chosen(&router, WorkerId(1));
    assert_eq!(ids(&router, 50), [2], "exactly one request probes it");
    router.on_response(&mut probe, DEAD);
    drop(probe);
    clock.advance(Duration::from_millis(1999));
    assert_eq!(ids(&router, 50), [2], "twice as long");
    clock.advance(Duration::from_millis(1));
    let mut probe = route_until_chosen(&router, WorkerId(1));
    router.on_response(&mut probe, OK);
    assert_eq!(
        router.ejected_workers(),
        [WorkerId(1)],
        "headers are no content"
    );
    router.report_outcome(&mut probe, RequestOutcome::Delivered);
    assert_eq!(router.ejected_workers(), []);
    drop(probe);
    assert_eq!(ids(&router, 50), [1, 2]);
}

/// Worker 1 is never the best one, because worker 2 has less load.
#[test]
fn forced_probe_uses_next_request() {
    let clock = Clock::default();
    let router = clocked([worker(1), worker(2)], RouterSettings::default(), &clock);
    let _busy: Vec<_> = (0..20).map(|_| booked_at(&router, 1)).collect();
    for _ in 0..3 {
        router.on_response(&mut booked_at(&router, 1), DEAD);
    }
    clock.advance(Duration::from_secs(5));
    assert_eq!(ids(&router, 20), [2]);
    clock.advance(Duration::from_secs(1));
    let probe = router.route(request(&[vec![1]])).unwrap();
    assert_eq!(probe.route.to.rank.worker, WorkerId(1));
    assert_eq!(ids(&router, 20), [2], "one request probes it");
}

/// Routes and books requests until the worker is chosen.
fn route_until_chosen(router: &Router, worker: WorkerId) -> Placement {
    let mut held = Vec::new();
    for at in 0..50 {
        let booked = router.route(request(&[vec![1000 + at]])).unwrap();
        if booked.route.to.rank
            == (WorkerRank {
                worker,
                rank: DpRank(0),
            })
        {
            return booked;
        }
        held.push(booked);
    }
    panic!("{worker} was never chosen");
}

#[test]
fn all_unhealthy_workers_are_eligible() {
    let router = router_of([worker(1), worker(2)], RouterSettings::default());
    for id in [1, 2] {
        for _ in 0..3 {
            router.on_response(&mut booked_at(&router, id), DEAD);
        }
    }
    assert_eq!(router.ejected_workers(), [WorkerId(1), WorkerId(2)]);
    assert_eq!(ids(&router, 50), [1, 2]);
}

#[test]
fn overload_status_of_other_worker_marks_it() {
    let router = router_of([worker(1), worker(2), worker(3)], RouterSettings::default());
    router.on_response(
        &mut booked_at(&router, 1),
        WorkerResponse {
            status: 429,
            origin: ResponseOrigin::Other(WorkerId(2)),
        },
    );
    assert_eq!(ids(&router, 50), [1, 3]);
}
