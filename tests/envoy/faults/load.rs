//! Bookings of many concurrent requests, of each phase of a request, and of slow clients.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use warmroute_testbed::ports::until;

use crate::faults::bed::{SOON, chat, join_answers, start, stream};
use crate::routing::bed::RoutingBed;
use crate::support::local_server::LocalServer;
use crate::support::raise_open_file_limit;

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn fifteen_hundred_concurrent_streams_leave_no_booking() {
    raise_open_file_limit();
    let many = [
        "--max-num-seqs",
        "2000",
        "--max-num-batched-tokens",
        "200000",
        "--num-blocks",
        "60000",
    ];
    let fast = ["--prefill-us-per-token", "1", "--decode-us-per-seq", "10"];
    let bed = start(3, &[&many[..], &fast[..]].concat()).await;
    // Frozen engines hold all requests until the last one has been sent.
    for at in 0..3 {
        bed.stack.engines[at].freeze();
    }
    let sending = (0..1500)
        .map(|at| bed.send_and_check_in_background(stream(&format!("{at}"), 8)))
        .collect();
    bed.wait_total_load("active_requests", 1500).await;
    assert_eq!(bed.metric("open_exchanges", &[]).await, 1500.0);
    assert!(bed.total_load("active_blocks").await > 1500);
    assert!(bed.total_load("active_prefill_tokens").await > 1500);
    for at in 0..3 {
        bed.stack.engines[at].thaw();
    }
    let answers = join_answers(sending).await;
    let strays: Vec<_> = answers
        .iter()
        .filter(|answer| answer.mode() != "exact")
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
            .filter(|answer| answer.engine() == engine)
            .count();
        assert!(
            (400..=600).contains(&served),
            "engine {engine} served {served}"
        );
    }
    bed.wait_unbooked().await;
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn stream_frees_prefill_first_and_blocks_last() {
    let bed = start(1, &["--step-us", "40000"]).await;
    bed.misbehave(1, json!({"slow_first_token_ms": 3000})).await;
    let mut response = bed.post(&stream("first token", 80)).send().await.unwrap();
    // The engine sends its headers at once and the first token three seconds later.
    let prefill = bed.total_load("active_prefill_tokens").await;
    let first = tokio::time::timeout(Duration::from_millis(1), response.chunk()).await;
    assert!(
        first.is_err(),
        "the first token has already arrived: the machine is too busy for this test"
    );
    assert!(prefill > 100, "{prefill}");
    response.chunk().await.unwrap().unwrap();
    bed.wait_total_load("active_prefill_tokens", 0).await;
    assert!(
        bed.total_load("active_blocks").await > 0,
        "the blocks stay booked during the response"
    );
    assert_eq!(bed.total_load("active_requests").await, 1);
    while response.chunk().await.unwrap().is_some() {}
    bed.wait_unbooked().await;
}

/// Starts an engine that sends the response headers of a chat at once, and the body when notified.
/// It has no other endpoint, because other requests of warmroute would consume the notification.
async fn notified_engine(content_type: &'static str) -> (LocalServer, Arc<Notify>) {
    let release = Arc::new(Notify::new());
    let end = release.clone();
    let answer = async move || {
        let rest = futures_util::stream::once(async move {
            end.notified().await;
            Ok::<_, Infallible>(Bytes::from("{}"))
        });
        ([("content-type", content_type)], Body::from_stream(rest))
    };
    let routes = axum::Router::new().route("/v1/chat/completions", axum::routing::post(answer));
    (LocalServer::start(routes).await, release)
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn unary_prefill_ends_with_response_headers() {
    for (content_type, prefill_is_over) in
        [("application/json", true), ("text/event-stream", false)]
    {
        let bed = start(1, &[]).await;
        let (engine, release) = notified_engine(content_type).await;
        bed.stack
            .write_worker_entries(&json!([{"id": 9, "endpoint": engine.address}]))
            .unwrap();
        let followed = async || {
            let load = bed.stack.debug_page("load").await.unwrap();
            load.as_array().unwrap().len() == 1 && load.to_string().contains('9')
        };
        assert!(
            until(SOON, followed).await,
            "the workers file was not applied"
        );
        let response = bed.post(&chat("headers first", 5)).send().await.unwrap();
        assert_eq!(response.headers()["x-worker-instance-id"], "9");
        if prefill_is_over {
            bed.wait_total_load("active_prefill_tokens", 0).await;
        } else {
            assert!(bed.total_load("active_prefill_tokens").await > 100);
        }
        assert!(bed.total_load("active_blocks").await > 0);
        assert_eq!(bed.total_load("active_requests").await, 1);
        release.notify_one();
        assert_eq!(response.text().await.unwrap(), "{}");
        bed.wait_unbooked().await;
    }
}

/// Returns a request as bytes. The connection closes after the response.
pub(crate) fn raw(body: &serde_json::Value) -> String {
    let body = body.to_string();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\ncontent-type: application/json";
    format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

pub(crate) async fn connect(bed: &RoutingBed) -> TcpStream {
    let url = reqwest::Url::parse(&bed.stack.url("/")).unwrap();
    TcpStream::connect((Ipv4Addr::LOCALHOST, url.port().unwrap()))
        .await
        .unwrap()
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn slow_peers_delay_no_others_and_free_bookings() {
    let bed = start(2, &[]).await;
    // Both clients pause midway until all other requests are served.
    let (resume, others_served) = tokio::sync::watch::channel(false);
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
    for answer in join_answers(bed.send_many_in_background(20, "others", 5)).await {
        assert_eq!(answer.mode(), "exact");
    }
    assert!(
        !reader.is_finished() && !writer.is_finished(),
        "other requests wait for the slow peers"
    );
    resume.send(true).unwrap();
    let read = reader.await.unwrap();
    let written = writer.await.unwrap();
    assert!(
        read.starts_with("HTTP/1.1 200") && read.contains("data: [DONE]"),
        "{read}"
    );
    assert!(
        written.starts_with("HTTP/1.1 200") && written.contains("\"completion_tokens\":3"),
        "{written}"
    );
    bed.wait_unbooked().await;
}
