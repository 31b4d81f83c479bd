//! vLLM's protocol: the prefill engine leases its blocks, and the decode engine fetches them.

use std::time::{Duration, Instant};

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::disaggregation::bed::{kv, stream_text, streamed_kv, text, with};
use crate::engine::{SimulatorProcess, cached_tokens, ids};

const NIXL: [&str; 6] = [
    "--kv-connector",
    "nixl",
    "--bootstrap-port",
    "0",
    "--tokenizer",
    "examples/models/tinyllama/tokenizer.json.gz",
];

async fn engine(flags: &[&str]) -> SimulatorProcess {
    SimulatorProcess::start(&[&NIXL, flags].concat()).await
}

async fn pair() -> (SimulatorProcess, SimulatorProcess) {
    tokio::join!(engine(&[]), engine(&["--kv-load-timeout", "300ms"]))
}

/// Returns the request that a router sends to the prefill engine.
fn prefill_of(body: &Value) -> Value {
    let params = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                        "remote_block_ids": null, "remote_host": null, "remote_port": null});
    with(
        body,
        &json!({"max_tokens": 1, "stream": false, "kv_transfer_params": params}),
    )
}

async fn prefill(engine: &SimulatorProcess, body: &Value) -> Value {
    let mut answer = engine.complete(&prefill_of(body)).await;
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    answer["kv_transfer_params"].take()
}

fn decode_of(body: &Value, params: &Value) -> Value {
    with(body, &json!({"kv_transfer_params": params}))
}

async fn wait_idle(engine: &SimulatorProcess) {
    engine.eventually_metric("kv_leases", 0.0).await;
    engine.eventually("/blocks/used", 0).await;
}

const PROMPT_TOKENS: &str = r#"vllm:prompt_tokens_by_source_total{engine="0",model_name="sim""#;

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn transferred_prompt_responds_like_local_one() {
    let ((prefiller, decoder), alone) = tokio::join!(pair(), engine(&[]));
    let request = ids(100..200, 12);
    let expected = alone.complete(&request).await;
    assert_eq!(expected["kv_transfer_params"], Value::Null);
    assert!(
        expected
            .as_object()
            .unwrap()
            .contains_key("kv_transfer_params")
    );
    for (round, (lender_cached, transferred)) in [(0, 100), (96, 4)].into_iter().enumerate() {
        let params = prefill(&prefiller, &request).await;
        assert_eq!(
            params["remote_block_ids"][0].as_array().unwrap().len(),
            7,
            "{params}"
        );
        assert_eq!(
            (&params["remote_num_tokens"], &params["transfer_mode"]),
            (&json!(100), &json!("pull"))
        );
        assert_eq!(params["remote_prefill_cached_tokens"], lender_cached);
        prefiller.expect_metrics(&[("kv_leases", 1.0)]).await;
        assert_eq!(
            prefiller.state(0).await["blocks"]["used"],
            7,
            "blocks stay pinned until they are fetched"
        );
        let before = decoder.metric(PROMPT_TOKENS).await;
        let answer = decoder.complete(&decode_of(&request, &params)).await;
        assert_eq!(text(&answer), text(&expected));
        // As in vLLM, the value is that of the prefill engine, whatever the decode engine has
        // cached.
        assert_eq!(cached_tokens(&answer), lender_cached);
        assert_eq!(decoder.metric(PROMPT_TOKENS).await - before, 100.0);
        let page = decoder.get("/metrics").await;
        let fetched = page
            .lines()
            .find(|line| line.contains("external_kv_transfer"))
            .unwrap();
        let so_far = if round == 0 {
            transferred
        } else {
            100 + transferred
        };
        assert!(
            fetched.ends_with(&format!(" {so_far}.0")),
            "{fetched}: cached blocks are not fetched"
        );
        decoder
            .expect_metrics(&[
                ("kv_transfers_total", (round + 1) as f64),
                ("kv_mismatches_total", 0.0),
            ])
            .await;
        wait_idle(&prefiller).await;
        wait_idle(&decoder).await;
    }
    prefiller
        .expect_metrics(&[("kv_leases_expired_total", 0.0)])
        .await;
}

/// A mismatch is detected for a prompt that only shares its beginning, for other block ids with the
/// right request id, and for another cache salt.
#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn params_of_similar_request_are_detected() {
    let ((prefiller, decoder), alone) = tokio::join!(pair(), engine(&[]));
    let request = ids(200..270, 4);
    let mut others = prefill(&prefiller, &request).await;
    others["remote_block_ids"] = json!([[90, 91, 92, 93, 94]]);
    let longer = prefill(&prefiller, &ids(200..280, 1)).await;
    let unsalted = prefill(&prefiller, &ids(300..370, 1)).await;
    let mut stream_text = Vec::new();
    for (at, (request, params)) in [
        (request.clone(), others),
        (
            with(
                &request,
                &json!({"prompt": (200..230).chain(900..940).collect::<Vec<_>>()}),
            ),
            longer,
        ),
        (
            with(&ids(300..370, 4), &json!({"cache_salt": "tenant"})),
            unsalted,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let stream = with(&request, &json!({"stream": true}));
        let response = decoder
            .try_post("/v1/completions", &decode_of(&stream, &params), &[])
            .await
            .unwrap();
        assert_eq!(
            (response.status(), response.headers().get("x-engine-kv")),
            (StatusCode::OK, None)
        );
        let stream = response.text().await.unwrap();
        assert_eq!(streamed_kv(&stream), ["mismatch"; 4], "{stream}");
        stream_text.push((
            self::stream_text(&stream),
            text(&alone.complete(&request).await).to_owned(),
        ));
        decoder
            .expect_metrics(&[("kv_mismatches_total", (at + 1) as f64)])
            .await;
    }
    assert!(
        stream_text
            .iter()
            .all(|(stream_text, expected)| stream_text != expected),
        "{stream_text:?}"
    );
    decoder
        .expect_metrics(&[("kv_stale_reads_total", 0.0), ("kv_transfers_total", 0.0)])
        .await;
    wait_idle(&prefiller).await;
    wait_idle(&decoder).await;
}

