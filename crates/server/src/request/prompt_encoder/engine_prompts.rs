//! Prompts of models whose engines return tokens, or whose own tokens are compared with those of
//! the engines.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use warmroute_core::block::multimodal::{ObjectHash, PromptObject};
use warmroute_core::block::{BlockHashes, PromptContent, SequenceHash, placeholders};
use warmroute_core::parity::ParityExpectation;
use warmroute_core::router::{Reason, RoutePrompt};
use warmroute_engines::engine_client::{EngineRendering, RenderedObject};
use warmroute_tokens::openai::{self, PromptInput};
use warmroute_tokens::prompt::{BoundedTokens, TokenBudget};

use super::{ParsedRequest, PromptEncoder, StageTimer, TokenizedPrompts};
use crate::request::encode::HeaderContext;
use crate::request::engine_tokens::EngineTokensResult;
use crate::request::engine_tokens::config::RenderPath;
use crate::request::partial_request::PromptEncoding;

/// While parity is broken, one in this many prompts is also tokenized locally and compared.
const SHADOW_INTERVAL: usize = 8;

impl PromptEncoder<'_> {
    /// Returns the prompts with the tokens of the engine; `None` if they are not usable.
    pub(super) fn engine_prompts(
        &self,
        context: &HeaderContext,
        parsed: &ParsedRequest,
        estimate: u64,
    ) -> Option<PromptEncoding> {
        let EngineTokensResult::Tokens(name, rendered) = &context.engine_tokens else {
            return None;
        };
        let source = self.source.filter(|_| *name == self.model.name)?;
        let has_media = parsed.has_media();
        let is_tokenize_only = source
            .engine_tokens
            .as_ref()
            .is_some_and(|engine| engine.config.endpoint == RenderPath::Tokenize);
        let has_own_tokens = parsed.token_data.is_some();
        // `/tokenize` does not return images.
        if has_own_tokens
            || (has_media && is_tokenize_only)
            || rendered.len() != prompt_count(&parsed.request.prompt)?
        {
            return None;
        }
        let max_tokens = self.max_prompt_tokens();
        if rendered
            .iter()
            .any(|rendering| rendering.token_ids.len() > max_tokens)
        {
            let reason = Reason::PromptTooLong;
            return Some(match &rendered[..] {
                [rendering] if rendering.objects.is_empty() => {
                    let tokens = rendering.token_ids[..max_tokens].to_vec();
                    self.prefix_blocks(tokens.into(), estimate, reason)
                }
                // A prompt with images is not hashed in part: its blocks need the image objects,
                // and the engine refuses the prompt.
                _ => PromptEncoding::estimated(estimate, reason),
            });
        }
        let (hashes, tracked): (Vec<_>, Vec<_>) = rendered
            .iter()
            .map(|rendering| self.engine_blocks(rendering))
            .unzip();
        let is_compared = source.parity.are_tokens_disabled() && !has_media;
        Some(PromptEncoding {
            prompt: RoutePrompt::Hashed(hashes),
            tracked_blocks: tracked.into_iter().collect(),
            tokens: rendered
                .iter()
                .map(|rendering| rendering.token_ids.clone())
                .collect(),
            parity: if is_compared {
                self.shadow_expectation(context.deadline, &parsed.request)
            } else {
                ParityExpectation::NotPredicted
            },
        })
    }

    /// Returns the block hashes of a rendered prompt, and the hashes that identify its blocks in
    /// load tracking.
    fn engine_blocks(
        &self,
        rendered: &EngineRendering,
    ) -> (BlockHashes, Option<Arc<[SequenceHash]>>) {
        let object = |object: &RenderedObject| {
            let ranges = std::iter::once(object.offset..object.offset + object.length).collect();
            Some(PromptObject {
                object: ObjectHash::from_identifier(&object.hash)?,
                ranges,
            })
        };
        let objects: Vec<_> = rendered.objects.iter().filter_map(object).collect();
        let content = PromptContent {
            objects: &objects,
            ..self.content(&rendered.token_ids)
        };
        let model = self.model;
        let hashes = placeholders::prompt_hashes(&content, model.block_size, model.media);
        let tracked_blocks = self.tracked_content_blocks(&content, &hashes);
        (hashes, tracked_blocks)
    }

    /// Returns the block hashes of the local tokens, for one in [`SHADOW_INTERVAL`] requests. The
    /// parity check compares them with the events of the engine. The usual limits of tokenization
    /// apply.
    fn shadow_expectation(
        &self,
        deadline: Option<Instant>,
        request: &openai::ApiRequest,
    ) -> ParityExpectation {
        let engine = self.source.and_then(|source| source.engine_tokens.as_ref());
        let (Some(engine), Some(encoder)) = (engine, &self.model.encoder) else {
            return ParityExpectation::NotPredicted;
        };
        if !engine
            .next_target
            .load(Ordering::Relaxed)
            .is_multiple_of(SHADOW_INTERVAL)
        {
            return ParityExpectation::NotPredicted;
        }
        let is_expired = StageTimer::start(deadline).expiry_check();
        let budget = TokenBudget::new(self.max_prompt_tokens(), &is_expired);
        let rendered = encoder.render(request);
        let prompts = rendered.and_then(|rendered| {
            encoder.tokenize_bounded(&rendered, self.salt.cache.as_deref(), &budget)
        });
        match prompts.as_deref() {
            Ok(
                [
                    BoundedTokens {
                        tokens,
                        stopped: None,
                    },
                ],
            ) => ParityExpectation::Shadow(Box::new(self.resumed_block_hashes(tokens))),
            _ => ParityExpectation::NotPredicted,
        }
    }

    /// Removes the end of a prompt whose generation prompt differs in some engine.
    pub(super) fn without_differing_end(
        &self,
        request: &openai::ApiRequest,
        mut tokenized: TokenizedPrompts,
    ) -> TokenizedPrompts {
        let end = self.differing_end(request);
        if end > 0
            && tokenized.stop_reason.is_none()
            && matches!(tokenized.parity, ParityExpectation::Prompt)
            && let [tokens] = &mut tokenized.prompts[..]
        {
            tokenized.total_tokens = tokens.len() as u64;
            tokenized.stop_reason = Some(Reason::ParityMismatch);
            tokens.truncate(tokens.len().saturating_sub(end));
        }
        tokenized
    }

    /// Returns the number of tokens at the end of a prompt that some engine computes differently.
    /// If truncation removes the beginning, these are all tokens, because the number of removed
    /// tokens depends on the end.
    pub(super) fn differing_end(&self, request: &openai::ApiRequest) -> usize {
        let has_generation_prompt = matches!(
            &request.prompt,
            PromptInput::Chat(chat) if chat.add_generation_prompt
        );
        let end = self
            .source
            .filter(|_| has_generation_prompt)
            .map_or(0, |source| source.parity.differing_end_tokens());
        let tokenization = &request.tokenization;
        let removes_beginning = tokenization.truncate_prompt_tokens.is_some()
            && tokenization.removed_side() == openai::TruncationSide::Left;
        if end > 0 && removes_beginning {
            usize::MAX
        } else {
            end
        }
    }
}

/// Returns the number of prompts whose tokens an engine reports. `None` for too many prompts, and
/// for prompts that tokens do not describe completely.
fn prompt_count(prompt: &PromptInput) -> Option<usize> {
    match prompt {
        PromptInput::Chat(_) => Some(1),
        PromptInput::Texts(texts) => Some(texts.len()),
        PromptInput::Tokens(lists) => Some(lists.len()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
