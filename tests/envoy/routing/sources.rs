//! Engines with unusual events: another block size, lost batches, silence, a crash. Also the
//! discovery of settings that are not configured.

use std::time::Duration;

use serde_json::{Value, json};
use warmroute_testbed::deployment::{EngineSpec, MODEL};
use warmroute_testbed::ports::{PATIENCE, until};

use crate::routing::bed::{RoutingBed, chat, engine, essay};
use crate::support::model_file;

/// Starts a deployment whose model is configured with this block size.
async fn bed_with_blocks(of: u32, specs: &[EngineSpec]) -> RoutingBed {
    let models = json!([{
        "name": MODEL,
        "tokenizer": model_file("tokenizer.json.gz"),
        "tokenizer_config": model_file("tokenizer_config.json"),
        "block_size": of,
    }]);
    RoutingBed::start(specs, json!({"models": models})).await
}

fn without_replay(id: u64) -> EngineSpec {
    EngineSpec {
        replay: false,
        ..engine(id)
    }
}

/// Returns the event source of a worker from `/debug/fleet`.
async fn source(bed: &RoutingBed, id: u64) -> Value {
    member(bed, id).await["source"].clone()
}

async fn member(bed: &RoutingBed, id: u64) -> Value {
    let fleet = bed.stack.debug_page("fleet").await.unwrap();
    let members = fleet["members"].as_array().unwrap();
    members
        .iter()
        .find(|member| member["rank"]["worker"] == json!(id.to_string()))
        .cloned()
        .unwrap_or_default()
}

async fn assert_status(bed: &RoutingBed, id: u64, freshness: &str, reason: Value) {
    let has_status = async || {
        let source = source(bed, id).await;
        source["freshness"] == freshness && source["reason"] == reason
    };
    assert!(
        until(PATIENCE, has_status).await,
        "{freshness} because {reason}, but {}",
        source(bed, id).await
    );
    let state = [("worker_id", &id.to_string()[..]), ("freshness", freshness)];
    assert_eq!(bed.metric("kv_event_source_freshness", &state).await, 1.0);
}

/// Waits until the events of a response have arrived.
async fn wait_for_batch(bed: &RoutingBed, id: u64, before: &Value) {
    let more = async || source(bed, id).await["batches"] != before["batches"];
    assert!(until(PATIENCE, more).await, "no batch after {before}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn blocks_of_another_size_are_converted() {
    for of in [8, 32] {
        let bed = bed_with_blocks(of, &[engine(1), engine(2)]).await;
        for topic in 1..4 {
            let question = chat(&essay(topic));
            let first = bed.query(&question).await;
            let warm = first.engine();
            let tokens = first.json()["usage"]["prompt_tokens"].as_u64().unwrap();
            // The index contains all blocks that the engine can reuse, up to a boundary of the
            // larger blocks.
            let least = (tokens - 1) / 32 * 32;
            let known = async || {
                let query = bed.query(&question).await;
                query.engine() == warm && query.predicted() >= Some(least)
            };
            assert!(
                until(PATIENCE, known).await,
                "blocks of {of}: {:?}",
                bed.query(&question).await
            );
            let again = bed.query(&question).await;
            assert_eq!(
                (again.mode(), again.engine()),
                ("exact", warm),
                "blocks of {of}: {again:?}"
            );
            let predicted = again.predicted().unwrap();
            let cached = again.cached_tokens();
            assert!(
                predicted <= cached && cached < predicted + 32,
                "blocks of {of}: {predicted} of {cached}"
            );
            assert!(
                of != 8 || predicted == cached,
                "smaller blocks lose no precision: {predicted} of {cached}"
            );
            assert_eq!(source(&bed, warm).await["engine_block_size"], json!(16));
        }
        bed.wait_metric(
            "engine_setting_mismatches",
            &[("setting", "block_size")],
            2.0,
        )
        .await;
        let mismatch =
            json!({"setting": "block_size", "configured": of.to_string(), "engine": "16"});
        let found = member(&bed, 1).await;
        assert_eq!(found["mismatches"], json!([mismatch]));
        let capacity = 8192 * 16 / u64::from(of);
        assert_eq!(
            found["worker"]["capacity"]["total_kv_blocks"],
            json!(capacity),
            "in blocks of {of}: {found}"
        );
        assert_eq!(
            bed.metric(
                "kv_events_total",
                &[("outcome", "filtered_block_size_mismatch")]
            )
            .await,
            0.0
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn silent_source_is_detected_by_responses() {
    let silence = json!({
        "index": {"freshness": {"stale_after": {"requests": 3, "duration": "1s"}}},
    });
    let bed = RoutingBed::start(&[without_replay(1)], silence).await;
    let before = source(&bed, 1).await;
    bed.query(&chat(&essay(0))).await;
    wait_for_batch(&bed, 1, &before).await;
    bed.misbehave(1, json!({"drop_events": {"batches": 1_000_000}}))
        .await;
    for topic in 1..=5 {
        bed.query(&chat(&essay(topic))).await;
    }
    assert_status(&bed, 1, "stale", json!("silent")).await;
    bed.misbehave(1, json!({"drop_events": {"batches": 0}}))
        .await;
    // warmroute reconnects to a silent source, and the batches in between are lost. Several
    // requests may be needed.
    let mut topic = 5;
    let received = async || {
        topic += 1;
        bed.query(&chat(&essay(topic))).await;
        source(&bed, 1).await["reason"] == "lost_batches"
    };
    assert!(until(PATIENCE, received).await, "{}", source(&bed, 1).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn unconfigured_settings_are_discovered_from_engine() {
    let described = engine(1).with_worker_fields(json!({"total_kv_blocks": 77}));
    let bed = RoutingBed::start(
        &[
            described,
            engine(2).with_worker_fields(json!({"kv_events": null})),
        ],
        json!({}),
    )
    .await;
    assert_status(&bed, 2, "exact", Value::Null).await;
    let found = member(&bed, 2).await;
    assert_eq!(
        found["worker"]["capacity"]["total_kv_blocks"],
        json!(8192),
        "{found}"
    );
    assert_eq!(
        (
            &found["engine_settings"]["block_size"],
            &found["mismatches"]
        ),
        (&json!(16), &json!([])),
        "{found}"
    );
    assert!(
        found["worker"]["event_sources"][0]["replay"].is_string(),
        "{found}"
    );
    let reported = async || !member(&bed, 1).await["mismatches"].is_null();
    assert!(until(PATIENCE, reported).await);
    let mismatch = json!([{"setting": "total_kv_blocks", "configured": "77", "engine": "8192"}]);
    let found = member(&bed, 1).await;
    assert_eq!(
        (
            &found["mismatches"],
            &found["worker"]["capacity"]["total_kv_blocks"]
        ),
        (&mismatch, &json!(77))
    );
    tokio::time::timeout(Duration::from_secs(60), bed.query(&chat(&essay(1))))
        .await
        .unwrap();
}
