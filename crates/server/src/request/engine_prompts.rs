//! Prompts from engine tokens: queries an engine before the body is encoded, replaces the local
//! tokens, and degrades prompts whose local tokens have broken parity.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::Bytes;
use warmroute_core::block::multimodal::{ObjectHash, PromptObject};
use warmroute_core::block::{BlockHashes, PromptContent, SequenceHash, placeholders};
use warmroute_core::parity::ParityExpectation;
use warmroute_core::router::{Reason, RoutePrompt};
use warmroute_core::worker::ModelName;
use warmroute_engines::engine_client::{EngineRendering, RenderApi, RenderedObject};
use warmroute_metrics::ModelOutcomeLabels;
use warmroute_tokens::openai::{self, ApiKind};
use warmroute_tokens::prompt::{BoundedTokens, TokenBudget};

use super::body::RequestBody;
use super::encoder_pool;
use super::engine_tokens::config::RenderPath;
use super::engine_tokens::{EngineTokensClient, EngineTokensResult, RenderQuery, TokenSource};
use super::header_context::HeaderContext;
use super::models::SaltedModel;
use super::partial_request::PartialRequest;
use super::preprocessor::RequestPreprocessor;
use super::queue_slot::EncodeQueueSlot;
use super::tokenized::{StageTimer, TokenizedPrompts};

/// While parity is broken, one in this many prompts is also tokenized locally and compared.
const SHADOW_INTERVAL: usize = 8;

impl RequestPreprocessor {
    /// Fetches the tokens of a body from an engine, if configured for its model.
    pub(super) async fn fetch_engine_tokens(
        self: &Arc<Self>,
        api: ApiKind,
        context: &mut HeaderContext,
        body: &RequestBody,
    ) {
        if self
            .parts
            .token_sources
            .values()
            .all(|source| source.engine_tokens.is_none())
        {
            return;
        }
        let RequestBody::Whole(bytes) = body else {
            return;
        };
        let requested = openai::read_model_from_prefix(bytes);
        let Some(resolved) = self.parts.models.resolve(requested.as_deref()) else {
            return;
        };
        let model = &resolved.model.name;
        let Some(source) = self.parts.token_sources.get(model) else {
            return;
        };
        let Some(engine) = source
            .engine_tokens
            .as_ref()
            .filter(|engine| engine.is_wanted(&source.parity))
        else {
            return;
        };
        let started = Instant::now();
        let Some(result) = self.query_engines(engine, api, model, bytes).await else {
            return;
        };
        let outcome = result.as_ref().err().copied().unwrap_or("ok");
        let label = ModelOutcomeLabels {
            model: model.as_str().into(),
            outcome,
        };
        engine
            .metrics
            .tokens
            .remote_tokenizer_requests
            .get_or_create(&label)
            .inc();
        context.engine_tokens = result.map_or(EngineTokensResult::Failed, |rendered| {
            EngineTokensResult::Tokens(model.clone(), rendered)
        });
        context.engine_wait = started.elapsed();
    }

