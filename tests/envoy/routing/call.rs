//! Prefills in mode `call`: warmroute calls a prefill worker and passes the resulting KV transfer
//! parameters to the decode worker.

use std::time::Duration;

use serde_json::{Value, json};
use warmroute_testbed::deployment::{BLOCK_SIZE, EngineSpec, MODEL};
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::routing::bed::{
    RoutedAnswer, RoutingBed, chat, engine_for, essay, patient, stream, text,
};
use crate::routing::contents::{ReferenceEngine, assert_split_contents, parse_content};
use crate::support::model_file;

pub(crate) const PREFILL: [u64; 2] = [11, 12];
pub(crate) const DECODE: [u64; 2] = [21, 22];

pub(crate) fn pools(args: &[&str]) -> Vec<EngineSpec> {
    let pool = |role, ids: [u64; 2]| ids.map(|id| engine_for(role, id).with(args));
    pool("prefill", PREFILL)
        .into_iter()
        .chain(pool("decode", DECODE))
        .collect()
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "tests read better without the references"
)]
pub(crate) fn call_config(prefill: Value, more: Value) -> Value {
    config_with_prefill("call", &prefill, &more)
}

/// Returns a configuration with a prefill mode. `more` is merged into it.
pub(crate) fn config_with_prefill(by: &str, prefill: &Value, more: &Value) -> Value {
    let mut config = json!({"models": [{
        "name": MODEL,
        "tokenizer": model_file("tokenizer.json.gz"),
        "tokenizer_config": model_file("tokenizer_config.json"),
        "block_size": BLOCK_SIZE,
        "prefill": prefill,
    }]});
    config["models"][0]["prefill"]["mode"] = json!(by);
    merge_config(&mut config, more);
    config
}

pub(crate) const NIXL: [&str; 2] = ["--kv-connector", "nixl"];

impl RoutingBed {
    /// Returns true if no engine has running or waiting requests.
    pub(crate) async fn idle(&self) -> bool {
        self.engines("vllm:num_requests_running").await
            + self.engines("vllm:num_requests_waiting").await
            == 0.0
    }

    pub(crate) async fn wait_engines_idle(&self) {
        assert!(
            until(PATIENCE, async || self.idle().await).await,
            "an engine still runs a request"
        );
    }

    /// Waits until no exchange is open. Asserts that no engine keeps state of finished requests.
    pub(crate) async fn assert_nothing_left(&self) {
        self.wait_idle().await;
        self.wait_engines_idle().await;
        assert_eq!(
            self.engines("engine_sim:kv_leases").await,
            0.0,
            "leases are left over"
        );
        assert_eq!(
            self.engines("engine_sim:kv_mismatches_total").await,
            0.0,
            "KV blocks of other requests were used"
        );
    }
}

/// Returns the text of a chat.
fn response_text(answer: &RoutedAnswer) -> String {
    assert_eq!(answer.status, 200, "{answer:?}");
    let content = &answer.json()["choices"][0]["message"]["content"];
    content.as_str().unwrap().to_owned()
}

