//! Configuration reload of a running process.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::support::model_file;
use crate::support::process::WarmrouteProcess;

const APPLIED: &str = "config_reloads_total{outcome=\"applied\"}";
const INVALID: &str = "config_reloads_total{outcome=\"invalid\"}";
const UNCHANGED: &str = "config_reloads_total{outcome=\"unchanged\"}";

/// Disables the file watch, so that only a signal triggers a reload.
fn by_signal(more: &Value) -> Value {
    let mut all = json!({"process": {"reload": {"watch": false}}});
    merge_config(&mut all, more);
    all
}

async fn steered(process: &WarmrouteProcess, model: &str) -> String {
    process
        .open(process.channel(process.grpc).await, model)
        .await
        .1
}

#[tokio::test]
async fn sighup_applies_all_reloadable_settings_together() {
    let process = WarmrouteProcess::start(by_signal(&json!({})), &[]).await;
    assert_eq!(process.config_page().await["generation"], 1);
    assert!(steered(&process, "m").await.contains("10.0.0.1:8000"));
    // An open exchange continues with its original configuration.
    let (mut open, _) = process.open(process.channel(process.grpc).await, "m").await;
    process.reconfigure(&json!({
        "models": [{"name": "m", "block_size": 16}, {"name": "n", "block_size": 16}],
        "workers": {
            "list": [
                {"id": 2, "endpoint": "10.0.0.2:8000", "model": "m"},
                {"id": 3, "endpoint": "10.0.0.3:8000", "model": "n"},
            ],
        },
        "routing": {"weights": {"router_temperature": 0.25}},
        "gateway": {"response_headers": {"worker": true}},
        "queue": {"timeout": "7s"},
    }));
    process.hangup();
    process.wait_metric("config_generation", 2.0).await;
    assert_eq!(process.metric(APPLIED).await, 1.0);
    open.assert_reply().await;
    let moved = async || steered(&process, "m").await.contains("10.0.0.2:8000");
    assert!(until(PATIENCE, moved).await, "{}", process.log());
    assert!(steered(&process, "n").await.contains("10.0.0.3:8000"));
    let shown = process.config_page().await;
    assert_eq!(
        shown["config"]["routing"]["weights"]["router_temperature"],
        0.25
    );
    assert_eq!(shown["needs_restart"], json!(["queue.timeout"]));
    assert_eq!(shown["config"]["queue"]["timeout"], "30s");
    let log = process.log();
    let pending = "queue.timeout (running 30s, file 7s)";
    assert!(
        log.contains("some changes need a restart") && log.contains(pending),
        "{log}"
    );
    assert_eq!(process.metric("config_pending_restart_keys").await, 1.0);
    // A reload of the same file changes nothing. It only logs the settings that need a restart.
    process.hangup();
    process.wait_metric(UNCHANGED, 1.0).await;
    assert!(
        !process.log().contains("nothing changed"),
        "{}",
        process.log()
    );
}

