//! warmroute killed or frozen in each phase of a request.

use futures_util::future::join_all;
use warmroute_testbed::ports::until;

use crate::faults::bed::{FaultBed, SOON, TimeoutLength, chat, finish, join_answers, stream};

/// Asserts that Envoy selects workers while warmroute is down, and that requests are routed exactly
/// after a restart.
async fn assert_outage_and_recovery(bed: &mut FaultBed) {
    for answer in join_answers(bed.send_many_in_background(6, "down", 3)).await {
        assert_eq!(answer.mode, None);
    }
    bed.restart_router().await;
    bed.wait_routable().await;
}

#[tokio::test]
async fn kill_with_held_requests_loses_none() {
    let mut bed = FaultBed::start(2, &[], TimeoutLength::Long).await;
    let warm = bed.send(&chat("a warm prompt", 2)).await;
    bed.stack.router().unwrap().freeze();
    let sending = bed.send_many_in_background(8, "held", 5);
    bed.wait_held(8).await;
    bed.stack.kill9_router();
    for answer in join_answers(sending).await {
        assert_eq!(answer.mode, None, "a killed warmroute cannot have answered");
    }
    assert_outage_and_recovery(&mut bed).await;
    let again = bed.send(&chat("a warm prompt", 2)).await;
    assert_eq!(
        (again.engine, again.mode.as_deref()),
        (warm.engine, Some("exact"))
    );
    assert!(again.delivered > 0);
    assert_eq!(
        again.predicted,
        Some(again.delivered),
        "the replay has not restored the index"
    );
}

#[tokio::test]
async fn kill_between_request_and_response_loses_none() {
    let mut bed = FaultBed::start(2, &[], TimeoutLength::Long).await;
    for engine in 0..2 {
        bed.misbehave(engine, &serde_json::json!({"slow_first_token_ms": 4000}))
            .await;
    }
    let sending: Vec<_> = (0..8)
        .map(|at| bed.send_in_background(chat(&format!("slow {at}"), 5)))
        .collect();
    bed.wait_load("active_requests", 8).await;
    bed.stack.kill9_router();
    join_answers(sending).await;
    for engine in 0..2 {
        bed.misbehave(engine, &serde_json::json!({"slow_first_token_ms": 0}))
            .await;
    }
    assert_outage_and_recovery(&mut bed).await;
}

#[tokio::test]
async fn kill_during_streams_truncates_none() {
    let mut bed = FaultBed::start(2, &["--step-us", "40000"], TimeoutLength::Shipped).await;
    let bodies: Vec<_> = (0..8)
        .map(|at| stream(&format!("stream {at}"), 60))
        .collect();
    let mut responses = join_all(
        bodies
            .iter()
            .map(|body| async { bed.post(body).send().await.unwrap() }),
    )
    .await;
    // All streams are in progress after their first token.
    let mut begun = Vec::new();
    for response in &mut responses {
        begun.push(response.chunk().await.unwrap().unwrap());
    }
    assert!(
        bed.load("active_requests").await > 0,
        "the streams ended before the kill"
    );
    bed.stack.kill9_router();
    for (mut response, first) in responses.into_iter().zip(begun) {
        assert_eq!(response.status(), 200);
        let mut text = first.to_vec();
        while let Some(chunk) = response.chunk().await.unwrap() {
            text.extend(chunk);
        }
        let usage = crate::faults::bed::usage_of_stream(std::str::from_utf8(&text).unwrap());
        assert_eq!(usage["completion_tokens"], 60);
    }
    assert_outage_and_recovery(&mut bed).await;
}

#[tokio::test]
async fn frozen_warmroute_delays_requests_by_message_timeout() {
    let bed = FaultBed::start(2, &["--step-us", "40000"], TimeoutLength::Shipped).await;
    let body = stream("running", 40);
    let mut running = bed.post(&body).send().await.unwrap();
    let first = running.chunk().await.unwrap().unwrap();
    bed.stack.router().unwrap().freeze();
    for answer in join_answers(bed.send_many_in_background(8, "frozen", 5)).await {
        assert_eq!(answer.mode, None);
    }
    let rest = running.bytes().await.unwrap();
    let text = [&first[..], &rest[..]].concat();
    assert_eq!(
        crate::faults::bed::usage_of_stream(std::str::from_utf8(&text).unwrap())["completion_tokens"],
        40
    );
    bed.stack.router().unwrap().thaw();
    bed.wait_routable().await;
}

#[tokio::test]
async fn continuous_requests_survive_three_kills() {
    let mut bed = FaultBed::start(2, &[], TimeoutLength::Shipped).await;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let url = bed.stack.url("/v1/chat/completions");
    let http = bed.http.clone();
    let client = move |name: usize| {
        let url = url.clone();
        let http = http.clone();
        let stopped = stopped.clone();
        tokio::spawn(async move {
            let mut answered = 0;
            while !*stopped.borrow() {
                let text = format!("client {name} turn {answered}");
                let body = if answered % 2 == 0 {
                    chat(&text, 8)
                } else {
                    stream(&text, 8)
                };
                finish(http.post(&url).json(&body).send().await.unwrap(), &body).await;
                answered += 1;
            }
            answered
        })
    };
    let clients: Vec<_> = (0..6).map(client).collect();
    for _ in 0..3 {
        let busy = until(SOON, async || bed.load("active_requests").await > 1).await;
        assert!(busy);
        bed.stack.kill9_router();
        bed.restart_router().await;
    }
    stop.send(true).unwrap();
    for answered in join_all(clients).await {
        assert!(answered.unwrap() > 0);
    }
    bed.wait_routable().await;
}
