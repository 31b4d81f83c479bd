use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::http::HeaderMap;
use axum::routing::post;
use bytes::Bytes;
use reqwest::Body;
use reqwest::header::{AUTHORIZATION, HeaderValue};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;

use super::*;
use crate::engine_client::{EngineClient, EngineUrl, ForwardedRequest};
use warmroute_core::worker::WorkerEndpoint;
use warmroute_settings::DurationSetting;

const LONG: Duration = Duration::from_secs(60);

fn config() -> EnginesConfig {
    EnginesConfig {
        timeout: DurationSetting(LONG),
        ..EnginesConfig::default()
    }
}

fn client() -> EngineClient {
    EngineClient::new(&config()).unwrap()
}

/// An engine whose connections each answer a number of requests. The next request closes the
/// connection after a delay.
struct Engine {
    url: EngineUrl,
    connections: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
}

impl Engine {
    async fn start(requests_per_connection: &'static [usize], close_delay: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = EngineUrl::http(WorkerEndpoint(listener.local_addr().unwrap()));
        let connections = Arc::<AtomicUsize>::default();
        let requests = Arc::<AtomicUsize>::default();
        let connected = connections.clone();
        let request_count = requests.clone();
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let index = connected.fetch_add(1, Ordering::SeqCst);
                let answers = requests_per_connection[index.min(requests_per_connection.len() - 1)];
                let request_count = request_count.clone();
                tokio::spawn(async move {
                    for _ in 0..answers {
                        if socket.read(&mut [0; 4096]).await.unwrap_or(0) == 0 {
                            return;
                        }
                        request_count.fetch_add(1, Ordering::SeqCst);
                        let answer =
                            "HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{\"version\":\"1\"}";
                        socket.write_all(answer.as_bytes()).await.unwrap();
                    }
                    if socket.read(&mut [0; 4096]).await.unwrap_or(0) > 0 {
                        request_count.fetch_add(1, Ordering::SeqCst);
                        tokio::time::sleep(close_delay).await;
                    }
                });
            }
        });
        Self {
            url,
            connections,
            requests,
        }
    }

    fn counts(&self) -> (usize, usize) {
        (
            self.connections.load(Ordering::SeqCst),
            self.requests.load(Ordering::SeqCst),
        )
    }
}

fn forwarded(engine: &EngineUrl, may_retry: bool) -> ForwardedRequest<'_> {
    let body = || Body::from("{}");
    let headers = HeaderMap::new();
    ForwardedRequest {
        engine,
        path: "v1/completions",
        headers,
        body: body(),
        retry_body: may_retry.then(body),
        deadline: LONG,
    }
}

#[tokio::test]
async fn connect_timeout_is_unreachable_before_the_deadline() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    let _listener = socket.listen(1).unwrap();
    // Fills the accept queue. The system then ignores the next connection, like a machine that is
    // switched off.
    let mut waiting = Vec::new();
    while let Ok(connected) = timeout(Duration::from_millis(300), TcpStream::connect(address)).await
    {
        waiting.push(connected.unwrap());
        assert!(waiting.len() < 100);
    }
    let began = Instant::now();
    let error = client()
        .version(&EngineUrl::http(WorkerEndpoint(address)))
        .await
        .unwrap_err();
    assert!(matches!(error, EngineError::Unreachable(_)), "{error:?}");
    assert!(
        began.elapsed() >= CONNECT_TIMEOUT && began.elapsed() < CONNECT_TIMEOUT * 5,
        "{:?}",
        began.elapsed()
    );
}

#[tokio::test]
async fn idle_connection_is_dropped_before_server_closes_it() {
    let engine = Engine::start(&[usize::MAX], Duration::ZERO).await;
    let client = client();
    for _ in 0..3 {
        client.version(&engine.url).await.unwrap();
    }
    assert_eq!(engine.counts(), (1, 3));
    tokio::time::pause();
    // uvicorn has not closed it yet.
    tokio::time::advance(Duration::from_millis(4900)).await;
    tokio::time::resume();
    client.version(&engine.url).await.unwrap();
    assert_eq!(engine.counts(), (2, 4));
}

