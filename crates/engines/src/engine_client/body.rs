//! Reads and parses response bodies.

use reqwest::{Response, StatusCode};
use serde::de::DeserializeOwned;

use super::error::{EngineError, status_error, transport_error};

/// Maximum number of bytes that are read from an error response.
const MAX_REFUSAL: usize = 4096;

/// Returns the response of a request, or an error unless its status is 200.
pub(super) async fn check_status(
    response: reqwest::Result<Response>,
) -> Result<Response, EngineError> {
    let response = response.map_err(|error| transport_error(&error))?;
    match response.status() {
        StatusCode::OK => Ok(response),
        status => Err(status_error(status, &read_error_body(response).await)),
    }
}

/// Reads a body. Returns `None` if it is longer than the limit.
pub(crate) async fn read_limited(
    mut response: Response,
    limit: usize,
) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > limit {
            return Ok(None);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Some(body))
}

pub(super) async fn read_body(
    response: Response,
    max_response: usize,
) -> Result<Vec<u8>, EngineError> {
    let body = read_limited(response, max_response).await;
    body.map_err(|error| transport_error(&error))?
        .ok_or(EngineError::TooLarge(max_response))
}

/// Reads the beginning of an error response. A transport error ends it early.
async fn read_error_body(mut response: Response) -> Vec<u8> {
    let mut text = Vec::new();
    while let Ok(Some(chunk)) = response.chunk().await {
        text.extend_from_slice(&chunk[..chunk.len().min(MAX_REFUSAL - text.len())]);
        if text.len() == MAX_REFUSAL {
            break;
        }
    }
    text
}

pub(super) fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, EngineError> {
    // serde's error message is omitted, because it quotes the response.
    serde_json::from_slice(body).map_err(|_| EngineError::Unreadable("not the expected JSON"))
}
