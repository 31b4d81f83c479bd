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

fn workers_of(
    pods: &[(String, Pod)],
    ports: &[u16],
    used: &mut HashSet<String>,
) -> (Vec<WorkerConfig>, Vec<String>) {
    workers_with_ids(pods, ports, used, WorkerIdSource::PodUid)
}

fn workers_with_ids(
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
    let spec = PoolWorkerSpec {
        ports: &ports,
        template: &template,
        pool: "inference/p",
        ids,
    };
    workers(&pods.iter().cloned().collect(), &spec, used)
}

fn workers_of_pod_with(change: impl FnOnce(&mut Value)) -> (Vec<WorkerConfig>, Vec<String>) {
    workers_of(&[pod("a", change)], &[8000], &mut HashSet::new())
}

fn dynamo_workers(
    change: impl FnOnce(&mut Value),
    ports: &[u16],
) -> (Vec<WorkerConfig>, Vec<String>) {
    let used = &mut HashSet::new();
    workers_with_ids(&[pod("u", change)], ports, used, WorkerIdSource::Dynamo)
}

#[test]
fn ready_pod_becomes_worker_with_topology() {
    let (workers, errors) = workers_of_pod_with(|pod| {
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
    let topology = [
        ("node", "node-1"),
        ("region", "eu"),
        ("zone", "of the template"),
    ];
    assert_eq!(
        worker.topology,
        topology
            .map(|(domain, value)| (domain.to_owned(), value.to_owned()))
            .into()
    );
    assert_eq!(
        worker.taints,
        ["engine=vllm", "pool=inference/p"]
            .map(str::to_owned)
            .into()
    );
    assert!(!worker.draining && errors.is_empty());
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
        assert_eq!(workers_of_pod_with(change), (Vec::new(), Vec::new()));
    }
}

/// Running requests of such a pod continue, so its worker stays.
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
    for (change, is_draining) in changes {
        let mut used = HashSet::new();
        assert_eq!(
            workers_of(&[pod("a", |_| {})], &[8000], &mut used).0.len(),
            1
        );
        let (workers, _) = workers_of(&[pod("a", change)], &[8000], &mut used);
        assert_eq!(
            workers
                .iter()
                .map(|worker| worker.draining)
                .collect::<Vec<_>>(),
            if is_draining { vec![true] } else { vec![] }
        );
        // A pod that never was a worker does not drain.
        assert_eq!(workers_of(&[pod("b", change)], &[8000], &mut used).0, []);
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
    let (workers, _) = workers_of(&[pod("a", |_| {})], &[8000, 8001, 8002], &mut used);
    assert_eq!(list(&workers), [(8000, 0), (8001, 1), (8002, 2)]);
    let ids: HashSet<_> = workers.iter().map(|worker| worker.id).collect();
    assert_eq!(ids.len(), 3);
    let two_active = |pod: &mut Value| {
        pod["metadata"]["annotations"] = json!({"llm-d.ai/active-ports": "8002, 8000"})
    };
    let ports = [8000, 8001, 8002];
    let (workers, errors) = workers_of(&[pod("a", two_active)], &ports, &mut used);
    assert_eq!(
        (list(&workers), errors),
        (vec![(8000, 0), (8002, 2)], vec![])
    );
    // The older annotation applies if the newer one is missing.
    let older = "inference.networking.k8s.io/active-ports";
    let old = |pod: &mut Value| pod["metadata"]["annotations"] = json!({older: "8001"});
    assert_eq!(
        list(&workers_of(&[pod("a", old)], &ports, &mut used).0),
        [(8001, 1)]
    );
    let both = |pod: &mut Value| {
        pod["metadata"]["annotations"] = json!({older: "8001", "llm-d.ai/active-ports": "8000"})
    };
    assert_eq!(
        list(&workers_of(&[pod("a", both)], &ports, &mut used).0),
        [(8000, 0)]
    );
    let wrong =
        |pod: &mut Value| pod["metadata"]["annotations"] = json!({"llm-d.ai/active-ports": "all"});
    let (workers, errors) = workers_of(&[pod("a", wrong)], &[8000, 8001], &mut used);
    assert!(
        workers.is_empty() && errors[0].contains("inference/vllm-a") && errors[0].contains("`all`"),
        "{errors:?}"
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
        let (workers, errors) =
            workers_of_pod_with(|pod| pod["metadata"]["labels"]["llm-d.ai/role"] = json!(label));
        assert_eq!(workers.first().map(|worker| worker.role), role);
        assert_eq!(errors.len(), usize::from(role.is_none()), "{errors:?}");
    }
    let with_worker_id = |ids: &'static str| {
        move |pod: &mut Value| pod["metadata"]["labels"]["warmroute.dev/worker-id"] = json!(ids)
    };
    let ids =
        |workers: &[WorkerConfig]| workers.iter().map(|worker| worker.id.0).collect::<Vec<_>>();
    assert_eq!(
        ids(&workers_of_pod_with(with_worker_id("18446744073709551615")).0),
        [u64::MAX]
    );
    assert_eq!(
        ids(&workers_of(
            &[pod("a", with_worker_id("7.9"))],
            &[1, 2],
            &mut HashSet::new()
        )
        .0),
        [7, 9]
    );
    for wrong in ["seven", "7.8", ""] {
        let (workers, errors) = workers_of_pod_with(with_worker_id(wrong));
        assert!(
            workers.is_empty() && errors.len() == 1,
            "{wrong}: {workers:?}"
        );
    }
}

#[test]
fn pod_worker_id_is_unique_and_stable() {
    let port = |port| NonZeroU16::new(port).unwrap();
    let uid = "6f1c1f5e-9a53-4d2a-8a51-0f3b1f6f7c11";
    // The id must not change in later versions.
    assert_eq!(worker_id(uid, port(8000)), WorkerId(PINNED));
    assert_ne!(worker_id(uid, port(8000)), worker_id(uid, port(8001)));
    assert_ne!(worker_id(uid, port(8000)), worker_id("another", port(8000)));
    assert!(worker_id(uid, port(8000)).0 < 1 << 53);
}

/// The expected values come from another implementation of SipHash-1-3 with zero keys, over the
/// name and the byte 0xff.
#[test]
fn dynamo_ids_come_from_names_unless_labeled() {
    for (name, id) in [
        ("a", 7_688_582_637_611_507),
        ("vllm-worker-0", 3_637_812_819_037_538),
        ("trtllm-decode-6d9f7c5b8-x2k4q", 2_906_008_963_344_362),
    ] {
        assert_eq!(dynamo_id(name), WorkerId(id));
        let named = |pod: &mut Value| pod["metadata"]["name"] = json!(name);
        let (workers, errors) = dynamo_workers(named, &[8000]);
        assert_eq!((workers[0].id, errors), (WorkerId(id), vec![]));
    }
    let with_worker_id =
        |pod: &mut Value| pod["metadata"]["labels"]["warmroute.dev/worker-id"] = json!("7");
    let (workers, _) = dynamo_workers(with_worker_id, &[8000]);
    assert_eq!(workers[0].id, WorkerId(7));
    let (workers, errors) = dynamo_workers(|_| {}, &[8000, 8001]);
    assert!(
        workers.is_empty() && errors[0].contains("it has 2 ports"),
        "{errors:?}"
    );
}

/// Worker id of the pod in `pod_worker_id_is_unique_and_stable`.
const PINNED: u64 = 7_322_531_667_002_998;