#[tokio::test]
async fn idempotent_call_on_closing_connection_is_retried() {
    let engine = Engine::start(&[1, usize::MAX], Duration::ZERO).await;
    let client = client();
    client.version(&engine.url).await.unwrap();
    assert_eq!(client.version(&engine.url).await.unwrap(), "1");
    assert_eq!(engine.counts(), (2, 3), "one retry");
    // The same applies to forwarded requests.
    for (may_retry, counts) in [(true, (2, 3)), (false, (1, 2))] {
        let engine = Engine::start(&[1, usize::MAX], Duration::ZERO).await;
        client.version(&engine.url).await.unwrap();
        let answered = client.forward(forwarded(&engine.url, may_retry)).await;
        assert_eq!(
            (answered.is_ok(), engine.counts()),
            (may_retry, counts),
            "{answered:?}"
        );
    }
    // A request is retried only once.
    let engine = Engine::start(&[1, 0], Duration::ZERO).await;
    client.version(&engine.url).await.unwrap();
    assert_eq!(
        client
            .forward(forwarded(&engine.url, true))
            .await
            .unwrap_err()
            .label(),
        "unreachable"
    );
    assert_eq!(engine.counts(), (2, 3));
}

#[tokio::test]
async fn call_that_kills_engine_is_not_retried() {
    let engine = Engine::start(&[1, usize::MAX], STALE_CONNECTION_WINDOW * 2).await;
    let client = client();
    client.version(&engine.url).await.unwrap();
    assert_eq!(
        client
            .forward(forwarded(&engine.url, true))
            .await
            .unwrap_err()
            .label(),
        "unreachable"
    );
    assert_eq!(engine.counts(), (1, 2));
}

/// Starts a proxy to a server. Once frozen, existing connections stay open and silent, like
/// connections to a machine that failed.
async fn start_freezable_proxy(server: SocketAddr, frozen: watch::Receiver<bool>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut client_stream, _)) = listener.accept().await {
            let mut frozen = frozen.clone();
            let is_new = *frozen.borrow();
            tokio::spawn(async move {
                let mut server_stream = TcpStream::connect(server).await.unwrap();
                let freezes = async {
                    if is_new || frozen.wait_for(|frozen| *frozen).await.is_err() {
                        std::future::pending::<()>().await;
                    }
                };
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut client_stream, &mut server_stream) => {}
                    () = freezes => tokio::time::sleep(LONG * 2).await,
                }
            });
        }
    });
    address
}

#[tokio::test]
async fn dead_http2_connection_is_dropped_while_in_use() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap();
    let routes = Router::new().route("/tokenize", post(async || r#"{"tokens":[1]}"#));
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let serving = tonic::transport::Server::builder().add_routes(routes.into());
    tokio::spawn(async { serving.serve_with_incoming(incoming).await });
    let (freeze, frozen) = watch::channel(false);
    let url = EngineUrl::http(WorkerEndpoint(start_freezable_proxy(server, frozen).await));
    let client = EngineClient::new(&EnginesConfig {
        scheme: EngineScheme::H2c,
        ..config()
    })
    .unwrap();
    let tokenize = async |deadline| {
        client
            .tokenize(&url, Bytes::from_static(b"{}"), deadline)
            .await
    };
    assert_eq!(tokenize(LONG).await.unwrap().tokens, [1]);
    freeze.send(true).unwrap();
    let deadline = Duration::from_millis(300);
    assert!(
        matches!(tokenize(deadline).await, Err(EngineError::Timeout)),
        "the connection is silent"
    );
    let answered = async { while tokenize(deadline).await.is_err() {} };
    timeout(LONG / 2, answered)
        .await
        .expect("a new connection is opened");
}

#[tokio::test]
async fn token_is_forwarded_only_if_configured() {
    let directory = tempfile::tempdir().unwrap();
    let token_file = directory.path().join("token");
    std::fs::write(&token_file, "ours").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = EngineUrl::http(WorkerEndpoint(listener.local_addr().unwrap()));
    let echo = async |headers: HeaderMap| {
        headers
            .get(AUTHORIZATION)
            .cloned()
            .map_or(Vec::new(), |it| it.as_bytes().to_vec())
    };
    let routes = Router::new().fallback(post(echo));
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    let theirs = HeaderValue::from_static("Bearer theirs");
    for (token_file, forward_token, client_token, expected) in [
        (Some(&token_file), false, None, ""),
        (Some(&token_file), false, Some(&theirs), "Bearer theirs"),
        (Some(&token_file), true, None, "Bearer ours"),
        (Some(&token_file), true, Some(&theirs), "Bearer theirs"),
        (None, false, None, ""),
    ] {
        let config = EnginesConfig {
            token_file: token_file.cloned(),
            forward_token,
            ..config()
        };
        let client = EngineClient::new(&config).unwrap();
        let mut request = forwarded(&url, true);
        request
            .headers
            .extend(client_token.map(|value| (AUTHORIZATION, value.clone())));
        assert_eq!(
            client.forward(request).await.unwrap(),
            expected,
            "{config:?} {client_token:?}"
        );
    }
}
