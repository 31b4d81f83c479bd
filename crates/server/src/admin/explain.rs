//! `POST /debug/explain`: explains the route that would be chosen for a request now. The request is
//! an object with the path, headers and body that Envoy would send, or the body alone. It passes
//! the same preprocessing. It is routed without being admitted, so nothing is booked.

pub mod summary;
pub mod table;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use axum::Json;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, post};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::Semaphore;
use tracing::debug;
use warmroute_core::router::RouteExplanation;

use super::AdminState;
use crate::request::{RequestBody, RequestPreprocessor};

/// Path of the page.
pub const EXPLAIN_PATH: &str = "/debug/explain";
const CHAT_PATH: &str = "/v1/chat/completions";
const COMPLETIONS_PATH: &str = "/v1/completions";
/// Maximum growth of a body by JSON escapes. An explain request may be longer than its body.
const MAX_ESCAPE_FACTOR: usize = 2;
/// Space for the other fields of an explain request, such as the headers.
const ENVELOPE_BYTES: usize = 1 << 20;
/// Maximum number of concurrent explain requests. Each may hold several times the longest body.
const MAX_CONCURRENT: usize = 2;
/// Timeout for receiving an explain request.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// Components that explain a route.
pub struct ExplainContext {
    /// Preprocessor in use.
    pub preprocessor: Arc<RequestPreprocessor>,
    /// Maximum body size in bytes.
    pub body_limit: usize,
}

/// Shared context. The pages are served before the tokenizers are loaded, so it is set later.
pub type SharedExplainContext = Arc<ArcSwapOption<ExplainContext>>;

impl ExplainContext {
    /// Returns the maximum size of an explain request in bytes.
    fn max_request_bytes(&self) -> usize {
        self.body_limit
            .saturating_mul(MAX_ESCAPE_FACTOR)
            .saturating_add(ENVELOPE_BYTES)
    }
}

/// Body of an explain request.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExplainRequest {
    /// HTTP path; by default guessed from the body.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// HTTP headers.
    pub headers: BTreeMap<String, String>,
    /// Pool selected by the authority or the metadata of the gRPC call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<Arc<str>>,
    /// Request body, as JSON text in a string or as a JSON value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body: Option<Box<RawValue>>,
    /// Request body as bytes, if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Vec<u8>>,
    /// True if the text form contains all workers with every term of their costs.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub table: bool,
}

impl ExplainRequest {
    /// Creates an explain request for a body that may be any bytes.
    pub fn new(
        path: Option<String>,
        headers: BTreeMap<String, String>,
        body: Vec<u8>,
    ) -> serde_json::Result<Self> {
        let (body, bytes) = match String::from_utf8(body) {
            Ok(text) => (Some(serde_json::value::to_raw_value(&text)?), None),
            Err(error) => (None, Some(error.into_bytes())),
        };
        Ok(Self {
            path,
            headers,
            pool: None,
            body,
            bytes,
            table: false,
        })
    }

    /// Returns the text form of an explanation.
    pub fn render(&self, explanation: &RouteExplanation) -> String {
        if self.table {
            table::render(explanation)
        } else {
            summary::render(explanation)
        }
    }

    /// Returns the raw body; `None` if there is none.
    pub fn body(&self) -> serde_json::Result<Option<Bytes>> {
        let Some(body) = &self.body else {
            return Ok(self.bytes.clone().map(Bytes::from));
        };
        let text = if body.get().starts_with('"') {
            serde_json::from_str(body.get())?
        } else {
            body.get().to_owned()
        };
        Ok(Some(Bytes::from(text)))
    }

    /// Converts the bytes to the [`RequestBody`] that Envoy would send.
    pub fn to_body(body: Bytes, limit: usize) -> RequestBody {
        match body.len() {
            0 => RequestBody::Absent,
            length if length > limit => RequestBody::TooLarge {
                received: body,
                bytes: length as u64,
            },
            _ => RequestBody::Whole(body),
        }
    }

    /// Returns a header by its case-insensitive name.
    pub fn header(&self, name: &str) -> Option<Cow<'_, str>> {
        let found = self
            .headers
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name));
        found.map(|(_, value)| Cow::Borrowed(value.as_str()))
    }

    /// Returns the pool whose workers the request may use.
    pub fn resolve_pool(&self, preprocessor: &RequestPreprocessor, path: &str) -> Option<Arc<str>> {
        self.pool
            .clone()
            .or_else(|| preprocessor.pool_of(path, &|name: &str| self.header(name)))
    }

    /// Rewrites the model in the body as for a real request. The second value is the requested
    /// model, if it was rewritten.
    pub fn rewrite_model(
        &self,
        preprocessor: &RequestPreprocessor,
        pool: Option<&str>,
        body: RequestBody,
    ) -> (RequestBody, Option<String>) {
        let RequestBody::Whole(bytes) = &body else {
            return (body, None);
        };
        match preprocessor.rewrite_model(
            pool,
            &|name: &str| self.header(name),
            bytes,
            rand::random(),
        ) {
            Some(edit) => {
                let requested = edit.model_rename.map(|rename| rename.requested);
                (RequestBody::Whole(edit.body), requested)
            }
            None => (body, None),
        }
    }

    /// Returns the path, or a guess from the body.
    pub fn resolve_path(&self, body: &[u8]) -> &str {
        self.path.as_deref().unwrap_or_else(|| guess_path(body))
    }
}

