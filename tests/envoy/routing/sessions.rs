//! Affinity of sessions to their workers.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use serde_json::{Value, json};
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::until;

use crate::routing::bed::{RoutedAnswer, RoutingBed, SOON, chat, engine, essay, stream, text};

/// Starts two workers with session affinity, and a wait timeout that suits busy machines.
async fn bed(affinity: &str, more: Value) -> RoutingBed {
    let mut config = json!({"sessions": {"affinity": affinity, "wait_timeout": "20s"}});
    merge_config(&mut config, &more);
    RoutingBed::start(&[engine(1), engine(2)], config).await
}

async fn ask(bed: &RoutingBed, session: &str, body: &Value) -> RoutedAnswer {
    RoutedAnswer::of(bed.post(body).header("x-session-id", session)).await
}

fn other(worker: u64) -> u64 {
    3 - worker
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hard_session_ignores_a_cheaper_worker() {
    let bed = bed("hard", json!({})).await;
    let home = ask(&bed, "alice", &chat("Good morning.")).await.engine();
    for topic in 0..3 {
        // Only the other worker has cached the prompt, so requests without a session are routed
        // there.
        bed.warm(other(home), &chat(&essay(topic))).await;
        let free = bed.ask(&chat(&essay(topic))).await;
        assert_eq!(
            free.engine(),
            other(home),
            "the test needs the other worker to be cheaper"
        );
        bed.wait_idle().await;
        let bound = ask(&bed, "alice", &chat(&format!("{} And?", essay(topic)))).await;
        assert_eq!((bound.chosen(), bound.engine()), (home, home), "{bound:?}");
        bed.settle().await;
    }
    let page = bed.metrics().await;
    assert_eq!(
        (page.sum("sessions", &[]), page.sum("session_requests", &[])),
        (1.0, 0.0),
        "{}",
        page.text()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_of_dead_worker_is_rebound_permanently() {
    let mut bed = bed(
        "hard",
        json!({
            "routing": {"outlier_detection": {"consecutive_failures": 2}},
        }),
    )
    .await;
    let home = ask(&bed, "alice", &chat("Good morning.")).await.engine();
    bed.kill(home);
    let mut turn = 0;
    let rebound = until(SOON, async || {
        turn += 1;
        let answer = ask(&bed, "alice", &chat(&format!("Are you there? {turn}"))).await;
        assert_eq!(
            answer.engine(),
            other(home),
            "no request is lost: {answer:?}"
        );
        !answer.is_retried()
    });
    assert!(rebound.await, "still bound to the dead worker");
    bed.restart(home).await;
    let mut turn = 0;
    let well = async || {
        turn += 1;
        bed.ask(&text(&format!("{turn} without a session"))).await;
        bed.metrics().await.sum("ejected_workers", &[]) == 0.0
    };
    assert!(until(SOON, well).await, "the worker does not recover");
    bed.settle().await;
    // The old worker is healthy and has cached the prompt, but the session stays on the new one.
    bed.warm(home, &chat(&essay(1))).await;
    let answer = ask(&bed, "alice", &chat(&essay(1))).await;
    assert_eq!(
        (answer.chosen(), answer.engine()),
        (other(home), other(home)),
        "{answer:?}"
    );
    bed.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hard_session_waits_and_soft_session_moves() {
    for (affinity, waits) in [("hard", true), ("soft", false)] {
        let config = json!({
            "queue": {"prefill_busy_threshold": 10},
            "routing": {"policy": "least_loaded"},
        });
        let bed = bed(affinity, config).await;
        let home = ask(&bed, "alice", &chat("Good morning.")).await.engine();
        let again = ask(&bed, "alice", &chat("Good morning again."))
            .await
            .engine();
        assert_eq!(again, home, "{affinity}");
        bed.wait_idle().await;
        bed.set_first_tokens(home, false).await;
        let holder = {
            let request = bed
                .post(&stream("Keep it busy.", 4))
                .header("x-session-id", "alice");
            tokio::spawn(RoutedAnswer::of(request))
        };
        bed.wait_load(home, "active_prefill_tokens", |tokens| tokens > 10)
            .await;
        let request = bed.post(&chat("And now?")).header("x-session-id", "alice");
        let sending = tokio::spawn(RoutedAnswer::of(request));
        if waits {
            bed.wait_metrics("the request waits", |page| {
                page.sum("queue_requests", &[]) == 1.0
            })
            .await;
            bed.set_first_tokens(home, true).await;
            assert_eq!(sending.await.unwrap().engine(), home);
        } else {
            assert_eq!(sending.await.unwrap().engine(), other(home));
            // The session has moved with its last request.
            let next = ask(&bed, "alice", &chat("And then?")).await;
            assert_eq!(next.engine(), other(home), "{next:?}");
            bed.set_first_tokens(home, true).await;
        }
        assert_eq!(holder.await.unwrap().engine(), home);
        bed.wait_idle().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_first_requests_share_one_worker() {
    for affinity in ["hard", "soft"] {
        let bed = bed(affinity, json!({})).await;
        let mut homes = BTreeSet::new();
        // Idle workers are chosen at random, so a few sessions may all be on one of them.
        for session in 0..24 {
            if session >= 6 && homes.len() == 2 {
                break;
            }
            let name = format!("session {session}");
            let bodies: Vec<_> = (0..16).map(|at| text(&essay(100 * session + at))).collect();
            let answers = join_all(bodies.iter().map(|body| ask(&bed, &name, body))).await;
            let workers: BTreeSet<u64> = answers.iter().map(RoutedAnswer::engine).collect();
            assert_eq!(workers.len(), 1, "{affinity} {name}: {workers:?}");
            homes.extend(workers);
        }
        assert_eq!(homes.len(), 2, "{affinity}: sessions are spread");
        bed.wait_idle().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_or_final_session_is_removed() {
    let bed = bed("hard", json!({"sessions": {"ttl": "1s"}})).await;
    ask(&bed, "alice", &chat("Good morning.")).await.engine();
    let last = bed
        .post(&chat("Good bye."))
        .header("x-session-id", "bob")
        .header("x-dynamo-session-final", "true");
    assert_eq!(RoutedAnswer::of(last).await.status, 200);
    bed.wait_metrics("no session is left", |page| {
        page.sum("sessions", &[]) == 0.0
    })
    .await;
    bed.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_stays_with_one_worker_rank() {
    let mut spec = engine(1)
        .with(&["--dp-size", "2"])
        .with_worker_fields(json!({"data_parallel": {"size": 2}}));
    // The next port is that of the second rank. It is free if there is no replay endpoint.
    spec.replay = false;
    let bed = RoutingBed::start(&[spec], json!({"sessions": {}})).await;
    let mut ranks = BTreeSet::new();
    for turn in 0..24 {
        let body = text(&essay(turn));
        let rank = |answer: &RoutedAnswer| {
            assert_eq!(
                answer.header("x-received-dp-rank"),
                answer.header("x-served-dp-rank"),
                "{answer:?}"
            );
            answer.header("x-served-dp-rank").to_owned()
        };
        let bound = rank(&ask(&bed, "alice", &body).await);
        ranks.insert((true, bound));
        // Free blocks decide between ranks of equal costs, so one of two requests would always use the
        // rank without the session.
        for nth in 0..2 {
            let free = rank(&bed.ask(&text(&essay(100 + 2 * turn + nth))).await);
            ranks.insert((false, free));
        }
        bed.wait_idle().await;
    }
    let of = |bound: bool| ranks.iter().filter(|(is, _)| *is == bound).count();
    assert_eq!((of(true), of(false)), (1, 2), "{ranks:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_session_moves_when_its_worker_is_removed() {
    let bed = bed("hard", json!({"queue": {"prefill_busy_threshold": 10}})).await;
    let home = ask(&bed, "alice", &chat("Good morning.")).await.engine();
    bed.wait_idle().await;
    bed.set_first_tokens(home, false).await;
    let holder = tokio::spawn(RoutedAnswer::of(
        bed.post(&stream("Busy.", 4))
            .header("x-session-id", "alice"),
    ));
    bed.wait_load(home, "active_prefill_tokens", |tokens| tokens > 10)
        .await;
    let sending = tokio::spawn(RoutedAnswer::of(
        bed.post(&chat("And now?")).header("x-session-id", "alice"),
    ));
    bed.wait_metrics("the request waits", |page| {
        page.sum("queue_requests", &[]) == 1.0
    })
    .await;
    bed.stack
        .write_worker_entries(&json!([bed.engine(other(home)).worker_entry()]))
        .unwrap();
    let answer = sending.await.unwrap();
    assert_eq!(
        (answer.engine(), answer.chosen()),
        (other(home), other(home)),
        "{answer:?}"
    );
    // The response of a removed worker is completed.
    bed.set_first_tokens(home, true).await;
    assert_eq!(holder.await.unwrap().engine(), home);
    bed.wait_idle().await;
}
