//! Encodes the prompts of one request: tokenizes them within the length of the model and the
//! deadline, and hashes their blocks.

mod engine_prompts;
mod multimodal;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::debug;
use warmroute_core::block::{BlockHashes, BlockWindows, CacheSalt, PromptContent, SequenceHash};
use warmroute_core::engine_settings::CommonSettings;
use warmroute_core::parity::ParityExpectation;
use warmroute_core::router::{Reason, RoutePrompt};
use warmroute_tokens::openai::{
    self, MessageReuse, PromptInput, UnknownPrompt, UnknownPromptReason,
};
use warmroute_tokens::prompt::{EncodeError, EngineKind, PromptTokens, StopReason, TokenBudget};

use super::encode::HeaderContext;
use super::engine_tokens::{EngineTokensResult, TokenSource};
use super::models::{ConfiguredModel, ResolvedModel};
use super::partial_request::PromptEncoding;
use super::preprocessor::PreprocessorParts;
use crate::tracking_hash::TrackingHash;

/// Maximum number of tokens of a prompt if no engine reports its context length.
const DEFAULT_MAX_TOKENS: usize = 1 << 20;

/// A parsed request, and its prefixes in the message cache.
pub(super) struct ParsedRequest {
    pub(super) request: openai::ApiRequest,
    pub(super) reuse: MessageReuse,
    /// Tokens of the client, which replace the prompt.
    pub(super) token_data: Option<Vec<u32>>,
}

/// The tokens of a request's prompts, or their first tokens.
struct TokenizedPrompts {
    prompts: Vec<PromptTokens>,
    /// The reason why tokens are missing at the end.
    stop_reason: Option<Reason>,
    /// Number of all tokens, which is estimated if tokens are missing.
    total_tokens: u64,
    parity: ParityExpectation,
}

/// Encoder of the prompts of one request, for its model.
pub(super) struct PromptEncoder<'m> {
    model: &'m ConfiguredModel,
    windows: BlockWindows,
    salt: CacheSalt,
    source: Option<&'m TokenSource>,
    tracking_hash: &'m TrackingHash,
}

impl ParsedRequest {
    fn has_media(&self) -> bool {
        matches!(&self.request.prompt, PromptInput::Chat(chat) if chat.has_media())
    }
}

impl<'m> PromptEncoder<'m> {
    /// Creates an encoder for prompts with a cache salt.
    pub(super) fn new(
        parts: &'m PreprocessorParts,
        resolved: &'m ResolvedModel,
        cache: Option<String>,
    ) -> Self {
        Self {
            model: &resolved.model,
            windows: resolved.windows,
            salt: CacheSalt {
                lora: resolved.adapter.clone(),
                cache,
            },
            source: parts.token_sources.get(&resolved.model.name),
            tracking_hash: &parts.tracking_hash,
        }
    }

    /// Returns the blocks of a request's prompts. `estimate` is their number of tokens if they
    /// cannot be tokenized.
    pub(super) fn encode(
        &self,
        context: &HeaderContext,
        mut parsed: ParsedRequest,
        estimate: u64,
        timer: &mut StageTimer,
    ) -> PromptEncoding {
        if let Some(length) = self.truncation_length() {
            parsed.request.resolve_truncation(length);
        }
        if let Some(blocks) = self.engine_prompts(context, &parsed, estimate) {
            return blocks;
        }
        let encoded = if parsed.has_media() && parsed.token_data.is_none() {
            self.encode_multimodal(&parsed.request, timer)
        } else {
            self.tokenize(parsed, estimate, timer)
                .map(|tokenized| self.hash_prompts(tokenized, timer))
        };
        let has_failed_engine = matches!(context.engine_tokens, EngineTokensResult::Failed);
        let reason = match encoded {
            Ok(blocks) => return blocks,
            Err(Reason::NoTokenizer) if has_failed_engine => Reason::RemoteTokenizerFailed,
            Err(reason) => reason,
        };
        PromptEncoding::estimated(estimate, reason)
    }

