//! Health services and the shutdown sequence.

use std::time::{Duration, Instant};

use serde_json::json;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus::{NotServing, Serving};
use tonic_health::pb::health_client::HealthClient;
use warmroute_testbed::ports::until;

use crate::support::process::{SOON, WarmrouteProcess};

/// Health services that depend on readiness.
const READY: [&str; 5] = [
    "",
    "inference-extension",
    "readiness",
    "envoy.service.ext_proc.v3.ExternalProcessor",
    "warmroute.v1.Router",
];

#[tokio::test]
async fn health_serves_probe_names_on_both_ports() {
    let process = WarmrouteProcess::start(json!({}), &[]).await;
    for port in [process.grpc, process.health] {
        for name in READY.into_iter().chain(["liveness"]) {
            assert_eq!(
                process.health(port, name).await.unwrap(),
                Some(Serving),
                "{name} on {port}"
            );
        }
        assert_eq!(
            process.health(port, "draining").await.unwrap(),
            Some(NotServing)
        );
        assert_eq!(process.health(port, "unknown").await.unwrap(), None);
    }
}

#[tokio::test]
async fn health_port_opens_first() {
    // The process never becomes ready, because it requires more workers.
    let more = json!({
        "workers": {"file": "workers.yaml", "list": null},
        "process": {"readiness": {"min_workers": 2}},
    });
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("workers.yaml");
    std::fs::write(&file, "- {id: 1, endpoint: '10.0.0.1:80'}\n").unwrap();
    let mut more = more;
    more["workers"]["file"] = json!(file);
    let process = WarmrouteProcess::spawn(&more, &[]);
    let alive = async || {
        process
            .health(process.health, "liveness")
            .await
            .is_ok_and(|it| it == Some(Serving))
    };
    assert!(until(SOON, alive).await, "{}", process.log());
    for name in READY {
        assert_eq!(
            process.health(process.health, name).await.unwrap(),
            Some(NotServing),
            "{name}"
        );
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
    tokio::time::timeout(SOON, next)
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
    let draining = async || {
        process
            .health(process.grpc, "draining")
            .await
            .is_ok_and(|it| it == Some(Serving))
    };
    assert!(until(SOON, draining).await, "{}", process.log());
    for port in [process.grpc, process.health] {
        for name in READY {
            let status = process.health(port, name).await.unwrap();
            assert_eq!(status, Some(NotServing), "{name} on {port}");
        }
        assert_eq!(
            process.health(port, "liveness").await.unwrap(),
            Some(Serving)
        );
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
        until(SOON, refused).await,
        "still accepting:\n{}",
        process.log()
    );
    let grace = signalled.elapsed();
    assert!(grace >= Duration::from_millis(14_900), "{grace:?}");
    // The open exchange continues, and the health service still responds.
    long.assert_reply().await;
    assert_eq!(
        process.health(process.health, "liveness").await.unwrap(),
        Some(Serving)
    );
    assert!(process.child.is_running());
    drop(long);
    process.assert_exit_success().await;
    assert!(
        !process.log().contains("drain deadline exceeded"),
        "{}",
        process.log()
    );
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
    assert!(until(SOON, after_grace).await);
    let (mut fresh, _) = process.open(process.channel(process.grpc).await, "m").await;
    fresh.assert_reply().await;
    drop(fresh);
    drop(lock);
    process.assert_exit_success().await;
    assert!(
        !process.log().contains("drain deadline exceeded"),
        "{}",
        process.log()
    );
}

#[tokio::test]
async fn second_signal_ends_grace_period() {
    let process =
        WarmrouteProcess::start(json!({"process": {"drain": {"grace_period": "10m"}}}), &[]).await;
    process.terminate();
    let draining = async || {
        process
            .health(process.grpc, "draining")
            .await
            .is_ok_and(|it| it == Some(Serving))
    };
    assert!(until(SOON, draining).await, "{}", process.log());
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
    assert!(
        process.log().contains("drain deadline exceeded"),
        "{}",
        process.log()
    );
    drop(open);
}
