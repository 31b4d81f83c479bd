//! Discovery by Kubernetes against a small API server that is strict and can fail, and once the whole way: pods that come, move
//! and go under a steady load, with a real Envoy that is told by xDS.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "../examples/support/mod.rs"]
mod support;

#[path = "envoy_e2e/deployment.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod deployment;
#[path = "kubernetes/faults.rs"]
mod faults;
#[path = "kubernetes/kubectl.rs"]
mod kubectl;
#[path = "kubernetes/load.rs"]
mod load;
#[path = "envoy_e2e/openmetrics.rs"]
mod openmetrics;
#[path = "kubernetes/requests.rs"]
mod requests;
#[path = "kubernetes/scale.rs"]
mod scale;
#[path = "kubernetes/server.rs"]
mod server;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;
use warmroute::discovery::ServedModel;
use warmroute::discovery::kubernetes::{self, KubernetesConfig};
use warmroute::metrics::{Metrics, SourceLabel};
use warmroute::worker::{BlockSize, Role, Worker};

use deployment::PATIENCE;
use server::{ApiServer, TOKEN};
use support::ports::until;

/// A pod that is ready.
fn pod(name: &str, ip: &str, labels: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "inference", "uid": format!("uid-of-{name}"), "labels": labels},
        "spec": {"nodeName": "node-1", "containers": [{"name": "engine", "ports": [{"containerPort": 8000}]}]},
        "status": {
            "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
            "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}],
        },
    })
}

fn pool(name: &str, labels: &Value, ports: &[u16]) -> Value {
    let ports: Vec<Value> = ports.iter().map(|port| json!({"number": port})).collect();
    json!({
        "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "inference", "uid": format!("uid-of-{name}")},
        "spec": {"selector": {"matchLabels": labels}, "targetPorts": ports, "endpointPickerRef": {"name": "warmroute"}},
    })
}

fn ready(pod: &mut Value, ready: bool) {
    pod["status"]["conditions"][1]["status"] = json!(if ready { "True" } else { "False" });
}

/// Follows pools in the background.
struct Follows {
    fleets: watch::Receiver<Option<Vec<Worker>>>,
    metrics: Arc<Metrics>,
    task: tokio::task::JoinHandle<()>,
    _dir: TempDir,
}

impl Drop for Follows {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Follows {
    fn start(server: &ApiServer, pools: &Value) -> Self {
        Self::start_as(server, pools, TOKEN)
    }

    fn start_as(server: &ApiServer, pools: &Value, token: &str) -> Self {
        Self::start_with(&server.kubeconfig(token), pools)
    }

    fn start_with(content: &Value, pools: &Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = dir.path().join("config");
        std::fs::write(&kubeconfig, content.to_string()).unwrap();
        let config = json!({"pools": pools, "kubeconfig": kubeconfig, "silence": "1s"});
        let config: KubernetesConfig = serde_json::from_value(config).unwrap();
        let (told, fleets) = watch::channel(None);
        let metrics = Arc::new(Metrics::new());
        let models = vec![ServedModel { name: "m".into(), block_size: BlockSize::new(16).unwrap(), meets: false }];
        let of_task = metrics.clone();
        let task = tokio::spawn(async move {
            kubernetes::watch(config, models, of_task, |fleet| _ = told.send_replace(Some(fleet))).await.unwrap();
        });
        Self { fleets, metrics, task, _dir: dir }
    }

    /// Name, endpoint, and a `-` for who drains.
    fn fleet(&self) -> Option<Vec<String>> {
        let title = |worker: &Worker| {
            let name = worker.name.as_deref().unwrap_or_default().trim_start_matches("inference/");
            format!("{name} {}{}", worker.endpoint, if worker.draining { " -" } else { "" })
        };
        let mut fleet: Vec<String> = self.fleets.borrow().as_ref()?.iter().map(title).collect();
        fleet.sort();
        Some(fleet)
    }

    async fn is(&self, fleet: &[&str]) {
        let found = until(PATIENCE, async || self.fleet().is_some_and(|found| found == fleet)).await;
        assert!(found, "{:?}, not {fleet:?}", self.fleet());
    }

    async fn up_is(&self, source: &str, up: i64) {
        let label = SourceLabel { source: source.to_owned() };
        let is = async || self.metrics.discovery_up.get_or_create(&label).get() == up;
        assert!(until(PATIENCE, is).await, "{source} is not {up}");
    }

