//! Explanations of prefill and decode, and of requests without a choice.

use super::*;

/// Creates a router of two prefill workers (1, 2) and two decode workers (11, 12).
fn router_with_pools() -> Router {
    let workers = [
        (1, WorkerRole::Prefill),
        (2, WorkerRole::Prefill),
        (11, WorkerRole::Decode),
        (12, WorkerRole::Decode),
    ];
    router_of(
        workers.map(|(id, role)| with_role(id, role)),
        unit_weights(),
    )
}

#[test]
fn prefill_and_decode_are_explained_separately() {
    let router = router_with_pools();
    let _warm = holds(&router, 2, 0..3, StorageTier::Device);
    router.set_source_status(rank(2), SourceStatus::EXACT);
    let _busy = booked_at(&router, 11, vec![50, 51]);
    let explanation = router.explain(request(&[(0..4).collect()]));
    let [prefill, decode] = &explanation.phases[..] else {
        panic!("{explanation:?}")
    };
    assert_eq!(
        (prefill.role, decode.role),
        (WorkerRole::Prefill, WorkerRole::Decode)
    );
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
        (rank(2), worker_row(prefill, 2).cached_tokens)
    );
    assert!(prefill.used && decode.used && prefill.margin.unwrap() >= 3.0);
    assert_eq!(
        worker_row(prefill, 11).excluded.as_deref(),
        Some("does not run this phase")
    );
    assert_eq!(
        worker_row(decode, 1).excluded.as_deref(),
        Some("does not run this phase")
    );
    assert_eq!(
        worker_row(decode, 12).prefill_tokens,
        0,
        "no prefill in this phase"
    );
    let summary = &explanation.summary;
    assert!(
        summary.starts_with("Worker rank 2/0 computes the prefill, because")
            && summary.contains("; worker rank 12/0 decodes, because")
            && summary.ends_with("; it holds 3 of 4 blocks."),
        "{summary}"
    );
    let route = router.route(request(&[(0..4).collect()])).unwrap().route;
    assert_eq!(
        (
            Some(route.to.rank),
            route.prefill().map(|prefill| prefill.to.rank)
        ),
        (decode.winner, prefill.winner)
    );
}

#[test]
fn all_ejected_prefill_workers_are_explained_as_eligible() {
    let router = router_with_pools();
    (1..=2).for_each(|id| eject(&router, id));
    let explanation = router.explain(request(&[vec![1]]));
    assert!(
        explanation.phases[0].used,
        "without healthy workers, all are eligible"
    );
}

fn prefill_and_decode_worker() -> [Worker; 2] {
    [
        with_role(1, WorkerRole::Prefill),
        with_role(11, WorkerRole::Decode),
    ]
}

#[test]
fn local_prefill_is_explained() {
    let conditional = Some(ConditionalPrefillConfig::default());
    let with_local_prefill = DisaggregationConfig {
        enforce: false,
        conditional,
    };
    let router = router_of(
        prefill_and_decode_worker(),
        RouterSettings {
            disaggregation: with_local_prefill,
            ..RouterSettings::default()
        },
    );
    let _warm = holds(&router, 11, 0..9, StorageTier::Device);
    let explanation = router.explain(request(&[(0..10).collect()]));
    let [prefill, decode] = &explanation.phases[..] else {
        panic!("{explanation:?}")
    };
    assert_eq!(
        (prefill.winner, prefill.used, decode.used),
        (Some(rank(1)), false, true)
    );
    assert_eq!(
        explanation.route.as_ref().unwrap().phases,
        PhaseAssignment::Local(LocalPrefillReason::ShortPrompt)
    );
    assert!(
        explanation
            .summary
            .contains("little is left to compute, so it computes the prompt itself"),
        "{}",
        explanation.summary
    );
}

#[test]
fn overloaded_prefill_worker_is_explained() {
    let router = router_of(prefill_and_decode_worker(), unit_weights());
    router
        .feedback
        .overload
        .mark(WorkerId(1), router.load().now());
    let settings = RouterSettings {
        when_all_overloaded: OverloadAction::Reject,
        ..RouterSettings::default()
    };
    let rejecting = router_of(prefill_and_decode_worker(), settings);
    rejecting
        .feedback
        .overload
        .mark(WorkerId(1), rejecting.load().now());
    assert!(
        router.explain(request(&[vec![1]])).phases[0].used,
        "the operator lets overloaded workers be chosen"
    );
    let explanation = rejecting.explain(request(&[vec![1]]));
    let [prefill, decode] = &explanation.phases[..] else {
        panic!("{explanation:?}")
    };
    assert_eq!(
        (prefill.winner, worker_row(prefill, 1).excluded.as_deref()),
        (None, Some("is overloaded"))
    );
    assert_eq!(
        (decode.role, decode.winner),
        (WorkerRole::Aggregated, Some(rank(11)))
    );
    assert!(
        explanation
            .summary
            .contains("no prefill worker can be chosen"),
        "{}",
        explanation.summary
    );
}

#[test]
fn explanation_of_empty_fleet_lists_no_phases() {
    let empty_fleet = router_of([], unit_weights()).explain(request(&[vec![1]]));
    assert_eq!(
        (
            empty_fleet.mode,
            empty_fleet.reason,
            empty_fleet.phases.len()
        ),
        (Mode::Passthrough, Some(Reason::NoWorkers), 0)
    );
    assert_eq!(
        empty_fleet.summary,
        "No worker is chosen, because no worker is known; Envoy's own load balancer would choose."
    );
}

#[test]
fn rejected_pin_is_explained_for_all_workers() {
    let router = router_of([worker(1), worker(2)], unit_weights());
    let mut other = request(&[vec![1]]);
    other.model = Some("other".into());
    assert_eq!(router.explain(other).reason, Some(Reason::NoCandidate));

    let mut pinned = request(&[vec![1, 2]]);
    pinned.constraints.pin = Some(WorkerPin {
        worker: WorkerId(9),
        rank: None,
    });
    let explanation = router.explain(pinned);
    assert_eq!(
        (explanation.reason, explanation.prompt_tokens),
        (Some(Reason::InvalidPin), 9)
    );
    assert_eq!(
        why(&explanation, 1),
        Some("the request is pinned to another worker")
    );
    assert!(
        explanation
            .summary
            .ends_with("the request would be rejected."),
        "{}",
        explanation.summary
    );
    assert!(explanation.route.is_none());
}

#[test]
fn missing_prefill_worker_is_explained() {
    let disaggregation = DisaggregationConfig {
        enforce: true,
        conditional: None,
    };
    let decodes = Worker {
        role: WorkerRole::Decode,
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
        worker_row(prefill, 1).excluded.as_deref(),
        Some("does not run this phase")
    );
    assert_eq!(
        (
            worker_row(decode, 1).excluded.as_deref(),
            worker_row(decode, 1).cost
        ),
        (None, None),
        "it is a candidate"
    );
}
