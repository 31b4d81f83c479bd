//! Pools of requests: their selection by host, header or metadata, and InferenceObjectives for
//! priorities.

use serde_json::{Value, json};
use warmroute_testbed::deployment::{EngineSpec, MODEL};
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::{PATIENCE, until};

use super::{pod, pool};
use crate::support::api_server::{ApiServer, OPTIONAL};
use crate::support::deployment::{RoutedAnswer, TestDeployment, essay, fast};
use crate::support::openmetrics::OpenMetricsPage;

pub(crate) const OBJECTIVES: &str = OPTIONAL[0];
/// Creates an InferenceObjective.
pub(crate) fn put_objective(server: &ApiServer, name: &str, pool: &str, priority: i64) {
    let pool = json!({"group": "inference.networking.k8s.io", "name": pool});
    let object = json!({
        "apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective",
        "metadata": {"name": name, "namespace": "inference", "uid": format!("uid-of-{name}")},
        "spec": {"poolRef": pool, "priority": priority},
    });
    server.put(OBJECTIVES, object);
}

/// Two pools that serve the same model behind one Envoy.
struct RequestSite {
    deployment: TestDeployment,
    server: ApiServer,
}

impl RequestSite {
    async fn start(specs: &[EngineSpec], more: Value) -> Self {
        let mut deployment = TestDeployment::engines(specs).await;
        let server = ApiServer::start().await;
        for (name, engine) in [("a", 0), ("b", 1)] {
            let port = deployment.engines[engine].address.port();
            server.put("inferencepools", pool(name, &json!({"app": name}), &[port]));
            server.put("pods", pod(name, "127.0.0.1", &json!({"app": name})));
        }
        let kubeconfig = deployment.run_dir.join("kubeconfig");
        std::fs::write(&kubeconfig, server.kubeconfig().to_string()).unwrap();
        let pool_entry =
            |name: &str| json!({"name": name, "worker": {"model": MODEL, "total_kv_blocks": 1000}});
        let mut own = json!({
            "workers": {
                "file": null,
                "kubernetes": {
                    "kubeconfig": kubeconfig,
                    "resync_interval": "200ms",
                    "pools": [pool_entry("a"), pool_entry("b")],
                },
            },
            "process": {"readiness": {"min_workers": 2}},
            "routing": {
                "pool_routes": {
                    "header": "x-pool",
                    "rules": [
                        {"pool": "a", "hosts": ["a.test"]},
                        {"pool": "b", "hosts": ["*.b.test"]},
                    ],
                },
            },
        });
        merge_config(&mut own, &more);
        deployment.serve(own, str::to_owned).await;
        // warmroute replaces each worker once, when it discovers the capacity of the engine.
        let all = specs.len() as f64;
        deployment
            .wait_metrics("the capacity of all engines is discovered", |page| {
                page.sum(
                    "engine_setting_mismatches",
                    &[("setting", "total_kv_blocks")],
                ) == all
                    && page.sum("workers", &[]) == all
                    && page.sum("kv_event_source_freshness", &[("freshness", "exact")]) == all
            })
            .await;
        Self { deployment, server }
    }

    /// Restarts Envoy with a metadata filter that assigns every request to this pool.
    async fn assign_pool_in_envoy(&mut self, pool: &str) {
        let filters = "          http_filters:\n";
        let with_pool_filter = format!(
            "{filters}          - name: pool\n            typed_config:\n              \"@type\": \
             type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config\n              metadata: \
             [{{metadata_namespace: warmroute, value: {{pool: {pool}}}}}]\n"
        );
        let forwarded = "forwarding_namespaces: {untyped: [envoy.lb]}";
        let config = self.deployment.envoy_config();
        assert!(
            config.contains(filters) && config.contains(forwarded),
            "{config}"
        );
        let config = config.replace(filters, &with_pool_filter);
        let config = config.replace(
            forwarded,
            "forwarding_namespaces: {untyped: [envoy.lb, warmroute]}",
        );
        self.deployment.start_envoy(&config).await.unwrap();
    }

