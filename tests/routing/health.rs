//! Workers that fail, that have too much to do, and that come back.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;

use crate::bed::{Answer, Bed, SOON, engine, text};
use crate::support::ports::until;

/// Questions that have nothing in common.
async fn many(bed: &Bed, count: usize, name: &str) -> Vec<Answer> {
    let bodies: Vec<_> = (0..count).map(|at| text(&format!("{name} {at}"))).collect();
    join_all(bodies.iter().map(|body| bed.ask(body))).await
}

async fn out(bed: &Bed) -> f64 {
    bed.metrics().await.sum("workers_out", &[])
}

/// How many requests were sent to a worker that did not answer them.
async fn missed(bed: &Bed, id: u64) -> u64 {
    bed.metrics().await.sum(
        "chosen_not_reached_total",
        &[("worker_id", &id.to_string())],
    ) as u64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_worker_is_left_out_tried_once_at_a_time_and_used_again_when_it_is_back() {
    const FIRST: Duration = Duration::from_secs(2);
    let more = json!({"health": {"failures": 3, "first": "2s", "most": "60s"}});
    let mut bed = Bed::start(&[engine(1), engine(2)], more).await;
    assert_eq!(out(&bed).await, 0.0);
    bed.kill(2);
    // One after the other, until it has failed often enough.
    let mut misses = 0;
    let mut turn = 0;
    let went_out = until(SOON, async || {
        turn += 1;
        let answer = bed.ask(&text(&format!("{turn} before"))).await;
        assert_eq!(answer.engine(), 1, "Envoy tries another: {answer:?}");
        misses += u64::from(answer.is_retried());
        assert_eq!(
            answer.chosen(),
            1,
            "the header names the worker that served: {answer:?}"
        );
        bed.quiet().await;
        out(&bed).await == 1.0
    });
    assert!(went_out.await, "{}", bed.metrics().await.text());
    let since = Instant::now();
    assert_eq!(
        (misses, missed(&bed, 2).await),
        (3, 3),
        "out after three failures, not before"
    );
    bed.quiet().await;

    // Many at once, again and again: while it is out nobody is sent there, and then exactly one.
    let mut round = 0;
    let tried = until(SOON, async || {
        round += 1;
        let sent = Instant::now();
        let answers = many(&bed, 16, &format!("{round} meanwhile")).await;
        assert!(
            answers.iter().all(|answer| answer.engine() == 1),
            "{answers:?}"
        );
        let probes = answers.iter().filter(|answer| answer.is_retried()).count();
        // The next probe is not due before twice that time.
        assert!(
            probes <= 1 || sent.elapsed() > 2 * FIRST,
            "{probes} probes at once"
        );
        assert!(
            probes == 0 || since.elapsed() + Duration::from_millis(500) > FIRST,
            "after {:?}",
            since.elapsed()
        );
        probes == 1
    });
    assert!(tried.await, "nobody tried it");
    assert_eq!(missed(&bed, 2).await, 4);
    assert_eq!(out(&bed).await, 1.0, "the probe failed");

    bed.restart(2).await;
    let mut turn = 0;
    let back = until(SOON, async || {
        turn += 1;
        let answer = bed.ask(&text(&format!("{turn} after"))).await;
        assert_eq!(answer.engine(), answer.chosen());
        out(&bed).await == 0.0
    });
    assert!(back.await, "{}", bed.metrics().await.text());
    let served = async || {
        many(&bed, 4, "later")
            .await
            .iter()
            .any(|answer| answer.engine() == 2)
    };
    assert!(until(SOON, served).await, "it gets nothing");
    assert_eq!(missed(&bed, 2).await, 4);
    bed.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_has_too_much_to_do_is_left_alone_for_a_second() {
    for status in [429_u16, 503] {
        let bed = Bed::start(&[engine(1), engine(2)], json!({})).await;
        let mut turn = 0;
        let mut ask = async |wanted: &dyn Fn(&Answer) -> bool| {
            turn += 1;
            let answer = bed.ask(&text(&format!("{turn} {status}"))).await;
            (wanted(&answer), answer)
        };
        // A busy machine may need more than a second for so few requests; then once more.
        let mut spared = 0;
        let seen = until(SOON, async || {
            bed.misbehave(2, json!({"refuse": status})).await;
            let mut sent = Instant::now();
            let refused = async || {
                sent = Instant::now();
                let (refused, answer) = ask(&|answer| answer.chosen() == 2).await;
                assert_eq!(
                    answer.status,
                    if refused { status } else { 200 },
                    "{answer:?}"
                );
                refused
            };
            assert!(until(SOON, refused).await, "worker 2 gets nothing");
            bed.quiet().await;
            bed.misbehave(2, json!({"refuse": null})).await;
            spared = 0;
            let used_again = async || {
                let (again, answer) = ask(&|answer| answer.engine() == 2).await;
                if sent.elapsed() < Duration::from_secs(1) {
                    assert!(!again, "after {:?}: {answer:?}", sent.elapsed());
                    spared += 1;
                }
                again
            };
            assert!(
                until(SOON, used_again).await,
                "worker 2 is never used again"
            );
            // By chance alone, with two workers alike, it would hardly be passed over so often.
            spared >= 12
        });
        assert!(
            seen.await,
            "only {spared} requests in the second after the refusal"
        );
        assert_eq!(out(&bed).await, 0.0, "too much to do is no failure");
        bed.quiet().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_workers_that_die_at_once_cost_no_request_where_a_fourth_lives() {
    let mut bed = Bed::start(
        &[1, 2, 3, 4].map(engine),
        json!({"health": {"first": "30s"}}),
    )
    .await;
    let answers = many(&bed, 40, "before").await;
    let mut served = BTreeMap::new();
    for answer in answers {
        *served.entry(answer.engine()).or_insert(0) += 1;
    }
    assert_eq!(served.len(), 4, "{served:?}");
    bed.quiet().await;
    for id in [1, 2, 3] {
        bed.kill(id);
    }
    let mut round = 0;
    let left_out = until(SOON, async || {
        round += 1;
        let answers = many(&bed, 8, &format!("{round} meanwhile")).await;
        assert!(
            answers.iter().all(|answer| answer.engine() == 4),
            "{answers:?}"
        );
        out(&bed).await == 3.0
    });
    assert!(left_out.await, "{}", bed.metrics().await.text());
    // From now on nobody has to be tried in vain.
    for answer in many(&bed, 40, "after").await {
        assert_eq!((answer.chosen(), answer.engine()), (4, 4), "{answer:?}");
        assert_eq!(
            answer.header("x-received-envoy-attempt-count"),
            "1",
            "{answer:?}"
        );
    }
    bed.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_worker_is_used_again_within_seconds() {
    let rules = json!({"health": {"failures": 1, "first": "1h", "most": "1h"}});
    let mut bed = Bed::start(&[engine(1), engine(2)], rules).await;
    bed.kill(2);
    let mut turn = 0;
    let went_out = until(SOON, async || {
        turn += 1;
        bed.ask(&text(&format!("{turn} before"))).await;
        out(&bed).await == 1.0
    });
    assert!(went_out.await, "{}", bed.metrics().await.text());
    // Long enough for a health check to find it dead.
    tokio::time::sleep(Duration::from_secs(2)).await;
    bed.restart(2).await;
    let restarted = Instant::now();
    let used = until(SOON, async || {
        turn += 1;
        bed.ask(&text(&format!("{turn} after"))).await.engine() == 2
    });
    assert!(used.await, "it gets nothing for {:?}", restarted.elapsed());
    // Without the health check it would be ejected for an hour; a busy machine may take some seconds.
    assert!(
        restarted.elapsed() < Duration::from_secs(20),
        "{:?}",
        restarted.elapsed()
    );
    bed.quiet().await;
    assert_eq!(out(&bed).await, 0.0);
}
