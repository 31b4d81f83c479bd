//! Result of reading a body. It starts with an estimate from the length and is refined by each
//! stage, so that it remains usable wherever reading stops.

use std::sync::Arc;
use std::time::Duration;

use warmroute_core::block::SequenceHash;
use warmroute_core::parity::ParityExpectation;
use warmroute_core::router::{Reason, RoutePrompt};
use warmroute_core::worker::ModelName;
use warmroute_tokens::openai::{self, ApiKind, ApiWorkload, NvExt};

use super::models::{ModelRegistry, ResolvedModel};
use super::preprocessor::NvExtScope;
use crate::dispatch::ResponseReference;

/// Assumed bytes of a body per token. English and code have between 3 and 5.
const BYTES_PER_TOKEN: u64 = 4;

/// Maximum number of tokens estimated from bytes: the context length of large models. An estimate
/// must not exceed any possible prompt.
pub(super) const MAX_ESTIMATED_TOKENS: u64 = 131_072;

/// Result of reading a body.
pub(super) struct PartialRequest {
    pub(super) requested_model: Option<String>,
    pub(super) model: Option<ModelName>,
    pub(super) adapter: Option<String>,
    pub(super) prompt: RoutePrompt,
    /// Whether the prompt was tokenized here, from text.
    pub(super) is_own_tokenization: bool,
    /// Whether the prompt contains images or other media.
    pub(super) has_media: bool,
    pub(super) parity_expectation: ParityExpectation,
    pub(super) tracked_blocks: Option<Vec<Arc<[SequenceHash]>>>,
    pub(super) tokens: Vec<Vec<u32>>,
    pub(super) extension: Option<Box<NvExt>>,
    pub(super) session: Option<String>,
    /// Maximum length of the answer.
    pub(super) max_output_tokens: Option<u64>,
    /// Whether the client requests a stream.
    pub(super) is_streamed: bool,
    /// Whether the engine may find the prompt cached.
    pub(super) reads_prefix_cache: bool,
    /// Stored responses that the request refers to or creates.
    pub(super) response_reference: ResponseReference,
    /// The parse error.
    pub(super) parse_error: Option<String>,
    pub(super) stage_times: Vec<(&'static str, Duration)>,
}

impl NvExtScope {
    fn parse(self, raw: &str) -> Option<NvExt> {
        match self {
            NvExtScope::Nothing => None,
            NvExtScope::Content => Some(NvExt::parse(raw).into_content()),
            NvExtScope::All => Some(NvExt::parse(raw)),
        }
    }
}

impl PartialRequest {
    pub(super) fn estimated(tokens: u64, reason: Reason) -> Self {
        let prompt = RoutePrompt::Estimated { tokens, reason };
        let times = Vec::with_capacity(4);
        Self {
            requested_model: None,
            model: None,
            adapter: None,
            prompt,
            is_own_tokenization: false,
            has_media: false,
            parity_expectation: ParityExpectation::NotPredicted,
            tracked_blocks: None,
            tokens: vec![],
            extension: None,
            session: None,
            max_output_tokens: None,
            is_streamed: false,
            reads_prefix_cache: true,
            response_reference: ResponseReference::default(),
            parse_error: None,
            stage_times: times,
        }
    }

    /// Sets the properties of the request that do not depend on the prompt. As in vLLM, a request for
    /// log probabilities of the prompt does not read the prefix cache. This is assumed of all engines.
    pub(super) fn apply_options(&mut self, request: &openai::ApiRequest) {
        self.response_reference = ResponseReference {
            id: request.previous_response_id.clone(),
            may_store_response: request.stores_response,
            tenant: None,
        };
        self.max_output_tokens = request.max_output_tokens;
        self.is_streamed = request.stream;
        self.reads_prefix_cache = !request.returns_prompt_logprobs;
    }

    /// Takes the cache salt of the client, and the fields of `nvext` that apply.
    pub(super) fn take_cache_salt(
        &mut self,
        tenant: Option<&str>,
        request: &mut openai::ApiRequest,
        scope: NvExtScope,
    ) -> Option<String> {
        let raw = request.nvext.take();
        self.extension = raw.and_then(|raw| scope.parse(&raw)).map(Box::new);
        let in_extension = self
            .extension
            .as_ref()
            .and_then(|extension| extension.cache_salt.clone());
        tenant
            .map(str::to_owned)
            .or(in_extension)
            .or(request.cache_salt.take())
    }

    /// Returns a request whose body was not read, and the reason.
    pub(super) fn without_body(api: ApiKind, bytes: usize, reason: Reason) -> Self {
        match api.workload() {
            // A request without a prompt causes no load, whatever its error.
            ApiWorkload::None => Self::estimated(0, Reason::NotInference),
            ApiWorkload::Prompt | ApiWorkload::LoadOnly if api.has_text_body() => {
                Self::estimated(estimate_tokens(bytes), reason)
            }
            ApiWorkload::Prompt | ApiWorkload::LoadOnly => Self::estimated(0, reason),
        }
    }

    /// Sets the requested model, and the model that serves it.
    pub(super) fn set_model(
        &mut self,
        requested: Option<String>,
        models: &ModelRegistry,
    ) -> Option<ResolvedModel> {
        let resolved = models.resolve(requested.as_deref());
        self.requested_model = requested;
        // The base model of an adapter may be served without being configured.
        let is_adapter = |name: &&String| resolved.is_none() && models.is_loaded_adapter(name);
        let loaded_adapter = self.requested_model.as_ref().filter(is_adapter).cloned();
        self.model = resolved
            .as_ref()
            .map(|resolved| resolved.model.name.clone());
        self.adapter = resolved
            .as_ref()
            .and_then(|resolved| resolved.adapter.clone())
            .or(loaded_adapter);
        resolved
    }

    pub(super) fn set_reason(&mut self, new_reason: Reason) {
        if let RoutePrompt::Estimated { reason, .. } = &mut self.prompt {
            *reason = new_reason;
        }
    }
}

/// Returns the estimated number of tokens of a body of which only the length is known.
pub(super) fn estimate_tokens(bytes: usize) -> u64 {
    (bytes as u64 / BYTES_PER_TOKEN).min(MAX_ESTIMATED_TOKENS)
}
