//! Kubernetes discovery against a small fake API server. The fake injects faults that a real API
//! server does not produce on demand. One end-to-end test adds, changes and deletes pods under a
//! steady load, with a real Envoy that is configured by xDS. `tests/apiserver` covers the behaviour
//! that a real API server can show.

mod faults;
mod kubectl;
mod load;
mod requests;
mod scale;

use std::sync::Arc;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;
use warmroute::kubernetes;
use warmroute_core::worker::{BlockSize, Worker};
use warmroute_metrics::Metrics;
use warmroute_server::fleet::discovery::WorkerModel;
use warmroute_server::fleet::discovery::kubernetes::KubernetesConfig;
use warmroute_testbed::ports::until;

use crate::source_health::wait_source_up;
use crate::support::api_server::{ApiServer, TOKEN};
use crate::support::deployment::PATIENCE;

/// Returns a ready pod.
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

/// Background task that discovers the workers of pools.
struct KubernetesFollower {
    fleets: watch::Receiver<Option<Vec<Worker>>>,
    metrics: Arc<Metrics>,
    task: tokio::task::JoinHandle<()>,
    _dir: TempDir,
}

impl Drop for KubernetesFollower {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl KubernetesFollower {
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
        let config = json!({"pools": pools, "kubeconfig": kubeconfig, "watch_timeout": "1s"});
        let config: KubernetesConfig = serde_json::from_value(config).unwrap();
        let (fleet_tx, fleets) = watch::channel(None);
        let metrics = Arc::new(Metrics::new());
        let models = vec![WorkerModel {
            name: "m".into(),
            block_size: BlockSize::new(16).unwrap(),
            uses_bootstrap: false,
        }];
        let task_metrics = metrics.clone();
        let task = tokio::spawn(async move {
            kubernetes::watch(config, models, task_metrics, |fleet| {
                _ = fleet_tx.send_replace(Some(fleet))
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

    /// Returns name and endpoint of each worker, followed by `-` if it is draining.
    fn fleet(&self) -> Option<Vec<String>> {
        let describe = |worker: &Worker| {
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
        let mut fleet: Vec<String> = self
            .fleets
            .borrow()
            .as_ref()?
            .iter()
            .map(describe)
            .collect();
        fleet.sort();
        Some(fleet)
    }

    async fn wait_for(&self, fleet: &[&str]) {
        let found = until(PATIENCE, async || {
            self.fleet().is_some_and(|found| found == fleet)
        })
        .await;
        assert!(found, "{:?}, not {fleet:?}", self.fleet());
    }

    async fn up_is(&self, source: &str, up: i64) {
        wait_source_up(&self.metrics, source, up).await;
    }
}
