//! Settings of pools for requests: pool selection by host, path or header, InferenceObjectives for
//! priorities, and InferenceModelRewrites for models. Both kinds are optional.

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use warmroute::kubernetes::{self, KubernetesRules};
use warmroute_server::fleet::discovery::kubernetes::KubernetesConfig;
use warmroute_testbed::deployment::{EngineSpec, MODEL};
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::{PATIENCE, until};

use super::{pod, pool};
use crate::support::api_server::{ApiServer, OPTIONAL, TOKEN};
use crate::support::deployment::{RoutedAnswer, TestDeployment, essay, fast};
use crate::support::openmetrics::OpenMetricsPage;

pub(crate) const OBJECTIVES: &str = OPTIONAL[0];
pub(crate) const REWRITES: &str = OPTIONAL[1];
const OLD_REWRITES: &str = OPTIONAL[3];

pub(crate) fn object(kind: &str, name: &str, created: &str, spec: &Value) -> Value {
    let (_, group) = kind.split_once('.').unwrap();
    json!({
        "apiVersion": format!("{group}/v1alpha2"), "kind": "Object", "spec": spec,
        "metadata": {
            "name": name, "namespace": "inference", "uid": format!("{kind} {name}"),
            "creationTimestamp": format!("{created}T00:00:00Z"),
        },
    })
}

pub(crate) fn objective(pool: &str, priority: i64) -> Value {
    json!({"poolRef": {"group": "inference.networking.k8s.io", "name": pool}, "priority": priority})
}

pub(crate) fn rewrite(pool: &str, models: &[&str], targets: &Value) -> Value {
    let matches: Vec<Value> = models
        .iter()
        .map(|m| json!({"model": {"type": "Exact", "value": m}}))
        .collect();
    json!({"poolRef": {"name": pool}, "rules": [{"matches": matches, "targets": targets}]})
}

/// Background task that discovers the optional objects of pools.
pub(crate) struct RuleFollower {
    pub(crate) rules: watch::Receiver<Option<KubernetesRules>>,
    _task: AbortOnDropHandle<()>,
    _dir: TempDir,
}

impl RuleFollower {
    pub(crate) fn start(server: &ApiServer, pools: &Value, recheck_interval: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = dir.path().join("config");
        std::fs::write(&kubeconfig, server.kubeconfig(TOKEN).to_string()).unwrap();
        let config = json!({"pools": pools, "kubeconfig": kubeconfig, "watch_timeout": "1s", "resync_interval": recheck_interval});
        let config: KubernetesConfig = serde_json::from_value(config).unwrap();
        let (rules_tx, rules) = watch::channel(None);
        let task = tokio::spawn(async move {
            kubernetes::watch_rules(&config, |rules| _ = rules_tx.send_replace(Some(rules)))
                .await
                .unwrap();
        });
        Self {
            rules,
            _task: AbortOnDropHandle::new(task),
            _dir: dir,
        }
    }

    /// Returns the status of both kinds, then the objectives and the rewrites.
    fn current(&self) -> Option<Vec<String>> {
        let rules = self.rules.borrow().clone()?;
        let objects = rules
            .objects
            .iter()
            .map(|followed| format!("{}: {}", followed.kind, followed.state));
        let objectives = rules
            .objectives
            .iter()
            .map(|o| format!("{} {} {}", o.pool, o.name, o.priority));
        let rewrites = rules
            .rewrites
            .iter()
            .map(|r| format!("{} {} {:?} {:?}", r.pool, r.object, r.models, r.to));
        Some(objects.chain(objectives).chain(rewrites).collect())
    }

