//! Worker that accepts any body and returns the received request.

use std::net::{Ipv4Addr, SocketAddr};

use axum::extract::Request;
use axum::http::HeaderName;
use axum::response::IntoResponse;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::AbortHandle;
use xxhash_rust::xxh3::xxh3_64;

/// Server that stops on drop.
pub(crate) struct EchoEngine {
    pub(crate) id: u64,
    pub(crate) address: SocketAddr,
    task: AbortHandle,
}

impl EchoEngine {
    pub(crate) async fn start(id: u64) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = Router::new().fallback(move |request| answer(id, request));
        let task =
            tokio::spawn(async move { axum::serve(listener, app).await.unwrap() }).abort_handle();
        Self { id, address, task }
    }

    /// Returns the entry for the workers file, without an event source.
    pub(crate) fn entry(&self) -> Value {
        json!({"id": self.id, "endpoint": self.address.to_string()})
    }
}

impl Drop for EchoEngine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(id: u64, request: Request) -> impl IntoResponse {
    let (head, body) = request.into_parts();
    let text = |(name, value): (&HeaderName, &axum::http::HeaderValue)| {
        json!([name.as_str(), value.to_str().unwrap()])
    };
    let headers: Vec<Value> = head.headers.iter().map(text).collect();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let received = json!({
        "method": head.method.as_str(), "path": head.uri.path(), "headers": headers,
        "bytes": body.len(), "xxh3": fingerprint(&body),
    });
    ([("x-engine-id", id.to_string())], Json(received))
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
