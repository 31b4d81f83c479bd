//! Bodies that warmroute buffers in full-duplex mode, where Envoy does not limit them.

use bytes::Bytes;
use futures_util::future::join_all;
use serde_json::{Value, json};
use warmroute_testbed::deployment::MODEL;

use crate::modes::client::Http1Client;
use crate::modes::gateway::{ManagerChange, ModeGateway};
use crate::modes::uploads::EnvoyBodyMode;
use crate::modes::worker::{RecordingWorker, fingerprint};
use crate::routing::bed::{chat, engine, stream};
use crate::support::deployment::RoutedAnswer;

const CHUNKED: &str = "transfer-encoding: chunked\r\n";

fn changes() -> Vec<ManagerChange> {
    vec![
        EnvoyBodyMode::Duplex.change(),
        EnvoyBodyMode::DuplexBothWays.change(),
    ]
}

fn long(topic: usize, words: usize) -> Vec<u8> {
    let question = format!("{topic}: {}", "a word and another word, ".repeat(words));
    json!({"model": MODEL, "messages": [{"role": "user", "content": question}]})
        .to_string()
        .into_bytes()
}

fn assert_whole(got: &RoutedAnswer, body: &[u8], mode: &str) {
    assert!(got.status == 200 && !got.is_incomplete, "{got:?}");
    assert_eq!(got.json()["xxh3"], json!(fingerprint(body)));
    assert_eq!(got.mode(), mode);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn stalled_upload_is_routed_and_arrives_whole() {
    let worker = RecordingWorker::start().await;
    let more = json!({"requests": {"limits": {"upload_timeout": "1s", "decision_timeout": "30s"}}});
    let gateway = ModeGateway::start(&[worker.engine(1)], more, &changes()).await;
    for &port in &gateway.ports {
        let body = long(1, 500);
        let mut client = Http1Client::begin(port, CHUNKED).await;
        client.chunk(&body[..9_000]).await;
        // No further chunk arrives, and the request is routed nevertheless.
        gateway
            .wait_load(1, "active_requests", |requests| requests == 1)
            .await;
        gateway.wait_metric("buffered_body_bytes", &[], 0.0).await;
        for piece in body[9_000..].chunks(500) {
            client.chunk(piece).await;
        }
        assert_whole(&client.end().await, &body, "load_only");
        gateway.wait_idle().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn bodies_above_total_limit_are_routed_early() {
    let workers = [
        RecordingWorker::start().await,
        RecordingWorker::start().await,
    ];
    let limits = json!({"max_body_size": "64KiB", "max_buffered_bytes": "128KiB", "decision_timeout": "30s", "upload_timeout": "60s"});
    let specs = [workers[0].engine(1), workers[1].engine(2)];
    let gateway =
        ModeGateway::start(&specs, json!({"requests": {"limits": limits}}), &changes()).await;
    let bodies: Vec<_> = (0..16).map(|topic| long(topic, 1_000)).collect();
    let mut clients = Vec::new();
    for (at, body) in bodies.iter().enumerate() {
        let mut client = Http1Client::begin(gateway.ports[at % 2], CHUNKED).await;
        client.chunk(&body[..20_000]).await;
        clients.push(client);
    }
    // Six of the sixteen bodies fit. Each further body is routed at once.
    gateway
        .wait_metrics("too few requests are routed", |page| {
            page.sum("requests_total", &[("mode", "load_only")]) >= 10.0
        })
        .await;
    gateway
        .wait_metrics("too many bytes are buffered", |page| {
            page.sum("buffered_body_bytes", &[]) <= 131_072.0
        })
        .await;
    for (client, body) in clients.iter_mut().zip(&bodies) {
        client.chunk(&body[20_000..]).await;
    }
    for (got, body) in join_all(clients.into_iter().map(Http1Client::end))
        .await
        .iter()
        .zip(&bodies)
    {
        let mode = got.mode();
        assert!(["exact", "load_only"].contains(&mode), "{got:?}");
        assert_whole(got, body, mode);
    }
    gateway.wait_idle().await;
    assert_eq!(gateway.metric("buffered_body_bytes", &[]).await, 0.0);
}

fn unfinished(body: &Value) -> reqwest::Body {
    use futures_util::StreamExt as _;
    let begun =
        futures_util::stream::iter([Ok::<_, std::io::Error>(Bytes::from(body.to_string()))]);
    reqwest::Body::wrap_stream(begun.chain(futures_util::stream::pending()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn disconnects_in_full_duplex_leave_no_state() {
    let busy = json!({"queue": {"prefill_busy_threshold": 1, "timeout": "60s"}});
    let gateway = ModeGateway::start(&[engine(1)], busy, &changes()).await;
    gateway.set_first_tokens(1, false).await;
    for listener in 0..2 {
        let post = |question: &Value| gateway.chat_to(listener, question);
        // The client disconnects during the upload.
        let url = gateway.at(listener, "/v1/chat/completions");
        let upload = gateway.http.post(url).body(unfinished(&chat("uploading")));
        let uploading = tokio::spawn(upload.send());
        gateway
            .wait_metrics("a body is buffered", |page| {
                page.sum("buffered_body_bytes", &[]) > 0.0
            })
            .await;
        uploading.abort();
        gateway.wait_idle().await;
        // The client disconnects before its response begins, while another request is queued.
        let waiting = tokio::spawn(post(&chat("waiting")).send());
        gateway
            .wait_load(1, "active_requests", |requests| requests == 1)
            .await;
        let queued = tokio::spawn(post(&chat("queued")).send());
        gateway.wait_metric("queue_requests", &[], 1.0).await;
        queued.abort();
        gateway.wait_metric("queue_requests", &[], 0.0).await;
        waiting.abort();
        gateway.wait_idle().await;
        // The client disconnects during the stream.
        let running = post(&stream("running", 3)).send().await.unwrap();
        assert_eq!(gateway.load(1, "active_requests").await, 1);
        drop(running);
        gateway.wait_idle().await;
    }
}
