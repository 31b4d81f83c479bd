#![expect(
    clippy::single_range_in_vec_init,
    reason = "lists of ranges are what is tested"
)]

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::routing::post;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::*;
use warmroute_core::block::{CacheSalt, LocalHash};
use warmroute_core::worker::BlockSize;
use warmroute_settings::DurationSetting;

/// Behavior of the server.
#[derive(Clone)]
enum Behaviour {
    Answer(StatusCode, String),
    /// Sends the beginning of a response and stalls.
    Stall(&'static str),
    /// Sends an endless response.
    Flood,
    /// Responds when notified.
    Gate(Arc<Notify>),
}

#[derive(Clone)]
struct Script {
    behaviour: Behaviour,
    requests: Arc<Mutex<Vec<Bytes>>>,
    arrived: Arc<Notify>,
}

/// A cache server. It ends with the test.
struct Server {
    url: String,
    script: Script,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    async fn start(behaviour: Behaviour) -> Self {
        let script = Script {
            behaviour,
            requests: Arc::default(),
            arrived: Arc::default(),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/lookup", listener.local_addr().unwrap());
        let app = Router::new()
            .route("/lookup", post(answer))
            .layer(DefaultBodyLimit::disable())
            .with_state(script.clone());
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, script, task }
    }

    async fn responding(status: StatusCode, body: impl Into<String>) -> Self {
        Self::start(Behaviour::Answer(status, body.into())).await
    }

