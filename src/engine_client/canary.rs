//! What only the doctor asks: a completion of one token on a rank of its choice, and the time.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, DATE};
use reqwest::{RequestBuilder, Response, StatusCode};
use serde_json::Value;

use super::{EngineClient, EngineError, EngineUrl, beginning, body, broken, read, refused};

/// The header by which vLLM takes a data-parallel rank.
const RANK: &str = "x-data-parallel-rank";

/// What an engine counted of one completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: Option<usize>,
    /// How many of them were cached; none where the engine does not say.
    pub cached_tokens: Option<usize>,
}

impl EngineClient {
    /// Has a completion computed, by this rank where one is named.
    pub async fn complete(
        &self,
        engine: &EngineUrl,
        request: Bytes,
        rank: Option<u32>,
        deadline: Duration,
    ) -> Result<Usage, EngineError> {
        let mut asked = self.shared.client.post(engine.join("v1/completions"));
        asked = asked.header(CONTENT_TYPE, "application/json").body(request);
        if let Some(rank) = rank {
            asked = asked.header(RANK, rank);
        }
        let answered = async {
            let response = self.send(asked).await?;
            match response.status() {
                StatusCode::OK => read::<Value>(&body(response, self.shared.longest).await?),
                status => Err(refused(status, &beginning(response).await)),
            }
        };
        let answer = tokio::time::timeout(deadline, answered)
            .await
            .map_err(|_| EngineError::Timeout)??;
        let number = |value: &Value| {
            value
                .as_u64()
                .and_then(|number| usize::try_from(number).ok())
        };
        let usage = &answer["usage"];
        Ok(Usage {
            prompt_tokens: number(&usage["prompt_tokens"]),
            cached_tokens: number(&usage["prompt_tokens_details"]["cached_tokens"]),
        })
    }

    /// The time by the engine's clock, to the second.
    pub async fn time(&self, engine: &EngineUrl) -> Option<SystemTime> {
        let asked = self.shared.client.get(engine.join("health"));
        let response = tokio::time::timeout(self.shared.deadline, self.send(asked))
            .await
            .ok()?
            .ok()?;
        let date = response.headers().get(DATE)?.to_str().ok()?;
        Some(jiff::fmt::rfc2822::parse(date).ok()?.timestamp().into())
    }

    async fn send(&self, mut request: RequestBuilder) -> Result<Response, EngineError> {
        if let Some(bearer) = &self.shared.bearer
            && let Some(value) = bearer.header().await
        {
            request = request.header(AUTHORIZATION, value);
        }
        request.send().await.map_err(|error| broken(&error))
    }
}
