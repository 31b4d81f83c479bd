//! Model rewrites. The worker receives its own model name in an otherwise unchanged body with the
//! correct length. The client receives the name that it requested.

use bytes::Bytes;
use reqwest::Body;
use serde_json::{Value, json};
use warmroute_testbed::deployment::MODEL;
use warmroute_testbed::ports::PATIENCE;

use crate::modes::gateway::{ManagerChange, ModeGateway};
use crate::modes::uploads::EnvoyBodyMode;
use crate::modes::worker::{PIECES, RecordingWorker, events, fingerprint, received};
use crate::support::deployment::RoutedAnswer;

/// Returns true if the response has the requested name. With full-duplex request bodies, Envoy
/// ignores a mode override for the response body.
fn restored(mode: EnvoyBodyMode) -> bool {
    !matches!(
        mode,
        EnvoyBodyMode::Duplex | EnvoyBodyMode::DuplexWithLength
    )
}

const MODES: [EnvoyBodyMode; 5] = [
    EnvoyBodyMode::Buffered,
    EnvoyBodyMode::Partial,
    EnvoyBodyMode::Duplex,
    EnvoyBodyMode::DuplexWithLength,
    EnvoyBodyMode::DuplexBothWays,
];

fn body(model: &str) -> String {
    let question = "what is the \\\"model\\\":\\\"of this\\\"? ".repeat(40);
    format!(
        "{{\"model\" : \"{model}\", \"messages\":[{{\"role\":\"user\",\"content\":\"{question}\"}}], \"seed\": 1e2}}"
    )
}

fn chunked(body: &str) -> Body {
    let pieces: Vec<_> = body
        .as_bytes()
        .chunks(100)
        .map(|piece| Ok::<_, std::io::Error>(Bytes::copy_from_slice(piece)))
        .collect();
    Body::wrap_stream(futures_util::stream::iter(pieces))
}

/// Asserts that the worker received its own model name, and that the response has the name `named`.
fn assert_rewritten(report: &Value, named: &str, what: &str) {
    let expected = body(MODEL);
    let received_hash = &report["xxh3"];
    assert_eq!(
        *received_hash,
        json!(fingerprint(expected.as_bytes())),
        "{what}"
    );
    assert_eq!(report["model"], json!(named), "{what}");
    let length = expected.len().to_string();
    let length_header = received(report, "content-length");
    assert!(
        length_header.is_empty() || length_header == [&*length],
        "{what}: {length_header:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn model_is_rewritten_in_request_and_response() {
    let worker = RecordingWorker::start().await;
    // One name is longer and one is shorter than that of the worker.
    let names = ["chat-latest-of-all-that-there-are", "c"];
    let rewrites = json!({"rules": [{"models": names, "targets": [{"model": MODEL}]}]});
    let changes: Vec<ManagerChange> = MODES.into_iter().map(EnvoyBodyMode::change).collect();
    let gateway = ModeGateway::start(
        &[worker.engine(1)],
        json!({"routing": {"model_rewrites": rewrites}}),
        &changes,
    )
    .await;
    let client = || warmroute_runtime::tls::http_client_builder().timeout(PATIENCE);
    let clients = [
        client().http1_only().build().unwrap(),
        client().http2_prior_knowledge().build().unwrap(),
    ];
    for (listener, mode) in MODES.into_iter().enumerate() {
        for (client, requested) in clients
            .iter()
            .flat_map(|client| names.map(|name| (client, name)))
        {
            let sent = body(requested);
            let post = |sized: bool| {
                let payload = if sized {
                    Body::from(sent.clone())
                } else {
                    chunked(&sent)
                };
                client
                    .post(gateway.at(listener, "/v1/chat/completions"))
                    .body(payload)
            };
            let named = if restored(mode) { requested } else { MODEL };
            for sized in [true, false] {
                let what = format!("{mode:?} {requested} sized: {sized}");
                let got = RoutedAnswer::send(post(sized)).await;
                assert_eq!(got.status, 200, "{what}: {got:?}");
                assert_eq!(got.mode(), "exact", "{what}");
                assert_rewritten(&got.json(), named, &what);
            }
            for size in [1, 7, 64, 100_000] {
                let got = RoutedAnswer::send(post(true).header(PIECES, size)).await;
                assert_eq!(got.status, 200, "{mode:?} {size}: {got:?}");
                assert_eq!(
                    got.text,
                    events(&Value::from(named)),
                    "{mode:?} in chunks of {size}"
                );
            }
        }
    }
    gateway.wait_idle().await;
    assert!(gateway.metric("model_rewrites_total", &[]).await > 0.0);
}
