//! Tokenization as Envoy and its clients observe it. Requests that exceed its limits are routed
//! load-only, and counted with the reason. The turns of a chat resume the tokenization of earlier
//! turns.

use serde_json::{Value, json};
use warmroute_testbed::ports::until;

use crate::routing::bed::{RoutingBed, SOON, chat, engine};

/// Starts a deployment of one worker with these limits.
async fn bed(limits: Value) -> RoutingBed {
    RoutingBed::start(&[engine(1)], json!({"requests": {"limits": limits}})).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_beyond_tokenizer_queue_are_routed_load_only() {
    let bed = bed(json!({"tokenize_inline_size": "0B", "tokenize_queue_length": 0})).await;
    for _ in 0..3 {
        let answer = bed.ask(&chat("any")).await;
        assert_eq!(
            (answer.engine(), answer.mode()),
            (1, "load_only"),
            "{answer:?}"
        );
    }
    let page = bed.metrics().await;
    assert_eq!(
        page.sum("degradations_total", &[("reason", "tokenizer_busy")]),
        3.0,
        "{}",
        page.text()
    );
    bed.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_tokenization_is_routed_load_only() {
    let bed = bed(json!({"tokenize_inline_size": "0B", "decision_timeout": "1ms"})).await;
    let answer = bed
        .ask(&chat(&"a long question, without an end ".repeat(5000)))
        .await;
    assert_eq!(
        (answer.engine(), answer.mode()),
        (1, "load_only"),
        "{answer:?}"
    );
    let page = bed.metrics().await;
    assert_eq!(
        page.sum("degradations_total", &[("reason", "decision_timeout")]),
        1.0,
        "{}",
        page.text()
    );
    bed.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn next_chat_turn_resumes_tokenization() {
    let bed = bed(json!({})).await;
    let ready = async || bed.ask(&chat("are you there?")).await.mode() == "exact";
    assert!(until(SOON, ready).await);
    // At startup, the canaries of the parity check are tokenized with and without the cache.
    let before = bed.metrics().await;
    let mut request = chat(&"What is a router? ".repeat(60));
    for turn in 0..4 {
        let answer = bed.ask(&request).await;
        assert_eq!((answer.engine(), answer.mode()), (1, "exact"), "{answer:?}");
        let messages = request["messages"].as_array_mut().unwrap();
        messages.push(
            json!({"role": "assistant", "content": format!("It routes {turn}. ").repeat(60)}),
        );
        messages.push(json!({"role": "user", "content": format!("And {turn} more? ").repeat(60)}));
    }
    let page = bed.metrics().await;
    let more = |family: &str, labels: &[(&str, &str)]| {
        page.sum(family, labels) - before.sum(family, labels)
    };
    let lookups = |outcome| more("prompt_cache_lookups_total", &[("outcome", outcome)]);
    assert_eq!(
        (lookups("hit"), lookups("miss")),
        (3.0, 1.0),
        "{}",
        page.text()
    );
    let resumed = more("prompt_cache_hit_tokens_total", &[]);
    let all = more("prompt_cache_lookup_tokens_total", &[]);
    assert!(resumed > 1000.0 && resumed < all, "{resumed} of {all}");
    let bytes = more("prompt_cache_bytes", &[]);
    assert!(
        bytes > 4.0 * (all - resumed) / 2.0 && bytes < 64.0 * all,
        "{bytes}"
    );
    bed.wait_idle().await;
}
