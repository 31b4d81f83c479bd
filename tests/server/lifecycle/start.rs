//! Startup log: one line per step, and one line at the end or the single cause of a failure.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use warmroute_testbed::ports::{FreePort, PATIENCE, until};

use crate::support::model_file;
use crate::support::process::WarmrouteProcess;

/// Returns the exit code and the JSON log lines of a failed start.
async fn failed_start(more: &Value) -> (Option<i32>, Vec<Value>) {
    let process = WarmrouteProcess::spawn(more, &[]);
    assert!(
        until(PATIENCE, async || !process.child.is_running()).await,
        "still running:\n{}",
        process.log()
    );
    let status = process
        .child
        .wait_exit(std::time::Instant::now() + PATIENCE)
        .unwrap();
    let lines = process
        .log()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}")))
        .collect();
    (status.code(), lines)
}

fn warnings_and_errors(lines: &[Value]) -> Vec<&Value> {
    lines
        .iter()
        .filter(|line| line["level"] != "INFO")
        .collect()
}

#[tokio::test]
async fn failing_start_logs_its_one_cause_as_json() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = dir.path().join("tokenizer.json");
    std::fs::write(&tokenizer, "{}").unwrap();
    let more = json!({
        "process": {"log": {"format": "json"}},
        "models": [{"name": "m", "tokenizer": tokenizer}],
    });
    let (code, lines) = failed_start(&more).await;
    let [cause] = warnings_and_errors(&lines)[..] else {
        panic!("{lines:#?}")
    };
    let message = cause["message"].as_str().unwrap();
    assert_eq!(
        (code, cause["level"].as_str()),
        (Some(2), Some("ERROR")),
        "{cause}"
    );
    assert!(
        message.starts_with("cannot start: ") && message.contains("is not a tokenizer.json"),
        "{cause}"
    );
    assert!(
        !lines.iter().any(|line| line["message"] == "ready"),
        "{lines:#?}"
    );
}

#[tokio::test]
async fn occupied_address_fails_before_loading() {
    let occupied = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = occupied.local_addr().unwrap().to_string();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("ext_proc.sock");
    let _owner = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let shown = socket.display();
    let in_use = "cannot be bound: another process listens on it";
    for (name, option, expected) in [
        (
            "admin",
            json!({"address": address}),
            format!("admin address {address} cannot be bound"),
        ),
        (
            "ext_proc",
            json!({"address": address}),
            format!("ext_proc address {address} cannot be bound"),
        ),
        (
            "api",
            json!({"address": address}),
            format!("api address {address} cannot be bound"),
        ),
        (
            "ext_proc",
            json!({"unix_socket": socket}),
            format!("ext_proc socket {shown} {in_use}"),
        ),
    ] {
        let more = json!({
            "process": {"log": {"format": "json"}},
            "listeners": {name: option},
            "models": [{
                "name": "m",
                "tokenizer": model_file("tokenizer.json.gz"),
                "tokenizer_config": model_file("tokenizer_config.json"),
            }],
        });
        let (code, lines) = failed_start(&more).await;
        let [first, cause] = &lines[..] else {
            panic!("{name}: {lines:#?}")
        };
        assert_eq!(first["message"], "starting warmroute", "{first}");
        let message = cause["message"].as_str().unwrap();
        assert!(
            message.starts_with(&format!("cannot start: the {expected}")),
            "{cause}"
        );
        assert_eq!(code, Some(1));
    }
}

/// Returns a command that fails at an occupied address, after its first log lines.
fn failing_command(file: &Path, occupied: &TcpListener) -> Command {
    let address = occupied.local_addr().unwrap().to_string();
    let config = json!({
        "process": {"log": {"format": "json"}},
        "listeners": {"ext_proc": {"address": address}, "admin": {"address": "127.0.0.1:0"}},
        "models": [{"name": "m", "block_size": 16}],
        "workers": {"list": [{"id": 1, "endpoint": "10.0.0.1:8000"}]},
    });
    std::fs::write(file, config.to_string()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command.args(["serve", "--config"]).arg(file);
    command
}

#[test]
fn process_survives_a_closed_log_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let occupied = TcpListener::bind("127.0.0.1:0").unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = failing_command(&dir.path().join("warmroute.yaml"), &occupied)
        .stderr(writer)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(1), "{status}");
}

