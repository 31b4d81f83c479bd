//! Workers receive request bodies byte for byte, for each kind of upload and each body mode of
//! Envoy. The tests also check the routing mode.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use warmroute_testbed::deployment::MODEL;

use crate::modes::client::{UploadRequest, http1, http2};
use crate::modes::gateway::{ConnectionManager, ManagerChange, ModeGateway};
use crate::modes::worker::{RecordingWorker, fingerprint, received};
use crate::support::deployment::RoutedAnswer;

/// Body mode of Envoy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EnvoyBodyMode {
    Buffered,
    Partial,
    Streamed,
    NotSent,
    Duplex,
    DuplexWithLength,
    DuplexBothWays,
}

impl EnvoyBodyMode {
    pub(crate) const ALL: [Self; 7] = [
        Self::Buffered,
        Self::Partial,
        Self::Streamed,
        Self::NotSent,
        Self::Duplex,
        Self::DuplexWithLength,
        Self::DuplexBothWays,
    ];

    pub(crate) fn change(self) -> ManagerChange {
        Box::new(move |manager| match self {
            Self::Buffered => {}
            Self::Partial => {
                manager.buffer(256 << 10);
                manager.modes(&[("request_body_mode", "BUFFERED_PARTIAL")]);
            }
            Self::Streamed => manager.modes(&[("request_body_mode", "STREAMED")]),
            Self::NotSent => manager.modes(&[("request_body_mode", "NONE")]),
            Self::Duplex => manager.duplex(),
            Self::DuplexWithLength => {
                manager.duplex();
                manager.filter()["allow_content_length_header"] = json!(true);
            }
            Self::DuplexBothWays => {
                manager.duplex();
                manager.remove_first_token_probe();
                manager.modes(&[("response_body_mode", "FULL_DUPLEX_STREAMED")]);
            }
        })
    }

    /// Returns the routing mode of a chat that fits into all buffers.
    fn expected_mode(self, upload: UploadRequest) -> &'static str {
        match self {
            Self::Streamed | Self::NotSent => "load_only",
            // Before trailers, a partially buffered body has no end.
            Self::Partial if upload.trailers => "load_only",
            _ => "exact",
        }
    }

    /// Returns true if the worker receives a `content-length` header.
    fn reports_length(self, upload: UploadRequest) -> bool {
        match self {
            Self::Buffered | Self::NotSent => upload.sized,
            Self::Partial | Self::Streamed | Self::Duplex | Self::DuplexBothWays => false,
            // warmroute has the whole body before it forwards the body, so it knows the length. A
            // request with trailers has no content length.
            Self::DuplexWithLength => !upload.trailers,
        }
    }
}

fn chat(question: &str, padding: usize) -> Vec<u8> {
    let messages = json!([{"role": "user", "content": format!("{question} {}", "how are you, Jürgen 🔥 \"today\"? ".repeat(8))}]);
    // The padding follows the prompt, so it adds bytes but no tokens.
    json!({"model": MODEL, "messages": messages, "user": "u".repeat(padding)})
        .to_string()
        .into_bytes()
}

async fn post_with_both_versions(
    port: u16,
    body: &[u8],
    upload: UploadRequest,
) -> [(&'static str, RoutedAnswer); 2] {
    [
        ("HTTP/1.1", http1(port, body, upload).await),
        ("HTTP/2", http2(port, body, upload).await),
    ]
}

/// Differences in received bodies and routing, collected so that one failure reports all rows.
#[derive(Default)]
struct UploadErrors(Vec<String>);

/// Expected routing of an upload.
struct ExpectedRoute<'a> {
    modes: &'a [&'a str],
    /// The worker receives a `content-length` header.
    reports_length: bool,
}

