//! What two engines and a client said to one another in scenario p01, over sockets: the captured answers come from two
//! listeners in the engines' places, and what these hear through Envoy and warmroute is compared with what the engines heard.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::Barrier;
use tokio::task::JoinHandle;

use crate::bed::{Answer, patient, programs};
use crate::support::stack::{Stack, model_file};

const P01: &str = include_str!("../data/prefill/p01-nixl-pd.json");
const CHAT: &str = "/v1/chat/completions";

/// One request as a listener heard it.
#[derive(Clone, Debug)]
struct Heard {
    headers: HeaderMap,
    body: String,
}

/// A request and its answer as they were captured.
#[derive(Clone, Debug)]
struct Step {
    name: String,
    request: Value,
    response: String,
}

/// A listener in an engine's place, which gives captured answers by the requests' names.
struct Scripted {
    address: SocketAddr,
    heard: Arc<Mutex<Vec<Heard>>>,
    task: JoinHandle<()>,
}

#[derive(Clone)]
struct Script {
    steps: Arc<[Step]>,
    heard: Arc<Mutex<Vec<Heard>>>,
    /// So many requests have to be there before one is answered, and the first named is answered last.
    together: Option<Arc<Barrier>>,
}

impl Scripted {
    async fn start(steps: Vec<Step>, together: Option<usize>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, heard) = (
            listener.local_addr().unwrap(),
            Arc::<Mutex<Vec<Heard>>>::default(),
        );
        let together = together.map(|count| Arc::new(Barrier::new(count)));
        let script = Script {
            steps: steps.into(),
            heard: heard.clone(),
            together,
        };
        let router = Router::new().fallback(answer).with_state(script);
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self {
            address,
            heard,
            task,
        }
    }

    /// What it has heard since the last time, in the order of the names.
    fn take(&self) -> Vec<Heard> {
        let mut heard = std::mem::take(&mut *self.heard.lock());
        heard.sort_by_key(|heard| heard.headers["x-request-id"].to_str().unwrap().to_owned());
        heard
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(
    State(script): State<Script>,
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
    script.heard.lock().push(Heard { headers, body });
    if let Some(together) = &script.together {
        together.wait().await;
        let later = script.steps.len() - at - 1;
        tokio::time::sleep(Duration::from_millis(30 * later as u64)).await;
    }
    (
        [(header::CONTENT_TYPE, "application/json")],
        script.steps[at].response.clone(),
    )
        .into_response()
}

/// The captured steps of an engine.
fn steps(at: [usize; 2]) -> Vec<Step> {
    let captured: Value = serde_json::from_str(P01).unwrap();
    let step = |at: usize| {
        let step = &captured["log"][at];
        let name = step["headers"]["X-Request-Id"].as_str().unwrap().to_owned();
        Step {
            name,
            request: step["request"].clone(),
            response: step["response"].to_string(),
        }
    };
    at.map(step).into()
}

/// What no engine knows, as a client may write it.
const UNKNOWN: &str =
    r#""some_engines_own": {"big":18446744073709551615, "f": 1.50, "nothing":null}"#;

fn unknown() -> Value {
    serde_json::from_str(&format!("{{{UNKNOWN}}}")).unwrap()
}

fn with(body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

/// The client's request of which the capture was made: that of the decode worker without what was handed over; and a field
/// of its own.
fn of_client(decode: &Step) -> String {
    let mut body = decode.request.clone();
    body.as_object_mut()
        .unwrap()
        .remove("kv_transfer_params")
        .unwrap();
    let text = body.to_string();
    format!("{},{UNKNOWN}}}", text.strip_suffix('}').unwrap())
}

struct Wire {
    stack: Stack,
    http: reqwest::Client,
    prefill: Scripted,
    decode: Scripted,
    _dir: TempDir,
}

impl Wire {
    async fn start(together: Option<usize>) -> Self {
        let prefill = Scripted::start(steps([0, 3]), together).await;
        let decode = Scripted::start(steps([1, 4]), None).await;
        let dir = tempfile::Builder::new()
            .prefix("warmroute-wire-")
            .tempdir()
            .unwrap();
        let mut stack = Stack::engines(&programs(), &[], dir.path()).await.unwrap();
        let entry = |id: u64, role: &str, at: &Scripted| json!({"id": id, "role": role, "endpoint": at.address});
        stack
            .write_worker_entries(&json!([
                entry(1, "prefill", &prefill),
                entry(2, "decode", &decode)
            ]))
            .unwrap();
        let config = json!({"response": {"worker_header": true}, "models": [{
            "name": "tiny-qwen",
            "tokenizer": model_file("tokenizer.json.gz"),
            "tokenizer_config": model_file("tokenizer_config.json"),
            "block_size": 32,
            "prefill": {"by": "call"},
        }]});
        stack.start_router(&config).await.unwrap();
        let shipped = stack
            .standalone()
            .config_of("disaggregated-call", &[])
            .unwrap();
        stack.start_envoy(&patient(&shipped)).await.unwrap();
        Self {
            stack,
            http: warmroute::tls::client().build().unwrap(),
            prefill,
            decode,
            _dir: dir,
        }
    }

    async fn ask(&self, name: &str, body: String) -> Answer {
        let request = self
            .http
            .post(self.stack.url(CHAT))
            .header("content-type", "application/json");
        Answer::of(request.header("x-request-id", name).body(body)).await
    }
}

/// Insists that both engines heard what they had heard when it was captured, field by field, and what the client said
/// beyond that.
fn compare(heard: (&Heard, &Heard), captured: (&Step, &Step)) {
    let read = |heard: &Heard| serde_json::from_str::<Value>(&heard.body).unwrap();
    // When it was captured, only the decode worker was asked for the ids of tokens.
    let mut to_prefill = with(&captured.0.request, &unknown());
    to_prefill["return_token_ids"] = captured.1.request["return_token_ids"].clone();
    assert_eq!(read(heard.0), to_prefill);
    assert_eq!(read(heard.1), with(&captured.1.request, &unknown()));
    for (heard, captured) in [(heard.0, captured.0), (heard.1, captured.1)] {
        assert!(
            heard.body.contains(UNKNOWN),
            "byte for byte as the client wrote it: {}",
            heard.body
        );
        assert_eq!(heard.headers["x-request-id"], captured.name);
        assert_eq!(
            heard.headers["content-length"],
            heard.body.len().to_string()
        );
    }
    let answer: Value = serde_json::from_str(&captured.0.response).unwrap();
    let handed_over = answer["kv_transfer_params"].to_string();
    assert!(
        heard.1.body.contains(&handed_over),
        "byte for byte as the engine wrote it: {}",
        heard.1.body
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_engines_hear_what_they_heard_when_it_was_captured() {
    let wire = Wire::start(None).await;
    for (to_prefill, to_decode) in steps([0, 3]).iter().zip(&steps([1, 4])) {
        let answer = wire.ask(&to_decode.name, of_client(to_decode)).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.text),
            (200, &to_decode.response)
        );
        assert_eq!(
            (answer.chosen(), answer.header("x-prefill-instance-id")),
            (2, "1")
        );
        let (prefill, decode) = (wire.prefill.take(), wire.decode.take());
        assert_eq!((prefill.len(), decode.len()), (1, 1), "each of them once");
        compare((&prefill[0], &decode[0]), (to_prefill, to_decode));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_requests_at_once_each_is_handed_its_own_whoever_is_answered_first() {
    let wire = Wire::start(Some(2)).await;
    let (to_prefill, to_decode) = (steps([0, 3]), steps([1, 4]));
    for _ in 0..10 {
        let ask = |at: usize| wire.ask(&to_decode[at].name, of_client(&to_decode[at]));
        let (first, second) = tokio::join!(ask(0), ask(1));
        assert_eq!(
            [&first.text, &second.text],
            [&to_decode[0].response, &to_decode[1].response]
        );
        let (prefill, decode) = (wire.prefill.take(), wire.decode.take());
        assert_eq!((prefill.len(), decode.len()), (2, 2));
        for at in 0..2 {
            compare(
                (&prefill[at], &decode[at]),
                (&to_prefill[at], &to_decode[at]),
            );
        }
    }
}
