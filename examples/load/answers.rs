//! Engines that answer at once: one process that listens at as many addresses as there are workers. It reads the body of a
//! request and forgets it, tokenises nothing and keeps no cache, because anything more would cost more than all that is
//! measured. How an answer looks is said in headers of the request, so that nobody has to read its body.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::serve::ListenerExt as _;
use bytes::Bytes;
use clap::Parser;
use futures_util::{StreamExt as _, stream};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// How many pieces the answer has.
pub(crate) const CHUNKS: &str = "x-answer-chunks";
/// That the answer stays open after its first piece, until its client goes.
pub(crate) const HOLD: &str = "x-answer-hold";
/// Milliseconds between two pieces.
pub(crate) const PAUSE: &str = "x-answer-pause";

/// One token of an answer, as vLLM writes it.
const CHUNK: &[u8] = b"data: {\"id\":\"chatcmpl-7b1f0c52d3a94e6f8a2b\",\"object\":\"chat.completion.chunk\",\
\"created\":1763760000,\"model\":\"qwen2.5\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" answer\"},\
\"logprobs\":null,\"finish_reason\":null}]}\n\n";
const DONE: &[u8] = b"data: {\"id\":\"chatcmpl-7b1f0c52d3a94e6f8a2b\",\"object\":\"chat.completion.chunk\",\
\"created\":1763760000,\"model\":\"qwen2.5\",\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"total_tokens\":5,\
\"completion_tokens\":1}}\n\ndata: [DONE]\n\n";

/// What the engines are told.
#[derive(Debug, Parser)]
pub(crate) struct AnswersCli {
    /// The address of the first.
    #[arg(long)]
    first: SocketAddr,
    /// How many there are, each with an address of its own.
    #[arg(long)]
    workers: usize,
}

/// The addresses of the workers: the loopback has enough for each to have its own, all with one port.
pub(crate) fn addresses(first: SocketAddr, workers: usize) -> impl Iterator<Item = SocketAddr> {
    let start = match first.ip() {
        IpAddr::V4(address) => u32::from(address),
        IpAddr::V6(_) => u32::from(Ipv4Addr::LOCALHOST),
    };
    (start..)
        .take(workers)
        .map(move |address| SocketAddr::from((Ipv4Addr::from(address), first.port())))
}

/// Serves until it is ended.
pub(crate) async fn serve(cli: AnswersCli) -> anyhow::Result<()> {
    let mut listeners = JoinSet::new();
    for address in addresses(cli.first, cli.workers) {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen on {address}"))?;
        // Or every other piece of an answer would wait for the acknowledgement of the one before.
        let listener = listener.tap_io(|connection| _ = connection.set_nodelay(true));
        listeners.spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    }
    let ended = listeners.join_next().await;
    anyhow::bail!("a listener ended: {ended:?}")
}

async fn answer(request: Request) -> Response {
    let (head, body) = request.into_parts();
    if head.method != "POST" {
        return StatusCode::OK.into_response();
    }
    let mut body = body.into_data_stream();
    while let Some(piece) = body.next().await {
        if piece.is_err() {
            return StatusCode::BAD_REQUEST.into_response();
        }
    }
    let body = match (
        head.headers.contains_key(HOLD),
        number(&head.headers, CHUNKS).unwrap_or(1),
    ) {
        (true, _) => {
            Body::from_stream(stream::once(async { piece(CHUNK) }).chain(stream::pending()))
        }
        (false, 1) => Body::from([CHUNK, DONE].concat()),
        (false, chunks) => Body::from_stream(stream::unfold(
            (
                chunks,
                number(&head.headers, PAUSE).map(Duration::from_millis),
            ),
            async |(left, pause)| next(left, pause).await,
        )),
    };
    ([("content-type", "text/event-stream; charset=utf-8")], body).into_response()
}

type Piece = Result<Bytes, Infallible>;

async fn next(left: u64, pause: Option<Duration>) -> Option<(Piece, (u64, Option<Duration>))> {
    match (left, pause) {
        (0, _) => return None,
        (_, Some(pause)) => tokio::time::sleep(pause).await,
        // What is ready at once would be sent together.
        (_, None) => tokio::task::yield_now().await,
    }
    Some((
        piece(if left == 1 { DONE } else { CHUNK }),
        (left - 1, pause),
    ))
}

fn piece(text: &'static [u8]) -> Piece {
    Ok(Bytes::from_static(text))
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}
