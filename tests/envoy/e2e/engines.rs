//! Other engine setups: several ranks per process, other event encodings, and both ZeroMQ
//! directions.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use warmroute_testbed::ports::until;

use crate::support::deployment::{ChatAnswer, PATIENCE, TestDeployment, essay, fast};

/// Sends new prompts until each rank has served one. Returns one prompt per rank.
async fn one_question_per_rank(
    deployment: &TestDeployment,
    places: usize,
    place: impl Fn(&ChatAnswer) -> String,
) -> BTreeMap<String, String> {
    let mut questions = BTreeMap::new();
    let mut topic = 0;
    let all_answered = until(PATIENCE, async || {
        topic += 1;
        let answered = deployment.complete(&essay(topic)).await;
        answered.assert_exact();
        questions
            .entry(place(&answered))
            .or_insert_with(|| essay(topic));
        deployment.idle().await;
        questions.len() == places
    });
    assert!(all_answered.await, "only {:?} answer", questions.keys());
    questions
}

/// Repeats each prompt, and asserts that the same rank serves it from its cache.
async fn assert_each_is_warm(
    deployment: &TestDeployment,
    questions: &BTreeMap<String, String>,
    place: impl Fn(&ChatAnswer) -> String,
) {
    for round in 0..5 {
        for (warm, question) in questions {
            deployment.settle().await;
            let answered = deployment.complete(question).await;
            answered.assert_exact();
            assert_eq!(&place(&answered), warm, "round {round}: {answered:?}");
            assert!(
                answered.cached_tokens() > 100,
                "round {round}: {answered:?}"
            );
            assert_eq!(
                answered.predicted(),
                Some(answered.cached_tokens()),
                "round {round}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follow_ups_reach_rank_with_their_prefix() {
    let mut spec = fast(9).with(&["--dp-size", "2"]);
    // The second rank uses the next port after the event port. It is free if there is no replay
    // endpoint.
    spec.replay = false;
    let mut deployment = TestDeployment::engines(&[spec]).await;
    let mut entry = deployment.engines[0].worker_entry();
    entry["data_parallel"] = json!({"size": 2});
    deployment.write_worker_entries(&json!([entry])).unwrap();
    deployment.serve().await;

    let rank = |answered: &ChatAnswer| answered.header("x-served-dp-rank").to_owned();
    let questions = one_question_per_rank(&deployment, 2, rank).await;
    assert_eq!(questions.keys().collect::<Vec<_>>(), ["0", "1"]);
    assert_each_is_warm(&deployment, &questions, rank).await;

    let page = deployment.metrics().await;
    for rank in ["0", "1"] {
        let labels = [("worker_id", "9"), ("dp_rank", rank)];
        assert!(
            page.sum("worker_cached_blocks", &labels) > 0.0,
            "rank {rank}:\n{}",
            page.text()
        );
        let exact = [labels[0], labels[1], ("freshness", "exact")];
        assert_eq!(
            page.sum("kv_event_source_freshness", &exact),
            1.0,
            "rank {rank}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_event_encodings_and_directions_warm_the_index() {
    let specs = [
        fast(1).with(&["--event-encoding", "array"]),
        fast(2).with(&["--events-attach", "connect"]),
        fast(3).with(&["--event-encoding", "array", "--events-attach", "connect"]),
        fast(4),
    ];
    let mut deployment = TestDeployment::engines(&specs).await;
    let mut entries: Vec<Value> = deployment
        .engines
        .iter()
        .map(|engine| engine.worker_entry())
        .collect();
    for reversed in &mut entries[1..3] {
        reversed["kv_events"]["attach"] = json!("bind");
    }
    deployment.write_worker_entries(&json!(entries)).unwrap();
    deployment.serve().await;

    let engine = |answered: &ChatAnswer| answered.engine().to_owned();
    let questions = one_question_per_rank(&deployment, 4, engine).await;
    assert_each_is_warm(&deployment, &questions, engine).await;
    let page = deployment.metrics().await;
    assert_eq!(
        page.sum("kv_event_batches_total", &[("outcome", "undecodable")]),
        0.0,
        "{}",
        page.text()
    );
}
