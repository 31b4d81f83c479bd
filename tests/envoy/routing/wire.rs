//! Playback of the captured NIXL handoff over sockets. Two scripted servers replace the engines and
//! send the captured responses. The requests that they receive through Envoy and warmroute are
//! compared with the captured ones.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Barrier;
use warmroute_testbed::merge_config;

use crate::routing::bed::{RoutedAnswer, RoutingBed, patient};
use crate::support::deployment::TestDeployment;
use crate::support::local_server::LocalServer;
use crate::support::model_file;

const CAPTURED_PREFILL: &str = include_str!("../../data/prefill/vllm-nixl.json");
const CHAT: &str = "/v1/chat/completions";

/// Request that a server received.
#[derive(Clone, Debug)]
struct ReceivedRequest {
    headers: HeaderMap,
    body: String,
}

/// Captured request and response.
#[derive(Clone, Debug)]
struct WireStep {
    name: String,
    request: Value,
    response: String,
}

/// Server that replaces an engine and returns captured responses, selected by request id.
struct ScriptedEngine {
    server: LocalServer,
    received: Arc<Mutex<Vec<ReceivedRequest>>>,
}

#[derive(Clone)]
struct WireScript {
    steps: Arc<[WireStep]>,
    received: Arc<Mutex<Vec<ReceivedRequest>>>,
    /// Number of requests that must arrive before the first response. Their responses are sent in
    /// reverse order.
    barrier: Option<Arc<Barrier>>,
}

impl ScriptedEngine {
    async fn start(steps: Vec<WireStep>, barrier: Option<usize>) -> Self {
        let received = Arc::<Mutex<Vec<ReceivedRequest>>>::default();
        let barrier = barrier.map(|count| Arc::new(Barrier::new(count)));
        let script = WireScript {
            steps: steps.into(),
            received: received.clone(),
            barrier,
        };
        let routes = Router::new().fallback(answer).with_state(script);
        Self {
            server: LocalServer::start(routes).await,
            received,
        }
    }

    /// Returns the requests received since the last call, ordered by request id.
    fn take(&self) -> Vec<ReceivedRequest> {
        let mut received = std::mem::take(&mut *self.received.lock());
        received.sort_by_key(|received| {
            received.headers["x-request-id"]
                .to_str()
                .unwrap()
                .to_owned()
        });
        received
    }
}

async fn answer(
    State(script): State<WireScript>,
    uri: Uri,
    headers: HeaderMap,
    body: String,
) -> Response {
    let name = headers
        .get("x-request-id")
        .map_or("", |name| name.to_str().unwrap())
        .to_owned();
    let at = script
        .steps
        .iter()
        .position(|step| step.name == name && uri.path() == CHAT);
    let Some(at) = at else {
        return StatusCode::NOT_FOUND.into_response();
    };
    script
        .received
        .lock()
        .push(ReceivedRequest { headers, body });
    if let Some(barrier) = &script.barrier {
        barrier.wait().await;
        let later = script.steps.len() - at - 1;
        tokio::time::sleep(Duration::from_millis(30 * later as u64)).await;
    }
    (
        [(header::CONTENT_TYPE, "application/json")],
        script.steps[at].response.clone(),
    )
        .into_response()
}

/// Returns the captured steps of an engine.
fn steps(at: [usize; 2]) -> Vec<WireStep> {
    let captured: Value = serde_json::from_str(CAPTURED_PREFILL).unwrap();
    let step = |at: usize| {
        let step = &captured["log"][at];
        let name = step["headers"]["X-Request-Id"].as_str().unwrap().to_owned();
        WireStep {
            name,
            request: step["request"].clone(),
            response: step["response"].to_string(),
        }
    };
    at.map(step).into()
}

/// Fields that are unknown to all engines, as a client may send them.
const UNKNOWN: &str =
    r#""some_engines_own": {"big":18446744073709551615, "f": 1.50, "nothing":null}"#;

fn unknown() -> Value {
    serde_json::from_str(&format!("{{{UNKNOWN}}}")).unwrap()
}

fn with(body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    merge_config(&mut body, more);
    body
}

/// Returns the request of the client: the captured decode request without KV transfer parameters,
/// and with unknown fields.
fn client_request(decode: &WireStep) -> String {
    let mut body = decode.request.clone();
    body.as_object_mut()
        .unwrap()
        .remove("kv_transfer_params")
        .unwrap();
    let text = body.to_string();
    format!("{},{UNKNOWN}}}", text.strip_suffix('}').unwrap())
}

