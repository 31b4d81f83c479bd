//! Interaction with a gateway: allowed endpoints, fallback endpoints, and the serving endpoint.

use super::*;
use crate::block::StorageTier;
use crate::freshness::SourceStatus;
use crate::health::{HealthRules, RequestOutcome};
use crate::index::{KvEvent, RankWriter, StoredBlock};
use crate::policy::{DisaggregationConfig, EligibilityError, EndpointSubset, WorkerPin};
use crate::predict::{EvictionPolicy, Predictor, TtlPolicy};
use crate::worker::{DpRank, EndpointKind, EventSource};

mod serving;

use serving::{accept, predicted};

fn at(id: u64) -> Worker {
    Worker {
        endpoint: endpoint(id),
        ..worker(id)
    }
}

fn with_role(id: u64, role: WorkerRole) -> Worker {
    Worker { role, ..at(id) }
}

fn endpoint(id: u64) -> WorkerEndpoint {
    format!("10.0.0.{id}:8000").parse().unwrap()
}

fn rank(id: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(id),
        rank: DpRank(0),
    }
}

fn subset(ids: &[u64]) -> Option<EndpointSubset> {
    Some(ids.iter().map(|id| endpoint(*id)).collect())
}

fn pin(id: u64) -> Option<WorkerPin> {
    Some(WorkerPin {
        worker: WorkerId(id),
        rank: None,
    })
}

fn request_within(ids: &[u64]) -> RouteRequest {
    let mut request = request(&[vec![1, 2, 3]]);
    request.constraints.endpoints = subset(ids);
    request
}

/// Stores this many blocks of the prompt 1, 2, 3 on a worker rank.
fn holds(router: &Router, id: u64, blocks: u64) -> RankWriter {
    let mut writer = router
        .index()
        .create_writer(router.fleet().slot(rank(id)).unwrap());
    let blocks = (1..=blocks).map(|at| StoredBlock {
        engine: crate::block::EngineHash(at),
        local: LocalHash(at),
    });
    writer.apply(&KvEvent::Stored {
        parent: None,
        blocks: blocks.collect(),
        tier: StorageTier::Device,
    });
    router.set_source_status(rank(id), SourceStatus::EXACT);
    writer
}

#[test]
fn request_without_cache_reads_gets_no_credit() {
    let router = router_of([at(1)], RouterSettings::default());
    let _cached = holds(&router, 1, 3);
    let cached = |reads_prefix_cache| {
        let request = RouteRequest {
            reads_prefix_cache,
            ..request(&[vec![1, 2, 3]])
        };
        let placement = router.route(request).unwrap();
        placement.route.computed_by().cached_tokens
    };
    assert_eq!([cached(true), cached(false)], [12, 0]);
}

#[test]
fn dropped_last_block_gets_no_credit() {
    let router = router_of([at(1)], RouterSettings::default());
    let _cached = holds(&router, 1, 3);
    let figures = || {
        let route = router.route(request(&[vec![1, 2, 3]])).unwrap().route;
        (
            route.predicted_cached_tokens,
            route.best_cached_tokens,
            route.overlap.total(),
        )
    };
    let (predicted, best, held) = figures();
    for _ in 0..2 {
        router.record_last_block(WorkerId(1), LastBlockEvidence::Recomputed);
    }
    assert_eq!(figures(), (predicted - 4, best - 4, held - 1));
    router.record_last_block(WorkerId(1), LastBlockEvidence::Reused);
    assert_eq!(figures(), (predicted, best, held));
}

#[test]
fn subset_without_candidates_is_rejected() {
    let other_model = || Worker {
        model: "other".into(),
        ..at(1)
    };
    let bare = Some(EndpointSubset::parse(["10.0.0.2"]));
    let unsatisfied = Err(RouteError::Unsatisfied);
    let cases = [
        ("one of two", vec![at(1), at(2)], subset(&[2]), Ok(2)),
        ("by address", vec![at(1), at(2)], bare, Ok(2)),
        ("empty", vec![at(1)], subset(&[]), unsatisfied),
        ("empty list", vec![at(1)], subset(&[7]), unsatisfied),
        ("no fleet", vec![], subset(&[1]), unsatisfied),
        (
            "no worker of the model",
            vec![other_model()],
            subset(&[1]),
            unsatisfied,
        ),
        (
            "no fleet and no subset",
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
            RoutePrompt::Estimated {
                tokens: 0,
                reason: Reason::NoBody,
            },
        ] {
            let mut request = RouteRequest::new(Some("m".into()), prompt);
            request.constraints.endpoints = endpoints.clone();
            let preview = router.preview(request.clone());
            let reason = match &preview {
                Ok(route) => route.reason,
                Err(error) => Some(error.reason()),
            };
            let chosen = preview.map(|route| route.to.rank.worker.0);
            assert_eq!(chosen, expected, "{what}");
            assert_eq!(router.explain(request.clone()).reason, reason, "{what}");
            let booked = router.route(request);
            let chosen = booked.map(|booked| booked.route.to.rank.worker.0);
            assert_eq!(chosen, expected, "{what}");
        }
    }
}

