//! Encodes a body: parses it, tokenizes its prompt and hashes the blocks. Bodies that are expected
//! to be quick are encoded on the caller's thread, others on encoder threads behind a bounded queue
//! with a deadline.
//!
//! Decision 0006. An incomplete body is routed by load, which supersedes Decision 0025.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use tracing::{debug, warn};
use warmroute_core::block::{BlockHashes, PromptContent, SequenceHash};
use warmroute_core::router::{Reason, RoutePrompt};
use warmroute_tokens::openai::{self, ApiKind, ApiWorkload, ParseError};
use warmroute_tokens::prompt::PromptTokens;

use super::body::RequestBody;
use super::encode_time::{EncodeKind, thread_cpu_time};
use super::encoder_pool;
use super::header_context::HeaderContext;
use super::models::{ResolvedModel, SaltedModel};
use super::partial_request::{PartialRequest, estimate_tokens};
use super::preprocessor::RequestPreprocessor;
use super::queue_slot::EncodeQueueSlot;
use super::tokenized::{ParsedRequest, StageTimer, TokenizedPrompts, unknown_prompt_reason};
use crate::dispatch::ResponseReference;
use crate::tracking_hash::{TrackingHash, TrackingScope};

impl RequestPreprocessor {
    /// Encodes a body, on this thread or on an encoder thread.
    pub(super) async fn encode(
        self: &Arc<Self>,
        api: ApiKind,
        context: HeaderContext,
        body: &RequestBody,
    ) -> PartialRequest {
        let body = match body {
            RequestBody::Absent => return PartialRequest::without_body(api, 0, Reason::NoBody),
            RequestBody::NotReceived => {
                return PartialRequest::without_body(api, 0, Reason::BodyNotSent);
            }
            RequestBody::Streamed => {
                return PartialRequest::without_body(api, 0, Reason::BodyStreamed);
            }
            RequestBody::OverBudget { bytes, model } => {
                return self.without_body(api, *bytes, model.clone(), Reason::TokenizerBusy);
            }
            RequestBody::Truncated { received, length } => {
                let bytes = length.map_or(received.len(), saturate_length);
                let partial = PartialRequest::without_body(api, bytes, Reason::BodyTruncated);
                return self.read_beginning(api, &context, received, partial);
            }
            RequestBody::TooLarge { received, bytes } => {
                let bytes = saturate_length(*bytes);
                let partial = PartialRequest::without_body(api, bytes, Reason::BodyTooLarge);
                return self.read_beginning(api, &context, received, partial);
            }
            RequestBody::Whole(body) => body,
        };
        let bytes = body.len();
        if self.encode_time.is_quick(bytes, self.parts.limits.inline) {
            return self.encode_blocking(api, &context, body);
        }
        let deadline = context.remaining_deadline(self.parts.limits.deadline);
        let encoded = self.encode_queued(api, context, body.clone());
        let reason = match tokio::time::timeout(deadline, encoded).await {
            Ok(Some(partial)) => return partial,
            Ok(None) => Reason::TokenizerBusy,
            Err(_) => Reason::DecisionTimeout,
        };
        self.without_body(api, bytes, openai::read_model_from_prefix(body), reason)
    }

    /// Returns a request without a readable body. A known model restricts it to the workers that
    /// serve the model.
    fn without_body(
        &self,
        api: ApiKind,
        bytes: usize,
        model: Option<String>,
        reason: Reason,
    ) -> PartialRequest {
        let mut partial = PartialRequest::without_body(api, bytes, reason);
        if model.is_some() {
            partial.set_model(model, &self.parts.models);
        }
        partial
    }

    /// Reads the fields that select workers from the beginning of a body: the model, the session
    /// and the stored response. Its prompt stays unknown.
    fn read_beginning(
        &self,
        api: ApiKind,
        context: &HeaderContext,
        received: &[u8],
        mut partial: PartialRequest,
    ) -> PartialRequest {
        let prefix = openai::searched_prefix(received);
        let boundary = context.form_boundary.as_deref();
        let model = match boundary.filter(|_| !api.has_text_body()) {
            // A form may name its model before its files.
            Some(_) => openai::parse_body(api, boundary, received)
                .ok()
                .and_then(|form| form.model),
            None => openai::text_at_path(prefix, "model"),
        };
        if model.is_some() {
            partial.set_model(model, &self.parts.models);
        }
        partial.session = self.session_in_body(context, prefix);
        if api == ApiKind::Responses {
            partial.response_reference = ResponseReference {
                id: openai::text_at_path(prefix, "previous_response_id")
                    .filter(|id| !id.is_empty()),
                may_store_response: true,
                tenant: None,
            };
        }
        partial
    }

