//! What pools say of requests: which are for whom, how urgent they are, and by which model they are served. The objects that say
//! so need not be there.

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;
use warmroute::discovery::kubernetes::{self, KubernetesConfig, Rules};

use crate::deployment::{Answered, Deployment, PATIENCE, essay, fast, telling};
use crate::openmetrics::Page;
use crate::server::{ApiServer, OPTIONAL, TOKEN};
use crate::support::ports::until;
use crate::support::stack::{EngineSpec, MODEL};
use crate::{pod, pool};

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

/// Follows the rules of pools in the background.
pub(crate) struct Follows {
    pub(crate) rules: watch::Receiver<Option<Rules>>,
    task: tokio::task::JoinHandle<()>,
    _dir: TempDir,
}

impl Drop for Follows {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Follows {
    pub(crate) fn start(server: &ApiServer, pools: &Value, again: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = dir.path().join("config");
        std::fs::write(&kubeconfig, server.kubeconfig(TOKEN).to_string()).unwrap();
        let config =
            json!({"pools": pools, "kubeconfig": kubeconfig, "silence": "1s", "look_again": again});
        let config: KubernetesConfig = serde_json::from_value(config).unwrap();
        let (told, rules) = watch::channel(None);
        let task = tokio::spawn(async move {
            kubernetes::watch_rules(&config, |rules| _ = told.send_replace(Some(rules)))
                .await
                .unwrap();
        });
        Self {
            rules,
            task,
            _dir: dir,
        }
    }

