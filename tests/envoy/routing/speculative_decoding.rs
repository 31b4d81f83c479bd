//! Cached tokens of engines with speculative decoding, and of requests that read no cache. Each
//! prediction must equal what the engine reports.

use serde_json::{Value, json};
use warmroute_testbed::deployment::{BLOCK_SIZE, MODEL};
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::routing::bed::{RoutingBed, chat, engine, essay, text};

async fn start(speculation: &str) -> RoutingBed {
    let spec = engine(1).with(&["--speculative-decoding", speculation]);
    RoutingBed::start(&[spec], json!({"gateway": {"observe": "usage"}})).await
}

/// Sends a request. Returns the cached tokens that were predicted and those that were reported.
async fn cached_tokens(bed: &RoutingBed, body: &Value) -> (u64, u64) {
    bed.settle().await;
    let answer = bed.query(body).await;
    assert_eq!(answer.mode(), "exact", "{answer:?}");
    let reported = &answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"];
    (answer.predicted().unwrap(), reported.as_u64().unwrap_or(0))
}

/// Returns a prompt of token ids: a part that all prompts share, and an own part.
fn prompt(shared: usize, own: usize, first: usize) -> Value {
    let shared = (0..shared).map(|at| 1000 + at % 700);
    let own = (0..own).map(|at| first + at % 50);
    json!({"model": MODEL, "prompt": shared.chain(own).collect::<Vec<_>>(), "max_tokens": 2})
}

/// Sends requests until the prediction of a cached prompt is right.
async fn wait_for_right_prediction(bed: &RoutingBed, body: &Value) {
    let mut last = (0, 0);
    let is_right = until(PATIENCE, async || {
        last = cached_tokens(bed, body).await;
        last.0 == last.1 && last.0 > 0
    });
    assert!(is_right.await, "{last:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn dropped_last_block_is_learned_and_forgotten() {
    let mut bed = start("drop-last-block").await;
    let body = text(&essay(1));
    bed.query(&body).await.engine();
    let (predicted, reported) = cached_tokens(&bed, &body).await;
    assert_eq!(predicted, reported + BLOCK_SIZE as u64);
    wait_for_right_prediction(&bed, &body).await;
    for topic in 2..5 {
        let other = text(&essay(topic));
        bed.query(&other).await.engine();
        let (predicted, reported) = cached_tokens(&bed, &other).await;
        assert_eq!(predicted, reported, "topic {topic}");
        assert!(predicted > 0);
    }
    let totals = bed.stack.debug_page("audit").await.unwrap();
    let errors = totals["models"][MODEL]["errors"].as_object().unwrap();
    let causes: Vec<_> = errors.keys().collect();
    assert_eq!(causes, ["dropped_block"], "{totals:#}");
    // The new engine reuses all blocks.
    bed.stack.engines[0]
        .spec
        .args
        .retain(|arg| !["--speculative-decoding", "drop-last-block"].contains(&arg.as_str()));
    bed.restart(1).await;
    bed.query(&body).await.engine();
    wait_for_right_prediction(&bed, &body).await;
    let (predicted, reported) = cached_tokens(&bed, &body).await;
    assert_eq!(predicted, reported);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn prompts_that_diverge_after_a_block_are_exact() {
    let bed = start("lookahead").await;
    let blocks = |count: usize| (count * BLOCK_SIZE) as u64;
    // The first events show the lookahead.
    bed.query(&prompt(0, 40, 5000)).await.engine();
    bed.settle().await;
    bed.query(&prompt(10 * BLOCK_SIZE, 40, 2000)).await.engine();
    // The tenth block of both prompts is followed by different tokens.
    let diverged = prompt(10 * BLOCK_SIZE, 40, 3000);
    assert_eq!(cached_tokens(&bed, &diverged).await, (blocks(9), blocks(9)));
    assert_eq!(
        cached_tokens(&bed, &diverged).await,
        (blocks(12), blocks(12))
    );
    let diverged_inside = prompt(10 * BLOCK_SIZE - 4, 40, 4000);
    let cached = cached_tokens(&bed, &diverged_inside).await;
    assert_eq!(cached, (blocks(9), blocks(9)));
    // A prompt of whole blocks, made longer: its last block was stored with the first output token.
    let whole = prompt(4 * BLOCK_SIZE, 4 * BLOCK_SIZE, 6000);
    bed.query(&whole).await.engine();
    assert_eq!(cached_tokens(&bed, &whole).await, (blocks(7), blocks(7)));
    let longer = prompt(4 * BLOCK_SIZE, 5 * BLOCK_SIZE, 6000);
    let (predicted, reported) = cached_tokens(&bed, &longer).await;
    assert_eq!(predicted, reported);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn requests_without_cache_reads_are_exact() {
    let bed = start("none").await;
    let with = |mut body: Value, more: Value| {
        merge_config(&mut body, &more);
        body
    };
    let (question, prompt) = (chat(&essay(1)), text(&essay(2)));
    for body in [&question, &prompt] {
        bed.query(body).await.engine();
        let (predicted, reported) = cached_tokens(&bed, body).await;
        assert_eq!(predicted, reported);
        assert!(predicted > 0);
    }
    for body in [
        with(question.clone(), json!({"prompt_logprobs": 1})),
        with(prompt.clone(), json!({"prompt_logprobs": 0})),
        with(question, json!({"echo": true})),
        with(prompt.clone(), json!({"echo": true, "logprobs": 1})),
    ] {
        assert_eq!(cached_tokens(&bed, &body).await, (0, 0), "{body}");
    }
    let (predicted, reported) = cached_tokens(&bed, &with(prompt, json!({"echo": true}))).await;
    assert_eq!(predicted, reported);
    assert!(predicted > 0);
}
