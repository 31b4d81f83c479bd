use std::net::SocketAddr;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::routing::post;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use warmroute_engines::engine_client::config::EngineScheme;
use warmroute_metrics::OutcomeLabel;
use warmroute_settings::DurationSetting;

use super::*;

/// A resource that notifies when it is dropped.
struct DropNotifier(Option<oneshot::Sender<()>>);

impl Drop for DropNotifier {
    fn drop(&mut self) {
        _ = self.0.take().map(|dropped_tx| dropped_tx.send(()));
    }
}

fn drop_notifier() -> (DropNotifier, oneshot::Receiver<()>) {
    let (dropped_tx, dropped_rx) = oneshot::channel();
    (DropNotifier(Some(dropped_tx)), dropped_rx)
}

/// A prefill worker whose responses the test sends, one call after the other.
struct TestWorker {
    address: SocketAddr,
    calls_rx: mpsc::UnboundedReceiver<ReceivedCall>,
}

/// A received call, and the channel for its response.
type ReceivedCall = (
    String,
    HeaderMap,
    Bytes,
    oneshot::Sender<(u16, &'static str)>,
);

type CallSender = mpsc::UnboundedSender<ReceivedCall>;

impl TestWorker {
    async fn start() -> Self {
        let (calls_tx, calls_rx) = mpsc::unbounded_channel();
        let answer = async |State(calls_tx): State<CallSender>, request: Request| {
            let (head, body) = request.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let (response_tx, response_rx) = oneshot::channel();
            calls_tx
                .send((head.uri.to_string(), head.headers, body, response_tx))
                .unwrap();
            let (status, text) = response_rx.await.unwrap();
            (StatusCode::from_u16(status).unwrap(), text)
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/v1/{*path}", post(answer))
            .with_state(calls_tx);
        tokio::spawn(async { axum::serve(listener, router).await });
        Self { address, calls_rx }
    }
}

fn call_to(worker: SocketAddr) -> PrefillCall {
    let headers =
        HeaderMap::from_iter([("x-request-id".parse().unwrap(), "req-1".parse().unwrap())]);
    PrefillCall {
        worker: WorkerEndpoint(worker),
        path: "/v1/completions?a=b".to_owned(),
        headers,
        body: super::PrefillBody::without_handoff("{\"x\":1}".into()),
    }
}

fn new_client(scheme: EngineScheme, deadline: Duration) -> (PrefillClient, Arc<Metrics>) {
    let metrics = Arc::new(Metrics::default());
    let engines = EnginesConfig {
        scheme,
        timeout: DurationSetting(deadline),
        ..EnginesConfig::default()
    };
    (
        PrefillClient::new(engines, deadline, metrics.clone()).unwrap(),
        metrics,
    )
}

fn count_calls(metrics: &Metrics, outcome: &'static str) -> u64 {
    metrics
        .prefill
        .calls
        .get_or_create(&OutcomeLabel { outcome })
        .get()
}

const LONG: Duration = Duration::from_secs(60);

async fn wait_until(mut condition: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(LONG, async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    });
    waited.await.expect("condition not met");
}

#[tokio::test]
async fn prefill_forwards_request_and_returns_held_resources() {
    let mut worker = TestWorker::start().await;
    let (client, metrics) = new_client(EngineScheme::Http, LONG);
    let call_request = call_to(worker.address);
    let call = tokio::spawn(async move { client.run(call_request, 7, |_, _, _| {}).await });
    let (path, headers, body, reply) = worker.calls_rx.recv().await.unwrap();
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
    assert_eq!(headers["content-length"], "7", "the body has a length");
    reply.send((200, "{}")).unwrap();
    let (resource, response) = call.await.unwrap();
    assert_eq!((resource, response.unwrap().body()), (7, &b"{}"[..]));
    assert_eq!(count_calls(&metrics, "completed"), 1);
}

#[tokio::test]
async fn failures_have_distinct_outcomes() {
    let mut worker = TestWorker::start().await;
    let (client, _) = new_client(EngineScheme::Http, LONG);
    for (status, label) in [
        (503, "busy"),
        (429, "busy"),
        (400, "rejected"),
        (404, "not_offered"),
        (401, "not_offered"),
        (500, "failed"),
    ] {
        let answers = async {
            let (.., reply) = worker.calls_rx.recv().await.unwrap();
            reply.send((status, "no")).unwrap();
        };
        let ((_, answer), ()) = tokio::join!(
            client.run(call_to(worker.address), (), |(), _, _| {}),
            answers
        );
        assert_eq!(answer.unwrap_err().label(), label, "{status}");
    }
    let closed_address = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    assert_eq!(
        client
            .run(call_to(closed_address), (), |(), _, _| {})
            .await
            .1
            .unwrap_err()
            .label(),
        "failed"
    );
    let (short_deadline, metrics) = new_client(EngineScheme::Http, Duration::from_millis(50));
    assert_eq!(
        short_deadline
            .run(call_to(worker.address), (), |(), _, _| {})
            .await
            .1
            .unwrap_err()
            .label(),
        "timeout"
    );
    assert_eq!(count_calls(&metrics, "timeout"), 1);
}

#[tokio::test]
async fn call_is_cancelled_before_first_byte() {
    // The handshake of this connection never completes, because the peer never responds.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (client, metrics) = new_client(EngineScheme::Https, LONG);
    let (resource, dropped_rx) = drop_notifier();
    let call_request = call_to(silent.local_addr().unwrap());
    let call = tokio::spawn(async move { client.run(call_request, resource, |_, _, _| {}).await });
    let _connection = silent.accept().await.unwrap();
    call.abort();
    tokio::time::timeout(LONG, dropped_rx)
        .await
        .expect("the resource is dropped")
        .unwrap();
    wait_until(|| count_calls(&metrics, "cancelled_before_start") == 1).await;
    assert_eq!(count_calls(&metrics, "cancelled_after_start"), 0);
}

#[tokio::test]
async fn started_prefill_completes_and_holds_resources() {
    let mut worker = TestWorker::start().await;
    let (client, metrics) = new_client(EngineScheme::Http, LONG);
    let (resource, mut dropped_rx) = drop_notifier();
    let call_request = call_to(worker.address);
    let call = tokio::spawn(async move { client.run(call_request, resource, |_, _, _| {}).await });
    let (.., mut reply) = worker.calls_rx.recv().await.unwrap();
    call.abort();
    wait_until(|| count_calls(&metrics, "cancelled_after_start") == 1).await;
    assert!(dropped_rx.try_recv().is_err(), "the prefill still runs");
    assert!(!reply.is_closed(), "the call is still open");
    let closed = tokio::time::timeout(Duration::from_millis(100), reply.closed()).await;
    assert!(closed.is_err());
    reply.send((200, "{}")).unwrap();
    tokio::time::timeout(LONG, dropped_rx)
        .await
        .expect("the resource is dropped")
        .unwrap();
    assert_eq!(count_calls(&metrics, "completed"), 1);
}

#[test]
fn call_is_either_sent_or_cancelled() {
    let sent = SendState::default();
    let cancelled = SendState::default();
    assert!(sent.start() && sent.start() && !sent.cancel());
    assert!(cancelled.cancel() && !cancelled.start());
}

#[tokio::test]
async fn running_calls_are_counted_after_client_disconnects() {
    let mut worker = TestWorker::start().await;
    let (client, metrics) = new_client(EngineScheme::Http, LONG);
    let tasks = TaskTracker::new();
    let client = client.with_tracker(tasks.clone());
    tasks.close();
    for is_cancelled in [true, false] {
        let client = client.clone();
        let call_request = call_to(worker.address);
        let call = tokio::spawn(async move { client.run(call_request, (), |(), _, _| {}).await });
        let (.., reply) = worker.calls_rx.recv().await.unwrap();
        if is_cancelled {
            call.abort();
            wait_until(|| count_calls(&metrics, "cancelled_after_start") == 1).await;
        }
        assert_eq!((tasks.len(), metrics.prefill.calls_in_flight.get()), (1, 1));
        reply.send((200, "{}")).unwrap();
        tokio::time::timeout(LONG, tasks.wait())
            .await
            .expect("the call ends");
        assert_eq!(metrics.prefill.calls_in_flight.get(), 0);
    }
    let running = client.start(call_to(worker.address), |_| {}).await.unwrap();
    let (.., reply) = worker.calls_rx.recv().await.unwrap();
    assert_eq!((tasks.len(), metrics.prefill.calls_in_flight.get()), (1, 1));
    reply.send((500, "")).unwrap();
    tokio::time::timeout(LONG, tasks.wait())
        .await
        .expect("the call ends");
    running.detach();
    let page = metrics
        .render(warmroute_metrics::TextFormat::OpenMetrics, |_| {})
        .unwrap();
    for (outcome, count) in [("completed", 2), ("failed", 1)] {
        let line = format!(
            "warmroute_prefill_call_duration_seconds_count{{outcome=\"{outcome}\"}} {count}\n"
        );
        assert!(page.contains(&line), "{line}{page}");
    }
}

#[test]
fn waiting_call_does_not_panic_at_shutdown() {
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap()
    };
    let worker_runtime = runtime();
    let client_runtime = runtime();
    let mut worker = worker_runtime.block_on(TestWorker::start());
    let (client, metrics) = new_client(EngineScheme::Http, LONG);
    let call_request = call_to(worker.address);
    let mut call = Box::pin(async move { client.run(call_request, (), |(), _, _| {}).await });
    let _call_request = client_runtime.block_on(async {
        tokio::select! {
            _ = &mut call => panic!("the call has no response"),
            call_request = worker.calls_rx.recv() => call_request.unwrap(),
        }
    });
    client_runtime.shutdown_timeout(LONG);
    assert_eq!(metrics.prefill.calls_in_flight.get(), 0);
    let waited = worker_runtime
        .block_on(async { tokio::time::timeout(Duration::from_millis(50), call).await });
    assert!(waited.is_err(), "the call never completes");
}

