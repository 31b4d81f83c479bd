//! Engines that answer at once: one process with one address per worker. It discards request
//! bodies, tokenizes nothing and caches nothing, because such work would cost more than the
//! measured work. Request headers select the shape of the answer, so that bodies need not be
//! parsed.

use std::convert::Infallible;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::serve::ListenerExt as _;
use bytes::Bytes;
use clap::Parser;
use futures_util::{StreamExt as _, stream};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use zeromq::{PubSocket, Socket as _};

/// Header: number of pieces of the answer.
pub(crate) const CHUNKS_HEADER: &str = "x-answer-chunks";
/// Header: after its first piece, the answer stays open until the client disconnects.
pub(crate) const HOLD_HEADER: &str = "x-answer-hold";
/// Header: milliseconds between two pieces.
const PAUSE_HEADER: &str = "x-answer-pause";

/// One token of an answer, in vLLM's format.
const CHUNK: &[u8] = b"data: {\"id\":\"chatcmpl-7b1f0c52d3a94e6f8a2b\",\"object\":\"chat.completion.chunk\",\
\"created\":1763760000,\"model\":\"qwen2.5\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" answer\"},\
\"logprobs\":null,\"finish_reason\":null}]}\n\n";
const DONE: &[u8] = b"data: {\"id\":\"chatcmpl-7b1f0c52d3a94e6f8a2b\",\"object\":\"chat.completion.chunk\",\
\"created\":1763760000,\"model\":\"qwen2.5\",\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"total_tokens\":5,\
\"completion_tokens\":1}}\n\ndata: [DONE]\n\n";

/// Arguments of the engines.
#[derive(Debug, Parser)]
pub(crate) struct InstantEngineArgs {
    /// Address of the first engine.
    #[arg(long)]
    first: SocketAddr,
    /// Number of engines; each has its own address.
    #[arg(long)]
    workers: usize,
    /// Port on which each engine accepts subscribers of KV events. No events are published.
    #[arg(long)]
    events_port: Option<u16>,
    /// File with the metrics page that every engine returns.
    #[arg(long)]
    metrics_page: Option<PathBuf>,
}

/// Returns the addresses of the workers: one loopback address each, with the same port.
pub(crate) fn addresses(first: SocketAddr, workers: usize) -> impl Iterator<Item = SocketAddr> {
    let start = match first.ip() {
        IpAddr::V4(address) => u32::from(address),
        IpAddr::V6(_) => u32::from(Ipv4Addr::LOCALHOST),
    };
    (start..)
        .take(workers)
        .map(move |address| SocketAddr::from((Ipv4Addr::from(address), first.port())))
}

/// Serves until the process ends.
pub(crate) async fn serve(cli: InstantEngineArgs) -> anyhow::Result<()> {
    let mut router = Router::new().fallback(answer);
    if let Some(path) = &cli.metrics_page {
        let page =
            Bytes::from(fs::read(path).with_context(|| format!("cannot read {}", path.display()))?);
        router = router.route("/metrics", get(async move || page));
    }
    let mut listeners = Vec::new();
    // A dropped publisher closes its port.
    let mut publishers = Vec::new();
    for address in addresses(cli.first, cli.workers) {
        if let Some(port) = cli.events_port {
            let mut publisher = PubSocket::new();
            publisher
                .bind(&format!("tcp://{}:{port}", address.ip()))
                .await?;
            publishers.push(publisher);
        }
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen on {address}"))?;
        // Without it, every second piece of an answer would wait for an acknowledgement.
        let listener = listener.tap_io(|connection| _ = connection.set_nodelay(true));
        listeners.push(listener);
    }
    // A client that reaches the first engine reaches all of them.
    let mut servers = JoinSet::new();
    for listener in listeners {
        let router = router.clone();
        servers.spawn(async move { axum::serve(listener, router).await });
    }
    let result = servers.join_next().await;
    anyhow::bail!("listener ended: {result:?}")
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
    let chunks = number(&head.headers, CHUNKS_HEADER).unwrap_or(1);
    let body = if head.headers.contains_key(HOLD_HEADER) {
        Body::from_stream(stream::once(async { piece(CHUNK) }).chain(stream::pending()))
    } else if chunks == 1 {
        Body::from([CHUNK, DONE].concat())
    } else {
        let pieces = RemainingPieces {
            count: chunks,
            pause: number(&head.headers, PAUSE_HEADER).map(Duration::from_millis),
        };
        Body::from_stream(stream::unfold(pieces, RemainingPieces::next))
    };
    ([("content-type", "text/event-stream; charset=utf-8")], body).into_response()
}

type BodyPiece = Result<Bytes, Infallible>;

/// Pieces of a response that are not sent yet.
struct RemainingPieces {
    count: u64,
    pause: Option<Duration>,
}

impl RemainingPieces {
    async fn next(mut self) -> Option<(BodyPiece, Self)> {
        let rest = self.count.checked_sub(1)?;
        match self.pause {
            Some(pause) => tokio::time::sleep(pause).await,
            // Yields, because pieces that are ready at the same time would be sent together.
            None => tokio::task::yield_now().await,
        }
        self.count = rest;
        Some((piece(if rest == 0 { DONE } else { CHUNK }), self))
    }
}

fn piece(text: &'static [u8]) -> BodyPiece {
    Ok(Bytes::from_static(text))
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}
