//! Full duplex: bodies are gathered here, and nobody but us sets a limit.

use bytes::Bytes;
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::bed::{chat, engine, stream};
use crate::client::{Got, Http1};
use crate::gateway::{Change, Gateway};
use crate::support::stack::MODEL;
use crate::uploads::Shown;
use crate::worker::{Worker, fingerprint};

const CHUNKED: &str = "transfer-encoding: chunked\r\n";

fn changes() -> Vec<Change> {
    vec![Shown::Duplex.change(), Shown::DuplexBothWays.change()]
}

fn long(topic: usize, words: usize) -> Vec<u8> {
    let question = format!("{topic}: {}", "a word and another word, ".repeat(words));
    json!({"model": MODEL, "messages": [{"role": "user", "content": question}]})
        .to_string()
        .into_bytes()
}

fn assert_whole(got: &Got, body: &[u8], mode: &str) {
    assert!(got.status == 200 && got.whole, "{got:?}");
    assert_eq!(got.json()["xxh3"], json!(fingerprint(body)));
    assert_eq!(got.mode(), mode);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_that_stalls_goes_on_by_what_has_come_and_arrives_whole() {
    let worker = Worker::start().await;
    let more = json!({"limits": {"upload": "1s", "exchange_deadline": "30s"}});
    let gateway = Gateway::start(&[worker.engine(1)], more, &changes()).await;
    for &port in &gateway.ports {
        let body = long(1, 500);
        let mut client = Http1::begin(port, CHUNKED).await;
        client.chunk(&body[..9_000]).await;
        // Nothing more comes, and it is routed all the same.
        gateway
            .wait_load(1, "active_requests", |requests| requests == 1)
            .await;
        gateway
            .shows("bodies are held", |page| {
                page.sum("held_body_bytes", &[]) == 0.0
            })
            .await;
        for piece in body[9_000..].chunks(500) {
            client.chunk(piece).await;
        }
        assert_whole(&client.end().await, &body, "partial");
        gateway.quiet().await;
        // One that stalls before its prompt has begun.
        let mut client = Http1::begin(port, CHUNKED).await;
        client.chunk(&body[..5]).await;
        gateway
            .wait_load(1, "active_requests", |requests| requests == 1)
            .await;
        client.chunk(&body[5..]).await;
        assert_whole(&client.end().await, &body, "load_only");
        gateway.quiet().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_are_too_much_together_go_on_by_what_has_come() {
    let workers = [Worker::start().await, Worker::start().await];
    let limits = json!({"body": "64KiB", "held_bodies": "128KiB", "exchange_deadline": "30s", "upload": "60s"});
    let specs = [workers[0].engine(1), workers[1].engine(2)];
    let gateway = Gateway::start(&specs, json!({"limits": limits}), &changes()).await;
    let bodies: Vec<_> = (0..16).map(|topic| long(topic, 1_000)).collect();
    let mut clients = Vec::new();
    for (at, body) in bodies.iter().enumerate() {
        let mut client = Http1::begin(gateway.ports[at % 2], CHUNKED).await;
        client.chunk(&body[..20_000]).await;
        clients.push(client);
    }
    // Six of sixteen fit, each of those beyond is let go.
    gateway
        .shows("too few are routed", |page| {
            page.sum("requests_total", &[("mode", "partial")]) >= 10.0
        })
        .await;
    gateway
        .shows("too much is held", |page| {
            page.sum("held_body_bytes", &[]) <= 131_072.0
        })
        .await;
    for (client, body) in clients.iter_mut().zip(&bodies) {
        client.chunk(&body[20_000..]).await;
    }
    for (got, body) in join_all(clients.into_iter().map(Http1::end))
        .await
        .iter()
        .zip(&bodies)
    {
        let mode = got.mode();
        assert!(["exact", "partial"].contains(&mode), "{got:?}");
        assert_whole(got, body, mode);
    }
    gateway.quiet().await;
    assert_eq!(gateway.metrics().await.sum("held_body_bytes", &[]), 0.0);
}

fn unfinished(body: &Value) -> reqwest::Body {
    use futures_util::StreamExt as _;
    let begun =
        futures_util::stream::iter([Ok::<_, std::io::Error>(Bytes::from(body.to_string()))]);
    reqwest::Body::wrap_stream(begun.chain(futures_util::stream::pending()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_leave_at_any_time_leave_nothing_in_full_duplex() {
    let busy = json!({"queue": {"prefill_busy_threshold": 1, "deadline": "60s"}});
    let gateway = Gateway::start(&[engine(1)], busy, &changes()).await;
    gateway.first_tokens(1, false).await;
    for listener in 0..2 {
        let post = || {
            gateway
                .http
                .post(gateway.at(listener, "/v1/chat/completions"))
        };
        // While it uploads.
        let uploading = tokio::spawn(post().body(unfinished(&chat("uploading"))).send());
        gateway
            .shows("nothing is held", |page| {
                page.sum("held_body_bytes", &[]) > 0.0
            })
            .await;
        uploading.abort();
        gateway.quiet().await;
        // Before its answer begins, and another behind it in the queue.
        let waiting = tokio::spawn(post().json(&chat("waiting")).send());
        gateway
            .wait_load(1, "active_requests", |requests| requests == 1)
            .await;
        let queued = tokio::spawn(post().json(&chat("queued")).send());
        gateway
            .shows("nobody is queued", |page| {
                page.sum("queue_requests", &[]) == 1.0
            })
            .await;
        queued.abort();
        gateway
            .shows("somebody is queued", |page| {
                page.sum("queue_requests", &[]) == 0.0
            })
            .await;
        waiting.abort();
        gateway.quiet().await;
        // In the middle of its stream.
        let running = post().json(&stream("running", 3)).send().await.unwrap();
        assert_eq!(gateway.load(1, "active_requests").await, 1);
        drop(running);
        gateway.quiet().await;
    }
}
