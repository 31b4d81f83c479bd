//! What a client sends is what the worker receives, to the byte, however it is sent and however Envoy shows it to us; and
//! how the request is routed then.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;

use crate::bed::SOON;
use crate::client::{Got, Http1, Http2, Steps, Upload, http1, http2};
use crate::gateway::{Change, Gateway, Manager};
use crate::support::ports::until;
use crate::support::stack::MODEL;
use crate::worker::{Worker, fingerprint, received};

/// How Envoy shows bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    Buffered,
    Partial,
    Streamed,
    Unseen,
    Duplex,
    DuplexWithLength,
    DuplexBothWays,
}

impl Shown {
    pub(crate) const ALL: [Self; 7] = [
        Self::Buffered,
        Self::Partial,
        Self::Streamed,
        Self::Unseen,
        Self::Duplex,
        Self::DuplexWithLength,
        Self::DuplexBothWays,
    ];

    pub(crate) fn change(self) -> Change {
        Box::new(move |manager| match self {
            Self::Buffered => {}
            Self::Partial => {
                manager.buffer(256 << 10);
                manager.modes(&[("request_body_mode", "BUFFERED_PARTIAL")]);
            }
            Self::Streamed => manager.modes(&[("request_body_mode", "STREAMED")]),
            Self::Unseen => manager.modes(&[("request_body_mode", "NONE")]),
            Self::Duplex => manager.duplex(),
            Self::DuplexWithLength => {
                manager.duplex();
                manager.filter()["allow_content_length_header"] = json!(true);
            }
            Self::DuplexBothWays => {
                manager.duplex();
                manager.alone();
                manager.modes(&[("response_body_mode", "FULL_DUPLEX_STREAMED")]);
            }
        })
    }

    /// On which step a chat is routed that fits every buffer.
    fn step(self) -> &'static str {
        match self {
            Self::Streamed | Self::Unseen => "load_only",
            _ => "exact",
        }
    }

    /// Whether the worker is told the length of a body.
    fn tells_length(self, upload: Upload) -> bool {
        match self {
            Self::Buffered | Self::Unseen => upload.sized,
            Self::Partial | Self::Streamed | Self::Duplex | Self::DuplexBothWays => false,
            // The whole body was here before it went on, so that its length is known; with trailers it has none.
            Self::DuplexWithLength => !upload.trailers,
        }
    }
}

fn chat(question: &str, padding: usize) -> Vec<u8> {
    let messages = json!([{"role": "user", "content": format!("{question} {}", "how are you today? ".repeat(8))}]);
    // Behind the prompt, so that it costs bytes and no tokens.
    json!({"model": MODEL, "messages": messages, "user": "u".repeat(padding)})
        .to_string()
        .into_bytes()
}

