//! The first token is the first content of a stream, in the event order of each API. Events that
//! precede it reach the client and do not end the prefill.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use warmroute_testbed::deployment::MODEL;

use crate::routing::bed::{RoutingBed, SOON, engine, essay, stream};

/// Time for which the first token is held after the earlier events have arrived.
const HOLD: Duration = Duration::from_millis(300);

/// Returns the path and the body of a streaming request of each API, and a part of the last event
/// before the first token.
fn requests() -> [(&'static str, Value, &'static str); 4] {
    let prompt = essay(1);
    [
        (
            "/v1/completions",
            json!({"model": MODEL, "prompt": prompt, "max_tokens": 3, "stream": true}),
            ": ping",
        ),
        ("/v1/chat/completions", stream(&essay(2), 3), ": ping"),
        (
            "/v1/responses",
            json!({"model": MODEL, "input": essay(3), "max_output_tokens": 3, "stream": true}),
            "event: response.in_progress",
        ),
        (
            "/v1/messages",
            json!({"model": MODEL, "max_tokens": 3, "stream": true,
                "messages": [{"role": "user", "content": essay(4)}]}),
            "event: ping",
        ),
    ]
}

/// Returns the number of observed first tokens, and the sum of their times in seconds.
async fn first_tokens(bed: &RoutingBed) -> (f64, f64) {
    let page = bed.metrics().await;
    let sum = |name| page.sum(name, &[]);
    (
        sum("time_to_first_token_seconds_count"),
        sum("time_to_first_token_seconds_sum"),
    )
}

async fn assert_first_token_is_content(bed: &RoutingBed) {
    for (path, body, last_early_event) in requests() {
        bed.misbehave(1, json!({"early_stream_events": true})).await;
        bed.set_first_tokens(1, false).await;
        let before = first_tokens(bed).await;
        let request = bed.http.post(bed.stack.url(path)).json(&body);
        let mut response = request.send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        let mut text = String::new();
        while !text.contains(last_early_event) {
            let chunk = tokio::time::timeout(SOON, response.chunk()).await;
            let chunk = chunk.unwrap().unwrap().expect("the response continues");
            text.push_str(std::str::from_utf8(&chunk).unwrap());
        }
        let held_since = Instant::now();
        while held_since.elapsed() < HOLD {
            let booked = bed.load(1, "active_prefill_tokens").await;
            assert!(booked > 10, "{path}: {booked} tokens are booked");
        }
        assert_eq!(first_tokens(bed).await.0, before.0, "{path}: {text}");
        bed.set_first_tokens(1, true).await;
        while let Some(chunk) = response.chunk().await.unwrap() {
            text.push_str(std::str::from_utf8(&chunk).unwrap());
        }
        bed.wait_metrics("the first token is counted", |page| {
            page.sum("time_to_first_token_seconds_count", &[]) == before.0 + 1.0
        })
        .await;
        let seconds = first_tokens(bed).await.1 - before.1;
        assert!(seconds >= HOLD.as_secs_f64(), "{path}: {seconds} s");
        bed.wait_idle().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probe_waits_for_content_of_each_api() {
    let bed = RoutingBed::start(&[engine(1)], json!({})).await;
    assert_first_token_is_content(&bed).await;
    let labels = [("outcome", "observed")];
    bed.wait_metrics("the probe has observed the streams", |page| {
        page.sum("first_token_streams_total", &labels) == requests().len() as f64
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_filter_waits_for_content_of_each_api() {
    for observe in ["first_token", "usage"] {
        let config = json!({"gateway": {"observe": observe}});
        let bed = RoutingBed::start_with_envoy_file("minimal", &[engine(1)], config, |shipped| {
            shipped.replace(" message_timeout: 1s", " message_timeout: 30s")
        })
        .await;
        assert_first_token_is_content(&bed).await;
    }
}
