//! Server with SGLang's two session endpoints. Records the calls, and rejects the same calls as
//! SGLang.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{Path as UrlPath, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{Json, Router as Routes};
use serde_json::{Value, json};
use tokio::sync::watch;
use warmroute_testbed::ports::PATIENCE;

use crate::support::local_server::LocalServer;

/// Behaviour of an engine.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum EngineBehaviour {
    /// Responds as SGLang does.
    Well,
    /// Never responds.
    Never,
    /// Responds as SGLang does, once it is released.
    Held,
    /// Responds as SGLang does with `--api-key secret`.
    Protected,
}

#[derive(Default)]
pub(crate) struct SessionCalls {
    calls: Vec<(String, Value)>,
    pub(crate) open: BTreeSet<String>,
    pub(crate) refused: usize,
    pub(crate) released: bool,
}

/// An engine that stops on drop.
pub(crate) struct SessionEngine {
    pub(crate) address: SocketAddr,
    pub(crate) state: Arc<watch::Sender<SessionCalls>>,
    _server: LocalServer,
}

type EngineState = (Arc<watch::Sender<SessionCalls>>, EngineBehaviour);

async fn endpoint(
    State((state, manner)): State<EngineState>,
    UrlPath(path): UrlPath<String>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Response {
    let id = body["session_id"].as_str().unwrap().to_owned();
    let is_known = headers
        .get("authorization")
        .is_some_and(|value| value == "Bearer secret");
    if manner == EngineBehaviour::Protected && !is_known {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let mut answer = StatusCode::NOT_FOUND.into_response();
    state.send_modify(|state| {
        answer = match path.as_str() {
            "open_session" if state.open.insert(id.clone()) => Json(json!(id)).into_response(),
            "open_session" => {
                state.refused += 1;
                StatusCode::BAD_REQUEST.into_response()
            }
            "close_session" => {
                state.open.remove(&id);
                StatusCode::OK.into_response()
            }
            _ => StatusCode::NOT_FOUND.into_response(),
        };
        state.calls.push((path, body));
    });
    match manner {
        EngineBehaviour::Well | EngineBehaviour::Protected => answer,
        EngineBehaviour::Held => {
            state
                .subscribe()
                .wait_for(|state| state.released)
                .await
                .unwrap();
            answer
        }
        EngineBehaviour::Never => std::future::pending().await,
    }
}

impl SessionEngine {
    pub(crate) async fn start(manner: EngineBehaviour) -> Self {
        let state = Arc::new(watch::Sender::new(SessionCalls::default()));
        let routes = Routes::new()
            .route("/{path}", post(endpoint))
            .with_state((state.clone(), manner));
        let server = LocalServer::start(routes).await;
        Self {
            address: server.address,
            state,
            _server: server,
        }
    }

    /// Waits until the engine has received this many calls. Returns all calls.
    pub(crate) async fn received_calls(&self, count: usize) -> Vec<(String, Value)> {
        let mut state = self.state.subscribe();
        let received_calls =
            tokio::time::timeout(PATIENCE, state.wait_for(|state| state.calls.len() >= count))
                .await;
        assert!(
            received_calls.is_ok(),
            "the engine received {:?}, not {count} calls",
            self.calls()
        );
        self.calls()
    }

    pub(crate) fn calls(&self) -> Vec<(String, Value)> {
        self.state.borrow().calls.clone()
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
