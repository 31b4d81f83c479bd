use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response as Answer};
use axum::routing::get;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::*;
use warmroute_settings::{ByteSize, DurationSetting};

const LONG: Duration = Duration::from_secs(20);

/// A server that ends with the test.
struct Server {
    url: EngineUrl,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn bind() -> (TcpListener, EngineUrl) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = warmroute_core::worker::WorkerEndpoint(listener.local_addr().unwrap());
    (listener, EngineUrl::http(endpoint))
}

impl Server {
    async fn routes(routes: Router) -> Self {
        let (listener, url) = bind().await;
        Self {
            url,
            task: tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() }),
        }
    }

    /// Starts a server that sends the same response to every request.
    async fn responding(status: u16, text: impl Into<String>) -> Self {
        let text = text.into();
        let answer = async move || (StatusCode::from_u16(status).unwrap(), text);
        Self::routes(Router::new().fallback(answer)).await
    }

    /// Starts a server that sends these bytes on every connection and closes it.
    async fn raw(bytes: &'static [u8]) -> Self {
        let (listener, url) = bind().await;
        let task = tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                _ = socket.read(&mut [0; 4096]).await;
                _ = socket.write_all(bytes).await;
            }
        });
        Self { url, task }
    }
}

fn client() -> EngineClient {
    EngineClient::new(&EnginesConfig {
        timeout: DurationSetting(LONG),
        ..EnginesConfig::default()
    })
    .unwrap()
}

async fn render(server: &Server) -> Result<Vec<EngineRendering>, EngineError> {
    client()
        .render(
            &server.url,
            RenderApi::Chat,
            Bytes::from_static(b"{}"),
            LONG,
        )
        .await
}

#[tokio::test]
async fn real_render_response_has_tokens_and_images() {
    let captured: Value = serde_json::from_str(include_str!(
        "../../../../tests/data/engines/render-image.json"
    ))
    .unwrap();
    let server = Server::responding(200, captured.to_string()).await;
    let rendered = render(&server).await.unwrap();
    let [EngineRendering { token_ids, objects }] = &rendered[..] else {
        panic!("{rendered:?}")
    };
    assert_eq!(
        (token_ids.len(), token_ids[0]),
        (captured["token_ids"].as_array().unwrap().len(), 151_644)
    );
    let hash = "05757fdca20857264df44a59e04830bcf59f808198a8899aa2ef4e6f9601f53e".to_owned();
    assert_eq!(
        objects[..],
        [RenderedObject {
            modality: "image".into(),
            hash,
            offset: 15,
            length: 100
        }]
    );
    assert!(
        token_ids[15..115]
            .iter()
            .all(|token| *token == token_ids[15]),
        "all tokens of an image are the same placeholder"
    );
}

#[tokio::test]
async fn completion_renderings_are_a_list() {
    let server = Server::responding(
        200,
        r#"[{"token_ids":[1,2],"cache_salt":"s"},{"token_ids":[3],"features":null}]"#,
    )
    .await;
    let rendered = render(&server).await.unwrap();
    let token_ids: Vec<_> = rendered.iter().map(|one| one.token_ids.clone()).collect();
    assert_eq!(token_ids, [vec![1, 2], vec![3]]);
}

#[tokio::test]
async fn contradictory_responses_are_unreadable() {
    let features = |hashes: Value, places: Value| {
        json!({"token_ids": [1, 2, 3], "features": {"mm_hashes": hashes, "mm_placeholders": places}}).to_string()
    };
    let place = |offset: u64, length: u64| json!([{"offset": offset, "length": length}]);
    for text in [
        String::new(),
        "null".into(),
        "{}".into(),
        r#"{"token_ids":[]}"#.into(),
        r#"{"token_ids":[-1]}"#.into(),
        r#"{"token_ids":[1.5]}"#.into(),
        r#"{"token_ids":[4294967296]}"#.into(),
        r#"{"token_ids":["1"]}"#.into(),
        r#"{"token_ids":[1]"#.into(),
        features(json!({"image": ["a", "b"]}), json!({"image": place(0, 1)})),
        features(json!({"image": ["a"]}), json!({"image": place(1, 3)})),
        features(
            json!({"image": ["a"]}),
            json!({"image": place(u64::MAX, 1)}),
        ),
        features(json!({"image": ["a"]}), json!({"audio": place(0, 1)})),
        features(json!({}), json!({"audio": place(0, 1)})),
    ] {
        let server = Server::responding(200, text.clone()).await;
        let answered = render(&server).await;
        assert!(
            matches!(answered, Err(EngineError::Unreadable(_))),
            "{text}: {answered:?}"
        );
    }
}

