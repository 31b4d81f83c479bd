//! Workers that are overloaded or do not answer.

use std::time::Duration;

use super::*;
use crate::health::HealthRules;
use crate::schedule::{Ineligible, Thresholds};
use crate::worker::DpRank;

const OK: Answer = Answer {
    status: 200,
    from: AnswerFrom::Chosen,
};
const BUSY: Answer = Answer {
    status: 503,
    from: AnswerFrom::Chosen,
};
const DEAD: Answer = Answer {
    status: 503,
    from: AnswerFrom::Gateway,
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

fn booked_at(router: &Router, id: u64) -> Booked {
    let mut request = request(&[vec![7]]);
    request.constraints.allowed = Some([WorkerId(id)].into());
    router.route(request).unwrap()
}

#[test]
fn a_worker_that_says_it_is_overloaded_is_left_alone_for_a_while() {
    let clock = Clock::default();
    let router = clocked([worker(1), worker(2)], RouterSettings::default(), &clock);
    router.answered(&mut booked_at(&router, 1), BUSY);
    assert_eq!(ids(&router, 50), [2]);
    clock.advance(Duration::from_millis(1001));
    assert_eq!(ids(&router, 50), [1, 2]);
}

#[test]
fn when_all_are_overloaded_the_operator_decides() {
    for (when_all_overloaded, rejected) in [
        (WhenOverloaded::Route, false),
        (WhenOverloaded::Reject, true),
    ] {
        let router = router_of(
            [worker(1)],
            RouterSettings {
                when_all_overloaded,
                ..RouterSettings::default()
            },
        );
        router.answered(&mut booked_at(&router, 1), BUSY);
        let routed = router.route(request(&[vec![1]]));
        let expected = RouteError::Overloaded(Ineligible::AllEligibleWorkersOverloaded);
        assert_eq!(routed.as_ref().err(), rejected.then_some(&expected));
    }
}

#[test]
fn who_gives_way_is_refused_where_all_are_overloaded_whatever_the_operator_says() {
    let router = router_of([worker(1), worker(2)], RouterSettings::default());
    let of_priority = |strict| {
        let mut request = request(&[vec![1]]);
        request.priority.strict = strict;
        router
            .route(request)
            .map(|booked| booked.route.to.rank.worker.0)
    };
    router.answered(&mut booked_at(&router, 1), BUSY);
    assert_eq!(of_priority(-1), Ok(2));
    router.answered(&mut booked_at(&router, 2), BUSY);
    let refused = Err(RouteError::Overloaded(
        Ineligible::AllEligibleWorkersOverloaded,
    ));
    assert_eq!(of_priority(-1), refused);
    assert!(of_priority(0).is_ok() && of_priority(1).is_ok());
}

#[test]
fn a_worker_above_its_threshold_is_not_chosen_until_it_is_below() {
    let overload = Thresholds {
        prefill_tokens: Some(40),
        ..Thresholds::default()
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
fn a_worker_that_does_not_answer_is_taken_out_tried_once_and_comes_back() {
    let clock = Clock::default();
    let health = HealthRules {
        failures: 3,
        first: Duration::from_secs(1),
        most: Duration::from_secs(60),
    };
    let router = clocked(
        [worker(1), worker(2)],
        RouterSettings {
            health,
            ..RouterSettings::default()
        },
        &clock,
    );
    for _ in 0..3 {
        router.answered(&mut booked_at(&router, 1), DEAD);
    }
    assert_eq!(router.out(), [WorkerId(1)]);
    assert_eq!(ids(&router, 50), [2]);

    clock.advance(Duration::from_secs(1));
    let mut probe = held_until(&router, WorkerId(1));
    assert_eq!(probe.probes.len(), 1);
    assert_eq!(ids(&router, 50), [2], "one request tries it, and only one");
    router.answered(&mut probe, DEAD);
    drop(probe);
    clock.advance(Duration::from_millis(1999));
    assert_eq!(ids(&router, 50), [2], "twice as long");
    clock.advance(Duration::from_millis(1));
    router.answered(&mut held_until(&router, WorkerId(1)), OK);
    assert_eq!(router.out(), []);
    assert_eq!(ids(&router, 50), [1, 2]);
}

/// Routes, keeping everything booked, until the worker is chosen.
fn held_until(router: &Router, worker: WorkerId) -> Booked {
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
fn when_nobody_is_healthy_everybody_is_tried() {
    let router = router_of([worker(1), worker(2)], RouterSettings::default());
    for id in [1, 2] {
        for _ in 0..3 {
            router.answered(&mut booked_at(&router, id), DEAD);
        }
    }
    assert_eq!(router.out(), [WorkerId(1), WorkerId(2)]);
    assert_eq!(ids(&router, 50), [1, 2]);
}

#[test]
fn another_worker_that_says_it_is_overloaded_is_left_alone_too() {
    let router = router_of([worker(1), worker(2), worker(3)], RouterSettings::default());
    router.answered(
        &mut booked_at(&router, 1),
        Answer {
            status: 429,
            from: AnswerFrom::Other(WorkerId(2)),
        },
    );
    assert_eq!(ids(&router, 50), [1, 3]);
}
