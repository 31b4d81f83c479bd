//! A deployment that is well: two engines, warmroute and Envoy, all of them running.

use std::time::Duration;

use serde_json::json;

use crate::bed::{Bed, Examined, Plan, doctor, write};
use crate::support::child::Child;
use crate::support::ports::{self, FreePort, Ready};
use crate::support::stack::{EngineSpec, Programs, Stack};

fn programs() -> Programs {
    let tests = std::env::current_exe().unwrap();
    let engine = tests
        .parent()
        .unwrap()
        .with_file_name("examples")
        .join("engine_sim");
    Programs {
        warmroute: vec![env!("CARGO_BIN_EXE_warmroute").into()],
        engine: vec![engine.into()],
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_that_is_well_has_nothing_to_be_mended() {
    let dir = tempfile::Builder::new()
        .prefix("warmroute-")
        .tempdir()
        .unwrap();
    let specs: Vec<_> = (1..=2).map(EngineSpec::new).collect();
    // So that the test does not ask for more files than a shell usually has.
    let more = json!({"limits": {"connections": 256}});
    let stack = Stack::start(&programs(), &specs, dir.path(), &more)
        .await
        .unwrap();
    let file = stack.run_dir.join("warmroute.yaml");
    let envoy = stack.standalone().admin_url("");
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
        text.lines().any(
            |line| line.starts_with("ok       engine.reachable  ") && line.contains("worker 2")
        ),
        "{text}"
    );
    assert!(!text.contains("mend:"), "{text}");
}

/// What limits a process limits the files it may open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shell_with_few_files_is_found() {
    let bed = Bed::start(Plan::default()).await;
    let file = write(bed.dir.path(), &bed.config());
    let mut command = tokio::process::Command::new("sh");
    let script = "ulimit -n 512 && exec \"$0\" doctor --json --no-canary --config \"$1\"";
    let output = command
        .args(["-c", script, env!("CARGO_BIN_EXE_warmroute")])
        .arg(&file)
        .output()
        .await
        .unwrap();
    let examined = Examined::read(&output);
    examined.assert(
        "files",
        &[("warning", "host.files")],
        &["`ulimit -n 2048`", "limits: {connections: 381}"],
    );
}

/// Where warmroute itself waits for engines nobody else can: what it hears is its own affair, and no fault.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_socket_that_a_running_warmroute_has_bound_is_left_alone() {
    let bed = Bed::start(Plan {
        connects: true,
        ..Plan::default()
    })
    .await;
    let mut config = bed.config();
    config["workers"][0]["kv_events"]["attach"] = json!("bind");
    let admin = FreePort::find().unwrap().release();
    config["admin"] = json!({"listen": format!("127.0.0.1:{admin}")});
    let file = write(bed.dir.path(), &config);
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command.args(["serve", "--config"]).arg(&file);
    let running = Child::spawn("warmroute", &command, bed.dir.path()).unwrap();
    let ready = format!("http://127.0.0.1:{admin}/readyz");
    ports::wait_ready(Ready::Http(&ready), Duration::from_secs(60), &running)
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
}