    fn ids(&self) -> BTreeMap<String, u64> {
        let fleet = self.fleets.borrow();
        fleet.iter().flatten().map(|worker| (worker.endpoint.to_string(), worker.id.0)).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_come_change_and_go() {
    let server = ApiServer::start().await;
    server.put("inferencepools", pool("p", &json!({"app": "vllm"}), &[8000]));
    server.put("pods", pod("a", "10.0.0.1", &json!({"app": "vllm"})));
    server.put("pods", pod("other", "10.0.0.9", &json!({"app": "other"})));
    let follows = Follows::start(&server, &json!([{"name": "p"}]));
    follows.is(&["a 10.0.0.1:8000"]).await;
    follows.up_is("kubernetes p", 1).await;
    // One that is not ready yet, and is.
    let mut b = pod("b", "10.0.0.2", &json!({"app": "vllm", "llm-d.ai/role": "decode"}));
    ready(&mut b, false);
    server.put("pods", b);
    server.put("pods", pod("c", "2001:db8::3", &json!({"app": "vllm"})));
    follows.is(&["a 10.0.0.1:8000", "c [2001:db8::3]:8000"]).await;
    server.change("pods", "b", |pod| ready(pod, true));
    follows.is(&["a 10.0.0.1:8000", "b 10.0.0.2:8000", "c [2001:db8::3]:8000"]).await;
    let role = |name: &str| {
        let fleet = follows.fleets.borrow();
        fleet.as_ref().unwrap().iter().find(|worker| worker.name.as_deref() == Some(name)).unwrap().role
    };
    assert_eq!(role("inference/b"), Role::Decode);
    // Its role changes, it fails its probe, it ends, it is gone.
    server.change("pods", "b", |pod| pod["metadata"]["labels"]["llm-d.ai/role"] = json!("prefill"));
    assert!(until(PATIENCE, async || role("inference/b") == Role::Prefill).await);
    server.change("pods", "a", |pod| ready(pod, false));
    server.change("pods", "b", |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-11-22T10:00:00Z"));
    follows.is(&["a 10.0.0.1:8000 -", "b 10.0.0.2:8000 -", "c [2001:db8::3]:8000"]).await;
    server.change("pods", "a", |pod| ready(pod, true));
    server.delete("pods", "b");
    follows.is(&["a 10.0.0.1:8000", "c [2001:db8::3]:8000"]).await;
    // Relabelled out of the pool, which looks like the end of it; and into it.
    server.change("pods", "c", |pod| pod["metadata"]["labels"] = json!({"app": "other"}));
    server.change("pods", "other", |pod| pod["metadata"]["labels"] = json!({"app": "vllm"}));
    follows.is(&["a 10.0.0.1:8000", "other 10.0.0.9:8000"]).await;
    assert_eq!(server.violations(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_workers_of_dynamo_are_known_by_their_own_ids() {
    let server = ApiServer::start().await;
    server.put("inferencepools", pool("p", &json!({"app": "vllm"}), &[8000]));
    server.put("pods", pod("vllm-worker-0", "10.0.0.1", &json!({"app": "vllm"})));
    server.put("pods", pod("told", "10.0.0.2", &json!({"app": "vllm", "warmroute.dev/worker-id": "7"})));
    let follows = Follows::start(&server, &json!([{"name": "p", "ids": "dynamo"}]));
    follows.is(&["told 10.0.0.2:8000", "vllm-worker-0 10.0.0.1:8000"]).await;
    assert_eq!(follows.ids()["10.0.0.1:8000"], 3_637_812_819_037_538);
    assert_eq!(follows.ids()["10.0.0.2:8000"], 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_changes_its_ports_and_its_selector_and_leaves() {
    let server = ApiServer::start().await;
    server.put("inferencepools", pool("p", &json!({"app": "vllm"}), &[8000]));
    server.put("pods", pod("a", "10.0.0.1", &json!({"app": "vllm"})));
    server.put("pods", pod("b", "10.0.0.2", &json!({"app": "sglang"})));
    let follows = Follows::start(&server, &json!([{"name": "p", "worker": {"kv_events": {"port": 5557}}}]));
    follows.is(&["a 10.0.0.1:8000"]).await;
    let ids = follows.ids();
    server.change("inferencepools", "p", |pool| {
        pool["spec"]["targetPorts"] = json!([{"number": 8000}, {"number": 8001}])
    });
    follows.is(&["a 10.0.0.1:8000", "a 10.0.0.1:8001"]).await;
    assert_eq!(follows.ids()["10.0.0.1:8000"], ids["10.0.0.1:8000"]);
    let events = |follows: &Follows| -> Vec<String> {
        let fleet = follows.fleets.borrow();
        fleet.iter().flatten().map(|worker| worker.event_sources[0].endpoint.clone()).collect()
    };
    assert_eq!(events(&follows), ["tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"]);
    server.change("pods", "a", |pod| pod["metadata"]["annotations"] = json!({"llm-d.ai/active-ports": "8001"}));
    follows.is(&["a 10.0.0.1:8001"]).await;
    server.change("inferencepools", "p", |pool| pool["spec"]["selector"]["matchLabels"] = json!({"app": "sglang"}));
    follows.is(&["b 10.0.0.2:8000", "b 10.0.0.2:8001"]).await;
    server.delete("inferencepools", "p");
    follows.is(&[]).await;
    follows.up_is("kubernetes p", 0).await;
    server.put("inferencepools", pool("p", &json!({"app": "vllm"}), &[8001]));
    follows.is(&["a 10.0.0.1:8001"]).await;
    follows.up_is("kubernetes p", 1).await;
    assert_eq!(server.violations(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_that_is_away_changes_nothing_and_comes_back_with_410() {
    let mut server = ApiServer::start().await;
    server.put("pods", pod("a", "10.0.0.1", &json!({"app": "vllm"})));
    server.put("pods", pod("b", "10.0.0.2", &json!({"app": "vllm"})));
    let follows = Follows::start(&server, &json!([{"selector": {"app": "vllm"}, "ports": [8000]}]));
    follows.is(&["a 10.0.0.1:8000", "b 10.0.0.2:8000"]).await;
    let ids = follows.ids();
    server.stop().await;
    follows.up_is("kubernetes app=vllm", 0).await;
    server.delete("pods", "a");
    server.put("pods", pod("c", "10.0.0.3", &json!({"app": "vllm"})));
    server.compact();
    assert_eq!(follows.fleet().unwrap().len(), 2, "the last good fleet");
    let lists = server.lists();
    server.resume().await;
    follows.is(&["b 10.0.0.2:8000", "c 10.0.0.3:8000"]).await;
    follows.up_is("kubernetes app=vllm", 1).await;
    assert!(server.lists() > lists, "what was missed could only be listed");
    assert_eq!(follows.ids()["10.0.0.2:8000"], ids["10.0.0.2:8000"]);
    // The same while the server is there.
    server.compact();
    server.put("pods", pod("d", "10.0.0.4", &json!({"app": "vllm"})));
    follows.is(&["b 10.0.0.2:8000", "c 10.0.0.3:8000", "d 10.0.0.4:8000"]).await;
    assert_eq!(server.violations(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_has_died_in_silence_is_begun_anew() {
    let server = ApiServer::start().await;
    server.put("pods", pod("a", "10.0.0.1", &json!({"app": "vllm"})));
    let follows = Follows::start(&server, &json!([{"selector": {"app": "vllm"}, "ports": [8000]}]));
    follows.is(&["a 10.0.0.1:8000"]).await;
    // What the list did not tell, a watch has to: so there is one.
    server.put("pods", pod("b", "10.0.0.2", &json!({"app": "vllm"})));
    follows.is(&["a 10.0.0.1:8000", "b 10.0.0.2:8000"]).await;
    server.kill_watches();
    server.put("pods", pod("c", "10.0.0.3", &json!({"app": "vllm"})));
    follows.is(&["a 10.0.0.1:8000", "b 10.0.0.2:8000", "c 10.0.0.3:8000"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_missing_or_forbidden_is_waited_for() {
    let server = ApiServer::start().await;
    server.uninstall("inferencepools", true);
    server.forbid("pods", true);
    server.put("pods", pod("a", "10.0.0.1", &json!({"app": "vllm"})));
    server.put("pods", pod("b", "10.0.0.2", &json!({"app": "sglang"})));
    let pools = json!([{"name": "p"}, {"selector": {"app": "sglang"}, "ports": [9000]}]);
    let follows = Follows::start(&server, &pools);
    follows.up_is("kubernetes p", 0).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(follows.fleet(), None);
    server.forbid("pods", false);
    // One pool is no reason to wait for the other.
    follows.is(&["b 10.0.0.2:9000"]).await;
    server.uninstall("inferencepools", false);
    server.put("inferencepools", pool("p", &json!({"app": "vllm"}), &[8000]));
    follows.is(&["a 10.0.0.1:8000", "b 10.0.0.2:9000"]).await;
    assert_eq!(server.violations(), [""; 0]);
    let stranger =
        Follows::start_as(&server, &json!([{"selector": {"app": "vllm"}, "ports": [8000]}]), "another-token");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(stranger.fleet(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_pods_are_read_page_by_page_and_an_odd_one_harms_no_other() {
    let server = ApiServer::start().await;
    for number in 0..1_203 {
        let ip = format!("10.0.{}.{}", number / 250, number % 250 + 1);
        server.put("pods", pod(&format!("pod-{number:04}"), &ip, &json!({"app": "vllm"})));
    }
    // An address that another has already, and a role that nobody knows.
    server.put("pods", pod("zz-twin", "10.0.0.1", &json!({"app": "vllm"})));
    server.put("pods", pod("zz-odd", "10.9.9.9", &json!({"app": "vllm", "llm-d.ai/role": "encode"})));
    let follows = Follows::start(&server, &json!([{"selector": {"app": "vllm"}, "ports": [8000]}]));
    let count = || follows.fleet().map_or(0, |fleet| fleet.len());
    assert!(until(PATIENCE, async || count() == 1_203).await, "{}", count());
    assert!(server.lists() >= 3, "pages");
    let ids: std::collections::BTreeSet<u64> = follows.ids().into_values().collect();
    assert_eq!(ids.len(), 1_203);
}