#[tokio::test]
async fn statuses_map_to_error_kinds() {
    let missing = r#"{"error":{"message":"The model `x` does not exist.","type":"NotFoundError"}}"#;
    // Status, body, error label, whether other engines would reject the request too, error message.
    let cases = [
        (403, "no", "not_offered", false, None),
        (404, r#"{"detail":"Not Found"}"#, "not_offered", false, None),
        (405, "", "not_offered", false, None),
        (501, "", "not_offered", false, None),
        (
            404,
            missing,
            "status",
            true,
            Some("The model `x` does not exist."),
        ),
        (400, r#"{"message":"bad"}"#, "status", true, Some("bad")),
        (
            401,
            r#"{"error":"Unauthorized"}"#,
            "status",
            false,
            Some("Unauthorized"),
        ),
        (422, "", "status", true, None),
        (500, "boom", "status", false, None),
        (204, "", "status", false, None),
        (302, "", "status", false, None),
    ];
    for (status, text, label, is_rejection, error_message) in cases {
        let error = render(&Server::responding(status, text).await)
            .await
            .unwrap_err();
        let message = if let EngineError::Status { message, .. } = &error {
            message.clone()
        } else {
            None
        };
        assert_eq!(
            (error.label(), error.is_rejection(), message.as_deref()),
            (label, is_rejection, error_message),
            "{status} {text}"
        );
        assert!(
            !error.to_string().contains("bad") && !error.to_string().contains("exist"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn oversized_response_is_not_read_completely() {
    let endless = async || {
        let chunk = || Ok::<_, std::io::Error>(Bytes::from_static(&[b' '; 999]));
        Body::from_stream(tokio_stream::iter(std::iter::repeat_with(chunk)))
    };
    let server = Server::routes(Router::new().fallback(endless)).await;
    let config = EnginesConfig {
        timeout: DurationSetting(LONG),
        max_response_size: ByteSize::kib(64),
        ..EnginesConfig::default()
    };
    let error = EngineClient::new(&config)
        .unwrap()
        .metrics(&server.url)
        .await
        .unwrap_err();
    assert!(matches!(error, EngineError::TooLarge(65_536)), "{error}");
    // An error response is not read completely either.
    let refusing = async || {
        let chunk = || Ok::<_, std::io::Error>(Bytes::from_static(&[b'x'; 999]));
        (
            StatusCode::BAD_REQUEST,
            Body::from_stream(tokio_stream::iter(std::iter::repeat_with(chunk))),
        )
    };
    let server = Server::routes(Router::new().fallback(refusing)).await;
    assert_eq!(
        client().version(&server.url).await.unwrap_err().label(),
        "status"
    );
}

#[tokio::test]
async fn call_ends_at_the_deadline() {
    let stalls = async || {
        let beginning = tokio_stream::once(Ok::<_, std::io::Error>(Bytes::from_static(b"{")));
        Body::from_stream(tokio_stream::StreamExt::chain(
            beginning,
            tokio_stream::pending(),
        ))
    };
    let silent = Server::routes(Router::new().fallback(std::future::pending::<()>)).await;
    let stalled = Server::routes(Router::new().fallback(stalls)).await;
    for server in [silent, stalled] {
        let error = client()
            .tokenize(
                &server.url,
                Bytes::from_static(b"{}"),
                Duration::from_millis(50),
            )
            .await
            .unwrap_err();
        assert!(matches!(error, EngineError::Timeout), "{error}");
    }
}

#[tokio::test]
async fn failed_connections_are_unreachable() {
    let cases: [&'static [u8]; 5] = [
        b"",
        b"\0\0garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{\"version\":",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
    ];
    for bytes in cases {
        let error = client()
            .version(&Server::raw(bytes).await.url)
            .await
            .unwrap_err();
        assert!(matches!(error, EngineError::Unreachable(_)), "{error}");
    }
    let (_, free) = bind().await;
    let error = client().version(&free).await.unwrap_err();
    assert!(
        matches!(&error, EngineError::Unreachable(text) if text.contains("refused")),
        "{error}"
    );
}

#[tokio::test]
async fn calls_beyond_the_limit_are_busy() {
    let server = Server::routes(Router::new().fallback(std::future::pending::<()>)).await;
    let config = EnginesConfig {
        timeout: DurationSetting::millis(100),
        max_concurrency: 1,
        ..EnginesConfig::default()
    };
    let client = EngineClient::new(&config).unwrap();
    let (one, two) = tokio::join!(client.health(&server.url), client.health(&server.url));
    assert_eq!(
        [one.unwrap_err().label(), two.unwrap_err().label()],
        ["timeout", "busy"]
    );
    assert_eq!(
        client.health(&server.url).await.unwrap_err().label(),
        "timeout"
    );
}

#[tokio::test]
async fn rejected_token_is_reloaded_from_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, "first").unwrap();
    let wanted = Arc::new(parking_lot::Mutex::new("first".to_owned()));
    let guard = wanted.clone();
    let check = async move |headers: HeaderMap| -> Answer {
        let brought = headers
            .get("authorization")
            .and_then(|value| value.to_str().ok());
        match brought == Some(&format!("Bearer {}", guard.lock())) {
            true => r#"{"version":"1"}"#.into_response(),
            false => StatusCode::UNAUTHORIZED.into_response(),
        }
    };
    let server = Server::routes(Router::new().route("/version", get(check))).await;
    let config = EnginesConfig {
        token_file: Some(path.clone()),
        timeout: DurationSetting(LONG),
        ..EnginesConfig::default()
    };
    let client = EngineClient::new(&config).unwrap();
    assert_eq!(client.version(&server.url).await.unwrap(), "1");
    // The file is reloaded as soon as the engine rejects the old token.
    std::fs::write(&path, "second").unwrap();
    *wanted.lock() = "second".into();
    assert_eq!(client.version(&server.url).await.unwrap(), "1");
    *wanted.lock() = "third".into();
    let error = client.version(&server.url).await.unwrap_err();
    assert!(error.is_unauthorized(), "{error}");
    assert!(!format!("{client:?} {error:?}").contains("second"));
}

#[tokio::test]
async fn each_call_uses_its_path() {
    let answer = async |uri: Uri, request: Request| -> String {
        let sources = json!({
            "1": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5558", "topic": "t"},
            "0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
                  "replay_endpoint": "tcp://*:5657", "buffer_steps": 10000, "topic": ""},
            "10": {"enable_kv_cache_events": false, "publisher": "null", "endpoint": "tcp://*:5567"},
        });
        match (request.method().as_str(), uri.path()) {
            ("GET", "/v1/models") => {
                json!({"object": "list", "data": [{"id": "m", "root": "/models/m"}]}).to_string()
            }
            ("GET", "/version") => r#"{"version":"0.32.0"}"#.into(),
            ("GET", "/kv_event_sources") => sources.to_string(),
            ("GET", "/metrics") => {
                "vllm:cache_config_info{block_size=\"16\",engine=\"0\"} 1.0\n".into()
            }
            ("POST", "/tokenize") => {
                r#"{"count":2,"max_model_len":8192,"tokens":[5,6],"token_strs":null}"#.into()
            }
            ("POST", "/v1/messages/render") => r#"{"token_ids":[7]}"#.into(),
            _ => "{}".into(),
        }
    };
    let server = Server::routes(Router::new().fallback(answer)).await;
    let client = client();
    let url = &server.url;
    assert_eq!(client.models(url).await.unwrap()[0].id, "m");
    assert_eq!(client.version(url).await.unwrap(), "0.32.0");
    assert_eq!(
        client.metrics(url).await.unwrap().caches()[0].block_size,
        Some(16)
    );
    let tokenized = client
        .tokenize(url, Bytes::from_static(b"{}"), LONG)
        .await
        .unwrap();
    assert_eq!(tokenized.tokens, [5, 6]);
    let rendered = client
        .render(url, RenderApi::Messages, Bytes::from_static(b"{}"), LONG)
        .await
        .unwrap();
    assert_eq!(rendered[0].token_ids, [7]);
    let sources = client.kv_event_sources(url).await.unwrap();
    let parsed: Vec<_> = sources
        .iter()
        .map(|of| (of.rank, of.enabled, of.endpoint.as_str(), of.topic.as_str()))
        .collect();
    assert_eq!(
        parsed,
        [
            (0, true, "tcp://*:5557", ""),
            (1, true, "tcp://*:5558", "t"),
            (10, false, "tcp://*:5567", "")
        ]
    );
    assert_eq!(sources[0].replay_endpoint.as_deref(), Some("tcp://*:5657"));
}

#[test]
fn invalid_settings_are_reported() {
    const MISSING: &str = "/nowhere/to/be/found";
    assert!(EnginesConfig::default().problems().is_empty());
    type ConfigChange = fn(&mut EnginesConfig);
    let cases: [(ConfigChange, &str); 6] = [
        (
            |config| config.timeout = DurationSetting::millis(0),
            "timeout",
        ),
        (|config| config.max_concurrency = 0, "max_concurrency"),
        (
            |config| config.max_response_size = ByteSize(0),
            "max_response_size",
        ),
        (|config| config.forward_token = true, "forward_token"),
        (
            |config| config.token_file = Some(MISSING.into()),
            "token_file",
        ),
        (|config| config.ca_file = Some(MISSING.into()), "ca_file"),
    ];
    for (change, key) in cases {
        let mut config = EnginesConfig::default();
        change(&mut config);
        let problems = config.problems();
        assert_eq!(problems.len(), 1, "{key}");
        assert_eq!(
            problems[0].path,
            [warmroute_settings::PathStep::Key(key.into())]
        );
    }
}

/// Id of the thread that parsed the value.
struct ParserThread(std::thread::ThreadId);

impl<'de> serde::Deserialize<'de> for ParserThread {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        serde::de::IgnoredAny::deserialize(deserializer)?;
        Ok(Self(std::thread::current().id()))
    }
}

#[tokio::test]
async fn large_responses_are_parsed_on_blocking_threads() {
    let caller = std::thread::current().id();
    for (length, is_other_thread) in [(10, false), (LARGE_ANSWER + 1, true)] {
        let server = Server::responding(200, format!("\"{}\"", "x".repeat(length))).await;
        let ParserThread(parser) = client().get(&server.url, "x").await.unwrap();
        assert_eq!(parser != caller, is_other_thread, "{length}");
    }
}
