use std::os::unix::fs::{MetadataExt, PermissionsExt};

use warmroute_core::worker::{BlockSize, WorkerId, WorkerRole};
use warmroute_metrics::OutcomeLabel;

use super::*;

fn worker(id: u64, endpoint: &str, role: WorkerRole) -> Worker {
    Worker {
        role,
        ..Worker::new(
            WorkerId(id),
            endpoint.parse().unwrap(),
            "m".into(),
            BlockSize::new(16).unwrap(),
        )
    }
}

#[test]
fn file_has_one_endpoint_per_address() {
    let fleet = [
        worker(u64::MAX, "10.0.0.2:8000", WorkerRole::Prefill),
        worker(1001, "10.0.0.1:8000", WorkerRole::Aggregated),
        worker(1, "10.0.0.1:8000", WorkerRole::Aggregated),
        worker(7, "[2001:db8::1]:8000", WorkerRole::Decode),
    ];
    let expected = r#"resources:
- "@type": 'type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment'
  cluster_name: 'workers'
  endpoints:
  - lb_endpoints:
    - endpoint:
        address:
          socket_address:
            address: '10.0.0.1'
            port_value: 8000
      metadata:
        filter_metadata:
          envoy.lb:
            worker_id:
            - '1'
            - '1001'
            role: 'aggregated'
            rank: '0'
    - endpoint:
        address:
          socket_address:
            address: '10.0.0.2'
            port_value: 8000
      metadata:
        filter_metadata:
          envoy.lb:
            worker_id: '18446744073709551615'
            role: 'prefill'
            rank: '0'
    - endpoint:
        address:
          socket_address:
            address: '2001:db8::1'
            port_value: 8000
      metadata:
        filter_metadata:
          envoy.lb:
            worker_id: '7'
            role: 'decode'
            rank: '0'
"#;
    assert_eq!(render(&fleet, "workers").unwrap(), expected);
}

#[test]
fn rendered_file_ignores_fleet_order() {
    let a = worker(1, "10.0.0.1:1", WorkerRole::Prefill);
    let b = worker(2, "10.0.0.2:1", WorkerRole::Decode);
    assert_eq!(
        render([&a, &b], "c").unwrap(),
        render([&b, &a], "c").unwrap()
    );
}

#[test]
fn empty_fleet_renders_empty_cluster() {
    assert!(render([], "workers").unwrap().contains("lb_endpoints: []"));
}

#[test]
fn cluster_name_is_always_quoted() {
    for name in ["true", "12", "a: b", "null", "~"] {
        let tree: Value = serde_saphyr::from_str(&render([], name).unwrap()).unwrap();
        assert_eq!(tree["resources"][0]["cluster_name"], name);
    }
}

#[test]
fn equal_text_does_not_replace_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run/eds.yaml");
    let metrics = Metrics::new();
    assert!(write(&path, "one", &metrics).unwrap());
    let first = std::fs::metadata(&path).unwrap();
    assert_eq!(first.permissions().mode() & 0o777, 0o644);
    assert!(!write(&path, "one", &metrics).unwrap());
    assert_eq!(std::fs::metadata(&path).unwrap().ino(), first.ino());
    assert!(write(&path, "two", &metrics).unwrap());
    assert_ne!(
        std::fs::metadata(&path).unwrap().ino(),
        first.ino(),
        "the file was written in place"
    );
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "two");
    assert_eq!(
        std::fs::read_dir(path.parent().unwrap()).unwrap().count(),
        1,
        "a temporary file is left"
    );
    let write_count = |outcome| {
        metrics
            .endpoints
            .file_writes
            .get_or_create(&OutcomeLabel { outcome })
            .get()
    };
    assert_eq!((write_count("written"), write_count("failed")), (2, 0));
}

#[test]
fn failed_write_is_counted_and_reported() {
    let directory = tempfile::tempdir().unwrap();
    let metrics = Metrics::new();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(write(&file.join("eds.yaml"), "one", &metrics).is_err());
    assert_eq!(
        metrics
            .endpoints
            .file_writes
            .get_or_create(&OutcomeLabel { outcome: "failed" })
            .get(),
        1
    );
}

#[test]
fn draining_worker_is_unhealthy_unless_address_is_shared() {
    let mut draining = worker(1, "10.0.0.1:8000", WorkerRole::Aggregated);
    draining.draining = true;
    let other = worker(2, "10.0.0.1:8000", WorkerRole::Aggregated);
    assert!(
        render([&draining], "workers")
            .unwrap()
            .contains("health_status: 'DRAINING'")
    );
    assert!(
        !render([&draining, &other], "workers")
            .unwrap()
            .contains("health_status")
    );
    assert!(
        !render([&other], "workers")
            .unwrap()
            .contains("health_status")
    );
}
