//! Findings for a healthy engine and a configuration with one fault each.

use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};
use warmroute_testbed::ports::FreePort;

use crate::doctor::bed::{DoctorBed, EnginePlan};

/// Name, configuration, expected findings, and parts of the fix.
type ConfigFault<'a> = (&'a str, Value, &'a [(&'a str, &'a str)], &'a [&'a str]);

/// Returns the configuration of the test bed after a change.
fn planted(bed: &DoctorBed, change: impl FnOnce(&mut Value)) -> Value {
    let mut config = bed.config();
    change(&mut config);
    config
}

fn set_model(config: &mut Value, key: &str, value: Value) {
    config["models"][0][key] = value;
}

fn set_worker(config: &mut Value, key: &str, value: Value) {
    config["workers"]["list"][0][key] = value;
}

fn set_events(config: &mut Value, key: &str, value: Value) {
    config["workers"]["list"][0]["kv_events"][key] = value;
}

/// Returns faults of the model's settings.
fn model_faults(bed: &DoctorBed) -> Vec<ConfigFault<'_>> {
    let tinyllama = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tinyllama");
    let size = |tokens: u32| planted(bed, |config| set_model(config, "block_size", tokens.into()));
    vec![
        (
            "another model name",
            planted(bed, |config| set_model(config, "name", json!("qwen-2.5"))),
            &[("error", "engine.model"), ("error", "canary.answered")],
            &[
                "--served-model-name qwen-2.5",
                "`model: qwen2.5` for worker 1",
            ],
        ),
        (
            "a block size that can be converted",
            size(32),
            &[("warning", "engine.block_size")],
            &[
                "write `block_size: 16` for the model qwen2.5, or start the engine with \
                `--block-size 32`",
            ],
        ),
        (
            "a block size that cannot be converted",
            size(24),
            &[("error", "engine.block_size")],
            &[
                "write `block_size: 16` for the model qwen2.5, or start the engine with \
                `--block-size 24`",
            ],
        ),
        (
            "another tokenizer",
            planted(bed, |config| {
                config["models"][0]["tokenizer"] = json!(format!("{tinyllama}/tokenizer.json.gz"));
                config["models"][0]["tokenizer_config"] =
                    json!(format!("{tinyllama}/tokenizer_config.json"));
            }),
            &[
                ("error", "engine.tokenizer"),
                ("error", "canary.counted"),
                ("error", "events.tokens"),
            ],
            &[
                "`tokenizer`, `tokenizer_config`, and `chat_template` if the engine runs with \
                `--chat-template`",
            ],
        ),
        (
            "no tokenizer",
            planted(bed, |config| {
                config["models"][0] = json!({"name": "qwen2.5"})
            }),
            &[("warning", "config.tokenizer")],
            &["write `tokenizer: ..` and `tokenizer_config: ..` for the model qwen2.5"],
        ),
    ]
}

/// Returns faults of the worker's capacity and adapters.
fn worker_faults(bed: &DoctorBed) -> Vec<ConfigFault<'_>> {
    vec![
        (
            "fewer blocks than the engine has",
            planted(bed, |config| {
                set_worker(config, "total_kv_blocks", json!(100))
            }),
            &[("warning", "engine.capacity")],
            &["write `total_kv_blocks: 8192` for worker 1"],
        ),
        (
            "capacity for a threshold without discovery",
            planted(bed, |config| {
                config["routing"]["overload"] = json!({"decode_blocks_threshold": 0.9});
                config["engines"]["discovery"] = json!({"enabled": false});
            }),
            &[("warning", "engine.capacity")],
            &["write `total_kv_blocks: 8192` for worker 1"],
        ),
        (
            "only the endpoint, with discovery",
            planted(bed, |config| {
                config["routing"]["overload"] = json!({"decode_blocks_threshold": 0.9});
                set_worker(config, "kv_events", Value::Null);
            }),
            &[],
            &[],
        ),
        (
            "an adapter that is not loaded",
            planted(bed, |config| {
                config["models"][0]["adapters"] = json!(["sql"]);
                set_worker(config, "adapters", json!(["sql"]));
            }),
            &[("error", "engine.adapters")],
            &[
                "--enable-lora --lora-modules sql=..",
                "remove it from the `adapters` of worker 1",
            ],
        ),
    ]
}

