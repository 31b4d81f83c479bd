//! SGLang's protocol: both engines receive the same request and connect through a bootstrap room.

use std::sync::Arc;
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::disaggregation::bed::{
    DisaggregatedEngine, PATIENCE, ids, kv, stream_text, streamed_kv, text, with,
};

async fn prefiller(flags: &[&str]) -> Arc<DisaggregatedEngine> {
    Arc::new(
        DisaggregatedEngine::start(&[&["--disaggregation-mode", "prefill"], flags].concat()).await,
    )
}

async fn decoder(flags: &[&str]) -> Arc<DisaggregatedEngine> {
    Arc::new(
        DisaggregatedEngine::start(&[&["--disaggregation-mode", "decode"], flags].concat()).await,
    )
}

/// Returns the request that a router sends to both engines.
fn in_room(body: &Value, prefiller: &DisaggregatedEngine, room: impl serde::Serialize) -> Value {
    let (host, port) = prefiller
        .bootstrap
        .as_ref()
        .unwrap()
        .rsplit_once(':')
        .unwrap();
    let port: u16 = port.parse().unwrap();
    with(
        body,
        &json!({"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}),
    )
}

fn send(engine: &Arc<DisaggregatedEngine>, body: &Value) -> JoinHandle<(StatusCode, String)> {
    let engine = engine.clone();
    let body = body.clone();
    tokio::spawn(async move { engine.post("/v1/completions", &body).await })
}

async fn wait_idle(engine: &DisaggregatedEngine) {
    engine.eventually_metric("kv_leases", 0.0).await;
    engine.eventually("/blocks/used", 0).await;
    engine.eventually("/waiting", 0).await;
    engine.eventually_metric("rooms_waiting", 0.0).await;
}

#[tokio::test]
async fn concurrent_rooms_respond_like_one_engine() {
    let (prefiller, decoder, alone) = tokio::join!(
        prefiller(&[]),
        decoder(&[]),
        DisaggregatedEngine::start(&[])
    );
    let prompts = [
        in_room(&ids(0..100, 9), &prefiller, 11),
        in_room(&ids(300..400, 9), &prefiller, 12),
    ];
    let first = send(&decoder, &with(&prompts[0], &json!({"stream": true})));
    decoder.eventually("/waiting", 1).await;
    let second = send(&prefiller, &prompts[1]);
    let prefilled = send(&prefiller, &prompts[0]);
    let decoded = send(&decoder, &prompts[1]);
    let (status, stream) = first.await.unwrap();
    assert_eq!(status, StatusCode::OK, "{stream}");
    let expected = alone.complete(&prompts[0]).await;
    assert_eq!(
        stream_text(&stream),
        (text(&expected).to_owned(), vec!["length".to_owned()])
    );
    let (status, answer) = decoded.await.unwrap();
    assert_eq!(status, StatusCode::OK, "{answer}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(
        (text(&answer), kv(&answer)),
        (text(&alone.complete(&prompts[1]).await), "fetched")
    );
    assert_eq!(streamed_kv(&stream), ["fetched"; 9]);
    for prefilled in [prefilled, second] {
        let (status, answer) = prefilled.await.unwrap();
        assert_eq!(status, StatusCode::OK, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(
            answer["usage"]["completion_tokens"], 1,
            "whatever max_tokens says"
        );
    }
    for engine in [&prefiller, &decoder] {
        let counts = [
            ("rooms_met_total", 2.0),
            ("rooms_unmet_total", 0.0),
            ("rooms_mismatched_total", 0.0),
        ];
        engine.expect_metrics(&counts).await;
        wait_idle(engine).await;
    }
    decoder.expect_metrics(&[("kv_transfers_total", 2.0)]).await;
}

#[tokio::test]
async fn batch_prompts_have_rooms_on_their_ranks() {
    let (prefiller, decoder) = tokio::join!(prefiller(&["--dp-size", "2"]), decoder(&[]));
    let body = json!({"model": "sim", "prompt": [[1, 2, 3], [4, 5, 6, 7]], "max_tokens": 3});
    for room in [json!([6, 9]), json!(20)] {
        let body = in_room(&body, &prefiller, room);
        let prefilled = send(&prefiller, &body);
        let decoded = send(&decoder, &body);
        assert_eq!(prefilled.await.unwrap().0, StatusCode::OK);
        let (status, answer) = decoded.await.unwrap();
        assert_eq!(status, StatusCode::OK, "{answer}");
        assert_eq!(
            serde_json::from_str::<Value>(&answer).unwrap()["choices"]
                .as_array()
                .unwrap()
                .len(),
            2
        );
    }
    let page = prefiller.get("/metrics").await;
    for rank in 0..2 {
        let served = format!(
            "vllm:request_success_total{{engine=\"{rank}\",model_name=\"sim\",finished_reason=\"length\"}} 2.0"
        );
        assert!(page.contains(&served), "{served}\n{page}");
    }
    prefiller.expect_metrics(&[("rooms_met_total", 4.0)]).await;
}

#[tokio::test]
async fn room_belongs_to_one_rank_and_request() {
    let (prefiller, decoder) = tokio::join!(prefiller(&["--dp-size", "2"]), decoder(&[]));
    let body = in_room(&ids(0..30, 2), &prefiller, 7);
    for (headers, fields) in [
        (vec![("x-data-parallel-rank", "0")], json!({})),
        (vec![], json!({"routed_dp_rank": 0})),
    ] {
        let refused = prefiller
            .try_post("/v1/completions", &with(&body, &fields), &headers)
            .await
            .unwrap();
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    }
    prefiller
        .expect_metrics(&[("rooms_mismatched_total", 2.0)])
        .await;
    let first = send(
        &prefiller,
        &with(&body, &json!({"routed_dp_rank": 1, "rid": "first"})),
    );
    prefiller.eventually_metric("rooms_waiting", 1.0).await;
    let (status, answer) = prefiller.post("/v1/completions", &body).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(answer.contains("taken"), "{answer}");
    prefiller
        .expect_metrics(&[("rooms_mismatched_total", 3.0), ("rooms_waiting", 1.0)])
        .await;
    let decoded = send(&decoder, &body);
    assert_eq!(
        (first.await.unwrap().0, decoded.await.unwrap().0),
        (StatusCode::OK, StatusCode::OK)
    );
    for (engine, body) in [(&prefiller, ids(0..30, 2)), (&decoder, ids(0..30, 2))] {
        assert_eq!(
            engine.send(&body).await.0,
            StatusCode::BAD_REQUEST,
            "nothing is served without a room"
        );
    }
}

#[tokio::test]
async fn room_conflicts_are_counted_on_both_sides() {
    let lora = ["--lora", "x"];
    let (prefiller, decoder) = tokio::join!(prefiller(&lora), decoder(&lora));
    let ask = ids(0..40, 2);
    let others = [
        ids(1..41, 2),
        with(&ask, &json!({"cache_salt": "tenant"})),
        with(&ask, &json!({"model": "x"})),
    ];
    for (room, other) in others.iter().enumerate() {
        let prefilled = send(&prefiller, &in_room(&ask, &prefiller, room));
        let decoded = send(
            &decoder,
            &with(&in_room(other, &prefiller, room), &json!({"stream": true})),
        );
        for answered in [prefilled, decoded] {
            let (status, answer) = answered.await.unwrap();
            assert_eq!(
                status,
                StatusCode::INTERNAL_SERVER_ERROR,
                "also of a stream: {answer}"
            );
            assert!(answer.contains("mismatch"), "{answer}");
        }
    }
    for engine in [&prefiller, &decoder] {
        let counts = [
            ("rooms_met_total", 0.0),
            ("rooms_unmet_total", 0.0),
            ("rooms_mismatched_total", 3.0),
        ];
        engine.expect_metrics(&counts).await;
        wait_idle(engine).await;
    }
}

#[tokio::test]
async fn lone_worker_times_out_and_unreachable_fails_early() {
    let flags = [
        "--bootstrap-timeout",
        "400ms",
        "--bootstrap-connect-timeout",
        "150ms",
    ];
    let (prefiller, decoder) = tokio::join!(prefiller(&flags), decoder(&flags));
    let ask = ids(0..40, 2);
    for (engine, room) in [(&prefiller, 1), (&decoder, 2)] {
        let start = Instant::now();
        let (status, answer) = engine
            .post("/v1/completions", &in_room(&ask, &prefiller, room))
            .await;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(
            answer.contains("no peer joined") && start.elapsed() >= Duration::from_millis(400),
            "{answer}"
        );
        engine
            .expect_metrics(&[("rooms_unmet_total", 1.0), ("rooms_met_total", 0.0)])
            .await;
        wait_idle(engine).await;
    }
    // The decode engine has left the room, so the prefill engine that joins now is alone.
    let (status, _) = prefiller
        .post("/v1/completions", &in_room(&ask, &prefiller, 2))
        .await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    prefiller
        .expect_metrics(&[("rooms_unmet_total", 2.0)])
        .await;

    let free = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let nowhere = with(
        &in_room(&ask, &prefiller, 3),
        &json!({"bootstrap_port": free}),
    );
    let (status, answer) = decoder.post("/v1/completions", &nowhere).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(answer.contains("cannot be reached"), "{answer}");
    decoder.expect_metrics(&[("rooms_unmet_total", 2.0)]).await;
}

#[tokio::test]
async fn failed_prefill_engine_fails_decode() {
    let flags = [
        "--bootstrap-timeout",
        "500ms",
        "--bootstrap-connect-timeout",
        "100ms",
    ];
    let (prefiller, decoder) = tokio::join!(prefiller(&flags), decoder(&flags));
    let ask = in_room(&ids(0..40, 2), &prefiller, 1);
    prefiller.misbehave(json!({"refuse_prefills": 503})).await;
    let refused = send(&prefiller, &ask);
    let decoded = send(&decoder, &ask);
    assert_eq!(refused.await.unwrap().0, StatusCode::SERVICE_UNAVAILABLE);
    let (status, answer) = decoded.await.unwrap();
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(answer.contains("no peer joined"), "{answer}");

    prefiller
        .misbehave(json!({"refuse_prefills": null, "crash": "next_step"}))
        .await;
    let decoded = send(&decoder, &ask);
    assert!(
        prefiller
            .try_post("/v1/completions", &ask, &[])
            .await
            .is_err()
    );
    let (status, answer) = decoded.await.unwrap();
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(answer.contains("disconnected"), "{answer}");
    wait_idle(&decoder).await;
}

async fn abort(engine: &DisaggregatedEngine, which: Value) {
    let response = engine.post("/abort_request", &which).await;
    assert_eq!(response, (StatusCode::OK, String::new()));
}

#[tokio::test]
async fn prefill_alone_in_its_room_is_aborted() {
    let prefiller = prefiller(&[]).await;
    let alone = send(
        &prefiller,
        &with(
            &in_room(&ids(0..40, 2), &prefiller, 1),
            &json!({"rid": "alone"}),
        ),
    );
    prefiller.eventually_metric("rooms_waiting", 1.0).await;
    abort(&prefiller, json!({"rid": "other"})).await;
    abort(&prefiller, json!({"rid": "alone"})).await;
    let (status, answer) = alone.await.unwrap();
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(answer.contains("Abort"), "{answer}");
    prefiller
        .expect_metrics(&[("aborted_total", 1.0), ("rooms_unmet_total", 1.0)])
        .await;
    wait_idle(&prefiller).await;
}

/// The aborted request ends in the middle of its output, and another request continues.
#[tokio::test]
async fn running_decode_is_aborted_by_id() {
    let (prefiller, decoder) = tokio::join!(prefiller(&[]), decoder(&["--speed", "1"]));
    let ask = with(
        &in_room(&ids(0..40, 4000), &prefiller, 2),
        &json!({"rid": "long", "stream": true}),
    );
    let other = with(
        &in_room(&ids(50..90, 20), &prefiller, 3),
        &json!({"rid": "short", "stream": true}),
    );
    let sent = [
        send(&prefiller, &ask),
        send(&prefiller, &other),
        send(&decoder, &other),
    ];
    let mut response = decoder
        .try_post("/v1/completions", &ask, &[])
        .await
        .unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let mut stream = response.chunk().await.unwrap().unwrap().to_vec();
    abort(&decoder, json!({"rid": "long", "abort_all": false})).await;
    while let Some(chunk) = tokio::time::timeout(PATIENCE, response.chunk())
        .await
        .unwrap()
        .unwrap()
    {
        stream.extend_from_slice(&chunk);
    }
    assert_eq!(
        stream_text(&String::from_utf8(stream).unwrap()).1,
        ["abort"]
    );
    for sent in sent {
        assert_eq!(sent.await.unwrap().0, StatusCode::OK);
    }
    decoder
        .expect_metrics(&[("aborted_total", 1.0), ("rooms_met_total", 2.0)])
        .await;
    wait_idle(&decoder).await;
}

#[tokio::test]
async fn all_requests_are_aborted_at_once() {
    let prefiller = prefiller(&[]).await;
    let waiting: Vec<_> = (10..13)
        .map(|room| send(&prefiller, &in_room(&ids(0..40, 2), &prefiller, room)))
        .collect();
    prefiller.eventually_metric("rooms_waiting", 3.0).await;
    abort(&prefiller, json!({"abort_all": true})).await;
    for sent in waiting {
        assert_eq!(sent.await.unwrap().0, StatusCode::INTERNAL_SERVER_ERROR);
    }
    prefiller
        .expect_metrics(&[("aborted_total", 3.0), ("rooms_waiting", 0.0)])
        .await;
    let vllm = DisaggregatedEngine::start(&[]).await;
    assert_eq!(
        vllm.post("/abort_request", &json!({"abort_all": true}))
            .await
            .0,
        StatusCode::NOT_FOUND
    );
}

#[tokio::test]
async fn aborted_prefill_ends_its_decode() {
    // A step takes 50 ms and computes 16 tokens, so the prefill takes half a second.
    let slow = [
        "--step-us",
        "1000000",
        "--max-num-batched-tokens",
        "16",
        "--bootstrap-timeout",
        "4s",
    ];
    let (prefiller, decoder) = tokio::join!(prefiller(&slow), decoder(&[]));
    let ask = with(
        &in_room(&ids(0..160, 4), &prefiller, 1),
        &json!({"rid": "it"}),
    );
    let prefilled = send(&prefiller, &ask);
    let decoded = send(&decoder, &ask);
    prefiller.eventually("/running", 1).await;
    prefiller
        .post("/abort_request", &json!({"rid": "it"}))
        .await;
    for answered in [prefilled, decoded] {
        assert_eq!(answered.await.unwrap().0, StatusCode::INTERNAL_SERVER_ERROR);
    }
    wait_idle(&prefiller).await;
    wait_idle(&decoder).await;

    for is_aborted in [false, true] {
        let ask = with(
            &in_room(&ids(500..660, 4), &prefiller, 2),
            &json!({"rid": "left", "cache_salt": is_aborted.to_string()}),
        );
        let prefilled = send(&prefiller, &ask);
        let decoded = send(&decoder, &ask);
        prefiller.eventually("/running", 1).await;
        decoded.abort();
        wait_idle(&decoder).await;
        prefiller.eventually("/leases", 1).await;
        assert_eq!(
            prefiller.state().await["blocks"]["used"],
            10,
            "it computed all of it, and keeps it"
        );
        let kept = Instant::now();
        if is_aborted {
            prefiller
                .post("/abort_request", &json!({"rid": "left"}))
                .await;
        }
        let (status, answer) = prefilled.await.unwrap();
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
        let expected = if is_aborted { "Abort" } else { "did not fetch" };
        assert!(answer.contains(expected), "{answer}");
        assert!(
            is_aborted || kept.elapsed() > Duration::from_secs(1),
            "{:?}",
            kept.elapsed()
        );
        wait_idle(&prefiller).await;
    }
}

#[tokio::test]
async fn abort_requires_known_id_and_key() {
    let keys = ["--api-key", "any", "--admin-api-key", "admin"];
    let (prefiller, open) = tokio::join!(prefiller(&keys), prefiller(&keys[..2]));
    let ask = in_room(
        &json!({"model": "sim", "prompt": ["one", "two"], "rid": "r"}),
        &prefiller,
        1,
    );
    for (engine, right, wrong) in [
        (&prefiller, "Bearer admin", "Bearer any"),
        (&open, "Bearer any", "Bearer admin"),
    ] {
        let sender = engine.clone();
        let ask = ask.clone();
        let sending = tokio::spawn(async move {
            sender
                .try_post("/v1/completions", &ask, &[("authorization", "Bearer any")])
                .await
                .unwrap()
                .status()
        });
        engine.eventually_metric("rooms_waiting", 2.0).await;
        for (key, name, status) in [
            (wrong, "r_0", StatusCode::UNAUTHORIZED),
            ("", "r_0", StatusCode::UNAUTHORIZED),
            // Each prompt of a list has its own id, and `r` is none of them.
            (right, "r", StatusCode::OK),
            (right, "", StatusCode::OK),
        ] {
            let headers = [("authorization", key)];
            let answer = engine
                .try_post("/abort_request", &json!({"rid": name}), &headers)
                .await
                .unwrap();
            assert_eq!(answer.status(), status, "{key:?} {name:?}");
            engine
                .expect_metrics(&[("aborted_total", 0.0), ("rooms_waiting", 2.0)])
                .await;
        }
        let headers = [("authorization", right)];
        engine
            .try_post("/abort_request", &json!({"rid": "r_1"}), &headers)
            .await
            .unwrap();
        assert_eq!(sending.await.unwrap(), StatusCode::INTERNAL_SERVER_ERROR);
        engine.expect_metrics(&[("aborted_total", 1.0)]).await;
        wait_idle(engine).await;
    }
    for (path, body) in [
        ("/v1/completions", &ask),
        ("/reset_prefix_cache", &json!({})),
    ] {
        assert_eq!(
            prefiller.post(path, body).await.0,
            StatusCode::UNAUTHORIZED,
            "{path}"
        );
    }
}

#[tokio::test]
async fn several_outputs_are_rejected_with_room() {
    let (prefiller, decoder) = tokio::join!(prefiller(&[]), decoder(&[]));
    let several = with(&in_room(&ids(0..30, 2), &prefiller, 1), &json!({"n": 2}));
    for engine in [&prefiller, &decoder] {
        let (status, answer) = engine.send(&several).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
        wait_idle(engine).await;
    }
}

#[tokio::test]
async fn ipv6_bootstrap_host_needs_no_brackets() {
    let (prefiller, decoder) = tokio::join!(prefiller(&["--listen", "[::1]:0"]), decoder(&[]));
    for (room, host) in ["::1", "[::1]"].into_iter().enumerate() {
        let ask = with(
            &in_room(&ids(0..30, 2), &prefiller, room),
            &json!({"bootstrap_host": host}),
        );
        let prefilled = send(&prefiller, &ask);
        let decoded = send(&decoder, &ask);
        assert_eq!(decoded.await.unwrap().0, StatusCode::OK, "{host}");
        assert_eq!(prefilled.await.unwrap().0, StatusCode::OK, "{host}");
    }
    decoder.expect_metrics(&[("rooms_met_total", 2.0)]).await;
}
