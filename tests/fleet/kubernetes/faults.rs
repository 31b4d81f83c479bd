//! Faults that a real API server does not produce on demand: requests without a response, outages
//! behind a load balancer, a missing verb, malformed objects, and replaced credentials.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use warmroute::kubernetes;
use warmroute_metrics::SourceLabel;
use warmroute_server::fleet::discovery::kubernetes::KubernetesConfig;
use warmroute_testbed::ports::until;

use super::{KubernetesFollower, pod, pool};
use crate::kubernetes::requests::{self, OBJECTIVES, REWRITES, object, objective, rewrite};
use crate::support::api_server::{ApiServer, TOKEN};
use crate::support::deployment::PATIENCE;

const SOURCE: &str = "kubernetes app=vllm";

fn selected() -> Value {
    json!([{"selector": {"app": "vllm"}, "ports": [8000]}])
}

fn vllm(name: &str, ip: &str) -> Value {
    pod(name, ip, &json!({"app": "vllm"}))
}

/// Asserts that `discovery_up` has this value throughout the period.
async fn up_stays(follows: &KubernetesFollower, up: i64, period: Duration) {
    let label = SourceLabel {
        source: SOURCE.into(),
    };
    let end = tokio::time::Instant::now() + period;
    while tokio::time::Instant::now() < end {
        assert_eq!(
            follows
                .metrics
                .workers
                .discovery_up
                .get_or_create(&label)
                .get(),
            up
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_api_server_clears_discovery_up() {
    let server = ApiServer::start().await;
    server.put("pods", vllm("a", "10.0.0.1"));
    let follows = KubernetesFollower::start(&server, &selected());
    follows.wait_for(&["a 10.0.0.1:8000"]).await;
    follows.up_is(SOURCE, 1).await;
    // The next watch gets no response, not even headers.
    server.freeze();
    follows.up_is(SOURCE, 0).await;
    assert_eq!(follows.fleet().unwrap(), ["a 10.0.0.1:8000"]);
    server.put("pods", vllm("b", "10.0.0.2"));
    server.thaw();
    follows
        .wait_for(&["a 10.0.0.1:8000", "b 10.0.0.2:8000"])
        .await;
    follows.up_is(SOURCE, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unavailable_api_server_is_reported_and_retried() {
    let server = ApiServer::start().await;
    server.put("pods", vllm("a", "10.0.0.1"));
    let follows = KubernetesFollower::start(&server, &selected());
    follows.wait_for(&["a 10.0.0.1:8000"]).await;
    follows.up_is(SOURCE, 1).await;
    server.fail_with(Some((503, 2)));
    let before = server.requests();
    follows.up_is(SOURCE, 0).await;
    up_stays(&follows, 0, Duration::from_secs(5)).await;
    // `Retry-After` is 2 s, plus jitter.
    let requests = server.requests() - before;
    assert!(
        (2..=4).contains(&requests),
        "{requests} requests within 5 s"
    );
    server.put("pods", vllm("b", "10.0.0.2"));
    server.fail_with(None);
    let found = async || follows.fleet().is_some_and(|fleet| fleet.len() == 2);
    assert!(
        until(Duration::from_secs(10), found).await,
        "retried too late"
    );
    follows.up_is(SOURCE, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forbidden_watch_backs_off_and_is_not_up() {
    let server = ApiServer::start().await;
    server.put("pods", vllm("a", "10.0.0.1"));
    server.forbid_watch("pods", true);
    let follows = KubernetesFollower::start(&server, &selected());
    follows.wait_for(&["a 10.0.0.1:8000"]).await;
    up_stays(&follows, 0, Duration::from_secs(4)).await;
    assert!(server.lists() <= 9, "{} lists within 4 s", server.lists());
    // warmroute still lists the objects, at a low rate.
    server.put("pods", vllm("b", "10.0.0.2"));
    follows
        .wait_for(&["a 10.0.0.1:8000", "b 10.0.0.2:8000"])
        .await;
    server.forbid_watch("pods", false);
    follows.up_is(SOURCE, 1).await;
    server.put("pods", vllm("c", "10.0.0.3"));
    follows
        .wait_for(&["a 10.0.0.1:8000", "b 10.0.0.2:8000", "c 10.0.0.3:8000"])
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_watch_lists_objects_again() {
    let mut server = ApiServer::start().await;
    server.put("pods", vllm("a", "10.0.0.1"));
    let follows = KubernetesFollower::start(&server, &selected());
    follows.wait_for(&["a 10.0.0.1:8000"]).await;
    follows.up_is(SOURCE, 1).await;
    server.stop().await;
    server.put("pods", vllm("b", "10.0.0.2"));
    server.compact();
    let lists = server.lists();
    server.resume().await;
    follows
        .wait_for(&["a 10.0.0.1:8000", "b 10.0.0.2:8000"])
        .await;
    assert_eq!(server.lists() - lists, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_lists_back_off_and_are_not_up() {
    let server = ApiServer::start().await;
    server.put("pods", vllm("a", "10.0.0.1"));
    let follows = KubernetesFollower::start(&server, &selected());
    follows.wait_for(&["a 10.0.0.1:8000"]).await;
    follows.up_is(SOURCE, 1).await;
    // The watch ends, and every list fails with 410 as well.
    server.fail_with(Some((410, 0)));
    follows.up_is(SOURCE, 0).await;
    let before = server.requests();
    up_stays(&follows, 0, Duration::from_secs(3)).await;
    let requests = server.requests() - before;
    assert!(requests <= 8, "{requests} requests within 3 s");
    server.fail_with(None);
    follows.up_is(SOURCE, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_pod_is_left_out() {
    let server = ApiServer::start().await;
    server.put(
        "inferencepools",
        pool("p", &json!({"app": "vllm"}), &[8000]),
    );
    server.put("pods", vllm("a", "10.0.0.1"));
    // The API server accepts such an address.
    server.put("pods", vllm("odd", "010.000.001.007"));
    let follows = KubernetesFollower::start(&server, &json!([{"name": "p"}]));
    follows.wait_for(&["a 10.0.0.1:8000"]).await;
    server.put("pods", vllm("b", "10.0.0.2"));
    follows
        .wait_for(&["a 10.0.0.1:8000", "b 10.0.0.2:8000"])
        .await;
    server.change("pods", "b", |pod| {
        pod["status"]["podIP"] = json!("10.0.0.256")
    });
    server.put("pods", vllm("c", "10.0.0.3"));
    follows
        .wait_for(&["a 10.0.0.1:8000", "c 10.0.0.3:8000"])
        .await;
    server.change("pods", "odd", |pod| {
        pod["status"]["podIP"] = json!("10.0.1.7")
    });
    follows
        .wait_for(&["a 10.0.0.1:8000", "c 10.0.0.3:8000", "odd 10.0.1.7:8000"])
        .await;
    follows.up_is("kubernetes p", 1).await;
    // If a pool becomes unreadable, warmroute keeps its last selector.
    server.change("inferencepools", "p", |pool| {
        pool["spec"]["targetPorts"] = json!([{"number": 80_000}])
    });
    follows.up_is("kubernetes p", 0).await;
    assert_eq!(follows.fleet().unwrap().len(), 3);
    server.change("inferencepools", "p", |pool| {
        pool["spec"]["targetPorts"] = json!([{"number": 8001}])
    });
    follows
        .wait_for(&["a 10.0.0.1:8001", "c 10.0.0.3:8001", "odd 10.0.1.7:8001"])
        .await;
    follows.up_is("kubernetes p", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quiet_cluster_advances_success_timestamp() {
    let server = ApiServer::start().await;
    server.put("pods", vllm("a", "10.0.0.1"));
    let follows = KubernetesFollower::start(&server, &selected());
    follows.up_is(SOURCE, 1).await;
    let label = SourceLabel {
        source: SOURCE.into(),
    };
    let timestamp = || {
        follows
            .metrics
            .workers
            .discovery_last_success_timestamp_seconds
            .get_or_create(&label)
            .get()
    };
    let before = timestamp();
    assert!(
        until(PATIENCE, async || timestamp() > before + 2.0).await,
        "the timestamp stays at {before}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn object_without_spec_is_left_out() {
    let server = ApiServer::start().await;
    let mut empty = object(OBJECTIVES, "empty", "2026-01-01", &json!({}));
    empty.as_object_mut().unwrap().remove("spec");
    server.put(OBJECTIVES, empty);
    server.put(
        OBJECTIVES,
        object(OBJECTIVES, "gold", "2026-01-01", &objective("p", 5)),
    );
    let mut no_rules = object(REWRITES, "empty", "2026-01-01", &json!({}));
    no_rules.as_object_mut().unwrap().remove("spec");
    server.put(REWRITES, no_rules);
    let targets = json!([{"modelRewrite": "b"}]);
    server.put(
        REWRITES,
        object(
            REWRITES,
            "canary",
            "2026-01-01",
            &rewrite("p", &["a"], &targets),
        ),
    );
    server.forbid(OBJECTIVES, false);
    server.forbid(REWRITES, false);
    let follows = requests::RuleFollower::start(&server, &json!([{"name": "p"}]), "1h");
    let rewrites = "InferenceModelRewrite: watched as llm-d.ai/v1alpha2";
    let objectives = "InferenceObjective: watched as llm-d.ai/v1alpha2";
    let canary = r#"p inference/canary ["a"] [("b", None)]"#;
    follows
        .wait_for(&[rewrites, objectives, "p gold 5", canary])
        .await;
    let page = serde_json::to_string(&*follows.rules.borrow()).unwrap();
    assert!(
        page.contains("InferenceObjective inference/empty cannot be read"),
        "{page}"
    );
    assert!(page.contains("missing field `spec`"), "{page}");
    server.change(OBJECTIVES, "gold", |object| {
        object["spec"]["priority"] = json!(7)
    });
    follows
        .wait_for(&[rewrites, objectives, "p gold 7", canary])
        .await;
}

/// A restarted API server responds with 403 until its caches are filled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn momentary_403_does_not_suspend_objectives() {
    let mut server = ApiServer::start().await;
    server.put(
        OBJECTIVES,
        object(OBJECTIVES, "gold", "2026-01-01", &objective("p", 5)),
    );
    server.forbid(OBJECTIVES, false);
    let follows = requests::RuleFollower::start(&server, &json!([{"name": "p"}]), "1h");
    let rewrites = "InferenceModelRewrite: forbidden";
    let objectives = "InferenceObjective: watched as llm-d.ai/v1alpha2";
    follows.wait_for(&[rewrites, objectives, "p gold 5"]).await;
    server.stop().await;
    server.forbid(OBJECTIVES, true);
    server.resume().await;
    let refused = server.refused(OBJECTIVES);
    assert!(until(PATIENCE, async || server.refused(OBJECTIVES) > refused + 1).await);
    server.change(OBJECTIVES, "gold", |object| {
        object["spec"]["priority"] = json!(7)
    });
    server.forbid(OBJECTIVES, false);
    follows.wait_for(&[rewrites, objectives, "p gold 7"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objectives_without_right_to_watch_are_reported() {
    let server = ApiServer::start().await;
    server.put(
        OBJECTIVES,
        object(OBJECTIVES, "gold", "2026-01-01", &objective("p", 5)),
    );
    server.forbid(OBJECTIVES, false);
    server.forbid_watch(OBJECTIVES, true);
    let follows = requests::RuleFollower::start(&server, &json!([{"name": "p"}]), "1h");
    let page = || serde_json::to_string(&*follows.rules.borrow()).unwrap();
    assert!(
        until(PATIENCE, async || page().contains("needs the verb `watch`")).await,
        "{}",
        page()
    );
    assert!(
        page().contains("gold") && !page().contains("watched as"),
        "{}",
        page()
    );
    let requests = server.requests();
    tokio::time::sleep(Duration::from_secs(3)).await;
    // The count includes the requests for the forbidden InferenceModelRewrites.
    assert!(
        server.requests() - requests <= 24,
        "{} requests within 3 s",
        server.requests() - requests
    );
    server.forbid_watch(OBJECTIVES, false);
    assert!(
        until(PATIENCE, async || page()
            .contains("watched as llm-d.ai/v1alpha2"))
        .await,
        "{}",
        page()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_are_used_without_any_watch() {
    let server = ApiServer::start().await;
    server.put(
        OBJECTIVES,
        object(OBJECTIVES, "gold", "2026-01-01", &objective("p", 5)),
    );
    for kind in [OBJECTIVES, REWRITES] {
        server.forbid(kind, false);
        server.forbid_watch(kind, true);
    }
    let follows = requests::RuleFollower::start(&server, &json!([{"name": "p"}]), "1h");
    let rewrites = "InferenceModelRewrite: listed as llm-d.ai/v1alpha2, and not watched";
    let objectives = "InferenceObjective: listed as llm-d.ai/v1alpha2, and not watched";
    follows.wait_for(&[rewrites, objectives, "p gold 5"]).await;
    server.change(OBJECTIVES, "gold", |object| {
        object["spec"]["priority"] = json!(7)
    });
    follows.wait_for(&[rewrites, objectives, "p gold 7"]).await;
}

/// warmroute starts before the caches of the API server are filled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn momentary_403_at_start_is_retried() {
    let server = ApiServer::start().await;
    server.put(
        OBJECTIVES,
        object(OBJECTIVES, "gold", "2026-01-01", &objective("p", 5)),
    );
    let follows = requests::RuleFollower::start(&server, &json!([{"name": "p"}]), "1h");
    let rewrites = "InferenceModelRewrite: forbidden";
    follows
        .wait_for(&[rewrites, "InferenceObjective: forbidden"])
        .await;
    server.forbid(OBJECTIVES, false);
    follows
        .wait_for(&[
            rewrites,
            "InferenceObjective: watched as llm-d.ai/v1alpha2",
            "p gold 5",
        ])
        .await;
}

/// Kubeconfig that refers to files for the token and the certificate authority.
struct ClientCredentials {
    dir: TempDir,
}

impl ClientCredentials {
    fn new(server: &ApiServer) -> Self {
        let credentials = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        credentials.write("token", &format!("{TOKEN}\n"));
        credentials.write("ca.crt", &server.authority());
        credentials
    }

    /// Replaces a file atomically, as a kubelet does.
    fn write(&self, name: &str, content: &str) {
        let temporary = self.dir.path().join("temporary");
        std::fs::write(&temporary, content).unwrap();
        std::fs::rename(&temporary, self.path(name)).unwrap();
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn kubeconfig(&self, server: &ApiServer) -> Value {
        let mut kubeconfig = server.kubeconfig(TOKEN);
        kubeconfig["users"][0]["user"] = json!({"tokenFile": self.path("token")});
        kubeconfig["clusters"][0]["cluster"] = json!({"server": format!("https://{}", server.address), "certificate-authority": self.path("ca.crt")});
        kubeconfig
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_token_and_authority_take_effect_within_seconds() {
    let mut server = ApiServer::start().await;
    server.put("pods", vllm("a", "10.0.0.1"));
    let credentials = ClientCredentials::new(&server);
    let follows = KubernetesFollower::start_with(&credentials.kubeconfig(&server), &selected());
    // The token file ends in a newline.
    follows.wait_for(&["a 10.0.0.1:8000"]).await;
    server.set_token("the-next-token");
    server.put("pods", vllm("b", "10.0.0.2"));
    follows.up_is(SOURCE, 0).await;
    server.put("pods", vllm("c", "10.0.0.3"));
    credentials.write("token", "the-next-token");
    let found = async |count: usize| {
        let found = async || follows.fleet().is_some_and(|fleet| fleet.len() == count);
        until(Duration::from_secs(10), found).await
    };
    assert!(found(3).await, "the new token is not in use");
    server.stop().await;
    server.replace_certificate();
    server.put("pods", vllm("d", "10.0.0.4"));
    server.resume().await;
    follows.up_is(SOURCE, 0).await;
    credentials.write("ca.crt", &server.authority());
    assert!(found(4).await, "the new authority is not in use");
    follows.up_is(SOURCE, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_name_cause_and_origin() {
    let mut server = ApiServer::start().await;
    let credentials = ClientCredentials::new(&server);
    let config = |path: &Path| -> KubernetesConfig {
        let pools = json!([{"name": "p"}]);
        serde_json::from_value(json!({"pools": pools, "kubeconfig": path})).unwrap()
    };
    let kubeconfig = credentials.path("config");
    std::fs::write(&kubeconfig, credentials.kubeconfig(&server).to_string()).unwrap();
    let config = config(&kubeconfig);
    let check = async |parts: &[&str]| {
        let error = kubernetes::list_workers(&config, &[]).await.unwrap_err();
        let text = format!("{error:#}");
        assert!(
            parts.iter().all(|part| text.contains(part)),
            "{text}: not {parts:?}"
        );
    };
    let address = server.address.to_string();
    server.uninstall("inferencepools", true);
    check(&[
        "InferencePool of inference.networking.k8s.io/v1 is not installed",
        &address,
    ])
    .await;
    server.uninstall("inferencepools", false);
    server.forbid("inferencepools", true);
    check(&[
        "403",
        "the verb `list` for inferencepools",
        "namespace inference",
    ])
    .await;
    credentials.write("token", "another-token");
    check(&["401", credentials.path("token").to_str().unwrap()]).await;
    credentials.write("token", "\n");
    check(&["is empty", credentials.path("token").to_str().unwrap()]).await;
    credentials.write("token", TOKEN);
    let authority = server.authority();
    server.stop().await;
    server.replace_certificate();
    server.resume().await;
    check(&[
        "certificate",
        credentials.path("ca.crt").to_str().unwrap(),
        &address,
    ])
    .await;
    credentials.write("ca.crt", "no certificate");
    check(&[
        "contains no certificate",
        credentials.path("ca.crt").to_str().unwrap(),
    ])
    .await;
    credentials.write("ca.crt", &authority);
    server.stop().await;
    check(&["Connection refused", &address]).await;
}

/// Runs `warmroute doctor`. Returns its exit code and findings.
async fn doctor(dir: &Path, kubeconfig: &Value, pools: &Value) -> (i32, Vec<Value>) {
    std::fs::write(dir.join("config"), kubeconfig.to_string()).unwrap();
    let config = json!({
        "listeners": {"ext_proc": {"address": "127.0.0.1:1", "unix_socket": null}},
        "models": [{"name": "m"}],
        "workers": {"kubernetes": {"kubeconfig": dir.join("config"), "pools": pools}},
    });
    std::fs::write(dir.join("warmroute.yaml"), config.to_string()).unwrap();
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_warmroute"));
    let output = command
        .args([
            "doctor",
            "--json",
            "--no-canary",
            "--timeout",
            "2s",
            "--config",
        ])
        .arg(dir.join("warmroute.yaml"))
        .output()
        .await
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let page: Value = serde_json::from_slice(&output.stdout).expect(&text);
    (
        output.status.code().unwrap(),
        page["findings"].as_array().unwrap().clone(),
    )
}

#[track_caller]
fn has(findings: &[Value], level: &str, subject: &str, text: &str) {
    // The subject may continue with the address of the pod.
    let names_subject = |found: &str| found.split(" at ").next() == Some(subject);
    let found = findings.iter().any(|one| {
        one["level"] == level
            && names_subject(one["subject"].as_str().unwrap())
            && format!(
                "{} {}",
                one["message"].as_str().unwrap(),
                one["fix"].as_str().unwrap_or_default()
            )
            .contains(text)
    });
    assert!(
        found,
        "no {level} of {subject} with {text:?}: {findings:#?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doctor_reports_each_kubernetes_fault() {
    let mut server = ApiServer::start().await;
    server.put(
        "inferencepools",
        pool("p", &json!({"app": "vllm"}), &[8000]),
    );
    server.put("pods", vllm("a", "127.0.0.1"));
    let mut starting = vllm("starting", "10.0.0.2");
    starting["status"]["conditions"][1] =
        json!({"type": "Ready", "status": "False", "reason": "ContainersNotReady"});
    server.put("pods", starting);
    server.put(
        "pods",
        pod(
            "encoder",
            "10.0.0.3",
            &json!({"app": "vllm", "llm-d.ai/role": "encode"}),
        ),
    );
    server.put("pods", vllm("odd", "010.000.001.007"));
    let dir = tempfile::tempdir().unwrap();
    let pools = json!([{"name": "p"}, {"name": "absent"}]);
    let (code, findings) = doctor(dir.path(), &server.kubeconfig(TOKEN), &pools).await;
    assert_eq!(code, 2);
    assert_pods_are_reported(&findings);
    server.forbid_watch("pods", true);
    server.forbid("inferencepools", true);
    let (code, findings) = doctor(dir.path(), &server.kubeconfig(TOKEN), &pools).await;
    assert_eq!(code, 2);
    has(&findings, "error", "pool p", "add the verb to the Role");
    has(
        &findings,
        "error",
        "pool p",
        "may not watch pods, list inferencepools.inference.networking.k8s.io, watch",
    );
    let (code, findings) = doctor(dir.path(), &server.kubeconfig("another-token"), &pools).await;
    assert_eq!(code, 2);
    has(&findings, "error", "pool p", "401 Unauthorized");
    server.freeze();
    let started_at = tokio::time::Instant::now();
    let (code, findings) = doctor(dir.path(), &server.kubeconfig(TOKEN), &pools).await;
    assert_eq!(code, 2);
    has(&findings, "error", "pool p", "no answer within 2 s");
    assert!(
        started_at.elapsed() < Duration::from_secs(10),
        "{:?}",
        started_at.elapsed()
    );
    server.stop().await;
    let (code, findings) = doctor(dir.path(), &server.kubeconfig(TOKEN), &pools).await;
    assert_eq!(code, 2);
    has(&findings, "error", "pool p", "Connection refused");
    has(&findings, "skipped", "Envoy", "no admin address");
}

/// Asserts the findings about the four pods and the absent pool.
fn assert_pods_are_reported(findings: &[Value]) {
    has(findings, "ok", "pool p", "4 pods, 1 worker");
    has(
        findings,
        "warning",
        "pool p",
        "1 of 4 pods not ready: inference/starting: its condition Ready is False (Contain",
    );
    has(
        findings,
        "warning",
        "pool p",
        "pod inference/encoder: its role `encode`",
    );
    has(
        findings,
        "warning",
        "pool p",
        "pod inference/odd cannot be read",
    );
    has(findings, "ok", "pool p", "may list and watch");
    has(
        findings,
        "error",
        "pool absent",
        "there is no such InferencePool",
    );
    // The remaining checks run as well, and name the pods.
    has(
        findings,
        "error",
        "pod inference/a",
        "the ports of the pool p",
    );
    has(findings, "skipped", "Envoy", "no admin address");
}
