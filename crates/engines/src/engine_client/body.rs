//! Reads and parses response bodies.

use reqwest::Response;
use serde::de::DeserializeOwned;

use super::error::{EngineError, transport_error};

/// Maximum number of bytes that are read from an error response.
const MAX_REFUSAL: usize = 4096;

pub(super) async fn read_body(
    mut response: Response,
    max_response: usize,
) -> Result<Vec<u8>, EngineError> {
    let mut body = Vec::new();
    while let Some(chunk) = response
        .chunk()
        .await
        .map_err(|error| transport_error(&error))?
    {
        if body.len() + chunk.len() > max_response {
            return Err(EngineError::TooLarge(max_response));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// Reads the beginning of an error response. A transport error ends it early.
pub(super) async fn read_error_body(mut response: Response) -> Vec<u8> {
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
