//! Routing hints in calls.

use super::*;

/// Returns hints that no worker satisfies, with the expected statuses.
fn invalid_hints() -> Vec<(&'static str, pb::RoutingHints, Code)> {
    let mut hints = impossible_constraints();
    hints.extend(invalid_numbers());
    hints
}

/// Returns constraints that no worker satisfies.
fn impossible_constraints() -> Vec<(&'static str, pb::RoutingHints, Code)> {
    let pin = |worker_id, dp_rank| Some(pb::Pin { worker_id, dp_rank });
    let none = pb::RoutingHints::default;
    let allowed = |ids: &[u64]| Some(pb::AllowedWorkers { ids: ids.to_vec() });
    vec![
        (
            "an unknown pin",
            pb::RoutingHints {
                pin: pin(9, None),
                ..none()
            },
            Code::NotFound,
        ),
        (
            "an unknown rank",
            pb::RoutingHints {
                pin: pin(1, Some(5)),
                ..none()
            },
            Code::NotFound,
        ),
        (
            "no rank of two",
            pb::RoutingHints {
                pin: pin(2, None),
                ..none()
            },
            Code::InvalidArgument,
        ),
        (
            "a pin that is not allowed",
            pb::RoutingHints {
                pin: pin(1, None),
                allowed_workers: allowed(&[2]),
                ..none()
            },
            Code::InvalidArgument,
        ),
        (
            "no worker allowed",
            pb::RoutingHints {
                allowed_workers: allowed(&[]),
                ..none()
            },
            Code::FailedPrecondition,
        ),
        (
            "a taint",
            pb::RoutingHints {
                required_taints: vec!["x".into()],
                ..none()
            },
            Code::FailedPrecondition,
        ),
    ]
}

/// Returns numbers that are out of range.
fn invalid_numbers() -> Vec<(&'static str, pb::RoutingHints, Code)> {
    let none = pb::RoutingHints::default;
    let overrides = |set: pb::Overrides| pb::RoutingHints {
        overrides: Some(set),
        ..none()
    };
    let priority = |jump| pb::RoutingHints {
        priority: Some(pb::Priority {
            jump,
            ..pb::Priority::default()
        }),
        ..none()
    };
    vec![
        (
            "not a number",
            pb::RoutingHints {
                preferred_taints: [("x".to_owned(), f64::NAN)].into(),
                ..none()
            },
            Code::InvalidArgument,
        ),
        (
            "a negative priority jump",
            priority(-1.0),
            Code::InvalidArgument,
        ),
        (
            "an infinite priority jump",
            priority(f64::INFINITY),
            Code::InvalidArgument,
        ),
        (
            "a negative credit",
            overrides(pb::Overrides {
                overlap_score_credit: Some(-1.0),
                ..pb::Overrides::default()
            }),
            Code::InvalidArgument,
        ),
        (
            "a multiplier above one",
            overrides(pb::Overrides {
                shared_cache_multiplier: Some(2.0),
                ..pb::Overrides::default()
            }),
            Code::InvalidArgument,
        ),
    ]
}

/// Starts a site with two workers, of which the second has a taint and two ranks.
async fn site_with_taint() -> ApiSite {
    let tainted = worker(2, ", taints: [fast], data_parallel: {size: 2}");
    ApiSite::start("", &[worker(1, ""), tainted]).await
}

#[tokio::test]
async fn impossible_hints_are_rejected() {
    let site = site_with_taint().await;
    for (what, hints, code) in invalid_hints() {
        for call_request in [
            book("r", 0, 9),
            pb::RouteRequest {
                book: None,
                ..book("r", 0, 9)
            },
        ] {
            assert_code(
                what,
                site.route(pb::RouteRequest {
                    hints: Some(hints.clone()),
                    ..call_request
                })
                .await,
                code,
            );
        }
    }
    let session = Some(pb::Session::default());
    assert_code(
        "no id",
        site.route(pb::RouteRequest {
            session,
            ..book("r", 0, 9)
        })
        .await,
        Code::InvalidArgument,
    );
    assert_eq!(site.load().await, (0, 0, 0));
}

#[tokio::test]
async fn hints_select_the_worker() {
    let site = site_with_taint().await;
    let none = pb::RoutingHints::default;
    let pin = Some(pb::Pin {
        worker_id: 2,
        dp_rank: Some(1),
    });
    let good = [
        (pb::RoutingHints { pin, ..none() }, 2),
        (
            pb::RoutingHints {
                allowed_workers: Some(pb::AllowedWorkers { ids: vec![1] }),
                ..none()
            },
            1,
        ),
        (
            pb::RoutingHints {
                required_taints: vec!["fast".into()],
                ..none()
            },
            2,
        ),
        (
            pb::RoutingHints {
                preferred_taints: [("fast".to_owned(), -1.0)].into(),
                ..none()
            },
            1,
        ),
    ];
    for (hints, worker) in good {
        let call_request = pb::RouteRequest {
            hints: Some(hints.clone()),
            book: None,
            ..book("", 0, 9)
        };
        let answer = site.route(call_request).await.unwrap();
        assert_eq!(
            answer.decode.unwrap().worker.unwrap().worker_id,
            worker,
            "{hints:?}"
        );
    }
}