impl UploadErrors {
    fn check(&mut self, what: &str, got: &RoutedAnswer, body: &[u8], expected: &ExpectedRoute<'_>) {
        if got.status != 200 || got.is_incomplete {
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
        if !expected.modes.contains(&got.mode()) {
            let modes = expected.modes;
            self.0
                .push(format!("{what}: routed {:?}, not {modes:?}", got.mode()));
        }
        let length = body.len().to_string();
        let framing = (
            received(&report, "content-length"),
            received(&report, "transfer-encoding"),
        );
        if framing
            != if expected.reports_length {
                (vec![length.as_str()], vec![])
            } else {
                (vec![], vec!["chunked"])
            }
        {
            self.0.push(format!("{what}: framed {framing:?}"));
        }
    }
}

impl Drop for UploadErrors {
    fn drop(&mut self) {
        assert!(
            std::thread::panicking() || self.0.is_empty(),
            "{}",
            self.0.join("\n")
        );
    }
}

/// Starts a listener for each mode. Modes in which Envoy does not buffer the whole body have no
/// retry policy, because of the bug that the last tests document.
async fn gateway(workers: &[RecordingWorker]) -> ModeGateway {
    let specs: Vec<_> = workers
        .iter()
        .zip(1..)
        .map(|(worker, id)| worker.engine(id))
        .collect();
    let change = |body_mode: EnvoyBodyMode| {
        let change = body_mode.change();
        let retried = matches!(body_mode, EnvoyBodyMode::Buffered | EnvoyBodyMode::NotSent);
        Box::new(move |manager: &mut ConnectionManager| {
            change(manager);
            if !retried {
                manager.without_retries();
            }
        }) as ManagerChange
    };
    let changes: Vec<ManagerChange> = EnvoyBodyMode::ALL.into_iter().map(change).collect();
    ModeGateway::start(&specs, json!({}), &changes).await
}

/// Framing and pacing of the short uploads.
const SHORT_UPLOADS: [UploadRequest; 9] = [
    UploadRequest::SIZED,
    UploadRequest::CHUNKED,
    UploadRequest {
        trailers: true,
        ..UploadRequest::CHUNKED
    },
    UploadRequest {
        expect: true,
        ..UploadRequest::SIZED
    },
    UploadRequest {
        expect: true,
        ..UploadRequest::CHUNKED
    },
    UploadRequest {
        piece: 40,
        pause: Duration::from_millis(50),
        ..UploadRequest::SIZED
    },
    UploadRequest {
        piece: 40,
        pause: Duration::from_millis(50),
        ..UploadRequest::CHUNKED
    },
    UploadRequest {
        piece: 1,
        ..UploadRequest::SIZED
    },
    UploadRequest {
        piece: 1,
        ..UploadRequest::CHUNKED
    },
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_arrive_whole_in_every_mode() {
    let workers = [
        RecordingWorker::start().await,
        RecordingWorker::start().await,
    ];
    let gateway = gateway(&workers).await;
    let one = async |(body_mode, &port): (EnvoyBodyMode, &u16)| {
        let mut wrong = UploadErrors::default();
        let body = chat(&format!("{body_mode:?}"), 0);
        for upload in SHORT_UPLOADS {
            for (version, got) in post_with_both_versions(port, &body, upload).await {
                let what = format!("{body_mode:?} {version} {upload:?}");
                let expected = ExpectedRoute {
                    modes: &[body_mode.expected_mode(upload)],
                    reports_length: body_mode.reports_length(upload),
                };
                wrong.check(&what, &got, &body, &expected);
            }
        }
        let body = chat(
            &format!("{body_mode:?} {}", "long ".repeat(50_000)),
            10_000_000,
        );
        for upload in [UploadRequest::SIZED, UploadRequest::CHUNKED] {
            for (version, got) in post_with_both_versions(port, &body, upload).await {
                let what = format!("{body_mode:?} {version} {upload:?}, 10 MB");
                let mode = body_mode.expected_mode(upload);
                let expected = ExpectedRoute {
                    // The buffer of `Partial` has the whole body or its beginning.
                    modes: match body_mode {
                        EnvoyBodyMode::Partial => &["exact", "load_only"],
                        _ => &[mode],
                    },
                    reports_length: body_mode.reports_length(upload),
                };
                wrong.check(&what, &got, &body, &expected);
            }
        }
        std::mem::take(&mut wrong.0)
    };
    let found = join_all(EnvoyBodyMode::ALL.into_iter().zip(&gateway.ports).map(one)).await;
    UploadErrors(found.concat());
    gateway.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn partially_buffered_prompt_is_routed_by_load() {
    let workers = [
        RecordingWorker::start().await,
        RecordingWorker::start().await,
    ];
    let gateway = gateway(&workers).await;
    let at = EnvoyBodyMode::ALL
        .iter()
        .position(|body_mode| *body_mode == EnvoyBodyMode::Partial)
        .unwrap();
    let question =
        "Every word of this long question counts, and all of it arrives. ".repeat(100_000);
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": question}]})
        .to_string()
        .into_bytes();
    let mut wrong = UploadErrors::default();
    for upload in [UploadRequest::SIZED, UploadRequest::CHUNKED] {
        let got = http1(gateway.ports[at], &body, upload).await;
        let expected = ExpectedRoute {
            modes: &["load_only"],
            reports_length: false,
        };
        wrong.check(&format!("{upload:?}"), &got, &body, &expected);
    }
    gateway.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn body_above_buffer_is_rejected_or_whole() {
    let workers = [RecordingWorker::start().await];
    let limited: Vec<ManagerChange> = vec![
        Box::new(|manager| manager.buffer(1 << 20)),
        EnvoyBodyMode::Duplex.change(),
    ];
    let gateway = ModeGateway::start(&[workers[0].engine(1)], json!({}), &limited).await;
    let body = chat("a long one", 40_000_000);
    for upload in [
        UploadRequest::SIZED,
        UploadRequest::CHUNKED,
        UploadRequest {
            expect: true,
            ..UploadRequest::SIZED
        },
    ] {
        for (version, got) in post_with_both_versions(gateway.ports[0], &body, upload).await {
            assert!(
                got.status == 413 && !got.is_incomplete,
                "{version} {upload:?}: {got:?}"
            );
        }
        // Bodies above warmroute's limit of 32 MiB are routed load-only.
        for (version, got) in post_with_both_versions(gateway.ports[1], &body, upload).await {
            UploadErrors::default().check(
                &format!("{version} {upload:?}"),
                &got,
                &body,
                &ExpectedRoute {
                    modes: &["load_only"],
                    reports_length: false,
                },
            );
        }
    }
    gateway.wait_idle().await;
    assert_eq!(gateway.metric("buffered_body_bytes", &[]).await, 0.0);
}

/// Documents a bug of Envoy 1.40. With a retry policy, Envoy retains the sent body for retries. If
/// a filter returns the body in chunks, trailers make Envoy send the retained copy after the body.
/// This test fails once Envoy has fixed the bug.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn envoy_retry_policy_duplicates_duplex_body_with_trailers() {
    let worker = RecordingWorker::start().await;
    let gateway = ModeGateway::start(
        &[worker.engine(1)],
        json!({}),
        &[EnvoyBodyMode::Duplex.change()],
    )
    .await;
    let body = chat("twice", 10_000_000);
    for (version, got) in post_with_both_versions(
        gateway.ports[0],
        &body,
        UploadRequest {
            trailers: true,
            ..UploadRequest::CHUNKED
        },
    )
    .await
    {
        assert_eq!(got.json()["bytes"], json!(2 * body.len()), "{version}");
    }
    for (version, got) in
        post_with_both_versions(gateway.ports[0], &body, UploadRequest::CHUNKED).await
    {
        assert_eq!(got.json()["xxh3"], json!(fingerprint(&body)), "{version}");
    }
}
