//! Without a running process: the configuration alone.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{captured_chat, explain, explained, write};
use crate::support::ports::FreePort;
use crate::support::stack::{MODEL, model_file};

/// A configuration with two workers in a file of their own.
fn configuration(folder: &Path) -> PathBuf {
    let workers = json!([
        {"id": 1, "endpoint": "127.0.0.1:8001"},
        {"id": 2, "endpoint": "127.0.0.1:8002", "taints": ["spot"]},
    ]);
    write(folder, "workers.yaml", workers.to_string());
    let config = json!({
        "models": [{
            "name": MODEL,
            "tokenizer": model_file("tokenizer.json.gz"),
            "tokenizer_config": model_file("tokenizer_config.json"),
        }],
        "clients": {"trusted": true},
        "schedule": {"overlap_score_credit": 0.5},
        "workers_file": "workers.yaml",
    });
    write(folder, "warmroute.yaml", config.to_string())
}

#[tokio::test]
async fn the_configuration_alone_shows_tokens_blocks_weights_and_who_is_eligible() {
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
    assert!(table.contains("weights  device 0.5, "), "{table}");
    assert!(
        table.contains("2 of 2 worker ranks are candidates"),
        "{table}"
    );
    assert!(
        table.ends_with("Without --admin nothing is cached and nobody is busy.\n"),
        "{table}"
    );

    let mut demanding = chat.clone();
    demanding["nvext"] = json!({"routing_constraints": {"required_taints": ["spot"]}});
    let text = explained(
        &["--config", config, "--body", "-", "--json"],
        demanding.to_string().as_bytes(),
    )
    .await;
    let said: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (
            &said["prompt_tokens"],
            &said["weights"]["overlap_score_credit"]
        ),
        (&json!(419), &json!(0.5))
    );
    assert_eq!(
        said["phases"][0]["judged"][0]["excluded"],
        "lacks the required taint `spot`"
    );
    assert_eq!(said["phases"][0]["winner"]["worker"], "2");

    let text = explained(
        &[
            "--config",
            config,
            "--body",
            "-",
            "--json",
            "--header",
            "x-worker-instance-id=1",
        ],
        b"{",
    )
    .await;
    let said: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&said["mode"], &said["reason"]),
        (&json!("load_only"), &json!("unreadable")),
        "{said}"
    );
    let completion = json!({"model": MODEL, "prompt": "hello"}).to_string();
    let text = explained(
        &["--config", config, "--body", "-", "--json"],
        completion.as_bytes(),
    )
    .await;
    let said: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&said["reason"], &said["prompt_tokens"]),
        (&json!(null), &json!(1)),
        "the path is guessed"
    );
}

#[tokio::test]
async fn mistakes_of_the_configuration_end_with_2_and_all_others_with_1() {
    let dir = tempfile::tempdir().unwrap();
    let good = configuration(dir.path());
    let broken = write(dir.path(), "broken.yaml", "models: []\nworkerz: []\n");
    let unusable = write(dir.path(), "tokenizer.json", "{}");
    let unusable = write(
        dir.path(),
        "unusable.yaml",
        json!({"models": [{"name": "m", "tokenizer": unusable}], "workers": [{"id": 1, "endpoint": "127.0.0.1:8001"}]})
            .to_string(),
    );
    // A model without a chat template is loaded, and the reason names what is missing.
    let settings: Value =
        serde_json::from_slice(&std::fs::read(model_file("tokenizer_config.json")).unwrap())
            .unwrap();
    let mut settings = settings;
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
        "workers": [{"id": 1, "endpoint": "127.0.0.1:8001"}],
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
    let said: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&said["mode"], &said["reason"]),
        (&json!("load_only"), &json!("no_chat_template")),
        "{said}"
    );
    assert!(
        said["sentence"]
            .as_str()
            .unwrap()
            .contains("the model has no chat template"),
        "{said}"
    );
    let nobody = format!("http://127.0.0.1:{}", FreePort::find().unwrap().release());
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
            "the body /nowhere.json cannot be read",
        ),
        (
            &["--admin", &nobody, "--body", "-"],
            1,
            "/debug/explain cannot be reached",
        ),
        (
            &["--admin", "no url", "--body", "-"],
            1,
            "cannot be reached",
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