async fn both(port: u16, body: &[u8], upload: Upload) -> [(&'static str, Got); 2] {
    [
        ("HTTP/1.1", http1(port, body, upload).await),
        ("HTTP/2", http2(port, body, upload).await),
    ]
}

/// What is wrong with what the worker received, and with how it was routed; all rows are looked at before the test fails.
#[derive(Default)]
struct Wrong(Vec<String>);

impl Wrong {
    fn look(&mut self, what: &str, got: &Got, body: &[u8], (steps, told): (&[&str], bool)) {
        if got.status != 200 || !got.whole {
            self.0.push(format!("{what}: {got:?}"));
            return;
        }
        let report = got.json();
        if report["xxh3"] != json!(fingerprint(body)) {
            self.0.push(format!(
                "{what}: {} bytes arrived of {}",
                report["bytes"],
                body.len()
            ));
        }
        if !steps.contains(&got.mode()) {
            self.0
                .push(format!("{what}: routed {:?}, not {steps:?}", got.mode()));
        }
        let length = body.len().to_string();
        let framing = (
            received(&report, "content-length"),
            received(&report, "transfer-encoding"),
        );
        if framing
            != if told {
                (vec![length.as_str()], vec![])
            } else {
                (vec![], vec!["chunked"])
            }
        {
            self.0.push(format!("{what}: framed {framing:?}"));
        }
    }
}

impl Drop for Wrong {
    fn drop(&mut self) {
        assert!(
            std::thread::panicking() || self.0.is_empty(),
            "{}",
            self.0.join("\n")
        );
    }
}

/// Listeners of all modes. Where Envoy does not hold the whole body they do not retry: see the last test.
async fn gateway(workers: &[Worker]) -> Gateway {
    let specs: Vec<_> = workers
        .iter()
        .zip(1..)
        .map(|(worker, id)| worker.engine(id))
        .collect();
    let change = |shown: Shown| {
        let change = shown.change();
        let retried = matches!(shown, Shown::Buffered | Shown::Unseen);
        Box::new(move |manager: &mut Manager| {
            change(manager);
            if !retried {
                manager.without_retries();
            }
        }) as Change
    };
    let changes: Vec<Change> = Shown::ALL.into_iter().map(change).collect();
    Gateway::start(&specs, json!({}), &changes).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_of_every_shape_arrive_whole_in_every_mode() {
    let workers = [Worker::start().await, Worker::start().await];
    let gateway = gateway(&workers).await;
    let pause = Duration::from_millis(50);
    let uploads = [
        Upload::SIZED,
        Upload::CHUNKED,
        Upload {
            trailers: true,
            ..Upload::CHUNKED
        },
        Upload {
            expect: true,
            ..Upload::SIZED
        },
        Upload {
            expect: true,
            ..Upload::CHUNKED
        },
        Upload {
            piece: 40,
            pause,
            ..Upload::SIZED
        },
        Upload {
            piece: 40,
            pause,
            ..Upload::CHUNKED
        },
        Upload {
            piece: 1,
            ..Upload::SIZED
        },
        Upload {
            piece: 1,
            ..Upload::CHUNKED
        },
    ];
    let one = async |(shown, &port): (Shown, &u16)| {
        let mut wrong = Wrong::default();
        let body = chat(&format!("{shown:?}"), 0);
        for upload in uploads {
            for (version, got) in both(port, &body, upload).await {
                let what = format!("{shown:?} {version} {upload:?}");
                wrong.look(
                    &what,
                    &got,
                    &body,
                    (&[shown.step()], shown.tells_length(upload)),
                );
            }
        }
        std::mem::take(&mut wrong.0)
    };
    let found = join_all(Shown::ALL.into_iter().zip(&gateway.ports).map(one)).await;
    Wrong(found.concat());
    gateway.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_bodies_and_those_of_one_byte_arrive_in_every_mode() {
    let workers = [Worker::start().await, Worker::start().await];
    let gateway = gateway(&workers).await;
    let mut wrong = Vec::new();
    for (shown, &port) in Shown::ALL.into_iter().zip(&gateway.ports) {
        for body in [&b""[..], b"7"] {
            for upload in [
                Upload::SIZED,
                Upload::CHUNKED,
                Upload {
                    trailers: true,
                    ..Upload::CHUNKED
                },
            ] {
                for (version, got) in both(port, body, upload).await {
                    let what = format!("{shown:?} {version} {upload:?} {} bytes", body.len());
                    assert!(got.status == 200 && got.whole, "{what}: {got:?}");
                    // Of trailers alone Envoy shows nothing, where it waits for a body to buffer, and so it chooses.
                    let unseen = body.is_empty()
                        && upload.trailers
                        && matches!(shown, Shown::Buffered | Shown::Partial);
                    let mode = if unseen { "" } else { "load_only" };
                    if got.json()["xxh3"] != json!(fingerprint(body)) || got.mode() != mode {
                        wrong.push(format!("{what}: {:?} {}", got.mode(), got.json()["bytes"]));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    gateway.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_of_ten_megabytes_arrive_whole_in_every_mode() {
    let workers = [Worker::start().await, Worker::start().await];
    let gateway = gateway(&workers).await;
    let mut wrong = Wrong::default();
    for (shown, &port) in Shown::ALL.into_iter().zip(&gateway.ports) {
        let body = chat(&format!("{shown:?}"), 10_000_000);
        for upload in [
            Upload::SIZED,
            Upload::CHUNKED,
            Upload {
                trailers: true,
                ..Upload::CHUNKED
            },
        ] {
            for (version, got) in both(port, &body, upload).await {
                let what = format!("{shown:?} {version} {upload:?} 10 MB");
                // What follows the beginning could be tools, and those stand before all else in a prompt. Of HTTP/2 Envoy
                // buffers as much as a stream may have on its way.
                let steps: &[&str] = if shown == Shown::Partial {
                    &["load_only", "exact"]
                } else {
                    &[shown.step()]
                };
                wrong.look(&what, &got, &body, (steps, shown.tells_length(upload)));
            }
        }
    }
    gateway.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_fits_no_buffer_is_routed_by_its_beginning() {
    let workers = [Worker::start().await, Worker::start().await];
    let gateway = gateway(&workers).await;
    let at = Shown::ALL
        .iter()
        .position(|shown| *shown == Shown::Partial)
        .unwrap();
    let question =
        "Every word of this long question counts, and all of it arrives. ".repeat(100_000);
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": question}]})
        .to_string()
        .into_bytes();
    let mut wrong = Wrong::default();
    for upload in [Upload::SIZED, Upload::CHUNKED] {
        let got = http1(gateway.ports[at], &body, upload).await;
        wrong.look(&format!("{upload:?}"), &got, &body, (&["partial"], false));
    }
    gateway.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_above_the_buffer_is_refused_or_arrives_whole() {
    let workers = [Worker::start().await];
    let limited: Vec<Change> = vec![
        Box::new(|manager| manager.buffer(1 << 20)),
        Shown::Duplex.change(),
    ];
    let gateway = Gateway::start(&[workers[0].engine(1)], json!({}), &limited).await;
    let body = chat("a long one", 40_000_000);
    for upload in [
        Upload::SIZED,
        Upload::CHUNKED,
        Upload {
            expect: true,
            ..Upload::SIZED
        },
    ] {
        for (version, got) in both(gateway.ports[0], &body, upload).await {
            assert!(
                got.status == 413 && got.whole,
                "{version} {upload:?}: {got:?}"
            );
        }
        // Above our own limit, 32 MiB, it goes by load.
        for (version, got) in both(gateway.ports[1], &body, upload).await {
            Wrong::default().look(
                &format!("{version} {upload:?}"),
                &got,
                &body,
                (&["load_only"], false),
            );
        }
    }
    gateway.quiet().await;
    assert_eq!(gateway.metrics().await.sum("held_body_bytes", &[]), 0.0);
}

/// Not ours, but to be known: a retry policy has Envoy 1.40 keep what it sent of a body for another try, and where a filter gave
/// the body back piece by piece, trailers make it send what it kept behind what it sent. Should this fail, Envoy is mended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_sends_a_body_with_trailers_twice_where_it_retries_in_full_duplex() {
    let worker = Worker::start().await;
    let gateway = Gateway::start(&[worker.engine(1)], json!({}), &[Shown::Duplex.change()]).await;
    let body = chat("twice", 10_000_000);
    for (version, got) in both(
        gateway.ports[0],
        &body,
        Upload {
            trailers: true,
            ..Upload::CHUNKED
        },
    )
    .await
    {
        assert_eq!(got.json()["bytes"], json!(2 * body.len()), "{version}");
    }
    for (version, got) in both(gateway.ports[0], &body, Upload::CHUNKED).await {
        assert_eq!(got.json()["xxh3"], json!(fingerprint(&body)), "{version}");
    }
}

/// The same where bodies are streamed, but for bodies of which everything, with the trailers, is there before our word on the
/// head: of those Envoy makes one piece, which it sends once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_sends_a_streamed_body_with_trailers_twice_where_it_retries_unless_they_are_there_at_once()
 {
    let worker = Worker::start().await;
    let gateway = Gateway::start(&[worker.engine(1)], json!({}), &[Shown::Streamed.change()]).await;
    // In this order: connections of HTTP/2 have more to say, and later, than is counted of HTTP/1.1.
    trailers_behind_a_stream::<Http1>(&gateway, &worker).await;
    trailers_behind_a_stream::<Http2>(&gateway, &worker).await;
    let body = chat("once", 10_000_000);
    for (version, got) in both(gateway.ports[0], &body, Upload::CHUNKED).await {
        assert_eq!(got.json()["xxh3"], json!(fingerprint(&body)), "{version}");
    }
    gateway.quiet().await;
}

async fn trailers_behind_a_stream<C: Steps>(gateway: &Gateway, worker: &Worker) {
    let body = chat("twice", 30_000);
    let (begun, rest) = body.split_at(20_000);

    let (router, before) = (
        gateway.stack.router().unwrap(),
        gateway.envoy_counts(C::COUNTER).await,
    );
    router.freeze();
    let mut client = C::begin(gateway.ports[0]).await;
    client.chunk(begun).await;
    client.chunk(rest).await;
    client.trailers().await;
    let read = async || gateway.envoy_counts(C::COUNTER).await == before + client.counts();
    assert!(
        until(SOON, read).await,
        "{}: Envoy does not read the trailers",
        C::VERSION
    );
    router.thaw();
    assert_eq!(
        client.answer().await.json()["xxh3"],
        json!(fingerprint(&body)),
        "{}: at once",
        C::VERSION
    );

    let before = worker.arrived();
    let mut client = C::begin(gateway.ports[0]).await;
    client.chunk(begun).await;
    assert!(
        until(SOON, async || worker.arrived() == before + begun.len()).await,
        "{}: nothing arrives",
        C::VERSION
    );
    client.chunk(rest).await;
    client.trailers().await;
    assert_eq!(
        client.answer().await.json()["bytes"],
        json!(2 * body.len()),
        "{}: by and by",
        C::VERSION
    );
}
