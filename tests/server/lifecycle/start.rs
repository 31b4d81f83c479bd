//! Startup log: one line per step, and one line at the end or the single cause of a failure.

use std::net::TcpListener;

use serde_json::{Value, json};
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::{FreePort, until};

use crate::support::model_file;
use crate::support::process::{SOON, WarmrouteProcess};

/// Returns the exit code and the JSON log lines of a failed start.
async fn failed_start(more: &Value) -> (Option<i32>, Vec<Value>) {
    let process = WarmrouteProcess::spawn(more, &[]);
    assert!(
        until(SOON, async || !process.child.is_running()).await,
        "still running:\n{}",
        process.log()
    );
    let status = process
        .child
        .wait_exit(std::time::Instant::now() + SOON)
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
    let message = cause["fields"]["message"].as_str().unwrap();
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
        !lines
            .iter()
            .any(|line| line["fields"]["message"] == "ready"),
        "{lines:#?}"
    );
}

#[tokio::test]
async fn occupied_port_fails_before_loading() {
    let occupied = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = occupied.local_addr().unwrap().to_string();
    let model = json!({
        "name": "m",
        "tokenizer": model_file("tokenizer.json.gz"),
        "tokenizer_config": model_file("tokenizer_config.json"),
    });
    for (name, section) in [
        (
            "admin",
            json!({"listeners": {"admin": {"address": address}}}),
        ),
        (
            "ext_proc",
            json!({"listeners": {"ext_proc": {"address": address}}}),
        ),
        ("api", json!({"listeners": {"api": {"address": address}}})),
    ] {
        let mut more = json!({"process": {"log": {"format": "json"}}, "models": [model]});
        merge_config(&mut more, &section);
        let (code, lines) = failed_start(&more).await;
        let expected = format!("cannot start: the {name} address {address} cannot be bound");
        let [first, cause] = &lines[..] else {
            panic!("{name}: {lines:#?}")
        };
        assert_eq!(first["fields"]["message"], "starting warmroute", "{first}");
        assert!(
            cause["fields"]["message"]
                .as_str()
                .unwrap()
                .starts_with(&expected),
            "{cause}"
        );
        assert_eq!(code, Some(1));
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
        source.contains("WARN") && source.contains("gave up waiting"),
        "{source}"
    );
    let workers = line("initial workers: at least 1");
    assert!(
        workers.contains("INFO") && workers.contains("step complete"),
        "{workers}"
    );
    assert!(
        until(SOON, async || process.log().contains(" ready ")).await,
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
