//! Engines of other shapes: several ranks in one process, other event encodings, the other direction of attaching.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::deployment::{Answered, Deployment, PATIENCE, essay, fast};
use crate::support::ports::until;

/// Asks new questions until every place has answered one; the question of each place.
async fn one_question_each(
    deployment: &Deployment,
    places: usize,
    place: impl Fn(&Answered) -> String,
) -> BTreeMap<String, String> {
    let mut questions = BTreeMap::new();
    let mut topic = 0;
    let asked = until(PATIENCE, async || {
        topic += 1;
        let answered = deployment.complete(&essay(topic)).await;
        answered.assert_exact();
        questions
            .entry(place(&answered))
            .or_insert_with(|| essay(topic));
        deployment.idle().await;
        questions.len() == places
    });
    assert!(asked.await, "only {:?} answer", questions.keys());
    questions
}

/// Asks each question again, and expects the place that knows it.
async fn each_is_warm(
    deployment: &Deployment,
    questions: &BTreeMap<String, String>,
    place: impl Fn(&Answered) -> String,
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
async fn a_prefix_on_one_data_parallel_rank_brings_its_follow_ups_to_that_rank() {
    let mut spec = fast(9).with(&["--dp-size", "2"]);
    // The port after that of the events is the second rank's, and without replay endpoint nobody else's.
    spec.replay = false;
    let mut deployment = Deployment::engines(&[spec]).await;
    let mut entry = deployment.engines[0].entry();
    entry["data_parallel"] = json!({"size": 2});
    deployment.write_worker_entries(&json!([entry])).unwrap();
    deployment.serve().await;

    let rank = |answered: &Answered| answered.header("x-served-dp-rank").to_owned();
    let questions = one_question_each(&deployment, 2, rank).await;
    assert_eq!(questions.keys().collect::<Vec<_>>(), ["0", "1"]);
    each_is_warm(&deployment, &questions, rank).await;

    let page = deployment.metrics().await;
    for rank in ["0", "1"] {
        let labels = [("worker_id", "9"), ("dp_rank", rank)];
        assert!(
            page.sum("worker_cached_blocks", &labels) > 0.0,
            "rank {rank}:\n{}",
            page.text()
        );
        let exact = [labels[0], labels[1], ("trust", "exact")];
        assert_eq!(
            page.sum("kv_event_source_trust", &exact),
            1.0,
            "rank {rank}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_become_warm_whatever_their_event_encoding_and_whoever_attaches() {
    let specs = [
        fast(1).with(&["--event-encoding", "array"]),
        fast(2).with(&["--events-attach", "connect"]),
        fast(3).with(&["--event-encoding", "array", "--events-attach", "connect"]),
        fast(4),
    ];
    let mut deployment = Deployment::engines(&specs).await;
    let mut entries: Vec<Value> = deployment
        .engines
        .iter()
        .map(|engine| engine.entry())
        .collect();
    for reversed in &mut entries[1..3] {
        reversed["kv_events"]["attach"] = json!("bind");
    }
    deployment.write_worker_entries(&json!(entries)).unwrap();
    deployment.serve().await;

    let engine = |answered: &Answered| answered.engine().to_owned();
    let questions = one_question_each(&deployment, 4, engine).await;
    each_is_warm(&deployment, &questions, engine).await;
    let page = deployment.metrics().await;
    assert_eq!(
        page.sum("kv_event_batches_total", &[("outcome", "undecodable")]),
        0.0,
        "{}",
        page.text()
    );
}
