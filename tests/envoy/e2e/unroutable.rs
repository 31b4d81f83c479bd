//! Requests without a usable prompt, and forged routing headers.

use std::collections::BTreeSet;

use reqwest::Method;
use serde_json::{Value, json};
use warmroute_server::ext_proc::routing_headers::RoutingHeaders;
use warmroute_testbed::envoy;

use crate::modes::worker::{RecordingWorker, received};
use crate::routing::bed::full_duplex;
use crate::support::deployment::{RoutedAnswer, TestDeployment, chat, fast, with_response_headers};

/// Change of the shipped Envoy configuration.
type EnvoyChange = fn(&str) -> String;

/// A request without a usable prompt.
struct UnroutableRequest {
    method: Method,
    path: &'static str,
    body: Option<Vec<u8>>,
    /// Response status of the engine.
    status: u16,
    /// Expected reason for load-only routing.
    reason: &'static str,
}

fn unroutable_requests() -> Vec<UnroutableRequest> {
    let chats = "/v1/chat/completions";
    let latin1 =
        b"{\"model\": \"qwen2.5\", \"messages\": [{\"role\": \"user\", \"content\": \"caf\xe9\"}]}";
    let mut unknown = chat("hello");
    unknown["model"] = json!("unserved-model");
    let unknown = unknown.to_string();
    let post = |path, body: Option<&[u8]>, status, reason| {
        let body = body.map(<[u8]>::to_vec);
        UnroutableRequest {
            method: Method::POST,
            path,
            body,
            status,
            reason,
        }
    };
    vec![
        post(
            chats,
            Some(b"{\"model\": \"qwen2.5\", \"messages\": ["),
            400,
            "unparseable",
        ),
        post("/v1/completions", Some(b"7"), 400, "unparseable"),
        post(chats, Some(b"{\"model\": \"qwen2.5\"}"), 400, "unparseable"),
        post(chats, Some(latin1), 400, "unparseable"),
        post(chats, Some(unknown.as_bytes()), 404, "unknown_model"),
        post("/v1/files", Some(b"anything at all"), 404, "not_inference"),
        post("/v1/files", None, 404, "not_inference"),
        post(chats, Some(b""), 400, "no_body"),
        post(chats, None, 400, "no_body"),
        UnroutableRequest {
            method: Method::GET,
            path: "/v1/models",
            body: None,
            status: 200,
            reason: "not_inference",
        },
    ]
}