/// Returns faults of the worker's event source. Nothing listens at `nowhere`.
fn event_faults<'a>(bed: &DoctorBed, nowhere: &str) -> Vec<ConfigFault<'a>> {
    vec![
        (
            "no event source without discovery",
            planted(bed, |config| {
                set_worker(config, "kv_events", Value::Null);
                set_worker(config, "total_kv_blocks", json!(8192));
                config["engines"]["discovery"] = json!({"enabled": false});
            }),
            &[("warning", "events.configured")],
            &[
                "kv_events: {endpoint: \"tcp://127.0.0.1:",
                "topic: \"\", replay_endpoint: \"tcp://127.0.0.1:",
            ],
        ),
        (
            "another event port",
            planted(bed, |config| {
                set_events(config, "endpoint", json!(format!("tcp://{nowhere}")))
            }),
            &[("error", "events.attached")],
            &[
                "write `endpoint: \"tcp://127.0.0.1:",
                "in the `kv_events` of worker 1",
            ],
        ),
        (
            "both sides bind",
            planted(bed, |config| set_events(config, "attach", json!("bind"))),
            &[("error", "events.attached")],
            &["write `attach: connect` and `endpoint: \"tcp://127.0.0.1:"],
        ),
        (
            "another topic",
            planted(bed, |config| {
                set_events(config, "topic", json!("kv@a@qwen"))
            }),
            &[("error", "events.topic")],
            &["write `topic: \"\"` in the `kv_events` of worker 1"],
        ),
        (
            "another replay port",
            planted(bed, |config| {
                set_events(config, "replay_endpoint", json!(format!("tcp://{nowhere}")))
            }),
            &[("error", "events.replay")],
            &["write `replay_endpoint: \"tcp://127.0.0.1:"],
        ),
        (
            "no replay endpoint without discovery",
            planted(bed, |config| {
                set_events(config, "replay_endpoint", Value::Null);
                set_worker(config, "total_kv_blocks", json!(8192));
                config["engines"]["discovery"] = json!({"enabled": false});
            }),
            &[("warning", "events.replay")],
            &["write `replay_endpoint: \"tcp://127.0.0.1:"],
        ),
    ]
}

/// Returns faults of the worker's ranks and of the list of workers.
fn fleet_faults(bed: &DoctorBed) -> Vec<ConfigFault<'_>> {
    vec![
        (
            "another data-parallel rank",
            planted(bed, |config| {
                set_worker(config, "data_parallel", json!({"start": 1, "size": 1}))
            }),
            // Canaries name the rank, as requests do, and the engine rejects it.
            &[
                ("error", "canary.answered"),
                ("error", "engine.ranks"),
                ("error", "events.attached"),
                ("error", "events.replay"),
            ],
            &[],
        ),
        (
            "one rank too many",
            planted(bed, |config| {
                set_worker(config, "data_parallel", json!({"start": 0, "size": 2}))
            }),
            &[
                ("error", "engine.ranks"),
                ("error", "events.attached"),
                ("error", "events.replay"),
                ("error", "canary.answered"),
            ],
            &[
                "write `data_parallel: {start: 0, size: 1}` for worker 1",
                "`--data-parallel-size 2`",
            ],
        ),
        (
            "no workers",
            planted(bed, |config| {
                std::fs::write(bed.dir.path().join("workers.yaml"), "[]").unwrap();
                config["workers"] = json!({"file": "workers.yaml"});
            }),
            &[("error", "config.read")],
            &["list the engines in /tmp/"],
        ),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn configuration_faults_are_found_with_fixes() {
    let bed = &DoctorBed::start(EnginePlan::default()).await;
    let free = FreePort::find().unwrap();
    let nowhere = format!("127.0.0.1:{}", free.number());
    drop(free);
    let mut faults: Vec<ConfigFault<'_>> = vec![
        ("nothing", bed.config(), &[], &[]),
        (
            "an engine that does not run",
            planted(bed, |config| set_worker(config, "endpoint", json!(nowhere))),
            &[("error", "engine.reachable")],
            &[
                "start the engine at this address, or write its `--host` and `--port` as \
                `endpoint` of the worker",
            ],
        ),
    ];
    faults.extend(model_faults(bed));
    faults.extend(worker_faults(bed));
    faults.extend(event_faults(bed, &nowhere));
    faults.extend(fleet_faults(bed));
    let count = faults.len();
    let examined = stream::iter(faults).map(async |(name, config, expected, words)| {
        bed.examine(&config, &[])
            .await
            .assert(name, expected, words);
    });
    assert_eq!(examined.buffer_unordered(3).count().await, count);
}

/// An invalid file causes the same errors as for every command.
#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn invalid_configuration_ends_the_command() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("warmroute.yaml");
    std::fs::write(&file, "models: [{name: m, block_sise: 16}]\nworkers: []\n").unwrap();
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_warmroute"));
    let output = command
        .args(["doctor", "--config"])
        .arg(&file)
        .output()
        .await
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(err.contains("block_sise") && err.contains(":1:"), "{err}");
}
