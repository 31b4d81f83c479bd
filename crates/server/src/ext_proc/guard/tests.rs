use std::time::Duration;

use warmroute_core::block::{BlockHashes, LocalHash};
use warmroute_core::index::PrefixIndex;
use warmroute_core::load::LoadTracker;
use warmroute_core::predict::{EvictionPolicy, Predictor, TtlPolicy};
use warmroute_core::router::{
    PhaseSelection, Placement, PredictorSet, Reason, RoutePrompt, RouteRequest, RouteTarget,
    RouterSettings,
};
use warmroute_core::worker::{BlockSize, Worker, WorkerId, WorkerRole};

use super::*;
use crate::ext_proc::exchange::{Effect, Exchange, ExchangeStart};
use crate::ext_proc::headers::{RequestHead, ResponseHead};
use crate::ext_proc::message::{BodyMode, BodyModes, ExchangeMessage};

/// Returns a router that verifies the blocks of requests with engine events.
fn router_with_event_source() -> (Arc<Router>, warmroute_core::index::RankWriter) {
    let router = router();
    let rank = router.fleet().members().next().unwrap().rank;
    router.parity().configure([("m".into(), Arc::default())]);
    router.set_source_status(rank, warmroute_core::freshness::SourceStatus::EXACT);
    let writer = router
        .index()
        .create_writer(router.fleet().slot(rank).unwrap());
    (router, writer)
}

/// Returns whether the blocks of a request with such a response are verified.
fn are_blocks_verified(event_stream: bool, first_token_seen: bool, complete: bool) -> bool {
    let (router, _writer) = router_with_event_source();
    let mut guard = guard_of(&router, placement_with_parity(&router));
    guard.on_response_headers(response_head(event_stream, 200));
    guard.on_first_token(first_token_seen);
    if complete {
        guard.on_completed();
    }
    drop(guard);
    has_ready_check(&router)
}

fn placement_with_parity(router: &Arc<Router>) -> Placement {
    let request = RouteRequest {
        parity: warmroute_core::parity::ParityExpectation::Prompt,
        ..RouteRequest::new(Some("m".into()), hashed_prompt())
    };
    router.route(request).unwrap()
}

fn guard_of(router: &Arc<Router>, placement: Placement) -> ExchangeGuard {
    let metrics = Arc::new(Metrics::new());
    let audit = CacheAudit::new(router.clone(), metrics.clone());
    let mut guard = ExchangeGuard::open(metrics, router.clone(), audit);
    guard.on_route(Some(Box::new(ActiveRequest::new(placement))), None);
    guard
}

fn content(guard: &ExchangeGuard) -> ResponseContent {
    guard.response.as_ref().unwrap().content
}

fn has_ready_check(router: &Router) -> bool {
    !router
        .parity()
        .model_status(&"m".into())
        .unwrap()
        .take_ready_checks()
        .is_empty()
}

#[test]
fn stream_headers_alone_do_not_verify_blocks() {
    let cases = [
        // Event stream, first token observed, complete, blocks verified.
        (true, false, false, false),
        (true, true, false, true),
        (true, false, true, true),
        (false, false, false, true),
    ];
    for (event_stream, first_token_seen, complete, expected) in cases {
        assert_eq!(
            are_blocks_verified(event_stream, first_token_seen, complete),
            expected,
            "{event_stream} {first_token_seen} {complete}"
        );
    }
}

#[test]
fn response_without_output_verifies_no_blocks() {
    for (missing, expected) in [
        (MissingContent::Empty, false),
        (MissingContent::Error, false),
        (MissingContent::OutputEnded, true),
        (MissingContent::OutputCounted, true),
    ] {
        let (router, _writer) = router_with_event_source();
        let mut guard = guard_of(&router, placement_with_parity(&router));
        guard.on_response_headers(response_head(true, 200));
        guard.on_content_missing(missing);
        guard.on_completed();
        assert_eq!(content(&guard), ResponseContent::Missing(missing));
        assert_eq!(has_ready_check(&router), expected, "{missing:?}");
    }
}

