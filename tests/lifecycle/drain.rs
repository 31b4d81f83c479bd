//! Health by its names, and the end in its order.

use std::time::{Duration, Instant};

use serde_json::json;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus::{NotServing, Serving};
use tonic_health::pb::health_client::HealthClient;

use crate::process::{Process, SOON};
use crate::support::ports::until;

/// Names that follow readiness.
const READY: [&str; 5] = [
    "",
    "inference-extension",
    "readiness",
    "envoy.service.ext_proc.v3.ExternalProcessor",
    "warmroute.v1.Router",
];

#[tokio::test]
async fn health_has_the_names_that_probes_ask_for_on_both_ports() {
    let process = Process::start(json!({}), &[]).await;
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
async fn the_health_port_is_there_before_everything_else() {
    // Ready never comes, because there are not so many workers.
    let more = json!({"workers_file": "workers.yaml", "workers": null, "readiness": {"min_initial_workers": 2}});
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("workers.yaml");
    std::fs::write(&file, "- {id: 1, endpoint: '10.0.0.1:80'}\n").unwrap();
    let mut more = more;
    more["workers_file"] = json!(file);
    let process = Process::spawn(&more, &[]);
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
    // Those who watch hear when it changes.
    let mut client = HealthClient::new(process.channel(process.health).await);
    let watch = HealthCheckRequest {
        service: "inference-extension".to_owned(),
    };
    let mut heard = client.watch(watch).await.unwrap().into_inner();
    assert_eq!(heard.message().await.unwrap().unwrap().status(), NotServing);
    std::fs::write(
        &file,
        "- {id: 1, endpoint: '10.0.0.1:80'}\n- {id: 2, endpoint: '10.0.0.2:80'}\n",
    )
    .unwrap();
    let next = async {
        loop {
            if heard.message().await.unwrap().unwrap().status() == Serving {
                break;
            }
        }
    };
    tokio::time::timeout(SOON, next)
        .await
        .expect("the watch was told nothing");
}

#[tokio::test]
async fn after_sigterm_health_says_no_at_once_and_new_exchanges_are_served_until_the_grace_is_over()
{
    let process = Process::start(json!({"drain": {"grace": "15s", "deadline": "60s"}}), &[]).await;
    let channel = process.channel(process.grpc).await;
    let (mut long, _) = process.open(channel.clone(), "m").await;
    let told = Instant::now();
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
            assert_eq!(
                process.health(port, name).await.unwrap(),
                Some(NotServing),
                "{name} on {port}"
            );
        }
        assert_eq!(
            process.health(port, "liveness").await.unwrap(),
            Some(Serving)
        );
    }
    assert_eq!(process.get("/readyz").await.0, 503);
    // On the connection that is there, and on a new one.
    let (mut fresh, steered) = process.open(process.channel(process.grpc).await, "m").await;
    assert!(steered.contains("10.0.0.1:8000"), "{steered}");
    fresh.answers().await;
    let (mut known, _) = process.open(channel, "m").await;
    known.answers().await;
    assert!(
        told.elapsed() < Duration::from_secs(15),
        "too slow a machine for this test: {:?}",
        told.elapsed()
    );
    drop((fresh, known));

    // Whoever watches health must not keep the process from ending.
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
    assert!(
        told.elapsed() >= Duration::from_millis(14_900),
        "{:?}",
        told.elapsed()
    );
    // The one that is open goes on, and so does health.
    long.answers().await;
    assert_eq!(
        process.health(process.health, "liveness").await.unwrap(),
        Some(Serving)
    );
    assert!(process.child.is_running());
    drop(long);
    process.ends_well().await;
    assert!(
        !process.log().contains("the drain deadline passed"),
        "{}",
        process.log()
    );
    drop(watched);
}

#[tokio::test]
async fn a_second_signal_ends_it_in_the_middle_of_the_grace() {
    let process = Process::start(json!({"drain": {"grace": "10m"}}), &[]).await;
    process.terminate();
    let draining = async || {
        process
            .health(process.grpc, "draining")
            .await
            .is_ok_and(|it| it == Some(Serving))
    };
    assert!(until(SOON, draining).await, "{}", process.log());
    process.terminate();
    process.ends_well().await;
}

#[tokio::test]
async fn the_deadline_ends_what_is_open() {
    let process = Process::start(
        json!({"drain": {"grace": "100ms", "deadline": "300ms"}}),
        &[],
    )
    .await;
    let (open, _) = process.open(process.channel(process.grpc).await, "m").await;
    process.terminate();
    process.ends_well().await;
    assert!(
        process.log().contains("the drain deadline passed"),
        "{}",
        process.log()
    );
    drop(open);
}
