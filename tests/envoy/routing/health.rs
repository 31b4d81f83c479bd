//! Workers that fail, are overloaded, or recover.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};
use warmroute_testbed::ports::{PATIENCE, until};

use crate::routing::bed::{RoutedAnswer, RoutingBed, engine, text};

/// Sends concurrent requests without common prefixes.
async fn many(bed: &RoutingBed, count: usize, name: &str) -> Vec<RoutedAnswer> {
    let bodies: Vec<_> = (0..count).map(|at| text(&format!("{name} {at}"))).collect();
    join_all(bodies.iter().map(|body| bed.query(body))).await
}

async fn ejected(bed: &RoutingBed) -> f64 {
    bed.metric("ejected_workers", &[]).await
}

/// Returns the number of requests for which a worker was unreachable.
async fn missed(bed: &RoutingBed, id: u64) -> u64 {
    let labels = [("worker_id", &*id.to_string()), ("kind", "unreachable")];
    bed.metric("worker_failed_requests_total", &labels).await as u64
}

/// Duration of the first ejection.
const FIRST_EJECTION: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn dead_worker_is_ejected_probed_and_readmitted() {
    let mut bed = RoutingBed::start(&[engine(1), engine(2)], json!({})).await;
    assert_eq!(ejected(&bed).await, 0.0);
    bed.kill(2);
    // Requests are sequential, until the worker has failed often enough.
    let mut misses = 0;
    let mut turn = 0;
    let ejection = until(PATIENCE, async || {
        turn += 1;
        let answer = bed.query(&text(&format!("{turn} before"))).await;
        assert_eq!(answer.engine(), 1, "Envoy tries another: {answer:?}");
        misses += u64::from(answer.is_retried());
        assert_eq!(
            answer.chosen(),
            1,
            "the header names the worker that served: {answer:?}"
        );
        bed.wait_idle().await;
        ejected(&bed).await == 1.0
    });
    assert!(ejection.await, "{}", bed.metrics().await.text());
    let since = Instant::now();
    // The loss of its event source supports the failures, so that one of them is enough.
    assert!((1..=3).contains(&misses), "{misses}");
    assert_eq!(missed(&bed, 2).await, misses);
    bed.wait_idle().await;

    assert_one_request_probes(&bed, since).await;
    assert_eq!(missed(&bed, 2).await, misses + 1);
    assert_eq!(
        ejected(&bed).await,
        1.0,
        "the failed probe does not readmit the worker"
    );

    bed.restart(2).await;
    let mut turn = 0;
    let back = until(PATIENCE, async || {
        turn += 1;
        let answer = bed.query(&text(&format!("{turn} after"))).await;
        assert_eq!(answer.engine(), answer.chosen());
        ejected(&bed).await == 0.0
    });
    assert!(back.await, "{}", bed.metrics().await.text());
    let served = async || {
        many(&bed, 4, "later")
            .await
            .iter()
            .any(|answer| answer.engine() == 2)
    };
    assert!(
        until(PATIENCE, served).await,
        "the worker receives no request"
    );
    assert_eq!(missed(&bed, 2).await, misses + 1);
    bed.wait_idle().await;
}