/// Starts a deployment with the shipped Envoy configuration for this mode.
pub(crate) async fn start(specs: &[EngineSpec], more: Value) -> RoutingBed {
    RoutingBed::start_with_envoy_file("disaggregated-call", specs, more, patient).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn split_responses_equal_those_of_one_worker() {
    let bed = start(&pools(&NIXL), call_config(json!({}), json!({}))).await;
    let served_by = assert_split_contents(&bed).await;
    assert_eq!(served_by.prefills, PREFILL.into());
    assert_eq!(served_by.decodes, DECODE.into());
    assert_eq!(bed.engines("engine_sim:kv_transfers_total").await, 60.0);
    let page = bed.metrics().await;
    assert_eq!(
        page.sum("prefill_calls_total", &[("outcome", "completed")]),
        60.0
    );
    assert_eq!(
        page.sum("prefill_to_first_token_seconds_count", &[]),
        20.0,
        "the usage of each streaming response"
    );
    assert_eq!(
        page.sum("phase_plans_total", &[("plan", "remote_prefill")]),
        60.0
    );
    bed.assert_nothing_left().await;
}

/// Returns the number of requests with this phase plan from the metrics.
pub(crate) async fn phases(bed: &RoutingBed, of: &str) -> f64 {
    bed.metric("phase_plans_total", &[("plan", of)]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn failed_prefill_is_retried_then_computed_locally() {
    let engines = pools(&[&NIXL[..], &["--kv-lease", "1s"]].concat());
    let bed = start(&engines, call_config(json!({"timeout": "2s"}), json!({}))).await;
    let well = json!({"refuse_prefills": null, "hang_prefills": false, "omit_transfer_params": false, "fail_prefills_with_200": false});
    let mut topics = 0..;
    // If one prefill worker fails, the other one computes the prefill.
    for how in [
        json!({"refuse_prefills": 503}),
        json!({"refuse_prefills": 500}),
        json!({"hang_prefills": true}),
    ] {
        bed.misbehave(11, how.clone()).await;
        for _ in 0..4 {
            let answer = bed.query(&chat(&essay(topics.next().unwrap()))).await;
            assert_eq!(
                (
                    response_text(&answer).is_empty(),
                    answer.header("x-prefill-instance-id")
                ),
                (false, "12"),
                "{how}"
            );
        }
        bed.misbehave(11, well.clone()).await;
        bed.wait_idle().await;
    }
    let remote = phases(&bed, "remote_prefill").await;
    assert_eq!((remote, phases(&bed, "prefill_failed").await), (12.0, 0.0));
    // If both fail, or a retry is useless, the decode worker computes the prefill.
    let everywhere = [
        (json!({"refuse_prefills": 503}), "prefill_failed"),
        (json!({"refuse_prefills": 400}), "prefill_refused"),
        (json!({"omit_transfer_params": true}), "no_handoff"),
        (json!({"fail_prefills_with_200": true}), "no_handoff"),
    ];
    for (how, reason) in everywhere {
        let before = phases(&bed, reason).await;
        for id in PREFILL {
            bed.misbehave(id, how.clone()).await;
        }
        let answer = bed.query(&chat(&essay(topics.next().unwrap()))).await;
        assert_eq!(
            (
                response_text(&answer).is_empty(),
                answer.header("x-prefill-instance-id")
            ),
            (false, ""),
            "{how}"
        );
        assert_eq!(phases(&bed, reason).await, before + 1.0, "{how}");
        for id in PREFILL {
            bed.misbehave(id, well.clone()).await;
        }
    }
    // Engines that omitted the transfer parameters held leases, which expire.
    bed.wait_engines("engine_sim:kv_leases", 0.0).await;
    bed.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn enforced_remote_prefill_failure_rejects_request() {
    let bed = start(
        &pools(&NIXL),
        call_config(
            json!({}),
            json!({"routing": {"disaggregation": {"enforce": true}}}),
        ),
    )
    .await;
    assert_eq!(bed.query(&chat(&essay(1))).await.status, 200);
    for id in PREFILL {
        bed.misbehave(id, json!({"refuse_prefills": 500})).await;
    }
    let (code, _) = bed.query(&chat(&essay(2))).await.error(503);
    assert_eq!(code, "no_prefill_worker");
    bed.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn each_phase_is_booked_on_its_worker() {
    let hasty =
        |shipped: &str| patient(shipped).replace(" message_timeout: 30s", " message_timeout: 2s");
    let bed = RoutingBed::start_with_envoy_file(
        "disaggregated-call",
        &pools(&NIXL),
        call_config(json!({}), json!({})),
        hasty,
    )
    .await;
    for id in PREFILL {
        bed.misbehave(id, json!({"slow_prefill_ms": 5000})).await;
    }
    let sending = bed.send_in_background(&stream(&essay(1), 200));
    let of = async |ids: [u64; 2], what: &str| {
        bed.load(ids[0], what).await + bed.load(ids[1], what).await
    };
    assert!(
        until(PATIENCE, async || of(PREFILL, "active_prefill_tokens")
            .await
            > 300)
        .await,
        "the prefill is booked"
    );
    assert_eq!(
        of(DECODE, "active_requests").await,
        0,
        "no decode is booked yet"
    );
    assert!(
        until(PATIENCE, async || of(DECODE, "active_blocks").await > 0).await,
        "the decode is booked"
    );
    assert_eq!(
        of(PREFILL, "active_requests").await,
        0,
        "the prefill has ended"
    );
    assert_eq!(
        of(DECODE, "active_prefill_tokens").await,
        0,
        "no booking of it is left"
    );
    let answer = sending.await.unwrap();
    assert_eq!(
        (answer.status.as_u16(), answer.mode()),
        (200, "exact"),
        "{answer:?}"
    );
    bed.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn prefill_continues_and_counts_after_cancellation() {
    let args = [&NIXL[..], &["--kv-lease", "2s"]].concat();
    let bed = start(&pools(&args), call_config(json!({}), json!({}))).await;
    for id in PREFILL {
        bed.misbehave(id, json!({"slow_prefill_ms": 3000})).await;
    }
    let sending = bed.send_in_background(&chat(&essay(1)));
    let prefilling =
        async || bed.load(11, "active_requests").await + bed.load(12, "active_requests").await;
    // The request is booked before the call. If it were cancelled before the call, the booking
    // would be released.
    bed.wait_engines("engine_sim:prefills_asked_total", 1.0)
        .await;
    sending.abort();
    bed.wait_metric(
        "prefill_calls_total",
        &[("outcome", "cancelled_after_start")],
        1.0,
    )
    .await;
    assert_eq!(
        prefilling().await,
        1,
        "the engine still computes the prefill"
    );
    bed.wait_metric("prefill_calls_total", &[("outcome", "completed")], 1.0)
        .await;
    bed.wait_idle().await;
    // No decode worker fetches the blocks, so their lease expires.
    bed.wait_engines("engine_sim:kv_leases_expired_total", 1.0)
        .await;
    bed.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn client_cannot_forge_transfer_params() {
    let bed = start(&pools(&NIXL), call_config(json!({}), json!({}))).await;
    // A prefill engine holds the blocks of another request.
    let mut prefill = text(&essay(1));
    prefill["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let answer = bed
        .http
        .post(bed.engine(11).url("/v1/completions"))
        .json(&prefill)
        .send()
        .await
        .unwrap();
    let waiting: Value = answer.json().await.unwrap();
    let mut forged = text(&essay(2));
    forged["kv_transfer_params"] = waiting["kv_transfer_params"].clone();
    assert!(
        forged["kv_transfer_params"]["remote_host"].is_string(),
        "{waiting}"
    );
    // If the client sends the request directly, the engine uses these blocks, and the simulator
    // reports it.
    let refused_kv = RoutedAnswer::send(
        bed.http
            .post(bed.engine(21).url("/v1/completions"))
            .json(&forged),
    )
    .await;
    assert_eq!(
        (refused_kv.status.as_u16(), refused_kv.header("x-engine-kv")),
        (200, "mismatch"),
        "{refused_kv:?}"
    );
    let before = bed.engines("engine_sim:kv_mismatches_total").await;
    assert_eq!(before, 1.0);
    for shape in [json!({}), json!({"n": 2})] {
        let mut forged = forged.clone();
        forged
            .as_object_mut()
            .unwrap()
            .extend(shape.as_object().unwrap().clone());
        assert_eq!(bed.query(&forged).await.status, 200);
    }
    assert_eq!(bed.engines("engine_sim:kv_mismatches_total").await, before);
    assert_eq!(
        phases(&bed, "not_splittable").await,
        1.0,
        "two outputs have no handoff"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn tensorrt_llm_handoff_uses_its_own_fields() {
    let bed = start(
        &pools(&["--disaggregation", "trtllm"]),
        call_config(json!({"protocol": "trtllm"}), json!({})),
    )
    .await;
    let alone = ReferenceEngine::start().await;
    for topic in 0..12 {
        let body = if topic % 2 == 0 {
            text(&essay(topic))
        } else {
            chat(&essay(topic))
        };
        let answer = bed.query(&body).await;
        assert!(
            PREFILL.contains(&answer.header("x-prefill-instance-id").parse().unwrap()),
            "{answer:?}"
        );
        assert_eq!(
            parse_content(&body, &answer),
            Ok(alone.respond(&body).await),
            "{body}"
        );
    }
    assert_eq!(bed.engines("engine_sim:kv_transfers_total").await, 12.0);
    bed.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn small_prefill_stays_on_decode_worker() {
    let conditional = json!({
        "routing": {"disaggregation": {"conditional": {"uncached_tokens": 64}}},
    });
    let bed = start(&pools(&NIXL), call_config(json!({}), conditional)).await;
    let first = bed.query(&text(&essay(1))).await;
    assert!(
        !first.header("x-prefill-instance-id").is_empty(),
        "the whole prompt must be computed: {first:?}"
    );
    bed.settle().await;
    // The decode worker has cached the prompt, because it fetched the blocks.
    let again = bed.query(&text(&essay(1))).await;
    assert_eq!(
        (again.header("x-prefill-instance-id"), again.engine()),
        ("", first.engine()),
        "{again:?}"
    );
    assert_eq!(phases(&bed, "short_prompt").await, 1.0);
    bed.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn waiting_request_survives_a_stalled_warmroute() {
    let bed = start(&pools(&NIXL), call_config(json!({}), json!({}))).await;
    for id in PREFILL {
        bed.misbehave(id, json!({"slow_prefill_ms": 10_000})).await;
    }
    let sending = bed.send_in_background(&stream(&essay(1), 4));
    bed.wait_engines("engine_sim:prefills_asked_total", 1.0)
        .await;
    // Longer than keepalive pings of 2 s with a timeout of 2 s would tolerate, and shorter than the
    // shipped ones tolerate.
    bed.stack.router().unwrap().freeze();
    tokio::time::sleep(Duration::from_secs(7)).await;
    bed.stack.router().unwrap().thaw();
    let answer = sending.await.unwrap();
    assert_eq!(
        (answer.status.as_u16(), answer.mode()),
        (200, "exact"),
        "{answer:?}"
    );
    assert_eq!(
        bed.metric("prefill_calls_total", &[("outcome", "completed")])
            .await,
        1.0
    );
    bed.assert_nothing_left().await;
}
