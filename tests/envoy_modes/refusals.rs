//! Errors of our own, as clients get them through Envoy.

use serde_json::json;

use crate::bed::{Answer, chat, engine};
use crate::gateway::{Change, Gateway};
use crate::support::stack::MODEL;
use crate::uploads::Shown;

fn changes() -> Vec<Change> {
    vec![
        Box::new(|_| {}),
        Shown::Duplex.change(),
        Shown::DuplexBothWays.change(),
    ]
}

async fn ask(gateway: &Gateway, listener: usize, body: String) -> Answer {
    let request = gateway
        .http
        .post(gateway.at(listener, "/v1/chat/completions"))
        .body(body);
    Answer::of(
        request
            .header("content-type", "application/json")
            .header("x-request-id", "asked-1"),
    )
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_operator_is_strict_about_is_refused_with_status_code_and_name() {
    let failure = json!({"strict_models": true, "strict_bodies": true, "strict_size": true});
    let more =
        json!({"failure": failure, "limits": {"body": "256KiB", "exchange_deadline": "30s"}});
    let gateway = Gateway::start(&[engine(1)], more, &changes()).await;
    let mut unknown = chat("hello");
    unknown["model"] = json!("nobody-serves-this");
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
            let answer = ask(&gateway, listener, body.clone()).await;
            assert_eq!(answer.error(*status).0, *code, "listener {listener}");
            assert_eq!(answer.header("x-request-id"), "asked-1", "{answer:?}");
            assert_eq!(answer.mode(), "rejected", "{answer:?}");
            assert_eq!(
                answer.header("retry-after"),
                "",
                "to try again would not help: {answer:?}"
            );
        }
        assert_eq!(
            ask(&gateway, listener, chat("hello").to_string())
                .await
                .mode(),
            "exact"
        );
    }
    gateway.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_worker_the_client_hears_so_where_failing_is_closed() {
    let more = json!({"failure": {"mode": "fail_closed"}, "readiness": {"min_initial_workers": 0}});
    let gateway = Gateway::start(&[], more, &changes()).await;
    for listener in 0..3 {
        let answer = ask(&gateway, listener, chat("hello").to_string()).await;
        assert_eq!(answer.error(503).0, "no_worker", "listener {listener}");
        assert!(answer.retry_after() > 0, "{answer:?}");
        assert_eq!(
            (answer.header("x-request-id"), answer.mode()),
            ("asked-1", "rejected"),
            "{answer:?}"
        );
    }
    gateway.quiet().await;
}
