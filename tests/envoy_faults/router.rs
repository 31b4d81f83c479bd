//! warmroute killed or frozen, in every phase of a request.

use futures_util::future::join_all;

use crate::bed::{Bed, Patience, SOON, all, chat, stream, whole};
use crate::support::ports::until;

/// New requests are Envoy's while warmroute is down; after a restart they are routed exactly, into a warm index.
async fn down_and_up_again(bed: &mut Bed) {
    for answer in all(bed.asking_many(6, "down", 3)).await {
        assert_eq!(answer.mode, None);
    }
    bed.restart_router().await;
    bed.routed_again().await;
}

#[tokio::test]
async fn no_request_is_lost_when_warmroute_is_killed_while_it_holds_them() {
    let mut bed = Bed::start(2, &[], Patience::Long).await;
    let warm = bed.ask(&chat("a warm prompt", 2)).await;
    bed.stack.router().unwrap().freeze();
    let asking = bed.asking_many(8, "held", 5);
    bed.wait_held(8).await;
    bed.stack.kill9_router();
    for answer in all(asking).await {
        assert_eq!(answer.mode, None, "a killed warmroute cannot have answered");
    }
    down_and_up_again(&mut bed).await;
    let again = bed.ask(&chat("a warm prompt", 2)).await;
    assert_eq!(
        (again.engine, again.mode.as_deref()),
        (warm.engine, Some("exact"))
    );
    assert!(again.delivered > 0);
    assert_eq!(
        again.predicted,
        Some(again.delivered),
        "the index must be warm again through replay"
    );
}

#[tokio::test]
async fn no_request_is_lost_when_warmroute_is_killed_between_request_and_response() {
    let mut bed = Bed::start(2, &[], Patience::Long).await;
    for engine in 0..2 {
        bed.misbehave(engine, &serde_json::json!({"slow_first_token_ms": 4000}))
            .await;
    }
    let asking: Vec<_> = (0..8)
        .map(|at| bed.asking(chat(&format!("slow {at}"), 5)))
        .collect();
    bed.wait_load("active_requests", 8).await;
    bed.stack.kill9_router();
    all(asking).await;
    for engine in 0..2 {
        bed.misbehave(engine, &serde_json::json!({"slow_first_token_ms": 0}))
            .await;
    }
    down_and_up_again(&mut bed).await;
}

#[tokio::test]
async fn no_stream_is_cut_when_warmroute_is_killed_in_the_middle_of_it() {
    let mut bed = Bed::start(2, &["--step-us", "40000"], Patience::Shipped).await;
    let bodies: Vec<_> = (0..8)
        .map(|at| stream(&format!("stream {at}"), 60))
        .collect();
    let mut responses = join_all(
        bodies
            .iter()
            .map(|body| async { bed.post(body).send().await.unwrap() }),
    )
    .await;
    // The first token of each, so that all are in their middle.
    let mut begun = Vec::new();
    for response in &mut responses {
        begun.push(response.chunk().await.unwrap().unwrap());
    }
    assert!(
        bed.load("active_requests").await > 0,
        "the streams are over before the kill"
    );
    bed.stack.kill9_router();
    for (mut response, first) in responses.into_iter().zip(begun) {
        assert_eq!(response.status(), 200);
        let mut text = first.to_vec();
        while let Some(chunk) = response.chunk().await.unwrap() {
            text.extend(chunk);
        }
        let usage = crate::bed::usage_of_stream(std::str::from_utf8(&text).unwrap());
        assert_eq!(usage["completion_tokens"], 60);
    }
    down_and_up_again(&mut bed).await;
}

#[tokio::test]
async fn a_frozen_warmroute_delays_requests_by_the_message_timeout_and_loses_none() {
    let bed = Bed::start(2, &["--step-us", "40000"], Patience::Shipped).await;
    let body = stream("running", 40);
    let mut running = bed.post(&body).send().await.unwrap();
    let first = running.chunk().await.unwrap().unwrap();
    bed.stack.router().unwrap().freeze();
    for answer in all(bed.asking_many(8, "frozen", 5)).await {
        assert_eq!(answer.mode, None);
    }
    let rest = running.bytes().await.unwrap();
    let text = [&first[..], &rest[..]].concat();
    assert_eq!(
        crate::bed::usage_of_stream(std::str::from_utf8(&text).unwrap())["completion_tokens"],
        40
    );
    bed.stack.router().unwrap().thaw();
    bed.routed_again().await;
}

#[tokio::test]
async fn requests_that_keep_coming_survive_three_kills() {
    let mut bed = Bed::start(2, &[], Patience::Shipped).await;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let (url, http) = (bed.stack.url("/v1/chat/completions"), bed.http.clone());
    let client = move |name: usize| {
        let (url, http, stopped) = (url.clone(), http.clone(), stopped.clone());
        tokio::spawn(async move {
            let mut answered = 0;
            while !*stopped.borrow() {
                let text = format!("client {name} turn {answered}");
                let body = if answered % 2 == 0 {
                    chat(&text, 8)
                } else {
                    stream(&text, 8)
                };
                whole(http.post(&url).json(&body).send().await.unwrap(), &body).await;
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
    bed.routed_again().await;
}
