//! Conversations with images and other media. Blocks are known as far as the engine's tokens and
//! item hashes are. From the first unknown item on, the prompt is unknown.

use warmroute_core::block::PromptContent;
use warmroute_core::parity::ParityExpectation;
use warmroute_core::router::{Reason, RoutePrompt};
use warmroute_tokens::openai;
use warmroute_tokens::prompt::TokenBudget;
use warmroute_tokens::prompt::media::EngineModelName;

use super::{PromptEncoder, StageTimer, encode_error_reason};
use crate::request::partial_request::{MAX_ESTIMATED_TOKENS, PromptEncoding};

impl PromptEncoder<'_> {
    /// Encodes the prompt of a conversation with media.
    pub(super) fn encode_multimodal(
        &self,
        request: &openai::ApiRequest,
        timer: &mut StageTimer,
    ) -> Result<PromptEncoding, Reason> {
        let model = self.model;
        let encoder = model.encoder.as_ref().ok_or(Reason::NoTokenizer)?;
        let root = self.common_setting(|settings| match &settings.root {
            Some(root) => Some(EngineModelName::Same(root.clone())),
            None => settings.roots_differ.then_some(EngineModelName::Different),
        });
        let is_expired = timer.expiry_check();
        let budget = TokenBudget::new(self.max_prompt_tokens(), &is_expired);
        let cache_namespace = self.salt.cache.as_deref();
        let mut multimodal = encoder
            .encode_multimodal(request, cache_namespace, &budget, &root.unwrap_or_default())
            .map_err(encode_error_reason)?;
        timer.finish("render");
        let mut reason = Reason::Multimodal;
        let end = self.differing_end(request);
        if end > 0 && multimodal.is_complete {
            reason = Reason::ParityMismatch;
            multimodal.remove_end(end);
        }
        if !multimodal.is_complete {
            let size = model.block_size.tokens();
            let whole = multimodal.tokens.len() / size * size;
            multimodal.tokens.truncate(whole);
        }
        let objects = multimodal.objects();
        let content = PromptContent {
            objects: &objects,
            ..self.content(&multimodal.tokens)
        };
        let known = multimodal
            .tokens
            .content_hashes(&content, model.block_size, model.media);
        let tracked_blocks = self.tracked_content_blocks(&content, &known);
        let (prompt, tokens) = if multimodal.is_complete {
            let tokens = multimodal.tokens.into_ids();
            (RoutePrompt::Hashed(vec![known]), vec![tokens])
        } else {
            let min_tokens = (multimodal.min_tokens as u64).min(MAX_ESTIMATED_TOKENS);
            let prompt = RoutePrompt::Truncated {
                tokens: min_tokens.max(known.tokens() as u64),
                known,
                reason,
            };
            (prompt, Vec::new())
        };
        timer.finish("hash");
        Ok(PromptEncoding {
            prompt,
            tracked_blocks: tracked_blocks.map(|blocks| vec![blocks]),
            tokens,
            parity: ParityExpectation::Multimodal,
        })
    }
}
