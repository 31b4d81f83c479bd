//! Calls that `warmroute doctor` makes: a completion of one token on a given rank, and a query of
//! the engine's clock.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, DATE};
use reqwest::{RequestBuilder, Response};
use serde_json::Value;

use super::body::parse_json;
use super::{EngineClient, EngineError, EngineUrl};

/// Token usage of one completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionUsage {
    /// Prompt tokens.
    pub prompt_tokens: Option<usize>,
    /// Cached prompt tokens; `None` if the engine does not report them.
    pub cached_tokens: Option<usize>,
}

impl EngineClient {
    /// Requests a completion.
    pub async fn complete(
        &self,
        engine: &EngineUrl,
        request: Bytes,
        deadline: Duration,
    ) -> Result<CompletionUsage, EngineError> {
        // It is sent once: a repeated completion would find its own blocks cached.
        let builder = self.shared.client.post(engine.join("v1/completions"));
        let builder = builder
            .headers(self.shared.headers.clone())
            .header(CONTENT_TYPE, "application/json")
            .body(request);
        let call = async {
            let body = self.shared.read_response(self.send(builder).await).await?;
            parse_json::<Value>(&body)
        };
        let answer = tokio::time::timeout(deadline, call)
            .await
            .map_err(|_| EngineError::Timeout)??;
        let number = |value: &Value| {
            value
                .as_u64()
                .and_then(|number| usize::try_from(number).ok())
        };
        let usage = &answer["usage"];
        Ok(CompletionUsage {
            prompt_tokens: number(&usage["prompt_tokens"]),
            cached_tokens: number(&usage["prompt_tokens_details"]["cached_tokens"]),
        })
    }

    /// Returns the time of the engine's clock, with a resolution of one second.
    pub async fn server_time(&self, engine: &EngineUrl) -> Option<SystemTime> {
        let builder = self.shared.client.get(engine.join("health"));
        let response = tokio::time::timeout(self.shared.deadline, self.send(builder))
            .await
            .ok()?
            .ok()?;
        let date = response.headers().get(DATE)?.to_str().ok()?;
        Some(jiff::fmt::rfc2822::parse(date).ok()?.timestamp().into())
    }

    pub(super) async fn send(&self, mut request: RequestBuilder) -> reqwest::Result<Response> {
        if let Some(value) = self.shared.token().await {
            request = request.header(AUTHORIZATION, value);
        }
        request.send().await
    }
}
