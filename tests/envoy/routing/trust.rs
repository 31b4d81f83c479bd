//! Routing hints of trusted and untrusted clients.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use warmroute_testbed::deployment::EngineSpec;

use crate::routing::bed::{
    RoutedAnswer, RoutingBed, allow_pin_headers, chat, engine, engine_for, essay, text,
};

/// Request headers of a client.
type SentHeaders<'h> = &'h [(&'h str, &'h str)];

async fn bed(specs: &[EngineSpec], trusted: bool) -> RoutingBed {
    let more = json!({"requests": {"clients": {"trusted": trusted}}});
    RoutingBed::start_with_envoy(specs, more, allow_pin_headers).await
}

async fn query(bed: &RoutingBed, headers: SentHeaders<'_>, body: &Value) -> RoutedAnswer {
    let request = headers
        .iter()
        .fold(bed.post(body), |request, (name, value)| {
            request.header(*name, *value)
        });
    RoutedAnswer::send(request).await
}

fn with_nvext(question: &str, nvext: &Value) -> Value {
    let mut body = chat(question);
    body["nvext"] = nvext.clone();
    body
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn query_returns_the_choice_without_booking() {
    let bed = bed(&[engine(1), engine(2)], true).await;
    let question = essay(1);
    let mut request = chat(&question);
    request["return_token_ids"] = json!(true);
    let answer = bed.query(&request).await;
    let warm = answer.engine();
    let reported = answer.json();
    let tokens = &reported["prompt_token_ids"];
    assert!(
        tokens.as_array().is_some_and(|tokens| tokens.len() > 300),
        "{reported}"
    );
    bed.settle().await;

    let before = bed.metrics().await;
    for annotation in ["query_instance_id:", "query_instance_id:decode"] {
        let query = with_nvext(&question, &json!({"annotations": ["other", annotation]}));
        let choice = bed.query(&query).await;
        assert_eq!(
            (choice.status.as_u16(), choice.header("x-engine-id")),
            (200, ""),
            "{choice:?}"
        );
        let choice = choice.json();
        let worker = json!({"decode_worker_id": warm, "decode_dp_rank": 0});
        assert_eq!(choice["nvext"]["worker_id"], worker, "{choice}");
        assert_eq!(
            &choice["nvext"]["token_ids"], tokens,
            "the engine's tokens of the prompt"
        );
        assert_eq!(
            choice["endpoint"],
            bed.engine(warm).address.to_string(),
            "{choice}"
        );
        assert_eq!(choice["mode"], "exact", "{choice}");
        let length = tokens.as_array().unwrap().len() as u64;
        assert_eq!(choice["prompt_tokens"], length, "{choice}");
        let cached = (length - 1) / 16 * 16;
        assert_eq!(choice["predicted_cached_tokens"], cached, "{choice}");
        assert!(
            choice["overlap_blocks"]["device"].as_u64().unwrap() >= cached / 16,
            "{choice}"
        );
        bed.wait_idle().await;
    }
    let page = bed.metrics().await;
    assert_eq!(
        page.sum("requests_total", &[("mode", "query")]),
        2.0,
        "{}",
        page.text()
    );
    let routed = [("mode", "exact")];
    assert_eq!(
        page.sum("requests_total", &routed),
        before.sum("requests_total", &routed),
        "{}",
        page.text()
    );
    bed.settle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn query_names_the_workers_of_both_phases() {
    let bed = bed(&[engine_for("prefill", 11), engine_for("decode", 21)], true).await;
    let query = with_nvext("Hello", &json!({"annotations": ["query_instance_id:"]}));
    let choice = bed.query(&query).await.json();
    let workers = json!({"decode_worker_id": 21, "decode_dp_rank": 0, "prefill_worker_id": 11, "prefill_dp_rank": 0});
    assert_eq!(choice["nvext"]["worker_id"], workers, "{choice}");
    bed.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn untrusted_hints_have_no_effect() {
    let bed = bed(&[engine(1), engine(2)], false).await;
    let nvext = json!({
        "backend_instance_id": 1, "decode_worker_id": 1, "dp_rank": 0, "annotations": ["query_instance_id:decode"],
        "token_data": [1, 2, 3], "routing_constraints": {"required_taints": ["absent-taint"]},
    });
    let headers = [
        ("x-worker-instance-id", "1"),
        ("x-dynamo-worker-instance-id", "1"),
        ("x-dp-rank", "7"),
    ];
    let mut served = BTreeSet::new();
    for turn in 0..24 {
        let mut body = text(&format!("{turn} times untrusted"));
        body["nvext"] = nvext.clone();
        let answer = query(&bed, &headers, &body).await;
        assert_eq!(
            (answer.mode(), answer.engine()),
            ("exact", answer.chosen()),
            "{answer:?}"
        );
        let received =
            ["x-received-worker-instance-id", "x-received-dp-rank"].map(|name| answer.header(name));
        assert_eq!(received, [&answer.engine().to_string(), "0"], "{answer:?}");
        assert_eq!(
            answer.json()["object"],
            "text_completion",
            "a completion and not the choice"
        );
        served.insert(answer.engine());
        bed.wait_idle().await;
    }
    assert_eq!(served.len(), 2, "the pins have no effect");
    assert_eq!(bed.metric("degradations_total", &[]).await, 0.0);
}
