//! Engines that were started with something wrong, or that misbehave, and a configuration that is well.

use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};

use crate::bed::{Bed, Plan};
use crate::support::ports::FreePort;

struct Fault {
    name: &'static str,
    plan: Plan,
    config: fn(&Bed, &mut Value),
    expected: &'static [(&'static str, &'static str)],
    words: &'static [&'static str],
}

fn as_it_is(_: &Bed, _: &mut Value) {}

fn fault(
    name: &'static str,
    plan: Plan,
    expected: &'static [(&'static str, &'static str)],
    words: &'static [&'static str],
) -> Fault {
    Fault {
        name,
        plan,
        config: as_it_is,
        expected,
        words,
    }
}

/// The engine is one that prefills.
fn prefilling(config: &mut Value, by: &str) {
    config["models"][0]["prefill"] = json!({"by": by});
    config["workers"][0]["role"] = json!("prefill");
    if by == "mirror" {
        config["workers"][0]["bootstrap"] = json!({"port": FreePort::find().unwrap().release()});
    }
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn faults() -> Vec<Fault> {
    const TEMPLATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/doctor/terse.jinja");
    vec![
        fault(
            "without prefix caching",
            Plan::with(&["--no-prefix-caching"]),
            &[
                ("error", "engine.prefix_caching"),
                ("error", "canary.reused"),
                ("error", "events.arrive"),
            ],
            &["start the engine with `--enable-prefix-caching`"],
        ),
        fault(
            "without prompt_tokens_details",
            Plan::with(&["--no-prompt-tokens-details"]),
            &[("warning", "engine.prompt_tokens_details")],
            &["start the engine with `--enable-prompt-tokens-details`"],
        ),
        fault(
            "without events",
            Plan {
                silent: true,
                ..Plan::default()
            },
            &[("error", "events.published"), ("error", "events.replay")],
            &[
                "--kv-events-config '{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \"endpoint\": \"tcp://*:",
            ],
        ),
        Fault {
            config: |_, config| config["workers"][0]["kv_events"] = Value::Null,
            ..fault(
                "without events, and none expected",
                Plan {
                    silent: true,
                    ..Plan::default()
                },
                &[("warning", "events.configured")],
                &["and write `kv_events: {endpoint: \"tcp://127.0.0.1:5557\""],
            )
        },
        fault(
            "a publisher that connects where we connect too",
            Plan {
                connects: true,
                ..Plan::default()
            },
            &[("error", "events.attached")],
            &[
                "\"endpoint\": \"tcp://*:",
                "or write `attach: bind` in the `kv_events` of worker 1",
            ],
        ),
        Fault {
            config: |_, config| config["workers"][0]["kv_events"]["attach"] = json!("bind"),
            ..fault(
                "a publisher that connects to us",
                Plan {
                    connects: true,
                    ..Plan::default()
                },
                &[],
                &[],
            )
        },
        fault(
            "another chat template",
            Plan::with(&["--chat-template", TEMPLATE]),
            &[("error", "engine.tokenizer")],
            &["`chat_template` where the engine runs with `--chat-template`"],
        ),
        fault(
            "another topic",
            Plan::with(&["--topic", "kv@inst-a@qwen"]),
            &[],
            &[],
        ),
        Fault {
            config: |_, config| prefilling(config, "call"),
            ..fault(
                "a prefill worker that hands nothing over, and nobody who decodes",
                Plan::default(),
                &[("error", "engine.handover"), ("warning", "config.prefill")],
                &[
                    "--kv-transfer-config '{\"kv_connector\":\"NixlConnector\"",
                    "write `role: decode` for some of them",
                ],
            )
        },
        Fault {
            config: |_, config| prefilling(config, "call"),
            ..fault(
                "a prefill worker that does",
                Plan::with(&["--kv-connector", "nixl"]),
                &[("warning", "config.prefill")],
                &["write `role: decode` for some of them"],
            )
        },
        Fault {
            config: |_, config| prefilling(config, "mirror"),
            ..fault(
                "a prefill worker that is met elsewhere",
                Plan::default(),
                &[("error", "engine.bootstrap"), ("warning", "config.prefill")],
                &["--disaggregation-mode prefill --disaggregation-bootstrap-port"],
            )
        },
        Fault {
            config: |_, config| config["workers"][0]["kv_events"]["topic"] = json!("kv@inst-b"),
            ..fault(
                "the topic of another instance",
                Plan::with(&["--topic", "kv@inst-a@qwen"]),
                &[("error", "events.topic")],
                &["write `topic: \"kv@inst-a@qwen\"` in the `kv_events` of worker 1"],
            )
        },
        fault(
            "a token to be let in",
            Plan::with(&["--api-key", "secret"]),
            &[("error", "engine.model")],
            &["write the file that holds it as `engines: {token_file: ..}`"],
        ),
        fault(
            "two ranks",
            Plan::with(&["--dp-size", "2"]),
            &[("error", "engine.ranks")],
            &["write `data_parallel: {start: 0, size: 2}` for worker 1"],
        ),
        Fault {
            config: |bed, config| {
                config["workers"][0]["kv_events"]["endpoint"] =
                    json!(format!("tcp://127.0.0.1:{}", bed.events + 1));
                config["workers"][0]["kv_events"]["replay"] =
                    json!(format!("tcp://127.0.0.1:{}", bed.replay + 1));
                config["workers"][0]["data_parallel"] = json!({"start": 0, "size": 1});
            },
            ..fault(
                "the second rank's sockets for the first",
                Plan::with(&["--dp-start", "1", "--dp-size", "1"]),
                &[("error", "engine.ranks"), ("error", "events.rank")],
                &["write `data_parallel: {start: 1, size: 1}` for worker 1"],
            )
        },
        Fault {
            config: |_, config| config["workers"][0]["data_parallel"] = json!({"size": 2}),
            ..fault(
                "two ranks, as configured",
                Plan::with(&["--dp-size", "2"]),
                &[],
                &[],
            )
        },
        fault(
            "an adapter that nobody knows",
            Plan::with(&["--lora", "sql"]),
            &[("warning", "engine.adapters")],
            &["write `adapters: [sql]` for the model qwen2.5 and for worker 1"],
        ),
        fault(
            "events that get lost",
            Plan::with(&["--misbehave", "{\"drop_events\": {\"batches\": 1000000}}"]),
            &[("error", "events.arrive")],
            &["see that the engine of worker 1 publishes there"],
        ),
        fault(
            "no answers",
            Plan::with(&["--misbehave", "{\"refuse\": 503}"]),
            &[("error", "canary.answered")],
            &["send the engine a request by hand"],
        ),
        fault(
            "the pages of a new engine missing",
            Plan::with(&["--no-kv-event-sources", "--no-tokenize", "--no-render"]),
            &[],
            &[],
        ),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_engine_that_was_started_wrongly_is_found_and_mended() {
    let faults = faults();
    let count = faults.len();
    let examined = stream::iter(faults).map(async |fault| {
        let bed = Bed::start(fault.plan).await;
        let mut config = bed.config();
        (fault.config)(&bed, &mut config);
        bed.examine(&config, &[])
            .await
            .assert(fault.name, fault.expected, fault.words);
    });
    assert_eq!(examined.buffer_unordered(3).count().await, count);
}

/// Without a canary nothing is sent, and what it would have shown is not claimed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_canary_no_completion_is_computed() {
    let bed = Bed::start(Plan::with(&["--no-prompt-tokens-details"])).await;
    let examined = bed.examine(&bed.config(), &["--no-canary"]).await;
    examined.assert("no canary", &[], &[]);
    let told = examined
        .findings
        .iter()
        .filter(|one| one["check"].as_str().unwrap().starts_with("canary"))
        .count();
    assert_eq!(told, 0);
    let state: Value = reqwest::get(format!("http://{}/sim/state", bed.address))
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert_eq!(
        state["ranks"][0]["cached"].as_array().unwrap().len(),
        0,
        "{state}"
    );
}
