//! Many concurrent streams, overloaded engines, and a dead worker.

use std::process::Command;

use futures_util::StreamExt as _;
use futures_util::stream;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use warmroute_testbed::ports::until;

use crate::gateways::bed::GatewayTestbed;
use crate::gateways::generated::{
    ENVOY_AI_GATEWAY, ENVOY_GATEWAY, GatewayFixture, GeneratedConfig, ISTIO, ISTIO_AS_GENERATED,
    ISTIO_BUFFERED,
};
use crate::shipped::bursts::{BurstEngine, EVENTS, PACED};
use crate::support::deployment::{ChatAnswer, PATIENCE, chat, essay, fast};

/// More than the 1024 concurrent requests that Envoy allows by default.
const STREAMS: usize = 1300;

/// Opens streams that are all active at the same time. Returns their statuses.
async fn open_streams(gateway: GatewayFixture, config: GeneratedConfig) -> Vec<u16> {
    let files = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: files.maximum,
            maximum: files.maximum,
        },
    )
    .unwrap();
    let workers = [
        BurstEngine::start(1).await,
        BurstEngine::start(2).await,
        BurstEngine::start(3).await,
    ];
    let mut bed = GatewayTestbed::workers(gateway, &workers).await;
    bed.start(config).await;
    let send = async |at: usize| {
        let body = chat(&format!("{at}"));
        let request = bed.http.post(bed.url("/v1/chat/completions")).json(&body);
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
    let statuses = responses
        .iter()
        .map(|response| response.status().as_u16())
        .collect();
    workers
        .iter()
        .for_each(|worker| worker.event_permits.add_permits(4 * STREAMS));
    for response in responses {
        response.bytes().await.unwrap();
    }
    bed.idle().await;
    statuses
}

fn failed(statuses: &[u16]) -> usize {
    statuses.iter().filter(|status| **status != 200).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn istio_serves_1300_streams_at_once() {
    assert_eq!(
        failed(&open_streams(ISTIO_AS_GENERATED, ISTIO_AS_GENERATED.shipped()).await),
        0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn envoy_ai_gateway_serves_1300_streams_at_once() {
    assert_eq!(
        failed(&open_streams(ENVOY_AI_GATEWAY, ENVOY_AI_GATEWAY.shipped()).await),
        0
    );
    // The limit that the shipped manifests raise.
    assert_eq!(
        failed(&open_streams(ENVOY_AI_GATEWAY, ENVOY_AI_GATEWAY.generated()).await),
        STREAMS - 1024
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn envoy_gateway_serves_1300_streams_at_once() {
    assert_eq!(
        failed(&open_streams(ENVOY_GATEWAY, ENVOY_GATEWAY.shipped()).await),
        0
    );
}

/// Runs `warmroute doctor` on Envoy. Returns level and check of its findings.
async fn findings(gateway: GatewayFixture) -> Vec<(String, String)> {
    let mut bed = GatewayTestbed::engines(gateway, &[1, 2].map(fast)).await;
    let mut warmroute = bed.warmroute();
    warmroute["requests"]["limits"] = json!({});
    bed.start_router(&warmroute).await.unwrap();
    bed.start_envoy(gateway.shipped()).await;
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_warmroute"));
    doctor
        .args([
            "doctor",
            "--json",
            "--no-canary",
            "--timeout",
            "1s",
            "--config",
        ])
        .arg(bed.run_dir.join("warmroute.yaml"));
    doctor.args(["--envoy-admin", &bed.envoy_setup().admin_url("")]);
    let output = tokio::task::spawn_blocking(move || doctor.output().unwrap())
        .await
        .unwrap();
    let findings: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap().to_owned();
    let findings = findings["findings"]
        .as_array()
        .unwrap_or_else(|| panic!("{findings}"))
        .iter();
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
        let answered =
            ChatAnswer::read(bed.post("/v1/chat/completions", &chat(&essay(topic))).await).await;
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn overloaded_engines_stay_behind_envoy_ai_gateway() {
    overloaded_engines_stay(ENVOY_AI_GATEWAY).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn overloaded_engines_stay_behind_envoy_gateway() {
    overloaded_engines_stay(ENVOY_GATEWAY).await;
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
                assert_ne!(answered.engine(), "2");
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
    let programs = bed.programs.clone();
    let run_dir = bed.run_dir.clone();
    bed.engines[1].restart(&programs, &run_dir).await.unwrap();
    let used = until(PATIENCE, async || {
        topic += 1;
        bed.complete(&essay(topic)).await.engine() == "2"
    });
    assert!(used.await, "{}", bed.router_log());
    failed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn istio_retries_at_another_worker() {
    assert_eq!(failed_after_worker_kill(ISTIO_AS_GENERATED).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn istio_with_authority_retries_at_another_worker() {
    assert_eq!(failed_after_worker_kill(ISTIO).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn istio_buffered_retries_at_another_worker() {
    assert_eq!(failed_after_worker_kill(ISTIO_BUFFERED).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn envoy_gateway_retries_at_another_worker() {
    assert_eq!(failed_after_worker_kill(ENVOY_GATEWAY).await, 0);
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
