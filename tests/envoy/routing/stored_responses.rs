//! Requests that refer to a response reach the engine that stores it.

use reqwest::Method;
use serde_json::{Value, json};
use warmroute_testbed::deployment::MODEL;
use warmroute_testbed::merge_config;

use crate::routing::bed::{RoutedAnswer, RoutingBed, engine, patient};

/// Number of conversations. Without bindings, two thirds of the requests reach an engine without
/// the response.
const CONVERSATIONS: usize = 8;

/// Starts three engines with a policy that takes them in turn.
async fn bed(more: Value, envoy: impl Fn(&str) -> String) -> RoutingBed {
    let specs = [engine(1), engine(2), engine(3)];
    let mut config = json!({"routing": {"policy": "round_robin"}});
    merge_config(&mut config, &more);
    RoutingBed::start_with_envoy(&specs, config, envoy).await
}

async fn respond(bed: &RoutingBed, is_stream: bool, fields: Value) -> RoutedAnswer {
    let mut body = json!({
        "model": MODEL,
        "input": "Good morning.",
        "max_output_tokens": 4,
        "stream": is_stream,
    });
    merge_config(&mut body, &fields);
    let request = bed.http.post(bed.stack.url("/v1/responses")).json(&body);
    RoutedAnswer::send(request).await
}

fn response_id(answer: &RoutedAnswer) -> String {
    let first = answer
        .text
        .lines()
        .find_map(|line| line.strip_prefix("data: "));
    let response: Value = match first {
        Some(event) => serde_json::from_str::<Value>(event).unwrap()["response"].clone(),
        None => answer.json(),
    };
    response["id"].as_str().unwrap().to_owned()
}

async fn manage(bed: &RoutingBed, method: Method, id: &str, action: &str) -> RoutedAnswer {
    let url = bed.stack.url(&format!("/v1/responses/{id}{action}"));
    RoutedAnswer::send(bed.http.request(method, url)).await
}

/// Runs conversations, and asserts that each request reaches the engine of its conversation.
async fn assert_bound(bed: &RoutingBed, is_stream: bool) {
    for _ in 0..CONVERSATIONS {
        let first = respond(bed, is_stream, json!({})).await;
        let home = first.engine();
        let id = response_id(&first);
        let next = respond(bed, is_stream, json!({"previous_response_id": id})).await;
        assert_eq!(next.engine(), home, "{next:?}");
        let next_id = response_id(&next);
        let last = respond(bed, !is_stream, json!({"previous_response_id": next_id})).await;
        assert_eq!(last.engine(), home, "{last:?}");
        for (method, action) in [
            (Method::GET, ""),
            (Method::GET, "/input_items"),
            (Method::POST, "/cancel"),
            (Method::DELETE, ""),
        ] {
            let answer = manage(bed, method, &id, action).await;
            assert_eq!(answer.engine(), home, "{action}: {answer:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn stored_response_leads_requests_to_its_engine() {
    let bed = bed(json!({}), patient).await;
    for is_stream in [false, true] {
        assert_bound(&bed, is_stream).await;
    }
    let unknown = manage(&bed, Method::GET, "resp_unknown", "").await;
    assert_eq!(unknown.status, 404, "the engine responds: {unknown:?}");
    let bound = bed.metric("stored_responses", &[]).await;
    assert_eq!(bound, (2 * 3 * CONVERSATIONS) as f64);
    let unstored = respond(&bed, false, json!({"store": false})).await;
    unstored.engine();
    assert_eq!(bed.metric("stored_responses", &[]).await, bound);
    bed.wait_idle().await;
}
