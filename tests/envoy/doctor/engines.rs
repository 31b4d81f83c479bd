//! Misconfigured or misbehaving engines with a correct configuration.

use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};
use warmroute_testbed::ports::FreePort;

use crate::doctor::bed::{DoctorBed, EnginePlan};

struct EngineFault {
    name: &'static str,
    plan: EnginePlan,
    config: fn(&DoctorBed, &mut Value),
    expected: &'static [(&'static str, &'static str)],
    words: &'static [&'static str],
}

fn unchanged(_: &DoctorBed, _: &mut Value) {}

fn fault(
    name: &'static str,
    plan: EnginePlan,
    expected: &'static [(&'static str, &'static str)],
    words: &'static [&'static str],
) -> EngineFault {
    EngineFault {
        name,
        plan,
        config: unchanged,
        expected,
        words,
    }
}

fn events(config: &mut Value) -> &mut Value {
    &mut config["workers"]["list"][0]["kv_events"]
}

/// Configures the engine as a prefill worker.
fn prefilling(config: &mut Value, by: &str) {
    config["models"][0]["prefill"] = json!({"mode": by});
    config["workers"]["list"][0]["role"] = json!("prefill");
    if by == "mirror" {
        config["workers"]["list"][0]["bootstrap"] =
            json!({"port": FreePort::find().unwrap().release()});
    }
}

const TEMPLATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/doctor/terse.jinja");

/// Returns faults of KV events.
fn event_faults() -> Vec<EngineFault> {
    vec![
        fault(
            "without events",
            EnginePlan::without_events(),
            &[("error", "events.published"), ("error", "events.replay")],
            &[
                "--kv-events-config '{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \
                \"endpoint\": \"tcp://*:",
            ],
        ),
        EngineFault {
            config: |_, config| config["workers"]["list"][0]["kv_events"] = Value::Null,
            ..fault(
                "without events, and none expected",
                EnginePlan::without_events(),
                &[("warning", "events.configured")],
                &["and write `kv_events: {endpoint: \"tcp://127.0.0.1:5557\""],
            )
        },
        fault(
            "publisher and warmroute both connect",
            EnginePlan::connecting(),
            &[("error", "events.attached")],
            &[
                "\"endpoint\": \"tcp://*:",
                "or write `attach: bind` in the `kv_events` of worker 1",
            ],
        ),
        EngineFault {
            config: |_, config| config["workers"]["list"][0]["kv_events"]["attach"] = json!("bind"),
            ..fault(
                "publisher connects and warmroute binds",
                EnginePlan::connecting(),
                &[],
                &[],
            )
        },
        fault(
            "another topic of the engine",
            EnginePlan::with(&["--topic", "kv@inst-a@qwen"]),
            &[],
            &[],
        ),
        EngineFault {
            config: |_, config| events(config)["topic"] = json!("kv@inst-b"),
            ..fault(
                "the topic of another instance",
                EnginePlan::with(&["--topic", "kv@inst-a@qwen"]),
                &[("error", "events.topic")],
                &["write `topic: \"kv@inst-a@qwen\"` in the `kv_events` of worker 1"],
            )
        },
        fault(
            "lost events",
            EnginePlan::with(&["--misbehave", "{\"drop_events\": {\"batches\": 1000000}}"]),
            &[("error", "events.arrive")],
            &["make the engine of worker 1 publish there"],
        ),
    ]
}

/// Returns faults of the engine's flags, model and API.
fn engine_faults() -> Vec<EngineFault> {
    vec![
        fault(
            "without prefix caching",
            EnginePlan::with(&["--no-prefix-caching"]),
            &[
                ("error", "engine.prefix_caching"),
                ("error", "canary.reused"),
                ("error", "events.arrive"),
            ],
            &["start the engine with `--enable-prefix-caching`"],
        ),
        fault(
            "without prompt_tokens_details",
            EnginePlan::with(&["--no-prompt-tokens-details"]),
            &[("warning", "engine.prompt_tokens_details")],
            &["start the engine with `--enable-prompt-tokens-details`"],
        ),
        fault(
            "another chat template",
            EnginePlan::with(&["--chat-template", TEMPLATE]),
            &[("error", "engine.tokenizer")],
            &["`chat_template` if the engine runs with `--chat-template`"],
        ),
        fault(
            "a required token",
            EnginePlan::with(&["--api-key", "secret"]),
            &[("error", "engine.model")],
            &["set its file as `engines: {http: {token_file: ..}}`"],
        ),
        fault(
            "an adapter that is not configured",
            EnginePlan::with(&["--lora", "sql"]),
            &[],
            &[],
        ),
        fault(
            "no responses",
            EnginePlan::with(&["--misbehave", "{\"refuse\": 503}"]),
            &[("error", "canary.answered")],
            &["send the engine a request by hand"],
        ),
        fault(
            "endpoints of newer engines missing",
            EnginePlan::with(&["--no-kv-event-sources", "--no-tokenize", "--no-render"]),
            &[],
            &[],
        ),
    ]
}