/// Asserts that no concurrent request reaches the worker while it is ejected, and that exactly one
/// probes it afterwards.
async fn assert_one_request_probes(bed: &RoutingBed, since: Instant) {
    let mut round = 0;
    let tried = until(PATIENCE, async || {
        round += 1;
        let sent = Instant::now();
        let answers = many(bed, 16, &format!("{round} meanwhile")).await;
        assert!(
            answers.iter().all(|answer| answer.engine() == 1),
            "{answers:?}"
        );
        let probes = answers.iter().filter(|answer| answer.is_retried()).count();
        // The next probe is due after at least twice the ejection time.
        assert!(
            probes <= 1 || sent.elapsed() > 2 * FIRST_EJECTION,
            "{probes} probes at once"
        );
        assert!(
            probes == 0 || since.elapsed() + Duration::from_millis(500) > FIRST_EJECTION,
            "after {:?}",
            since.elapsed()
        );
        probes == 1
    });
    assert!(tried.await, "no request probed the worker");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn overloaded_worker_gets_no_requests_for_a_second() {
    for status in [429_u16, 503] {
        let bed = RoutingBed::start(&[engine(1), engine(2)], json!({})).await;
        let mut turn = 0;
        let mut query = async |wanted: &dyn Fn(&RoutedAnswer) -> bool| {
            turn += 1;
            let answer = bed.query(&text(&format!("{turn} {status}"))).await;
            (wanted(&answer), answer)
        };
        // Repeated if a busy machine needs more than a second for the requests.
        let mut spared = 0;
        let seen = until(PATIENCE, async || {
            bed.misbehave(2, json!({"refuse": status})).await;
            let mut sent = Instant::now();
            let refused = async || {
                sent = Instant::now();
                let (refused, answer) = query(&|answer| answer.chosen() == 2).await;
                assert_eq!(
                    answer.status,
                    if refused { status } else { 200 },
                    "{answer:?}"
                );
                refused
            };
            assert!(until(PATIENCE, refused).await, "worker 2 gets no request");
            bed.wait_idle().await;
            bed.misbehave(2, json!({"refuse": null})).await;
            spared = 0;
            let used_again = async || {
                let (again, answer) = query(&|answer| answer.engine() == 2).await;
                if sent.elapsed() < Duration::from_secs(1) {
                    assert!(!again, "after {:?}: {answer:?}", sent.elapsed());
                    spared += 1;
                }
                again
            };
            assert!(
                until(PATIENCE, used_again).await,
                "worker 2 is never used again"
            );
            // With two equal workers, chance alone would hardly avoid worker 2 that often.
            spared >= 12
        });
        assert!(
            seen.await,
            "only {spared} requests in the second after the refusal"
        );
        assert_eq!(ejected(&bed).await, 0.0, "a short overload does not eject");
        bed.wait_idle().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_worker_is_used_again_within_seconds() {
    let rules = json!({"routing": {"outlier_detection": {"consecutive_failures": 1}}});
    let mut bed = RoutingBed::start(&[engine(1), engine(2)], rules).await;
    bed.kill(2);
    let mut turn = 0;
    let ejection = until(PATIENCE, async || {
        turn += 1;
        bed.query(&text(&format!("{turn} before"))).await;
        // Each failed probe doubles the ejection time, from one second.
        missed(&bed, 2).await > 4 && ejected(&bed).await == 1.0
    });
    assert!(ejection.await, "{}", bed.metrics().await.text());
    bed.restart(2).await;
    let restarted = Instant::now();
    let used = until(PATIENCE, async || {
        turn += 1;
        bed.query(&text(&format!("{turn} after"))).await.engine() == 2
    });
    assert!(
        used.await,
        "the worker receives no request for {:?}",
        restarted.elapsed()
    );
    // Without the health check, the ejection would last 16 seconds. A busy machine may take some
    // seconds.
    assert!(
        restarted.elapsed() < Duration::from_secs(10),
        "{:?}",
        restarted.elapsed()
    );
    bed.wait_idle().await;
    assert_eq!(ejected(&bed).await, 0.0);
}

/// Faults of an engine that answers, or accepts requests, although it serves none.
async fn assert_failing_engine_loses_traffic(policy: &str, fault: Value) {
    let bed = RoutingBed::start(
        &[1, 2, 3, 4].map(engine),
        json!({"routing": {"policy": policy}}),
    )
    .await;
    many(&bed, 16, "before").await;
    bed.misbehave(4, fault.clone()).await;
    // A client that gives up after some seconds, so that a hung engine does not block the test.
    let client = reqwest::Client::builder()
        .timeout(Duration::from_secs(10))
        .build()
        .unwrap();
    let mut turn = 0;
    let mut failed = 0;
    let mut send = async || {
        turn += 1;
        let body = text(&format!("{turn} {policy} {fault}"));
        let answer = bed.post(&body).build().unwrap();
        client
            .execute(answer)
            .await
            .is_ok_and(|answer| answer.status().is_success())
    };
    let ejection = until(PATIENCE, async || {
        let delivered = send().await;
        failed += u64::from(!delivered);
        ejected(&bed).await == 1.0
    });
    assert!(
        ejection.await,
        "{policy} {fault}: {}",
        bed.metrics().await.text()
    );
    assert!(failed <= 16, "{policy} {fault}: {failed} failed");
    let failures = bed
        .metric("worker_failed_requests_total", &[("worker_id", "4")])
        .await;
    assert!(failures >= 1.0, "{policy} {fault}");

    // Only probes fail from now on.
    let mut failed = 0;
    for _ in 0..100 {
        failed += u64::from(!send().await);
    }
    assert!(failed <= 4, "{policy} {fault}: {failed} of 100 failed");

    bed.misbehave(4, json!({"refuse": null, "hang": false}))
        .await;
    let readmission = until(PATIENCE, async || {
        send().await;
        ejected(&bed).await == 0.0
    });
    assert!(
        readmission.await,
        "{policy} {fault}: {}",
        bed.metrics().await.text()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn failing_engine_loses_traffic_in_every_policy() {
    for policy in ["seconds", "linear", "least_loaded", "round_robin"] {
        for status in [400, 401, 500, 503] {
            assert_failing_engine_loses_traffic(policy, json!({"refuse": status})).await;
        }
    }
}
