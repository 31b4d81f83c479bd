//! Engines that are killed and restarted.

use serde_json::json;
use warmroute_testbed::deployment::EngineSpec;
use warmroute_testbed::ports::until;

use crate::faults::bed::{FaultBed, SOON, TimeoutLength, chat, join_answers, stream};

/// Returns whether the event source of the first worker has lost its connection.
async fn is_detached(bed: &FaultBed) -> bool {
    let fleet = bed.stack.debug_page("fleet").await.unwrap();
    fleet["members"][0]["source"]["reason"] == "detached"
}

#[tokio::test]
async fn requests_for_killed_engine_reach_another() {
    let mut bed = FaultBed::start(2, &[], TimeoutLength::Long).await;
    let warm = bed.send(&chat("shared", 2)).await.engine;
    // The index contains the prefix before the engine dies.
    let known = async || {
        bed.send(&chat("shared", 2))
            .await
            .predicted
            .is_some_and(|tokens| tokens > 0)
    };
    assert!(until(SOON, known).await);
    bed.wait_idle().await;
    let dead = bed
        .stack
        .engines
        .iter()
        .position(|engine| engine.spec.id == warm)
        .unwrap();
    bed.stack.engines[dead].kill9();

    let body = chat("shared", 2);
    let response = bed.post(&body).send().await.unwrap();
    let served = response.headers()["x-worker-instance-id"]
        .to_str()
        .unwrap()
        .to_owned();
    let engine = crate::faults::bed::finish(response, &body).await.engine;
    assert_eq!(
        served,
        engine.to_string(),
        "the header does not name the serving worker"
    );
    assert_ne!(engine, warm);
    let moved = bed
        .metric(r#"warmroute_served_endpoint_mismatches_total{outcome="moved"}"#)
        .await;
    assert_eq!(
        moved, 1.0,
        "warmroute never chose the dead engine, so the test proves nothing"
    );

    let sending = (0..60).map(|at| {
        bed.send_in_background(if at % 2 == 0 {
            chat("shared", 3)
        } else {
            stream("shared", 3)
        })
    });
    for answer in join_answers(sending.collect()).await {
        assert_ne!(answer.engine, warm);
    }
    bed.wait_idle().await;
}

/// Fills the cache of an engine, replaces the engine by a new process on the same ports, and
/// compares the predictions.
async fn assert_old_cache_removed(replay: bool) {
    let mut spec = EngineSpec::new(1);
    spec.replay = replay;
    let mut bed = FaultBed::of(&[spec], TimeoutLength::Long, json!({})).await;
    for at in 0..6 {
        bed.send(&chat(&format!("old {at}"), 2)).await;
    }
    let warm = async || {
        let answer = bed.send(&chat("old 5", 2)).await;
        answer.delivered > 0 && answer.predicted == Some(answer.delivered)
    };
    assert!(until(SOON, warm).await, "the index must know the old cache");

    let programs = bed.stack.programs.clone();
    let run_dir = bed.stack.run_dir.clone();
    bed.stack.engines[0].kill9();
    assert!(
        until(SOON, async || is_detached(&bed).await).await,
        "the loss of the event source was not detected"
    );
    bed.stack.engines[0]
        .restart(&programs, &run_dir)
        .await
        .unwrap();
    // Without a replay, the index contains only blocks that were stored after the reconnect.
    assert!(
        until(SOON, async || !is_detached(&bed).await).await,
        "the event source does not reconnect"
    );
    let fresh = chat("fresh", 2);
    bed.send(&fresh).await;
    let has_events = async || {
        let again = bed.send(&fresh).await;
        again.delivered > 0 && again.predicted == Some(again.delivered)
    };
    assert!(
        until(SOON, has_events).await,
        "no events of the new process arrived"
    );
    for at in 0..6 {
        let answer = bed.send(&chat(&format!("old {at}"), 2)).await;
        assert_eq!(answer.mode.as_deref(), Some("exact"));
        assert_eq!(answer.predicted, Some(answer.delivered), "old prompt {at}");
    }
    bed.wait_idle().await;
}

#[tokio::test]
async fn engine_restart_with_replay_removes_old_cache() {
    assert_old_cache_removed(true).await;
}

#[tokio::test]
async fn engine_restart_without_replay_removes_old_cache() {
    assert_old_cache_removed(false).await;
}
