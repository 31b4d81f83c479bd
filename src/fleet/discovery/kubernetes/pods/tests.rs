//! Mapping of pods to workers.

use serde_json::{Value, json};

use super::*;

fn pod(uid: &str, change: impl FnOnce(&mut Value)) -> (String, Pod) {
    let mut object = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": format!("vllm-{uid}"), "namespace": "inference", "uid": uid, "labels": {"app": "vllm"}},
        "spec": {"nodeName": "node-1", "containers": [{"name": "engine"}]},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "podIPs": [{"ip": "10.0.0.1"}],
            "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True"}],
        },
    });
    change(&mut object);
    (uid.to_owned(), serde_json::from_value(object).unwrap())
}

fn found(
    pods: &[(String, Pod)],
    ports: &[u16],
    used: &mut HashSet<String>,
) -> (Vec<WorkerConfig>, Vec<String>) {
    found_as(pods, ports, used, WorkerIdSource::PodUid)
}

fn found_as(
    pods: &[(String, Pod)],
    ports: &[u16],
    used: &mut HashSet<String>,
    ids: WorkerIdSource,
) -> (Vec<WorkerConfig>, Vec<String>) {
    let ports: Vec<_> = ports
        .iter()
        .map(|port| NonZeroU16::new(*port).unwrap())
        .collect();
    let template = TemplateConfig {
        topology: [("zone".to_owned(), "of the template".to_owned())].into(),
        ..Default::default()
    };
    let labels = LabelsConfig::default();
    let like = PoolWorkerSpec {
        ports: &ports,
        template: &template,
        labels: &labels,
        pool: "inference/p",
        ids,
    };
    workers(&pods.iter().cloned().collect(), &like, used)
}

fn alone(change: impl FnOnce(&mut Value)) -> (Vec<WorkerConfig>, Vec<String>) {
    found(&[pod("a", change)], &[8000], &mut HashSet::new())
}

#[test]
fn ready_pod_becomes_worker_with_topology() {
    let (workers, odd) = alone(|pod| {
        pod["metadata"]["labels"]["topology.kubernetes.io/region"] = json!("eu");
        pod["metadata"]["labels"]["topology.kubernetes.io/zone"] = json!("eu-1");
        pod["metadata"]["labels"]["llm-d.ai/engine-type"] = json!("vllm");
    });
    let [worker] = &workers[..] else {
        panic!("{workers:?}")
    };
    assert_eq!(
        (worker.endpoint.to_string().as_str(), worker.role),
        ("10.0.0.1:8000", WorkerRole::Aggregated)
    );
    assert_eq!(worker.name.as_deref(), Some("inference/vllm-a"));
    let places = [
        ("node", "node-1"),
        ("region", "eu"),
        ("zone", "of the template"),
    ];
    assert_eq!(
        worker.topology,
        places
            .map(|(domain, value)| (domain.to_owned(), value.to_owned()))
            .into()
    );
    assert_eq!(
        worker.taints,
        ["engine=vllm", "pool=inference/p"]
            .map(str::to_owned)
            .into()
    );
    assert!(!worker.draining && odd.is_empty());
}

#[test]
fn only_running_ready_pods_become_workers() {
    let changes: [fn(&mut Value); 6] = [
        |pod| pod["status"]["conditions"][1]["status"] = json!("False"),
        |pod| pod["status"]["conditions"] = json!([]),
        |pod| pod["status"]["phase"] = json!("Pending"),
        |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-11-22T10:00:00Z"),
        |pod| pod["status"]["podIP"] = Value::Null,
        |pod| pod["status"] = Value::Null,
    ];
    for change in changes {
        assert_eq!(alone(change), (Vec::new(), Vec::new()));
    }
}

/// Running requests continue, so its cache and its requests are retained.
#[test]
fn unready_running_pod_drains() {
    type Case = (fn(&mut Value), bool);
    let changes: [Case; 4] = [
        (
            |pod| pod["status"]["conditions"][1]["status"] = json!("False"),
            true,
        ),
        (
            |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-11-22T10:00:00Z"),
            true,
        ),
        (|pod| pod["status"]["phase"] = json!("Succeeded"), false),
        (|pod| pod["status"]["podIP"] = Value::Null, false),
    ];
    for (change, stays) in changes {
        let mut used = HashSet::new();
        assert_eq!(found(&[pod("a", |_| {})], &[8000], &mut used).0.len(), 1);
        let (workers, _) = found(&[pod("a", change)], &[8000], &mut used);
        assert_eq!(
            workers
                .iter()
                .map(|worker| worker.draining)
                .collect::<Vec<_>>(),
            if stays { vec![true] } else { vec![] }
        );
        // A pod that never was a worker does not drain.
        assert_eq!(found(&[pod("b", change)], &[8000], &mut used).0, []);
        assert!(used.is_empty());
    }
}