async fn assert_requests_reach_an_engine(change: EnvoyChange) {
    let deployment = TestDeployment::start_with(&[fast(1), fast(2)], json!({}), change).await;
    for UnroutableRequest {
        method,
        path,
        body,
        status,
        reason,
    } in unroutable_requests()
    {
        let what = format!(
            "{method} {path} {:?}",
            body.as_deref().map(String::from_utf8_lossy)
        );
        let label = [("reason", reason)];
        let counted = async || deployment.metric("degradations_total", &label).await;
        let before = counted().await;
        let mut request = deployment.http.request(method, deployment.url(path));
        if let Some(body) = body {
            request = request
                .header("content-type", "application/json")
                .body(body);
        }
        let answered = RoutedAnswer::send(request).await;
        assert_eq!(
            (answered.mode(), answered.status.as_u16()),
            ("load_only", status),
            "{what}: {answered:?}"
        );
        let engine = answered.header("x-engine-id");
        assert!(
            ["1", "2"].contains(&engine),
            "no engine served {what}: {answered:?}"
        );
        assert_eq!(
            engine,
            answered.header("x-received-worker-instance-id"),
            "{what}"
        );
        assert_eq!(
            counted().await,
            before + 1.0,
            "{what} is not counted as {reason}"
        );
    }
    deployment
        .query("and an ordinary question")
        .await
        .assert_exact();
    deployment.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unusable_requests_are_load_only_as_shipped() {
    assert_requests_reach_an_engine(str::to_owned).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn unusable_requests_are_load_only_in_full_duplex() {
    assert_requests_reach_an_engine(full_duplex).await;
}

/// Returns the shipped configuration without its header removal, so that only warmroute removes
/// forged headers.
fn without_early_mutation(config: &str) -> String {
    let mut config: Value = serde_saphyr::from_str(config).unwrap();
    let manager = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
    let manager = config
        .pointer_mut(manager)
        .unwrap()
        .as_object_mut()
        .unwrap();
    assert!(manager.remove("early_header_mutation_extensions").is_some());
    config.to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn client_cannot_choose_worker() {
    let workers = [
        RecordingWorker::start().await,
        RecordingWorker::start().await,
    ];
    let addresses = workers.each_ref().map(|worker| worker.address.to_string());
    let [first, second] = &addresses;
    let entries = json!([{"id": 1, "endpoint": first}, {"id": 2, "endpoint": second}]);
    let mut deployment = TestDeployment::engines(&[]).await;
    deployment.write_worker_entries(&entries).unwrap();
    deployment
        .start_router(&with_response_headers(json!({})))
        .await
        .unwrap();
    let shipped = deployment.envoy_config();
    for config in [shipped.clone(), full_duplex(&shipped)] {
        for config in [without_early_mutation(&config), config] {
            deployment.start_envoy(&config).await.unwrap();
            assert_forged_headers_ignored(&deployment, &addresses).await;
        }
    }
}

/// Sends requests that ask for the first worker.
async fn assert_forged_headers_ignored(deployment: &TestDeployment, workers: &[String; 2]) {
    let mut served = BTreeSet::new();
    for number in 0..30 {
        let mut request = deployment.http.post(deployment.url("/v1/chat/completions"));
        if number % 2 == 0 {
            request = request.json(&chat(&format!("question {number}")));
        }
        for name in RoutingHeaders::default().reserved_names() {
            let forged = match name {
                name if name.contains("endpoint") || name.contains("host-port") => {
                    workers[0].as_str()
                }
                name if name.contains("rank") => "77",
                _ => "1",
            };
            request = request.header(name, forged).header(name, "forged");
        }
        let answered = RoutedAnswer::send(request).await;
        let report = &answered.documents()[0];
        let serves = |address: &String| report["worker"] == json!(address);
        let worker = (workers.iter().position(serves).unwrap() + 1).to_string();
        assert_eq!(
            received(report, "x-worker-instance-id"),
            [&worker],
            "{report}"
        );
        assert_eq!(received(report, "x-dp-rank"), ["0"], "{report}");
        for name in RoutingHeaders::default().reserved_names() {
            let arrived = received(report, name);
            let forged = |value: &&str| ["forged", "77"].contains(value);
            assert!(
                arrived.len() <= 1 && !arrived.iter().any(forged),
                "{name}: {arrived:?}"
            );
            let ours = [
                "x-worker-instance-id",
                "x-dp-rank",
                "x-gateway-destination-endpoint",
            ]
            .contains(&name);
            assert!(ours || arrived.is_empty(), "{name}: {arrived:?}");
        }
        served.insert(worker);
    }
    assert_eq!(served.len(), 2, "forged headers select no worker");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn envoy_selects_without_fleet() {
    let mut deployment = TestDeployment::engines(&[fast(1), fast(2)]).await;
    deployment.write_worker_entries(&json!([])).unwrap();
    let addresses = deployment.addresses();
    envoy::write_endpoints(&deployment.envoy_setup().endpoint_file(), &addresses).unwrap();
    let alone = json!({"envoy": null, "process": {"readiness": {"min_workers": 0}}});
    deployment.serve(alone, str::to_owned).await;
    let mut served = BTreeSet::new();
    for number in 0..40 {
        let answered = deployment.query(&format!("question {number}")).await;
        assert_eq!(
            (answered.status.as_u16(), answered.mode()),
            (200, "passthrough"),
            "{answered:?}"
        );
        for name in [
            "x-worker-instance-id",
            "x-received-worker-instance-id",
            "x-warmroute-predicted-cached-tokens",
        ] {
            assert_eq!(answered.header(name), "", "{name}");
        }
        served.insert(answered.engine());
    }
    assert_eq!(served.len(), 2, "Envoy uses both endpoints");
    let page = deployment.metrics().await;
    assert_eq!(
        page.sum("degradations_total", &[("reason", "no_workers")]),
        40.0
    );
    assert_eq!(page.sum("requests_total", &[("mode", "passthrough")]), 40.0);
    assert_eq!(page.sum("workers", &[]), 0.0);
}
