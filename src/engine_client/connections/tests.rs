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
use crate::engine_client::{EngineClient, EngineUrl, Forwarded};
use crate::settings::Period;
use crate::worker::Endpoint;

const LONG: Duration = Duration::from_secs(60);

fn config() -> EnginesConfig {
    EnginesConfig {
        deadline: Period(LONG),
        ..EnginesConfig::default()
    }
}

fn client() -> EngineClient {
    EngineClient::new(&config()).unwrap()
}

/// An engine whose connections, one after the other, each answer so many questions and hang up with the next, after a while.
struct Engine {
    url: EngineUrl,
    connections: Arc<AtomicUsize>,
    questions: Arc<AtomicUsize>,
}

impl Engine {
    async fn answering(each: &'static [usize], hangs_up_after: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = EngineUrl::http(Endpoint(listener.local_addr().unwrap()));
        let (connections, questions) =
            (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let (connected, asked) = (connections.clone(), questions.clone());
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

fn forwarded(engine: &EngineUrl, again: bool) -> Forwarded<'_> {
    let body = || Body::from("{}");
    let headers = HeaderMap::new();
    Forwarded {
        engine,
        path: "v1/completions",
        headers,
        body: body(),
        again: again.then(body),
        deadline: LONG,
    }
}

#[tokio::test]
async fn who_lets_nobody_in_is_not_there_long_before_an_answer_would_be_late() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    let _listener = socket.listen(1).unwrap();
    // As many as wait to be accepted; the system does not answer the next one, as one that is switched off.
    let mut waiting = Vec::new();
    while let Ok(connected) = timeout(Duration::from_millis(300), TcpStream::connect(address)).await
    {
        waiting.push(connected.unwrap());
        assert!(waiting.len() < 100);
    }
    let began = Instant::now();
    let error = client()
        .version(&EngineUrl::http(Endpoint(address)))
        .await
        .unwrap_err();
    assert!(matches!(error, EngineError::Unreachable(_)), "{error:?}");
    assert!(
        began.elapsed() >= CONNECT && began.elapsed() < CONNECT * 5,
        "{:?}",
        began.elapsed()
    );
}

#[tokio::test]
async fn a_connection_is_not_used_any_more_when_the_other_side_may_be_closing_it() {
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
async fn a_question_whose_connection_was_just_being_closed_is_asked_again_if_that_does_no_harm() {
    let engine = Engine::answering(&[1, usize::MAX], Duration::ZERO).await;
    let client = client();
    client.version(&engine.url).await.unwrap();
    assert_eq!(client.version(&engine.url).await.unwrap(), "1");
    assert_eq!(engine.seen(), (2, 3), "and no more often than that");
    // The same for what clients ask.
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
    // Once only.
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
async fn an_engine_that_dies_over_a_question_is_not_asked_it_again() {
    let engine = Engine::answering(&[1, usize::MAX], AT_ONCE * 2).await;
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

/// Stands before a server; once frozen, connections from before stay open and silent, as those to a machine that has gone.
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
async fn a_shared_connection_to_a_machine_that_has_gone_is_given_up_although_it_is_used_all_the_time()
 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap();
    let routes = Router::new().route("/tokenize", post(async || r#"{"tokens":[1]}"#));
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let serving = tonic::transport::Server::builder().add_routes(routes.into());
    tokio::spawn(async { serving.serve_with_incoming(incoming).await });
    let (freeze, frozen) = watch::channel(false);
    let url = EngineUrl::http(Endpoint(way_to(server, frozen).await));
    let client = EngineClient::new(&EnginesConfig {
        scheme: Scheme::H2c,
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
async fn our_token_is_lent_to_requests_without_one_only_where_the_configuration_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let token_file = folder.path().join("token");
    std::fs::write(&token_file, "ours").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = EngineUrl::http(Endpoint(listener.local_addr().unwrap()));
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
            lend_token,
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
