//! Tasks that outlive their exchange at shutdown: detached prefills, and abort requests to engines.

use std::time::Duration;

use axum::extract::{Request, State};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use warmroute_testbed::ports::{PATIENCE, until};

use crate::support::process::WarmrouteProcess;

/// Worker that forwards its requests to the test, and sends the responses of the test.
struct PrefillWorker {
    endpoint: String,
    questions: mpsc::UnboundedReceiver<PendingPrefill>,
}

/// Path, body, and the channel for the response.
type PendingPrefill = (String, String, oneshot::Sender<Value>);

impl PrefillWorker {
    async fn start() -> Self {
        let (requests_tx, questions) = mpsc::unbounded_channel();
        let answer = async |State(requests_tx): State<mpsc::UnboundedSender<PendingPrefill>>,
                            request: Request| {
            let path = request.uri().path().to_owned();
            let body = request.into_body();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let (reply, response) = oneshot::channel();
            requests_tx
                .send((path, String::from_utf8(body.to_vec()).unwrap(), reply))
                .unwrap();
            Json(response.await.unwrap_or_default())
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let routes = Router::new().fallback(post(answer)).with_state(requests_tx);
        tokio::spawn(async { axum::serve(listener, routes).await });
        Self {
            endpoint,
            questions,
        }
    }

    /// Returns the next request whose path has this suffix.
    async fn questions(&mut self, path: &str) -> PendingPrefill {
        let next = async {
            loop {
                let question = self.questions.recv().await.unwrap();
                if question.0.ends_with(path) {
                    return question;
                }
            }
        };
        tokio::time::timeout(PATIENCE, next)
            .await
            .expect("no request arrives")
    }
}

/// Returns the configuration of a model with this prefill worker.
fn prefill_config(prefill: &PrefillWorker, by: &str, deadline: &str) -> Value {
    json!({
        "models": [{"name": "m", "block_size": 16, "prefill": {"mode": by}}],
        "workers": {
            "list": [
                {"id": 1, "endpoint": prefill.endpoint, "role": "prefill"},
                {"id": 2, "endpoint": "10.0.0.2:8000", "role": "decode"},
            ],
        },
        "process": {"drain": {"grace_period": "0s", "timeout": deadline}},
        "engines": {"discovery": {"enabled": false}, "parity_check": {"enabled": false}},
    })
}

#[tokio::test]
async fn shutdown_waits_for_detached_prefill() {
    let mut worker = PrefillWorker::start().await;
    let process = WarmrouteProcess::start(prefill_config(&worker, "call", "60s"), &[]).await;
    // Envoy receives a timeout override. The route follows after the prefill.
    let (open, _) = process.open(process.channel(process.grpc).await, "m").await;
    let (.., mut reply) = worker.questions("/v1/completions").await;
    drop(open);
    process
        .wait_metric(
            "prefill_calls_total{outcome=\"cancelled_after_start\"}",
            1.0,
        )
        .await;
    assert_eq!(process.metric("prefill_calls_in_flight").await, 1.0);
    process.terminate();
    let refused = async || process.health(process.grpc, "").await.is_err();
    assert!(
        until(PATIENCE, refused).await,
        "still accepting:\n{}",
        process.log()
    );
    // No exchange is open, but the engine still computes the prefill.
    let cut_off = tokio::time::timeout(Duration::from_secs(1), reply.closed()).await;
    assert!(
        cut_off.is_err() && process.child.is_running(),
        "{}",
        process.log()
    );
    reply.send(json!({"kv_transfer_params": null})).unwrap();
    process.assert_exit_success().await;
    assert!(
        !process.log().contains("drain deadline exceeded"),
        "{}",
        process.log()
    );
}

#[tokio::test]
async fn drain_deadline_bounds_detached_prefill() {
    let mut worker = PrefillWorker::start().await;
    let process = WarmrouteProcess::start(prefill_config(&worker, "call", "500ms"), &[]).await;
    // Envoy receives a timeout override. The route follows after the prefill.
    let (open, _) = process.open(process.channel(process.grpc).await, "m").await;
    let (.., mut reply) = worker.questions("/v1/completions").await;
    drop(open);
    process
        .wait_metric(
            "prefill_calls_total{outcome=\"cancelled_after_start\"}",
            1.0,
        )
        .await;
    process.terminate();
    process.assert_exit_success().await;
    reply.closed().await;
    assert!(
        process.log().contains("aborting prefills"),
        "{}",
        process.log()
    );
    assert!(!process.log().contains("panicked"), "{}", process.log());
}

#[tokio::test]
async fn engines_are_notified_of_aborted_requests() {
    let mut worker = PrefillWorker::start().await;
    let process = WarmrouteProcess::start(prefill_config(&worker, "mirror", "300ms"), &[]).await;
    let (open, steered) = process.open(process.channel(process.grpc).await, "m").await;
    assert!(steered.contains("10.0.0.2:8000"), "{steered}");
    // warmroute itself sends the copy of a unary request, because a unary response does not show
    // the end of the prefill. The test does not respond to the copy.
    let copy = worker.questions("/v1/completions").await;
    process.terminate();
    let (_, body, reply) = worker.questions("/abort_request").await;
    assert!(body.contains("\"rid\":\"warmroute-"), "{body}");
    reply.send(Value::Null).unwrap();
    process.assert_exit_success().await;
    assert!(
        process.log().contains("drain deadline exceeded"),
        "{}",
        process.log()
    );
    drop((open, copy));
}
