//! Command-line flags of charts and of the conformance tests of the Gateway API inference
//! extension.

use serde_json::json;
use warmroute_testbed::ports::FreePort;

use crate::support::process::WarmrouteProcess;
use tonic_health::pb::health_check_response::ServingStatus::Serving;

#[tokio::test]
async fn flags_override_the_file() {
    let ports = [FreePort::find().unwrap(), FreePort::find().unwrap()];
    let [grpc, health] = ports.map(|port| port.release());
    let grpc_flag = format!("--grpc-port={grpc}");
    let health_flag = health.to_string();
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
    let process = WarmrouteProcess::start(json!({}), &args).await;
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
    let shown = process.config_page().await;
    assert_eq!(
        shown["config"]["process"]["pool"],
        json!({"name": "vllm", "namespace": "inference"})
    );
    assert_eq!(
        shown["config"]["process"]["log"],
        json!({"level": "debug", "format": "json"})
    );
    let log = process.log();
    assert!(
        log.lines()
            .all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()),
        "{log}"
    );
    // A reload reads the file, but the flags still take precedence.
    process.reconfigure(&json!({
        "process": {"log": {"level": "error"}},
        "routing": {"weights": {"router_temperature": 0.5}},
    }));
    process.wait_metric("config_generation", 2.0).await;
    let shown = process.config_page().await;
    assert_eq!(shown["config"]["process"]["log"]["level"], "debug");
    assert_eq!(shown["needs_restart"], json!([]));
}
