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
type Question = (
    String,
    HeaderMap,
    Bytes,
    oneshot::Sender<(u16, &'static str)>,
);

type Told = mpsc::UnboundedSender<Question>;

impl Worker {
    async fn start() -> Self {
        let (tell, asked) = mpsc::unbounded_channel();
        let answer = async |State(tell): State<Told>, request: Request| {
            let (head, body) = request.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let (reply, said) = oneshot::channel();
            tell.send((head.uri.to_string(), head.headers, body, reply))
                .unwrap();
            let (status, text) = said.await.unwrap();
            (StatusCode::from_u16(status).unwrap(), text)
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/v1/{*path}", post(answer))
            .with_state(tell);
        tokio::spawn(async { axum::serve(listener, router).await });
        Self { address, asked }
    }
}

fn asked(worker: SocketAddr) -> Asked {
    let headers =
        HeaderMap::from_iter([("x-request-id".parse().unwrap(), "req-1".parse().unwrap())]);
    Asked {
        worker: Endpoint(worker),
        path: "/v1/completions?a=b".to_owned(),
        headers,
        question: super::Question::alone("{\"x\":1}".into()),
    }
}

fn caller(scheme: Scheme, deadline: Duration) -> (Caller, Arc<Metrics>) {
    let metrics = Arc::new(Metrics::default());
    let engines = EnginesConfig {
        scheme,
        deadline: Period(deadline),
        ..EnginesConfig::default()
    };
    (
        Caller::new(engines, deadline, metrics.clone()).unwrap(),
        metrics,
    )
}

fn counted(metrics: &Metrics, outcome: &'static str) -> u64 {
    metrics
        .prefill_calls
        .get_or_create(&OutcomeLabel { outcome })
        .get()
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
    assert_eq!(
        (path.as_str(), &body[..]),
        ("/v1/completions?a=b", &b"{\"x\":1}"[..])
    );
    assert_eq!(
        (&headers["x-request-id"], &headers["content-type"]),
        (
            &"req-1".parse().unwrap(),
            &"application/json".parse().unwrap()
        )
    );
    assert_eq!(headers["content-length"], "7", "not in chunks");
    reply.send((200, "{}")).unwrap();
    let (held, answer) = call.await.unwrap();
    assert_eq!((held, answer.unwrap().body()), (7, &b"{}"[..]));
    assert_eq!(counted(&metrics, "done"), 1);
}

#[tokio::test]
async fn failures_are_told_apart() {
    let mut worker = Worker::start().await;
    let (caller, _) = caller(Scheme::Http, LONG);
    for (status, label) in [
        (503, "busy"),
        (429, "busy"),
        (400, "refused"),
        (404, "not_offered"),
        (401, "not_offered"),
        (500, "failed"),
    ] {
        let answers = async {
            let (.., reply) = worker.asked.recv().await.unwrap();
            reply.send((status, "no")).unwrap();
        };
        let ((_, answer), ()) = tokio::join!(
            caller.prefill(asked(worker.address), (), |(), _, _| {}),
            answers
        );
        assert_eq!(answer.unwrap_err().label(), label, "{status}");
    }
    let gone = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    assert_eq!(
        caller
            .prefill(asked(gone), (), |(), _, _| {})
            .await
            .1
            .unwrap_err()
            .label(),
        "failed"
    );
    let (hasty, metrics) = self::caller(Scheme::Http, Duration::from_millis(50));
    assert_eq!(
        hasty
            .prefill(asked(worker.address), (), |(), _, _| {})
            .await
            .1
            .unwrap_err()
            .label(),
        "timeout"
    );
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
    tokio::time::timeout(LONG, let_go)
        .await
        .expect("it is let go")
        .unwrap();
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
    tokio::time::timeout(LONG, let_go)
        .await
        .expect("it is let go")
        .unwrap();
    assert_eq!(counted(&metrics, "done"), 1);
}

#[test]
fn a_question_is_sent_or_taken_back_and_never_both() {
    let (sent, taken_back) = (Sending::default(), Sending::default());
    assert!(sent.begin() && sent.begin() && !sent.take_back());
    assert!(taken_back.take_back() && !taken_back.begin());
}

#[tokio::test]
async fn calls_under_way_are_seen_even_when_their_client_has_left_and_how_long_they_took() {
    let mut worker = Worker::start().await;
    let (caller, metrics) = caller(Scheme::Http, LONG);
    let under_way = TaskTracker::new();
    let caller = caller.tracked(under_way.clone());
    under_way.close();
    for leaves in [true, false] {
        let (caller, question) = (caller.clone(), asked(worker.address));
        let call = tokio::spawn(async move { caller.prefill(question, (), |(), _, _| {}).await });
        let (.., reply) = worker.asked.recv().await.unwrap();
        if leaves {
            call.abort();
            until(|| counted(&metrics, "left_after_start") == 1).await;
        }
        assert_eq!((under_way.len(), metrics.prefills_under_way.get()), (1, 1));
        reply.send((200, "{}")).unwrap();
        tokio::time::timeout(LONG, under_way.wait())
            .await
            .expect("it ends");
        assert_eq!(metrics.prefills_under_way.get(), 0);
    }
    let begun = caller.begin(asked(worker.address), |_| {}).await.unwrap();
    let (.., reply) = worker.asked.recv().await.unwrap();
    assert_eq!((under_way.len(), metrics.prefills_under_way.get()), (1, 1));
    reply.send((500, "")).unwrap();
    tokio::time::timeout(LONG, under_way.wait())
        .await
        .expect("it ends");
    begun.over();
    let page = metrics
        .page(crate::metrics::TextFormat::OpenMetrics, |_| {})
        .unwrap();
    for (outcome, count) in [("done", 2), ("failed", 1)] {
        let line =
            format!("warmroute_prefill_call_seconds_count{{outcome=\"{outcome}\"}} {count}\n");
        assert!(page.contains(&line), "{line}{page}");
    }
}

#[test]
fn whoever_waits_when_the_process_ends_does_not_panic() {
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap()
    };
    let (there, here) = (runtime(), runtime());
    let mut worker = there.block_on(Worker::start());
    let (caller, metrics) = caller(Scheme::Http, LONG);
    let question = asked(worker.address);
    let mut call = Box::pin(async move { caller.prefill(question, (), |(), _, _| {}).await });
    let _question = here.block_on(async {
        tokio::select! {
            _ = &mut call => panic!("nobody has answered"),
            question = worker.asked.recv() => question.unwrap(),
        }
    });
    here.shutdown_timeout(LONG);
    assert_eq!(metrics.prefills_under_way.get(), 0);
    let waited =
        there.block_on(async { tokio::time::timeout(Duration::from_millis(50), call).await });
    assert!(waited.is_err(), "there is nothing to be told");
}

#[tokio::test]
async fn another_configuration_goes_on_with_the_connections_and_the_limit_of_the_one_before() {
    let mut worker = Worker::start().await;
    let metrics = Arc::new(Metrics::default());
    let engines = EnginesConfig {
        in_flight: 1,
        ..EnginesConfig::default()
    };
    let before = Caller::new(engines.clone(), LONG, metrics).unwrap();
    let after = before.renewed(engines.clone(), LONG * 2).unwrap();
    assert_eq!(after.deadline(), LONG * 2);
    let (caller, question) = (before.clone(), asked(worker.address));
    let call = tokio::spawn(async move { caller.prefill(question, (), |(), _, _| {}).await });
    let (.., reply) = worker.asked.recv().await.unwrap();
    assert_eq!(
        after
            .prefill(asked(worker.address), (), |(), _, _| {})
            .await
            .1
            .unwrap_err()
            .label(),
        "full"
    );
    let other = before
        .renewed(
            EnginesConfig {
                in_flight: 2,
                ..engines
            },
            LONG,
        )
        .unwrap();
    let question = asked(worker.address);
    let second = tokio::spawn(async move { other.begin(question, |_| {}).await });
    let (.., other_reply) = worker.asked.recv().await.unwrap();
    other_reply.send((200, "{}")).unwrap();
    second.await.unwrap().unwrap().over();
    reply.send((200, "{}")).unwrap();
    call.await.unwrap().1.unwrap();
}

/// Answers the first question of its first connection, and hangs up with the second; then answers all. Tells each question.
async fn closing() -> (SocketAddr, mpsc::UnboundedReceiver<()>) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (tell, asked) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        for answers in [1, usize::MAX] {
            let (mut socket, _) = listener.accept().await.unwrap();
            for _ in 0..answers {
                let mut read = Vec::new();
                while !read.ends_with(b"{\"x\":1}") && socket.read_buf(&mut read).await.unwrap() > 0
                {
                }
                tell.send(()).unwrap();
                socket
                    .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                    .await
                    .unwrap();
            }
            let mut read = Vec::new();
            while !read.ends_with(b"{\"x\":1}") && socket.read_buf(&mut read).await.unwrap() > 0 {}
            tell.send(()).unwrap();
        }
    });
    (address, asked)
}

