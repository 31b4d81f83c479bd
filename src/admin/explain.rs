//! `POST /debug/explain`: why a request would go where it would go now. The request comes as it would come through Envoy,
//! path, headers and body, and takes the same way in; then it is judged and not let in, so nothing is booked.

pub mod table;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
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

use super::Admin;
use crate::intake::{Body, Intake};

/// The page.
pub const PAGE: &str = "/debug/explain";
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
/// How much longer than the body a question may be: as text it has escapes, and there are the headers.
const MOST_ESCAPED: usize = 2;
const AROUND: usize = 1 << 20;
/// Questions that are read and answered at once: each may hold several times the longest body.
const AT_ONCE: usize = 2;
/// How long a question may take to arrive.
const ARRIVAL: Duration = Duration::from_secs(30);

/// The way in, as soon as there is one: the pages are there before the tokenizers are.
#[derive(Clone)]
pub struct WayIn {
    /// The way in.
    pub intake: Arc<ArcSwapOption<Intake>>,
    /// Longest body that is read.
    body_limit: Arc<AtomicUsize>,
}

impl WayIn {
    /// None yet.
    pub fn new(body_limit: usize) -> Self {
        Self {
            intake: Arc::default(),
            body_limit: Arc::new(AtomicUsize::new(body_limit)),
        }
    }

    /// Reads bodies up to another length from now on.
    pub fn limit(&self, body_limit: usize) {
        self.body_limit.store(body_limit, Ordering::Relaxed);
    }

    fn body_limit(&self) -> usize {
        self.body_limit.load(Ordering::Relaxed)
    }

    /// Longest question that is read.
    fn longest(&self) -> usize {
        self.body_limit()
            .saturating_mul(MOST_ESCAPED)
            .saturating_add(AROUND)
    }
}

/// A request to be explained.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Question {
    /// Its path; by default what the body looks like.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Its headers.
    pub headers: BTreeMap<String, String>,
    /// The pool that the authority or the metadata of its gRPC call selects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<Arc<str>>,
    /// Its body: the text of it, or the JSON itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body: Option<Box<RawValue>>,
    /// The body byte by byte, where it is no text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Vec<u8>>,
}

impl Question {
    /// A question about a body of any kind.
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
        })
    }

    /// The body byte for byte; `None` where there is none.
    pub fn body(&self) -> serde_json::Result<Option<Bytes>> {
        let Some(body) = &self.body else {
            return Ok(self.bytes.clone().map(Bytes::from));
        };
        let text = match body.get().starts_with('"') {
            true => serde_json::from_str(body.get())?,
            false => body.get().to_owned(),
        };
        Ok(Some(Bytes::from(text)))
    }

    /// The body as the way in is shown it: as Envoy would show it.
    pub fn seen(body: Bytes, limit: usize) -> Body {
        match body.len() {
            0 => Body::Absent,
            length if length > limit => Body::TooLarge {
                shown: body,
                bytes: length as u64,
            },
            _ => Body::Whole(body),
        }
    }

    /// A header by its name in any case.
    pub fn header(&self, name: &str) -> Option<Cow<'_, str>> {
        let found = self
            .headers
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name));
        found.map(|(_, value)| Cow::Borrowed(value.as_str()))
    }

    /// The pool that the request is confined to.
    pub fn pool_for(&self, intake: &Intake, path: &str) -> Option<Arc<str>> {
        self.pool
            .clone()
            .or_else(|| intake.pool_of(path, &|name: &str| self.header(name)))
    }

    /// Replaces the model of the body as for a real request. The second value is the model that the client requested, if it was
    /// replaced.
    pub fn rewrite(
        &self,
        intake: &Intake,
        pool: Option<&str>,
        body: Body,
    ) -> (Body, Option<String>) {
        let Body::Whole(bytes) = &body else {
            return (body, None);
        };
        match intake.rewrite(pool, &|name: &str| self.header(name), bytes, rand::random()) {
            Some(rewritten) => (Body::Whole(rewritten.bytes), rewritten.requested),
            None => (body, None),
        }
    }

    /// The path, if need be as the body looks like.
    pub fn path_for(&self, body: &[u8]) -> &str {
        self.path.as_deref().unwrap_or_else(|| guess(body))
    }
}

