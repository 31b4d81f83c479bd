//! Errors of unreadable request bodies.

use serde_json::error::Category;
use thiserror::Error;

/// A request body that cannot be read.
#[derive(Debug, Error)]
pub enum ParseError {
    /// The body is not UTF-8; holds the offset of the first invalid byte.
    #[error("the request body is not UTF-8 (byte {0})")]
    NotUtf8(usize),
    /// The body is a JSON list or a bare value.
    #[error("the request body is not a JSON object")]
    NotAnObject,
    /// The body is not JSON or has an unexpected structure. The message is logged, so it contains
    /// no content of the body.
    #[error("the request body is invalid: {0}")]
    Json(String),
    /// A required field is missing.
    #[error("the request has no `{0}`")]
    Missing(&'static str),
    /// A list is empty where the engine requires an entry.
    #[error("`{0}` is empty")]
    Empty(&'static str),
}

impl From<serde_json::Error> for ParseError {
    fn from(error: serde_json::Error) -> Self {
        let text = error.to_string();
        if error.classify() != Category::Data {
            return Self::Json(text);
        }
        // serde's message begins with the invalid value, which must not be logged, and ends with
        // the expected type.
        let place = format!(" at line {} column {}", error.line(), error.column());
        let message = text.strip_suffix(&place).unwrap_or(&text);
        let named = ["missing field `", "duplicate field `"]
            .iter()
            .any(|known| message.starts_with(known));
        let what = match message.rfind(", expected ") {
            _ if named => message,
            Some(at) => &message[at + 2..],
            None => "a value of an unexpected type",
        };
        Self::Json(format!("{what}{place}"))
    }
}
