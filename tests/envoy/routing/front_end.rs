//! Workers behind one front end, which sends each request to the worker that the headers name.

use serde_json::{Value, json};
use warmroute_testbed::deployment::EngineSpec;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::routing::bed::{RoutedAnswer, RoutingBed, chat, engine, engine_for, essay, text};

const WORKERS: u64 = 2;

/// Returns a deployment whose workers have the ids 1 and 2 and one endpoint. Their caches are
/// predicted.
async fn bed() -> RoutingBed {
    let front_end = EngineSpec {
        replay: false,
        ..engine(1).with(&["--dp-size", "2", "--front-end"])
    };
    let more = json!({"gateway": {"header_profiles": ["worker-id", "dynamo"]}});
    let bed = RoutingBed::start(&[front_end], more).await;
    let endpoint = bed.stack.engines[0].address.to_string();
    let worker = |id: u64| json!({"id": id, "endpoint": endpoint, "via": "front_end"});
    let workers: Vec<Value> = (1..=WORKERS).map(worker).collect();
    bed.stack.write_worker_entries(&json!(workers)).unwrap();
    let are_known = async || {
        let fleet = bed.stack.debug_page("fleet").await.unwrap().to_string();
        fleet.matches("front_end").count() as u64 >= WORKERS
    };
    assert!(until(PATIENCE, are_known).await);
    bed
}

/// Returns the worker that the front end was asked for, and asserts that it is the chosen one.
fn worker_of(answer: &RoutedAnswer) -> u64 {
    let named = answer.header("x-received-worker-instance-id").parse();
    assert_eq!(named, Ok(answer.chosen()), "{answer:?}");
    answer.chosen()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn responses_belong_to_the_pinned_worker() {
    let bed = bed().await;
    bed.set_first_tokens(1, false).await;
    let mut sending = Vec::new();
    for topic in 0..WORKERS as usize {
        sending.push(bed.send_in_background(&text(&essay(topic))));
        // The next request is sent to a worker without requests.
        bed.wait_metric("worker_active_requests", &[], sending.len() as f64)
            .await;
    }
    bed.set_first_tokens(1, true).await;
    for answer in sending {
        worker_of(&answer.await.unwrap());
    }
    bed.wait_idle().await;
    let page = bed.metrics().await;
    assert_eq!(page.sum("served_endpoint_mismatches_total", &[]), 0.0);
    let observed = page.sum("time_to_first_token_seconds_count", &[]);
    assert_eq!(observed, WORKERS as f64, "{}", page.text());
    let endpoints = std::fs::read_to_string(bed.stack.envoy_setup().endpoint_file()).unwrap();
    let port = bed.stack.engines[0].address.port().to_string();
    assert_eq!(endpoints.matches(&port).count(), 1, "{endpoints}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn front_end_serves_without_warmroute() {
    let mut bed = bed().await;
    worker_of(&bed.query(&chat("with a pin")).await);
    bed.stack.kill9_router();
    for question in ["one", "two", "three", "four"] {
        let answer = bed.query(&chat(question)).await;
        assert_eq!(
            (
                answer.status.as_u16(),
                answer.header("x-received-worker-instance-id")
            ),
            (200, ""),
            "{answer:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn missing_prefill_worker_leaves_choice_to_front_end() {
    let pair = [engine_for("prefill", 1), engine_for("decode", 2)];
    let more = json!({"gateway": {"header_profiles": ["worker-id", "dynamo"]}});
    let bed = RoutingBed::start(&pair, more).await;
    let pins = |answer: &RoutedAnswer| {
        [
            "x-received-worker-instance-id",
            "x-received-prefill-instance-id",
        ]
        .map(|name| answer.header(name).to_owned())
    };
    let answer = bed.query(&chat("with both")).await;
    assert_eq!(pins(&answer), ["2", "1"], "{answer:?}");
    let decode = json!([bed.engine(2).worker_entry()]);
    bed.stack.write_worker_entries(&decode).unwrap();
    let fails_open = async || {
        let answer = bed.query(&chat("alone")).await;
        assert_eq!(answer.status.as_u16(), 200, "{answer:?}");
        pins(&answer) == ["", ""] && answer.header("x-warmroute-mode") == "passthrough"
    };
    assert!(until(PATIENCE, fails_open).await);
    bed.wait_idle().await;
}
