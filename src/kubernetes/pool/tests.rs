//! Pods of a pool after lists and watch events.

use serde_json::json;

use super::*;
use crate::kubernetes::store::ReceivedObject;

fn pod(uid: &str) -> ReceivedObject<Pod> {
    let status = json!({
        "phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}],
    });
    let object = json!({"metadata": {"uid": uid, "name": uid}, "spec": {}, "status": status});
    ReceivedObject::parse(&object.to_string())
}

fn names(pods: &mut PoolPods) -> Option<Vec<String>> {
    let config: PodsConfig =
        serde_saphyr::from_str("{selector: {app: vllm}, ports: [8000]}").unwrap();
    let membership = PoolMembership::from_config(&config).unwrap();
    let (workers, _) = pods.workers(&membership, &config)?;
    Some(
        workers
            .into_iter()
            .filter_map(|worker| worker.name)
            .collect(),
    )
}

#[test]
fn lists_replace_pods_and_events_change_them() {
    let mut pods = PoolPods::default();
    assert_eq!(names(&mut pods), None);
    pods.apply(ObjectChange::Listed(vec![pod("a"), pod("b")]));
    assert_eq!(names(&mut pods).unwrap(), ["/a", "/b"]);
    pods.apply(ObjectChange::Applied(pod("c")));
    pods.apply(ObjectChange::Deleted("a".to_owned()));
    assert_eq!(names(&mut pods).unwrap(), ["/b", "/c"]);
    pods.apply(ObjectChange::Listed(vec![pod("d")]));
    assert_eq!(names(&mut pods).unwrap(), ["/d"]);
    assert!(pods.clear(), "workers are removed");
    assert_eq!(names(&mut pods).unwrap(), [""; 0]);
    let mut unlisted = PoolPods::default();
    assert!(!unlisted.clear());
    assert_eq!(names(&mut unlisted), None, "no pods were listed");
}

#[test]
fn inference_pool_sets_selector_and_ports() {
    let object = json!({
        "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
        "metadata": {"name": "p", "namespace": "n"},
        "spec": {
            "selector": {"matchLabels": {"app": "vllm", "tier": "gold"}},
            "targetPorts": [{"number": 8000}, {"number": 8001}],
            "appProtocol": "kubernetes.io/h2c",
            "endpointPickerRef": {"name": "warmroute", "port": {"number": 9002}},
        },
        "status": {"parents": []},
    });
    let pool: InferencePool = serde_json::from_value(object.clone()).unwrap();
    let membership = PoolMembership::from_pool(&pool).unwrap();
    assert_eq!(membership.label_selector(), "app=vllm,tier=gold");
    assert_eq!(
        membership
            .ports
            .iter()
            .map(|port| port.get())
            .collect::<Vec<_>>(),
        [8000, 8001]
    );
    let mut without_selector = object;
    without_selector["spec"]["selector"] = json!({"matchLabels": {}});
    assert_eq!(
        PoolMembership::from_pool(&serde_json::from_value(without_selector).unwrap()),
        None
    );
}
