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
use warmroute_settings::Period;

const LONG: Duration = Duration::from_secs(60);

fn config() -> EnginesConfig {
    EnginesConfig {
        timeout: Period(LONG),
        ..EnginesConfig::default()
    }
}

fn client() -> EngineClient {
    EngineClient::new(&config()).unwrap()
}

/// An engine whose connections, one after the other, each respond to a number of requests and close
/// with the next one, after a delay.
struct Engine {
    url: EngineUrl,
    connections: Arc<AtomicUsize>,
    questions: Arc<AtomicUsize>,
}

impl Engine {
    async fn answering(each: &'static [usize], hangs_up_after: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = EngineUrl::http(WorkerEndpoint(listener.local_addr().unwrap()));
        let connections = Arc::<AtomicUsize>::default();
        let questions = Arc::<AtomicUsize>::default();
        let connected = connections.clone();
        let asked = questions.clone();
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let answers = each[connected.fetch_add(1, Ordering::SeqCst).min(each.len() - 1)];
                let asked = asked.clone();
                tokio::spawn(async move {
                    for _ in 0..answers {
                        if socket.read(&mut [0; 4096]).await.unwrap_or(0) == 0 {
                            return;
                        }
                        asked.fetch_add(1, Ordering::SeqCst);
                        let answer =
                            "HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{\"version\":\"1\"}";
                        socket.write_all(answer.as_bytes()).await.unwrap();
                    }
                    if socket.read(&mut [0; 4096]).await.unwrap_or(0) > 0 {
                        asked.fetch_add(1, Ordering::SeqCst);
                        tokio::time::sleep(hangs_up_after).await;
                    }
                });
            }
        });
        Self {
            url,
            connections,
            questions,
        }
    }

    fn seen(&self) -> (usize, usize) {
        (
            self.connections.load(Ordering::SeqCst),
            self.questions.load(Ordering::SeqCst),
        )
    }
}

fn forwarded(engine: &EngineUrl, again: bool) -> ForwardedRequest<'_> {
    let body = || Body::from("{}");
    let headers = HeaderMap::new();
    ForwardedRequest {
        engine,
        path: "v1/completions",
        headers,
        body: body(),
        retry_body: again.then(body),
        deadline: LONG,
    }
}

#[tokio::test]
async fn connect_timeout_is_unreachable_before_the_deadline() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    let _listener = socket.listen(1).unwrap();
    // As many as the accept queue holds. The system does not respond to the next one, like a
    // machine that is switched off.
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
    let engine = Engine::answering(&[usize::MAX], Duration::ZERO).await;
    let client = client();
    for _ in 0..3 {
        client.version(&engine.url).await.unwrap();
    }
    assert_eq!(engine.seen(), (1, 3));
    tokio::time::pause();
    // uvicorn has not closed it yet.
    tokio::time::advance(Duration::from_millis(4900)).await;
    tokio::time::resume();
    client.version(&engine.url).await.unwrap();
    assert_eq!(engine.seen(), (2, 4));
}

#[tokio::test]
async fn idempotent_call_on_closing_connection_is_retried() {
    let engine = Engine::answering(&[1, usize::MAX], Duration::ZERO).await;
    let client = client();
    client.version(&engine.url).await.unwrap();
    assert_eq!(client.version(&engine.url).await.unwrap(), "1");
    assert_eq!(engine.seen(), (2, 3), "and no more often than that");
    // Likewise for forwarded requests.
    for (again, seen) in [(true, (2, 3)), (false, (1, 2))] {
        let engine = Engine::answering(&[1, usize::MAX], Duration::ZERO).await;
        client.version(&engine.url).await.unwrap();
        let answered = client.forward(forwarded(&engine.url, again)).await;
        assert_eq!(
            (answered.is_ok(), engine.seen()),
            (again, seen),
            "{answered:?}"
        );
    }
    // Only one retry.
    let engine = Engine::answering(&[1, 0], Duration::ZERO).await;
    client.version(&engine.url).await.unwrap();
    assert_eq!(
        client
            .forward(forwarded(&engine.url, true))
            .await
            .unwrap_err()
            .label(),
        "unreachable"
    );
    assert_eq!(engine.seen(), (2, 3));
}

#[tokio::test]
async fn call_that_kills_engine_is_not_retried() {
    let engine = Engine::answering(&[1, usize::MAX], STALE_CONNECTION_WINDOW * 2).await;
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
    assert_eq!(engine.seen(), (1, 2));
}

/// A proxy to a server. Once frozen, existing connections stay open and silent, like those to a
/// dead machine.
async fn way_to(server: SocketAddr, frozen: watch::Receiver<bool>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut here, _)) = listener.accept().await {
            let mut frozen = frozen.clone();
            let fresh = *frozen.borrow();
            tokio::spawn(async move {
                let mut there = TcpStream::connect(server).await.unwrap();
                let freezes = async {
                    if fresh || frozen.wait_for(|frozen| *frozen).await.is_err() {
                        std::future::pending::<()>().await;
                    }
                };
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut here, &mut there) => {}
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
    let url = EngineUrl::http(WorkerEndpoint(way_to(server, frozen).await));
    let client = EngineClient::new(&EnginesConfig {
        scheme: EngineScheme::H2c,
        ..config()
    })
    .unwrap();
    let ask = async |patience| {
        client
            .tokenize(&url, Bytes::from_static(b"{}"), patience)
            .await
    };
    assert_eq!(ask(LONG).await.unwrap().tokens, [1]);
    freeze.send(true).unwrap();
    let patience = Duration::from_millis(300);
    assert!(
        matches!(ask(patience).await, Err(EngineError::Timeout)),
        "nobody is there"
    );
    let answered = async { while ask(patience).await.is_err() {} };
    timeout(LONG / 2, answered)
        .await
        .expect("another connection is made");
}

#[tokio::test]
async fn token_is_lent_only_if_configured() {
    let folder = tempfile::tempdir().unwrap();
    let token_file = folder.path().join("token");
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
    for (token_file, lend_token, brought, expected) in [
        (Some(&token_file), false, None, ""),
        (Some(&token_file), false, Some(&theirs), "Bearer theirs"),
        (Some(&token_file), true, None, "Bearer ours"),
        (Some(&token_file), true, Some(&theirs), "Bearer theirs"),
        (None, false, None, ""),
    ] {
        let config = EnginesConfig {
            token_file: token_file.cloned(),
            forward_token: lend_token,
            ..config()
        };
        let client = EngineClient::new(&config).unwrap();
        let mut request = forwarded(&url, true);
        request
            .headers
            .extend(brought.map(|value| (AUTHORIZATION, value.clone())));
        assert_eq!(
            client.forward(request).await.unwrap(),
            expected,
            "{config:?} {brought:?}"
        );
    }
}
