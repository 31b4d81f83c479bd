//! Who is let in: with `--api-key`, only those who bring it. vLLM asks for it under `/v1`, SGLang everywhere but where
//! probes and scrapers come, and its aborts need the `--admin-api-key` if there is one.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use serde_json::json;

use super::Engine;
use super::config::Surface;
use super::handover::Protocol;

/// Open on an engine of SGLang's kind, with whatever follows; and what no engine has.
const OPEN: [&str; 4] = ["/health", "/ready", "/metrics", "/sim/"];

pub(crate) async fn admit(
    State(engine): State<Arc<Engine>>,
    request: Request,
    next: Next,
) -> Response {
    let is_sglang = engine
        .config
        .handover
        .protocol()
        .is_some_and(Protocol::is_sglang);
    let Some(key) = key(&engine.config.surface, is_sglang, request.uri().path()) else {
        return next.run(request).await;
    };
    let brought = request
        .headers()
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok());
    match brought.and_then(|value| value.split_once(' ')) {
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

/// The key that a path needs.
fn key<'a>(surface: &'a Surface, is_sglang: bool, path: &str) -> Option<&'a str> {
    let (any, admin) = (surface.api_key.as_deref(), surface.admin_api_key.as_deref());
    match is_sglang {
        false => any.filter(|_| path.starts_with("/v1")),
        true if OPEN.iter().any(|open| path.starts_with(open)) => None,
        true if path == "/abort_request" => admin.or(any),
        true => any,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_engine_asks_for_its_key_where_it_does() {
        let surface = |any: Option<&str>, admin: Option<&str>| Surface {
            api_key: any.map(str::to_owned),
            admin_api_key: admin.map(str::to_owned),
            ..Surface::default()
        };
        for (any, admin, is_sglang, path, expected) in [
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
                key(&surface(any, admin), is_sglang, path),
                expected,
                "{any:?} {admin:?} {is_sglang} {path}"
            );
        }
    }
}
