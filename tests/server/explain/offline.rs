//! Explanations from the configuration alone, without a running process.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use warmroute_testbed::deployment::MODEL;
use warmroute_testbed::ports::FreePort;

use super::{captured_chat, explain, explained, write};

/// Returns a file of the shipped model, with which the tokens of the captured request were counted.
fn model_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples/models/qwen2.5")
        .join(name)
}

/// Writes a configuration with two workers in a separate file.
fn configuration(directory: &Path) -> PathBuf {
    let workers = json!([
        {"id": 1, "endpoint": "127.0.0.1:8001"},
        {"id": 2, "endpoint": "127.0.0.1:8002", "taints": ["spot"]},
    ]);
    write(directory, "workers.yaml", workers.to_string());
    let config = json!({
        "models": [
            {
                "name": MODEL,
                "tokenizer": model_file("tokenizer.json.gz"),
                "tokenizer_config": model_file("tokenizer_config.json"),
            },
        ],
        "requests": {"clients": {"trusted": true}},
        "routing": {"weights": {"overlap_score_credit": 0.5}},
        "workers": {"file": "workers.yaml"},
    });
    write(directory, "warmroute.yaml", config.to_string())
}

#[tokio::test]
async fn offline_explanation_shows_tokens_and_eligibility() {
    let dir = tempfile::tempdir().unwrap();
    let config = configuration(dir.path());
    let config = config.to_str().unwrap();
    let chat = captured_chat();
    let body = write(dir.path(), "body.json", chat.to_string());
    let body = body.to_str().unwrap();

    let table = explained(&["--config", config, "--body", body], b"").await;
    assert!(
        table.contains(" 419 tokens, 26 complete blocks of 16 tokens\n"),
        "{table}"
    );
    assert!(table.contains("policy   linear: device 0.5, "), "{table}");
    assert!(
        table.contains("2 of 2 worker ranks are candidates"),
        "{table}"
    );
    assert!(
        table.ends_with("Without --admin, caches are empty and workers have no load.\n"),
        "{table}"
    );

    let mut demanding = chat;
    demanding["nvext"] = json!({"routing_constraints": {"required_taints": ["spot"]}});
    let text = explained(
        &["--config", config, "--body", "-", "--json"],
        demanding.to_string().as_bytes(),
    )
    .await;
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (
            &report["prompt_tokens"],
            &report["weights"]["overlap_score_credit"]
        ),
        (&json!(419), &json!(0.5))
    );
    assert_eq!(
        report["phases"][0]["workers"][0]["excluded"],
        "lacks the required taint `spot`"
    );
    assert_eq!(report["phases"][0]["winner"]["worker"], "2");
}

#[tokio::test]
async fn offline_explanation_accepts_any_body() {
    let dir = tempfile::tempdir().unwrap();
    let config = configuration(dir.path());
    let config = config.to_str().unwrap();
    let arguments = [
        "--config",
        config,
        "--body",
        "-",
        "--json",
        "--header",
        "x-worker-instance-id=1",
    ];
    let output = explain(&arguments, b"{").await;
    assert_eq!(output.status.code(), Some(1));
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(err.contains("the body is not JSON: EOF"), "{err}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&report["mode"], &report["reason"]),
        (&json!("load_only"), &json!("unparseable")),
        "{report}"
    );
    let completion = json!({"model": MODEL, "prompt": "hello"}).to_string();
    let text = explained(
        &["--config", config, "--body", "-", "--json"],
        completion.as_bytes(),
    )
    .await;
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&report["reason"], &report["prompt_tokens"]),
        (&json!(null), &json!(1)),
        "the path is guessed"
    );
}

#[tokio::test]
async fn exit_code_is_2_for_configuration_errors() {
    let dir = tempfile::tempdir().unwrap();
    let good = configuration(dir.path());
    let broken = write(dir.path(), "broken.yaml", "models: []\nworkerz: []\n");
    let unusable = write(dir.path(), "tokenizer.json", "{}");
    let unusable = write(
        dir.path(),
        "unusable.yaml",
        json!({
            "models": [{"name": "m", "tokenizer": unusable}],
            "workers": {"list": [{"id": 1, "endpoint": "127.0.0.1:8001"}]},
        })
        .to_string(),
    );
    let closed = format!("http://127.0.0.1:{}", FreePort::find().unwrap().release());
    let [good, broken, unusable] = [&good, &broken, &unusable].map(|file| file.to_str().unwrap());
    let cases: [(&[&str], i32, &str); 6] = [
        (&["--config", broken, "--body", "-"], 2, "workerz"),
        (&["--config", unusable, "--body", "-"], 2, "tokenizer.json"),
        (
            &["--config", "/nowhere.yaml", "--body", "-"],
            2,
            "cannot be read",
        ),
        (
            &["--config", good, "--body", "/nowhere.json"],
            1,
            "cannot read the body /nowhere.json",
        ),
        (
            &["--admin", &closed, "--body", "-"],
            1,
            "connection refused; check that warmroute is running",
        ),
        (
            &["--admin", "no url", "--body", "-"],
            2,
            "expected a URL or HOST:PORT",
        ),
    ];
    for (args, code, text) in cases {
        let output = explain(args, b"{}").await;
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {err}");
        assert!(
            err.contains(text) && output.stdout.is_empty(),
            "{args:?}: {err}"
        );
    }
}

#[tokio::test]
async fn missing_chat_template_is_explained() {
    let dir = tempfile::tempdir().unwrap();
    let settings = std::fs::read(model_file("tokenizer_config.json")).unwrap();
    let mut settings: Value = serde_json::from_slice(&settings).unwrap();
    settings
        .as_object_mut()
        .unwrap()
        .remove("chat_template")
        .unwrap();
    write(dir.path(), "tokenizer_config.json", settings.to_string());
    for name in ["tokenizer.json.gz", "config.json"] {
        std::fs::copy(model_file(name), dir.path().join(name)).unwrap();
    }
    let without = json!({
        "models": [{"name": MODEL, "tokenizer": "tokenizer.json.gz"}],
        "workers": {"list": [{"id": 1, "endpoint": "127.0.0.1:8001"}]},
    });
    let without = write(dir.path(), "without.yaml", without.to_string());
    let chat = captured_chat().to_string();
    let text = explained(
        &[
            "--config",
            without.to_str().unwrap(),
            "--body",
            "-",
            "--json",
        ],
        chat.as_bytes(),
    )
    .await;
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&report["mode"], &report["reason"]),
        (&json!("load_only"), &json!("no_chat_template")),
        "{report}"
    );
    assert!(
        report["summary"]
            .as_str()
            .unwrap()
            .contains("the model has no chat template"),
        "{report}"
    );
}
