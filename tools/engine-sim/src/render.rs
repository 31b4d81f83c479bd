//! Endpoints that return tokens instead of text, in vLLM's format: `/tokenize` and `/v1/*/render`.
//! `/version` is here too.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use warmroute_tokens::openai::ApiKind;

use super::SimEngine;
use super::error::OpenAiError;
use super::request::GenerationRequest;

pub(crate) fn routes() -> Router<Arc<SimEngine>> {
    Router::new()
        .route(
            "/version",
            get(async || {
                Json(json!({"version": concat!("engine_sim ", env!("CARGO_PKG_VERSION"))}))
            }),
        )
        .route("/tokenize", post(tokenize))
        .route("/v1/chat/completions/render", post(render))
        .route("/v1/completions/render", post(render))
}

/// Returns the tokens of one prompt or conversation. As in vLLM, truncation is ignored.
async fn tokenize(
    State(engine): State<Arc<SimEngine>>,
    body: Bytes,
) -> Result<Json<Value>, OpenAiError> {
    if engine.config.api.no_tokenize {
        return Err(OpenAiError::new(StatusCode::NOT_FOUND, "Not Found"));
    }
    let mut request: Value = serde_json::from_slice(&body)
        .map_err(|error| OpenAiError::bad_request(error.to_string()))?;
    let fields = request
        .as_object_mut()
        .ok_or_else(|| OpenAiError::bad_request("an object is expected"))?;
    let api = if fields.contains_key("messages") {
        ApiKind::ChatCompletions
    } else {
        ApiKind::Completions
    };
    if api == ApiKind::Completions && !fields.get("prompt").is_some_and(Value::is_string) {
        return Err(OpenAiError::bad_request("the prompt must be a string"));
    }
    for ignored in ["truncate_prompt_tokens", "truncation_side"] {
        fields.remove(ignored);
    }
    let body = Bytes::from(request.to_string());
    let tokens = prompts(&engine, api, body).await?.remove(0);
    let max_length = engine.config.capacity.max_length();
    Ok(Json(
        json!({"count": tokens.len(), "max_model_len": max_length, "tokens": tokens, "token_strs": null}),
    ))
}

/// Returns the rendered request: one object for a conversation, a list for completions.
async fn render(
    State(engine): State<Arc<SimEngine>>,
    uri: Uri,
    body: Bytes,
) -> Result<Json<Value>, OpenAiError> {
    if engine.config.api.no_render {
        return Err(OpenAiError::new(
            StatusCode::FORBIDDEN,
            "started without scale-out endpoints",
        ));
    }
    let api = ApiKind::from_path(uri.path().trim_end_matches("/render"));
    let api = api.ok_or_else(|| OpenAiError::new(StatusCode::NOT_FOUND, "Not Found"))?;
    let request = GenerationRequest::read(&body).map_err(OpenAiError::bad_request)?;
    engine.block_keys(&request)?;
    let rendered = |tokens: &Vec<u32>| {
        json!({
            "request_id": engine.generate_request_id(),
            "token_ids": tokens,
            "token_offsets": null,
            "features": null,
            "content_parts": null,
            "sampling_params": {"max_tokens": request.max_tokens()},
            "model": request.model,
            "stream": request.streams(),
            "cache_salt": request.cache_salt,
            "priority": 0,
            "kv_transfer_params": null,
        })
    };
    let prompts = prompts(&engine, api, body).await?;
    Ok(Json(match api {
        ApiKind::ChatCompletions => rendered(&prompts[0]),
        _ => prompts.iter().map(rendered).collect(),
    }))
}

async fn prompts(
    engine: &SimEngine,
    api: ApiKind,
    body: Bytes,
) -> Result<Vec<Vec<u32>>, OpenAiError> {
    let faults = engine.faults.current();
    if faults.hang {
        std::future::pending::<()>().await;
    }
    if let Some(status) = faults.refuse {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
        return Err(OpenAiError::new(status, "injected fault: request refused"));
    }
    let tokenizer = engine.tokenizer.clone();
    let encoded = tokio::task::spawn_blocking(move || tokenizer.prompts(api, &body)).await;
    let prompts = encoded
        .map_err(|error| OpenAiError::bad_request(error.to_string()))?
        .map_err(OpenAiError::bad_request)?;
    if prompts.is_empty() {
        Err(OpenAiError::bad_request("no prompt"))
    } else {
        Ok(prompts)
    }
}
