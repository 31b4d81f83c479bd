//! Result of reading a body. Each step returns a value that is usable wherever reading stops: at
//! first, the length of the prompt is estimated from the length of the body.

use std::sync::Arc;
use std::time::Duration;

use warmroute_core::block::{BlockHashes, SequenceHash};
use warmroute_core::parity::ParityExpectation;
use warmroute_core::router::{Reason, RoutePrompt};
use warmroute_tokens::openai::{ApiKind, ApiRequest, ApiWorkload, NvExt, ParseError};

use super::engine_tokens::TokenSource;
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
    pub(super) fields: BodyFields,
    pub(super) prompts: PromptEncoding,
    pub(super) stage_times: Vec<(&'static str, Duration)>,
}

/// Fields of a body other than its prompt.
#[derive(Default)]
pub(super) struct BodyFields {
    pub(super) requested_model: Option<String>,
    /// The configured model that the requested name refers to.
    pub(super) resolved: Option<ResolvedModel>,
    pub(super) adapter: Option<String>,
    pub(super) extension: Option<Box<NvExt>>,
    pub(super) session: Option<String>,
    /// Maximum length of the answer.
    pub(super) max_output_tokens: Option<u64>,
    /// Whether the client requests a stream.
    pub(super) is_streamed: bool,
    /// Whether the engine ignores its prefix cache.
    pub(super) skips_prefix_cache: bool,
    /// Stored responses that the request refers to or creates.
    pub(super) response_reference: ResponseReference,
    /// Message of the error if the body cannot be parsed.
    pub(super) parse_error: Option<String>,
}

/// Encoding of the prompts of a request: block hashes and tokens, or only an estimated length.
pub(super) struct PromptEncoding {
    pub(super) prompt: RoutePrompt,
    /// Blocks in load tracking, if they differ from those of the prompt.
    pub(super) tracked_blocks: Option<Vec<Arc<[SequenceHash]>>>,
    /// Tokens of each prompt, if all are known.
    pub(super) tokens: Vec<Vec<u32>>,
    pub(super) parity: ParityExpectation,
}

impl PartialRequest {
    /// Returns a request whose body was not read, and the reason.
    pub(super) fn without_body(api: ApiKind, bytes: usize, reason: Reason) -> Self {
        let prompts = match api.workload() {
            // A request without a prompt causes no load, whatever its error.
            ApiWorkload::None => PromptEncoding::estimated(0, Reason::NotInference),
            ApiWorkload::Prompt | ApiWorkload::LoadOnly if api.has_text_body() => {
                PromptEncoding::estimated(estimate_tokens(bytes), reason)
            }
            ApiWorkload::Prompt | ApiWorkload::LoadOnly => PromptEncoding::estimated(0, reason),
        };
        Self {
            fields: BodyFields::default(),
            prompts,
            stage_times: Vec::new(),
        }
    }

    /// Returns a request with an unreadable body, of which some fields may be known.
    pub(super) fn with_parse_error(self, fields: BodyFields, error: &ParseError) -> Self {
        let fields = BodyFields {
            parse_error: Some(error.to_string()),
            ..fields
        };
        Self { fields, ..self }
    }
}

impl BodyFields {
    /// Returns the fields of a body of which only the model's name is known.
    pub(super) fn of_model(requested: Option<String>, models: &ModelRegistry) -> Self {
        let resolved = models.resolve(requested.as_deref());
        let adapter = match &resolved {
            Some(resolved) => resolved.adapter.clone(),
            // The base model of an adapter may be served without being configured.
            None => requested
                .clone()
                .filter(|name| models.is_loaded_adapter(name)),
        };
        Self {
            requested_model: requested,
            resolved,
            adapter,
            ..Self::default()
        }
    }

    /// Moves the fields out of a parsed body. As in vLLM, a request for log probabilities of the
    /// prompt does not read the prefix cache. This is assumed of all engines.
    pub(super) fn take_from(
        request: &mut ApiRequest,
        scope: NvExtScope,
        models: &ModelRegistry,
    ) -> Self {
        let raw = request.nvext.take();
        Self {
            extension: raw.and_then(|raw| scope.parse(&raw)).map(Box::new),
            max_output_tokens: request.max_output_tokens,
            is_streamed: request.stream,
            skips_prefix_cache: request.returns_prompt_logprobs,
            response_reference: ResponseReference {
                id: request.previous_response_id.take(),
                may_store_response: request.stores_response,
                tenant: None,
            },
            ..Self::of_model(request.model.take(), models)
        }
    }
}

impl PromptEncoding {
    /// Returns prompts of which only the estimated length is known, and the reason.
    pub(super) fn estimated(tokens: u64, reason: Reason) -> Self {
        Self {
            prompt: RoutePrompt::Estimated { tokens, reason },
            tracked_blocks: None,
            tokens: Vec::new(),
            parity: ParityExpectation::NotPredicted,
        }
    }

    /// Returns whether the tokens were computed here, from text.
    pub(super) fn is_own_tokenization(&self) -> bool {
        matches!(
            self.parity,
            ParityExpectation::Prompt | ParityExpectation::Multimodal
        )
    }

    /// Degrades prompts whose own tokens have broken parity.
    pub(super) fn degrade_without_parity(self, source: Option<&TokenSource>) -> Self {
        if !self.is_own_tokenization()
            || source.is_some_and(|source| !source.parity.are_tokens_disabled())
        {
            return self;
        }
        // An estimated prompt is not affected.
        if source.is_none() || matches!(self.prompt, RoutePrompt::Estimated { .. }) {
            return Self {
                parity: ParityExpectation::NotPredicted,
                ..self
            };
        }
        let estimated = Self::estimated(self.prompt.tokens(), Reason::ParityMismatch);
        let RoutePrompt::Hashed(prompts) = self.prompt else {
            return estimated;
        };
        match (self.parity, <[BlockHashes; 1]>::try_from(prompts)) {
            (ParityExpectation::Prompt, Ok([hashes])) => Self {
                parity: ParityExpectation::Shadow(Box::new(hashes)),
                ..estimated
            },
            _ => estimated,
        }
    }
}

/// Returns the estimated number of tokens of a body of which only the length is known.
pub(super) fn estimate_tokens(bytes: usize) -> u64 {
    (bytes as u64 / BYTES_PER_TOKEN).min(MAX_ESTIMATED_TOKENS)
}