    /// Tokenizes the prompts of a request.
    fn tokenize(
        &self,
        parsed: ParsedRequest,
        estimate: u64,
        timer: &mut StageTimer,
    ) -> Result<TokenizedPrompts, Reason> {
        let ParsedRequest {
            request,
            reuse,
            token_data,
        } = parsed;
        let max_tokens = self.max_prompt_tokens();
        if let Some(mut tokens) = token_data {
            let stop_reason = (tokens.len() > max_tokens).then_some(Reason::PromptTooLong);
            tokens.truncate(max_tokens);
            return Ok(TokenizedPrompts {
                prompts: vec![tokens.into()],
                stop_reason,
                total_tokens: estimate,
                parity: ParityExpectation::NotPredicted,
            });
        }
        if request.prompt == PromptInput::OverLimit {
            return Err(Reason::TooManyPrompts);
        }
        if let PromptInput::Unknown(unknown) = &request.prompt {
            return Err(unknown_prompt_reason(*unknown));
        }
        let encoder = self.model.encoder.as_ref();
        let encoder = encoder.ok_or(Reason::NoTokenizer)?;
        let rendered = encoder
            .render_cached(&request, reuse)
            .map_err(encode_error_reason)?;
        timer.finish("render");
        let is_expired = timer.expiry_check();
        let budget = TokenBudget::new(max_tokens, &is_expired);
        let cache_namespace = self.salt.cache.as_deref();
        let mut bounded = encoder.tokenize_bounded(&rendered, cache_namespace, &budget);
        // If tokenization after the cached prefix fails, the whole prompt is rendered.
        if bounded.is_err() && rendered.is_resumed() {
            bounded = encoder
                .render(&request)
                .and_then(|rendered| encoder.tokenize_bounded(&rendered, cache_namespace, &budget));
        }
        let bounded = bounded.map_err(encode_error_reason)?;
        timer.finish("tokenize");
        let stopped = bounded.iter().find_map(|prompt| prompt.stopped);
        let tokenized = TokenizedPrompts {
            prompts: bounded.into_iter().map(|prompt| prompt.tokens).collect(),
            stop_reason: stopped.map(stop_reason),
            total_tokens: estimate,
            parity: match request.prompt {
                PromptInput::Tokens(_) => ParityExpectation::NotPredicted,
                _ => ParityExpectation::Prompt,
            },
        };
        Ok(self.without_differing_end(&request, tokenized))
    }

    /// Hashes all prompts. If tokens are missing, hashes the first tokens of a single prompt.
    fn hash_prompts(&self, tokenized: TokenizedPrompts, timer: &mut StageTimer) -> PromptEncoding {
        let TokenizedPrompts {
            prompts,
            stop_reason,
            total_tokens,
            parity,
        } = tokenized;
        let blocks = match (stop_reason, <[PromptTokens; 1]>::try_from(prompts)) {
            (Some(reason), Ok([tokens])) => self.prefix_blocks(tokens, total_tokens, reason),
            (Some(reason), Err(_)) => PromptEncoding::estimated(total_tokens, reason),
            (None, Ok(prompts)) => self.whole_blocks(prompts.into()),
            (None, Err(prompts)) => self.whole_blocks(prompts),
        };
        timer.finish("hash");
        PromptEncoding { parity, ..blocks }
    }

    fn whole_blocks(&self, prompts: Vec<PromptTokens>) -> PromptEncoding {
        let hashes: Vec<_> = prompts
            .iter()
            .map(|tokens| self.resumed_block_hashes(tokens))
            .collect();
        let tokens: Vec<_> = prompts.into_iter().map(PromptTokens::into_ids).collect();
        PromptEncoding {
            tracked_blocks: self.tracked_blocks(&tokens, &hashes),
            prompt: RoutePrompt::Hashed(hashes),
            tokens,
            parity: ParityExpectation::NotPredicted,
        }
    }

    /// Returns the blocks of the first tokens of a prompt. `total_tokens` is its estimated length,
    /// and `reason` explains why the other tokens are not known.
    fn prefix_blocks(
        &self,
        mut tokens: PromptTokens,
        total_tokens: u64,
        reason: Reason,
    ) -> PromptEncoding {
        let size = self.model.block_size.tokens();
        tokens.truncate(tokens.len() / size * size);
        let estimated = PromptEncoding::estimated(total_tokens, reason);
        if tokens.is_empty() {
            return estimated;
        }
        let known = self.resumed_block_hashes(&tokens);
        let prompts = [tokens.into_ids()];
        PromptEncoding {
            tracked_blocks: self.tracked_blocks(&prompts, std::slice::from_ref(&known)),
            prompt: RoutePrompt::Truncated {
                tokens: total_tokens.max(known.tokens() as u64),
                known,
                reason,
            },
            ..estimated
        }
    }

    /// Returns the block hashes of one prompt.
    pub(super) fn block_hashes(&self, tokens: &[u32]) -> BlockHashes {
        BlockHashes::from_content(&self.content(tokens), self.model.block_size)
    }

