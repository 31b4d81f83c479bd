//! Queued requests, as Envoy and its clients observe them.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::routing::bed::{RoutedAnswer, RoutingBed, chat, engine, full_duplex, stream};

/// Shipped `message_timeout` of Envoy, which a reply can extend.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns a configuration in which any prefill makes a worker busy.
fn queue_config(more: &Value) -> Value {
    let mut queue = json!({"prefill_busy_threshold": 10});
    merge_config(&mut queue, more);
    json!({"queue": queue})
}

/// Starts one worker behind the shipped Envoy configuration, with a prefill that runs until
/// [`release`].
async fn busy(more: &Value) -> (RoutingBed, JoinHandle<RoutedAnswer>) {
    let bed = RoutingBed::start_with_envoy(&[engine(1)], queue_config(more), str::to_owned).await;
    // The first response after the start may be slow.
    let ready = async || bed.query(&chat("are you there?")).await.mode() == "exact";
    assert!(until(PATIENCE, ready).await);
    bed.wait_idle().await;
    let holder = hold(&bed).await;
    (bed, holder)
}

/// Starts a prefill that runs until [`release`].
async fn hold(bed: &RoutingBed) -> JoinHandle<RoutedAnswer> {
    bed.set_first_tokens(1, false).await;
    let holder = bed.send_in_background(&stream("one that keeps the worker busy", 4));
    bed.wait_load(1, "active_prefill_tokens", |tokens| tokens > 10)
        .await;
    holder
}

/// Starts two requests and waits until they are queued.
async fn two_waiting(bed: &RoutingBed) -> [JoinHandle<RoutedAnswer>; 2] {
    [
        waiting(bed, "first", 1.0).await,
        waiting(bed, "second", 2.0).await,
    ]
}

/// Starts a request and waits until it is queued.
async fn waiting(bed: &RoutingBed, name: &str, queued: f64) -> JoinHandle<RoutedAnswer> {
    let sending = bed.send_in_background(&chat(name));
    bed.wait_metric("queue_requests", &[], queued).await;
    sending
}

/// Lets the busy worker continue, so that its request completes.
async fn release(bed: &RoutingBed, holder: JoinHandle<RoutedAnswer>) {
    bed.set_first_tokens(1, true).await;
    assert_eq!(holder.await.unwrap().engine(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn queued_request_outlasts_envoy_message_timeout() {
    let (bed, holder) = busy(&json!({})).await;
    let waiters = two_waiting(&bed).await;
    let page = bed.metrics().await;
    assert!(
        page.sum("queue_prompt_tokens", &[("class", "default")]) > 20.0,
        "{}",
        page.text()
    );
    assert_eq!(
        bed.load(1, "active_requests").await,
        1,
        "a queued request is not booked"
    );
    let since = Instant::now();
    let patient = until(PATIENCE, async || {
        let page = bed.metrics().await;
        assert_eq!(
            page.sum("queue_requests", &[]),
            2.0,
            "a request was cancelled:\n{}",
            page.text()
        );
        since.elapsed() > MESSAGE_TIMEOUT + MESSAGE_TIMEOUT / 2
    });
    assert!(patient.await);
    release(&bed, holder).await;
    for waiter in waiters {
        let answer = waiter.await.unwrap();
        assert_eq!(
            (answer.engine(), answer.mode(), answer.chosen()),
            (1, "exact", 1),
            "{answer:?}"
        );
        assert_eq!(answer.header("x-received-envoy-attempt-count"), "1");
    }
    bed.wait_idle().await;
    let page = bed.metrics().await;
    assert_eq!(
        page.sum("queue_outcomes_total", &[("outcome", "admitted")]),
        2.0,
        "{}",
        page.text()
    );
    assert_eq!(
        page.sum("requests_total", &[("mode", "passthrough")]),
        0.0,
        "{}",
        page.text()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_queue_rejects_with_retry_after() {
    let class =
        json!({"name": "all", "family": "f", "bucket": "any", "max_requests_per_worker": 2});
    let (bed, holder) = busy(&json!({
        "retry_after": "3s", "default_family": "f",
        "uncached_buckets": [{"min_tokens": 0, "bucket": "any"}], "classes": [class],
    }))
    .await;
    let waiters = two_waiting(&bed).await;
    for body in [chat("too many"), stream("too many", 4)] {
        let refused = bed.query(&body).await;
        let (code, message) = refused.error(429);
        assert_eq!(
            (code.as_str(), refused.retry_after()),
            ("queue_full", 3),
            "{message}"
        );
        assert!(
            message.contains("`all`") && message.contains('2'),
            "{message}"
        );
        assert_eq!(
            refused.header("x-engine-id"),
            "",
            "no engine received the request: {refused:?}"
        );
    }
    let page = bed.metrics().await;
    assert_eq!(
        page.sum(
            "queue_outcomes_total",
            &[("class", "all"), ("outcome", "request_limit")]
        ),
        2.0,
        "{}",
        page.text()
    );
    assert_eq!(
        page.sum("requests_total", &[("mode", "rejected")]),
        2.0,
        "{}",
        page.text()
    );
    release(&bed, holder).await;
    for waiter in waiters {
        assert_eq!(waiter.await.unwrap().engine(), 1);
    }
    bed.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn queued_request_falls_back_to_envoy_after_crash() {
    let (mut bed, holder) = busy(&json!({})).await;
    let waiters = two_waiting(&bed).await;
    bed.stack.kill9_router();
    release(&bed, holder).await;
    for waiter in waiters {
        let answer = waiter.await.unwrap();
        assert_eq!((answer.engine(), answer.mode()), (1, ""), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn full_duplex_requests_are_queued_and_rejected() {
    let class =
        json!({"name": "all", "family": "f", "bucket": "any", "max_requests_per_worker": 1});
    let mut config = queue_config(&json!({
        "default_family": "f", "uncached_buckets": [{"min_tokens": 0, "bucket": "any"}], "classes": [class],
    }));
    config["requests"]["clients"] = json!({"trusted": true});
    let bed = RoutingBed::start_with_envoy(&[engine(1)], config, full_duplex).await;
    let holder = hold(&bed).await;
    let waiter = waiting(&bed, "waits", 1.0).await;
    let long = "This one is long enough for many pieces. ".repeat(20_000);
    for question in ["short", &long] {
        let refused = bed.query(&chat(question)).await;
        assert_eq!(refused.error(429).0, "queue_full");
        assert_eq!(refused.retry_after(), 1);
        let mut query = chat(question);
        query["nvext"] = json!({"annotations": ["query_instance_id:"]});
        let choice = bed.query(&query).await;
        assert_eq!(
            choice.json()["nvext"]["worker_id"]["decode_worker_id"],
            1,
            "{choice:?}"
        );
    }
    let since = Instant::now();
    let patient = until(PATIENCE, async || {
        assert!(
            !waiter.is_finished(),
            "{:?} did not stay queued",
            bed.metrics().await.text()
        );
        since.elapsed() > MESSAGE_TIMEOUT + MESSAGE_TIMEOUT / 2
    });
    assert!(patient.await);
    release(&bed, holder).await;
    let answer = waiter.await.unwrap();
    assert_eq!((answer.engine(), answer.mode()), (1, "exact"), "{answer:?}");
    bed.wait_idle().await;
}
