//! Error responses.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An error response in the format of the OpenAI API.
#[derive(Debug)]
pub(crate) struct OpenAiError(StatusCode, String);

impl OpenAiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self(status, message.into())
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// Returns the error body.
    pub(crate) fn body(&self) -> Value {
        let Self(status, message) = self;
        let kind = match *status {
            StatusCode::BAD_REQUEST => "BadRequestError",
            StatusCode::FORBIDDEN => "ForbiddenError",
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::TOO_MANY_REQUESTS => "TooManyRequestsError",
            _ => "InternalServerError",
        };
        json!({"error": {"message": message, "type": kind, "param": null, "code": status.as_u16()}})
    }
}

impl IntoResponse for OpenAiError {
    fn into_response(self) -> Response {
        (self.0, Json(self.body())).into_response()
    }
}
