//! Clients that leave, in every phase of a request: what was booked for them must be free again.

use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;

use crate::bed::{Bed, Patience, chat, stream};
use crate::load::{connect, raw};

#[tokio::test]
async fn a_client_that_leaves_during_its_upload_leaves_nothing_open() {
    let bed = Bed::start(1, &[], Patience::Long).await;
    let mut clients = Vec::new();
    for at in 0..8 {
        let mut client = connect(&bed).await;
        let request = raw(&chat(&format!("upload {at}"), 5));
        client
            .write_all(&request.as_bytes()[..request.len() - 100])
            .await
            .unwrap();
        clients.push(client);
    }
    bed.wait_exchanges(8).await;
    assert_eq!(
        bed.load("active_requests").await,
        0,
        "nothing is booked before the prompt is known"
    );
    drop(clients);
    bed.quiet().await;
    bed.routed_again().await;
}

#[tokio::test]
async fn a_client_that_leaves_while_warmroute_holds_its_request_leaves_nothing_booked() {
    let bed = Bed::start(1, &[], Patience::Long).await;
    bed.stack.router().unwrap().freeze();
    let asking = bed.asking_many(8, "held", 5);
    bed.wait_held(8).await;
    asking.iter().for_each(tokio::task::JoinHandle::abort);
    bed.wait_held(0).await;
    bed.stack.router().unwrap().thaw();
    bed.quiet().await;
    bed.routed_again().await;
}

#[tokio::test]
async fn a_client_that_leaves_while_its_prompt_is_tokenised_leaves_nothing_booked() {
    let bed = Bed::start(1, &[], Patience::Long).await;
    let long = "A long prompt takes its time. ".repeat(40_000);
    let asking: Vec<_> = (0..6)
        .map(|at| bed.asking(chat(&format!("{at} {long}"), 5)))
        .collect();
    bed.wait_exchanges(6).await;
    asking.iter().for_each(tokio::task::JoinHandle::abort);
    bed.quiet().await;
    bed.routed_again().await;
}

#[tokio::test]
async fn a_client_that_leaves_before_its_first_token_frees_its_worker() {
    let bed = Bed::start(2, &[], Patience::Long).await;
    for engine in 0..2 {
        bed.misbehave(engine, &json!({"slow_first_token_ms": 600_000}))
            .await;
    }
    // Every second one is unary: it waits for its headers, the others for the first token after them.
    let asking = bed.asking_many(12, "waiting", 5);
    bed.wait_load("active_requests", 12).await;
    asking.iter().for_each(tokio::task::JoinHandle::abort);
    bed.quiet().await;
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_its_stream_frees_its_worker() {
    let bed = Bed::start(2, &["--step-us", "50000"], Patience::Long).await;
    let begun = join_all((0..8).map(async |at| {
        let mut response = bed
            .post(&stream(&format!("middle {at}"), 1000))
            .send()
            .await
            .unwrap();
        response.chunk().await.unwrap().unwrap();
        response
    }));
    let begun = begun.await;
    assert_eq!(bed.load("active_requests").await, 8);
    drop(begun);
    bed.quiet().await;
}

#[tokio::test]
async fn clients_that_leave_at_random_moments_leave_nothing_booked() {
    let bed = Bed::start(2, &["--step-us", "10000"], Patience::Long).await;
    let one = async |at: usize| {
        let text = format!(
            "random {at} {}",
            "padding ".repeat(rand::random_range(0..400))
        );
        let body = if at.is_multiple_of(2) {
            chat(&text, 20)
        } else {
            stream(&text, 20)
        };
        let patience = Duration::from_millis(rand::random_range(0..300));
        let asked = async { bed.post(&body).send().await.unwrap().text().await.unwrap() };
        tokio::time::timeout(patience, asked).await.is_err()
    };
    let left: Vec<bool> = futures_util::stream::iter((0..400).map(one))
        .buffer_unordered(32)
        .collect()
        .await;
    let left = left.into_iter().filter(|left| *left).count();
    assert!(left >= 200, "only {left} clients left early");
    bed.quiet().await;
    bed.routed_again().await;
}