#[tokio::test]
async fn reconfigured_client_keeps_connections_and_limit() {
    let mut worker = TestWorker::start().await;
    let metrics = Arc::new(Metrics::default());
    let engines = EnginesConfig {
        max_concurrency: 1,
        ..EnginesConfig::default()
    };
    let before = PrefillClient::new(engines.clone(), LONG, metrics).unwrap();
    let after = before.reconfigure(engines.clone(), LONG * 2).unwrap();
    assert_eq!(after.deadline(), LONG * 2);
    let client = before.clone();
    let call_request = call_to(worker.address);
    let call = tokio::spawn(async move { client.run(call_request, (), |(), _, _| {}).await });
    let (.., reply) = worker.calls_rx.recv().await.unwrap();
    assert_eq!(
        after
            .run(call_to(worker.address), (), |(), _, _| {})
            .await
            .1
            .unwrap_err()
            .label(),
        "concurrency_limit"
    );
    let other = before
        .reconfigure(
            EnginesConfig {
                max_concurrency: 2,
                ..engines
            },
            LONG,
        )
        .unwrap();
    let call_request = call_to(worker.address);
    let second = tokio::spawn(async move { other.start(call_request, |_| {}).await });
    let (.., other_reply) = worker.calls_rx.recv().await.unwrap();
    other_reply.send((200, "{}")).unwrap();
    second.await.unwrap().unwrap().detach();
    reply.send((200, "{}")).unwrap();
    call.await.unwrap().1.unwrap();
}

