//! Authentication. With `--api-key`, requests must carry the key. vLLM requires it under `/v1`, and
//! SGLang everywhere except on the probe and metrics paths. SGLang's aborts require the
//! `--admin-api-key` if there is one.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use serde_json::json;

use super::SimEngine;
use super::config::ApiArgs;
use super::disaggregation::TransferProtocol;

/// Path prefixes without authentication on an SGLang engine, and the paths of the simulator itself.
const UNAUTHENTICATED_PATHS: [&str; 4] = ["/health", "/ready", "/metrics", "/sim/"];

pub(crate) async fn require_api_key(
    State(engine): State<Arc<SimEngine>>,
    request: Request,
    next: Next,
) -> Response {
    let is_sglang = engine
        .config
        .disaggregation
        .protocol()
        .is_some_and(TransferProtocol::is_sglang);
    let Some(key) = required_key(&engine.config.api, is_sglang, request.uri().path()) else {
        return next.run(request).await;
    };
    let authorization = request
        .headers()
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok());
    match authorization.and_then(|value| value.split_once(' ')) {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") && token == key => {
            next.run(request).await
        }
        _ => (
            StatusCode::UNAUTHORIZED,
            Json(json!({"error": "Unauthorized"})),
        )
            .into_response(),
    }
}

/// Returns the key that a path requires.
fn required_key<'a>(api: &'a ApiArgs, is_sglang: bool, path: &str) -> Option<&'a str> {
    let api_key = api.api_key.as_deref();
    let admin_key = api.admin_api_key.as_deref();
    if !is_sglang {
        return api_key.filter(|_| path.starts_with("/v1"));
    }
    if UNAUTHENTICATED_PATHS
        .iter()
        .any(|prefix| path.starts_with(prefix))
    {
        return None;
    }
    if path == "/abort_request" {
        admin_key.or(api_key)
    } else {
        api_key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_engine_requires_its_key_on_its_paths() {
        let api_args = |api_key: Option<&str>, admin_key: Option<&str>| ApiArgs {
            api_key: api_key.map(str::to_owned),
            admin_api_key: admin_key.map(str::to_owned),
            ..ApiArgs::default()
        };
        for (api_key, admin_key, is_sglang, path, expected) in [
            (None, None, true, "/abort_request", None),
            (Some("a"), None, false, "/v1/models", Some("a")),
            (Some("a"), None, false, "/abort_request", None),
            (Some("a"), None, true, "/v1/models", Some("a")),
            (Some("a"), None, true, "/abort_request", Some("a")),
            (Some("a"), None, true, "/health_generate", None),
            (Some("a"), None, true, "/metrics", None),
            (Some("a"), Some("b"), true, "/abort_request", Some("b")),
            (Some("a"), Some("b"), true, "/v1/completions", Some("a")),
            (None, Some("b"), true, "/abort_request", Some("b")),
            (None, Some("b"), true, "/v1/completions", None),
        ] {
            assert_eq!(
                required_key(&api_args(api_key, admin_key), is_sglang, path),
                expected,
                "{api_key:?} {admin_key:?} {is_sglang} {path}"
            );
        }
    }
}
