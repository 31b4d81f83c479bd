//! Kubernetes objects as JSON.

use anyhow::Context as _;
use serde_json::{Value, json};

/// Name of the InferencePool of the shipped manifests, and value of the `app` label of its pods.
pub(crate) const POOL: &str = "vllm-qwen";

pub(crate) fn engine_labels() -> Value {
    json!({"app": POOL})
}

/// Returns a pod without a status. It is assigned to a node, so that it is deleted with a grace
/// period.
pub(crate) fn pod(name: &str, labels: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"nodeName": "node-1", "containers": [{"name": "engine", "image": "engine", "ports": [{"containerPort": 8000}]}]},
    })
}

/// Returns the status of a pod as a kubelet writes it.
pub(crate) fn running(ips: &[&str], is_ready: bool) -> Value {
    let all: Vec<Value> = ips.iter().map(|ip| json!({"ip": ip})).collect();
    let ready = if is_ready { "True" } else { "False" };
    json!({"status": {
        "phase": "Running", "podIP": ips.first(), "podIPs": all,
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}],
    }})
}

pub(crate) fn inference_pool(name: &str, labels: &Value, ports: &[u16]) -> Value {
    let ports: Vec<Value> = ports.iter().map(|port| json!({"number": port})).collect();
    json!({
        "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels}, "targetPorts": ports,
            "endpointPickerRef": {"kind": "Service", "name": "warmroute", "port": {"number": 9002}},
        },
    })
}

pub(crate) fn objective(api: &str, name: &str, priority: i64) -> Value {
    json!({
        "apiVersion": api, "kind": "InferenceObjective", "metadata": {"name": name},
        "spec": {"priority": priority, "poolRef": {"name": POOL}},
    })
}

pub(crate) fn rewrite(name: &str, model: &str, target: &str) -> Value {
    json!({
        "apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceModelRewrite", "metadata": {"name": name},
        "spec": {
            "poolRef": {"name": POOL},
            "rules": [{"matches": [{"model": {"type": "Exact", "value": model}}], "targets": [{"modelRewrite": target}]}],
        },
    })
}

/// Returns the objects of a manifest, moved into a namespace.
pub(crate) fn manifest(text: &str, namespace: &str) -> anyhow::Result<Vec<Value>> {
    let documents = text
        .split("\n---\n")
        .filter(|document| document.contains("kind:"));
    let object = |document: &str| -> anyhow::Result<Value> {
        let mut object: Value =
            serde_saphyr::from_str(document).context("a manifest is not YAML")?;
        object["metadata"]["namespace"] = json!(namespace);
        for subject in object
            .get_mut("subjects")
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            subject["namespace"] = json!(namespace);
        }
        Ok(object)
    };
    documents.map(object).collect()
}