#[tokio::test]
async fn a_healthy_worker_whose_connection_was_just_being_closed_is_asked_again_but_no_room_is_entered_twice()
 {
    let (caller, metrics) = caller(Scheme::Http, LONG);
    let once = caller.clone();
    let caller = caller.repeating(true);
    let (worker, mut questions) = closing().await;
    for _ in 0..2 {
        caller
            .prefill(asked(worker), (), |(), _, _| {})
            .await
            .1
            .unwrap();
    }
    for _ in 0..3 {
        questions.recv().await.unwrap();
    }
    assert_eq!(
        (counted(&metrics, "done"), counted(&metrics, "failed")),
        (2, 0)
    );
    let (worker, mut questions) = closing().await;
    caller
        .prefill(asked(worker), (), |(), _, _| {})
        .await
        .1
        .unwrap();
    let mut begun = caller.begin(asked(worker), |_| {}).await.unwrap();
    let failed = tokio::time::timeout(LONG, begun.ended())
        .await
        .expect("it ends")
        .unwrap_err();
    assert_eq!(failed.label(), "failed");
    for _ in 0..2 {
        questions.recv().await.unwrap();
    }
    assert!(questions.try_recv().is_err());
    // Nor is anything asked twice of engines that take the name of a request for the request.
    let (worker, mut questions) = closing().await;
    once.prefill(asked(worker), (), |(), _, _| {})
        .await
        .1
        .unwrap();
    assert_eq!(
        once.prefill(asked(worker), (), |(), _, _| {})
            .await
            .1
            .unwrap_err()
            .label(),
        "failed"
    );
    for _ in 0..2 {
        questions.recv().await.unwrap();
    }
    assert!(questions.try_recv().is_err());
}