/// The path of the API that a body is for, as far as can be seen.
fn guess(body: &[u8]) -> &'static str {
    #[derive(Deserialize)]
    struct Shape {
        messages: Option<IgnoredAny>,
        prompt: Option<IgnoredAny>,
    }
    match serde_json::from_slice(body) {
        Ok(Shape {
            messages: None,
            prompt: Some(_),
        }) => COMPLETIONS,
        _ => CHAT,
    }
}

/// The page, for as few askers at once as do not get in the way of what is routed.
pub(super) fn page() -> MethodRouter<Admin> {
    let places = Arc::new(Semaphore::new(AT_ONCE));
    post(
        move |State(admin): State<Admin>, mut asked: Request| async move {
            DefaultBodyLimit::max(admin.way_in.longest()).apply(&mut asked);
            // Before the body is read, so that refused ones take no memory.
            let Ok(_place) = places.try_acquire() else {
                let text = format!(
                    "{AT_ONCE} questions are being answered already; ask again when they are done"
                );
                return refusal(StatusCode::TOO_MANY_REQUESTS, &text);
            };
            explain(&admin, asked)
                .await
                .unwrap_or_else(|refused| refused)
        },
    )
}

async fn explain(admin: &Admin, asked: Request) -> Result<Response, Response> {
    let Some(intake) = admin.way_in.intake.load_full() else {
        let text = "the tokenizers are still being loaded; /readyz says when they are there";
        return Err(refusal(StatusCode::SERVICE_UNAVAILABLE, text));
    };
    let accept = asked
        .headers()
        .get(header::ACCEPT)
        .and_then(|value| value.to_str().ok());
    let as_table = accept.is_some_and(|wanted| wanted.contains("text/plain"));
    let arrived = tokio::time::timeout(ARRIVAL, Bytes::from_request(asked, &())).await;
    let late = |_| {
        refusal(
            StatusCode::REQUEST_TIMEOUT,
            "the question did not arrive in time",
        )
    };
    let text = arrived
        .map_err(late)?
        .map_err(IntoResponse::into_response)?;
    let limit = admin.way_in.body_limit();
    // Long ones take long enough to be in others' way.
    let read = tokio::task::spawn_blocking(move || read(&text, limit)).await;
    let failed = |_| {
        refusal(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the question could not be read",
        )
    };
    let (question, path, seen) = read
        .map_err(failed)?
        .map_err(|wrong| refusal(StatusCode::BAD_REQUEST, &wrong))?;
    let pool = question.pool_for(&intake, &path);
    let (body, requested_model) = question.rewrite(&intake, pool.as_deref(), seen);
    let taken = intake
        .take_for(pool, &path, &|name| question.header(name), &body)
        .await;
    let mut explanation = admin
        .entrance
        .explain(taken.request, taken.session.as_ref());
    explanation.requested_model = requested_model;
    debug!(path, "explained: {}", explanation.sentence);
    Ok(if as_table {
        table::render(&explanation).into_response()
    } else {
        Json(explanation).into_response()
    })
}

/// The question, its path and its body, or what is wrong with it.
fn read(text: &[u8], limit: usize) -> Result<(Question, String, Body), String> {
    let no_question = |error| {
        format!("this is no question of the form {{\"path\", \"headers\", \"body\"}}: {error}")
    };
    let question: Question = serde_json::from_slice(text).map_err(no_question)?;
    let body = question
        .body()
        .map_err(|error| format!("the body is no text: {error}"))?
        .unwrap_or_default();
    let path = question.path_for(&body).to_owned();
    Ok((question, path, Question::seen(body, limit)))
}

fn refusal(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({ "error": text }))).into_response()
}

#[cfg(test)]
mod tests;