    /// Encodes a body on an encoder thread. Returns `None` if the queue is full.
    async fn encode_queued(
        self: &Arc<Self>,
        api: ApiKind,
        context: HeaderContext,
        body: Bytes,
    ) -> Option<PartialRequest> {
        let large_body_slot = self.large_bodies.acquire(body.len()).await?;
        let _slot = EncodeQueueSlot::try_acquire(&self.queued_bodies, self.parts.limits.queue)?;
        // The semaphore is never closed. A panic of the encoder has already become an error.
        let permit = self.encoders.clone().acquire_owned().await.ok()?;
        let preprocessor = self.clone();
        let encode = move || {
            // Held until the job is done: a timeout ends the wait, but does not stop the job.
            let _permit = permit;
            let _large_body_slot = large_body_slot;
            preprocessor.encode_blocking(api, &context, &body)
        };
        encoder_pool::run(encode).await
    }

    /// Encodes a body on this thread.
    pub(super) fn encode_blocking(
        &self,
        api: ApiKind,
        context: &HeaderContext,
        body: &Bytes,
    ) -> PartialRequest {
        // Small bodies are not measured.
        let started = (body.len() > self.parts.limits.inline).then(thread_cpu_time);
        // Tokenizers are large external code. Their panics must not end the exchange.
        let result = catch_unwind(AssertUnwindSafe(|| self.encode_whole(api, context, body)));
        let partial = result.unwrap_or_else(|_| {
            warn!("tokenizer panicked");
            PartialRequest::without_body(api, body.len(), Reason::EncodeFailed)
        });
        // The time of a partial tokenization says nothing about the time of a whole body.
        if let Some(started) = started
            && !matches!(partial.prompt, RoutePrompt::Truncated { .. })
        {
            let kind = if partial.is_own_tokenization {
                EncodeKind::Tokenized
            } else {
                EncodeKind::ParsedOnly
            };
            self.encode_time
                .record(kind, body.len(), thread_cpu_time() - started);
        }
        self.apply_parity(context, partial)
    }

    /// Returns the session id in a body, if no header can contain it.
    fn session_in_body(&self, context: &HeaderContext, body: &[u8]) -> Option<String> {
        self.parts
            .session_fields
            .as_ref()
            .filter(|_| context.is_session_in_body)?
            .id_in_body(body)
    }

    /// Parses a whole body, with cached messages if there is a message cache.
    fn parse(
        &self,
        api: ApiKind,
        context: &HeaderContext,
        body: &Bytes,
    ) -> Result<ParsedRequest, ParseError> {
        let boundary = context.form_boundary.as_deref();
        match &self.parts.message_cache {
            Some(cache) => {
                let tenant = context.tenant.as_deref();
                let parsed = openai::parse_body_cached(api, boundary, body, cache, tenant);
                parsed.map(|(request, reuse)| ParsedRequest { request, reuse })
            }
            None => openai::parse_body(api, boundary, body).map(ParsedRequest::from),
        }
    }

    /// Parses, tokenizes and hashes a whole body. The model is kept even if the prompt fails, so
    /// that the request still goes to a worker that serves it.
    fn encode_whole(&self, api: ApiKind, context: &HeaderContext, body: &Bytes) -> PartialRequest {
        let mut clock = StageTimer::start(context.deadline);
        let mut partial = PartialRequest::without_body(api, body.len(), Reason::Unparseable);
        let decoded = match decode_utf8(body) {
            Ok(decoded) => decoded,
            Err(error) => {
                partial.parse_error = Some(error.to_string());
                return partial;
            }
        };
        let body = &decoded;
        partial.session = self.session_in_body(context, body);
        let mut parsed = match self.parse(api, context, body) {
            Ok(parsed) => parsed,
            Err(error) => {
                debug!(%error, "unreadable body");
                partial.parse_error = Some(error.to_string());
                partial.set_model(openai::read_model(body), &self.parts.models);
                return partial;
            }
        };
        partial.stage_times.push(("parse", clock.lap()));
        let request = &mut parsed.request;
        partial.apply_options(request);
        if let Some((text_bytes, reason)) = untokenized_prompt(&request.prompt) {
            // The size of an image is unrelated to its tokens, and far exceeds that of the text.
            let tokens = estimate_tokens(text_bytes);
            partial.prompt = RoutePrompt::Estimated { tokens, reason };
        }
        let cache = partial.take_cache_salt(context.tenant.as_deref(), request, self.parts.nvext);
        let Some(resolved) = partial.set_model(request.model.take(), &self.parts.models) else {
            if api.workload() != ApiWorkload::None {
                partial.set_reason(Reason::UnknownModel);
            }
            return partial;
        };
        if request.prompt == openai::PromptInput::NoPrompt {
            return partial;
        }
        self.set_max_length(&resolved, request);
        let model = SaltedModel::new(resolved, cache);
        if self.apply_engine_tokens(&model, context, request, &mut partial) {
            return partial;
        }
        let has_token_data = partial
            .extension
            .as_ref()
            .is_some_and(|extension| extension.token_data.is_some());
        if matches!(&request.prompt, openai::PromptInput::Chat(chat) if chat.has_media())
            && !has_token_data
        {
            self.encode_multimodal(&model, request, &mut partial, &mut clock);
            return partial;
        }
        match self.tokenize(&model, &parsed, &mut partial, &mut clock) {
            Ok(mut prompts) => {
                self.remove_differing_end(&model, &parsed.request, &mut prompts, &mut partial);
                self.hash_prompts(&model, prompts, &mut partial, &mut clock);
            }
            Err(reason) => partial.set_reason(reason),
        }
        partial
    }

