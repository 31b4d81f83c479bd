//! Fallback endpoints, and the endpoint that served a request.

use super::*;

/// Returns six workers. The first has two ranks, and the sixth shares its endpoint.
fn fleet_with_shared_endpoint() -> [Worker; 6] {
    let same_endpoint = Worker {
        endpoint: endpoint(1),
        ..worker(6)
    };
    let two_ranks = Worker {
        ranks: RankRange {
            start: 0,
            size: 2.try_into().unwrap(),
        },
        ..at(1)
    };
    [two_ranks, at(2), at(3), at(4), at(5), same_endpoint]
}

/// Ejects worker 4 and overloads worker 5 by their responses.
fn exclude_two_workers(router: &Router) {
    let responses = [(4, ResponseOrigin::Gateway), (5, ResponseOrigin::Chosen)];
    for (id, origin) in responses {
        let mut request = request(&[vec![9]]);
        request.constraints.allowed = Some([WorkerId(id)].into());
        let response = WorkerResponse {
            status: 503,
            origin,
        };
        router.on_response(&mut router.route(request).unwrap(), response);
    }
}

#[test]
fn fallbacks_are_next_best_healthy_endpoints() {
    let clock = Clock::default();
    let health = HealthRules {
        consecutive_failures: 1,
    };
    let settings = |fallbacks, scores| RouterSettings {
        max_fallbacks: fallbacks,
        reports_scores: scores,
        health,
        ..RouterSettings::default()
    };
    let route = |fallbacks, scores| {
        let settings = settings(fallbacks, scores);
        let router = clocked(fleet_with_shared_endpoint(), settings, &clock);
        let _cached: Vec<_> = [(1, 3), (2, 1), (3, 2)]
            .map(|(id, blocks)| holds(&router, id, blocks))
            .into();
        exclude_two_workers(&router);
        let first = router.route(request(&[vec![1, 2, 3]])).unwrap().route;
        // A worker whose probe is due may be chosen, but is no fallback.
        clock.advance(Duration::from_millis(1001));
        let later = router.preview(request(&[vec![1, 2, 3]])).unwrap();
        (first, later)
    };
    let (none, _) = route(0, false);
    assert_eq!(
        (none.to.rank, none.fallbacks.len(), none.scores.len()),
        (rank(1), 0, 0)
    );
    assert_eq!(none.target().fallbacks, []);
    let (one, _) = route(1, false);
    assert_eq!(one.target().fallbacks, [endpoint(3)]);
    let (all, later) = route(9, true);
    assert_eq!(
        (all.to.rank, all.target().fallbacks),
        (rank(1), vec![endpoint(3), endpoint(2)])
    );
    let scored: Vec<_> = all
        .target()
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
        later.target().fallbacks,
        [endpoint(3), endpoint(2), endpoint(5)]
    );
    assert_eq!(later.scores.len(), 5);
}

/// Creates a router whose workers have predicted caches.
pub(super) fn predicted(workers: impl IntoIterator<Item = Worker>) -> Router {
    let fallback = TtlPolicy {
        ttl: Duration::from_secs(60),
        max_blocks_per_rank: 100,
    };
    let policy = EvictionPolicy::Lru {
        default_blocks: Some(100),
        fallback,
    };
    let predictor = Predictor::new(policy, Instant::now);
    let router = router_of(workers, RouterSettings::default());
    with_predictor(router, predictor)
}

fn expected_at(router: &Router) -> Vec<(u64, u64, u64)> {
    let mut held: Vec<_> = router
        .predictors()
        .stats()
        .map(|rank| (rank.rank.worker.0, rank.blocks, rank.generated))
        .collect();
    held.sort_unstable();
    held
}

fn in_flight_at(router: &Router) -> Vec<(u64, u64)> {
    let mut held: Vec<_> = router
        .predictors()
        .stats()
        .map(|rank| (rank.rank.worker.0, rank.in_flight))
        .collect();
    held.sort_unstable();
    held
}

