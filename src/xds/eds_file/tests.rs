use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::*;
use crate::worker::{BlockSize, Role, WorkerId};

fn worker(id: u64, endpoint: &str, role: Role) -> Worker {
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
fn the_file_has_one_endpoint_per_address_with_text_ids() {
    let fleet = [
        worker(u64::MAX, "10.0.0.2:8000", Role::Prefill),
        worker(1001, "10.0.0.1:8000", Role::Aggregated),
        worker(1, "10.0.0.1:8000", Role::Aggregated),
        worker(7, "[2001:db8::1]:8000", Role::Decode),
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
fn the_text_is_the_same_whatever_the_order_of_the_fleet() {
    let (a, b) = (
        worker(1, "10.0.0.1:1", Role::Prefill),
        worker(2, "10.0.0.2:1", Role::Decode),
    );
    assert_eq!(
        render([&a, &b], "c").unwrap(),
        render([&b, &a], "c").unwrap()
    );
}

#[test]
fn an_empty_fleet_is_a_cluster_without_endpoints() {
    assert!(render([], "workers").unwrap().contains("lb_endpoints: []"));
}

#[test]
fn a_cluster_name_that_looks_like_something_else_stays_text() {
    for name in ["true", "12", "a: b", "null", "~"] {
        let tree: serde_json::Value = serde_saphyr::from_str(&render([], name).unwrap()).unwrap();
        assert_eq!(
            tree["resources"][0]["cluster_name"],
            serde_json::json!(name)
        );
    }
}

#[test]
fn a_write_replaces_the_file_and_an_equal_text_leaves_it_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run/eds.yaml");
    let metrics = Metrics::new();
    assert_eq!(write(&path, "one", &metrics).unwrap(), Written::Replaced);
    let first = std::fs::metadata(&path).unwrap();
    assert_eq!(first.permissions().mode() & 0o777, 0o644);
    assert_eq!(write(&path, "one", &metrics).unwrap(), Written::Unchanged);
    assert_eq!(std::fs::metadata(&path).unwrap().ino(), first.ino());
    assert_eq!(write(&path, "two", &metrics).unwrap(), Written::Replaced);
    assert_ne!(
        std::fs::metadata(&path).unwrap().ino(),
        first.ino(),
        "Envoy sees renames only"
    );
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "two");
    assert_eq!(
        std::fs::read_dir(path.parent().unwrap()).unwrap().count(),
        1,
        "no temporary file is left"
    );
    let writes = |outcome| {
        metrics
            .endpoint_file_writes
            .get_or_create(&OutcomeLabel { outcome })
            .get()
    };
    assert_eq!((writes("written"), writes("failed")), (2, 0));
}

#[test]
fn a_write_that_cannot_be_done_is_counted_and_reported() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = Metrics::new();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(write(&file.join("eds.yaml"), "one", &metrics).is_err());
    assert_eq!(
        metrics
            .endpoint_file_writes
            .get_or_create(&OutcomeLabel { outcome: "failed" })
            .get(),
        1
    );
}

#[test]
fn envoy_leaves_workers_alone_that_drain_unless_others_share_their_address() {
    let mut draining = worker(1, "10.0.0.1:8000", Role::Aggregated);
    draining.draining = true;
    let other = worker(2, "10.0.0.1:8000", Role::Aggregated);
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
