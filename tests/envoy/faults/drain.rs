//! SIGTERM during streaming responses.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use reqwest::StatusCode;
use serde_json::{Value, json};
use warmroute_testbed::deployment::EngineSpec;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::faults::bed::{assert_exits, join_answers, start_with, stream, usage_of_stream};
use crate::routing::bed::{RoutedAnswer, RoutingBed};

/// Returns an engine that streams at most 25 tokens per second.
fn slow_engine() -> EngineSpec {
    EngineSpec::new(1).with(&["--step-us", "40000"])
}

/// Starts streams and waits for the first token of each.
async fn begin(bed: &RoutingBed, count: usize, tokens: u64) -> Vec<(reqwest::Response, Vec<u8>)> {
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

/// Reads the rest of the streams and asserts that they are complete.
async fn end(streams: Vec<(reqwest::Response, Vec<u8>)>, tokens: u64) {
    for (response, first) in streams {
        let text = [first, response.bytes().await.unwrap().to_vec()].concat();
        assert_eq!(
            usage_of_stream(std::str::from_utf8(&text).unwrap())["completion_tokens"],
            tokens
        );
    }
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn drain_finishes_streams_and_leaves_requests_to_envoy() {
    let bed = start_with(&[slow_engine()], &json!({})).await;
    let streams = begin(&bed, 4, 300).await;
    bed.stack.router().unwrap().terminate();

    let mut page = Value::Null;
    let draining = async || {
        let answer = RoutedAnswer::send(bed.http.get(bed.admin_url("/readyz"))).await;
        page = answer.json();
        answer.status == StatusCode::SERVICE_UNAVAILABLE
    };
    assert!(until(PATIENCE, draining).await, "{page}");
    assert_eq!(page, json!({"ready": false, "pending": ["draining"]}));
    // Envoy may begin exchanges until it has read the GOAWAY frame.
    let is_unrouted = async || {
        let answers = join_answers(bed.send_many_in_background(1, "late", 2)).await;
        answers.iter().all(|answer| answer.mode().is_empty())
    };
    assert!(until(PATIENCE, is_unrouted).await, "Envoy begins exchanges");
    for answer in join_answers(bed.send_many_in_background(4, "new", 2)).await {
        assert_eq!(answer.mode(), "", "no new exchange is begun while draining");
    }
    assert!(
        bed.total_load("active_requests").await > 0,
        "the streams ended early, so the test proves nothing"
    );
    end(streams, 300).await;
    assert_exits(bed.router().unwrap()).await;
    let log = bed.stack.router().unwrap().log_tail();
    assert!(!log.contains("drain deadline exceeded"), "{log}");
    for answer in join_answers(bed.send_many_in_background(2, "newer", 2)).await {
        assert_eq!(answer.mode(), "");
    }
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn drain_deadline_leaves_streams_to_envoy() {
    let process = json!({"drain": {"grace_period": "0s", "timeout": "500ms"}});
    let bed = start_with(&[slow_engine()], &process).await;
    let streams = begin(&bed, 4, 200).await;
    let signalled = Instant::now();
    bed.stack.router().unwrap().terminate();
    assert_exits(bed.router().unwrap()).await;
    let took = signalled.elapsed();
    assert!(
        took >= Duration::from_millis(450),
        "exited after {took:?} with open streams"
    );
    let running = bed.engines("vllm:num_requests_running").await;
    assert!(running > 0.0, "warmroute waited for all streams");
    end(streams, 200).await;
    for answer in join_answers(bed.send_many_in_background(2, "newer", 2)).await {
        assert_eq!(answer.mode(), "");
    }
}