/// Completes a request with status 200.
pub(super) fn accept(router: &Router, mut booked: Placement) {
    router.on_response(
        &mut booked,
        WorkerResponse {
            status: 200,
            origin: ResponseOrigin::Chosen,
        },
    );
}

#[test]
fn booking_and_prediction_move_to_serving_rank() {
    let router = predicted([at(1), at(2)]);
    let known = router.route(RouteRequest {
        prompt: request(&[vec![1, 2]]).prompt,
        ..request_within(&[2])
    });
    accept(&router, known.unwrap());
    let mut booked = router.route(request_within(&[1])).unwrap();
    booked.reservation.add_output_block(None);
    assert_eq!(
        (load_of(&router, 1), load_of(&router, 2)),
        ((4, 13, 1), (0, 0, 0))
    );
    assert_eq!(expected_at(&router), [(1, 0, 0), (2, 2, 0)]);
    assert_eq!(in_flight_at(&router), [(1, 3), (2, 0)]);
    let mapped = "[::ffff:10.0.0.1]:8000".parse().unwrap();
    for unchanged in [endpoint(1), mapped] {
        assert_eq!(
            router.on_served_by(&mut booked, unchanged),
            RelocationOutcome::Unchanged
        );
    }
    assert_eq!(
        router.on_served_by(&mut booked, endpoint(2)),
        RelocationOutcome::Moved(rank(2))
    );
    assert_eq!(
        router.on_served_by(&mut booked, endpoint(2)),
        RelocationOutcome::Unchanged
    );
    assert_eq!(
        (load_of(&router, 1), load_of(&router, 2)),
        ((0, 0, 0), (4, 5, 1)),
        "two blocks are cached there"
    );
    assert_eq!(in_flight_at(&router), [(1, 0), (2, 3)]);
    router.resolve_predictions(&mut booked, 200);
    assert_eq!(
        (expected_at(&router), in_flight_at(&router)),
        (vec![(1, 0, 0), (2, 3, 0)], vec![(1, 0), (2, 0)])
    );
    assert_eq!(
        booked.route.to,
        RankEndpoint {
            rank: rank(2),
            endpoint: endpoint(2),
            via: Default::default(),
            several_ranks: false
        }
    );
    booked.predictions.add_output_block();
    assert_eq!(expected_at(&router)[1], (2, 3, 1));
    drop(booked);
    assert_eq!(
        (load_of(&router, 1), load_of(&router, 2)),
        ((0, 0, 0), (0, 0, 0))
    );
}

#[test]
fn relocated_request_counts_for_chosen_worker() {
    let router = predicted([at(1), at(2)]);
    let mut booked = router.route(request_within(&[1])).unwrap();
    assert_eq!(
        router.on_served_by(&mut booked, endpoint(2)),
        RelocationOutcome::Moved(rank(2))
    );
    router.resolve_predictions(&mut booked, 200);
    booked.reservation.on_first_token();
    assert_eq!(
        router.learn_first_token(&mut booked),
        None,
        "a time that includes a failed attempt is not learned"
    );
    let other = WorkerResponse {
        status: 200,
        origin: ResponseOrigin::Other(WorkerId(2)),
    };
    router.on_response(&mut booked, other);
    for _ in 0..2 {
        let mut booked = router.route(request_within(&[1])).unwrap();
        router.on_response(&mut booked, other);
    }
    assert_eq!(
        router.ejected_workers(),
        [WorkerId(1)],
        "the failure counts for the chosen worker"
    );
}

