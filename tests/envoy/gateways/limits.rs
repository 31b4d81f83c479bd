//! Many concurrent streams, overloaded engines, and a dead worker.

use futures_util::StreamExt as _;
use futures_util::stream;
use serde_json::{Value, json};
use warmroute_testbed::ports::{PATIENCE, until};

use crate::gateways::bed::GatewayTestbed;
use crate::gateways::generated::{
    ENVOY_AI_GATEWAY, ENVOY_GATEWAY, GatewayFixture, GeneratedConfig, ISTIO, ISTIO_AS_GENERATED,
    ISTIO_BUFFERED,
};
use crate::shipped::bursts::{BurstEngine, EVENTS, PACED};
use crate::support::deployment::{chat, essay, fast};
use crate::support::raise_open_file_limit;

/// More than the 1024 concurrent requests that Envoy allows by default.
const STREAMS: usize = 1300;

/// Opens streams that are all active at the same time. Returns the number of those that failed.
async fn failed_streams(gateway: GatewayFixture, config: GeneratedConfig) -> usize {
    raise_open_file_limit();
    let workers = BurstEngine::start_all(3).await;
    let mut bed = GatewayTestbed::workers(gateway, &workers).await;
    bed.start(config).await;
    let send = async |at: usize| {
        let body = chat(&format!("{at}"));
        let request = bed.request("/v1/chat/completions", &body);
        // The headers arrive at once. The events arrive when the test releases them.
        request
            .header(EVENTS, 3)
            .header(PACED, 1)
            .send()
            .await
            .unwrap()
    };
    let responses: Vec<_> = stream::iter(0..STREAMS)
        .map(send)
        .buffer_unordered(50)
        .collect()
        .await;
    let failed = responses.iter().filter(|response| response.status() != 200);
    let failed = failed.count();
    BurstEngine::permit(&workers, 4 * STREAMS);
    for response in responses {
        response.bytes().await.unwrap();
    }
    bed.idle().await;
    failed
}

async fn serves_all_streams(gateway: GatewayFixture) {
    assert_eq!(failed_streams(gateway, gateway.shipped()).await, 0);
}

/// The shipped manifests raise the limit of the generated configuration.
async fn serves_all_streams_only_as_shipped(gateway: GatewayFixture) {
    serves_all_streams(gateway).await;
    let failed = failed_streams(gateway, gateway.generated()).await;
    assert_eq!(failed, STREAMS - 1024);
}

long_tests! {
    istio_serves_1300_streams_at_once: serves_all_streams(ISTIO_AS_GENERATED),
    envoy_ai_gateway_serves_1300_streams_at_once:
        serves_all_streams_only_as_shipped(ENVOY_AI_GATEWAY),
    envoy_gateway_serves_1300_streams_at_once: serves_all_streams(ENVOY_GATEWAY),
}