    /// Returns the block hashes of one prompt, continued from those of a cached prompt.
    fn resumed_block_hashes(&self, tokens: &PromptTokens) -> BlockHashes {
        let block_size = self.model.block_size;
        tokens.block_hashes(&self.salt, block_size, self.windows)
    }

    fn content<'a>(&'a self, tokens: &'a [u32]) -> PromptContent<'a> {
        PromptContent {
            windows: self.windows,
            ..PromptContent::text(tokens, &self.salt)
        }
    }

    /// Returns the hashes that identify the blocks in load tracking; `None` if they equal the
    /// sequence hashes.
    pub(super) fn tracked_blocks(
        &self,
        prompts: &[Vec<u32>],
        hashes: &[BlockHashes],
    ) -> Option<Vec<Arc<[SequenceHash]>>> {
        let prompts = prompts.iter().zip(hashes);
        prompts
            .map(|(tokens, hashes)| self.tracked_content_blocks(&self.content(tokens), hashes))
            .collect()
    }

    /// Returns the hashes that identify one prompt's blocks in load tracking; `None` if they equal
    /// the sequence hashes.
    fn tracked_content_blocks(
        &self,
        content: &PromptContent<'_>,
        hashes: &BlockHashes,
    ) -> Option<Arc<[SequenceHash]>> {
        let model = self.model.name.as_str();
        (*self.tracking_hash != TrackingHash::Public)
            .then(|| self.tracking_hash.sequences(content, hashes, model))
    }

    /// Returns the maximum number of tokens of a prompt that are computed and hashed. No engine
    /// accepts a longer prompt.
    fn max_prompt_tokens(&self) -> usize {
        let max_length = self.common_setting(|settings| settings.max_model_len);
        max_length.map_or(DEFAULT_MAX_TOKENS, |max_length| {
            usize::try_from(max_length).unwrap_or(usize::MAX)
        })
    }

    /// Returns a setting that all engines of the model report with the same value.
    fn common_setting<T>(&self, setting: impl Fn(&CommonSettings) -> Option<T>) -> Option<T> {
        let settings = self.source?.engine_settings.load();
        settings.get(&self.model.name).and_then(setting)
    }

    /// Returns the context length of the model, if engines truncate prompts to it and report it.
    fn truncation_length(&self) -> Option<u64> {
        let encoder = self.model.encoder.as_ref();
        self.common_setting(|settings| settings.max_model_len)
            .filter(|_| encoder.is_none_or(|encoder| encoder.engine() == EngineKind::Vllm))
    }
}

fn stop_reason(stop: StopReason) -> Reason {
    match stop {
        StopReason::TooLong => Reason::PromptTooLong,
        StopReason::Deadline => Reason::DecisionTimeout,
    }
}

pub(super) fn unknown_prompt_reason(unknown: UnknownPrompt) -> Reason {
    match unknown.reason {
        UnknownPromptReason::BuiltByEngine => Reason::UnknownPrompt,
        UnknownPromptReason::StoredInEngine => Reason::EngineSideState,
    }
}

fn encode_error_reason(error: EncodeError) -> Reason {
    match error {
        EncodeError::Multimodal(_) => Reason::Multimodal,
        EncodeError::TooManyPrompts => Reason::TooManyPrompts,
        EncodeError::NoTemplate => Reason::NoChatTemplate,
        error => {
            // The error is not logged, because a template error may quote the prompt.
            debug!(reason = error.label(), "prompt refused");
            Reason::EncodeFailed
        }
    }
}

/// The duration of each stage, and the deadline of tokenization.
pub(super) struct StageTimer {
    last: Instant,
    deadline: Option<Instant>,
    times: Vec<(&'static str, Duration)>,
}

impl StageTimer {
    pub(super) fn start(deadline: Option<Instant>) -> Self {
        Self {
            last: Instant::now(),
            deadline,
            times: Vec::with_capacity(4),
        }
    }

    /// Records the duration of a stage, which began with the end of the last one.
    pub(super) fn finish(&mut self, stage: &'static str) {
        let now = Instant::now();
        self.times.push((stage, now - self.last));
        self.last = now;
    }

    pub(super) fn into_times(self) -> Vec<(&'static str, Duration)> {
        self.times
    }

    /// Returns a check for whether the deadline has passed.
    fn expiry_check(&self) -> impl Fn() -> bool + use<> {
        let deadline = self.deadline;
        move || deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}
