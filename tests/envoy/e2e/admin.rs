//! Readiness, health, metrics and logging, as operators and probes observe them.

use std::collections::BTreeMap;

use reqwest::StatusCode;
use serde_json::{Value, json};
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use warmroute_testbed::deployment::MODEL;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::e2e::strict::{self, PageFormat};
use crate::faults::bed::assert_exits;
use crate::routing::bed::stream;
use crate::support::deployment::{
    RoutedAnswer, TestDeployment, essay, fast, with_response_headers,
};
use crate::support::openmetrics::{ACCEPT, OpenMetricsPage};

const SERVICES: [&str; 2] = ["", "envoy.service.ext_proc.v3.ExternalProcessor"];

async fn readiness(deployment: &TestDeployment) -> Option<(StatusCode, Value)> {
    let request = deployment.http.get(deployment.admin_url("/readyz"));
    let response = request.send().await.ok()?;
    let status = response.status();
    Some((status, response.json().await.ok()?))
}

/// Queries the gRPC health of a service on the socket that Envoy uses.
async fn health(deployment: &TestDeployment, service: &str) -> ServingStatus {
    let socket = deployment.envoy_setup().ext_proc_socket();
    let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))
        .unwrap()
        .connect()
        .await
        .unwrap();
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    HealthClient::new(channel)
        .check(request)
        .await
        .unwrap()
        .into_inner()
        .status()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn readiness_lists_pending_steps() {
    let mut deployment = TestDeployment::engines(&[fast(5)]).await;
    deployment.engines[0].kill9();
    deployment.write_worker_entries(&json!([])).unwrap();
    deployment
        .spawn_router(&with_response_headers(
            json!({"process": {"readiness": {"event_sources_timeout": "10m"}}}),
        ))
        .unwrap();

    assert_pending(&deployment, &json!(["initial workers: at least 1"])).await;
    let alive = RoutedAnswer::send(deployment.http.get(deployment.admin_url("/healthz"))).await;
    assert_eq!(alive.status, StatusCode::OK, "alive before it is ready");

    deployment.write_workers().unwrap();
    assert_pending(&deployment, &json!(["event source of worker rank 5/0"])).await;

    deployment.restart_engine(0).await;
    let ready = until(PATIENCE, async || {
        readiness(&deployment).await
            == Some((StatusCode::OK, json!({"ready": true, "pending": []})))
    });
    assert!(
        ready.await,
        "{:?}\n{}",
        readiness(&deployment).await,
        deployment.router_log()
    );
    assert_health(&deployment, ServingStatus::Serving).await;
}

/// Waits until the page lists these pending steps and no service is healthy.
async fn assert_pending(deployment: &TestDeployment, expected: &Value) {
    let shown = until(PATIENCE, async || {
        let answer = readiness(deployment).await;
        answer.is_some_and(|(status, page)| {
            status == StatusCode::SERVICE_UNAVAILABLE && page["pending"] == *expected
        })
    });
    assert!(
        shown.await,
        "not {expected}: {:?}\n{}",
        readiness(deployment).await,
        deployment.router_log()
    );
    assert_health(deployment, ServingStatus::NotServing).await;
}

/// Waits until all gRPC health services report this status.
async fn assert_health(deployment: &TestDeployment, status: ServingStatus) {
    for service in SERVICES {
        let reached = until(PATIENCE, async || {
            health(deployment, service).await == status
        });
        assert!(reached.await, "gRPC health of {service:?}");
    }
}

/// Families without a series in this deployment, because it lacks the components in their labels.
const ABSENT: [&str; 12] = [
    // No request failed.
    "warmroute_worker_failed_requests",
    "warmroute_worker_health_state",
    // Before the first request there are no responses.
    "warmroute_responses",
    // The workers are listed in a file, so nothing is discovered.
    "warmroute_discovery_last_success_timestamp_seconds",
    "warmroute_discovery_up",
    "warmroute_pool_info",
    // No listener uses TLS.
    "warmroute_tls_certificate_expiry_timestamp_seconds",
    "warmroute_tls_handshake_errors",
    // All workers publish events, so nothing is predicted. Before the first request there are no
    // events, so no source has a lag.
    "warmroute_worker_predicted_blocks",
    "warmroute_kv_event_source_lag_seconds",
    "warmroute_kv_event_source_last_event_age_seconds",
    // `replicas` is not configured.
    "warmroute_replica_connected",
];

