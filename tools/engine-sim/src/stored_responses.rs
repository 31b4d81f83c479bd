//! Responses of the Responses API that the engine keeps in its memory, as vLLM does. Another engine
//! does not know their ids.

use std::collections::HashSet;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::SimEngine;
use super::error::OpenAiError;
use super::http;

/// Maximum number of stored responses. At the limit, all are removed.
const MAX_RESPONSES: usize = 1 << 16;

/// Ids of the stored responses.
#[derive(Debug, Default)]
pub(crate) struct StoredResponses(Mutex<HashSet<String>>);

impl StoredResponses {
    fn insert(&self, id: String) {
        let mut ids = self.0.lock();
        if ids.len() >= MAX_RESPONSES {
            ids.clear();
        }
        ids.insert(id);
    }

    fn check(&self, id: &str) -> Result<(), OpenAiError> {
        if self.0.lock().contains(id) {
            return Ok(());
        }
        Err(OpenAiError::new(
            StatusCode::NOT_FOUND,
            format!("Response with id '{id}' not found."),
        ))
    }
}

pub(crate) fn routes() -> Router<Arc<SimEngine>> {
    Router::new()
        .route("/v1/responses", post(create))
        .route("/v1/responses/{id}", get(read).delete(delete))
        .route("/v1/responses/{id}/cancel", post(cancel))
        .route("/v1/responses/{id}/input_items", get(input_items))
}

/// Computes and stores a response. The stored conversation is not part of the prompt.
async fn create(
    State(engine): State<Arc<SimEngine>>,
    uri: Uri,
    mut headers: HeaderMap,
    mut body: Bytes,
) -> Result<Response, OpenAiError> {
    let mut request: Value = serde_json::from_slice(&body)
        .map_err(|error| OpenAiError::bad_request(error.to_string()))?;
    if let Some(id) = request["previous_response_id"].as_str() {
        engine.stored_responses.check(id)?;
        request["previous_response_id"] = Value::Null;
        body = request.to_string().into();
    }
    let request_id = http::request_id(&engine, &headers);
    let value = HeaderValue::from_str(&request_id)
        .map_err(|error| OpenAiError::internal(error.to_string()))?;
    headers.insert("x-request-id", value);
    let response = http::generate(State(engine.clone()), uri, headers, body).await?;
    if request["store"] != json!(false) {
        engine.stored_responses.insert(format!("resp_{request_id}"));
    }
    Ok(response)
}

fn document(id: &str, status: &str) -> Json<Value> {
    Json(json!({"id": id, "object": "response", "status": status, "output": []}))
}

async fn read(
    State(engine): State<Arc<SimEngine>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, OpenAiError> {
    engine.stored_responses.check(&id)?;
    Ok(document(&id, "completed"))
}

async fn cancel(
    State(engine): State<Arc<SimEngine>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, OpenAiError> {
    engine.stored_responses.check(&id)?;
    Ok(document(&id, "cancelled"))
}

async fn input_items(
    State(engine): State<Arc<SimEngine>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, OpenAiError> {
    engine.stored_responses.check(&id)?;
    Ok(Json(json!({"object": "list", "data": []})))
}

async fn delete(
    State(engine): State<Arc<SimEngine>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, OpenAiError> {
    engine.stored_responses.check(&id)?;
    engine.stored_responses.0.lock().remove(&id);
    Ok(Json(
        json!({"id": id, "object": "response", "deleted": true}),
    ))
}
