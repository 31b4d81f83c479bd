//! Requests that wait for their turn, as Envoy and its clients see it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::bed::{Answer, Bed, SOON, chat, engine, stream};
use crate::support::ports::until;

/// Envoy gives up on warmroute after a second unless it is asked to wait.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

/// One worker that is busy with any prefill at all.
fn narrow(more: &Value) -> Value {
    let mut queue = json!({"prefill_busy_threshold": 10});
    queue
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    json!({"queue": queue})
}

/// The only worker with a prefill that ends when it is told to, behind an Envoy as shipped.
async fn busy(more: &Value) -> (Bed, JoinHandle<Answer>) {
    let bed = Bed::behind(&[engine(1)], narrow(more), str::to_owned).await;
    // The first answer after the start may take its time; those that count must not.
    let ready = async || bed.ask(&chat("are you there?")).await.mode() == "exact";
    assert!(until(SOON, ready).await);
    bed.quiet().await;
    bed.first_tokens(1, false).await;
    let holder = bed.asking(&stream("one that keeps the worker busy", 4));
    bed.wait_load(1, "active_prefill_tokens", |tokens| tokens > 10)
        .await;
    (bed, holder)
}

/// Starts a request that has to wait, and waits until it does.
async fn waiting(bed: &Bed, name: &str, so_many: f64) -> JoinHandle<Answer> {
    let asking = bed.asking(&chat(name));
    bed.shows(&format!("{name} waits"), |page| {
        page.sum("queue_requests", &[]) == so_many
    })
    .await;
    asking
}

