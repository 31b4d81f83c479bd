//! Rolling restarts under load: each new warmroute process takes over the socket and the addresses
//! of its predecessor, while clients send requests continuously.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures_util::future::join_all;
use serde_json::json;
use warmroute_testbed::deployment::EngineSpec;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::faults::bed::{
    assert_exits, chat, finish, router_config, start_with, stream, usage_of_stream,
};
use crate::routing::bed::RoutingBed;
use crate::support::deployment::with_response_headers;

/// Minimum number of requests. More are sent if the restarts take longer.
const REQUESTS: usize = 5_000;
const RESTARTS: usize = 4;
/// Number of clients, each with one request at a time.
const CLIENTS: usize = 12;

/// Starts four streams of 400 tokens.
async fn long_streams(bed: &RoutingBed) -> Vec<reqwest::Response> {
    let sent = (0..4).map(|at| {
        let request = bed.post(&stream(&format!("long {at}"), 400));
        request.timeout(PATIENCE * 2).send()
    });
    let responses: Vec<_> = join_all(sent)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert!(responses.iter().all(|response| response.status() == 200));
    responses
}

async fn assert_complete(long: Vec<reqwest::Response>) {
    for answer in long {
        let text = answer.text().await.unwrap();
        assert_eq!(usage_of_stream(&text)["completion_tokens"], 400);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn restarts_under_load_lose_no_request_or_stream() {
    let engines = [
        EngineSpec::new(1),
        EngineSpec::new(2),
        EngineSpec::new(3).with(&["--step-us", "40000"]),
    ];
    let process = json!({"drain": {"grace_period": "5s", "timeout": "60s"}});
    let config = with_response_headers(router_config(&process));
    let mut bed = start_with(&engines, &process).await;
    let long = long_streams(&bed).await;

    let sent = Arc::new(AtomicUsize::new(0));
    let routed = Arc::new(AtomicUsize::new(0));
    let restarted = Arc::new(AtomicBool::new(false));
    let url = bed.stack.url("/v1/chat/completions");
    let client = |of: usize| {
        let sent = sent.clone();
        let routed = routed.clone();
        let restarted = restarted.clone();
        let http = bed.http.clone();
        let url = url.clone();
        tokio::spawn(async move {
            loop {
                let at = sent.fetch_add(1, Ordering::Relaxed);
                if at >= REQUESTS && restarted.load(Ordering::Acquire) {
                    return;
                }
                let body = if at.is_multiple_of(4) {
                    stream(&format!("{of} {at}"), 2)
                } else {
                    chat(&format!("{of} {at}"), 1)
                };
                let answer = finish(http.post(&url).json(&body), &body).await;
                routed.fetch_add(usize::from(!answer.mode().is_empty()), Ordering::Relaxed);
            }
        })
    };
    let clients: Vec<_> = (0..CLIENTS).map(client).collect();
    let mut left = Vec::new();
    for nth in 1..=RESTARTS {
        let wanted = nth * REQUESTS / (RESTARTS + 2);
        let reached = async || sent.load(Ordering::Relaxed) >= wanted;
        assert!(until(PATIENCE * 2, reached).await);
        left.push(bed.stack.replace_router(&config).await.unwrap());
    }
    restarted.store(true, Ordering::Release);
    for client in clients {
        client.await.unwrap();
    }
    let sent = sent.load(Ordering::Relaxed) - CLIENTS;
    let routed = routed.load(Ordering::Relaxed);
    assert!(sent >= REQUESTS);
    // Restarts leave no gap. Requests whose connection to warmroute ends may reach any engine.
    assert!(
        routed * 100 >= sent * 98,
        "only {routed} of {sent} were routed by warmroute"
    );
    assert_complete(long).await;
    for old in left {
        assert_exits(&old).await;
    }
    bed.wait_unbooked().await;
}
