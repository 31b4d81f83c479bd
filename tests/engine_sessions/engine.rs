//! A server with SGLang's two session endpoints, which remembers what it was told and refuses what SGLang refuses.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path as UrlPath, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{Json, Router as Routes};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

const DEADLINE: Duration = Duration::from_secs(20);

/// How an engine answers.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Manner {
    /// As SGLang does.
    Well,
    /// Not at all.
    Never,
    /// As SGLang does, once it is released.
    Held,
    /// As SGLang does with `--api-key secret`.
    Protected,
}

#[derive(Default)]
pub(crate) struct Told {
    calls: Vec<(String, Value)>,
    pub(crate) open: BTreeSet<String>,
    pub(crate) refused: usize,
    pub(crate) released: bool,
}

/// An engine; it ends by drop.
pub(crate) struct Engine {
    pub(crate) address: SocketAddr,
    pub(crate) told: Arc<watch::Sender<Told>>,
    task: JoinHandle<()>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type Shared = (Arc<watch::Sender<Told>>, Manner);

async fn endpoint(
    State((told, manner)): State<Shared>,
    UrlPath(path): UrlPath<String>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Response {
    let id = body["session_id"].as_str().unwrap().to_owned();
    let is_known = headers
        .get("authorization")
        .is_some_and(|value| value == "Bearer secret");
    if manner == Manner::Protected && !is_known {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let mut answer = StatusCode::NOT_FOUND.into_response();
    told.send_modify(|told| {
        answer = match path.as_str() {
            "open_session" if told.open.insert(id.clone()) => Json(json!(id)).into_response(),
            "open_session" => {
                told.refused += 1;
                StatusCode::BAD_REQUEST.into_response()
            }
            "close_session" => {
                told.open.remove(&id);
                StatusCode::OK.into_response()
            }
            _ => StatusCode::NOT_FOUND.into_response(),
        };
        told.calls.push((path, body));
    });
    match manner {
        Manner::Well | Manner::Protected => answer,
        Manner::Held => {
            told.subscribe()
                .wait_for(|told| told.released)
                .await
                .unwrap();
            answer
        }
        Manner::Never => std::future::pending().await,
    }
}

impl Engine {
    pub(crate) async fn start(manner: Manner) -> Self {
        let told = Arc::new(watch::Sender::new(Told::default()));
        let routes = Routes::new()
            .route("/{path}", post(endpoint))
            .with_state((told.clone(), manner));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        Self {
            address,
            told,
            task,
        }
    }

    /// Waits until the engine was told so many things.
    pub(crate) async fn heard(&self, count: usize) -> Vec<(String, Value)> {
        let mut told = self.told.subscribe();
        let heard =
            tokio::time::timeout(DEADLINE, told.wait_for(|told| told.calls.len() >= count)).await;
        assert!(
            heard.is_ok(),
            "the engine heard {:?}, not {count} calls",
            self.calls()
        );
        self.calls()
    }

    pub(crate) fn calls(&self) -> Vec<(String, Value)> {
        self.told.borrow().calls.clone()
    }
}

pub(crate) fn open(id: &str) -> (String, Value) {
    (
        "open_session".to_owned(),
        json!({ "capacity_of_str_len": 65_536, "session_id": id }),
    )
}

pub(crate) fn close(id: &str) -> (String, Value) {
    ("close_session".to_owned(), json!({ "session_id": id }))
}
