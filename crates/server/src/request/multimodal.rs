//! Conversations with images and other media. Blocks are known as far as the engine's tokens and
//! item hashes are. From the first unknown item on, the prompt is unknown.

use warmroute_core::block::PromptContent;
use warmroute_core::router::{Reason, RoutePrompt};
use warmroute_tokens::openai;
use warmroute_tokens::prompt::media::EngineModelName;
use warmroute_tokens::prompt::{MultimodalPrompt, TokenBudget};

use super::models::SaltedModel;
use super::partial_request::{PartialRequest, estimate_tokens};
use super::preprocessor::RequestPreprocessor;
use super::tokenized::{StageTimer, encode_error_reason};

impl RequestPreprocessor {
    /// Encodes the prompt of a conversation with media.
    pub(super) fn encode_multimodal(
        &self,
        model: &SaltedModel,
        request: &openai::ApiRequest,
        partial: &mut PartialRequest,
        clock: &mut StageTimer,
    ) {
        let SaltedModel { resolved, salt } = model;
        let Some(encoder) = &resolved.model.encoder else {
            return partial.set_reason(Reason::NoTokenizer);
        };
        let root = self.common_setting(resolved, |settings| match &settings.root {
            Some(root) => Some(EngineModelName::Same(root.clone())),
            None => settings.roots_differ.then_some(EngineModelName::Different),
        });
        let is_over = clock.expiry_check();
        let budget = TokenBudget::new(self.max_prompt_tokens(resolved), &is_over);
        let root = root.unwrap_or_default();
        let mut multimodal =
            match encoder.encode_multimodal(request, salt.cache.as_deref(), &budget, &root) {
                Ok(multimodal) => multimodal,
                Err(error) => return partial.set_reason(encode_error_reason(error)),
            };
        partial.stage_times.push(("render", clock.lap()));
        partial.is_own_tokenization = true;
        partial.has_media = true;
        let mut reason = Reason::Multimodal;
        let end = self.differing_end(model, request);
        if end > 0 && multimodal.is_complete {
            reason = Reason::ParityMismatch;
            multimodal.remove_end(end);
        }
        if !multimodal.is_complete {
            let size = resolved.model.block_size.tokens();
            let whole = multimodal.tokens.len() / size * size;
            multimodal.tokens.truncate(whole);
        }
        let MultimodalPrompt {
            tokens,
            min_tokens,
            is_complete,
            ..
        } = &multimodal;
        let objects = multimodal.objects();
        let content = PromptContent {
            windows: resolved.windows,
            objects: &objects,
            ..PromptContent::text(tokens, salt)
        };
        let known =
            tokens.content_hashes(&content, resolved.model.block_size, resolved.model.media);
        partial.tracked_blocks = self.tracked_content_blocks(resolved, &content, &known);
        if *is_complete {
            partial.prompt = RoutePrompt::Hashed(vec![known]);
            partial.tokens = vec![multimodal.tokens.into_ids()];
        } else {
            let tokens = (*min_tokens as u64)
                .min(estimate_tokens(usize::MAX))
                .max(known.tokens() as u64);
            partial.prompt = RoutePrompt::Truncated {
                known,
                tokens,
                reason,
            };
        }
        partial.stage_times.push(("hash", clock.lap()));
    }
}
