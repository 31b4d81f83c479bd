//! Health services and the shutdown sequence.

use std::time::{Duration, Instant};

use serde_json::json;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus::{self, NotServing, Serving};
use tonic_health::pb::health_client::HealthClient;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::support::process::WarmrouteProcess;

/// Health services that depend on readiness.
const READY: [&str; 5] = [
    "",
    "inference-extension",
    "readiness",
    "envoy.service.ext_proc.v3.ExternalProcessor",
    "warmroute.v1.Router",
];

async fn assert_health(process: &WarmrouteProcess, port: u16, name: &str, expected: ServingStatus) {
    let status = process.health(port, name).await.unwrap();
    assert_eq!(status, Some(expected), "{name} on {port}");
}

/// Waits until a health service is serving.
async fn wait_serving(process: &WarmrouteProcess, port: u16, name: &str) {
    let is_serving = async || matches!(process.health(port, name).await, Ok(Some(Serving)));
    assert!(until(PATIENCE, is_serving).await, "{}", process.log());
}

fn assert_deadline_exceeded(process: &WarmrouteProcess, expected: bool) {
    let log = process.log();
    assert_eq!(log.contains("drain deadline exceeded"), expected, "{log}");
}

#[tokio::test]
async fn health_serves_probe_names_on_both_ports() {
    let process = WarmrouteProcess::start(json!({}), &[]).await;
    for port in [process.grpc, process.health] {
        for name in READY.into_iter().chain(["liveness"]) {
            assert_health(&process, port, name, Serving).await;
        }
        assert_health(&process, port, "draining", NotServing).await;
        assert_eq!(process.health(port, "unknown").await.unwrap(), None);
    }
}

#[tokio::test]
async fn health_port_opens_first() {
    // The process never becomes ready, because it requires more workers.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("workers.yaml");
    std::fs::write(&file, "- {id: 1, endpoint: '10.0.0.1:80'}\n").unwrap();
    let more = json!({
        "workers": {"file": file, "list": null},
        "process": {"readiness": {"min_workers": 2}},
    });
    let process = WarmrouteProcess::spawn(&more, &[]);
    wait_serving(&process, process.health, "liveness").await;
    for name in READY {
        assert_health(&process, process.health, name, NotServing).await;
    }
    // A watch of the health service receives the change.
    let mut client = HealthClient::new(process.channel(process.health).await);
    let watch = HealthCheckRequest {
        service: "inference-extension".to_owned(),
    };
    let mut updates = client.watch(watch).await.unwrap().into_inner();
    assert_eq!(
        updates.message().await.unwrap().unwrap().status(),
        NotServing
    );
    std::fs::write(
        &file,
        "- {id: 1, endpoint: '10.0.0.1:80'}\n- {id: 2, endpoint: '10.0.0.2:80'}\n",
    )
    .unwrap();
    let next = async {
        loop {
            if updates.message().await.unwrap().unwrap().status() == Serving {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, next)
        .await
        .expect("the watch received no update");
}

/// Opens an exchange on a new connection, and one on an existing connection.
async fn assert_exchanges_are_served(process: &WarmrouteProcess, channel: Channel) {
    let (mut fresh, steered) = process.open(process.channel(process.grpc).await, "m").await;
    assert!(steered.contains("10.0.0.1:8000"), "{steered}");
    fresh.assert_reply().await;
    let (mut known, _) = process.open(channel, "m").await;
    known.assert_reply().await;
}

#[tokio::test]
async fn sigterm_ends_health_but_serves_until_grace_ends() {
    let drain = json!({"grace_period": "15s", "timeout": "60s"});
    let process = WarmrouteProcess::start(json!({"process": {"drain": drain}}), &[]).await;
    let channel = process.channel(process.grpc).await;
    let (mut long, _) = process.open(channel.clone(), "m").await;
    let signalled = Instant::now();
    process.terminate();
    wait_serving(&process, process.grpc, "draining").await;
    for port in [process.grpc, process.health] {
        for name in READY {
            assert_health(&process, port, name, NotServing).await;
        }
        assert_health(&process, port, "liveness", Serving).await;
    }
    assert_eq!(process.get("/readyz").await.0, 503);
    assert_eq!(process.metric("ready").await, 0.0);
    assert_exchanges_are_served(&process, channel).await;
    assert!(
        signalled.elapsed() < Duration::from_secs(15),
        "the machine is too slow for this test: {:?}",
        signalled.elapsed()
    );
    // A health watch must not delay the shutdown.
    let mut watcher = HealthClient::new(process.channel(process.grpc).await);
    let watched = watcher
        .watch(HealthCheckRequest {
            service: String::new(),
        })
        .await
        .unwrap();
    let refused = async || process.health(process.grpc, "").await.is_err();
    assert!(
        until(PATIENCE, refused).await,
        "still accepting:\n{}",
        process.log()
    );
    let grace = signalled.elapsed();
    assert!(grace >= Duration::from_millis(14_900), "{grace:?}");
    // The open exchange continues, and the health service still responds.
    long.assert_reply().await;
    assert_health(&process, process.health, "liveness", Serving).await;
    assert!(process.child.is_running());
    drop(long);
    process.assert_exit_success().await;
    assert_deadline_exceeded(&process, false);
    drop(watched);
}

#[tokio::test]
async fn draining_process_serves_until_successor_has_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("ext_proc.sock");
    let more = json!({
        "listeners": {"ext_proc": {"unix_socket": socket}},
        "process": {"drain": {"grace_period": "300ms", "timeout": "10m"}},
    });
    let process = WarmrouteProcess::start(more, &[]).await;
    // A successor holds this lock while it loads its tokenizers.
    let lock = std::fs::File::create(dir.path().join("ext_proc.sock.successor")).unwrap();
    lock.lock_shared().unwrap();
    let signalled = Instant::now();
    process.terminate();
    let after_grace = async || signalled.elapsed() > Duration::from_secs(2);
    assert!(until(PATIENCE, after_grace).await);
    let (mut fresh, _) = process.open(process.channel(process.grpc).await, "m").await;
    fresh.assert_reply().await;
    drop(fresh);
    drop(lock);
    process.assert_exit_success().await;
    assert_deadline_exceeded(&process, false);
}

#[tokio::test]
async fn second_signal_ends_grace_period() {
    let process =
        WarmrouteProcess::start(json!({"process": {"drain": {"grace_period": "10m"}}}), &[]).await;
    process.terminate();
    wait_serving(&process, process.grpc, "draining").await;
    process.terminate();
    process.assert_exit_success().await;
}

#[tokio::test]
async fn drain_deadline_aborts_open_exchanges() {
    let process = WarmrouteProcess::start(
        json!({"process": {"drain": {"grace_period": "100ms", "timeout": "300ms"}}}),
        &[],
    )
    .await;
    let (open, _) = process.open(process.channel(process.grpc).await, "m").await;
    process.terminate();
    process.assert_exit_success().await;
    assert_deadline_exceeded(&process, true);
    drop(open);
}