    /// How it is with both kinds, and the objectives and rules there are.
    fn now(&self) -> Option<Vec<String>> {
        let rules = self.rules.borrow().clone()?;
        let objects = rules
            .objects
            .iter()
            .map(|followed| format!("{}: {}", followed.kind, followed.standing));
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

    pub(crate) async fn is(&self, expected: &[&str]) {
        let found = until(PATIENCE, async || {
            self.now().is_some_and(|now| now == expected)
        })
        .await;
        assert!(found, "{:#?}, not {expected:#?}", self.now());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_are_read_by_the_age_of_their_objects() {
    let server = ApiServer::start().await;
    let equal = json!([{"modelRewrite": "b"}, {"modelRewrite": "c", "weight": 0}]);
    server.put(
        OLD_REWRITES,
        object(
            OLD_REWRITES,
            "young",
            "2026-02-01",
            &rewrite("p", &["a"], &equal),
        ),
    );
    let weighted = json!([{"modelRewrite": "d", "weight": 9}]);
    server.put(
        OLD_REWRITES,
        object(
            OLD_REWRITES,
            "zz-old",
            "2026-01-01",
            &rewrite("p", &[], &weighted),
        ),
    );
    server.put(
        OLD_REWRITES,
        object(
            OLD_REWRITES,
            "foreign",
            "2026-01-01",
            &rewrite("q", &[], &weighted),
        ),
    );
    server.forbid(OLD_REWRITES, false);
    let follows = Follows::start(&server, &json!([{"name": "p"}, {"name": "o"}]), "1h");
    let standing = [
        "InferenceModelRewrite: followed as inference.networking.x-k8s.io/v1alpha2",
        "InferenceObjective: forbidden",
    ];
    let old = r#"p inference/zz-old [] [("d", Some(9))]"#;
    let young = r#"p inference/young ["a"] [("b", None), ("c", Some(0))]"#;
    follows.is(&[standing[0], standing[1], old, young]).await;
    server.delete(OLD_REWRITES, "zz-old");
    follows.is(&[standing[0], standing[1], young]).await;
    // Labels and ports are no pool that an object could name, and nobody looks for one.
    let refused = server.refused(OBJECTIVES);
    Follows::start(
        &server,
        &json!([{"selector": {"app": "p"}, "ports": [80]}]),
        "1h",
    )
    .is(&[])
    .await;
    assert_eq!(server.refused(OBJECTIVES), refused);
    assert_eq!(server.violations(), [""; 0]);
}

/// Two pools that serve one model, behind one Envoy.
struct Site {
    deployment: Deployment,
    server: ApiServer,
}

impl Site {
    async fn start(specs: &[EngineSpec], more: Value) -> Self {
        let mut deployment = Deployment::engines(specs).await;
        let server = ApiServer::start().await;
        for (name, engine) in [("a", 0), ("b", 1)] {
            let port = deployment.engines[engine].address.port();
            server.put("inferencepools", pool(name, &json!({"app": name}), &[port]));
            server.put("pods", pod(name, "127.0.0.1", &json!({"app": name})));
        }
        let kubeconfig = deployment.run_dir.join("kubeconfig");
        std::fs::write(&kubeconfig, server.kubeconfig(TOKEN).to_string()).unwrap();
        let of =
            |name: &str| json!({"name": name, "worker": {"model": MODEL, "total_kv_blocks": 1000}});
        let mut own = telling(json!({
            "workers_file": null,
            "readiness": {"min_initial_workers": 2},
            "kubernetes": {"kubeconfig": kubeconfig, "look_again": "200ms", "pools": [of("a"), of("b")]},
            "confine": {"header": "x-pool", "rules": [
                {"pool": "a", "hosts": ["a.test"]}, {"pool": "b", "hosts": ["*.b.test"]}, {"pool": "b", "paths": ["/b"]},
            ]},
        }));
        own.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        deployment.start_router(&own).await.unwrap();
        let config = deployment.envoy_config();
        deployment.start_envoy(&config).await.unwrap();
        Self { deployment, server }
    }

    /// Lets Envoy say that every request is for a pool.
    async fn envoy_says(&mut self, pool: &str) {
        let filters = "          http_filters:\n";
        let says = format!(
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
        let config = config.replace(filters, &says);
        let config = config.replace(
            forwarded,
            "forwarding_namespaces: {untyped: [envoy.lb, warmroute]}",
        );
        self.deployment.start_envoy(&config).await.unwrap();
    }

    async fn ask(&self, headers: &[(&str, &str)], body: &Value) -> Answered {
        let mut request = self
            .deployment
            .http
            .post(self.deployment.url("/v1/completions"))
            .json(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Answered::read(request.send().await.unwrap()).await
    }

    /// Waits until a page of warmroute pleases.
    async fn cluster_shows(&self, what: &str) {
        let page = async || self.deployment.debug("cluster").await.unwrap().to_string();
        let shown = until(PATIENCE, async || page().await.contains(what)).await;
        assert!(shown, "{what}: {}", page().await);
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
async fn a_request_is_for_one_pool_by_its_host_its_path_or_a_header() {
    let mut site = Site::start(&[fast(1), fast(2)], json!({})).await;
    let (mut topic, mut engines) = (0, std::collections::BTreeSet::new());
    let cases: [(&[(&str, &str)], &str); 5] = [
        (&[("host", "a.test")], "1"),
        (&[("host", "A.test:80")], "1"),
        (&[("host", "x.b.test")], "2"),
        (&[("host", "a.test"), ("x-pool", "b")], "2"),
        (&[("host", "b.test"), ("x-pool", "a")], "1"),
    ];
    for (headers, engine) in cases {
        for _ in 0..4 {
            topic += 1;
            let answer = site.ask(headers, &completion(topic, Some(MODEL))).await;
            assert_eq!(
                (answer.status.as_u16(), answer.engine()),
                (200, engine),
                "{headers:?}"
            );
        }
    }
    for topic in 100..120 {
        engines.insert(
            site.ask(&[], &completion(topic, Some(MODEL)))
                .await
                .engine()
                .to_owned(),
        );
    }
    assert_eq!(engines.len(), 2, "nothing fits, so all are candidates");
    let refused = site
        .ask(&[("x-pool", "nobody")], &completion(1, Some(MODEL)))
        .await;
    assert_eq!(refused.status.as_u16(), 503);
    assert!(
        String::from_utf8_lossy(&refused.body).contains("no_eligible_worker"),
        "{refused:?}"
    );
    // Engines know no paths of that kind, so a gateway would take it away.
    let explained = async |path: &str, pool: &str| -> Value {
        let question =
            json!({"path": path, "headers": {"x-pool": pool}, "body": completion(1, Some(MODEL))});
        let url = site.deployment.admin_url(warmroute::admin::explain::PAGE);
        site.deployment
            .http
            .post(url)
            .json(&question)
            .send()
            .await
            .unwrap()
            .json()
            .await
            .unwrap()
    };
    let page = explained("/b/v1/completions", "").await;
    let excluded: Vec<&str> = page["phases"][0]["judged"]
        .as_array()
        .unwrap()
        .iter()
        .map(|judged| judged["excluded"].as_str().unwrap_or("nothing"))
        .collect();
    assert!(
        excluded.contains(&"is not of the pool `b`") && excluded.contains(&"nothing"),
        "{page}"
    );
    let page = explained("/v1/completions", "nobody").await;
    assert!(
        page["sentence"]
            .as_str()
            .unwrap()
            .contains("it is for the pool `nobody`"),
        "{page}"
    );
    // What Envoy says beside the headers beats all of it.
    site.envoy_says("b").await;
    for topic in 200..204 {
        let answer = site
            .ask(
                &[("host", "a.test"), ("x-pool", "a")],
                &completion(topic, Some(MODEL)),
            )
            .await;
        assert_eq!((answer.status.as_u16(), answer.engine()), (200, "2"));
    }
    site.deployment.idle().await;
    // Asked for again and again, and told once of each kind.
    let asked = async || OPTIONAL.iter().all(|kind| site.server.refused(kind) > 2);
    assert!(until(PATIENCE, asked).await);
    let log = site.deployment.router_log();
    assert_eq!(log.matches("forbidden").count(), 2, "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_are_served_by_others_as_the_objects_of_their_pool_say() {
    let site = Site::start(&[fast(1), fast(2)], json!({})).await;
    site.cluster_shows("forbidden").await;
    // The status, and the model that the answer names. The engines know no other model than theirs.
    let model = async |host: &str, asked: Option<&str>| -> (u16, Option<String>) {
        let answer = site.ask(&[("host", host)], &completion(1, asked)).await;
        let body: Value = serde_json::from_slice(&answer.body).unwrap();
        (
            answer.status.as_u16(),
            body["model"].as_str().map(str::to_owned),
        )
    };
    let (unknown, renamed) = ((404, None), (200, Some("chat".to_owned())));
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
    let rewritten = async || {
        site.deployment
            .metrics()
            .await
            .sum("rewritten_models_total", &[])
    };
    assert_eq!(rewritten().await, 2.0);
    // One for all, also for requests that name none, which have nothing to be called back.
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
async fn who_gives_way_is_refused_while_all_of_its_pool_are_overloaded() {
    let slow = |id| EngineSpec::new(id).with(&["--speed", "1"]);
    let site = Site::start(
        &[slow(1), fast(2)],
        json!({"overload": {"decode_blocks": 0.0005}}),
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
        .http
        .post(site.deployment.url("/v1/completions"))
        .header("host", "a.test")
        .json(&long);
    let held = held.send().await.unwrap();
    assert_eq!(held.status().as_u16(), 200);
    let busy = |page: &Page| page.sum("worker_active_decode_blocks", &[]) > 0.0;
    site.deployment
        .metrics_show("the worker is busy", busy)
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
            .ask(
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
        .ask(
            &[("host", "a.test"), (header, "batch")],
            &completion(3, Some(MODEL)),
        )
        .await;
    assert_eq!(answer.status.as_u16(), 200, "{answer:?}");
}