/// Routes with two prefill workers and one decode worker. Returns the prefill worker.
fn prefill_worker_within(
    ids: &[u64],
    prefill_pin: Option<WorkerPin>,
    enforce: bool,
) -> Result<Option<u64>, RouteError> {
    let workers = [
        with_role(1, WorkerRole::Prefill),
        with_role(2, WorkerRole::Prefill),
        with_role(11, WorkerRole::Decode),
    ];
    let disaggregation = DisaggregationConfig {
        enforce,
        conditional: None,
    };
    let settings = RouterSettings {
        disaggregation,
        ..RouterSettings::default()
    };
    let placement = router_of(workers, settings).route(RouteRequest {
        prefill_pin,
        ..request_within(ids)
    })?;
    let prefill = placement.route.prefill();
    Ok(prefill.map(|prefill| prefill.to.rank.worker.0))
}

#[test]
fn subset_applies_to_prefill() {
    let unknown = Err(RouteError::Pin(EligibilityError::PinUnknown(WorkerId(9))));
    let unsatisfied = Err(RouteError::Unsatisfied);
    for enforce in [false, true] {
        let prefill = |ids: &[u64], prefill_pin| prefill_worker_within(ids, prefill_pin, enforce);
        assert_eq!(prefill(&[2, 11], None), Ok(Some(2)), "the other worker");
        let without_prefill = if enforce {
            Err(RouteError::NoPrefill)
        } else {
            Ok(None)
        };
        assert_eq!(prefill(&[11], None), without_prefill);
        assert_eq!(prefill(&[1, 2], None), unsatisfied, "no decode worker");
        assert_eq!(prefill(&[1, 2, 11], pin(1)), Ok(Some(1)));
        assert_eq!(prefill(&[2, 11], pin(1)), unsatisfied);
        assert_eq!(prefill(&[11], pin(1)), unsatisfied);
        assert_eq!(prefill(&[2, 11], pin(9)), unknown);
        assert_eq!(prefill(&[], pin(9)), unsatisfied, "the subset comes first");
    }
}

#[test]
fn pin_outside_subset_is_not_a_client_error() {
    let workers = [
        with_role(1, WorkerRole::Prefill),
        with_role(11, WorkerRole::Decode),
    ];
    let router = router_of(workers, RouterSettings::default());
    let mut pinned = request_within(&[1]);
    pinned.constraints.pin = pin(11);
    assert_eq!(router.route(pinned).unwrap_err(), RouteError::Unsatisfied);
}

#[test]
fn draining_worker_gets_no_new_requests() {
    let draining = |id| Worker {
        draining: true,
        ..at(id)
    };
    let router = router_of([at(1), at(2)], RouterSettings::default());
    let held = router.route(request_within(&[1])).unwrap();
    router.set_workers([draining(1), at(2)]);
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
        router.route(request_within(&[1])).unwrap_err(),
        RouteError::Unsatisfied
    );
    assert!(!router.is_usable(rank(1)) && router.is_usable(rank(2)) && !router.is_usable(rank(3)));
    drop(held);
    router.set_workers([draining(1), draining(2)]);
    assert_eq!(
        router.route(request(&[vec![1]])).unwrap_err(),
        RouteError::NoCandidate
    );
    router.set_workers([at(1), draining(2)]);
    assert_eq!(
        router.route(request(&[vec![1]])).unwrap().route.to.rank,
        rank(1),
        "it takes requests again"
    );
}

/// Returns three known blocks of a truncated prompt.
fn known_blocks() -> BlockHashes {
    let locals = [1, 2, 3].map(LocalHash).into();
    BlockHashes::from_locals(12, BlockSize::new(4).unwrap(), locals)
}

fn truncated_request(known: BlockHashes) -> RouteRequest {
    let prompt = RoutePrompt::Truncated {
        known,
        tokens: 41,
        reason: Reason::PromptTooLong,
    };
    RouteRequest::new(None, prompt)
}

/// Creates a router of two workers with event sources.
fn router_with_event_sources() -> Router {
    let source = EventSource {
        endpoint: "tcp://127.0.0.1:1".to_owned(),
        topic: String::new(),
        attach: crate::worker::SocketAttach::Connect,
        replay: None,
    };
    let workers = [1, 2].map(|id| Worker {
        event_sources: vec![source.clone()],
        ..at(id)
    });
    router_of(workers, RouterSettings::default())
}