#[test]
fn invalid_log_directive_is_reported_as_json() {
    let dir = tempfile::tempdir().unwrap();
    let occupied = TcpListener::bind("127.0.0.1:0").unwrap();
    let file = dir.path().join("warmroute.yaml");
    let output = failing_command(&file, &occupied)
        .env("RUST_LOG", "info,foo=bar=baz")
        .output()
        .unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{log}")))
        .collect();
    let start = &lines[0];
    assert_eq!(start["message"], "starting warmroute", "{log}");
    assert_eq!(start["config"], json!(file), "{log}");
    assert!(
        start["pid"].is_u64() && start["version"].is_string(),
        "{log}"
    );
    let time = start["timestamp"].as_str().unwrap();
    assert!(humantime::parse_rfc3339(time).is_ok(), "{time}");
    let warning = &lines[1];
    assert_eq!(warning["level"], "WARN", "{log}");
    assert_eq!(warning["directive"], "foo=bar=baz", "{log}");
}

/// Words of the Debug form, which logs must not contain.
const DEBUG_FORMS: [&str; 4] = ["Some(", "None", "Ok(", "Err("];

#[tokio::test]
async fn log_starts_with_version_and_ends_with_uptime() {
    let process = WarmrouteProcess::start(json!({}), &[]).await;
    assert!(
        until(PATIENCE, async || process.log().contains(" ready after=")).await,
        "{}",
        process.log()
    );
    assert_eq!(process.metric("ready").await, 1.0);
    process.terminate();
    process.assert_exit_success().await;
    let log = process.log();
    let lines: Vec<&str> = log.lines().collect();
    assert!(lines[0].contains("starting warmroute version="), "{log}");
    assert!(lines[lines.len() - 1].contains("stopped uptime="), "{log}");
    let listening = lines.iter().find(|line| line.contains(" listening "));
    let address = format!("ext_proc=127.0.0.1:{}", process.grpc);
    assert!(
        listening.is_some_and(|line| line.contains(&address)),
        "{log}"
    );
    for form in DEBUG_FORMS {
        assert!(!log.contains(form), "{form} in {log}");
    }
}

#[tokio::test]
async fn startup_log_distinguishes_completed_from_abandoned_steps() {
    let nowhere = FreePort::find().unwrap().release();
    let process = WarmrouteProcess::start(
        json!({
            "workers": {
                "list": [
                    {
                        "id": 1,
                        "endpoint": "10.0.0.1:8000",
                        "kv_events": {"endpoint": format!("tcp://127.0.0.1:{nowhere}")},
                    },
                ],
            },
            "process": {"readiness": {"event_sources_timeout": "300ms"}},
        }),
        &[],
    )
    .await;
    let log = process.log();
    let line = |part: &str| {
        log.lines()
            .find(|line| line.contains(part))
            .unwrap_or_else(|| panic!("no {part}:\n{log}"))
    };
    let source = line("event source of worker rank 1/0");
    assert!(
        source.contains("WARN") && source.contains("step timed out"),
        "{source}"
    );
    let unreachable = line("KV event source unreachable");
    assert!(
        unreachable.contains("WARN") && unreachable.contains("name=\"10.0.0.1:8000\""),
        "{unreachable}"
    );
    assert!(!log.contains("KV event source lost"), "{log}");
    let fleet = line("fleet changed");
    assert!(fleet.contains("added=\"1 (10.0.0.1:8000)\""), "{fleet}");
    let workers = line("initial workers: at least 1");
    assert!(
        workers.contains("INFO") && workers.contains("step complete"),
        "{workers}"
    );
    assert!(
        until(PATIENCE, async || process.log().contains(" ready ")).await,
        "{}",
        process.log()
    );
    let log = process.log();
    let ready: Vec<&str> = log
        .lines()
        .filter(|line| line.contains(" ready ") && line.contains("workers=1"))
        .collect();
    let [ready] = ready[..] else { panic!("{log}") };
    assert!(
        ready.contains("models=1") && ready.contains("event_sources=\"0 of 1\""),
        "{ready}"
    );
}
