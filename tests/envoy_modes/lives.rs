//! How long Envoy keeps a stream to warmroute open, which is how long load is booked: by what it is told to send.

use serde_json::json;

use crate::bed::{chat, engine, stream};
use crate::client::take;
use crate::gateway::{Change, Gateway};

/// When the stream of an exchange ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    Request,
    Headers,
    Answer,
}

/// Request body, response headers, response trailers, response body.
type Row = ([&'static str; 4], Ends);

const ROWS: [Row; 13] = [
    (["NONE", "SKIP", "SKIP", "NONE"], Ends::Request),
    (["NONE", "SEND", "SKIP", "NONE"], Ends::Headers),
    (["NONE", "SEND", "SEND", "NONE"], Ends::Answer),
    (["NONE", "SKIP", "SEND", "NONE"], Ends::Answer),
    (["BUFFERED", "SKIP", "SKIP", "NONE"], Ends::Answer),
    (["BUFFERED", "SEND", "SEND", "NONE"], Ends::Answer),
    (["BUFFERED_PARTIAL", "SKIP", "SKIP", "NONE"], Ends::Answer),
    (["STREAMED", "SKIP", "SKIP", "NONE"], Ends::Answer),
    (
        ["FULL_DUPLEX_STREAMED", "SKIP", "SKIP", "NONE"],
        Ends::Request,
    ),
    (
        ["FULL_DUPLEX_STREAMED", "SEND", "SKIP", "NONE"],
        Ends::Headers,
    ),
    (
        ["FULL_DUPLEX_STREAMED", "SEND", "SEND", "NONE"],
        Ends::Answer,
    ),
    (["NONE", "SEND", "SEND", "STREAMED"], Ends::Answer),
    (
        ["NONE", "SEND", "SEND", "FULL_DUPLEX_STREAMED"],
        Ends::Answer,
    ),
];

fn change(row: Row) -> Change {
    Box::new(move |manager| {
        let ([request, headers, trailers, response], _) = row;
        manager.alone();
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
async fn load_is_booked_as_long_as_the_stream_lives() {
    // Nobody asks to see answers, so that the modes stay as they are.
    let more = json!({"observe": "off", "response": {}});
    let changes: Vec<Change> = ROWS.iter().map(|row| change(*row)).collect();
    let gateway = Gateway::start(&[engine(1)], more, &changes).await;
    for (listener, (modes, ends)) in ROWS.into_iter().enumerate() {
        let what = format!("{modes:?} {ends:?}");
        let ask = async |body| {
            gateway
                .http
                .post(gateway.at(listener, "/v1/chat/completions"))
                .json(&body)
                .send()
                .await
                .unwrap()
        };
        // The headers of a stream come before its first token.
        gateway.first_tokens(1, false).await;
        let running = ask(stream(&what, 3)).await;
        assert_eq!(running.status(), 200, "{what}");
        match ends {
            Ends::Answer => assert_eq!(gateway.load(1, "active_requests").await, 1, "{what}"),
            Ends::Request | Ends::Headers => gateway.quiet().await,
        }
        gateway.first_tokens(1, true).await;
        let got = take(running).await;
        assert!(
            got.whole && got.body.ends_with(b"data: [DONE]\n\n"),
            "{what}: {got:?}"
        );
        gateway.quiet().await;

        gateway.first_tokens(1, false).await;
        // Clients that leave: one that has its headers, one that has nothing.
        drop(ask(stream(&what, 3)).await);
        gateway.quiet().await;
        let request = gateway
            .http
            .post(gateway.at(listener, "/v1/chat/completions"))
            .json(&chat(&what));
        let waiting = tokio::spawn(request.send());
        if ends != Ends::Request {
            gateway
                .wait_load(1, "active_requests", |requests| requests == 1)
                .await;
        }
        waiting.abort();
        gateway.quiet().await;
        gateway.first_tokens(1, true).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn load_is_released_when_a_worker_fails_or_dies() {
    let changes: Vec<Change> = vec![Box::new(|_| {}), Box::new(super::gateway::Manager::duplex)];
    let mut gateway = Gateway::start(&[engine(1)], json!({}), &changes).await;
    gateway.first_tokens(1, false).await;
    let mut running = Vec::new();
    for listener in 0..2 {
        let url = gateway.at(listener, "/v1/chat/completions");
        running.push(
            gateway
                .http
                .post(url)
                .json(&stream("dying", 3))
                .send()
                .await
                .unwrap(),
        );
    }
    assert_eq!(gateway.load(1, "active_requests").await, 2);
    gateway.kill(1);
    for response in running {
        assert!(!take(response).await.whole);
    }
    gateway.quiet().await;
    // No connection: Envoy answers by itself.
    for listener in 0..2 {
        let url = gateway.at(listener, "/v1/chat/completions");
        let got = take(
            gateway
                .http
                .post(url)
                .json(&chat("nobody there"))
                .send()
                .await
                .unwrap(),
        )
        .await;
        assert_eq!(got.status, 503, "{got:?}");
    }
    gateway.quiet().await;
}