#[tokio::test]
async fn flood_of_signals_causes_few_reloads() {
    let process = WarmrouteProcess::start(by_signal(&json!({})), &[]).await;
    let started = Instant::now();
    for _ in 0..300 {
        process.hangup();
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    // The last signal is not lost.
    process.reconfigure(&json!({"routing": {"weights": {"router_temperature": 0.25}}}));
    process.hangup();
    process.wait_metric(APPLIED, 1.0).await;
    let reloads = process.log().matches("config reload requested").count() as u64;
    assert!(
        reloads <= started.elapsed().as_secs() + 2,
        "{reloads} reloads:\n{}",
        process.log()
    );
}

#[tokio::test]
async fn invalid_reload_changes_nothing_and_logs_line() {
    let process = WarmrouteProcess::start(by_signal(&json!({})), &[]).await;
    let good = process.config();
    let broken = "models:\n  - name: m\nworkers:\n  list:\n    - {id: 9, endpoint: '10.0.0.9:80'}\nrouting:\n  weights: {router_temperature: -1}\n";
    process.configure(broken);
    process.hangup();
    process.wait_metric(INVALID, 1.0).await;
    assert_eq!(process.metric("config_generation").await, 1.0);
    assert!(
        process.log().contains("warmroute.yaml:7:"),
        "{}",
        process.log()
    );
    assert_last_reload(&process, "rejected", "warmroute.yaml:7:").await;
    assert_eq!(process.metric("config_last_reload_successful").await, 0.0);
    let last_success = process
        .metric("config_last_reload_success_timestamp_seconds")
        .await;
    assert!(last_success > 1.7e9, "{last_success}");
    assert!(steered(&process, "m").await.contains("10.0.0.1:8000"));
    // An unusable tokenizer is detected before any setting changes.
    let tokenizer = process.path("tokenizer.json");
    std::fs::write(&tokenizer, "{}").unwrap();
    let mut worse = good.clone();
    worse["models"][0]["tokenizer"] = json!(tokenizer);
    worse["routing"] = json!({"weights": {"router_temperature": 0.5}});
    process.configure(&worse.to_string());
    process.hangup();
    process.wait_metric(INVALID, 2.0).await;
    assert_eq!(
        process.config_page().await["config"]["routing"]["weights"]["router_temperature"],
        Value::Null
    );
    // Restoring the previous file changes nothing.
    process.configure(&good.to_string());
    process.hangup();
    process.wait_metric(UNCHANGED, 1.0).await;
    assert_eq!(process.metric("config_last_reload_successful").await, 1.0);
    assert!(
        process
            .metric("config_last_reload_success_timestamp_seconds")
            .await
            > last_success
    );
    assert_eq!(process.metric("config_generation").await, 1.0);
    assert_last_reload(&process, "unchanged", "").await;
}

/// Asserts the last read of the configuration file on the admin pages.
async fn assert_last_reload(process: &WarmrouteProcess, outcome: &str, error: &str) {
    let page = process.config_page().await;
    assert_eq!(page["file"], json!(process.path("warmroute.yaml")));
    let report = &page["last_reload"];
    assert_eq!(report["outcome"], outcome, "{page}");
    let time = report["time"].as_str().unwrap();
    assert!(time.len() == 24 && time.ends_with('Z'), "{time}");
    let first_error = report["errors"][0].as_str().unwrap_or_default();
    assert!(first_error.contains(error), "{page}");
    let (status, overview) = process.get("/").await;
    assert_eq!(status, 200);
    for text in [time, env!("CARGO_PKG_VERSION"), ">ready"] {
        assert!(overview.contains(text), "{text}: {overview}");
    }
    assert_eq!(
        overview.contains("reload rejected"),
        outcome == "rejected",
        "{overview}"
    );
    assert!(overview.contains(error), "{overview}");
}

#[tokio::test]
async fn tokenizers_reload_only_after_file_change() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = dir.path().join("tokenizer.json.gz");
    std::fs::copy(model_file("tokenizer.json.gz"), &tokenizer).unwrap();
    let settings = dir.path().join("tokenizer_config.json");
    std::fs::copy(model_file("tokenizer_config.json"), &settings).unwrap();
    std::fs::copy(model_file("config.json"), dir.path().join("config.json")).unwrap();
    let one = json!({"name": "m", "tokenizer": tokenizer, "tokenizer_config": settings});
    let process = WarmrouteProcess::start(by_signal(&json!({"models": [one]})), &[]).await;
    let loaded = || process.log().matches("tokenizer loaded").count();
    assert_eq!(loaded(), 1);
    // Another model name and other weights with the same tokenizer files.
    let mut again = one.clone();
    again["aliases"] = json!(["also"]);
    process.reconfigure(&json!({
        "models": [again],
        "routing": {"weights": {"router_temperature": 0.5}},
    }));
    process.hangup();
    process.wait_metric("config_generation", 2.0).await;
    assert_eq!(loaded(), 1, "{}", process.log());
    assert!(steered(&process, "also").await.contains("10.0.0.1:8000"));
    // The same configuration with a changed tokenizer file.
    let text = std::fs::read_to_string(&settings).unwrap();
    std::fs::write(&settings, format!("{text}\n")).unwrap();
    process.hangup();
    process.wait_metric("config_generation", 3.0).await;
    assert_eq!(loaded(), 2, "{}", process.log());
}

#[tokio::test]
async fn file_change_triggers_reload_and_log_level() {
    let process = WarmrouteProcess::start(json!({}), &[]).await;
    process.reconfigure(&json!({"process": {"log": {"level": "debug"}}}));
    process.wait_metric("config_generation", 2.0).await;
    let _steered = steered(&process, "m").await;
    let debugs = async || process.log().contains("DEBUG");
    assert!(until(PATIENCE, debugs).await, "{}", process.log());
    process.configure("models: [");
    process.wait_metric(INVALID, 1.0).await;
    assert_eq!(process.metric("config_generation").await, 2.0);
}
