//! Error responses of warmroute, as clients receive them through Envoy.

use serde_json::json;
use warmroute_testbed::deployment::MODEL;

use crate::modes::gateway::{ManagerChange, ModeGateway};
use crate::modes::uploads::EnvoyBodyMode;
use crate::routing::bed::{RoutedAnswer, chat, engine};

fn changes() -> Vec<ManagerChange> {
    vec![
        Box::new(|_| {}),
        EnvoyBodyMode::Duplex.change(),
        EnvoyBodyMode::DuplexBothWays.change(),
    ]
}

async fn query(gateway: &ModeGateway, listener: usize, body: String) -> RoutedAnswer {
    let request = gateway
        .http
        .post(gateway.at(listener, "/v1/chat/completions"))
        .body(body);
    RoutedAnswer::send(
        request
            .header("content-type", "application/json")
            .header("x-request-id", "request-1"),
    )
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strict_settings_reject_with_status_and_code() {
    let failure = json!({"strict_models": true, "strict_bodies": true, "strict_size": true});
    let more = json!({
        "gateway": {"failure": failure},
        "requests": {"limits": {"max_body_size": "256KiB", "decision_timeout": "30s"}},
    });
    let gateway = ModeGateway::start(&[engine(1)], more, &changes()).await;
    let mut unknown = chat("hello");
    unknown["model"] = json!("unserved-model");
    let large = json!({"model": MODEL, "messages": [], "user": "u".repeat(400_000)});
    let cases = [
        (unknown.to_string(), 404, "model_not_found"),
        (
            "{\"model\": \"qwen2.5\", \"messages\": [".to_owned(),
            400,
            "invalid_body",
        ),
        (large.to_string(), 413, "body_too_large"),
    ];
    for listener in 0..3 {
        for (body, status, code) in &cases {
            let answer = query(&gateway, listener, body.clone()).await;
            assert_eq!(answer.error(*status).0, *code, "listener {listener}");
            assert_eq!(answer.header("x-request-id"), "request-1", "{answer:?}");
            assert_eq!(answer.mode(), "rejected", "{answer:?}");
            assert_eq!(
                answer.header("retry-after"),
                "",
                "a permanent error has a retry-after header: {answer:?}"
            );
        }
        assert_eq!(
            query(&gateway, listener, chat("hello").to_string())
                .await
                .mode(),
            "exact"
        );
    }
    gateway.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn fail_closed_returns_error_without_workers() {
    let more = json!({
        "gateway": {"failure": {"mode": "fail_closed"}},
        "process": {"readiness": {"min_workers": 0}},
    });
    let gateway = ModeGateway::start(&[], more, &changes()).await;
    for listener in 0..3 {
        let answer = query(&gateway, listener, chat("hello").to_string()).await;
        assert_eq!(answer.error(503).0, "no_worker", "listener {listener}");
        assert!(answer.retry_after() > 0, "{answer:?}");
        assert_eq!(
            (answer.header("x-request-id"), answer.mode()),
            ("request-1", "rejected"),
            "{answer:?}"
        );
    }
    gateway.wait_idle().await;
}