/// vLLM reads the blocks with the given ids without checking that they still belong to the request.
#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn expired_lease_reads_overwritten_blocks() {
    let prefiller = engine(&["--kv-lease", "1500ms", "--num-blocks", "8"]).await;
    let (decoder, late, alone) = tokio::join!(engine(&[]), engine(&[]), engine(&[]));
    let request = ids(0..100, 6);
    let expected = alone.complete(&request).await;
    let params = prefill(&prefiller, &request).await;
    let response = decoder
        .try_post("/v1/completions", &decode_of(&request, &params), &[])
        .await
        .unwrap();
    assert_eq!(response.headers()["x-engine-kv"], "fetched");
    let first: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
    assert_eq!((text(&first), kv(&first)), (text(&expected), "fetched"));

    // The first reader ended the lease. The blocks have not been reused since, so the text is still
    // right.
    let still_right = late.complete(&decode_of(&request, &params)).await;
    assert_eq!(
        (text(&still_right), kv(&still_right)),
        (text(&expected), "stale")
    );
    late.expect_metrics(&[("kv_stale_reads_total", 1.0), ("kv_mismatches_total", 0.0)])
        .await;

    // The lease expired, and another request has overwritten the blocks.
    let request = ids(1000..1100, 6);
    let params = prefill(&prefiller, &request).await;
    prefiller
        .eventually_metric("kv_leases_expired_total", 1.0)
        .await;
    prefiller.complete(&ids(2000..2120, 1)).await;
    let answer = late.complete(&decode_of(&request, &params)).await;
    assert_eq!(kv(&answer), "mismatch");
    assert_ne!(
        text(&answer),
        text(&alone.complete(&request).await),
        "the status is 200, but the text is wrong"
    );
    late.expect_metrics(&[("kv_stale_reads_total", 2.0), ("kv_mismatches_total", 1.0)])
        .await;

    // An unknown request id reads the right blocks, and does not end the lease of the real request.
    let request = ids(3000..3100, 6);
    let mut params = prefill(&prefiller, &request).await;
    params["remote_request_id"] = json!("unknown");
    let answer = late.complete(&decode_of(&request, &params)).await;
    assert_eq!(
        (text(&answer), kv(&answer)),
        (text(&alone.complete(&request).await), "stale")
    );
    prefiller
        .eventually_metric("kv_leases_expired_total", 2.0)
        .await;
    wait_idle(&late).await;
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn lease_is_renewed_while_decode_waits() {
    let lease = ["--kv-lease", "600ms"];
    let prefiller = engine(&lease).await;
    // Steps take 50 ms. A request that generates 25 tokens holds seven of the eight blocks for
    // twice the lease time.
    let decoder = std::sync::Arc::new(
        engine(&[&lease[..], &["--num-blocks", "8", "--step-us", "1000000"]].concat()).await,
    );
    let occupant = {
        let decoder = decoder.clone();
        tokio::spawn(async move { decoder.complete(&ids(500..600, 25)).await })
    };
    decoder.eventually("/running", 1).await;
    let request = ids(0..100, 4);
    let params = prefill(&prefiller, &request).await;
    let start = Instant::now();
    let answer = decoder.complete(&decode_of(&request, &params)).await;
    assert!(
        start.elapsed() > Duration::from_millis(600),
        "{:?}: it did not wait",
        start.elapsed()
    );
    assert_eq!(answer["usage"]["completion_tokens"], 4);
    occupant.await.unwrap();
    prefiller
        .expect_metrics(&[("kv_leases_expired_total", 0.0)])
        .await;
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn client_leaving_before_fetch_releases_lease() {
    let prefiller = engine(&[]).await;
    let decoder = std::sync::Arc::new(engine(&["--num-blocks", "8", "--step-us", "1000000"]).await);
    let request = ids(0..100, 4);
    let params = prefill(&prefiller, &request).await;
    let send = |body: Value| {
        let decoder = decoder.clone();
        tokio::spawn(async move { decoder.try_post("/v1/completions", &body, &[]).await })
    };
    let occupant = send(ids(500..600, 20));
    decoder.eventually("/running", 1).await;
    let waits = send(decode_of(&request, &params));
    decoder.eventually("/waiting", 1).await;
    prefiller.expect_metrics(&[("kv_leases", 1.0)]).await;
    waits.abort();
    wait_idle(&prefiller).await;
    prefiller
        .expect_metrics(&[("kv_leases_expired_total", 0.0)])
        .await;
    occupant.abort();
    wait_idle(&decoder).await;
    decoder.expect_metrics(&[("kv_transfers_total", 0.0)]).await;
}
