//! Kubernetes discovery against a small fake API server. The fake rejects requests for a
//! moment, which a real API server does not on demand. One end-to-end test adds, changes and deletes pods under a
//! steady load, with a real Envoy that is configured by xDS. `tests/apiserver` covers the behaviour
//! that a real API server can show.

mod faults;
mod load;
mod requests;

use serde_json::{Value, json};

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
