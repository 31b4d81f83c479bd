//! Requests that are sent to another model than they name: the worker gets its own name for it in an otherwise unchanged
//! body of the right length, the client gets the name it asked for.

use bytes::Bytes;
use reqwest::Body;
use serde_json::{Value, json};

use crate::client::take;
use crate::gateway::{Change, Gateway};
use crate::support::stack::MODEL;
use crate::uploads::Shown;
use crate::worker::{PIECES, Worker, events, fingerprint, received};

/// Where the request's body is shown in full duplex, Envoy takes no wish to see the answer's.
fn restored(shown: Shown) -> bool {
    !matches!(shown, Shown::Duplex | Shown::DuplexWithLength)
}

const MODES: [Shown; 5] = [
    Shown::Buffered,
    Shown::Partial,
    Shown::Duplex,
    Shown::DuplexWithLength,
    Shown::DuplexBothWays,
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_is_renamed_on_its_way_there_and_back() {
    let worker = Worker::start().await;
    // One name that is longer and one that is shorter than the worker's.
    let names = ["chat-latest-of-all-that-there-are", "c"];
    let rewrites = json!({"rules": [{"models": names, "to": [{"model": MODEL}]}]});
    let changes: Vec<Change> = MODES.into_iter().map(Shown::change).collect();
    let gateway =
        Gateway::start(&[worker.engine(1)], json!({"rewrites": rewrites}), &changes).await;
    let client = || warmroute::tls::client().timeout(crate::bed::SOON);
    let clients = [
        client().http1_only().build().unwrap(),
        client().http2_prior_knowledge().build().unwrap(),
    ];
    for (listener, shown) in MODES.into_iter().enumerate() {
        for (client, asked) in clients
            .iter()
            .flat_map(|client| names.map(|name| (client, name)))
        {
            let (sent, expected) = (body(asked), body(MODEL));
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
            for sized in [true, false] {
                let what = format!("{shown:?} {asked} sized: {sized}");
                let got = take(post(sized).send().await.unwrap()).await;
                assert!(got.status == 200 && got.whole, "{what}: {got:?}");
                assert_eq!(got.mode(), "exact", "{what}");
                let report = got.json();
                assert_eq!(
                    report["xxh3"],
                    json!(fingerprint(expected.as_bytes())),
                    "{what}"
                );
                let named = if restored(shown) { asked } else { MODEL };
                assert_eq!(report["model"], json!(named), "{what}");
                let length = expected.len().to_string();
                let told = received(&report, "content-length");
                assert!(told.is_empty() || told == [&*length], "{what}: {told:?}");
            }
            for size in [1, 7, 64, 100_000] {
                let got = take(post(true).header(PIECES, size).send().await.unwrap()).await;
                assert!(got.status == 200 && got.whole, "{shown:?} {size}: {got:?}");
                let text = String::from_utf8(got.body).unwrap();
                let named = if restored(shown) { asked } else { MODEL };
                assert_eq!(
                    text,
                    events(&Value::from(named)),
                    "{shown:?} in pieces of {size}"
                );
            }
        }
    }
    gateway.quiet().await;
    assert!(gateway.metrics().await.sum("rewritten_models_total", &[]) > 0.0);
}