/// Fields that distinguish request bodies from explain requests.
#[derive(Deserialize)]
struct BodyShape {
    messages: Option<IgnoredAny>,
    prompt: Option<IgnoredAny>,
    body: Option<IgnoredAny>,
    bytes: Option<IgnoredAny>,
}

impl BodyShape {
    /// Returns whether the object is the body of a chat or completion request. An explain request
    /// with unknown fields is not.
    fn is_plain_body(&self) -> bool {
        (self.messages.is_some() || self.prompt.is_some())
            && self.body.is_none()
            && self.bytes.is_none()
    }
}

/// Guesses the API path from the body.
fn guess_path(body: &[u8]) -> &'static str {
    match serde_json::from_slice(body) {
        Ok(BodyShape {
            messages: None,
            prompt: Some(_),
            ..
        }) => COMPLETIONS_PATH,
        _ => CHAT_PATH,
    }
}

/// Returns the handler of the page. Its concurrency is limited so that it does not compete with
/// routing.
pub(super) fn explain_route() -> MethodRouter<AdminState> {
    let permits = Arc::new(Semaphore::new(MAX_CONCURRENT));
    post(
        move |State(admin): State<AdminState>, request: Request| async move {
            // Acquired before the body is read, so that rejected requests use no memory.
            let Ok(_permit) = permits.try_acquire() else {
                let text = format!(
                    "{MAX_CONCURRENT} explain requests are already running; try again later"
                );
                return error_response(StatusCode::TOO_MANY_REQUESTS, &text);
            };
            explain_request(&admin, request)
                .await
                .unwrap_or_else(|response| response)
        },
    )
}

async fn explain_request(admin: &AdminState, mut request: Request) -> Result<Response, Response> {
    let Some(context) = admin.explain.load_full() else {
        let text = "the tokenizers are still loading; see /readyz";
        return Err(error_response(StatusCode::SERVICE_UNAVAILABLE, text));
    };
    let preprocessor = &context.preprocessor;
    DefaultBodyLimit::max(context.max_request_bytes()).apply(&mut request);
    let accept = request
        .headers()
        .get(header::ACCEPT)
        .and_then(|value| value.to_str().ok());
    let as_table = accept.is_some_and(|wanted| wanted.contains("text/plain"));
    let received = tokio::time::timeout(RECEIVE_TIMEOUT, Bytes::from_request(request, &())).await;
    let timed_out = |_| {
        error_response(
            StatusCode::REQUEST_TIMEOUT,
            "timed out while receiving the request",
        )
    };
    let text = received
        .map_err(timed_out)?
        .map_err(IntoResponse::into_response)?;
    let limit = context.body_limit;
    // Parsing a long body would block the async runtime.
    let parsed = tokio::task::spawn_blocking(move || parse_request(text, limit)).await;
    let panicked = |_| {
        error_response(
            StatusCode::INTERNAL_SERVER_ERROR,
            "failed to parse the request",
        )
    };
    let (query, path, body) = parsed
        .map_err(panicked)?
        .map_err(|message| error_response(StatusCode::BAD_REQUEST, &message))?;
    let pool = query.resolve_pool(preprocessor, &path);
    let (body, requested_model) = query.rewrite_model(preprocessor, pool.as_deref(), body);
    let mut preprocessed = preprocessor
        .preprocess_for_pool(pool, &path, &|name| query.header(name), &body)
        .await;
    preprocessed.route_request.constraints.storing_rank = admin
        .dispatcher
        .find_stored(&preprocessed.response_reference);
    let mut explanation = admin
        .dispatcher
        .explain(preprocessed.route_request, preprocessed.session.as_ref());
    explanation.requested_model = requested_model;
    debug!(path, "explained: {}", explanation.summary);
    Ok(if as_table {
        query.render(&explanation).into_response()
    } else {
        Json(explanation).into_response()
    })
}

/// Forms of a request, for error messages.
const REQUEST_FORMS: &str = "expected the body of a chat or completion request with `messages` or \
    `prompt`, or an object of the form {\"path\", \"headers\", \"body\"}";

/// Returns the explain request, its path and its body, or an error message.
fn parse_request(
    text: Bytes,
    limit: usize,
) -> Result<(ExplainRequest, String, RequestBody), String> {
    let invalid_request = |error| format!("{REQUEST_FORMS}: {error}");
    if text.trim_ascii().is_empty() {
        return Err(format!("the request has no body; {REQUEST_FORMS}"));
    }
    // A struct can also be parsed from an array.
    if text.trim_ascii_start().starts_with(b"{")
        && serde_json::from_slice::<BodyShape>(&text)
            .map_err(invalid_request)?
            .is_plain_body()
    {
        let path = guess_path(&text).to_owned();
        let body = ExplainRequest::to_body(text, limit);
        return Ok((ExplainRequest::default(), path, body));
    }
    let query: ExplainRequest = serde_json::from_slice(&text).map_err(invalid_request)?;
    let body = query
        .body()
        .map_err(|error| format!("invalid body string: {error}"))?
        .unwrap_or_default();
    let path = query.resolve_path(&body).to_owned();
    Ok((query, path, ExplainRequest::to_body(body, limit)))
}

fn error_response(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({ "error": text }))).into_response()
}

#[cfg(test)]
mod tests;