    async fn send(&self, headers: &[(&str, &str)], body: &Value) -> RoutedAnswer {
        let mut request = self.deployment.request("/v1/completions", body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        RoutedAnswer::send(request).await
    }

    /// Waits until the cluster page of warmroute contains this text.
    async fn cluster_shows(&self, text: &str) {
        let page = async || {
            self.deployment
                .debug_page("cluster")
                .await
                .unwrap()
                .to_string()
        };
        let shown = until(PATIENCE, async || page().await.contains(text)).await;
        assert!(shown, "{text}: {}", page().await);
    }
}

fn completion(topic: usize) -> Value {
    json!({"model": MODEL, "prompt": essay(topic), "max_tokens": 2})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn pool_is_selected_by_metadata_header_or_host() {
    let mut site = RequestSite::start(&[fast(1), fast(2)], json!({})).await;
    let mut topic = 0;
    let cases: [(&[(&str, &str)], u64); 4] = [
        (&[("host", "A.test:80")], 1),
        (&[("host", "x.b.test")], 2),
        (&[("host", "a.test"), ("x-pool", "b")], 2),
        (&[("host", "b.test"), ("x-pool", "a")], 1),
    ];
    for (headers, engine) in cases {
        for _ in 0..4 {
            topic += 1;
            let answer = site.send(headers, &completion(topic)).await;
            assert_eq!(answer.engine(), engine, "{headers:?}");
        }
    }
    // Envoy's metadata takes precedence over headers, hosts and paths.
    site.assign_pool_in_envoy("b").await;
    for topic in 200..204 {
        let headers = [("host", "a.test"), ("x-pool", "a")];
        let answer = site.send(&headers, &completion(topic)).await;
        assert_eq!(answer.engine(), 2);
    }
    site.deployment.idle().await;
    // warmroute lists the kinds repeatedly and logs each kind once.
    let has_retried = async || OPTIONAL.iter().all(|kind| site.server.refused(kind) > 2);
    assert!(until(PATIENCE, has_retried).await);
    let log = site.deployment.router_log();
    assert_eq!(log.matches("forbidden").count(), 2, "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn sheddable_request_is_rejected_while_pool_is_overloaded() {
    let slow = |id| EngineSpec::new(id).with(&["--speed", "1"]);
    let site = RequestSite::start(
        &[slow(1), fast(2)],
        // Reported KV usage would outlast the request by an interval.
        json!({
            "engines": {"load": {"enabled": false}},
            "routing": {"overload": {"decode_blocks_threshold": 0.0005}},
        }),
    )
    .await;
    put_objective(&site.server, "batch", "a", -1);
    put_objective(&site.server, "gold", "a", 9);
    site.server.forbid(OBJECTIVES, false);
    site.cluster_shows("batch").await;
    let long = json!({"model": MODEL, "prompt": essay(7), "max_tokens": 4000, "stream": true});
    let held = site
        .deployment
        .request("/v1/completions", &long)
        .header("host", "a.test");
    let held = held.send().await.unwrap();
    assert_eq!(held.status().as_u16(), 200);
    let busy = |page: &OpenMetricsPage| page.sum("worker_active_decode_blocks", &[]) > 0.0;
    site.deployment
        .wait_metrics("the worker is busy", busy)
        .await;
    let header = "x-gateway-inference-objective";
    for (host, objective, status) in [
        ("a.test", "batch", 429),
        ("a.test", "gold", 200),
        ("a.test", "unknown", 200),
        ("x.b.test", "batch", 200),
        ("any.test", "batch", 200),
    ] {
        let headers = [("host", host), (header, objective)];
        let answer = site.send(&headers, &completion(3)).await;
        assert_eq!(
            answer.status.as_u16(),
            status,
            "{host} {objective}: {answer:?}"
        );
    }
    drop(held);
    site.deployment.idle().await;
    let headers = [("host", "a.test"), (header, "batch")];
    let answer = site.send(&headers, &completion(3)).await;
    assert_eq!(answer.status.as_u16(), 200, "{answer:?}");
}