    fn config(&self) -> SharedCacheConfig {
        with_url(&self.url, 20_000)
    }
}

async fn answer(State(script): State<Script>, body: Bytes) -> (StatusCode, Body) {
    script.requests.lock().push(body);
    script.arrived.notify_one();
    let beginning = |text: &'static str| {
        tokio_stream::once(Ok::<_, std::io::Error>(Bytes::from_static(text.as_bytes())))
    };
    match script.behaviour {
        Behaviour::Answer(status, text) => (status, Body::from(text)),
        Behaviour::Stall(text) => {
            let stalled = tokio_stream::StreamExt::chain(beginning(text), tokio_stream::pending());
            (StatusCode::OK, Body::from_stream(stalled))
        }
        Behaviour::Flood => {
            let spaces = tokio_stream::iter(std::iter::repeat_with(|| {
                Ok::<_, std::io::Error>(Bytes::from_static(&[b' '; 999]))
            }));
            (StatusCode::OK, Body::from_stream(spaces))
        }
        Behaviour::Gate(gate) => {
            gate.notified().await;
            (StatusCode::OK, Body::from(r#"{"ranges": [[0, 1]]}"#))
        }
    }
}

fn with_url(url: &str, timeout_millis: u64) -> SharedCacheConfig {
    SharedCacheConfig {
        url: url.to_owned(),
        timeout: DurationSetting::millis(timeout_millis),
    }
}

fn prompt(blocks: usize) -> BlockHashes {
    let tokens: Vec<u32> = (0..blocks as u32 * 16 + 3).collect();
    BlockHashes::from_tokens(&tokens, BlockSize::new(16).unwrap(), &CacheSalt::default())
}

async fn query(config: &SharedCacheConfig, prompt: &BlockHashes) -> SharedCacheResult {
    lookup(&SharedCacheClient::new(config).unwrap(), prompt).await
}

async fn lookup(cache: &SharedCacheClient, prompt: &BlockHashes) -> SharedCacheResult {
    cache.query("llama", prompt).await
}

#[tokio::test]
async fn query_matches_documented_protocol() {
    let server = Server::responding(
        StatusCode::OK,
        r#"{"ranges": [[0, 2], [4, 5]], "version": 3}"#,
    )
    .await;
    let locals = vec![
        LocalHash(0),
        LocalHash(0xfe),
        LocalHash(3),
        LocalHash(4),
        LocalHash(u64::MAX),
    ];
    let prompt = BlockHashes::from_locals(83, BlockSize::new(16).unwrap(), locals);
    assert_eq!(
        query(&server.config(), &prompt).await.unwrap(),
        [0..2, 4..5]
    );
    let request: Value = serde_json::from_slice(&server.script.requests.lock()[0]).unwrap();
    let sequences: Vec<_> = prompt
        .sequences()
        .iter()
        .map(|hash| format!("{:016x}", hash.0))
        .collect();
    let blocks = [
        "0000000000000000",
        "00000000000000fe",
        "0000000000000003",
        "0000000000000004",
        "ffffffffffffffff",
    ];
    let expected = json!({"model": "llama", "block_size": 16, "block_hashes": blocks, "sequence_hashes": sequences});
    assert_eq!(request, expected);
}

#[tokio::test]
async fn ranges_are_normalized() {
    let cases: [(&str, &[Range<u32>]); 7] = [
        ("[]", &[]),
        ("[[3, 5], [0, 2]]", &[0..2, 3..5]),
        ("[[0, 4], [1, 2], [3, 6]]", &[0..6]),
        ("[[0, 2], [2, 4]]", &[0..4]),
        ("[[1, 1], [7, 7]]", &[]),
        ("[[6, 900], [8, 12], [10, 11]]", &[6..8]),
        (
            "[[2, 18446744073709551615], [4294967296, 4294967297]]",
            &[2..8],
        ),
    ];
    for (ranges, expected) in cases {
        let server = Server::responding(StatusCode::OK, format!(r#"{{"ranges": {ranges}}}"#)).await;
        assert_eq!(
            query(&server.config(), &prompt(8)).await.unwrap(),
            expected,
            "{ranges}"
        );
    }
}

#[tokio::test]
async fn invalid_answer_is_an_error() {
    let bodies = [
        "",
        "garbage",
        "null",
        "{}",
        r#"{"ranges": null}"#,
        r#"{"ranges": [[1]]}"#,
        r#"{"ranges": [[1, 2, 3]]}"#,
        r#"{"ranges": [[-1, 2]]}"#,
        r#"{"ranges": [[0.5, 2]]}"#,
        r#"{"ranges": [[0, 1], [3, 2]]}"#,
        r#"{"ranges": [[0, 1]]"#,
    ];
    for body in bodies {
        let server = Server::responding(StatusCode::OK, body).await;
        let problem = query(&server.config(), &prompt(8)).await.unwrap_err();
        assert_eq!(problem.label(), "invalid", "{body}: {problem}");
    }
}

#[tokio::test]
async fn only_status_200_is_accepted() {
    for status in [500, 503, 404, 204, 302] {
        let server = Server::responding(
            StatusCode::from_u16(status).unwrap(),
            r#"{"ranges": [[0, 1]]}"#,
        )
        .await;
        let problem = query(&server.config(), &prompt(8)).await.unwrap_err();
        assert!(
            matches!(problem, SharedCacheError::Status(found) if found == status),
            "{problem}"
        );
        assert_eq!(problem.label(), "status");
    }
}

#[tokio::test]
async fn slow_server_times_out() {
    for behaviour in [
        Behaviour::Gate(Arc::default()),
        Behaviour::Stall(r#"{"ranges": [[0, 1]]"#),
    ] {
        let server = Server::start(behaviour).await;
        let config = with_url(&server.url, 60);
        assert_eq!(
            query(&config, &prompt(8)).await.unwrap_err().label(),
            "timeout"
        );
    }
}

#[tokio::test]
async fn oversized_answer_is_not_read_completely() {
    let server = Server::start(Behaviour::Flood).await;
    let problem = query(&server.config(), &prompt(8)).await.unwrap_err();
    assert!(matches!(problem, SharedCacheError::TooLong), "{problem}");
    for (length, fits) in [(MAX_RESPONSE, true), (MAX_RESPONSE + 1, false)] {
        let ranges = r#"{"ranges": [[0, 1]]}"#;
        let body = ranges.to_owned() + &" ".repeat(length - ranges.len());
        let server = Server::responding(StatusCode::OK, body).await;
        let answer = query(&server.config(), &prompt(8)).await;
        assert_eq!(answer.is_ok(), fits, "{length} bytes");
    }
}

#[tokio::test]
async fn unreachable_server_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let free = listener.local_addr().unwrap();
    drop(listener);
    let config = with_url(&format!("http://{free}/lookup"), 20_000);
    let problem = query(&config, &prompt(8)).await.unwrap_err();
    assert_eq!(problem.label(), "connection", "{problem}");
    assert!(problem.to_string().contains("refused"), "{problem}");
}

#[tokio::test]
async fn lookups_beyond_the_limit_are_busy() {
    let gate = Arc::new(Notify::new());
    let server = Server::start(Behaviour::Gate(gate.clone())).await;
    let cache = Arc::new(SharedCacheClient::new(&server.config()).unwrap());
    cache.permits.forget_permits(MAX_CONCURRENCY - 1);
    let first = tokio::spawn({
        let cache = cache.clone();
        async move { lookup(&cache, &prompt(2)).await }
    });
    tokio::time::timeout(Duration::from_secs(20), server.script.arrived.notified())
        .await
        .unwrap();
    let refused = lookup(&cache, &prompt(2)).await;
    assert_eq!(refused.unwrap_err().label(), "busy");
    gate.notify_one();
    assert_eq!(first.await.unwrap().unwrap(), [0..1]);
    gate.notify_one();
    assert_eq!(lookup(&cache, &prompt(2)).await.unwrap(), [0..1]);
}

#[tokio::test]
async fn cancelled_lookup_releases_its_permit() {
    let gate = Arc::new(Notify::new());
    let server = Server::start(Behaviour::Gate(gate.clone())).await;
    let cache = SharedCacheClient::new(&server.config()).unwrap();
    cache.permits.forget_permits(MAX_CONCURRENCY - 1);
    let prompt = prompt(2);
    let is_cancelled = tokio::select! {
        _ = lookup(&cache, &prompt) => false,
        () = server.script.arrived.notified() => true,
    };
    assert!(is_cancelled);
    // The notification may be stored for the next waiter, and the cancelled request may have used
    // one.
    let next = lookup(&cache, &prompt);
    let gates = async {
        loop {
            gate.notify_waiters();
            tokio::task::yield_now().await;
        }
    };
    let answered = tokio::select! {
        answered = next => answered,
        () = gates => unreachable!("the loop does not end"),
    };
    assert_eq!(answered.unwrap(), [0..1]);
}

#[tokio::test]
async fn query_contains_first_65536_blocks_only() {
    const MAX_BLOCKS: usize = 1 << 16;
    let server = Server::responding(StatusCode::OK, r#"{"ranges": [[0, 2]]}"#).await;
    let locals = (0..500_000).map(LocalHash).collect();
    let prompt = BlockHashes::from_locals(8_000_000, BlockSize::new(16).unwrap(), locals);
    assert_eq!(query(&server.config(), &prompt).await.unwrap(), [0..2]);
    let request: Value = serde_json::from_slice(&server.script.requests.lock()[0]).unwrap();
    for (list, last) in [
        ("block_hashes", prompt.locals()[MAX_BLOCKS - 1].0),
        ("sequence_hashes", prompt.sequences()[MAX_BLOCKS - 1].0),
    ] {
        let hashes = request[list].as_array().unwrap();
        assert_eq!(
            (hashes.len(), hashes.last()),
            (MAX_BLOCKS, Some(&json!(format!("{last:016x}")))),
            "{list}"
        );
    }
}

#[test]
fn invalid_settings_are_reported() {
    let url = "http://10.0.0.7:8080/lookup";
    assert!(with_url(url, 20).problems().is_empty());
    let cases = [
        (with_url("10.0.0.7:8080", 20), "url"),
        (with_url("https://cache/lookup", 20), "url"),
        (with_url("", 20), "url"),
        (with_url(url, 0), "timeout"),
    ];
    for (config, key) in cases {
        let problems = config.problems();
        assert_eq!(problems.len(), 1, "{config:?}: {problems:?}");
        assert!(
            format!("{:?}", problems[0].path).contains(key),
            "{problems:?}"
        );
    }
}
