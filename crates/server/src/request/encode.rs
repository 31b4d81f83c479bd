//! Encodes a body: parses it, tokenizes its prompt and hashes the blocks. Bodies that are expected
//! to be quick are encoded on the caller's thread, others on encoder threads behind a bounded queue
//! with a deadline.
//!
//! Decision 0006. An incomplete body is routed by load, which supersedes Decision 0025.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tracing::{debug, warn};
use warmroute_core::router::{Reason, RoutePrompt};
use warmroute_core::worker::ModelName;
use warmroute_engines::engine_client::{EngineRendering, RenderApi};
use warmroute_metrics::ModelOutcomeLabels;
use warmroute_tokens::openai::{
    self, ApiKind, ApiWorkload, MessageReuse, NvExt, ParseError, PromptInput,
};

use super::encode_time::{EncodeKind, thread_cpu_time};
use super::engine_tokens::{EngineTokensClient, EngineTokensResult, RenderQuery};
use super::partial_request::{BodyFields, PartialRequest, PromptEncoding, estimate_tokens};
use super::preprocess::RequestBody;
use super::preprocessor::RequestPreprocessor;
use super::prompt_encoder::{ParsedRequest, PromptEncoder, StageTimer, unknown_prompt_reason};
use crate::dispatch::ResponseReference;

/// Values that are needed to encode the body.
pub(super) struct HeaderContext {
    /// Boundary of the parts of a form.
    pub(super) form_boundary: Option<String>,
    /// The tenant, which separates caches if the engines read the same header.
    pub(super) tenant: Option<String>,
    /// Whether the session id can only be in the body.
    pub(super) is_session_in_body: bool,
    /// Tokens that engines computed for the prompt.
    pub(super) engine_tokens: EngineTokensResult,
    /// Time spent waiting for engines.
    pub(super) engine_wait: Duration,
    /// Deadline of tokenization.
    pub(super) deadline: Option<Instant>,
}

impl RequestPreprocessor {
    /// Encodes a body, on this thread or on an encoder thread.
    pub(super) async fn encode(
        self: &Arc<Self>,
        api: ApiKind,
        context: HeaderContext,
        body: &RequestBody,
    ) -> PartialRequest {
        let (fields, bytes, reason) = match body {
            RequestBody::Whole(body) => return self.encode_received(api, context, body).await,
            RequestBody::Absent => (BodyFields::default(), 0, Reason::NoBody),
            RequestBody::NotReceived => (BodyFields::default(), 0, Reason::BodyNotSent),
            RequestBody::Streamed => (BodyFields::default(), 0, Reason::BodyStreamed),
            RequestBody::OverBudget { bytes, model } => {
                let fields = self.fields_of_model(model.clone());
                (fields, *bytes, Reason::TokenizerBusy)
            }
            RequestBody::Truncated { received, length } => {
                let bytes = length.map_or(received.len(), saturate_length);
                let fields = self.read_beginning(api, &context, received);
                (fields, bytes, Reason::BodyTruncated)
            }
            RequestBody::TooLarge { received, bytes } => {
                let fields = self.read_beginning(api, &context, received);
                (fields, saturate_length(*bytes), Reason::BodyTooLarge)
            }
        };
        PartialRequest {
            fields,
            ..PartialRequest::without_body(api, bytes, reason)
        }
    }

    async fn encode_received(
        self: &Arc<Self>,
        api: ApiKind,
        context: HeaderContext,
        body: &Bytes,
    ) -> PartialRequest {
        let bytes = body.len();
        if self.encode_time.is_quick(bytes, self.parts.limits.inline) {
            return self.encode_blocking(api, &context, body);
        }
        let deadline = self
            .parts
            .limits
            .deadline
            .saturating_sub(context.engine_wait);
        let encoded = self.encode_queued(api, context, body.clone());
        let reason = match tokio::time::timeout(deadline, encoded).await {
            Ok(Some(partial)) => return partial,
            Ok(None) => Reason::TokenizerBusy,
            Err(_) => Reason::DecisionTimeout,
        };
        PartialRequest {
            fields: self.fields_of_model(openai::read_model_from_prefix(body)),
            ..PartialRequest::without_body(api, bytes, reason)
        }
    }

    /// Returns the fields of a body without a readable prompt. A known model restricts the request
    /// to the workers that serve the model.
    fn fields_of_model(&self, model: Option<String>) -> BodyFields {
        match model {
            Some(_) => BodyFields::of_model(model, &self.parts.models),
            None => BodyFields::default(),
        }
    }