/// Lets the busy worker go on; whoever kept it busy is answered.
async fn release(bed: &Bed, holder: JoinHandle<Answer>) {
    bed.first_tokens(1, true).await;
    assert_eq!(holder.await.unwrap().engine(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_waits_longer_than_envoy_would_and_is_then_served_where_it_was_sent() {
    let (bed, holder) = busy(&json!({})).await;
    let waiters = [
        waiting(&bed, "first", 1.0).await,
        waiting(&bed, "second", 2.0).await,
    ];
    let page = bed.metrics().await;
    assert!(
        page.sum("queue_prompt_tokens", &[("class", "default")]) > 20.0,
        "{}",
        page.text()
    );
    assert_eq!(
        bed.load(1, "active_requests").await,
        1,
        "who waits is not booked"
    );
    let since = Instant::now();
    let patient = until(SOON, async || {
        let page = bed.metrics().await;
        assert_eq!(
            page.sum("queue_requests", &[]),
            2.0,
            "somebody gave up:\n{}",
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
    bed.quiet().await;
    let page = bed.metrics().await;
    assert_eq!(
        page.sum("queue_outcomes_total", &[("outcome", "waited")]),
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
async fn more_than_may_wait_are_told_to_come_back() {
    let class = json!({"name": "all", "family": "f", "bucket": "any", "requests_per_worker": 2});
    let (bed, holder) = busy(&json!({
        "retry_after": "3s", "default_family": "f",
        "uncached_buckets": [{"min_tokens": 0, "bucket": "any"}], "classes": [class],
    }))
    .await;
    let waiters = [
        waiting(&bed, "first", 1.0).await,
        waiting(&bed, "second", 2.0).await,
    ];
    for body in [chat("too many"), stream("too many", 4)] {
        let refused = bed.ask(&body).await;
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
            "no engine was asked: {refused:?}"
        );
    }
    let page = bed.metrics().await;
    assert_eq!(
        page.sum(
            "queue_outcomes_total",
            &[("class", "all"), ("outcome", "over_requests")]
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
    bed.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_while_it_waits_leaves_no_trace() {
    let (bed, holder) = busy(&json!({})).await;
    let (leaves, stays) = (
        waiting(&bed, "leaves", 1.0).await,
        waiting(&bed, "stays", 2.0).await,
    );
    leaves.abort();
    bed.shows("it has left", |page| {
        page.sum("queue_requests", &[]) == 1.0
            && page.sum("queue_outcomes_total", &[("outcome", "left")]) == 1.0
            && page.sum("exchanges_open", &[]) == 2.0
    })
    .await;
    assert_eq!(bed.load(1, "active_requests").await, 1);
    release(&bed, holder).await;
    assert_eq!(stays.await.unwrap().engine(), 1);
    bed.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waited_as_long_as_it_may_is_told_to_come_back() {
    let (bed, holder) = busy(&json!({"deadline": "2s"})).await;
    let asked = Instant::now();
    let refused = waiting(&bed, "in vain", 1.0).await.await.unwrap();
    assert!(
        asked.elapsed() >= Duration::from_secs(2),
        "{:?}",
        asked.elapsed()
    );
    let (code, message) = refused.error(429);
    assert_eq!(
        (code.as_str(), refused.retry_after()),
        ("queue_timeout", 1),
        "{message}"
    );
    let page = bed.metrics().await;
    assert_eq!(
        page.sum("queue_outcomes_total", &[("outcome", "expired")]),
        1.0,
        "{}",
        page.text()
    );
    assert_eq!(
        page.sum("degradations_total", &[("reason", "queue_deadline")]),
        1.0,
        "{}",
        page.text()
    );
    release(&bed, holder).await;
    bed.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_has_its_turn_although_warmroute_is_told_to_end() {
    let (bed, holder) = busy(&json!({})).await;
    let waiter = waiting(&bed, "waits", 1.0).await;
    let router = bed.stack.router().unwrap();
    router.terminate();
    let draining = async || {
        let response = bed
            .http
            .get(bed.stack.admin_url("/readyz"))
            .send()
            .await
            .unwrap();
        response.text().await.unwrap().contains("draining")
    };
    assert!(until(SOON, draining).await);
    assert!(!waiter.is_finished());
    release(&bed, holder).await;
    let answer = waiter.await.unwrap();
    assert_eq!((answer.engine(), answer.mode()), (1, "exact"), "{answer:?}");
    assert!(
        until(SOON, async || !router.is_running()).await,
        "{}",
        router.log_tail()
    );
    assert!(router.wait_exit(Instant::now()).unwrap().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_is_served_by_envoys_choice_when_warmroute_dies() {
    let (mut bed, holder) = busy(&json!({})).await;
    let waiters = [
        waiting(&bed, "first", 1.0).await,
        waiting(&bed, "second", 2.0).await,
    ];
    bed.stack.kill9_router();
    release(&bed, holder).await;
    for waiter in waiters {
        let answer = waiter.await.unwrap();
        assert_eq!((answer.engine(), answer.mode()), (1, ""), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_overload_is_refused_clients_are_told_to_come_back() {
    let more = json!({"overload": {"prefill_tokens": 10, "when_all": "reject"}});
    let bed = Bed::start(&[engine(1)], more).await;
    bed.first_tokens(1, false).await;
    let holder = bed.asking(&stream("one that keeps the worker busy", 4));
    bed.wait_load(1, "active_prefill_tokens", |tokens| tokens > 10)
        .await;
    let refused = bed.ask(&chat("another")).await;
    let (code, message) = refused.error(429);
    assert_eq!(
        (code.as_str(), refused.retry_after()),
        ("overloaded", 1),
        "{message}"
    );
    release(&bed, holder).await;
    bed.quiet().await;
    assert_eq!(bed.ask(&chat("another")).await.engine(), 1);
}

/// As gateways do it that know only this mode.
fn full_duplex(shipped: &str) -> String {
    let modes = "request_body_mode: BUFFERED # the worker is chosen by the whole prompt\n                \
                 request_trailer_mode: SKIP";
    assert_eq!(shipped.matches(modes).count(), 1);
    let full =
        "request_body_mode: FULL_DUPLEX_STREAMED\n                request_trailer_mode: SEND";
    shipped.replace(modes, full)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_full_duplex_requests_wait_and_are_refused_in_the_same_way() {
    let class = json!({"name": "all", "family": "f", "bucket": "any", "requests_per_worker": 1});
    let mut config = narrow(&json!({
        "default_family": "f", "uncached_buckets": [{"min_tokens": 0, "bucket": "any"}], "classes": [class],
    }));
    config["clients"] = json!({"trusted": true});
    let bed = Bed::behind(&[engine(1)], config, full_duplex).await;
    bed.first_tokens(1, false).await;
    let holder = bed.asking(&stream("one that keeps the worker busy", 4));
    bed.wait_load(1, "active_prefill_tokens", |tokens| tokens > 10)
        .await;
    let waiter = waiting(&bed, "waits", 1.0).await;
    let long = "This one is long enough for many pieces. ".repeat(20_000);
    for question in ["short", &long] {
        let refused = bed.ask(&chat(question)).await;
        assert_eq!(refused.error(429).0, "queue_full");
        assert_eq!(refused.retry_after(), 1);
        let mut query = chat(question);
        query["nvext"] = json!({"annotations": ["query_instance_id:"]});
        let choice = bed.ask(&query).await;
        assert_eq!(
            choice.json()["nvext"]["worker_id"]["decode_worker_id"],
            1,
            "{choice:?}"
        );
    }
    let since = Instant::now();
    let patient = until(SOON, async || {
        assert!(
            !waiter.is_finished(),
            "{:?} gave up",
            bed.metrics().await.text()
        );
        since.elapsed() > MESSAGE_TIMEOUT + MESSAGE_TIMEOUT / 2
    });
    assert!(patient.await);
    release(&bed, holder).await;
    let answer = waiter.await.unwrap();
    assert_eq!((answer.engine(), answer.mode()), (1, "exact"), "{answer:?}");
    bed.quiet().await;
}
