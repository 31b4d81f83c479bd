//! Worker that accepts any body and returns the received request with the model in the body.

use std::net::SocketAddr;

use axum::Json;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::HeaderName;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use warmroute_testbed::deployment::EngineSpec;
use xxhash_rust::xxh3::xxh3_64;

use crate::routing::bed::engine;
use crate::support::local_server::LocalServer;

/// Request header with the chunk size of a streaming response.
pub(crate) const PIECES: &str = "x-answer-in-pieces-of";

/// Server that stops on drop.
pub(crate) struct RecordingWorker {
    pub(crate) address: SocketAddr,
    _server: LocalServer,
}

impl RecordingWorker {
    pub(crate) async fn start() -> Self {
        Self::at("127.0.0.1:0").await
    }

    pub(crate) async fn at(address: &str) -> Self {
        let routes = |address| Router::new().fallback(move |request| answer(address, request));
        let server = LocalServer::start_at(address, routes).await;
        Self {
            address: server.address,
            _server: server,
        }
    }

    /// Returns an engine that publishes KV events for this worker, so that requests are routed
    /// exactly.
    pub(crate) fn engine(&self, id: u64) -> EngineSpec {
        engine(id).with_worker_fields(json!({"endpoint": self.address.to_string()}))
    }
}

async fn answer(address: SocketAddr, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let text = |(name, value): (&HeaderName, &axum::http::HeaderValue)| {
        json!([name.as_str(), value.to_str().unwrap()])
    };
    let headers: Vec<Value> = head.headers.iter().map(text).collect();
    let Ok(body) = axum::body::to_bytes(body, usize::MAX).await else {
        return axum::http::StatusCode::BAD_REQUEST.into_response();
    };
    let parsed: Value = serde_json::from_slice(&body).unwrap_or_default();
    let received = json!({
        "id": "answer-1", "object": "chat.completion", "model": parsed["model"], "method": head.method.as_str(),
        "headers": headers, "bytes": body.len(), "xxh3": fingerprint(&body), "worker": address.to_string(),
    });
    let Some(pieces) = head.headers.get(PIECES) else {
        return Json(received).into_response();
    };
    let size: usize = pieces.to_str().unwrap().parse().unwrap();
    let stream = events(&parsed["model"]);
    let pieces: Vec<_> = stream
        .as_bytes()
        .chunks(size)
        .map(|piece| Ok::<_, std::io::Error>(Bytes::copy_from_slice(piece)))
        .collect();
    let body = Body::from_stream(futures_util::stream::iter(pieces));
    ([("content-type", "text/event-stream")], body).into_response()
}

/// Returns a stream of events that each name the model.
pub(crate) fn events(model: &Value) -> String {
    let mut text = String::new();
    for at in 0..5 {
        let event = json!({
            "id": "answer-1", "object": "chat.completion.chunk", "created": 1, "model": model,
            "choices": [{"index": 0, "delta": {"content": format!("piece {at}")}, "finish_reason": null}],
        });
        text += &format!("data: {event}\n\n");
    }
    text + "data: [DONE]\n\n"
}

/// Returns the hash of a body as text, because some JSON readers lose the low bits of a u64.
pub(crate) fn fingerprint(body: &[u8]) -> String {
    format!("{:016x}", xxh3_64(body))
}

/// Returns the received values of a header.
pub(crate) fn received<'r>(report: &'r Value, name: &str) -> Vec<&'r str> {
    let pairs = report["headers"].as_array().unwrap().iter();
    pairs
        .filter(|pair| pair[0] == name)
        .map(|pair| pair[1].as_str().unwrap())
        .collect()
}
