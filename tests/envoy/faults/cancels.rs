//! Clients that disconnect in each phase of a request. All bookings must be released.

use std::time::Duration;

use futures_util::StreamExt as _;

use crate::faults::bed::{chat, start, stream};

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn disconnect_of_held_request_leaves_no_booking() {
    let bed = start(1, &[]).await;
    bed.stack.router().unwrap().freeze();
    let sending = bed.send_many_in_background(8, "held", 5);
    bed.wait_held(8).await;
    sending.iter().for_each(tokio::task::JoinHandle::abort);
    bed.wait_held(0).await;
    bed.stack.router().unwrap().thaw();
    bed.wait_unbooked().await;
    bed.wait_routable().await;
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn disconnect_during_tokenization_leaves_no_booking() {
    let bed = start(1, &[]).await;
    let long = "A long prompt takes its time. ".repeat(40_000);
    let sending: Vec<_> = (0..6)
        .map(|at| bed.send_and_check_in_background(chat(&format!("{at} {long}"), 5)))
        .collect();
    bed.wait_metric("open_exchanges", &[], 6.0).await;
    sending.iter().for_each(tokio::task::JoinHandle::abort);
    bed.wait_unbooked().await;
    bed.wait_routable().await;
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn disconnects_at_random_times_leave_no_booking() {
    let bed = start(2, &["--step-us", "10000"]).await;
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
        let response = async { bed.post(&body).send().await.unwrap().text().await.unwrap() };
        tokio::time::timeout(patience, response).await.is_err()
    };
    let left: Vec<bool> = futures_util::stream::iter((0..400).map(one))
        .buffer_unordered(32)
        .collect()
        .await;
    let left = left.into_iter().filter(|left| *left).count();
    assert!(left >= 200, "only {left} clients left early");
    bed.wait_unbooked().await;
    bed.wait_routable().await;
}