#[test]
fn mismatched_worker_is_booked_without_cached_tokens() {
    let router = router_of([at(1), at(2)], RouterSettings::default());
    let _writers = [holds(&router, 1, 3), holds(&router, 2, 3)];
    router.parity().configure([("m".into(), Arc::default())]);
    let status = router.parity().model_status(&"m".into()).unwrap();
    for _ in 0..8 {
        status.record_evidence(WorkerId(1), crate::parity::BlockEvidence::Confirmed);
        status.record_evidence(
            WorkerId(2),
            crate::parity::BlockEvidence::Unconfirmed { block: 0 },
        );
    }
    // The prompt has 13 tokens in 3 blocks.
    for (expectation, prefill) in [
        (crate::parity::ParityExpectation::Prompt, 13),
        (crate::parity::ParityExpectation::NotPredicted, 1),
    ] {
        let new_request = RouteRequest {
            model: Some("m".into()),
            parity: expectation,
            ..request_within(&[1])
        };
        let mut booked = router.route(new_request).unwrap();
        assert_eq!(load_of(&router, 1).1, 1);
        assert_eq!(
            router.on_served_by(&mut booked, endpoint(2)),
            RelocationOutcome::Moved(rank(2))
        );
        assert_eq!(load_of(&router, 2).1, prefill);
    }
}

/// Returns two workers behind one front end, and a worker with its own endpoint.
fn fleet_with_front_end() -> [Worker; 3] {
    let behind_front_end = |id| Worker {
        via: EndpointKind::FrontEnd,
        endpoint: endpoint(8),
        ..worker(id)
    };
    [behind_front_end(1), behind_front_end(2), at(3)]
}

#[test]
fn shared_front_end_is_no_fallback() {
    let settings = RouterSettings {
        max_fallbacks: 9,
        ..RouterSettings::default()
    };
    let router = clocked(fleet_with_front_end(), settings, &Clock::default());
    for (id, fallbacks) in [(1, vec![endpoint(3)]), (3, vec![])] {
        let _cached = holds(&router, id, 1);
        let routed = router.route(request(&[vec![1]])).unwrap().route;
        assert_eq!(
            (routed.to.rank, routed.target().fallbacks),
            (rank(id), fallbacks)
        );
    }
}

#[test]
fn shared_front_end_serves_for_pinned_worker() {
    let router = predicted(fleet_with_front_end());
    for (id, by) in [(1, 8), (2, 8), (2, 9), (1, 3)] {
        let mut pinned = request(&[vec![1]]);
        pinned.constraints.allowed = Some([WorkerId(id)].into());
        let mut booked = router.route(pinned).unwrap();
        assert_eq!(
            router.on_served_by(&mut booked, endpoint(by)),
            RelocationOutcome::Unchanged,
            "{id} by {by}"
        );
        assert_eq!(
            (booked.route.to.rank, load_of(&router, id).0),
            (rank(id), 1)
        );
    }
    // A worker with its own endpoint is not served by a front end of others.
    let mut direct = request(&[vec![1]]);
    direct.constraints.allowed = Some([WorkerId(3)].into());
    let mut booked = router.route(direct).unwrap();
    assert_eq!(
        router.on_served_by(&mut booked, endpoint(8)),
        RelocationOutcome::Released
    );
}

#[test]
fn unknown_endpoint_releases_booking() {
    let router = predicted([at(1), at(2)]);
    let mut booked = router.route(request_within(&[1])).unwrap();
    assert_eq!(
        router.on_served_by(&mut booked, endpoint(9)),
        RelocationOutcome::Released
    );
    assert_eq!(
        router.on_served_by(&mut booked, endpoint(9)),
        RelocationOutcome::Unchanged
    );
    assert_eq!(
        (load_of(&router, 1), load_of(&router, 2)),
        ((0, 0, 0), (0, 0, 0))
    );
    assert_eq!(
        (expected_at(&router), booked.route.to.rank),
        (vec![(1, 0, 0), (2, 0, 0)], rank(1))
    );
    booked.predictions.add_output_block();
    assert_eq!(
        router.on_served_by(&mut booked, endpoint(2)),
        RelocationOutcome::Released,
        "no booking is left to move"
    );
    drop(booked);
    let mut left = router.route(request_within(&[1])).unwrap();
    router.set_workers([at(2)]);
    assert_eq!(
        router.on_served_by(&mut left, endpoint(2)),
        RelocationOutcome::Moved(rank(2)),
        "the chosen worker has left the fleet"
    );
    assert_eq!(load_of(&router, 2), (3, 13, 1));
}