    /// Hashes all prompts. If tokenization stopped early, hashes the first tokens of a single
    /// prompt.
    fn hash_prompts(
        &self,
        model: &SaltedModel,
        tokenized: TokenizedPrompts,
        partial: &mut PartialRequest,
        clock: &mut StageTimer,
    ) {
        let TokenizedPrompts {
            mut prompts,
            stop_reason,
        } = tokenized;
        if let Some(reason) = stop_reason {
            partial.set_reason(reason);
            if prompts.len() == 1
                && let Some(tokens) = prompts.pop()
            {
                self.set_prefix(model, tokens, partial);
                partial.stage_times.push(("hash", clock.lap()));
            }
            return;
        }
        let hashes: Vec<_> = prompts
            .iter()
            .map(|tokens| model.resumed_block_hashes(tokens))
            .collect();
        let prompts: Vec<_> = prompts.into_iter().map(PromptTokens::into_ids).collect();
        partial.tracked_blocks = self.tracked_blocks(model, &prompts, &hashes);
        partial.prompt = RoutePrompt::Hashed(hashes);
        partial.tokens = prompts;
        partial.stage_times.push(("hash", clock.lap()));
    }

    /// Sets the first tokens of an estimated prompt. The estimate and its reason do not change.
    pub(super) fn set_prefix(
        &self,
        model: &SaltedModel,
        mut tokens: PromptTokens,
        partial: &mut PartialRequest,
    ) {
        let Some(reason) = partial.prompt.reason() else {
            return;
        };
        let size = model.resolved.model.block_size.tokens();
        tokens.truncate(tokens.len() / size * size);
        if tokens.is_empty() {
            return;
        }
        let known = model.resumed_block_hashes(&tokens);
        let prompts = [tokens.into_ids()];
        partial.tracked_blocks = self.tracked_blocks(model, &prompts, std::slice::from_ref(&known));
        let tokens = partial.prompt.tokens().max(known.tokens() as u64);
        partial.prompt = RoutePrompt::Truncated {
            known,
            tokens,
            reason,
        };
    }

    /// Returns the hashes that identify the blocks in load tracking; `None` if they equal the
    /// sequence hashes.
    pub(super) fn tracked_blocks(
        &self,
        model: &SaltedModel,
        prompts: &[Vec<u32>],
        hashes: &[BlockHashes],
    ) -> Option<Vec<Arc<[SequenceHash]>>> {
        if self.parts.tracking_hash == TrackingHash::Public {
            return None;
        }
        let tracked = prompts.iter().zip(hashes).map(|(tokens, hashes)| {
            self.tracked_content_blocks(&model.resolved, &model.content(tokens), hashes)
                .unwrap_or_default()
                .pop()
        });
        tracked.collect()
    }

    /// Returns the hashes that identify one prompt's blocks in load tracking; `None` if they equal
    /// the sequence hashes.
    pub(super) fn tracked_content_blocks(
        &self,
        resolved: &ResolvedModel,
        content: &PromptContent<'_>,
        hashes: &BlockHashes,
    ) -> Option<Vec<Arc<[SequenceHash]>>> {
        if self.parts.tracking_hash == TrackingHash::Public {
            return None;
        }
        let scope = TrackingScope {
            model: resolved.model.name.as_str(),
            routing_group: "",
        };
        Some(vec![
            self.parts.tracking_hash.sequences(content, hashes, scope),
        ])
    }
}

/// Converts an announced length.
fn saturate_length(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Converts a body to UTF-8 without a byte order mark. Only bodies in other encodings are copied.
fn decode_utf8(body: &Bytes) -> Result<Bytes, ParseError> {
    openai::decode_body(body).map(|decoded| match decoded {
        Cow::Borrowed(decoded) => body.slice_ref(decoded),
        Cow::Owned(decoded) => decoded.into(),
    })
}

/// Returns the bytes of text in a prompt that is not tokenized, and the reason.
fn untokenized_prompt(prompt: &openai::PromptInput) -> Option<(usize, Reason)> {
    match prompt {
        openai::PromptInput::Chat(chat) if chat.has_media() => {
            Some((chat.text_bytes(), Reason::Multimodal))
        }
        openai::PromptInput::Unknown(opaque) => {
            Some((opaque.text_bytes, unknown_prompt_reason(*opaque)))
        }
        openai::PromptInput::NoPrompt => Some((0, Reason::NotInference)),
        _ => None,
    }
}