    pub(crate) async fn wait_for(&self, expected: &[&str]) {
        let found = until(PATIENCE, async || {
            self.current().is_some_and(|current| current == expected)
        })
        .await;
        assert!(found, "{:#?}, not {expected:#?}", self.current());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn rewrites_are_ordered_by_object_age() {
    let server = ApiServer::start().await;
    let put = |name: &str, created: &str, spec: Value| {
        server.put(OLD_REWRITES, object(OLD_REWRITES, name, created, &spec));
    };
    let equal = json!([{"modelRewrite": "b"}, {"modelRewrite": "c", "weight": 0}]);
    put("young", "2026-02-01", rewrite("p", &["a"], &equal));
    let weighted = json!([{"modelRewrite": "d", "weight": 9}]);
    put("zz-old", "2026-01-01", rewrite("p", &[], &weighted));
    put("foreign", "2026-01-01", rewrite("q", &[], &weighted));
    server.forbid(OLD_REWRITES, false);
    let follows = RuleFollower::start(&server, &json!([{"name": "p"}, {"name": "o"}]), "1h");
    let standing = [
        "InferenceModelRewrite: watched as inference.networking.x-k8s.io/v1alpha2",
        "InferenceObjective: forbidden",
    ];
    let old = r#"p inference/zz-old [] [("d", Some(9))]"#;
    let young = r#"p inference/young ["a"] [("b", None), ("c", Some(0))]"#;
    follows
        .wait_for(&[standing[0], standing[1], old, young])
        .await;
    server.delete(OLD_REWRITES, "zz-old");
    follows.wait_for(&[standing[0], standing[1], young]).await;
    // A running follower lists the forbidden kinds again.
    drop(follows);
    // No object can refer to a pool of labels and ports, so warmroute does not list the optional
    // kinds.
    let refused = server.refused(OBJECTIVES);
    RuleFollower::start(
        &server,
        &json!([{"selector": {"app": "p"}, "ports": [80]}]),
        "1h",
    )
    .wait_for(&[])
    .await;
    assert_eq!(server.refused(OBJECTIVES), refused);
    assert_eq!(server.violations(), [""; 0]);
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
        std::fs::write(&kubeconfig, server.kubeconfig(TOKEN).to_string()).unwrap();
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
                        {"pool": "b", "paths": ["/b"]},
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

    fn allow(&self, kind: &str, name: &str, spec: &Value) {
        self.server
            .put(kind, object(kind, name, "2026-01-01", spec));
        self.server.forbid(kind, false);
    }
}

fn completion(topic: usize, model: Option<&str>) -> Value {
    let mut body = json!({"prompt": essay(topic), "max_tokens": 2});
    if let Some(model) = model {
        body["model"] = json!(model);
    }
    body
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn pool_is_selected_by_host_path_or_header() {
    let mut site = RequestSite::start(&[fast(1), fast(2)], json!({})).await;
    let mut topic = 0;
    let mut engines = std::collections::BTreeSet::new();
    let cases: [(&[(&str, &str)], u64); 5] = [
        (&[("host", "a.test")], 1),
        (&[("host", "A.test:80")], 1),
        (&[("host", "x.b.test")], 2),
        (&[("host", "a.test"), ("x-pool", "b")], 2),
        (&[("host", "b.test"), ("x-pool", "a")], 1),
    ];
    for (headers, engine) in cases {
        for _ in 0..4 {
            topic += 1;
            let answer = site.send(headers, &completion(topic, Some(MODEL))).await;
            assert_eq!(answer.engine(), engine, "{headers:?}");
        }
    }
    for topic in 100..120 {
        let answer = site.send(&[], &completion(topic, Some(MODEL))).await;
        engines.insert(answer.engine());
    }
    assert_eq!(
        engines.len(),
        2,
        "no rule matches, so all workers are candidates"
    );
    let refused = site
        .send(&[("x-pool", "absent")], &completion(1, Some(MODEL)))
        .await;
    assert_eq!(refused.status.as_u16(), 503);
    assert!(refused.text.contains("no_eligible_worker"), "{refused:?}");
    assert_pools_are_explained(&site).await;
    // Envoy's metadata takes precedence over headers, hosts and paths.
    site.assign_pool_in_envoy("b").await;
    for topic in 200..204 {
        let answer = site
            .send(
                &[("host", "a.test"), ("x-pool", "a")],
                &completion(topic, Some(MODEL)),
            )
            .await;
        assert_eq!(answer.engine(), 2);
    }
    site.deployment.idle().await;
    // warmroute lists the kinds repeatedly and logs each kind once.
    let has_retried = async || OPTIONAL.iter().all(|kind| site.server.refused(kind) > 2);
    assert!(until(PATIENCE, has_retried).await);
    let log = site.deployment.router_log();
    assert_eq!(log.matches("forbidden").count(), 2, "{log}");
}

/// Asserts explanations for paths that engines do not serve, as a gateway would rewrite them.
async fn assert_pools_are_explained(site: &RequestSite) {
    let explained = async |path: &str, pool: &str| -> Value {
        let query =
            json!({"path": path, "headers": {"x-pool": pool}, "body": completion(1, Some(MODEL))});
        let url = site
            .deployment
            .admin_url(warmroute_server::admin::explain::EXPLAIN_PATH);
        RoutedAnswer::send(site.deployment.http.post(url).json(&query))
            .await
            .json()
    };
    let page = explained("/b/v1/completions", "").await;
    let excluded: Vec<&str> = page["phases"][0]["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|judged| judged["excluded"].as_str().unwrap_or("nothing"))
        .collect();
    assert!(
        excluded.contains(&"is not of the pool `b`") && excluded.contains(&"nothing"),
        "{page}"
    );
    let page = explained("/v1/completions", "absent").await;
    assert!(
        page["summary"]
            .as_str()
            .unwrap()
            .contains("the request is for the pool `absent`"),
        "{page}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn model_rewrites_apply_to_requests_of_their_pool() {
    let site = RequestSite::start(&[fast(1), fast(2)], json!({})).await;
    site.cluster_shows("forbidden").await;
    // Returns the status and the model in the response. The engines reject the names of other
    // models.
    let model = async |host: &str, requested: Option<&str>| -> (u16, Option<String>) {
        let answer = site
            .send(&[("host", host)], &completion(1, requested))
            .await;
        let body = answer.json();
        (
            answer.status.as_u16(),
            body["model"].as_str().map(str::to_owned),
        )
    };
    let unknown = (404, None);
    let renamed = (200, Some("chat".to_owned()));
    assert_eq!(model("a.test", Some("chat")).await, unknown);
    site.allow(
        REWRITES,
        "canary",
        &rewrite("a", &["chat"], &json!([{"modelRewrite": MODEL}])),
    );
    site.cluster_shows("inference/canary").await;
    assert_eq!(model("a.test", Some("chat")).await, renamed);
    assert_eq!(model("any.test", Some("chat")).await, renamed);
    assert_eq!(
        model("x.b.test", Some("chat")).await,
        unknown,
        "a rule of another pool"
    );
    let rewritten = async || site.deployment.metric("model_rewrites_total", &[]).await;
    assert_eq!(rewritten().await, 2.0);
    // The rule applies to all models, including requests without one, whose response has the
    // engine's model name.
    site.allow(
        REWRITES,
        "all",
        &rewrite("b", &[], &json!([{"modelRewrite": MODEL, "weight": 0}])),
    );
    site.cluster_shows("inference/all").await;
    assert_eq!(model("x.b.test", None).await, (200, Some(MODEL.to_owned())));
    assert_eq!(rewritten().await, 3.0);
    assert_eq!(model("x.b.test", Some("chat")).await, renamed);
    assert_eq!(rewritten().await, 4.0);
    site.server.delete(REWRITES, "canary");
    site.server.delete(REWRITES, "all");
    site.cluster_shows(r#""rewrites":[]"#).await;
    assert_eq!(model("a.test", Some("chat")).await, unknown);
    site.deployment.idle().await;
    assert_eq!(
        (site.server.violations(), site.server.discoveries()),
        (vec![], 0)
    );
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
    site.allow(OBJECTIVES, "batch", &objective("a", -1));
    site.server.put(
        OBJECTIVES,
        object(OBJECTIVES, "gold", "2026-01-01", &objective("a", 9)),
    );
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
        let answer = site
            .send(
                &[("host", host), (header, objective)],
                &completion(3, Some(MODEL)),
            )
            .await;
        assert_eq!(
            answer.status.as_u16(),
            status,
            "{host} {objective}: {answer:?}"
        );
    }
    drop(held);
    site.deployment.idle().await;
    let answer = site
        .send(
            &[("host", "a.test"), (header, "batch")],
            &completion(3, Some(MODEL)),
        )
        .await;
    assert_eq!(answer.status.as_u16(), 200, "{answer:?}");
}
