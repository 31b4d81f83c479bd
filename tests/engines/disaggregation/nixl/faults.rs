//! Failed fetches and injected faults.

use super::*;

async fn closed_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap().port()
}

#[tokio::test]
async fn failed_fetch_fails_late_or_recomputes() {
    let prefiller = engine(&[]).await;
    let patience = ["--kv-load-timeout", "300ms"];
    let recompute = [&patience[..], &["--kv-load-failure-policy", "recompute"]].concat();
    let (decoder, other_policy) = tokio::join!(engine(&patience), engine(&recompute));
    let ask = ids(0..70, 4);
    let expected = prefiller.complete(&ask).await;
    let kv_params = prefill(&prefiller, &ask).await;
    let free = closed_port().await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_port = silent.local_addr().unwrap().port();
    let other = |field: &str, value: Value| {
        let mut params = kv_params.clone();
        params[field] = value;
        params
    };
    let load_timeout = Duration::from_millis(300);
    for (what, params) in [
        (
            "of a restarted engine",
            other("remote_engine_id", json!("former")),
        ),
        ("unreachable", other("remote_port", json!(free))),
        ("silent", other("remote_port", json!(silent_port))),
        ("too few", other("remote_block_ids", json!([[1, 2]]))),
        (
            "not there",
            other("remote_block_ids", json!([[1, 2, 3, 4, 1_000_000]])),
        ),
    ] {
        let start = Instant::now();
        let (status, answer) = decoder.send(&decode_of(&ask, &params)).await;
        assert!(status.is_server_error(), "{what}: {answer}");
        assert!(start.elapsed() >= load_timeout, "{what}");
        let start = Instant::now();
        let salted = with(&ask, &json!({"cache_salt": what}));
        let answer = other_policy.complete(&decode_of(&salted, &params)).await;
        assert_eq!(
            (text(&answer), kv(&answer)),
            (text(&expected), "computed"),
            "{what}"
        );
        assert!(start.elapsed() >= load_timeout, "{what}");
    }
    for engine in [&decoder, &other_policy] {
        let counts = [
            ("kv_transfers_total", 0.0),
            ("kv_mismatches_total", 0.0),
            ("kv_stale_reads_total", 0.0),
        ];
        engine.expect_metrics(&counts).await;
        wait_idle(engine).await;
    }
    let params = other("remote_port", json!(free));
    let stream = with(&decode_of(&ask, &params), &json!({"stream": true}));
    assert_streams_fail_or_recompute(&decoder, &other_policy, &stream, text(&expected)).await;
}

/// Asserts that a stream whose blocks cannot be fetched fails or is recomputed, depending on the
/// policy.
async fn assert_streams_fail_or_recompute(
    failing: &DisaggregatedEngine,
    recomputing: &DisaggregatedEngine,
    stream: &Value,
    expected: &str,
) {
    let (status, failed) = failing.post("/v1/completions", stream).await;
    // vLLM has already sent status 200 by then.
    assert!(
        status == StatusCode::OK
            && failed.contains("\"error\"")
            && failed.ends_with("data: [DONE]\n\n"),
        "{failed}"
    );
    let (_, computed) = recomputing.post("/v1/completions", stream).await;
    assert_eq!(
        (stream_text(&computed).0.as_str(), streamed_kv(&computed)),
        (expected, vec!["computed".to_owned(); 4])
    );
}

#[tokio::test]
async fn incomplete_params_fail_and_absent_params_compute() {
    let decoder = engine(&["--kv-load-timeout", "300ms"]).await;
    let ask = ids(0..70, 4);
    let incomplete = json!({"do_remote_prefill": true, "remote_host": "127.0.0.1"});
    assert_eq!(
        decoder.send(&decode_of(&ask, &incomplete)).await.0,
        StatusCode::INTERNAL_SERVER_ERROR
    );
    // Without transfer parameters, the engine computes the prompt itself.
    let nothing = json!({"do_remote_prefill": false, "do_remote_decode": false});
    let computed = decoder.complete(&decode_of(&ask, &nothing)).await;
    assert_eq!(text(&computed), text(&decoder.complete(&ask).await));
}

#[tokio::test]
async fn injected_faults_affect_prefills_only() {
    let (prefiller, decoder) = pair().await;
    let ask = ids(0..40, 2);
    prefiller.misbehave(json!({"refuse_prefills": 503})).await;
    assert_eq!(
        prefiller.send(&prefill_of(&ask)).await.0,
        StatusCode::SERVICE_UNAVAILABLE
    );
    assert_eq!(
        prefiller.send(&ask).await.0,
        StatusCode::OK,
        "everything else is served"
    );

    prefiller
        .misbehave(json!({"refuse_prefills": null, "fail_prefills_with_200": true}))
        .await;
    let (status, answer) = prefiller.send(&prefill_of(&ask)).await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        answer["error"]["message"].is_string() && answer["choices"].is_null(),
        "{answer}"
    );

    prefiller
        .misbehave(json!({"fail_prefills_with_200": false, "omit_transfer_params": true}))
        .await;
    let answer = prefiller.complete(&prefill_of(&ask)).await;
    assert_eq!(
        (&answer["kv_transfer_params"], text(&answer).is_empty()),
        (&Value::Null, false)
    );
    prefiller.expect_metrics(&[("kv_leases", 1.0)]).await;

    prefiller
        .misbehave(json!({"omit_transfer_params": false, "stop_prefills": true}))
        .await;
    let answer = prefiller.complete(&prefill_of(&ask)).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert!(
        answer["kv_transfer_params"].is_object(),
        "vLLM returns parameters nevertheless: {answer}"
    );
    assert_eq!(
        prefiller.complete(&ask).await["choices"][0]["finish_reason"],
        "length",
        "only prefills"
    );

    prefiller
        .misbehave(json!({"stop_prefills": false, "slow_prefill_ms": 200}))
        .await;
    let start = Instant::now();
    let params = prefill(&prefiller, &ask).await;
    assert!(start.elapsed() >= Duration::from_millis(200));
    decoder.complete(&decode_of(&ask, &params)).await;

    prefiller.misbehave(json!({"slow_prefill_ms": 0})).await;
    assert_prefills_hang_and_crash(prefiller, &decoder, &ask).await;
}

/// Makes a prefill hang, and crashes the engine while its blocks wait for the decode engine.
async fn assert_prefills_hang_and_crash(
    mut prefiller: DisaggregatedEngine,
    decoder: &DisaggregatedEngine,
    ask: &Value,
) {
    prefiller.misbehave(json!({"hang_prefills": true})).await;
    let hanging = prefill_of(ask);
    let hangs = prefiller.try_post("/v1/completions", &hanging, &[]);
    assert!(
        tokio::time::timeout(Duration::from_millis(200), hangs)
            .await
            .is_err()
    );

    let params = {
        prefiller.misbehave(json!({"hang_prefills": false})).await;
        prefill(&prefiller, ask).await
    };
    prefiller.misbehave(json!({"crash": "next_request"})).await;
    assert!(
        prefiller
            .try_post("/v1/completions", &prefill_of(ask), &[])
            .await
            .is_err()
    );
    let ended = tokio::time::timeout(PATIENCE, prefiller.child.wait())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(ended.code(), Some(134));
    assert_eq!(
        decoder.send(&decode_of(ask, &params)).await.0,
        StatusCode::INTERNAL_SERVER_ERROR
    );
    wait_idle(decoder).await;
}
