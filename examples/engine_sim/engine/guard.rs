//! Who is let in: with `--api-key`, only those who bring it, and as vLLM has it only under `/v1`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use serde_json::json;

use super::Engine;

pub(crate) async fn admit(State(engine): State<Arc<Engine>>, request: Request, next: Next) -> Response {
    let Some(key) = engine.config.surface.api_key.as_deref().filter(|_| request.uri().path().starts_with("/v1")) else {
        return next.run(request).await;
    };
    let brought = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    match brought.and_then(|value| value.split_once(' ')) {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") && token == key => next.run(request).await,
        _ => (StatusCode::UNAUTHORIZED, Json(json!({"error": "Unauthorized"}))).into_response(),
    }
}
