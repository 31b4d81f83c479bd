use std::time::Duration;

use warmroute_core::block::{BlockHashes, LocalHash};
use warmroute_core::fleet::Fleet;
use warmroute_core::index::PrefixIndex;
use warmroute_core::load::LoadTracker;
use warmroute_core::predict::{EvictionPolicy, Predictor, TtlPolicy};
use warmroute_core::router::{PredictorSet, Reason, RoutePrompt, RouteRequest, RouterSettings};
use warmroute_core::worker::{BlockSize, Worker, WorkerId, WorkerRole};

use super::*;
use crate::ext_proc::headers::ResponseHead;

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
    let metrics = Arc::new(Metrics::new());
    let locals = (0..8).map(LocalHash).collect();
    let prompt = RoutePrompt::Hashed(vec![BlockHashes::from_locals(
        33,
        BlockSize::new(4).unwrap(),
        locals,
    )]);
    let request = RouteRequest {
        parity: warmroute_core::parity::ParityExpectation::Prompt,
        ..RouteRequest::new(Some("m".into()), prompt)
    };
    let placement = router.route(request).unwrap();
    let mut guard = ExchangeGuard::open(
        metrics.clone(),
        router.clone(),
        CacheAudit::new(router.clone(), metrics),
    );
    guard.on_route(Some(Box::new(ActiveRequest::new(placement))), None);
    guard.on_response_headers(ResponseHead {
        status: 200,
        is_event_stream: event_stream,
        ..ResponseHead::default()
    });
    guard.on_first_token(first_token_seen);
    if complete {
        guard.on_completed();
    }
    drop(guard);
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

fn router() -> Arc<Router> {
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
    let worker = Worker::new(
        WorkerId(1),
        "127.0.0.1:8000".parse().unwrap(),
        "m".into(),
        BlockSize::new(4).unwrap(),
    );
    let change = Fleet::empty().reconcile(vec![worker]);
    for member in &change.added {
        load.open_slot(member.slot, member.rank, &member.worker.model);
        predictions.open_rank(member);
    }
    let router = Router::new(PrefixIndex::new(), load, RouterSettings::default(), 1)
        .with_predictors(predictions);
    router.set_fleet(Arc::new(change.fleet));
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

fn learns_prefill_time(event_stream: bool, status: u16, prompt: &RoutePrompt) -> bool {
    let router = router();
    let metrics = Arc::new(Metrics::new());
    for _ in 0..20 {
        let placement = router
            .route(RouteRequest::new(Some("m".into()), prompt.clone()))
            .unwrap();
        let audit = CacheAudit::new(router.clone(), metrics.clone());
        let mut guard = ExchangeGuard::open(metrics.clone(), router.clone(), audit);
        guard.on_route(Some(Box::new(ActiveRequest::new(placement))), None);
        guard.on_response_headers(ResponseHead {
            status,
            is_event_stream: event_stream,
            ..ResponseHead::default()
        });
        guard.on_first_token(true);
        guard.on_completed();
    }
    router.load().calibration().models[0].prefill_observations > 0
}

#[test]
fn prefill_times_are_learned_from_event_streams_only() {
    let locals = (0..8).map(LocalHash).collect();
    let hashed = RoutePrompt::Hashed(vec![BlockHashes::from_locals(
        33,
        BlockSize::new(4).unwrap(),
        locals,
    )]);
    let estimated = RoutePrompt::Estimated {
        tokens: 33,
        reason: Reason::NoTokenizer,
    };
    let cases = [
        (true, 200, &hashed, true),
        (false, 200, &hashed, false),
        (true, 500, &hashed, false),
        (true, 200, &estimated, false),
    ];
    for (event_stream, status, prompt, expected) in cases {
        assert_eq!(
            learns_prefill_time(event_stream, status, prompt),
            expected,
            "{event_stream} {status} {prompt:?}"
        );
    }
}