    /// Returns the tokens of a body; `None` if engines cannot be queried for it.
    async fn query_engines(
        self: &Arc<Self>,
        engine: &EngineTokensClient,
        api: ApiKind,
        model: &ModelName,
        body: &Bytes,
    ) -> Option<Result<Vec<EngineRendering>, &'static str>> {
        let started = Instant::now();
        // Acquired first, so that bodies beyond the limit are not parsed.
        let Ok(_permit) = engine.in_flight.try_acquire() else {
            return Some(Err("busy"));
        };
        let prepared = tokio::time::timeout(
            engine.config.timeout.get(),
            self.prepare_query(api, model, body),
        )
        .await;
        match prepared.unwrap_or(Err("timeout")) {
            Ok(Some((api, body))) => Some(
                engine
                    .fetch(model, RenderQuery { api, body, started })
                    .await,
            ),
            Ok(None) => None,
            Err(outcome) => Some(Err(outcome)),
        }
    }

    /// Prepares the query. For a long body, this happens on an encoder thread, in the same queue as
    /// prompts.
    async fn prepare_query(
        self: &Arc<Self>,
        api: ApiKind,
        model: &ModelName,
        body: &Bytes,
    ) -> Result<Option<(RenderApi, Bytes)>, &'static str> {
        let query = move |preprocessor: &Self, model: &ModelName, body: &Bytes| {
            preprocessor
                .parts
                .token_sources
                .get(model)?
                .engine_tokens
                .as_ref()?
                .render_query(api, body)
        };
        if body.len() <= self.parts.limits.inline {
            return Ok(query(self, model, body));
        }
        let _slot = EncodeQueueSlot::try_acquire(&self.queued_bodies, self.parts.limits.queue)
            .ok_or("busy")?;
        let permit = self
            .encoders
            .clone()
            .acquire_owned()
            .await
            .map_err(|_| "busy")?;
        let preprocessor = self.clone();
        let model = model.clone();
        let body = body.clone();
        let prepare = move || {
            // Held until the job is done, as for prompts.
            let _permit = permit;
            query(&preprocessor, &model, &body)
        };
        encoder_pool::run(prepare).await.ok_or("client")
    }

    /// Applies the tokens of the engine to the prompt. Returns false if they are not usable.
    pub(super) fn apply_engine_tokens(
        &self,
        model: &SaltedModel,
        context: &HeaderContext,
        request: &openai::ApiRequest,
        partial: &mut PartialRequest,
    ) -> bool {
        let EngineTokensResult::Tokens(name, rendered) = &context.engine_tokens else {
            return false;
        };
        let Some(source) = self
            .parts
            .token_sources
            .get(name)
            .filter(|_| *name == model.resolved.model.name)
        else {
            return false;
        };
        let has_media =
            matches!(&request.prompt, openai::PromptInput::Chat(chat) if chat.has_media());
        let tokenize_only = source
            .engine_tokens
            .as_ref()
            .is_some_and(|engine| engine.config.endpoint == RenderPath::Tokenize);
        let has_own_tokens = partial
            .extension
            .as_ref()
            .is_some_and(|extension| extension.token_data.is_some());
        let Some(prompt_count) = prompt_count(&request.prompt) else {
            return false;
        };
        // `/tokenize` does not return images.
        if has_own_tokens || (has_media && tokenize_only) || rendered.len() != prompt_count {
            return false;
        }
        let max_tokens = self.max_prompt_tokens(&model.resolved);
        if rendered
            .iter()
            .any(|rendering| rendering.token_ids.len() > max_tokens)
        {
            partial.set_reason(Reason::PromptTooLong);
            // A prompt with images is not hashed in part: its blocks need the image objects, and
            // the engine refuses the prompt.
            if let [rendering] = &rendered[..]
                && rendering.objects.is_empty()
            {
                let tokens = rendering.token_ids[..max_tokens].to_vec();
                self.set_prefix(model, tokens.into(), partial);
            }
            return true;
        }
        let prompts: Vec<_> = rendered
            .iter()
            .map(|rendering| rendering.token_ids.clone())
            .collect();
        let (hashes, tracked): (Vec<_>, Vec<_>) = rendered
            .iter()
            .map(|rendering| self.engine_blocks(model, rendering))
            .unzip();
        partial.tracked_blocks = tracked
            .into_iter()
            .map(|mut tracked_blocks| tracked_blocks.as_mut().and_then(Vec::pop))
            .collect();
        partial.prompt = RoutePrompt::Hashed(hashes);
        if source.parity.are_tokens_disabled() && !has_media {
            partial.parity_expectation =
                self.shadow_expectation(model, source, context.deadline, request);
        }
        partial.tokens = prompts;
        true
    }

    /// Returns the block hashes of a rendered prompt, and the hashes that identify its blocks in
    /// load tracking.
    fn engine_blocks(
        &self,
        model: &SaltedModel,
        rendered: &EngineRendering,
    ) -> (BlockHashes, Option<Vec<Arc<[SequenceHash]>>>) {
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
            ..model.content(&rendered.token_ids)
        };
        let configured = &model.resolved.model;
        let hashes = placeholders::prompt_hashes(&content, configured.block_size, configured.media);
        let tracked_blocks = self.tracked_content_blocks(&model.resolved, &content, &hashes);
        (hashes, tracked_blocks)
    }

    /// Returns the block hashes of the local tokens, for one in [`SHADOW_INTERVAL`] requests. The
    /// parity check compares them with the events of the engine. The usual limits of tokenization
    /// apply.
    fn shadow_expectation(
        &self,
        model: &SaltedModel,
        source: &TokenSource,
        deadline: Option<Instant>,
        request: &openai::ApiRequest,
    ) -> ParityExpectation {
        let SaltedModel { resolved, salt } = model;
        let (Some(engine), Some(encoder)) = (&source.engine_tokens, &resolved.model.encoder) else {
            return ParityExpectation::NotPredicted;
        };
        if !engine
            .next_target
            .load(Ordering::Relaxed)
            .is_multiple_of(SHADOW_INTERVAL)
        {
            return ParityExpectation::NotPredicted;
        }
        let is_over = StageTimer::start(deadline).expiry_check();
        let budget = TokenBudget::new(self.max_prompt_tokens(resolved), &is_over);
        let rendered = encoder.render(request);
        let prompts = rendered.and_then(|rendered| {
            encoder.tokenize_bounded(&rendered, salt.cache.as_deref(), &budget)
        });
        match prompts.as_deref() {
            Ok(
                [
                    BoundedTokens {
                        tokens,
                        stopped: None,
                    },
                ],
            ) => ParityExpectation::Shadow(Box::new(model.resumed_block_hashes(tokens))),
            _ => ParityExpectation::NotPredicted,
        }
    }

    /// Removes the end of a prompt whose generation prompt differs in some engine.
    pub(super) fn remove_differing_end(
        &self,
        model: &SaltedModel,
        request: &openai::ApiRequest,
        tokenized: &mut TokenizedPrompts,
        partial: &mut PartialRequest,
    ) {
        let end = self.differing_end(model, request);
        let TokenizedPrompts {
            prompts,
            stop_reason: reason @ None,
        } = tokenized
        else {
            return;
        };
        if end > 0
            && partial.is_own_tokenization
            && let [tokens] = &mut prompts[..]
        {
            partial.prompt = RoutePrompt::Estimated {
                tokens: tokens.len() as u64,
                reason: Reason::ParityMismatch,
            };
            tokens.truncate(tokens.len().saturating_sub(end));
            *reason = Some(Reason::ParityMismatch);
        }
    }

    /// Returns the number of tokens at the end of a prompt that some engine computes differently.
    /// If truncation removes the beginning, these are all tokens, because the number of removed
    /// tokens depends on the end.
    pub(super) fn differing_end(&self, model: &SaltedModel, request: &openai::ApiRequest) -> usize {
        let has_generation_prompt = matches!(
            &request.prompt,
            openai::PromptInput::Chat(chat) if chat.add_generation_prompt
        );
        let source = self.parts.token_sources.get(&model.resolved.model.name);
        let end = source
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

    /// Degrades a prompt whose tokens have broken parity.
    pub(super) fn apply_parity(
        &self,
        context: &HeaderContext,
        mut partial: PartialRequest,
    ) -> PartialRequest {
        if !matches!(context.engine_tokens, EngineTokensResult::NotRequested) {
            partial
                .stage_times
                .push(("engine_tokens", context.engine_wait));
        }
        if matches!(context.engine_tokens, EngineTokensResult::Failed)
            && partial.prompt.reason() == Some(Reason::NoTokenizer)
        {
            partial.set_reason(Reason::RemoteTokenizerFailed);
        }
        let source = partial
            .model
            .as_ref()
            .and_then(|model| self.parts.token_sources.get(model));
        let Some(source) = source.filter(|_| partial.is_own_tokenization) else {
            return partial;
        };
        if !source.parity.are_tokens_disabled() {
            partial.parity_expectation = if partial.has_media {
                ParityExpectation::Multimodal
            } else {
                ParityExpectation::Prompt
            };
            return partial;
        }
        let tokens = partial.prompt.tokens();
        let estimated = RoutePrompt::Estimated {
            tokens,
            reason: Reason::ParityMismatch,
        };
        let shadow = match std::mem::replace(&mut partial.prompt, estimated) {
            RoutePrompt::Hashed(prompts) => <[BlockHashes; 1]>::try_from(prompts)
                .ok()
                .filter(|_| !partial.has_media),
            RoutePrompt::Truncated { .. } => None,
            // An estimated prompt is not affected.
            prompt @ RoutePrompt::Estimated { .. } => {
                partial.prompt = prompt;
                return partial;
            }
        };
        partial.parity_expectation = shadow.map_or(ParityExpectation::NotPredicted, |[hashes]| {
            ParityExpectation::Shadow(Box::new(hashes))
        });
        partial.tracked_blocks = None;
        partial.tokens = Vec::new();
        partial
    }
}

/// Returns the number of prompts whose tokens an engine reports. `None` for too many prompts, and
/// for prompts that tokens do not describe completely.
fn prompt_count(prompt: &openai::PromptInput) -> Option<usize> {
    match prompt {
        openai::PromptInput::Chat(_) => Some(1),
        openai::PromptInput::Texts(texts) => Some(texts.len()),
        openai::PromptInput::Tokens(lists) => Some(lists.len()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