/// Families with the metrics of the operating system.
const PROCESS_FAMILIES: [&str; 7] = [
    "process_cpu_seconds",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_threads",
    "process_virtual_memory_bytes",
];

/// Returns name and type of all families that the files of `crates/metrics` declare.
fn declared() -> BTreeMap<String, &'static str> {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/crates/metrics/src/families");
    let mut families = BTreeMap::new();
    for file in std::fs::read_dir(directory).unwrap() {
        let source = std::fs::read_to_string(file.unwrap().path()).unwrap();
        families.extend(source.lines().filter_map(family));
    }
    families
}

/// Parses a declaration in `metrics!`: `"name" field: Type = value;`, where the value is optional.
fn family(line: &str) -> Option<(String, &'static str)> {
    let (name, rest) = line.trim().strip_prefix('"')?.split_once("\" ")?;
    let (_, declaration) = rest.split_once(": ")?;
    let (kind, _) = declaration.split_once([';', '='])?;
    let kind = if kind.contains("Histogram") {
        "histogram"
    } else if kind.contains("Counter") {
        "counter"
    } else {
        assert!(kind.contains("Gauge"), "{line}");
        "gauge"
    };
    Some((format!("warmroute_{name}"), kind))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_page_is_valid_and_shows_traffic() {
    // Engines report usage at the end of a response body. By default only the start is observed.
    let more = json!({"gateway": {"observe": "usage"}});
    let deployment = TestDeployment::start_with(&[fast(1), fast(2)], more, str::to_owned).await;
    for round in 0..2 {
        for topic in 0..6 {
            let body = stream(&essay(topic), 2);
            let answered = deployment.post("/v1/chat/completions", &body).await;
            answered.assert_exact();
            if round == 1 {
                assert!(answered.cached_tokens() > 0, "{answered:?}");
            }
            deployment.settle().await;
        }
    }
    deployment
        .query("the request that does not stream")
        .await
        .assert_exact();

    check_formats(&deployment).await;

    deployment.wait_metric("open_exchanges", &[], 0.0).await;
    let page = deployment.metrics().await;
    check_families(&page);
    check_traffic(&page);
    deployment.settle().await;
    let indexed = deployment
        .metric("worker_cached_blocks", &[("tier", "device")])
        .await;
    assert_eq!(
        indexed,
        deployment.cached_blocks().await as f64,
        "blocks cached by the engines"
    );
    assert!(indexed > 30.0, "{indexed}");
    check_workers(&page);
}

/// Asserts the metrics of two idle workers.
fn check_workers(page: &OpenMetricsPage) {
    for id in ["1", "2"] {
        let worker = [("worker_id", id), ("dp_rank", "0"), ("role", "aggregated")];
        assert_eq!(
            page.sum(
                "kv_event_source_freshness",
                &[worker[0], worker[1], ("freshness", "exact")]
            ),
            1.0
        );
        assert_eq!(
            page.samples("worker_cached_blocks").count(),
            2,
            "two engines, only the device tier"
        );
        for family in [
            "worker_active_requests",
            "worker_active_decode_blocks",
            "worker_active_prefill_tokens",
        ] {
            assert_eq!(
                (page.samples(family).count(), page.sum(family, &worker)),
                (2, 0.0),
                "{family} of {id}"
            );
        }
    }
}

/// Checks the page in both formats with the strict parsers of Prometheus' Python client.
async fn check_formats(deployment: &TestDeployment) {
    let page = async |accept: Option<&str>| {
        let mut page_request = deployment.http.get(deployment.admin_url("/metrics"));
        if let Some(accept) = accept {
            page_request = page_request.header("accept", accept);
        }
        let response = page_request.send().await.unwrap();
        let content_type = response.headers()["content-type"]
            .to_str()
            .unwrap()
            .to_owned();
        (content_type, response.text().await.unwrap())
    };
    let (content_type, open_metrics) = page(Some(ACCEPT)).await;
    assert_eq!(
        content_type,
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
    );
    let strict = strict::parse(&open_metrics, PageFormat::OpenMetrics);
    for accept in [None, Some("text/plain;version=0.0.4"), Some("*/*")] {
        let (content_type, text) = page(accept).await;
        assert_eq!(
            content_type, "text/plain; version=0.0.4; charset=utf-8",
            "{accept:?}"
        );
        let types = |families: &BTreeMap<String, (String, usize)>| -> BTreeMap<String, String> {
            families
                .iter()
                .map(|(name, (kind, _))| (name.clone(), kind.clone()))
                .collect()
        };
        assert_eq!(
            types(&strict::parse(&text, PageFormat::Prometheus)),
            types(&strict),
            "{accept:?}"
        );
    }
    for (name, kind) in declared() {
        let found = strict
            .get(&name)
            .map(|(kind, samples)| (kind.as_str(), *samples > 0));
        assert!(
            found == Some((kind, true)) || ABSENT.contains(&name.as_str()),
            "{name} is {found:?}, not {kind}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn metric_families_are_present_before_the_first_request() {
    let deployment = TestDeployment::start(&[fast(1)]).await;
    let page = deployment.metrics().await;
    let absent: Vec<String> = declared()
        .into_keys()
        .filter(|name| !page.families.contains_key(name) && !ABSENT.contains(&name.as_str()))
        .collect();
    assert_eq!(absent, Vec::<String>::new(), "{}", page.text());
    let zero = [
        (
            "requests_total",
            [("mode", "exact"), ("role", "aggregated")],
        ),
        (
            "requests_total",
            [("mode", "passthrough"), ("role", "none")],
        ),
        (
            "inter_token_latency_seconds_count",
            [("model", MODEL), ("role", "aggregated")],
        ),
    ];
    for (name, labels) in zero {
        let found = page.samples(name).filter(|sample| {
            labels
                .iter()
                .all(|(key, value)| sample.labels[*key] == *value)
        });
        assert_eq!(
            found.map(|sample| sample.value).collect::<Vec<_>>(),
            [0.0],
            "{name} {labels:?}"
        );
    }
    assert!(
        page.samples("degradations_total")
            .any(|sample| sample.labels["reason"] == "decision_timeout"),
        "{}",
        page.text()
    );
}

/// Asserts that the families of the page are exactly the declared ones.
fn check_families(page: &OpenMetricsPage) {
    let declared = declared();
    assert!(declared.len() > 25, "{declared:?}");
    let (system, own): (Vec<_>, Vec<_>) = page
        .families
        .iter()
        .partition(|(name, _)| name.starts_with("process_"));
    let names: Vec<&str> = system.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, PROCESS_FAMILIES);
    for (name, kind) in own {
        assert_eq!(declared.get(name).copied(), Some(kind.as_str()), "{name}");
    }
    let absent: Vec<&str> = declared
        .keys()
        .filter(|name| !page.families.contains_key(*name))
        .map(String::as_str)
        .collect();
    assert!(
        absent.iter().all(|name| ABSENT.contains(name)),
        "{absent:?} are missing:\n{}",
        page.text()
    );
}

/// Asserts the metrics of 12 streaming requests and one unary request.
fn check_traffic(page: &OpenMetricsPage) {
    let model = [("model", MODEL)];
    for name in [
        "prompt_tokens",
        "prefix_hit_ratio",
        "time_to_first_token_seconds",
        "request_duration_seconds",
    ] {
        assert_eq!(
            page.sum(&format!("{name}_count"), &model),
            13.0,
            "{name}:\n{}",
            page.text()
        );
        assert!(page.sum(&format!("{name}_sum"), &model) > 0.0, "{name}");
    }
    assert_eq!(page.sum("output_tokens_count", &model), 13.0);
    assert_eq!(page.sum("output_tokens_sum", &model), 26.0);
    check_latencies(page);
    let cached = |name: &str| page.sum(&format!("{name}_cached_tokens_total"), &model);
    assert!(
        cached("reported") > 600.0 && cached("predicted") >= cached("reported"),
        "{}",
        page.text()
    );
    assert!(
        cached("available") >= cached("predicted"),
        "{}",
        page.text()
    );
    check_state(page);
}

/// Asserts the latencies and outcomes of the requests. Each response has two tokens. A unary
/// response has no inter-token latency.
fn check_latencies(page: &OpenMetricsPage) {
    let decoded = [("model", MODEL), ("role", "aggregated")];
    assert_eq!(
        page.sum("inter_token_latency_seconds_count", &decoded),
        12.0,
        "{}",
        page.text()
    );
    assert!(
        page.sum("inter_token_latency_seconds_sum", &decoded) > 0.0,
        "{}",
        page.text()
    );
    assert_eq!(
        page.sum("time_to_first_token_seconds_count", &decoded),
        13.0
    );
    assert_eq!(
        page.sum(
            "requests_total",
            &[("mode", "exact"), ("role", "aggregated")]
        ),
        13.0
    );
    assert_eq!(
        page.sum("requests_total", &[("model", MODEL), ("mode", "exact")]),
        13.0
    );
    assert_eq!(page.sum("exchanges_total", &[]), 13.0);
    assert_eq!(
        page.sum("exchanges_total", &[("outcome", "completed")]),
        13.0
    );
    for stage in [
        "parse", "render", "tokenize", "hash", "index", "choose", "total",
    ] {
        let stage = [("stage", stage)];
        assert_eq!(
            page.sum("decision_stage_duration_seconds_count", &stage),
            13.0,
            "{stage:?}"
        );
        assert!(
            page.sum("decision_stage_duration_seconds_sum", &stage) > 0.0,
            "{stage:?}"
        );
    }
}

/// Asserts the metrics of events, fleet and tasks.
fn check_state(page: &OpenMetricsPage) {
    assert!(
        page.sum("kv_events_total", &[("kind", "stored"), ("outcome", "ok")]) > 0.0,
        "{}",
        page.text()
    );
    assert!(page.sum("kv_event_batches_total", &[("outcome", "applied")]) > 0.0);
    assert!(page.sum("endpoints_file_writes_total", &[("outcome", "written")]) > 0.0);
    assert!(page.sum("fleet_generation", &[]) > 0.0);
    assert_eq!(page.sum("degradations_total", &[]), 0.0);
    assert_eq!(page.sum("workers", &[]), 2.0);
    assert_eq!(page.sum("ready", &[]), 1.0);
    assert_eq!(
        page.sum("build_info", &[("version", env!("CARGO_PKG_VERSION"))]),
        1.0
    );
    let worker = [("worker_id", "1")];
    assert_eq!(page.sum("worker_info", &[]), 2.0);
    let info = [worker[0], ("role", "aggregated"), ("model", MODEL)];
    assert_eq!(page.sum("worker_info", &info), 1.0, "{}", page.text());
    assert_eq!(page.sum("worker_requests_total", &[]), 13.0);
    assert_eq!(page.samples("worker_requests_total").count(), 2);
    assert!(
        page.samples("task_up")
            .all(|sample| sample.labels["task"] != "kv_events"),
        "a running source has a series: {}",
        page.text()
    );
    assert_eq!(
        page.sum("task_up", &[]),
        page.samples("task_up").count() as f64,
        "{}",
        page.text()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn every_log_level_runs_and_exits() {
    let mut deployment = TestDeployment::engines(&[]).await;
    deployment.write_worker_entries(&json!([])).unwrap();
    for level in ["error", "warn", "info", "debug", "trace"] {
        let more = json!({"process": {"log": {"level": level}, "readiness": {"min_workers": 0}}});
        deployment
            .start_router(&with_response_headers(more))
            .await
            .unwrap();
        // A request after the start gives the process time to exit by itself, which it must not do.
        deployment.metrics().await;
        let router = deployment.router().unwrap();
        assert!(router.is_running(), "{level}: {}", router.log_tail());
        router.terminate();
        assert_exits(router).await;
    }
}
