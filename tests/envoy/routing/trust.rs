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

async fn ask(bed: &RoutingBed, headers: SentHeaders<'_>, body: &Value) -> RoutedAnswer {
    let request = headers
        .iter()
        .fold(bed.post(body), |request, (name, value)| {
            request.header(*name, *value)
        });
    RoutedAnswer::of(request).await
}

fn with_nvext(question: &str, nvext: &Value) -> Value {
    let mut body = chat(question);
    body["nvext"] = nvext.clone();
    body
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trusted_pins_override_cached_blocks() {
    let bed = bed(&[engine(1), engine(2)], true).await;
    for (pinned, warm) in [(1_u64, 2_u64), (2, 1)] {
        let question = essay(pinned as usize);
        bed.warm(warm, &chat(&question)).await;
        let id = pinned.to_string();
        let other = warm.to_string();
        let cases: [(SentHeaders<'_>, Value); 7] = [
            (&[("x-worker-instance-id", &id)], json!({})),
            (&[("X-Dynamo-Worker-Instance-Id", &id)], json!({})),
            (
                &[
                    ("x-dynamo-worker-instance-id", &id),
                    ("x-worker-instance-id", &other),
                ],
                json!({}),
            ),
            (
                &[("x-worker-instance-id", &id), ("x-dp-rank", "0")],
                json!({"backend_instance_id": warm}),
            ),
            (
                &[
                    ("x-worker-instance-id", &id),
                    ("x-data-parallel-rank", "4294967295"),
                ],
                json!({}),
            ),
            (&[], json!({"backend_instance_id": pinned})),
            (
                &[],
                json!({"decode_worker_id": pinned, "dp_rank": 0, "unknown": true}),
            ),
        ];
        for (headers, nvext) in cases {
            let answer = ask(&bed, headers, &with_nvext(&question, &nvext)).await;
            assert_eq!(
                (answer.chosen(), answer.engine()),
                (pinned, pinned),
                "{headers:?} {nvext}: {answer:?}"
            );
            assert_eq!(
                answer.header("x-received-worker-instance-id"),
                id,
                "{headers:?} {nvext}"
            );
        }
    }
    bed.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn impossible_pin_is_a_client_error() {
    let bed = bed(&[engine(1), engine(2)], true).await;
    let cases: [(SentHeaders<'_>, Value, &str); 5] = [
        (
            &[("x-worker-instance-id", "9223372036854775809")],
            json!({}),
            "9223372036854775809",
        ),
        (&[("x-dynamo-worker-instance-id", "77")], json!({}), "77"),
        (&[], json!({"backend_instance_id": 78}), "78"),
        (
            &[("x-worker-instance-id", "1"), ("x-dp-rank", "5")],
            json!({}),
            "5",
        ),
        (
            &[],
            json!({"annotations": ["query_instance_id:"], "decode_worker_id": 79}),
            "79",
        ),
    ];
    for (headers, nvext, named) in cases {
        let refused = ask(&bed, headers, &with_nvext("Hello", &nvext)).await;
        let (code, message) = refused.error(400);
        assert_eq!(
            (code.as_str(), refused.header("retry-after")),
            ("invalid_worker", ""),
            "{message}"
        );
        assert_eq!(refused.json()["error"]["type"], "invalid_request_error");
        assert!(message.contains(named), "{message}");
        assert_eq!(
            refused.header("x-engine-id"),
            "",
            "no engine received the request: {refused:?}"
        );
    }
    // An invalid id is ignored.
    let answer = ask(&bed, &[("x-worker-instance-id", "first")], &chat("Hello")).await;
    assert_eq!(answer.mode(), "exact", "{answer:?}");
    bed.wait_idle().await;
    assert_eq!(
        bed.metrics()
            .await
            .sum("degradations_total", &[("reason", "invalid_pin")]),
        5.0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trusted_clients_pin_each_phase() {
    let specs = [
        engine_for("prefill", 11),
        engine_for("prefill", 12),
        engine_for("decode", 21),
        engine_for("decode", 22),
    ];
    let bed = bed(&specs, true).await;
    for (prefill, decode) in [(11, 21), (11, 22), (12, 21), (12, 22)] {
        let p = prefill.to_string();
        let d = decode.to_string();
        let cases: [(SentHeaders<'_>, Value); 3] = [
            (
                &[("x-prefill-instance-id", &p), ("x-worker-instance-id", &d)],
                json!({}),
            ),
            (
                &[
                    ("x-dynamo-prefill-instance-id", &p),
                    ("x-dynamo-prefill-dp-rank", "0"),
                ],
                json!({"decode_worker_id": decode}),
            ),
            (
                &[],
                json!({"prefill_worker_id": prefill, "decode_worker_id": decode}),
            ),
        ];
        for (headers, nvext) in cases {
            let answer = ask(&bed, headers, &with_nvext("Hello", &nvext)).await;
            assert_eq!(
                (answer.chosen(), answer.engine()),
                (decode, decode),
                "{headers:?} {nvext}: {answer:?}"
            );
            assert_eq!(
                answer.header("x-received-prefill-instance-id"),
                p,
                "{headers:?} {nvext}: {answer:?}"
            );
        }
    }
    let refused = ask(&bed, &[("x-prefill-instance-id", "21")], &chat("Hello")).await;
    let (code, message) = refused.error(400);
    assert!(
        code == "invalid_worker" && message.contains("21"),
        "a decode worker does no prefill: {message}"
    );
    bed.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn query_returns_the_choice_without_booking() {
    let bed = bed(&[engine(1), engine(2)], true).await;
    let question = essay(1);
    let mut request = chat(&question);
    request["return_token_ids"] = json!(true);
    let answer = bed.ask(&request).await;
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
        let choice = bed.ask(&query).await;
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
async fn query_names_the_workers_of_both_phases() {
    let bed = bed(&[engine_for("prefill", 11), engine_for("decode", 21)], true).await;
    let query = with_nvext("Hello", &json!({"annotations": ["query_instance_id:"]}));
    let choice = bed.ask(&query).await.json();
    let workers = json!({"decode_worker_id": 21, "decode_dp_rank": 0, "prefill_worker_id": 11, "prefill_dp_rank": 0});
    assert_eq!(choice["nvext"]["worker_id"], workers, "{choice}");
    bed.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
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
        let answer = ask(&bed, &headers, &body).await;
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
    assert_eq!(bed.metrics().await.sum("degradations_total", &[]), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trusted_constraints_are_met_or_rejected() {
    let specs = [
        engine(1),
        engine(2).with_worker_fields(json!({"taints": ["large"]})),
    ];
    let bed = bed(&specs, true).await;
    let demanding = |turn: usize, taint: &str| {
        let mut body = text(&format!("{turn} demands"));
        body["nvext"] = json!({"routing_constraints": {"required_taints": [taint]}});
        body
    };
    for turn in 0..8 {
        assert_eq!(bed.ask(&demanding(turn, "large")).await.engine(), 2);
    }
    let refused = bed.ask(&demanding(9, "huge")).await;
    let (code, message) = refused.error(503);
    assert_eq!(
        (code.as_str(), refused.retry_after()),
        ("no_eligible_worker", 1),
        "{message}"
    );
    bed.wait_idle().await;
}
