//! Bookings: many at once, when their parts end, and slow peers.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::bed::{Bed, Patience, SOON, all, chat, stream};
use crate::support::ports::until;

#[tokio::test]
async fn fifteen_hundred_streams_at_once_are_all_answered_and_nothing_stays_booked() {
    let files = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: files.maximum,
            maximum: files.maximum,
        },
    )
    .unwrap();
    let many = [
        "--max-num-seqs",
        "2000",
        "--max-num-batched-tokens",
        "200000",
        "--num-blocks",
        "60000",
    ];
    let fast = ["--prefill-us-per-token", "1", "--decode-us-per-seq", "10"];
    let bed = Bed::start(3, &[&many[..], &fast[..]].concat(), Patience::Long).await;
    // Frozen engines hold every request for as long as it takes to send them all.
    for at in 0..3 {
        bed.stack.engines[at].freeze();
    }
    let asking = (0..1500)
        .map(|at| bed.asking(stream(&format!("{at}"), 8)))
        .collect();
    bed.wait_load("active_requests", 1500).await;
    assert_eq!(bed.metric("warmroute_exchanges_open").await, 1500.0);
    assert!(bed.load("active_blocks").await > 1500);
    assert!(bed.load("active_prefill_tokens").await > 1500);
    for at in 0..3 {
        bed.stack.engines[at].thaw();
    }
    let answers = all(asking).await;
    let strays: Vec<_> = answers
        .iter()
        .filter(|answer| answer.mode.as_deref() != Some("exact"))
        .collect();
    assert!(
        strays.is_empty(),
        "{} of {}, such as {:?}",
        strays.len(),
        answers.len(),
        strays.first()
    );
    for engine in 1..=3 {
        let served = answers
            .iter()
            .filter(|answer| answer.engine == engine)
            .count();
        assert!(
            (400..=600).contains(&served),
            "engine {engine} served {served}"
        );
    }
    bed.quiet().await;
}

#[tokio::test]
async fn the_prefill_of_a_stream_ends_with_its_first_token_and_its_blocks_with_its_last() {
    let bed = Bed::start(1, &["--step-us", "40000"], Patience::Long).await;
    bed.misbehave(0, &json!({"slow_first_token_ms": 3000}))
        .await;
    let mut response = bed.post(&stream("first token", 80)).send().await.unwrap();
    // The engine sends its headers at once; three seconds are left until the first token.
    let prefill = bed.load("active_prefill_tokens").await;
    let first = tokio::time::timeout(Duration::from_millis(1), response.chunk()).await;
    assert!(
        first.is_err(),
        "the first token was there already: the machine is too busy for this test"
    );
    assert!(prefill > 100, "{prefill}");
    response.chunk().await.unwrap().unwrap();
    bed.wait_load("active_prefill_tokens", 0).await;
    assert!(
        bed.load("active_blocks").await > 0,
        "the blocks are held while the answer runs"
    );
    assert_eq!(bed.load("active_requests").await, 1);
    while response.chunk().await.unwrap().is_some() {}
    bed.quiet().await;
}

/// An engine of which the test says when it answers a chat: headers at once, the body when told. What else
/// warmroute asks an engine (its tokens, its version) is not here: it would be told in place of the chat.
async fn told_engine(content_type: &'static str) -> (std::net::SocketAddr, Arc<Notify>) {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .unwrap();
    let address = listener.local_addr().unwrap();
    let told = Arc::new(Notify::new());
    let end = told.clone();
    let answer = async move || {
        let rest = futures_util::stream::once(async move {
            end.notified().await;
            Ok::<_, Infallible>(Bytes::from("{}"))
        });
        ([("content-type", content_type)], Body::from_stream(rest))
    };
    let routes = axum::Router::new().route("/v1/chat/completions", axum::routing::post(answer));
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    (address, told)
}

#[tokio::test]
async fn the_prefill_of_a_unary_answer_ends_with_its_headers_and_that_of_a_stream_does_not() {
    for (content_type, prefill_is_over) in
        [("application/json", true), ("text/event-stream", false)]
    {
        let bed = Bed::start(1, &[], Patience::Long).await;
        let (address, told) = told_engine(content_type).await;
        bed.stack
            .write_worker_entries(&json!([{"id": 9, "endpoint": address.to_string()}]))
            .unwrap();
        let followed = async || {
            let load = bed.stack.debug("load").await.unwrap();
            load.as_array().unwrap().len() == 1 && load.to_string().contains('9')
        };
        assert!(
            until(SOON, followed).await,
            "the workers file was not followed"
        );
        let response = bed.post(&chat("headers first", 5)).send().await.unwrap();
        assert_eq!(response.headers()["x-worker-instance-id"], "9");
        if prefill_is_over {
            bed.wait_load("active_prefill_tokens", 0).await;
        } else {
            assert!(bed.load("active_prefill_tokens").await > 100);
        }
        assert!(bed.load("active_blocks").await > 0);
        assert_eq!(bed.load("active_requests").await, 1);
        told.notify_one();
        assert_eq!(response.text().await.unwrap(), "{}");
        bed.quiet().await;
    }
}

/// A request as bytes; the connection closes with the answer.
pub(crate) fn raw(body: &serde_json::Value) -> String {
    let body = body.to_string();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\ncontent-type: application/json";
    format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

pub(crate) async fn connect(bed: &Bed) -> TcpStream {
    let url = reqwest::Url::parse(&bed.stack.url("/")).unwrap();
    TcpStream::connect((Ipv4Addr::LOCALHOST, url.port().unwrap()))
        .await
        .unwrap()
}

#[tokio::test]
async fn slow_readers_and_slow_writers_disturb_nobody_and_their_bookings_end() {
    let bed = Bed::start(2, &[], Patience::Long).await;
    // Both peers stop in the middle until all others are served: nothing is slower than that.
    let (go_on, others_served) = tokio::sync::watch::channel(false);
    let mut reader = connect(&bed).await;
    reader
        .write_all(raw(&stream("slow reader", 40)).as_bytes())
        .await
        .unwrap();
    let mut wait = others_served.clone();
    let reader = tokio::spawn(async move {
        let mut text = vec![0; 256];
        reader.read_exact(&mut text).await.unwrap();
        wait.wait_for(|served| *served).await.unwrap();
        reader.read_to_end(&mut text).await.unwrap();
        String::from_utf8(text).unwrap()
    });
    let mut writer = connect(&bed).await;
    let mut wait = others_served;
    let writer = tokio::spawn(async move {
        let request = raw(&chat("slow writer", 3));
        let (begin, end) = request.split_at(request.len() - 40);
        writer.write_all(begin.as_bytes()).await.unwrap();
        wait.wait_for(|served| *served).await.unwrap();
        writer.write_all(end.as_bytes()).await.unwrap();
        let mut text = String::new();
        writer.read_to_string(&mut text).await.unwrap();
        text
    });
    for answer in all(bed.asking_many(20, "others", 5)).await {
        assert_eq!(answer.mode.as_deref(), Some("exact"));
    }
    assert!(
        !reader.is_finished() && !writer.is_finished(),
        "the others must not have to wait for the slow ones"
    );
    go_on.send(true).unwrap();
    let (read, written) = (reader.await.unwrap(), writer.await.unwrap());
    assert!(
        read.starts_with("HTTP/1.1 200") && read.contains("data: [DONE]"),
        "{read}"
    );
    assert!(
        written.starts_with("HTTP/1.1 200") && written.contains("\"completion_tokens\":3"),
        "{written}"
    );
    bed.quiet().await;
}
