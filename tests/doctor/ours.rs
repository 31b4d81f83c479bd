//! One engine that is well, and a configuration in which one thing is wrong.

use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};

use crate::bed::{Bed, Plan};
use crate::support::ports::FreePort;

/// A mistake, what is found of it, and words of its mend.
type Fault<'a> = (&'a str, Value, &'a [(&'a str, &'a str)], &'a [&'a str]);

/// The configuration with another value at some place.
fn planted(bed: &Bed, change: impl FnOnce(&mut Value)) -> Value {
    let mut config = bed.config();
    change(&mut config);
    config
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::too_many_lines, reason = "a table")]
async fn each_mistake_in_our_configuration_is_found_and_mended() {
    let bed = Bed::start(Plan::default()).await;
    let free = FreePort::find().unwrap();
    let nowhere = format!("127.0.0.1:{}", free.number());
    drop(free);
    let tinyllama = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tinyllama");
    let worker = |config: &mut Value, key: &str, value: Value| config["workers"][0][key] = value;
    let events = |config: &mut Value, key: &str, value: Value| {
        config["workers"][0]["kv_events"][key] = value
    };
    let size = |bytes: u32| {
        planted(&bed, |config| {
            config["models"][0]["block_size"] = bytes.into()
        })
    };

    let faults: Vec<Fault<'_>> = vec![
        ("nothing", bed.config(), &[], &[]),
        (
            "an engine that is not there",
            planted(&bed, |config| worker(config, "endpoint", json!(nowhere))),
            &[("error", "engine.reachable")],
            &[
                "start the engine there, or write its `--host` and `--port` as `endpoint` of worker 1",
            ],
        ),
        (
            "another name of the model",
            planted(&bed, |config| {
                config["models"][0]["name"] = json!("qwen-2.5")
            }),
            &[("error", "engine.model"), ("error", "canary.answered")],
            &[
                "--served-model-name qwen-2.5",
                "`model: qwen2.5` for worker 1",
            ],
        ),
        (
            "a block size that can be brought to ours",
            size(32),
            &[("warning", "engine.block_size")],
            &[
                "write `block_size: 16` for the model qwen2.5, or start the engine with `--block-size 32`",
            ],
        ),
        (
            "a block size that cannot",
            size(24),
            &[("error", "engine.block_size")],
            &[
                "write `block_size: 16` for the model qwen2.5, or start the engine with `--block-size 24`",
            ],
        ),
        (
            "another tokenizer",
            planted(&bed, |config| {
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
                "`tokenizer`, `tokenizer_config`, and `chat_template` where the engine runs with `--chat-template`",
            ],
        ),
        (
            "no tokenizer",
            planted(&bed, |config| {
                config["models"][0] = json!({"name": "qwen2.5"})
            }),
            &[("warning", "config.tokenizer")],
            &["write `tokenizer: ..` and `tokenizer_config: ..` for the model qwen2.5"],
        ),
        (
            "fewer blocks than there are",
            planted(&bed, |config| worker(config, "total_kv_blocks", json!(100))),
            &[("warning", "engine.capacity")],
            &["write `total_kv_blocks: 8192` for worker 1"],
        ),
        (
            "blocks that a threshold needs, and nobody asks",
            planted(&bed, |config| {
                config["overload"] = json!({"decode_blocks": 0.9});
                config["learn"] = json!({"enabled": false});
            }),
            &[("warning", "engine.capacity")],
            &["write `total_kv_blocks: 8192` for worker 1"],
        ),
        (
            "nothing but the endpoint, and the engine tells the rest",
            planted(&bed, |config| {
                config["overload"] = json!({"decode_blocks": 0.9});
                worker(config, "kv_events", Value::Null);
            }),
            &[],
            &[],
        ),
        (
            "an adapter that is not loaded",
            planted(&bed, |config| {
                config["models"][0]["adapters"] = json!(["sql"]);
                worker(config, "adapters", json!(["sql"]));
            }),
            &[("error", "engine.adapters")],
            &[
                "--enable-lora --lora-modules sql=..",
                "take it out of the `adapters` of worker 1",
            ],
        ),
        (
            "no word of the events, and nobody asks",
            planted(&bed, |config| {
                worker(config, "kv_events", Value::Null);
                config["learn"] = json!({"enabled": false});
            }),
            &[("warning", "events.configured")],
            &[
                "kv_events: {endpoint: \"tcp://127.0.0.1:",
                "topic: \"\", replay: \"tcp://127.0.0.1:",
            ],
        ),
        (
            "another port of the events",
            planted(&bed, |config| {
                events(config, "endpoint", json!(format!("tcp://{nowhere}")))
            }),
            &[("error", "events.attached")],
            &[
                "write `endpoint: \"tcp://127.0.0.1:",
                "in the `kv_events` of worker 1",
            ],
        ),
        (
            "both sides bind",
            planted(&bed, |config| events(config, "attach", json!("bind"))),
            &[("error", "events.attached")],
            &["write `attach: connect` and `endpoint: \"tcp://127.0.0.1:"],
        ),
        (
            "another topic",
            planted(&bed, |config| events(config, "topic", json!("kv@a@qwen"))),
            &[("error", "events.topic")],
            &["write `topic: \"\"` in the `kv_events` of worker 1"],
        ),
        (
            "another port of the replay",
            planted(&bed, |config| {
                events(config, "replay", json!(format!("tcp://{nowhere}")))
            }),
            &[("error", "events.replay")],
            &["write `replay: \"tcp://127.0.0.1:"],
        ),
        (
            "no replay though there is one, and nobody asks",
            planted(&bed, |config| {
                events(config, "replay", Value::Null);
                config["learn"] = json!({"enabled": false});
            }),
            &[("warning", "events.replay")],
            &["write `replay: \"tcp://127.0.0.1:"],
        ),
        (
            "a rank that is another",
            planted(&bed, |config| {
                worker(config, "data_parallel", json!({"start": 1, "size": 1}))
            }),
            &[
                ("error", "engine.ranks"),
                ("error", "events.attached"),
                ("error", "events.replay"),
            ],
            &[],
        ),
        (
            "a rank too many",
            planted(&bed, |config| {
                worker(config, "data_parallel", json!({"start": 0, "size": 2}))
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
            "nobody to send to",
            planted(&bed, |config| {
                std::fs::write(bed.dir.path().join("workers.yaml"), "[]").unwrap();
                config.as_object_mut().unwrap().remove("workers");
                config["workers_file"] = json!("workers.yaml");
            }),
            &[("error", "config.read")],
            &["list the engines in /tmp/"],
        ),
    ];
    let count = faults.len();
    let examined = stream::iter(faults).map(async |(name, config, expected, words)| {
        bed.examine(&config, &[])
            .await
            .assert(name, expected, words);
    });
    assert_eq!(examined.buffer_unordered(3).count().await, count);
}

/// The mistakes of a file that cannot be used are told as by every command.
#[tokio::test]
async fn a_configuration_with_a_mistake_is_not_looked_at_further() {
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
