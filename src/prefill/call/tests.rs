use std::net::SocketAddr;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::routing::post;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::*;
use crate::engine_client::config::Scheme;
use crate::settings::Period;

/// What a held thing tells when it is let go.
struct Held(Option<oneshot::Sender<()>>);

impl Drop for Held {
    fn drop(&mut self) {
        _ = self.0.take().map(|gone| gone.send(()));
    }
}

fn held() -> (Held, oneshot::Receiver<()>) {
    let (gone, let_go) = oneshot::channel();
    (Held(Some(gone)), let_go)
}

/// A prefill worker that answers as it is told to, one question after the other.
struct Worker {
    address: SocketAddr,
    asked: mpsc::UnboundedReceiver<Question>,
}

/// What a worker was asked, and where to say what it answers.
type Question = (String, HeaderMap, Bytes, oneshot::Sender<(u16, &'static str)>);

type Told = mpsc::UnboundedSender<Question>;

impl Worker {
    async fn start() -> Self {
        let (tell, asked) = mpsc::unbounded_channel();
        let answer = async |State(tell): State<Told>, request: Request| {
            let (head, body) = request.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let (reply, said) = oneshot::channel();
            tell.send((head.uri.to_string(), head.headers, body, reply)).unwrap();
            let (status, text) = said.await.unwrap();
            (StatusCode::from_u16(status).unwrap(), text)
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/v1/{*path}", post(answer)).with_state(tell);
        tokio::spawn(async { axum::serve(listener, router).await });
        Self { address, asked }
    }
}

fn asked(worker: SocketAddr) -> Asked {
    let headers = HeaderMap::from_iter([("x-request-id".parse().unwrap(), "req-1".parse().unwrap())]);
    Asked {
        worker: Endpoint(worker),
        path: "/v1/completions?a=b".to_owned(),
        headers,
        question: super::Question::alone("{\"x\":1}".into()),
    }
}

fn caller(scheme: Scheme, deadline: Duration) -> (Caller, Arc<Metrics>) {
    let metrics = Arc::new(Metrics::default());
    let engines = EnginesConfig { scheme, deadline: Period(deadline), ..EnginesConfig::default() };
    (Caller::new(engines, deadline, metrics.clone()).unwrap(), metrics)
}

fn counted(metrics: &Metrics, outcome: &'static str) -> u64 {
    metrics.prefill_calls.get_or_create(&OutcomeLabel { outcome }).get()
}

const LONG: Duration = Duration::from_secs(60);

async fn until(mut holds: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(LONG, async {
        while !holds() {
            tokio::task::yield_now().await;
        }
    });
    waited.await.expect("it never came to hold");
}

#[tokio::test]
async fn a_prefill_is_asked_for_as_the_client_asked_and_what_is_held_comes_back_with_the_answer() {
    let mut worker = Worker::start().await;
    let (caller, metrics) = caller(Scheme::Http, LONG);
    let question = asked(worker.address);
    let call = tokio::spawn(async move { caller.prefill(question, 7, |_, _, _| {}).await });
    let (path, headers, body, reply) = worker.asked.recv().await.unwrap();
    assert_eq!((path.as_str(), &body[..]), ("/v1/completions?a=b", &b"{\"x\":1}"[..]));
    assert_eq!(
        (&headers["x-request-id"], &headers["content-type"]),
        (&"req-1".parse().unwrap(), &"application/json".parse().unwrap())
    );
    assert_eq!(headers["content-length"], "7", "not in chunks");
    reply.send((200, "{}")).unwrap();
    let (held, answer) = call.await.unwrap();
    assert_eq!((held, answer.unwrap().bytes()), (7, &b"{}"[..]));
    assert_eq!(counted(&metrics, "done"), 1);
}

#[tokio::test]
async fn failures_are_told_apart() {
    let mut worker = Worker::start().await;
    let (caller, _) = caller(Scheme::Http, LONG);
    for (status, label) in
        [(503, "busy"), (429, "busy"), (400, "refused"), (404, "not_offered"), (401, "not_offered"), (500, "failed")]
    {
        let answers = async {
            let (.., reply) = worker.asked.recv().await.unwrap();
            reply.send((status, "no")).unwrap();
        };
        let ((_, answer), ()) = tokio::join!(caller.prefill(asked(worker.address), (), |(), _, _| {}), answers);
        assert_eq!(answer.unwrap_err().label(), label, "{status}");
    }
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert_eq!(caller.prefill(asked(gone), (), |(), _, _| {}).await.1.unwrap_err().label(), "failed");
    let (hasty, metrics) = self::caller(Scheme::Http, Duration::from_millis(50));
    assert_eq!(hasty.prefill(asked(worker.address), (), |(), _, _| {}).await.1.unwrap_err().label(), "timeout");
    assert_eq!(counted(&metrics, "timeout"), 1);
}

#[tokio::test]
async fn a_client_that_leaves_before_anything_was_sent_takes_its_question_back() {
    // A connection that never gets as far as a request: the other side does not speak TLS, nor anything else.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (caller, metrics) = caller(Scheme::Https, LONG);
    let (held, let_go) = held();
    let question = asked(silent.local_addr().unwrap());
    let call = tokio::spawn(async move { caller.prefill(question, held, |_, _, _| {}).await });
    let _connection = silent.accept().await.unwrap();
    call.abort();
    tokio::time::timeout(LONG, let_go).await.expect("it is let go").unwrap();
    until(|| counted(&metrics, "left_before_start") == 1).await;
    assert_eq!(counted(&metrics, "left_after_start"), 0);
}

#[tokio::test]
async fn a_prefill_that_has_begun_runs_to_its_end_and_holds_what_it_holds_so_long() {
    let mut worker = Worker::start().await;
    let (caller, metrics) = caller(Scheme::Http, LONG);
    let (held, mut let_go) = held();
    let question = asked(worker.address);
    let call = tokio::spawn(async move { caller.prefill(question, held, |_, _, _| {}).await });
    let (.., mut reply) = worker.asked.recv().await.unwrap();
    call.abort();
    until(|| counted(&metrics, "left_after_start") == 1).await;
    assert!(let_go.try_recv().is_err(), "the engine still works on it");
    assert!(!reply.is_closed(), "and nobody cut it off");
    let closed = tokio::time::timeout(Duration::from_millis(100), reply.closed()).await;
    assert!(closed.is_err());
    reply.send((200, "{}")).unwrap();
    tokio::time::timeout(LONG, let_go).await.expect("it is let go").unwrap();
    assert_eq!(counted(&metrics, "done"), 1);
}

#[test]
fn a_question_is_sent_or_taken_back_and_never_both() {
    let (sent, taken_back) = (Sending::default(), Sending::default());
    assert!(sent.begin() && sent.begin() && !sent.take_back());
    assert!(taken_back.take_back() && !taken_back.begin());
}
