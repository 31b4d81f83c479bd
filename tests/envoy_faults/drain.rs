//! SIGTERM while answers stream.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::bed::{Bed, Patience, SOON, all, stream, usage_of_stream};
use crate::support::ports::until;
use crate::support::stack::EngineSpec;

/// An engine that streams 25 tokens a second at most.
fn slow_engine() -> EngineSpec {
    EngineSpec::new(1).with(&["--step-us", "40000"])
}

/// Streams of which the first token was seen.
async fn begin(bed: &Bed, count: usize, tokens: u64) -> Vec<(reqwest::Response, Vec<u8>)> {
    let one = async |at: usize| {
        let mut response = bed
            .post(&stream(&format!("stream {at}"), tokens))
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 200);
        let first = response.chunk().await.unwrap().unwrap().to_vec();
        (response, first)
    };
    join_all((0..count).map(one)).await
}

/// Reads the rest of such streams and insists that they are whole.
async fn end(streams: Vec<(reqwest::Response, Vec<u8>)>, tokens: u64) {
    for (response, first) in streams {
        let text = [first, response.bytes().await.unwrap().to_vec()].concat();
        assert_eq!(
            usage_of_stream(std::str::from_utf8(&text).unwrap())["completion_tokens"],
            tokens
        );
    }
}

/// Waits for the end of the process and insists that it was a good one; says when.
async fn exits_well(bed: &Bed) -> Instant {
    let router = bed.stack.router().unwrap();
    assert!(
        until(SOON, async || !router.is_running()).await,
        "still running:\n{}",
        router.log_tail()
    );
    let status = router.wait_exit(Instant::now()).unwrap();
    assert!(status.success(), "{status}:\n{}", router.log_tail());
    Instant::now()
}

#[tokio::test]
async fn a_drain_lets_running_streams_finish_and_leaves_new_requests_to_envoy() {
    let bed = Bed::of(&[slow_engine()], Patience::Shipped, json!({})).await;
    let streams = begin(&bed, 4, 150).await;
    bed.stack.router().unwrap().terminate();

    let mut page = Value::Null;
    let draining = async || {
        let response = bed
            .http
            .get(bed.stack.admin_url("/readyz"))
            .send()
            .await
            .unwrap();
        let status = response.status();
        page = response.json().await.unwrap();
        status == StatusCode::SERVICE_UNAVAILABLE
    };
    assert!(until(SOON, draining).await, "{page}");
    assert_eq!(page, json!({"ready": false, "pending": ["draining"]}));
    for answer in all(bed.asking_many(4, "new", 2)).await {
        assert_eq!(answer.mode, None, "no new exchange is begun while draining");
    }
    assert!(
        bed.load("active_requests").await > 0,
        "the streams must still be running for this test to mean anything"
    );
    end(streams, 150).await;
    exits_well(&bed).await;
    let log = bed.stack.router().unwrap().log_tail();
    assert!(!log.contains("the drain deadline passed"), "{log}");
    for answer in all(bed.asking_many(2, "newer", 2)).await {
        assert_eq!(answer.mode, None);
    }
}

#[tokio::test]
async fn a_drain_that_reaches_its_deadline_leaves_the_streams_to_envoy() {
    let more = json!({"drain": {"grace": "0s", "deadline": "500ms"}});
    let bed = Bed::of(&[slow_engine()], Patience::Shipped, more).await;
    let streams = begin(&bed, 4, 200).await;
    let told = Instant::now();
    bed.stack.router().unwrap().terminate();
    let took = exits_well(&bed).await - told;
    assert!(
        took >= Duration::from_millis(450),
        "left after {took:?} with streams open"
    );
    assert!(
        took < Duration::from_secs(6),
        "left only after {took:?}; the streams take 8 s"
    );
    end(streams, 200).await;
    for answer in all(bed.asking_many(2, "newer", 2)).await {
        assert_eq!(answer.mode, None);
    }
}