/// Returns faults of prefill workers.
fn prefill_faults() -> Vec<EngineFault> {
    vec![
        EngineFault {
            config: |_, config| prefilling(config, "call"),
            ..fault(
                "a prefill worker without KV handoff, and no decode worker",
                EnginePlan::default(),
                &[("error", "engine.kv_handoff"), ("warning", "config.advice")],
                &[
                    "--kv-transfer-config '{\"kv_connector\":\"NixlConnector\"",
                    "set `role: decode` for some of its workers",
                ],
            )
        },
        EngineFault {
            config: |_, config| prefilling(config, "call"),
            ..fault(
                "a prefill worker with KV handoff, and no decode worker",
                EnginePlan::with(&["--kv-connector", "nixl"]),
                &[("warning", "config.advice")],
                &["set `role: decode` for some of its workers"],
            )
        },
        EngineFault {
            config: |_, config| prefilling(config, "mirror"),
            ..fault(
                "a prefill worker with another bootstrap port",
                EnginePlan::default(),
                &[("error", "engine.bootstrap"), ("warning", "config.advice")],
                &["--disaggregation-mode prefill --disaggregation-bootstrap-port"],
            )
        },
    ]
}

/// Returns faults of data-parallel ranks.
fn rank_faults() -> Vec<EngineFault> {
    vec![
        fault(
            "two ranks",
            EnginePlan::with(&["--dp-size", "2"]),
            &[("error", "engine.ranks")],
            &["write `data_parallel: {start: 0, size: 2}` for worker 1"],
        ),
        EngineFault {
            config: |bed, config| {
                config["workers"]["list"][0]["kv_events"]["endpoint"] =
                    json!(format!("tcp://127.0.0.1:{}", bed.events + 1));
                config["workers"]["list"][0]["kv_events"]["replay_endpoint"] =
                    json!(format!("tcp://127.0.0.1:{}", bed.replay + 1));
                config["workers"]["list"][0]["data_parallel"] = json!({"start": 0, "size": 1});
            },
            ..fault(
                "the sockets of the second rank configured for the first",
                EnginePlan::with(&["--dp-start", "1", "--dp-size", "1"]),
                // Canaries name the rank, as requests do, and the engine rejects it.
                &[("error", "canary.answered"), ("error", "engine.ranks")],
                &["write `data_parallel: {start: 1, size: 1}` for worker 1"],
            )
        },
        EngineFault {
            config: |_, config| config["workers"]["list"][0]["data_parallel"] = json!({"size": 2}),
            ..fault(
                "two ranks, as configured",
                EnginePlan::with(&["--dp-size", "2"]),
                &[],
                &[],
            )
        },
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn engine_faults_are_found_with_fixes() {
    let faults: Vec<EngineFault> = [
        event_faults(),
        engine_faults(),
        prefill_faults(),
        rank_faults(),
    ]
    .into_iter()
    .flatten()
    .collect();
    let count = faults.len();
    let examined = stream::iter(faults).map(async |fault| {
        let bed = DoctorBed::start(fault.plan).await;
        let mut config = bed.config();
        (fault.config)(&bed, &mut config);
        bed.examine(&config, &[])
            .await
            .assert(fault.name, fault.expected, fault.words);
    });
    assert_eq!(examined.buffer_unordered(3).count().await, count);
}

/// With `--no-canary`, the doctor sends no completion and reports no canary checks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn no_canary_sends_no_completion() {
    let bed = DoctorBed::start(EnginePlan::with(&["--no-prompt-tokens-details"])).await;
    let examined = bed.examine(&bed.config(), &["--no-canary"]).await;
    examined.assert("no canary", &[], &[]);
    let reported = examined
        .findings
        .iter()
        .filter(|one| one["check"].as_str().unwrap().starts_with("canary"))
        .count();
    assert_eq!(reported, 0);
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