    /// Reads the fields that select workers from the beginning of a body: the model, the session
    /// and the stored response. Its prompt stays unknown.
    fn read_beginning(&self, api: ApiKind, context: &HeaderContext, received: &[u8]) -> BodyFields {
        let prefix = openai::searched_prefix(received);
        let boundary = context.form_boundary.as_deref();
        let model = match boundary.filter(|_| !api.has_text_body()) {
            // A form may name its model before its files.
            Some(_) => openai::parse_body(api, boundary, received)
                .ok()
                .and_then(|form| form.model),
            None => openai::text_at_path(prefix, "model"),
        };
        let response_reference = match api {
            ApiKind::Responses => ResponseReference {
                id: openai::text_at_path(prefix, "previous_response_id")
                    .filter(|id| !id.is_empty()),
                may_store_response: true,
                tenant: None,
            },
            _ => ResponseReference::default(),
        };
        BodyFields {
            session: self.session_in_body(context, prefix),
            response_reference,
            ..self.fields_of_model(model)
        }
    }

    /// Encodes a body on an encoder thread. Returns `None` if the queue is full.
    async fn encode_queued(
        self: &Arc<Self>,
        api: ApiKind,
        context: HeaderContext,
        body: Bytes,
    ) -> Option<PartialRequest> {
        let slot = self.large_bodies.acquire(body.len()).await?;
        let preprocessor = self.clone();
        let encode = move || {
            // Held until the job is done.
            let _slot = slot;
            preprocessor.encode_blocking(api, &context, &body)
        };
        // A panic of the encoder has already become an error.
        self.encoders.run(encode).await.ok()
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
        let mut partial = result.unwrap_or_else(|_| {
            warn!("tokenizer panicked");
            PartialRequest::without_body(api, body.len(), Reason::EncodeFailed)
        });
        let PartialRequest {
            fields, prompts, ..
        } = &partial;
        // The time of a partial tokenization says nothing about the time of a whole body.
        if let Some(started) = started
            && !matches!(prompts.prompt, RoutePrompt::Truncated { .. })
        {
            let kind = if prompts.is_own_tokenization() {
                EncodeKind::Tokenized
            } else {
                EncodeKind::ParsedOnly
            };
            self.encode_time
                .record(kind, body.len(), thread_cpu_time() - started);
        }
        let resolved = fields.resolved.as_ref();
        let source =
            resolved.and_then(|resolved| self.parts.token_sources.get(&resolved.model.name));
        if !matches!(context.engine_tokens, EngineTokensResult::NotRequested) {
            partial
                .stage_times
                .push(("engine_tokens", context.engine_wait));
        }
        PartialRequest {
            prompts: partial.prompts.degrade_without_parity(source),
            ..partial
        }
    }

    /// Returns the session id in a body, if no header can contain it.
    fn session_in_body(&self, context: &HeaderContext, body: &[u8]) -> Option<String> {
        self.parts
            .sessions
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
    ) -> Result<(openai::ApiRequest, MessageReuse), ParseError> {
        let boundary = context.form_boundary.as_deref();
        match &self.parts.message_cache {
            Some(cache) => {
                let tenant = context.tenant.as_deref();
                openai::parse_body_cached(api, boundary, body, cache, tenant)
            }
            None => openai::parse_body(api, boundary, body)
                .map(|request| (request, MessageReuse::default())),
        }
    }

    /// Parses, tokenizes and hashes a whole body. The model is kept even if the prompt fails, so
    /// that the request still goes to a worker that serves it.
    fn encode_whole(&self, api: ApiKind, context: &HeaderContext, body: &Bytes) -> PartialRequest {
        let mut timer = StageTimer::start(context.deadline);
        let unread = PartialRequest::without_body(api, body.len(), Reason::Unparseable);
        let body = match decode_utf8(body) {
            Ok(decoded) => decoded,
            Err(error) => return unread.with_parse_error(BodyFields::default(), &error),
        };
        let session = self.session_in_body(context, &body);
        let models = &self.parts.models;
        let (mut request, reuse) = match self.parse(api, context, &body) {
            Ok(parsed) => parsed,
            Err(error) => {
                debug!(%error, "unreadable body");
                let fields = BodyFields {
                    session,
                    ..BodyFields::of_model(openai::read_model(&body), models)
                };
                return unread.with_parse_error(fields, &error);
            }
        };
        timer.finish("parse");
        let mut fields = BodyFields {
            session,
            ..BodyFields::take_from(&mut request, self.parts.nvext, models)
        };
        let extension = fields.extension.as_mut();
        let token_data = extension.and_then(|extension| extension.token_data.take());
        let parsed = ParsedRequest {
            request,
            reuse,
            token_data,
        };
        let estimated = untokenized_prompt(&parsed.request.prompt).unwrap_or(unread.prompts);
        let estimate = estimated.prompt.tokens();
        let prompts = match &fields.resolved {
            None if api.workload() == ApiWorkload::None => estimated,
            None => PromptEncoding::estimated(estimate, Reason::UnknownModel),
            Some(_) if parsed.request.prompt == PromptInput::NoPrompt => estimated,
            Some(resolved) => {
                let cache = cache_salt(context, fields.extension.as_deref(), &parsed);
                let encoder = PromptEncoder::new(&self.parts, resolved, cache);
                encoder.encode(context, parsed, estimate, &mut timer)
            }
        };
        PartialRequest {
            prompts,
            fields,
            stage_times: timer.into_times(),
        }
    }

