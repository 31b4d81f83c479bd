//! The way to the tokens as Envoy and its clients see it: what is too much for the tokenizer goes on by load and is counted
//! with its reason, and the turns of a chat are resumed.

use serde_json::{Value, json};

use crate::bed::{Bed, SOON, chat, engine};
use crate::support::ports::until;

/// The only worker, with these limits.
async fn bed(limits: Value) -> Bed {
    Bed::start(&[engine(1)], json!({"limits": limits})).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_beyond_the_queue_of_the_tokenizer_go_by_load_and_are_counted() {
    let bed = bed(json!({"tokenize_inline": 0, "tokenize_queue": 0})).await;
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
    bed.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_that_take_the_tokenizer_too_long_go_by_load_and_are_counted() {
    let bed = bed(json!({"tokenize_inline": 0, "exchange_deadline": "1ms"})).await;
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
        page.sum("degradations_total", &[("reason", "deadline")]),
        1.0,
        "{}",
        page.text()
    );
    bed.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_turn_of_a_chat_is_resumed_and_exact() {
    let bed = bed(json!({})).await;
    let ready = async || bed.ask(&chat("are you there?")).await.mode() == "exact";
    assert!(until(SOON, ready).await);
    // The self-test's canaries are tokenised at the start, in both ways.
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
    let resumed = more("prompt_cache_resumed_tokens_total", &[]);
    let all = more("prompt_cache_looked_up_tokens_total", &[]);
    assert!(resumed > 1000.0 && resumed < all, "{resumed} of {all}");
    let bytes = more("prompt_cache_bytes", &[]);
    assert!(
        bytes > 4.0 * (all - resumed) / 2.0 && bytes < 64.0 * all,
        "{bytes}"
    );
    bed.quiet().await;
}
