//! A deployment that is well: two engines, warmroute and Envoy, all of them running.

use serde_json::json;

use crate::bed::doctor;
use crate::support::stack::{EngineSpec, Programs, Stack};

fn programs() -> Programs {
    let tests = std::env::current_exe().unwrap();
    let engine = tests.parent().unwrap().with_file_name("examples").join("engine_sim");
    Programs { warmroute: vec![env!("CARGO_BIN_EXE_warmroute").into()], engine: vec![engine.into()] }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_that_is_well_has_nothing_to_be_mended() {
    let dir = tempfile::Builder::new().prefix("warmroute-").tempdir().unwrap();
    let specs: Vec<_> = (1..=2).map(EngineSpec::new).collect();
    // So that the test does not ask for more files than a shell usually has.
    let more = json!({"limits": {"connections": 256}});
    let stack = Stack::start(&programs(), &specs, dir.path(), &more).await.unwrap();
    let file = stack.run_dir.join("warmroute.yaml");
    let envoy = stack.standalone().admin_url("");
    let examined = doctor(&file, &["--envoy-admin", &envoy]).await;
    examined.assert("healthy", &[], &[]);
    assert!(examined.findings.iter().all(|one| one["level"] == "ok"), "{:#?}", examined.findings);
    assert!(examined.findings.len() > 55, "{}", examined.findings.len());

    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_warmroute"));
    let output =
        command.args(["doctor", "--no-canary", "--envoy-admin", &envoy, "--config"]).arg(&file).output().await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.lines().any(|line| line.starts_with("ok       engine.reachable  ") && line.contains("worker 2")),
        "{text}"
    );
    assert!(!text.contains("mend:"), "{text}");
}

/// What limits a process limits the files it may open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shell_with_few_files_is_found() {
    let bed = crate::bed::Bed::start(crate::bed::Plan::default()).await;
    let file = crate::bed::write(bed.dir.path(), &bed.config());
    let mut command = tokio::process::Command::new("sh");
    let script = "ulimit -n 512 && exec \"$0\" doctor --json --no-canary --config \"$1\"";
    let output = command.args(["-c", script, env!("CARGO_BIN_EXE_warmroute")]).arg(&file).output().await.unwrap();
    let examined = crate::bed::Examined::read(output);
    examined.assert("files", &[("warning", "host.files")], &["`ulimit -n 2048`", "limits: {connections: 381}"]);
}
