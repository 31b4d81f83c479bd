//! A healthy deployment: two engines, warmroute and Envoy.

use std::time::Duration;

use serde_json::json;
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::deployment::{EngineSpec, LocalDeployment};
use warmroute_testbed::ports::{self, FreePort, ReadyCheck};

use crate::doctor::bed::{DoctorBed, DoctorOutput, EnginePlan, doctor, write};
use crate::support::deployment::programs;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn healthy_deployment_has_no_problems() {
    let dir = tempfile::tempdir().unwrap();
    let specs: Vec<_> = (1..=2).map(EngineSpec::new).collect();
    // Fewer connections, so that the usual limit of open files suffices.
    let more = json!({"listeners": {"limits": {"max_connections": 256}}});
    let stack = LocalDeployment::start(&programs(), &specs, dir.path(), &more)
        .await
        .unwrap();
    let file = stack.run_dir.join("warmroute.yaml");
    let envoy = stack.envoy_setup().admin_url("");
    let examined = doctor(&file, &["--envoy-admin", &envoy]).await;
    examined.assert("healthy", &[], &[]);
    assert!(
        examined.findings.iter().all(|one| one["level"] == "ok"),
        "{:#?}",
        examined.findings
    );
    assert!(examined.findings.len() > 55, "{}", examined.findings.len());

    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_warmroute"));
    let output = command
        .args(["doctor", "--no-canary", "--envoy-admin", &envoy, "--config"])
        .arg(&file)
        .output()
        .await
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.lines()
            .any(|line| line.starts_with("  ok       engine.reachable ") && line.contains("all 2")),
        "{text}"
    );
    assert!(!text.contains("fix:"), "{text}");
}

/// The doctor checks the limit of open files of its own process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn low_open_file_limit_is_found() {
    let bed = DoctorBed::start(EnginePlan::default()).await;
    let file = write(bed.dir.path(), &bed.config());
    let mut command = tokio::process::Command::new("sh");
    let script = "ulimit -n 512 && exec \"$0\" doctor --json --no-canary --config \"$1\"";
    let output = command
        .args(["-c", script, env!("CARGO_BIN_EXE_warmroute")])
        .arg(&file)
        .output()
        .await
        .unwrap();
    let examined = DoctorOutput::read(&output);
    examined.assert(
        "files",
        &[("warning", "host.files")],
        &[
            "`ulimit -n 4096`",
            "listeners: {limits: {max_connections: 190}}",
        ],
    );
}

/// The doctor cannot bind an event socket that warmroute has bound. It skips the check.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn socket_of_running_warmroute_is_skipped() {
    let bed = DoctorBed::start(EnginePlan::connecting()).await;
    let mut config = bed.config();
    config["workers"]["list"][0]["kv_events"]["attach"] = json!("bind");
    let admin = FreePort::find().unwrap().release();
    config["listeners"]["admin"] = json!({"address": format!("127.0.0.1:{admin}")});
    let file = write(bed.dir.path(), &config);
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command.args(["serve", "--config"]).arg(&file);
    let running = ChildProcess::spawn("warmroute", &command, bed.dir.path()).unwrap();
    let ready = format!("http://127.0.0.1:{admin}/readyz");
    ports::wait_ready(ReadyCheck::Http(&ready), Duration::from_secs(60), &running)
        .await
        .unwrap();
    let examined = doctor(&file, &[]).await;
    examined.assert("bound by warmroute", &[], &[]);
    let level = |check: &str| {
        examined
            .findings
            .iter()
            .find(|one| one["check"] == check)
            .unwrap()["level"]
            .clone()
    };
    assert_eq!(
        (level("events.attached"), level("warmroute.listens")),
        (json!("skipped"), json!("ok"))
    );
    // Another file with the same addresses. The running process does not follow it.
    config["routing"] = json!({"policy": "least_loaded"});
    let other = bed.dir.path().join("other.yaml");
    std::fs::write(&other, config.to_string()).unwrap();
    let examined = doctor(&other, &["--no-canary"]).await;
    examined.assert(
        "another configuration",
        &[("error", "warmroute.config")],
        &[&format!("stop the process that uses {}", file.display())],
    );
}
