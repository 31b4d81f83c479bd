//! Worker with known responses: the requested number of events, sent at full speed or one per
//! permit of the test.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::future::join_all;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::support::local_server::LocalServer;

/// Request header with the number of events in a streaming response.
pub(crate) const EVENTS: &str = "x-events";
/// Request header with the size of a unary response in bytes.
pub(crate) const BYTES: &str = "x-bytes";
/// Request header that makes each event wait for a permit.
pub(crate) const PACED: &str = "x-paced";

/// Server that stops on drop.
pub(crate) struct BurstEngine {
    id: u64,
    pub(crate) address: SocketAddr,
    /// Permits for the events of paced responses.
    pub(crate) event_permits: Arc<Semaphore>,
    /// Number of responses in progress.
    pub(crate) open: Arc<AtomicUsize>,
    _server: LocalServer,
}

impl BurstEngine {
    pub(crate) async fn start(id: u64) -> Self {
        let event_permits = Arc::new(Semaphore::new(0));
        let open = Arc::default();
        let gate = Arc::clone(&event_permits);
        let count = Arc::clone(&open);
        let app = Router::new().fallback(async move |request: Request| {
            let (head, body) = request.into_parts();
            _ = axum::body::to_bytes(body, usize::MAX).await.unwrap();
            let mut response = answer(&head.headers, &gate, &count);
            response.headers_mut().insert("x-engine-id", id.into());
            response
        });
        let server = LocalServer::start(app).await;
        Self {
            id,
            address: server.address,
            event_permits,
            open,
            _server: server,
        }
    }

    /// Starts engines with the ids from 1.
    pub(crate) async fn start_all(count: u64) -> Vec<Self> {
        join_all((1..=count).map(Self::start)).await
    }

    /// Returns the entries of engines for the workers file.
    pub(crate) fn entries(engines: &[Self]) -> Value {
        engines.iter().map(Self::entry).collect()
    }

    /// Returns the addresses of engines.
    pub(crate) fn addresses(engines: &[Self]) -> Vec<SocketAddr> {
        engines.iter().map(|engine| engine.address).collect()
    }

    /// Lets each engine send this number of paced events.
    pub(crate) fn permit(engines: &[Self], events: usize) {
        for engine in engines {
            engine.event_permits.add_permits(events);
        }
    }

    /// Removes all unused permits.
    pub(crate) fn hold(&self) {
        self.event_permits
            .forget_permits(self.event_permits.available_permits());
    }

    /// Returns the entry for the workers file, without an event source.
    pub(crate) fn entry(&self) -> Value {
        json!({"id": self.id, "endpoint": self.address.to_string()})
    }
}

/// Returns one event of a response.
fn event(at: usize) -> String {
    format!(
        "data: {{\"index\":{at},\"text\":\"{}\"}}\n\n",
        "token ".repeat(1 + at % 40)
    )
}

/// Returns a whole streaming response.
pub(crate) fn whole(events: usize) -> String {
    (0..events)
        .map(event)
        .chain(["data: [DONE]\n\n".to_owned()])
        .collect()
}

/// Returns a unary response.
pub(crate) fn piece(bytes: usize) -> String {
    "0123456789abcdef".chars().cycle().take(bytes).collect()
}

struct OpenRequest(Arc<AtomicUsize>);

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn answer(
    headers: &HeaderMap,
    event_permits: &Arc<Semaphore>,
    open: &Arc<AtomicUsize>,
) -> Response {
    let parameter = |name: &str| {
        headers
            .get(name)
            .map(|value| value.to_str().unwrap().parse::<usize>().unwrap())
    };
    if let Some(bytes) = parameter(BYTES) {
        return piece(bytes).into_response();
    }
    let events = parameter(EVENTS).unwrap_or(1);
    let paced = headers.contains_key(PACED).then(|| event_permits.clone());
    open.fetch_add(1, Ordering::SeqCst);
    let open = OpenRequest(open.clone());
    let body = stream::unfold((0, open), move |(at, open)| {
        let paced = paced.clone();
        async move {
            if at > events {
                return None;
            }
            if let Some(event_permits) = paced {
                event_permits.acquire().await.unwrap().forget();
            }
            let text = if at == events {
                "data: [DONE]\n\n".to_owned()
            } else {
                event(at)
            };
            Some((Ok::<_, Infallible>(Bytes::from(text)), (at + 1, open)))
        }
    });
    let content = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")];
    (StatusCode::OK, content, Body::from_stream(body)).into_response()
}

/// Sends a paced request. Returns the response after its first event. [`is_whole`] lets the workers
/// send the rest.
pub(crate) async fn begin(
    request: reqwest::RequestBuilder,
    workers: &[BurstEngine],
) -> (reqwest::Response, Vec<u8>) {
    workers.iter().for_each(BurstEngine::hold);
    let mut response = request.send().await.unwrap();
    BurstEngine::permit(workers, 1);
    let first = response.chunk().await.unwrap().unwrap();
    (response, first.to_vec())
}

/// Lets the workers send the rest of a response of 50 events. Returns true if all of it arrives.
pub(crate) async fn is_whole(
    (mut response, mut text): (reqwest::Response, Vec<u8>),
    workers: &[BurstEngine],
) -> bool {
    BurstEngine::permit(workers, 1_000);
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) => text.extend(chunk),
            Ok(None) => return text == whole(50).as_bytes(),
            Err(_) => return false,
        }
    }
}