struct WireLog {
    bed: RoutingBed,
    prefill: ScriptedEngine,
    decode: ScriptedEngine,
}

impl WireLog {
    async fn start(barrier: Option<usize>) -> Self {
        let prefill = ScriptedEngine::start(steps([0, 3]), barrier).await;
        let decode = ScriptedEngine::start(steps([1, 4]), None).await;
        let entry = |id: u64, role: &str, at: &ScriptedEngine| json!({"id": id, "role": role, "endpoint": at.server.address});
        let stack = TestDeployment::engines(&[]).await;
        stack
            .write_worker_entries(&json!([
                entry(1, "prefill", &prefill),
                entry(2, "decode", &decode)
            ]))
            .unwrap();
        let config = json!({
            "models": [
                {
                    "name": "tiny-qwen",
                    "tokenizer": model_file("tokenizer.json.gz"),
                    "tokenizer_config": model_file("tokenizer_config.json"),
                    "block_size": 32,
                    "prefill": {"mode": "call"},
                },
            ],
        });
        Self {
            bed: RoutingBed::serving(stack, "disaggregated-call", config, patient).await,
            prefill,
            decode,
        }
    }

    async fn ask(&self, name: &str, body: String) -> RoutedAnswer {
        let request = self
            .bed
            .http
            .post(self.bed.url(CHAT))
            .header("content-type", "application/json");
        RoutedAnswer::send(request.header("x-request-id", name).body(body)).await
    }
}

/// Asserts that both engines received the captured requests field by field, and the additional
/// fields of the client.
fn compare(received: (&ReceivedRequest, &ReceivedRequest), captured: (&WireStep, &WireStep)) {
    let read = |received: &ReceivedRequest| serde_json::from_str::<Value>(&received.body).unwrap();
    // In the capture, only the decode request has `return_token_ids`.
    let mut to_prefill = with(&captured.0.request, &unknown());
    to_prefill["return_token_ids"] = captured.1.request["return_token_ids"].clone();
    assert_eq!(read(received.0), to_prefill);
    assert_eq!(read(received.1), with(&captured.1.request, &unknown()));
    for (received, captured) in [(received.0, captured.0), (received.1, captured.1)] {
        assert!(
            received.body.contains(UNKNOWN),
            "unchanged from the client: {}",
            received.body
        );
        assert_eq!(received.headers["x-request-id"], captured.name);
        assert_eq!(
            received.headers["content-length"],
            received.body.len().to_string()
        );
    }
    let answer: Value = serde_json::from_str(&captured.0.response).unwrap();
    let handed_over = answer["kv_transfer_params"].to_string();
    assert!(
        received.1.body.contains(&handed_over),
        "unchanged from the prefill engine: {}",
        received.1.body
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn both_engines_receive_the_captured_requests() {
    let wire = WireLog::start(None).await;
    for (to_prefill, to_decode) in steps([0, 3]).iter().zip(&steps([1, 4])) {
        let answer = wire.ask(&to_decode.name, client_request(to_decode)).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.text),
            (200, &to_decode.response)
        );
        assert_eq!(
            (answer.chosen(), answer.header("x-prefill-instance-id")),
            (2, "1")
        );
        let prefill = wire.prefill.take();
        let decode = wire.decode.take();
        assert_eq!(
            (prefill.len(), decode.len()),
            (1, 1),
            "one request per engine"
        );
        compare((&prefill[0], &decode[0]), (to_prefill, to_decode));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn concurrent_requests_receive_their_own_handoff() {
    let wire = WireLog::start(Some(2)).await;
    let to_prefill = steps([0, 3]);
    let to_decode = steps([1, 4]);
    for _ in 0..10 {
        let ask = |at: usize| wire.ask(&to_decode[at].name, client_request(&to_decode[at]));
        let (first, second) = tokio::join!(ask(0), ask(1));
        assert_eq!(
            [&first.text, &second.text],
            [&to_decode[0].response, &to_decode[1].response]
        );
        let prefill = wire.prefill.take();
        let decode = wire.decode.take();
        assert_eq!((prefill.len(), decode.len()), (2, 2));
        for at in 0..2 {
            compare(
                (&prefill[at], &decode[at]),
                (&to_prefill[at], &to_decode[at]),
            );
        }
    }
}