#[test]
fn truncated_prompt_counts_known_blocks() {
    let router = router_with_event_sources();
    let cold = router.preview(truncated_request(known_blocks())).unwrap();
    assert_eq!(
        (cold.mode, cold.reason),
        (Mode::LoadOnly, Some(Reason::IndexCold))
    );
    let _cached = holds(&router, 2, 3);
    let summary = router.explain(truncated_request(known_blocks())).summary;
    assert!(
        summary.contains("only the start of the prompt was compared")
            && summary.contains("it holds 3 of 3 blocks"),
        "{summary}"
    );
    let Placement {
        route, reservation, ..
    } = router.route(truncated_request(known_blocks())).unwrap();
    assert_eq!(
        (route.to.rank, route.mode, route.reason),
        (rank(2), Mode::Partial, Some(Reason::PromptTooLong))
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
            route.choice.cost.terms.get("prefill_blocks")
        ),
        (11, Some(41.0 / 4.0))
    );
    assert_eq!(load_of(&router, 2), (3, 29, 1));
    assert!(route.summary_line().ends_with("reason=prompt_too_long"));
    drop(reservation);
}

#[test]
fn truncated_prompt_without_blocks_is_routed_by_load() {
    let router = router_with_event_sources();
    let nothing = BlockHashes::from_locals(2, BlockSize::new(4).unwrap(), vec![]);
    let unknown = router.preview(truncated_request(nothing)).unwrap();
    assert_eq!(
        (unknown.mode, unknown.reason, unknown.prompt_tokens),
        (Mode::LoadOnly, Some(Reason::PromptTooLong), 41)
    );
    let short = RoutePrompt::Truncated {
        known: known_blocks(),
        tokens: 1,
        reason: Reason::PromptTooLong,
    };
    assert_eq!(short.tokens(), 12, "the known part is the minimum length");
}

#[test]
fn truncated_prompt_uses_predictions() {
    let predicted = predicted([at(1)]);
    accept(
        &predicted,
        predicted.route(request(&[vec![1, 2, 3, 4]])).unwrap(),
    );
    let route = predicted
        .preview(truncated_request(known_blocks()))
        .unwrap();
    assert_eq!(
        (route.mode, route.reason),
        (Mode::Approximate, Some(Reason::PromptTooLong))
    );
    assert_eq!(route.target().predicted_cached_tokens, Some(12));
}

/// Checks that a request without a worker in its pool is rejected. Envoy would choose a worker of
/// another pool.
#[test]
fn pool_request_uses_pool_workers_only() {
    let of_pool = |id, pool: &str| Worker {
        taints: [format!("pool={pool}")].into(),
        ..worker(id)
    };
    let prefill = Worker {
        role: WorkerRole::Prefill,
        ..of_pool(3, "q")
    };
    let router = router_of(
        [of_pool(1, "p"), of_pool(2, "q"), prefill],
        RouterSettings::default(),
    );
    let new_request = |pool: Option<&str>, model: Option<&str>| {
        let mut request = request(&[vec![1]]);
        request.constraints.pool = pool.map(Into::into);
        request.model = model.map(Into::into);
        request
    };
    let goes = |pool: Option<&str>| {
        let booked = router.route(new_request(pool, None)).unwrap();
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
            router.route(new_request(Some(pool), model)).unwrap_err(),
            RouteError::Unsatisfied,
            "{pool} {model:?}"
        );
        let explained = router.explain(new_request(Some(pool), model)).summary;
        assert!(
            explained.contains(&format!(
                "(the request is for the pool `{pool}`); the request would be rejected"
            )),
            "{explained}"
        );
    }
}

#[test]
fn responses_without_computation_do_not_affect_health() {
    let failures = HealthRules {
        consecutive_failures: 3,
    };
    let answers = |sent: &[(bool, u16)]| {
        let router = router_of(
            [worker(1), worker(2)],
            RouterSettings {
                health: failures,
                ..RouterSettings::default()
            },
        );
        let answered = |&(computes, status): &(bool, u16)| {
            let prompt = RoutePrompt::Estimated {
                tokens: 0,
                reason: Reason::NotInference,
            };
            let mut request = RouteRequest {
                computes,
                ..RouteRequest::new(None, prompt)
            };
            request.constraints.allowed = Some([WorkerId(1)].into());
            let mut placement = router.route(request).unwrap();
            let origin = ResponseOrigin::Chosen;
            let response = WorkerResponse { status, origin };
            let changes = router.on_response(&mut placement, response).len();
            if status == 200 {
                router.report_outcome(&mut placement, RequestOutcome::Delivered);
            }
            changes
        };
        sent.iter().map(answered).sum::<usize>()
    };
    // A list of models, and a path of no known API.
    let page = false;
    let unknown = true;
    assert_eq!(answers(&[(page, 500); 10]), 0);
    assert_eq!(answers(&[(unknown, 404); 40]), 0, "a deleted response");
    assert_eq!(
        answers(&[(unknown, 500), (unknown, 500), (page, 200), (unknown, 500)]),
        1,
        "a response without computation does not reset failures"
    );
    assert_eq!(
        answers(&[
            (unknown, 500),
            (unknown, 500),
            (unknown, 200),
            (unknown, 500)
        ]),
        0
    );
}
