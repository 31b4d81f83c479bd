//! Restarts under load: one warmroute after the other on the same socket and the same addresses, while Envoy never stops
//! asking.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;

use crate::bed::{Bed, Patience, SOON, chat, stream, usage_of_stream, whole};
use crate::support::ports::until;
use crate::support::stack::EngineSpec;

/// Requests in all; more are sent only where the restarts take longer.
const REQUESTS: usize = 5_000;
const RESTARTS: usize = 4;
/// Clients that send one request after the other.
const CLIENTS: usize = 12;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarts_under_load_lose_nothing_and_long_streams_survive_them() {
    let engines = [
        EngineSpec::new(1),
        EngineSpec::new(2),
        EngineSpec::new(3).with(&["--step-us", "40000"]),
    ];
    let more = json!({"drain": {"grace": "5s", "deadline": "60s"}});
    let mut bed = Bed::of(&engines, Patience::Shipped, more).await;
    let long = (0..4).map(|at| bed.post(&stream(&format!("long {at}"), 400)).send());
    let long: Vec<_> = join_all(long)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert!(long.iter().all(|answer| answer.status() == 200));

    let (sent, routed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let restarted = Arc::new(AtomicBool::new(false));
    let url = bed.stack.url("/v1/chat/completions");
    let client = |of: usize| {
        let (sent, routed, restarted) = (sent.clone(), routed.clone(), restarted.clone());
        let (http, url) = (bed.http.clone(), url.clone());
        tokio::spawn(async move {
            loop {
                let at = sent.fetch_add(1, Ordering::Relaxed);
                if at >= REQUESTS && restarted.load(Ordering::Acquire) {
                    return;
                }
                let body = if at % 4 == 0 {
                    stream(&format!("{of} {at}"), 2)
                } else {
                    chat(&format!("{of} {at}"), 1)
                };
                // The claim is in here: 200, and the whole of it.
                let answer = whole(http.post(&url).json(&body).send().await.unwrap(), &body).await;
                routed.fetch_add(usize::from(answer.mode.is_some()), Ordering::Relaxed);
            }
        })
    };
    let clients: Vec<_> = (0..CLIENTS).map(client).collect();
    let began = Instant::now();
    let mut left = Vec::new();
    for nth in 1..=RESTARTS {
        let wanted = nth * REQUESTS / (RESTARTS + 2);
        assert!(until(SOON, async || sent.load(Ordering::Relaxed) >= wanted).await);
        left.push(bed.succeed_router().await);
    }
    restarted.store(true, Ordering::Release);
    for client in clients {
        client.await.unwrap();
    }
    let (sent, routed) = (
        sent.load(Ordering::Relaxed) - CLIENTS,
        routed.load(Ordering::Relaxed),
    );
    assert!(sent >= REQUESTS);
    // Not one request met the gap that there is not; the machine may be so busy that Envoy gives up waiting for a few.
    assert!(
        routed * 100 >= sent * 98,
        "only {routed} of {sent} were routed by warmroute, in {:?}",
        began.elapsed()
    );
    for answer in long {
        let text = answer.text().await.unwrap();
        assert_eq!(usage_of_stream(&text)["completion_tokens"], 400);
    }
    for old in left {
        assert!(
            until(SOON, async || !old.is_running()).await,
            "still there:\n{}",
            old.log_tail()
        );
        let status = old
            .wait_exit(Instant::now() + Duration::from_secs(1))
            .unwrap();
        assert!(status.success(), "{status}:\n{}", old.log_tail());
    }
    bed.quiet().await;
}