#[test]
fn each_active_port_is_one_rank() {
    let list = |workers: &[WorkerConfig]| -> Vec<(u16, u32)> {
        workers
            .iter()
            .map(|worker| (worker.endpoint.0.port(), worker.data_parallel.start))
            .collect()
    };
    let mut used = HashSet::new();
    let (workers, _) = found(&[pod("a", |_| {})], &[8000, 8001, 8002], &mut used);
    assert_eq!(list(&workers), [(8000, 0), (8001, 1), (8002, 2)]);
    let ids: HashSet<_> = workers.iter().map(|worker| worker.id).collect();
    assert_eq!(ids.len(), 3);
    let some = |pod: &mut Value| {
        pod["metadata"]["annotations"] = json!({"llm-d.ai/active-ports": "8002, 8000"})
    };
    let (workers, odd) = found(&[pod("a", some)], &[8000, 8001, 8002], &mut used);
    assert_eq!((list(&workers), odd), (vec![(8000, 0), (8002, 2)], vec![]));
    // The older annotation applies if the newer one is missing.
    let older = "inference.networking.k8s.io/active-ports";
    let old = |pod: &mut Value| pod["metadata"]["annotations"] = json!({older: "8001"});
    assert_eq!(
        list(&found(&[pod("a", old)], &[8000, 8001, 8002], &mut used).0),
        [(8001, 1)]
    );
    let both = |pod: &mut Value| {
        pod["metadata"]["annotations"] = json!({older: "8001", "llm-d.ai/active-ports": "8000"})
    };
    assert_eq!(
        list(&found(&[pod("a", both)], &[8000, 8001, 8002], &mut used).0),
        [(8000, 0)]
    );
    let wrong =
        |pod: &mut Value| pod["metadata"]["annotations"] = json!({"llm-d.ai/active-ports": "all"});
    let (workers, odd) = found(&[pod("a", wrong)], &[8000, 8001], &mut used);
    assert!(
        workers.is_empty() && odd[0].contains("inference/vllm-a") && odd[0].contains("`all`"),
        "{odd:?}"
    );
}

#[test]
fn labels_set_role_and_worker_id() {
    let cases = [
        ("prefill", Some(WorkerRole::Prefill)),
        ("decode", Some(WorkerRole::Decode)),
        ("both", Some(WorkerRole::Aggregated)),
        ("encode-prefill-decode", Some(WorkerRole::Aggregated)),
        ("encode", None),
    ];
    for (label, role) in cases {
        let (workers, odd) = alone(|pod| pod["metadata"]["labels"]["llm-d.ai/role"] = json!(label));
        assert_eq!(workers.first().map(|worker| worker.role), role);
        assert_eq!(odd.len(), usize::from(role.is_none()), "{odd:?}");
    }
    let told = |ids: &'static str| {
        move |pod: &mut Value| pod["metadata"]["labels"]["warmroute.dev/worker-id"] = json!(ids)
    };
    let ids =
        |workers: &[WorkerConfig]| workers.iter().map(|worker| worker.id.0).collect::<Vec<_>>();
    assert_eq!(ids(&alone(told("18446744073709551615")).0), [u64::MAX]);
    assert_eq!(
        ids(&found(&[pod("a", told("7.9"))], &[1, 2], &mut HashSet::new()).0),
        [7, 9]
    );
    for wrong in ["seven", "7.8", ""] {
        let (workers, odd) = alone(told(wrong));
        assert!(workers.is_empty() && odd.len() == 1, "{wrong}: {workers:?}");
    }
}

#[test]
fn pod_worker_id_is_unique_and_stable() {
    let port = |port| NonZeroU16::new(port).unwrap();
    let uid = "6f1c1f5e-9a53-4d2a-8a51-0f3b1f6f7c11";
    // The id must be equal on all replicas and in later versions.
    assert_eq!(worker_id(uid, port(8000)), WorkerId(PINNED));
    assert_ne!(worker_id(uid, port(8000)), worker_id(uid, port(8001)));
    assert_ne!(worker_id(uid, port(8000)), worker_id("another", port(8000)));
    assert!(worker_id(uid, port(8000)).0 < 1 << 53);
}

/// Expected values from another implementation of SipHash-1-3 with zero keys, over the name and a
/// byte of ones.
#[test]
fn dynamo_ids_come_from_names_unless_labeled() {
    for (name, id) in [
        ("a", 7_688_582_637_611_507),
        ("vllm-worker-0", 3_637_812_819_037_538),
        ("trtllm-decode-6d9f7c5b8-x2k4q", 2_906_008_963_344_362),
    ] {
        assert_eq!(dynamo_id(name), WorkerId(id));
        let named = |pod: &mut Value| pod["metadata"]["name"] = json!(name);
        let (workers, odd) = found_as(
            &[pod("u", named)],
            &[8000],
            &mut HashSet::new(),
            WorkerIdSource::Dynamo,
        );
        assert_eq!((workers[0].id, odd), (WorkerId(id), vec![]));
    }
    let told = |pod: &mut Value| pod["metadata"]["labels"]["warmroute.dev/worker-id"] = json!("7");
    assert_eq!(
        found_as(
            &[pod("u", told)],
            &[8000],
            &mut HashSet::new(),
            WorkerIdSource::Dynamo
        )
        .0[0]
            .id,
        WorkerId(7)
    );
    let (workers, odd) = found_as(
        &[pod("u", |_| {})],
        &[8000, 8001],
        &mut HashSet::new(),
        WorkerIdSource::Dynamo,
    );
    assert!(
        workers.is_empty() && odd[0].contains("it has 2 ports"),
        "{odd:?}"
    );
}

const PINNED: u64 = 7_322_531_667_002_998;