#[test]
fn shared_endpoint_selects_named_or_idlest_rank() {
    let ranked = |id| Worker {
        ranks: RankRange {
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
        request.constraints.pin = Some(WorkerPin {
            worker: WorkerId(id),
            rank: Some(DpRank(rank)),
        });
        request
    };
    let router = router_of([at(1), ranked(2), ranked(3)], RouterSettings::default());
    let mut named = router.route(pinned(2, 1)).unwrap();
    assert_eq!(
        router.on_served_by(&mut named, endpoint(2)),
        RelocationOutcome::Unchanged,
        "the rank is not reported"
    );
    let _busy = router.route(pinned(3, 1)).unwrap();
    assert_eq!(
        router.on_served_by(&mut named, endpoint(3)),
        RelocationOutcome::Moved(on(3, 1)),
        "the header named that rank"
    );
    let mut unnamed = router.route(request_within(&[1])).unwrap();
    assert_eq!(
        router.on_served_by(&mut unnamed, endpoint(3)),
        RelocationOutcome::Moved(on(3, 0))
    );
    assert!(unnamed.route.to.several_ranks);
}

#[test]
fn remote_prefill_stays_on_its_worker() {
    let workers = [
        with_role(1, WorkerRole::Prefill),
        with_role(11, WorkerRole::Decode),
        with_role(12, WorkerRole::Decode),
    ];
    let router = predicted(workers);
    let mut booked = router.route(request_within(&[1, 11])).unwrap();
    assert_eq!(in_flight_at(&router), [(1, 3), (11, 3), (12, 0)]);
    assert_eq!(
        router.on_served_by(&mut booked, endpoint(12)),
        RelocationOutcome::Moved(rank(12))
    );
    assert_eq!(
        [1, 11, 12].map(|id| load_of(&router, id)),
        [(0, 13, 1), (0, 0, 0), (3, 0, 1)]
    );
    assert_eq!(in_flight_at(&router), [(1, 3), (11, 0), (12, 3)]);
    router.resolve_predictions(&mut booked, 200);
    assert_eq!(expected_at(&router), [(1, 3, 0), (11, 0, 0), (12, 3, 0)]);
    assert_eq!(booked.route.prefill().unwrap().to.rank, rank(1));
    booked.reservation.on_first_token();
    assert_eq!(
        [1, 11, 12].map(|id| load_of(&router, id)),
        [(0, 0, 0), (0, 0, 0), (3, 0, 1)]
    );
}

/// Routes a request and answers it. Returns the number of observed prefills before and after the
/// engine reports that it had this number of tokens cached.
fn learned_prefills(router: &Router, cached: u64) -> (u64, u64) {
    let observed = || router.load().calibration().models[0].prefill_observations;
    let mut booked = router.route(request_within(&[1])).unwrap();
    router.resolve_predictions(&mut booked, 200);
    booked.reservation.on_first_token();
    assert_ne!(router.learn_first_token(&mut booked), None);
    let before = observed();
    router.apply_reported_cached_tokens(&mut booked, cached);
    router.apply_reported_cached_tokens(&mut booked, cached);
    router.on_completed_response(&booked);
    router.finish(booked);
    (before, observed())
}

#[test]
fn prefill_of_predicted_cache_is_learned_after_report() {
    let router = predicted([at(1)]);
    assert_eq!(
        learned_prefills(&router, 0),
        (1, 1),
        "no worker has the prompt"
    );
    assert_eq!(
        learned_prefills(&router, 4),
        (1, 2),
        "one has it, as predicted"
    );
}
