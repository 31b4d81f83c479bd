//! The flags that charts and the conformance tests of the Gateway API pass.

use serde_json::json;

use crate::process::{Process, SOON};
use crate::support::ports::{FreePort, until};
use tonic_health::pb::health_check_response::ServingStatus::Serving;

#[tokio::test]
async fn flags_say_more_than_the_file() {
    let ports = [FreePort::find().unwrap(), FreePort::find().unwrap()];
    let [grpc, health] = ports.map(|port| port.release());
    let (grpc_flag, health_flag) = (format!("--grpc-port={grpc}"), health.to_string());
    let args = [
        "--pool-name",
        "vllm",
        "--pool-namespace",
        "inference",
        &grpc_flag,
        "--grpc-health-port",
        &health_flag,
        "--zap-encoder",
        "json",
        "--zap-devel",
        "--zap-stacktrace-level=error",
        "--secure-serving=false",
        "-v",
        "4",
    ];
    let process = Process::start(json!({}), &args).await;
    assert_eq!(
        process.health(grpc, "inference-extension").await.unwrap(),
        Some(Serving)
    );
    assert_eq!(
        process.health(health, "inference-extension").await.unwrap(),
        Some(Serving)
    );
    assert_eq!(
        process
            .metric("pool_info{name=\"vllm\",namespace=\"inference\"}")
            .await,
        1.0
    );
    let shown = process.shown().await;
    assert_eq!(
        shown["config"]["pool"],
        json!({"name": "vllm", "namespace": "inference"})
    );
    assert_eq!(
        shown["config"]["log"],
        json!({"level": "debug", "format": "json"})
    );
    let log = process.log();
    assert!(
        log.lines()
            .all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()),
        "{log}"
    );
    // A reload reads the file, and the flags still win.
    process
        .reconfigure(&json!({"log": {"level": "error"}, "schedule": {"router_temperature": 0.5}}));
    process.shows("config_generation", 2.0).await;
    let shown = process.shown().await;
    assert_eq!(shown["config"]["log"]["level"], "debug");
    assert_eq!(shown["needs_restart"], json!([]));
}

#[tokio::test]
async fn secure_serving_is_tls_on_the_ext_proc_port_and_not_on_the_health_port() {
    let process = Process::start(json!({}), &["--secure-serving"]).await;
    assert_eq!(
        process.health(process.health, "readiness").await.unwrap(),
        Some(Serving)
    );
    // Plaintext is no TLS handshake.
    assert!(process.health(process.grpc, "readiness").await.is_err());
    let tls = async || {
        process
            .metric("tls_handshakes_total{listener=\"ext_proc\",outcome=\"failed\"}")
            .await
            >= 1.0
    };
    assert!(until(SOON, tls).await);
    assert_eq!(
        process.shown().await["config"]["listen"]["tls"]["self_signed"],
        true
    );
}
