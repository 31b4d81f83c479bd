//! Compares the tokens of canary requests with those of an engine. Canaries contain no user data,
//! so a difference can be shown in full: the first differing token on both sides and the text
//! around it.

pub mod canaries;
pub mod config;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use warmroute_core::parity::{CanaryVerdict, ComparedItem, TokenDifference};
use warmroute_core::worker::{BlockSize, ModelName};
use warmroute_engines::engine_client::{EngineClient, EngineError, EngineUrl, RenderApi};
use warmroute_tokens::openai::{self, ApiKind};
use warmroute_tokens::prompt::{Encoder, PromptTokens};

use crate::request::ConfiguredModel;
use canaries::{CanaryRequest, canaries};

/// Number of tokens shown before and after the first difference.
const CONTEXT_TOKENS: usize = 8;

/// Reason for skipping a canary if the engine has no render API.
const RENDER_ONLY_REASON: &str = "only the render API handles it like the chat API, and the \
engine does not offer it";

/// Scope that separates canaries from requests in the token prefix cache.
const RESUME_SCOPE: &str = "self-test";

/// A canary with its tokens.
struct PreparedCanary {
    canary: CanaryRequest,
    /// Token ids, or the reason why there are none.
    ours: Result<Vec<u32>, String>,
}

/// Tokenized canaries of one model.
pub struct CanarySuite {
    name: ModelName,
    encoder: Arc<Encoder>,
    block_size: BlockSize,
    canaries: Vec<PreparedCanary>,
}

/// Engine API that returns tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenApi {
    Tokenize,
    Render,
}

impl CanarySuite {
    /// Tokenizes the canaries, which takes some milliseconds. Returns `None` if the model has no
    /// tokenizer.
    pub fn new(model: &ConfiguredModel) -> Option<Self> {
        let encoder = model.encoder.clone()?;
        let prepare = |canary: CanaryRequest| PreparedCanary {
            ours: encode_canary(&encoder, &canary),
            canary,
        };
        let canaries = canaries(model.name.as_str(), encoder.engine())
            .into_iter()
            .map(prepare)
            .collect();
        Some(Self {
            name: model.name.clone(),
            encoder,
            block_size: model.block_size,
            canaries,
        })
    }

    /// Returns whether the suite matches the current model.
    pub fn is_current(&self, model: &ConfiguredModel) -> bool {
        let same = model
            .encoder
            .as_ref()
            .is_some_and(|encoder| Arc::ptr_eq(encoder, &self.encoder));
        same && self.name == model.name && self.block_size == model.block_size
    }