/// Starts a worker that responds to the first request of its first connection, closes the
/// connection at the second request, and responds to all later requests. Reports each request.
async fn worker_that_closes_connection() -> (SocketAddr, mpsc::UnboundedReceiver<()>) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (requests_tx, requests_rx) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        for answers in [1, usize::MAX] {
            let (mut socket, _) = listener.accept().await.unwrap();
            for _ in 0..answers {
                let mut read = Vec::new();
                while !read.ends_with(b"{\"x\":1}") && socket.read_buf(&mut read).await.unwrap() > 0
                {
                }
                requests_tx.send(()).unwrap();
                socket
                    .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                    .await
                    .unwrap();
            }
            let mut read = Vec::new();
            while !read.ends_with(b"{\"x\":1}") && socket.read_buf(&mut read).await.unwrap() > 0 {}
            requests_tx.send(()).unwrap();
        }
    });
    (address, requests_rx)
}

#[tokio::test]
async fn closed_connection_is_retried_except_for_bootstrap() {
    let (client, metrics) = new_client(EngineScheme::Http, LONG);
    let without_repeats = client.clone();
    let client = client.with_repeats(true);
    let (worker, mut calls_rx) = worker_that_closes_connection().await;
    for _ in 0..2 {
        client
            .run(call_to(worker), (), |(), _, _| {})
            .await
            .1
            .unwrap();
    }
    for _ in 0..3 {
        calls_rx.recv().await.unwrap();
    }
    assert_eq!(
        (
            count_calls(&metrics, "completed"),
            count_calls(&metrics, "failed")
        ),
        (2, 0)
    );
    let (worker, mut calls_rx) = worker_that_closes_connection().await;
    client
        .run(call_to(worker), (), |(), _, _| {})
        .await
        .1
        .unwrap();
    let mut running = client.start(call_to(worker), |_| {}).await.unwrap();
    let failed = tokio::time::timeout(LONG, running.wait())
        .await
        .expect("the call ends")
        .unwrap_err();
    assert_eq!(failed.label(), "failed");
    for _ in 0..2 {
        calls_rx.recv().await.unwrap();
    }
    assert!(calls_rx.try_recv().is_err());
    // An engine that identifies requests by their id receives no repeated call.
    let (worker, mut calls_rx) = worker_that_closes_connection().await;
    without_repeats
        .run(call_to(worker), (), |(), _, _| {})
        .await
        .1
        .unwrap();
    assert_eq!(
        without_repeats
            .run(call_to(worker), (), |(), _, _| {})
            .await
            .1
            .unwrap_err()
            .label(),
        "failed"
    );
    for _ in 0..2 {
        calls_rx.recv().await.unwrap();
    }
    assert!(calls_rx.try_recv().is_err());
}
