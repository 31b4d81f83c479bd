//! Injected faults, full batches and the end of the process.

use super::*;

#[tokio::test]
async fn full_batch_queues_and_disconnect_frees_blocks() {
    let engine = SimulatorProcess::start(&["--max-num-seqs", "1"]).await;
    let mut endless = ids(0..100, 100_000);
    endless["stream"] = json!(true);
    let mut first = engine.post("/v1/completions", endless.clone()).await;
    first
        .chunk()
        .await
        .unwrap()
        .expect("the stream did not begin");
    let second = engine.post("/v1/completions", endless).await;
    assert_eq!(
        second.status(),
        StatusCode::OK,
        "headers are sent before the prefill"
    );
    engine
        .eventually("one request runs and one waits", |s| {
            s["running"] == 1 && s["waiting"] == 1
        })
        .await;
    assert!(
        engine
            .get("/metrics")
            .await
            .contains("vllm:num_requests_waiting{engine=\"0\",model_name=\"sim\"} 1.0")
    );
    drop(first);
    engine
        .eventually("the second request runs", |s| {
            s["running"] == 1 && s["waiting"] == 0
        })
        .await;
    drop(second);
    engine
        .eventually("all blocks are free", |s| {
            s["running"] == 0 && s["blocks"]["used"] == 0
        })
        .await;
    let unary = tokio::time::timeout(
        Duration::from_millis(300),
        engine.post("/v1/completions", ids(0..100, 100_000)),
    );
    assert!(unary.await.is_err(), "100,000 tokens take longer");
    engine
        .eventually("all blocks are free", |s| {
            s["running"] == 0 && s["blocks"]["used"] == 0
        })
        .await;
    assert!(
        engine
            .get("/metrics")
            .await
            .contains("finished_reason=\"abort\"} 3.0")
    );
}

#[tokio::test]
async fn misbehaviors_reject_truncate_delay_and_hang() {
    let engine = SimulatorProcess::start(&["--misbehave", r#"{"refuse": 429}"#]).await;
    assert_eq!(
        engine.post("/v1/completions", ids(0..4, 1)).await.status(),
        StatusCode::TOO_MANY_REQUESTS
    );
    engine
        .misbehave(json!({"refuse": null, "cut_stream_after_tokens": 2}))
        .await;
    let mut ask = ids(0..4, 10);
    ask["stream"] = json!(true);
    let chunks: Vec<_> = engine
        .post("/v1/completions", ask)
        .await
        .bytes_stream()
        .collect()
        .await;
    let (end, tokens) = chunks.split_last().unwrap();
    assert!(
        end.is_err() && tokens.iter().all(Result::is_ok),
        "{chunks:?}"
    );
    engine
        .eventually("the truncated request is removed", |state| {
            state["running"] == 0
        })
        .await;
    engine
        .misbehave(json!({"cut_stream_after_tokens": null, "slow_first_token_ms": 300}))
        .await;
    let start = Instant::now();
    engine.complete(ids(0..4, 1)).await;
    assert!(start.elapsed() >= Duration::from_millis(300));
    engine.misbehave(json!({"hang": true})).await;
    let hanging = tokio::time::timeout(
        Duration::from_millis(300),
        engine.post("/v1/completions", ids(0..4, 1)),
    );
    assert!(hanging.await.is_err(), "a hanging engine does not respond");
    engine.get("/health").await;
    assert_eq!(
        engine
            .post("/sim/misbehave", json!({"explode": true}))
            .await
            .status(),
        StatusCode::BAD_REQUEST
    );
}

#[tokio::test]
async fn replay_fills_gaps_only_if_batches_are_kept() {
    for (keep, numbers) in [(true, vec![0, 1, 2]), (false, vec![0, 2])] {
        let engine = SimulatorProcess::with_events(&[]).await;
        engine.complete(ids(0..20, 1)).await;
        engine
            .misbehave(json!({"drop_events": {"batches": 1, "keep_for_replay": keep}}))
            .await;
        engine.complete(ids(100..120, 1)).await;
        engine.complete(ids(200..220, 1)).await;
        let replayed = engine.replay(0, 0).await;
        assert_eq!(
            replayed
                .iter()
                .map(|batch| batch.number)
                .collect::<Vec<_>>(),
            numbers
        );
    }
}

#[tokio::test]
async fn crash_aborts_requests_and_exits() {
    let mut engine =
        SimulatorProcess::start(&["--misbehave", r#"{"crash": {"after_requests": 2}}"#]).await;
    engine.complete(ids(0..20, 1)).await;
    let cut = engine.try_post("/v1/completions", ids(0..20, 1), &[]).await;
    assert!(cut.is_err(), "{cut:?}");
    let status = tokio::time::timeout(PATIENCE, engine.child.wait())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(status.code(), Some(134));
}

#[tokio::test]
async fn sigterm_and_stdin_eof_exit_cleanly() {
    for by_signal in [true, false] {
        let mut engine = SimulatorProcess::start(&[]).await;
        if by_signal {
            let pid = Pid::from_raw(engine.child.id().unwrap().cast_signed()).unwrap();
            kill_process(pid, Signal::TERM).unwrap();
        } else {
            engine.stdin = None;
        }
        let status = tokio::time::timeout(PATIENCE, engine.child.wait())
            .await
            .expect("the process does not exit in time")
            .unwrap();
        assert!(status.success(), "by signal: {by_signal}: {status}");
    }
}
