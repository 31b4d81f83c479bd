//! Discovery by Kubernetes against a small API server that fails in ways in which a real one cannot be made to fail at will, and once
//! the whole way: pods that come, move and go under a steady load, with a real Envoy that is configured by xDS. What a real API server
//! can show is in `tests/apiserver.rs`.

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

use std::sync::Arc;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;
use warmroute::discovery::ServedModel;
use warmroute::discovery::kubernetes::{self, KubernetesConfig};
use warmroute::metrics::{Metrics, SourceLabel};
use warmroute::worker::{BlockSize, Worker};

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
        let models = vec![ServedModel {
            name: "m".into(),
            block_size: BlockSize::new(16).unwrap(),
            meets: false,
        }];
        let of_task = metrics.clone();
        let task = tokio::spawn(async move {
            kubernetes::watch(config, models, of_task, |fleet| {
                _ = told.send_replace(Some(fleet))
            })
            .await
            .unwrap();
        });
        Self {
            fleets,
            metrics,
            task,
            _dir: dir,
        }
    }

    /// Name, endpoint, and a `-` for who drains.
    fn fleet(&self) -> Option<Vec<String>> {
        let title = |worker: &Worker| {
            let name = worker
                .name
                .as_deref()
                .unwrap_or_default()
                .trim_start_matches("inference/");
            format!(
                "{name} {}{}",
                worker.endpoint,
                if worker.draining { " -" } else { "" }
            )
        };
        let mut fleet: Vec<String> = self.fleets.borrow().as_ref()?.iter().map(title).collect();
        fleet.sort();
        Some(fleet)
    }

    async fn is(&self, fleet: &[&str]) {
        let found = until(PATIENCE, async || {
            self.fleet().is_some_and(|found| found == fleet)
        })
        .await;
        assert!(found, "{:?}, not {fleet:?}", self.fleet());
    }

    async fn up_is(&self, source: &str, up: i64) {
        let label = SourceLabel {
            source: source.to_owned(),
        };
        let is = async || self.metrics.discovery_up.get_or_create(&label).get() == up;
        assert!(until(PATIENCE, is).await, "{source} is not {up}");
    }
}
