//! Engines with full caches, which evict blocks within seconds of a response.

use std::collections::BTreeMap;

use futures_util::stream::{self, StreamExt as _};
use serde_json::{Value, json};
use warmroute_testbed::deployment::{EngineSpec, MODEL};
use warmroute_testbed::ports::until;

use crate::routing::bed::{RoutedAnswer, RoutingBed, SOON, engine, essay};

/// Returns an engine with room for two requests of [`request`], whose responses take about 0.6 s.
fn small_engine(id: u64) -> EngineSpec {
    EngineSpec::new(id).with(&["--speed", "2", "--num-blocks", "300"])
}

/// Returns a request of about 1,600 tokens that shares no prefix with other topics and has a long
/// response.
fn request(topic: usize) -> Value {
    let text: Vec<String> = (0..5).map(|part| essay(topic * 5 + part)).collect();
    json!({"model": MODEL, "prompt": text.join(" "), "max_tokens": 200})
}

/// Sends requests of a few topics in turn, eight at a time.
async fn replay(bed: &RoutingBed, count: usize) -> Vec<RoutedAnswer> {
    let sent = stream::iter(0..count).map(|at| async move { bed.ask(&request(at * 7 % 12)).await });
    sent.buffer_unordered(8).collect().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn evicted_blocks_are_no_parity_mismatch() {
    let config = json!({
        "gateway": {"observe": "usage"},
        "engines": {"parity_check": {"event_delay": "300ms"}},
    });
    let bed = RoutingBed::start(&[small_engine(1), small_engine(2)], config).await;
    let answers = replay(&bed, 60).await;
    let mut modes = BTreeMap::<String, usize>::new();
    answers
        .iter()
        .for_each(|answer| *modes.entry(answer.mode().to_owned()).or_default() += 1);
    let parity = async || bed.stack.debug_page("parity").await.unwrap()[0].take();
    assert_eq!(
        modes,
        [("exact".to_owned(), 60)].into(),
        "{:#}",
        parity().await
    );
    // The checks confirm the tokens although the blocks have been evicted.
    let confirmed = until(SOON, async || {
        parity().await["confirmed"].as_u64().unwrap() >= 10
    })
    .await;
    let shown = parity().await;
    assert!(confirmed, "{shown:#}");
    assert_eq!(
        (&shown["tokens_disabled"], &shown["unconfirmed"]),
        (&json!(false), &json!(0)),
        "{shown:#}"
    );
    for id in ["1", "2"] {
        assert!(
            shown["workers"][id]["events"]["differs"].is_null(),
            "{shown:#}"
        );
    }
    let audited = async || bed.stack.debug_page("audit").await.unwrap();
    assert!(until(SOON, async || audited().await["waiting"] == 0).await);
    let sums = audited().await["models"][MODEL].take();
    assert_eq!(sums["responses"], 60, "{sums:#}");
    assert!(
        sums["missed_tokens"].get("token_mismatch").is_none(),
        "{sums:#}"
    );
    let explained = ["evicted", "stored_meanwhile"];
    let causes = sums["errors"].as_object().unwrap();
    assert!(
        causes
            .keys()
            .all(|cause| explained.contains(&cause.as_str())),
        "{sums:#}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_evicted_while_waiting_are_audited() {
    let spec = EngineSpec::new(1).with(&["--num-blocks", "300"]);
    let bed = RoutingBed::start(&[spec], json!({"gateway": {"observe": "usage"}})).await;
    let with_answer = |topic, tokens: u64| {
        let mut body = request(topic);
        body["max_tokens"] = json!(tokens);
        body
    };
    let repeated = with_answer(0, 2);
    bed.ask(&repeated).await.engine();
    bed.settle().await;
    // Two requests fill the cache for seconds. A third one waits for room, and the repeated request
    // waits behind it.
    let mut others = Vec::new();
    for (at, topic) in (1..=3).enumerate() {
        others.push(bed.send_in_background(&with_answer(topic, 700)));
        bed.wait_load(1, "active_requests", |active| active == at as u64 + 1)
            .await;
    }
    let waited = bed.ask(&repeated).await;
    assert_eq!(waited.mode(), "exact", "{waited:?}");
    for other in others {
        assert_eq!(other.await.unwrap().mode(), "exact");
    }
    let audited = async || bed.stack.debug_page("audit").await.unwrap();
    let whole = until(SOON, async || {
        let totals = audited().await;
        totals["waiting"] == 0 && totals["models"][MODEL]["responses"] == 5
    });
    assert!(whole.await, "{:#}", audited().await);
    let sums = audited().await["models"][MODEL].take();
    assert_eq!(sums["errors"], json!({"evicted": 1}), "{sums:#}");
    assert!(
        sums["missed_tokens"]["evicted"]
            .as_u64()
            .is_some_and(|tokens| tokens > 0),
        "{sums:#}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parity_mismatch_is_detected_despite_evictions() {
    let directory = tempfile::tempdir().unwrap();
    let template = directory.path().join("other.jinja");
    std::fs::write(
        &template,
        "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}",
    )
    .unwrap();
    let flags = [
        "--no-tokenize",
        "--no-render",
        "--num-blocks",
        "60",
        "--chat-template",
        template.to_str().unwrap(),
    ];
    let bed = RoutingBed::start(
        &[engine(1).with(&flags)],
        json!({"engines": {"parity_check": {"event_delay": "300ms"}}}),
    )
    .await;
    let mut topic = 0;
    let found = until(SOON, async || {
        topic += 1;
        let chat = json!({"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": essay(topic)}]});
        bed.ask(&chat).await.engine();
        bed.stack.debug_page("parity").await.unwrap()[0]["tokens_disabled"] == true
    });
    assert!(
        found.await,
        "{:#}",
        bed.stack.debug_page("parity").await.unwrap()
    );
    assert!(topic <= 100, "{topic} requests");
}