#[test]
fn stream_without_output_is_a_failure() {
    for (missing, expected) in [
        (MissingContent::Empty, Some(RequestOutcome::Empty)),
        (MissingContent::Error, Some(RequestOutcome::ServerError)),
        (MissingContent::OutputEnded, Some(RequestOutcome::NoOutput)),
        (MissingContent::OutputCounted, None),
    ] {
        let router = router();
        let request = RouteRequest::new(Some("m".into()), hashed_prompt());
        let mut guard = guard_of(&router, router.route(request).unwrap());
        guard.on_response_headers(response_head(true, 200));
        guard.on_content_missing(missing);
        guard.on_completed();
        let failed = router.failed_requests();
        let kinds: Vec<_> = failed.into_iter().map(|(_, kind, _)| kind).collect();
        assert_eq!(kinds, Vec::from_iter(expected), "{missing:?}");
    }
}

#[test]
fn prefill_is_booked_until_first_content() {
    let router = router();
    let request = RouteRequest::new(Some("m".into()), hashed_prompt());
    let mut guard = guard_of(&router, router.route(request).unwrap());
    guard.on_response_headers(response_head(true, 200));
    let is_booked = || router.load().snapshot()[0].active_prefill_tokens > 0;
    assert!(is_booked() && content(&guard) == ResponseContent::NotObserved);
    guard.on_first_token(true);
    assert!(!is_booked() && content(&guard) == ResponseContent::Delivered);
}

#[test]
fn failed_request_stays_booked_with_its_prefill() {
    for (status, has_short_body, expected) in [
        (404, false, 1),
        (500, false, 1),
        (200, true, 1),
        (200, false, 0),
    ] {
        let router = router_of(vec![
            worker(1, WorkerRole::Aggregated),
            worker(2, WorkerRole::Aggregated),
        ]);
        let request = RouteRequest::new(Some("m".into()), hashed_prompt());
        let head = ResponseHead {
            has_short_body,
            ..response_head(false, status)
        };
        respond(&router, router.route(request).unwrap(), head, false);
        let loads = router.load().snapshot();
        let booked = loads.iter().filter(|load| load.active_prefill_tokens > 0);
        assert_eq!(booked.count(), expected, "{status} {has_short_body}");
    }
}

#[test]
fn request_without_body_stays_booked_during_response() {
    for mode in [BodyMode::Buffered, BodyMode::FullDuplexStreamed] {
        let router = router();
        let request = RouteRequest::new(Some("m".into()), hashed_prompt());
        let mut guard = guard_of(&router, router.route(request).unwrap());
        let mut exchange = Exchange::new(Arc::default(), ExchangeStart::default());
        exchange.configure(BodyModes {
            request: mode,
            response: BodyMode::None,
        });
        exchange.on_message(ExchangeMessage::RequestHeaders {
            head: RequestHead::default(),
            end_of_stream: true,
        });
        exchange.on_route(RouteTarget::PASSTHROUGH);
        let mut booked_after = |message| {
            for effect in exchange.on_message(message) {
                match effect {
                    Effect::ResponseStarted(head) => guard.on_response_headers(head),
                    Effect::Completed => guard.on_completed(),
                    _ => {}
                }
            }
            router.load().snapshot()[0].active_requests
        };
        let response = ExchangeMessage::ResponseHeaders {
            head: response_head(false, 200),
            end_of_stream: false,
        };
        assert_eq!(booked_after(response), 1, "{mode:?}");
        assert_eq!(
            booked_after(ExchangeMessage::ResponseTrailers),
            0,
            "{mode:?}"
        );
    }
}

fn worker(id: u64, role: WorkerRole) -> Worker {
    let endpoint = "127.0.0.1:8000".parse().unwrap();
    let block_size = BlockSize::new(4).unwrap();
    Worker {
        role,
        ..Worker::new(WorkerId(id), endpoint, "m".into(), block_size)
    }
}

fn router() -> Arc<Router> {
    router_of(vec![worker(1, WorkerRole::Aggregated)])
}

fn router_of(workers: Vec<Worker>) -> Arc<Router> {
    let load = LoadTracker::new(Instant::now);
    let ttl = TtlPolicy {
        ttl: Duration::from_secs(120),
        max_blocks_per_rank: 1000,
    };
    let predictor = Predictor::new(EvictionPolicy::Ttl(ttl), Instant::now);
    let predictions = PredictorSet {
        without_events: Some(predictor),
        ..PredictorSet::default()
    };
    let router = Router::new(PrefixIndex::new(), load, RouterSettings::default(), 1)
        .with_predictors(predictions);
    router.set_workers(workers);
    Arc::new(router)
}