/// Runs `warmroute doctor` on Envoy. Returns level and check of its findings.
async fn findings(gateway: GatewayFixture) -> Vec<(String, String)> {
    let mut bed = GatewayTestbed::engines(gateway, &[1, 2].map(fast)).await;
    let mut warmroute = bed.warmroute();
    warmroute["requests"]["limits"] = json!({});
    bed.start_router(&warmroute).await.unwrap();
    bed.start_envoy(gateway.shipped()).await;
    let admin = bed.envoy_setup().admin_url("");
    let config = bed.run_dir.join("warmroute.yaml");
    let output =
        crate::doctor::bed::doctor(&config, &["--no-canary", "--envoy-admin", &admin]).await;
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap().to_owned();
    let findings = output.findings.iter();
    findings
        .map(|finding| (text(finding, "level"), text(finding, "check")))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn doctor_finds_no_fault_in_shipped_manifests() {
    for gateway in [
        ISTIO_AS_GENERATED,
        ISTIO_BUFFERED,
        ENVOY_AI_GATEWAY,
        ENVOY_GATEWAY,
    ] {
        let mut found = findings(gateway).await;
        assert!(
            found.iter().any(|(_, check)| check.starts_with("envoy.")),
            "{found:?}"
        );
        found.retain(|(level, check)| {
            check.starts_with("envoy.") && (level == "error" || level == "warning")
        });
        // The manifests for Istio have no DestinationRule for the workers.
        let expected: Vec<_> = (gateway.picker == ISTIO_AS_GENERATED.picker)
            .then(|| ("warning".to_owned(), "envoy.worker_idle_timeout".to_owned()))
            .into_iter()
            .collect();
        assert_eq!(found, expected, "{}", gateway.file);
    }
}

/// Asserts that 12 responses with 503 from overloaded engines eject no worker.
async fn overloaded_engines_stay(gateway: GatewayFixture) {
    let refusing = [1, 2, 3].map(|id| fast(id).with(&["--misbehave", r#"{"refuse": 503}"#]));
    let mut bed = GatewayTestbed::engines(gateway, &refusing).await;
    bed.start(gateway.shipped()).await;
    for topic in 0..12 {
        let answered = bed.query(&essay(topic)).await;
        assert_eq!(answered.status, 503, "{answered:?}");
        assert!(
            !answered.header("x-envoy-upstream-service-time").is_empty(),
            "{answered:?}"
        );
    }
    bed.idle().await;
    let page = bed.metrics().await;
    assert_eq!(page.sum("ejected_workers", &[]), 0.0, "{}", page.text());
    assert!(
        !bed.router_log().contains("worker ejected"),
        "{}",
        bed.router_log()
    );
}

long_tests! {
    overloaded_engines_stay_behind_envoy_ai_gateway: overloaded_engines_stay(ENVOY_AI_GATEWAY),
    overloaded_engines_stay_behind_envoy_gateway: overloaded_engines_stay(ENVOY_GATEWAY),
}

/// Counts the requests that fail with 503 until the dead worker gets no more requests. Workers of
/// equal cost are chosen at random, so the dead worker must have been chosen at least once.
async fn failed_after_worker_kill(gateway: GatewayFixture) -> usize {
    let mut bed = GatewayTestbed::engines(gateway, &[1, 2, 3].map(fast)).await;
    bed.start(gateway.shipped().patient()).await;
    for topic in 0..6 {
        bed.complete(&essay(topic)).await.assert_exact();
    }
    bed.engines[1].kill9();
    let mut failed = 0;
    let mut row = 0;
    let mut topic = 10;
    let tried = async || {
        let page = bed.metrics().await;
        page.sum(
            "worker_failed_requests_total",
            &[("worker_id", "2"), ("kind", "unreachable")],
        ) > 0.0
    };
    while row < 20 || !tried().await {
        topic += 1;
        assert!(topic < 200, "{failed} failed:\n{}", bed.router_log());
        let answered = bed.complete(&essay(topic)).await;
        match answered.status.as_u16() {
            200 => {
                assert_ne!(answered.engine(), 2);
                row += 1;
            }
            503 => {
                failed += 1;
                row = 0;
            }
            status => panic!("{status}: {answered:?}"),
        }
    }
    // The restarted worker serves requests again.
    bed.restart_engine(1).await;
    let used = until(PATIENCE, async || {
        topic += 1;
        let answered = bed.complete(&essay(topic)).await;
        answered.header("x-engine-id") == "2"
    });
    assert!(used.await, "{}", bed.router_log());
    failed
}

async fn retries_at_another_worker(gateway: GatewayFixture) {
    assert_eq!(failed_after_worker_kill(gateway).await, 0);
}

long_tests! {
    istio_retries_at_another_worker: retries_at_another_worker(ISTIO_AS_GENERATED),
    istio_with_authority_retries_at_another_worker: retries_at_another_worker(ISTIO),
    istio_buffered_retries_at_another_worker: retries_at_another_worker(ISTIO_BUFFERED),
    envoy_gateway_retries_at_another_worker: retries_at_another_worker(ENVOY_GATEWAY),
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn envoy_ai_gateway_fails_until_worker_is_excluded() {
    let failed = failed_after_worker_kill(ENVOY_AI_GATEWAY).await;
    assert!((1..=8).contains(&failed), "{failed} failed");
}

/// Returns the status of a request whose endpoint is a list, as set by
/// `gateway.fallback_endpoints`.
async fn status_with_fallbacks(gateway: GatewayFixture) -> u16 {
    let mut bed = GatewayTestbed::engines(gateway, &[1, 2].map(fast)).await;
    let mut warmroute = bed.warmroute();
    warmroute["gateway"]["fallback_endpoints"] = json!(1);
    bed.start_router(&warmroute).await.unwrap();
    bed.start_envoy(gateway.shipped().patient()).await;
    let answered = bed.complete(&essay(1)).await;
    if answered.status == 200 {
        answered.assert_exact();
    }
    answered.status.as_u16()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn only_envoy_ai_gateway_rejects_endpoint_lists() {
    assert_eq!(status_with_fallbacks(ISTIO_AS_GENERATED).await, 200);
    assert_eq!(status_with_fallbacks(ENVOY_GATEWAY).await, 200);
    assert_eq!(status_with_fallbacks(ENVOY_AI_GATEWAY).await, 503);
}