    /// Fetches the tokens of a body from an engine, if configured for its model.
    pub(super) async fn fetch_engine_tokens(
        &self,
        api: ApiKind,
        body: &RequestBody,
    ) -> Option<EngineTokensResult> {
        let RequestBody::Whole(body) = body else {
            return None;
        };
        let sources = &self.parts.token_sources;
        if sources
            .values()
            .all(|source| source.engine_tokens.is_none())
        {
            return None;
        }
        let requested = openai::read_model_from_prefix(body);
        let resolved = self.parts.models.resolve(requested.as_deref())?;
        let model = &resolved.model.name;
        let source = sources.get(model)?;
        let engine = source.engine_tokens.as_ref();
        let engine = engine.filter(|engine| engine.is_wanted(&source.parity))?;
        let result = self.query_engines(engine, api, model, body).await;
        let result = result.transpose()?;
        let outcome = result.as_ref().err().copied().unwrap_or("ok");
        engine
            .metrics
            .tokens
            .remote_tokenizer_requests
            .get_or_create(&ModelOutcomeLabels::new(model, outcome))
            .inc();
        Some(result.map_or(EngineTokensResult::Failed, |rendered| {
            EngineTokensResult::Tokens(model.clone(), rendered)
        }))
    }

    /// Returns the tokens of a body; `None` if engines cannot be queried for it.
    async fn query_engines(
        &self,
        engine: &Arc<EngineTokensClient>,
        api: ApiKind,
        model: &ModelName,
        body: &Bytes,
    ) -> Result<Option<Vec<EngineRendering>>, &'static str> {
        let started = Instant::now();
        // Acquired first, so that bodies beyond the limit are not parsed.
        let _permit = engine.in_flight.try_acquire().map_err(|_| "busy")?;
        let prepared = self.prepare_query(engine, api, body);
        let prepared = tokio::time::timeout(engine.config.timeout.get(), prepared).await;
        let Some((api, body)) = prepared.map_err(|_| "timeout")?? else {
            return Ok(None);
        };
        let query = RenderQuery { api, body, started };
        engine.fetch(model, query).await.map(Some)
    }

    /// Prepares the query. For a long body, this happens on an encoder thread, in the same queue as
    /// prompts.
    async fn prepare_query(
        &self,
        engine: &Arc<EngineTokensClient>,
        api: ApiKind,
        body: &Bytes,
    ) -> Result<Option<(RenderApi, Bytes)>, &'static str> {
        if body.len() <= self.parts.limits.inline {
            return Ok(engine.render_query(api, body));
        }
        let engine = engine.clone();
        let body = body.clone();
        self.encoders
            .run(move || engine.render_query(api, &body))
            .await
    }
}

/// Returns the salt that separates the cached prompts of a client.
fn cache_salt(
    context: &HeaderContext,
    extension: Option<&NvExt>,
    parsed: &ParsedRequest,
) -> Option<String> {
    context
        .tenant
        .as_ref()
        .or(extension.and_then(|extension| extension.cache_salt.as_ref()))
        .or(parsed.request.cache_salt.as_ref())
        .cloned()
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

/// Returns the estimate for a prompt that is never tokenized; `None` for other prompts.
fn untokenized_prompt(prompt: &PromptInput) -> Option<PromptEncoding> {
    let (bytes, reason) = match prompt {
        // The size of an image is unrelated to its tokens, and far exceeds that of the text.
        PromptInput::Chat(chat) if chat.has_media() => (chat.text_bytes(), Reason::Multimodal),
        PromptInput::Unknown(unknown) => (unknown.text_bytes, unknown_prompt_reason(*unknown)),
        PromptInput::NoPrompt => (0, Reason::NotInference),
        _ => return None,
    };
    Some(PromptEncoding::estimated(estimate_tokens(bytes), reason))
}
