//! The endpoints that answer with tokens instead of words, in vLLM's shapes: `/tokenize`, `/v1/*/render`, `/version`.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use warmroute::openai::Api;

use super::Engine;
use super::ask::Ask;
use super::http::{Refusal, keys};

pub(crate) fn routes() -> Router<Arc<Engine>> {
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

/// The tokens of one prompt or conversation. As in vLLM it knows nothing of truncation.
async fn tokenize(State(engine): State<Arc<Engine>>, body: Bytes) -> Result<Json<Value>, Refusal> {
    if engine.config.surface.no_tokenize {
        return Err(Refusal::new(StatusCode::NOT_FOUND, "Not Found"));
    }
    let mut request: Value =
        serde_json::from_slice(&body).map_err(|error| Refusal::bad(error.to_string()))?;
    let fields = request
        .as_object_mut()
        .ok_or_else(|| Refusal::bad("an object is expected"))?;
    let api = if fields.contains_key("messages") {
        Api::ChatCompletions
    } else {
        Api::Completions
    };
    if api == Api::Completions && !fields.get("prompt").is_some_and(Value::is_string) {
        return Err(Refusal::bad("the prompt must be a string"));
    }
    for ignored in ["truncate_prompt_tokens", "truncation_side"] {
        fields.remove(ignored);
    }
    let body = Bytes::from(request.to_string());
    let tokens = prompts(&engine, api, body).await?.remove(0);
    let longest = engine.config.capacity.longest();
    Ok(Json(
        json!({"count": tokens.len(), "max_model_len": longest, "tokens": tokens, "token_strs": null}),
    ))
}

/// What the engine would be asked to generate from: one object for a conversation, a list for completions.
async fn render(
    State(engine): State<Arc<Engine>>,
    uri: Uri,
    body: Bytes,
) -> Result<Json<Value>, Refusal> {
    if engine.config.surface.no_render {
        return Err(Refusal::new(
            StatusCode::FORBIDDEN,
            "started without scale-out endpoints",
        ));
    }
    let api = Api::of_path(uri.path().trim_end_matches("/render"));
    let api = api.ok_or_else(|| Refusal::new(StatusCode::NOT_FOUND, "Not Found"))?;
    let ask = Ask::read(&body).map_err(Refusal::bad)?;
    keys(&engine, &ask)?;
    let one = |tokens: &Vec<u32>| {
        json!({
            "request_id": engine.next_name(),
            "token_ids": tokens,
            "token_offsets": null,
            "features": null,
            "content_parts": null,
            "sampling_params": {"max_tokens": ask.max_tokens()},
            "model": ask.model,
            "stream": ask.streams(),
            "cache_salt": ask.cache_salt,
            "priority": 0,
            "kv_transfer_params": null,
        })
    };
    let prompts = prompts(&engine, api, body).await?;
    Ok(Json(match api {
        Api::ChatCompletions => one(&prompts[0]),
        _ => prompts.iter().map(one).collect(),
    }))
}

async fn prompts(engine: &Engine, api: Api, body: Bytes) -> Result<Vec<Vec<u32>>, Refusal> {
    let faults = engine.mood.faults();
    if faults.hang {
        std::future::pending::<()>().await;
    }
    if let Some(status) = faults.refuse {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
        return Err(Refusal::new(status, "told to refuse"));
    }
    let vocabulary = engine.tokens.clone();
    let encoded = tokio::task::spawn_blocking(move || vocabulary.prompts(api, &body)).await;
    let prompts = encoded
        .map_err(|error| Refusal::bad(error.to_string()))?
        .map_err(Refusal::bad)?;
    if prompts.is_empty() {
        Err(Refusal::bad("no prompt"))
    } else {
        Ok(prompts)
    }
}
