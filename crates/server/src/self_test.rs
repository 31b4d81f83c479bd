//! Compares the tokens of canary requests with those of an engine. Canaries contain no user data,
//! so a difference can be shown in full: the first differing token on both sides and the text
//! around it.

pub mod canaries;
pub mod config;
mod render_settings;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use warmroute_core::parity::{CanaryVerdict, ComparedItem, TokenDifference};
use warmroute_core::worker::{BlockSize, ModelName};
use warmroute_engines::engine_client::{EngineClient, EngineError, EngineUrl, RenderApi};
use warmroute_tokens::openai::{self, ApiKind, PromptInput};
use warmroute_tokens::prompt::{EncodeError, Encoder, PromptTokens};

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
    /// The tokens, or the reason why there are none.
    ours: Result<CanaryTokens, String>,
}

/// Tokens of a canary.
struct CanaryTokens {
    ids: Vec<u32>,
    /// Tokens before the generation prompt.
    conversation_len: usize,
}

/// A canary that was compared with the tokens of an engine.
struct ComparedCanary<'s> {
    canary: &'s CanaryRequest,
    ours: &'s CanaryTokens,
    theirs: Vec<u32>,
}

/// Tokenized canaries of one model.
pub struct CanarySuite {
    name: ModelName,
    encoder: Arc<Encoder>,
    block_size: BlockSize,
    canaries: Vec<PreparedCanary>,
}

/// The canaries are a function of the other fields.
impl PartialEq for CanarySuite {
    fn eq(&self, other: &Self) -> bool {
        self.shares_encoder(other) && self.name == other.name && self.block_size == other.block_size
    }
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
        let options = encoder.render_options();
        let excludes_tools =
            options.is_some_and(|options| options.exclude_tools_when_tool_choice_none);
        let prepare = |canary: CanaryRequest| PreparedCanary {
            ours: encode_canary(&encoder, &canary),
            canary: CanaryRequest {
                // `/tokenize` ignores `tool_choice`.
                render_only: canary.render_only || (excludes_tools && canary.has_tools()),
                ..canary
            },
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
        let mut compared = Vec::new();
        let mut skipped = BTreeMap::new();
        let mut failure = None;
        for prepared in &self.canaries {
            let canary = &prepared.canary;
            let name = canary.name.to_owned();
            let ours = match &prepared.ours {
                Ok(ours) => ours,
                Err(reason) => {
                    skipped.insert(name, reason.clone());
                    continue;
                }
            };
            if api == TokenApi::Tokenize && canary.render_only {
                skipped.insert(name, RENDER_ONLY_REASON.to_owned());
                continue;
            }
            let mut tokens = fetch_tokens(client, engine, api, canary, deadline).await;
            if api == TokenApi::Render && tokens.as_ref().is_err_and(is_api_unavailable) {
                api = TokenApi::Tokenize;
                tokens = fetch_tokens(client, engine, api, canary, deadline).await;
            }
            match tokens {
                Ok(theirs) => compared.push(ComparedCanary {
                    canary,
                    ours,
                    theirs,
                }),
                Err(error @ EngineError::Status { .. }) if error.is_rejection() => {
                    skipped.insert(name, describe_rejection(&error));
                }
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        let first_difference = compared.iter().find_map(|canary| self.difference(canary));
        match (first_difference, failure, skipped.values().next()) {
            (Some(difference), failure, _) => {
                self.difference_verdict(difference, &compared, failure.is_none())
                    .await
            }
            (None, Some(error), _) => CanaryVerdict::CannotTest {
                reason: describe_error(&error),
                is_transient: error.is_transient(),
            },
            (None, None, Some(first)) if compared.is_empty() => CanaryVerdict::CannotTest {
                reason: format!("every canary was skipped; the first: {first}"),
                is_transient: false,
            },
            (None, None, _) => CanaryVerdict::Agrees {
                compared: compared.len(),
                skipped,
            },
        }
    }

    /// Returns the verdict on an engine with a difference. `is_complete` is true if all canaries
    /// were compared; otherwise, a later canary may differ earlier.
    async fn difference_verdict(
        &self,
        mut difference: TokenDifference,
        compared: &[ComparedCanary<'_>],
        is_complete: bool,
    ) -> CanaryVerdict {
        if is_complete {
            difference.matching_settings =
                render_settings::find_matching_settings(&self.encoder, compared).await;
        }
        let difference = Box::new(difference);
        let ends = compared.iter().map(ComparedCanary::differing_end);
        match ends.collect::<Option<Vec<_>>>() {
            Some(ends) if is_complete => CanaryVerdict::GenerationPromptDiffers {
                difference,
                end_tokens: ends.into_iter().max().unwrap_or(0),
            },
            _ => CanaryVerdict::Differs { difference },
        }
    }

    fn difference(&self, compared: &ComparedCanary<'_>) -> Option<TokenDifference> {
        let (ours, theirs) = (&compared.ours.ids, &compared.theirs);
        let at = common_length(ours, theirs);
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
            canary: Some(compared.canary.name.to_owned()),
            position: at,
            block: at / self.block_size.tokens(),
            warmroute_token: ours.get(at).copied(),
            engine_token: theirs.get(at).copied(),
            warmroute_text: around(ours),
            engine_text: around(theirs),
            matching_settings: None,
        })
    }
}

impl ComparedCanary<'_> {
    /// Returns the number of tokens after the conversation that may differ from the engine's.
    /// Returns `None` if tokens of the conversation differ.
    fn differing_end(&self) -> Option<usize> {
        let CanaryTokens {
            ids,
            conversation_len,
        } = self.ours;
        let has_same_conversation = common_length(ids, &self.theirs) >= *conversation_len;
        has_same_conversation.then_some(ids.len() - conversation_len)
    }
}

fn common_length(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Tokenizes a canary like a request. The second run resumes from the cached prefix of the first.
fn encode_canary(encoder: &Encoder, canary: &CanaryRequest) -> Result<CanaryTokens, String> {
    let mut request = openai::parse(canary.api, &canary.body).map_err(|error| error.to_string())?;
    let cannot_encode = |error: EncodeError| format!("warmroute cannot encode it: {error}");
    let rendered = encoder.render(&request).map_err(cannot_encode)?;
    let tokens = || {
        encoder
            .tokenize_cached(&rendered, Some(RESUME_SCOPE))
            .map_err(cannot_encode)
    };
    tokens()?;
    let prompt = tokens()?.pop().ok_or("it has no prompt")?;
    let ids = PromptTokens::into_ids(prompt);
    let mut conversation_len = ids.len();
    if let PromptInput::Chat(chat) = &mut request.prompt
        && std::mem::take(&mut chat.add_generation_prompt)
        && let Ok(open) = encoder.encode(&request)
        && let [open] = &open.prompts[..]
    {
        conversation_len = common_length(&ids, open);
    }
    Ok(CanaryTokens {
        ids,
        conversation_len,
    })
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

/// Returns whether an engine does not offer an API to this client.
fn is_api_unavailable(error: &EngineError) -> bool {
    matches!(error, EngineError::NotOffered(_)) || error.is_unauthorized()
}

#[cfg(test)]
mod tests;