    /// Returns whether both suites use the same encoder.
    pub fn shares_encoder(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.encoder, &other.encoder)
    }

    /// Compares the canaries with the tokens of one engine.
    pub async fn compare(
        &self,
        client: &EngineClient,
        engine: &EngineUrl,
        deadline: Duration,
    ) -> CanaryVerdict {
        // The render API handles requests like the chat API. `/tokenize` differs in some cases, but
        // not every engine offers rendering to every client.
        let mut api = TokenApi::Render;
        let mut compared = 0;
        let mut skipped = BTreeMap::new();
        for prepared in &self.canaries {
            let name = prepared.canary.name.to_owned();
            let ours = match &prepared.ours {
                Ok(ours) => ours,
                Err(reason) => {
                    skipped.insert(name, reason.clone());
                    continue;
                }
            };
            if api == TokenApi::Tokenize && prepared.canary.render_only {
                skipped.insert(name, RENDER_ONLY_REASON.to_owned());
                continue;
            }
            let mut tokens = fetch_tokens(client, engine, api, &prepared.canary, deadline).await;
            let is_unavailable = |error: &EngineError| {
                matches!(error, EngineError::NotOffered(_)) || error.is_unauthorized()
            };
            if api == TokenApi::Render && tokens.as_ref().is_err_and(is_unavailable) {
                api = TokenApi::Tokenize;
                tokens = fetch_tokens(client, engine, api, &prepared.canary, deadline).await;
            }
            match tokens {
                Ok(theirs) => match self.difference(&name, ours, &theirs) {
                    Some(difference) => {
                        return CanaryVerdict::Differs {
                            difference: Box::new(difference),
                        };
                    }
                    None => compared += 1,
                },
                Err(error @ EngineError::Status { .. }) if error.is_rejection() => {
                    skipped.insert(name, describe_rejection(&error));
                }
                Err(error) => {
                    return CanaryVerdict::CannotTest {
                        reason: describe_error(&error),
                        is_transient: error.is_transient(),
                    };
                }
            }
        }
        match (compared, skipped.values().next()) {
            (0, Some(first)) => CanaryVerdict::CannotTest {
                reason: format!("every canary was skipped; the first: {first}"),
                is_transient: false,
            },
            _ => CanaryVerdict::Agrees { compared, skipped },
        }
    }

    fn difference(&self, canary: &str, ours: &[u32], theirs: &[u32]) -> Option<TokenDifference> {
        let at = ours
            .iter()
            .zip(theirs)
            .take_while(|(ours, theirs)| ours == theirs)
            .count();
        if at == ours.len() && at == theirs.len() {
            return None;
        }
        let around = |ids: &[u32]| {
            let start = at.saturating_sub(CONTEXT_TOKENS).min(ids.len());
            let end = (at + CONTEXT_TOKENS).min(ids.len());
            Some(self.encoder.decode_tokens(&ids[start..end]))
        };
        Some(TokenDifference {
            compared: if at < ours.len().min(theirs.len()) {
                ComparedItem::Tokens
            } else {
                ComparedItem::Length
            },
            canary: Some(canary.to_owned()),
            position: at,
            block: at / self.block_size.tokens(),
            warmroute_token: ours.get(at).copied(),
            engine_token: theirs.get(at).copied(),
            warmroute_text: around(ours),
            engine_text: around(theirs),
        })
    }
}

/// Tokenizes a canary like a request. The second run resumes from the cached prefix of the first.
fn encode_canary(encoder: &Encoder, canary: &CanaryRequest) -> Result<Vec<u32>, String> {
    let request = openai::parse(canary.api, &canary.body).map_err(|error| error.to_string())?;
    let rendered = encoder
        .render(&request)
        .map_err(|error| format!("warmroute cannot encode it: {error}"))?;
    let tokens = || {
        encoder
            .tokenize_cached(&rendered, Some(RESUME_SCOPE))
            .map_err(|error| format!("warmroute cannot encode it: {error}"))
    };
    tokens()?;
    let prompt = tokens()?.pop().ok_or("it has no prompt")?;
    Ok(PromptTokens::into_ids(prompt))
}

async fn fetch_tokens(
    client: &EngineClient,
    engine: &EngineUrl,
    api: TokenApi,
    canary: &CanaryRequest,
    deadline: Duration,
) -> Result<Vec<u32>, EngineError> {
    let body: Bytes = canary.body.clone();
    match api {
        TokenApi::Tokenize => Ok(client.tokenize(engine, body, deadline).await?.tokens),
        TokenApi::Render => {
            let api = if canary.api == ApiKind::Completions {
                RenderApi::Completions
            } else {
                RenderApi::Chat
            };
            let mut prompts = client.render(engine, api, body, deadline).await?;
            prompts
                .pop()
                .map(|prompt| prompt.token_ids)
                .ok_or(EngineError::Unreadable("no prompt"))
        }
    }
}

/// Describes the refusal of a canary, with the message of the engine.
fn describe_rejection(error: &EngineError) -> String {
    let message = match error {
        EngineError::Status { message, .. } => message.as_deref().unwrap_or_default(),
        _ => "",
    };
    format!("{error}: {message}")
}

fn describe_error(error: &EngineError) -> String {
    match error {
        EngineError::NotOffered(status) => {
            format!(
                "it offers neither /tokenize nor /v1/*/render (status {status}); vLLM offers the \
                first by default"
            )
        }
        error if error.is_unauthorized() => {
            "it requires a token; set `engines.http.token_file`".to_owned()
        }
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests;
