//! Duration of ext_proc streams, and thus of bookings, for each processing mode.

use serde_json::json;

use crate::modes::gateway::{ManagerChange, ModeGateway};
use crate::routing::bed::{chat, engine, stream};
use crate::support::deployment::RoutedAnswer;

/// Event that ends the ext_proc stream of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamEnding {
    Request,
    Headers,
    Answer,
}

/// Modes for request body, response headers, response trailers and response body, with the expected
/// end.
type EndingRow = ([&'static str; 4], StreamEnding);

const ROWS: [EndingRow; 13] = [
    (["NONE", "SKIP", "SKIP", "NONE"], StreamEnding::Request),
    (["NONE", "SEND", "SKIP", "NONE"], StreamEnding::Headers),
    (["NONE", "SEND", "SEND", "NONE"], StreamEnding::Answer),
    (["NONE", "SKIP", "SEND", "NONE"], StreamEnding::Answer),
    (["BUFFERED", "SKIP", "SKIP", "NONE"], StreamEnding::Answer),
    (["BUFFERED", "SEND", "SEND", "NONE"], StreamEnding::Answer),
    (
        ["BUFFERED_PARTIAL", "SKIP", "SKIP", "NONE"],
        StreamEnding::Answer,
    ),
    (["STREAMED", "SKIP", "SKIP", "NONE"], StreamEnding::Answer),
    (
        ["FULL_DUPLEX_STREAMED", "SKIP", "SKIP", "NONE"],
        StreamEnding::Request,
    ),
    (
        ["FULL_DUPLEX_STREAMED", "SEND", "SKIP", "NONE"],
        StreamEnding::Headers,
    ),
    (
        ["FULL_DUPLEX_STREAMED", "SEND", "SEND", "NONE"],
        StreamEnding::Answer,
    ),
    (["NONE", "SEND", "SEND", "STREAMED"], StreamEnding::Answer),
    (
        ["NONE", "SEND", "SEND", "FULL_DUPLEX_STREAMED"],
        StreamEnding::Answer,
    ),
];

fn change(row: EndingRow) -> ManagerChange {
    Box::new(move |manager| {
        let ([request, headers, trailers, response], _) = row;
        manager.remove_first_token_probe();
        manager.modes(&[
            ("request_body_mode", request),
            ("response_header_mode", headers),
            ("response_trailer_mode", trailers),
            ("response_body_mode", response),
        ]);
        if request == "FULL_DUPLEX_STREAMED" {
            manager.duplex();
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn load_is_booked_until_stream_ends() {
    // No setting makes warmroute request response bodies, so the configured modes stay in effect.
    let more = json!({"gateway": {"observe": "off", "response_headers": {}}});
    let changes: Vec<ManagerChange> = ROWS.iter().map(|row| change(*row)).collect();
    let gateway = ModeGateway::start(&[engine(1)], more, &changes).await;
    for (listener, (modes, ends)) in ROWS.into_iter().enumerate() {
        let what = format!("{modes:?} {ends:?}");
        let query = async |body| gateway.chat_to(listener, &body).send().await.unwrap();
        // The headers of a streaming response precede its first token.
        gateway.set_first_tokens(1, false).await;
        let running = query(stream(&what, 3)).await;
        assert_eq!(running.status(), 200, "{what}");
        match ends {
            StreamEnding::Answer => {
                assert_eq!(gateway.load(1, "active_requests").await, 1, "{what}")
            }
            StreamEnding::Request | StreamEnding::Headers => gateway.wait_idle().await,
        }
        gateway.set_first_tokens(1, true).await;
        let got = RoutedAnswer::read(running).await;
        assert!(
            !got.is_incomplete && got.text.ends_with("data: [DONE]\n\n"),
            "{what}: {got:?}"
        );
        gateway.wait_idle().await;

        gateway.set_first_tokens(1, false).await;
        // One client disconnects after the response headers, one before.
        drop(query(stream(&what, 3)).await);
        gateway.wait_idle().await;
        let waiting = tokio::spawn(gateway.chat_to(listener, &chat(&what)).send());
        if ends != StreamEnding::Request {
            gateway
                .wait_load(1, "active_requests", |requests| requests == 1)
                .await;
        }
        waiting.abort();
        gateway.wait_idle().await;
        gateway.set_first_tokens(1, true).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn worker_failure_releases_load() {
    let changes: Vec<ManagerChange> = vec![
        Box::new(|_| {}),
        Box::new(super::gateway::ConnectionManager::duplex),
    ];
    let mut gateway = ModeGateway::start(&[engine(1)], json!({}), &changes).await;
    gateway.set_first_tokens(1, false).await;
    let mut running = Vec::new();
    for listener in 0..2 {
        let request = gateway.chat_to(listener, &stream("dying", 3));
        running.push(request.send().await.unwrap());
    }
    assert_eq!(gateway.load(1, "active_requests").await, 2);
    gateway.kill(1);
    for response in running {
        assert!(RoutedAnswer::read(response).await.is_incomplete);
    }
    gateway.wait_idle().await;
    // If no worker accepts a connection, Envoy responds itself.
    for listener in 0..2 {
        let got = RoutedAnswer::send(gateway.chat_to(listener, &chat("no worker"))).await;
        assert_eq!(got.status, 503, "{got:?}");
    }
    gateway.wait_idle().await;
}
