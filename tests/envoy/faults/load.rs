//! Bookings of many concurrent requests, of each phase of a request, and of slow clients.

use std::net::Ipv4Addr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::faults::bed::{chat, join_answers, start, stream};
use crate::routing::bed::RoutingBed;
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
    // The engines hold all requests until the last one has been sent.
    for id in 1..=3 {
        bed.set_first_tokens(id, false).await;
    }
    let sending = (0..1500)
        .map(|at| bed.send_and_check_in_background(stream(&format!("{at}"), 8)))
        .collect();
    bed.wait_total_load("active_requests", 1500).await;
    assert_eq!(bed.metric("open_exchanges", &[]).await, 1500.0);
    assert!(bed.total_load("active_blocks").await > 1500);
    assert!(bed.total_load("active_prefill_tokens").await > 1500);
    for id in 1..=3 {
        bed.set_first_tokens(id, true).await;
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

/// Returns a request as bytes. The connection closes after the response.
fn raw(body: &serde_json::Value) -> String {
    let body = body.to_string();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\ncontent-type: application/json";
    format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

async fn connect(bed: &RoutingBed) -> TcpStream {
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
