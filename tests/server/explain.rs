//! End-to-end tests of `warmroute explain`: offline, and against a deployment of eight engines
//! behind a real Envoy, where its numbers must match the next real request.

mod live;
mod offline;

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use warmroute_testbed::deployment::MODEL;

/// Returns a captured chat request of vLLM, with the model of the tests.
fn captured_chat() -> Value {
    let scenarios = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/scenarios.json");
    let scenarios: Value = serde_json::from_slice(&std::fs::read(scenarios).unwrap()).unwrap();
    let mut chat = scenarios[0]["request"].clone();
    assert_eq!(scenarios[0]["path"], "/v1/chat/completions");
    chat["model"] = MODEL.into();
    chat
}

fn write(directory: &Path, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let file = directory.join(name);
    std::fs::write(&file, content).unwrap();
    file
}

/// Runs the command with a body on standard input.
async fn explain(args: &[&str], input: &[u8]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command
        .arg("explain")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().unwrap();
    // The write fails if the command exits without reading its input.
    let _written = child.stdin.take().unwrap().write_all(input).await;
    child.wait_with_output().await.unwrap()
}

/// Runs the command, asserts success, and returns the output.
async fn explained(args: &[&str], input: &[u8]) -> String {
    let output = explain(args, input).await;
    let out = String::from_utf8(output.stdout).unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{args:?}: {out}{err}");
    assert_eq!(err, "", "{args:?}");
    out
}