#[test]
fn huge_usage_does_not_overflow_cached_token_counter() {
    let metrics = Arc::new(Metrics::new());
    let cases = [
        (100, 64, 64),
        (100, 1 << 63, 164),
        (u64::MAX, u64::MAX, 164 + (1 << 40)),
    ];
    for (prompt, cached, expected) in cases {
        let router = router();
        let estimated = RoutePrompt::Estimated {
            tokens: 100,
            reason: Reason::NoTokenizer,
        };
        let placement = router
            .route(RouteRequest::new(Some("m".into()), estimated))
            .unwrap();
        let mut guard = ExchangeGuard::open(
            metrics.clone(),
            router.clone(),
            CacheAudit::new(router, metrics.clone()),
        );
        guard.on_route(Some(Box::new(ActiveRequest::new(placement))), None);
        guard.on_response_headers(ResponseHead {
            status: 200,
            ..ResponseHead::default()
        });
        let details = format!("{{\"cached_tokens\":{cached}}}");
        let usage = format!("{{\"prompt_tokens\":{prompt},\"prompt_tokens_details\":{details}}}");
        guard.on_response_chunk(format!("{{\"usage\":{usage}}}").as_bytes());
        guard.on_completed();
        drop(guard);
        let labels = ModelRoleLabels::new(&"m".into(), Some(WorkerRole::Aggregated));
        let reported = metrics
            .requests
            .reported_cached_tokens
            .get_or_create(&labels)
            .get();
        assert_eq!(reported, expected, "{prompt} {cached}");
    }
}

/// Passes the events of a response to the guard of a placement.
fn respond(router: &Arc<Router>, placement: Placement, head: ResponseHead, observed: bool) {
    let mut guard = guard_of(router, placement);
    guard.on_response_headers(head);
    guard.on_first_token(observed);
    guard.on_completed();
}

fn response_head(event_stream: bool, status: u16) -> ResponseHead {
    ResponseHead {
        status,
        is_event_stream: event_stream,
        ..ResponseHead::default()
    }
}

fn learns_prefill_time(head: ResponseHead, observed: bool, prompt: &RoutePrompt) -> bool {
    let router = router();
    for _ in 0..20 {
        let placement = router
            .route(RouteRequest::new(Some("m".into()), prompt.clone()))
            .unwrap();
        respond(&router, placement, head, observed);
    }
    router.load().calibration().models[0].prefill_observations > 0
}

fn hashed_prompt() -> RoutePrompt {
    let locals = (0..8).map(LocalHash).collect();
    let block_size = BlockSize::new(4).unwrap();
    RoutePrompt::Hashed(vec![BlockHashes::from_locals(33, block_size, locals)])
}

#[test]
fn prefill_times_are_learned_from_event_streams_only() {
    let hashed = hashed_prompt();
    let estimated = RoutePrompt::Estimated {
        tokens: 33,
        reason: Reason::NoTokenizer,
    };
    let stream = response_head(true, 200);
    let cases = [
        (stream, true, &hashed, true),
        // The headers of the stream precede the computation.
        (stream, false, &hashed, false),
        (response_head(false, 200), true, &hashed, false),
        (response_head(true, 500), true, &hashed, false),
        (stream, true, &estimated, false),
    ];
    for (head, observed, prompt, expected) in cases {
        assert_eq!(
            learns_prefill_time(head, observed, prompt),
            expected,
            "{head:?} {observed} {prompt:?}"
        );
    }
}

#[test]
fn transfer_time_is_learned_after_sequential_prefill() {
    let workers = [(1, WorkerRole::Prefill), (2, WorkerRole::Decode)];
    let router = router_of(workers.map(|(id, role)| worker(id, role)).into());
    let route = |phases| {
        let request = RouteRequest::new(Some("m".into()), hashed_prompt());
        router.route(RouteRequest { phases, ..request }).unwrap()
    };
    let transfer_token = || {
        router.load().calibration().models[0]
            .estimate
            .transfer_token
    };
    let prior = transfer_token();
    for _ in 0..20 {
        let mut prefill = route(PhaseSelection::PrefillFirst { failed: Vec::new() });
        router.complete_remote_prefill(&mut prefill);
        let completed = router.completed_prefill(&prefill.route).unwrap();
        let decode = route(PhaseSelection::Decode(Box::new(completed)));
        respond(&router, decode, response_head(true, 200), true);
    }
    assert!(transfer_token() < prior, "the transfers took no time");
}
