//! What is still to be done for exchanges when the end comes: prefills whose clients have left, and engines that have to be
//! told that nobody waits.

use std::time::Duration;

use axum::extract::{Request, State};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

use crate::process::{Process, SOON};
use crate::support::ports::until;

/// A worker that says what it is asked, and answers as it is told to.
struct Worker {
    endpoint: String,
    asked: mpsc::UnboundedReceiver<Question>,
}

/// Path, body, and where to say the answer.
type Question = (String, String, oneshot::Sender<Value>);

impl Worker {
    async fn start() -> Self {
        let (tell, asked) = mpsc::unbounded_channel();
        let answer = async |State(tell): State<mpsc::UnboundedSender<Question>>,
                            request: Request| {
            let (path, body) = (request.uri().path().to_owned(), request.into_body());
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let (reply, said) = oneshot::channel();
            tell.send((path, String::from_utf8(body.to_vec()).unwrap(), reply))
                .unwrap();
            Json(said.await.unwrap_or_default())
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let routes = Router::new().fallback(post(answer)).with_state(tell);
        tokio::spawn(async { axum::serve(listener, routes).await });
        Self { endpoint, asked }
    }

    /// The next question to a path that ends like this.
    async fn asked(&mut self, path: &str) -> Question {
        let next = async {
            loop {
                let question = self.asked.recv().await.unwrap();
                if question.0.ends_with(path) {
                    return question;
                }
            }
        };
        tokio::time::timeout(SOON, next).await.expect("it is asked")
    }
}

/// A model whose prompts this worker computes.
fn divided(prefill: &Worker, by: &str, deadline: &str) -> Value {
    json!({
        "models": [{"name": "m", "block_size": 16, "prefill": {"by": by}}],
        "workers": [
            {"id": 1, "endpoint": prefill.endpoint, "role": "prefill"},
            {"id": 2, "endpoint": "10.0.0.2:8000", "role": "decode"},
        ],
        "drain": {"grace": "0s", "deadline": deadline},
        "learn": {"enabled": false},
        "self_test": {"enabled": false},
    })
}

#[tokio::test]
async fn the_end_waits_for_a_prefill_whose_client_has_left() {
    let mut worker = Worker::start().await;
    let process = Process::start(divided(&worker, "call", "60s"), &[]).await;
    // Envoy is asked for patience; the way to go comes after the prefill.
    let (open, _) = process.open(process.channel(process.grpc).await, "m").await;
    let (.., mut reply) = worker.asked("/v1/completions").await;
    drop(open);
    process
        .shows("prefill_calls_total{outcome=\"left_after_start\"}", 1.0)
        .await;
    assert_eq!(process.metric("prefills_under_way").await, 1.0);
    process.terminate();
    let refused = async || process.health(process.grpc, "").await.is_err();
    assert!(
        until(SOON, refused).await,
        "still accepting:\n{}",
        process.log()
    );
    // Nothing is open, and the engine still works for nobody but its own good.
    let cut_off = tokio::time::timeout(Duration::from_secs(1), reply.closed()).await;
    assert!(
        cut_off.is_err() && process.child.is_running(),
        "{}",
        process.log()
    );
    reply.send(json!({"kv_transfer_params": null})).unwrap();
    process.ends_well().await;
    assert!(
        !process.log().contains("the drain deadline passed"),
        "{}",
        process.log()
    );
}

#[tokio::test]
async fn it_does_not_wait_longer_than_the_drain_deadline() {
    let mut worker = Worker::start().await;
    let process = Process::start(divided(&worker, "call", "500ms"), &[]).await;
    // Envoy is asked for patience; the way to go comes after the prefill.
    let (open, _) = process.open(process.channel(process.grpc).await, "m").await;
    let (.., mut reply) = worker.asked("/v1/completions").await;
    drop(open);
    process
        .shows("prefill_calls_total{outcome=\"left_after_start\"}", 1.0)
        .await;
    process.terminate();
    process.ends_well().await;
    reply.closed().await;
    assert!(
        process.log().contains("cutting off prefills"),
        "{}",
        process.log()
    );
    assert!(!process.log().contains("panicked"), "{}", process.log());
}

#[tokio::test]
async fn engines_hear_of_what_the_drain_deadline_cuts() {
    let mut worker = Worker::start().await;
    let process = Process::start(divided(&worker, "mirror", "300ms"), &[]).await;
    let (open, steered) = process.open(process.channel(process.grpc).await, "m").await;
    assert!(steered.contains("10.0.0.2:8000"), "{steered}");
    // An answer in one piece shows nothing of the prefill, so its copy is ours to make, and is not answered here.
    let copy = worker.asked("/v1/completions").await;
    process.terminate();
    let (_, body, reply) = worker.asked("/abort_request").await;
    assert!(body.contains("\"rid\":\"warmroute-"), "{body}");
    reply.send(Value::Null).unwrap();
    process.ends_well().await;
    assert!(
        process.log().contains("the drain deadline passed"),
        "{}",
        process.log()
    );
    drop((open, copy));
}
