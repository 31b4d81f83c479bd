//! Engines killed and restarted.

use serde_json::json;

use crate::bed::{Bed, Patience, SOON, all, chat, stream};
use crate::support::ports::until;
use crate::support::stack::EngineSpec;

const LIVE: &str =
    r#"warmroute_kv_event_source_trust{worker_id="1",dp_rank="0",role="aggregated",trust="exact"}"#;

#[tokio::test]
async fn requests_for_the_warm_cache_of_a_killed_engine_are_answered_by_another() {
    let mut bed = Bed::start(2, &[], Patience::Long).await;
    let warm = bed.ask(&chat("shared", 2)).await.engine;
    // The index knows it before the engine dies.
    let known = async || {
        bed.ask(&chat("shared", 2))
            .await
            .predicted
            .is_some_and(|tokens| tokens > 0)
    };
    assert!(until(SOON, known).await);
    bed.quiet().await;
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
    let engine = crate::bed::whole(response, &body).await.engine;
    assert_eq!(
        served,
        engine.to_string(),
        "the header names the worker that served"
    );
    assert_ne!(engine, warm);
    let moved = bed
        .metric(r#"warmroute_served_elsewhere_total{outcome="moved"}"#)
        .await;
    assert_eq!(
        moved, 1.0,
        "warmroute must choose the dead engine for this test to mean anything"
    );

    let asking = (0..60).map(|at| {
        bed.asking(if at % 2 == 0 {
            chat("shared", 3)
        } else {
            stream("shared", 3)
        })
    });
    for answer in all(asking.collect()).await {
        assert_ne!(answer.engine, warm);
    }
    bed.quiet().await;
}

/// Fills one engine's cache, replaces the engine by a new process on the same ports, and compares predictions.
async fn the_old_cache_is_forgotten(replay: bool) {
    let mut spec = EngineSpec::new(1);
    spec.replay = replay;
    let mut bed = Bed::of(&[spec], Patience::Long, json!({})).await;
    for at in 0..6 {
        bed.ask(&chat(&format!("old {at}"), 2)).await;
    }
    let warm = async || {
        let answer = bed.ask(&chat("old 5", 2)).await;
        answer.delivered > 0 && answer.predicted == Some(answer.delivered)
    };
    assert!(until(SOON, warm).await, "the index must know the old cache");

    let (programs, run_dir) = (bed.stack.programs.clone(), bed.stack.run_dir.clone());
    bed.stack.engines[0].kill9();
    assert!(
        until(SOON, async || bed.metric(LIVE).await == 0.0).await,
        "the end of the feed must be noticed"
    );
    bed.stack.engines[0]
        .restart(&programs, &run_dir)
        .await
        .unwrap();
    // Only what is computed after the feed is back can be known for sure without a replay.
    let back = async || {
        let fleet = bed.stack.debug("fleet").await.unwrap();
        fleet["members"][0]["source"]["because"] != "detached"
    };
    assert!(until(SOON, back).await, "the feed does not come back");
    let fresh = chat("fresh", 2);
    bed.ask(&fresh).await;
    let heard = async || {
        let again = bed.ask(&fresh).await;
        again.delivered > 0 && again.predicted == Some(again.delivered)
    };
    assert!(
        until(SOON, heard).await,
        "no events of the new process were heard"
    );
    for at in 0..6 {
        let answer = bed.ask(&chat(&format!("old {at}"), 2)).await;
        assert_eq!(answer.mode.as_deref(), Some("exact"));
        assert_eq!(answer.predicted, Some(answer.delivered), "old prompt {at}");
    }
    bed.quiet().await;
}

#[tokio::test]
async fn a_restarted_engine_has_its_old_cache_forgotten_with_a_replay_endpoint() {
    the_old_cache_is_forgotten(true).await;
}

#[tokio::test]
async fn a_restarted_engine_has_its_old_cache_forgotten_without_a_replay_endpoint() {
    the_old_cache_is_forgotten(false).await;
}
