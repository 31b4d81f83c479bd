//! Errors of engine calls.

use std::sync::Arc;

use reqwest::StatusCode;
use strum::IntoStaticStr;
use thiserror::Error;
use warmroute_runtime::causes::innermost_cause;

use super::responses;

/// Maximum number of characters that are kept of an error message.
const MAX_MESSAGE: usize = 300;

/// Reason why a call failed.
#[derive(Clone, Debug, Error, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum EngineError {
    /// The client could not be created.
    #[error("the client could not be created: {0}")]
    Client(String),
    /// Too many concurrent calls.
    #[error("too many concurrent calls to engines")]
    Busy,
    /// The connection could not be established, or it broke.
    #[error("the connection failed: {0}")]
    Unreachable(String),
    /// No complete response within the deadline.
    #[error("no response within the deadline")]
    Timeout,
    /// The engine has no such endpoint, or was started without it: 403, 404, 405 and 501.
    #[error("the engine does not offer this (status {0})")]
    NotOffered(u16),
    /// A status other than 200.
    #[error("status {status}")]
    Status {
        /// Status code.
        status: u16,
        /// The engine's error message. It may quote the request, so it is shown only for requests
        /// that warmroute itself created.
        message: Option<Arc<str>>,
    },
    /// The response does not have the expected form.
    #[error("the response is invalid: {0}")]
    Unreadable(&'static str),
    /// The response exceeds the limit.
    #[error("the response is longer than {0} bytes")]
    TooLarge(usize),
}

impl EngineError {
    /// Returns whether the result of a call shows that the engine answers; `None` if the engine was
    /// not called.
    pub fn has_answered<T>(result: &Result<T, Self>) -> Option<bool> {
        match result {
            Err(EngineError::Client(_) | EngineError::Busy) => None,
            Err(EngineError::Unreachable(_) | EngineError::Timeout) => Some(false),
            Ok(_) | Err(_) => Some(true),
        }
    }

    /// Returns the reason label in metrics.
    pub fn label(&self) -> &'static str {
        self.into()
    }

    /// Returns true if the engine rejected the request as invalid. Other engines would reject it
    /// too.
    pub fn is_rejection(&self) -> bool {
        matches!(
            self,
            EngineError::Status {
                status: 400 | 404 | 413 | 422,
                ..
            }
        )
    }

    /// Returns true if a retry may succeed: the engine is starting or busy.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            EngineError::Busy | EngineError::Timeout | EngineError::Unreachable(_)
        )
    }

    /// Returns true if the engine requires other credentials.
    pub fn is_unauthorized(&self) -> bool {
        matches!(self, EngineError::Status { status: 401, .. })
    }
}

pub(super) fn status_error(status: StatusCode, text: &[u8]) -> EngineError {
    let message = responses::error_message(text);
    let message = message.map(|text| text.chars().take(MAX_MESSAGE).collect::<String>().into());
    let code = status.as_u16();
    match code {
        // Engines send this message for unknown models and adapters on endpoints that exist.
        404 if message
            .as_ref()
            .is_some_and(|text: &Arc<str>| text.contains("does not exist")) =>
        {
            EngineError::Status {
                status: code,
                message,
            }
        }
        403 | 404 | 405 | 501 => EngineError::NotOffered(code),
        _ => EngineError::Status {
            status: code,
            message,
        },
    }
}

pub(super) fn transport_error(problem: &reqwest::Error) -> EngineError {
    // A connect timeout means that the engine is unreachable.
    let late = problem.is_timeout() && !problem.is_connect();
    if late {
        EngineError::Timeout
    } else {
        // The outer errors contain only the URL and the stage of the request, and each log line
        // already contains the worker.
        EngineError::Unreachable(innermost_cause(problem).to_string())
    }
}
