//! Tokenizes a request within the length of the model and the deadline.

use std::time::{Duration, Instant};

use tracing::debug;
use warmroute_core::router::Reason;
use warmroute_tokens::openai::{self, MessageReuse, UnknownPrompt, UnknownPromptReason};
use warmroute_tokens::prompt::{EncodeError, Encoder, PromptTokens, StopReason, TokenBudget};

use super::models::SaltedModel;
use super::partial_request::PartialRequest;
use super::preprocessor::RequestPreprocessor;

/// A parsed request, and its prefixes in the message cache.
pub(super) struct ParsedRequest {
    pub(super) request: openai::ApiRequest,
    pub(super) reuse: MessageReuse,
}

impl From<openai::ApiRequest> for ParsedRequest {
    fn from(request: openai::ApiRequest) -> Self {
        Self {
            request,
            reuse: MessageReuse::default(),
        }
    }
}

/// The tokens of a request's prompts, or their first tokens.
pub(super) struct TokenizedPrompts {
    pub(super) prompts: Vec<PromptTokens>,
    /// The reason why tokenization stopped early.
    pub(super) stop_reason: Option<Reason>,
}

fn stop_reason(stop: StopReason) -> Reason {
    match stop {
        StopReason::TooLong => Reason::PromptTooLong,
        StopReason::Deadline => Reason::DecisionTimeout,
    }
}

impl RequestPreprocessor {
    /// Tokenizes the prompts of a request.
    pub(super) fn tokenize(
        &self,
        model: &SaltedModel,
        parsed: &ParsedRequest,
        partial: &mut PartialRequest,
        clock: &mut StageTimer,
    ) -> Result<TokenizedPrompts, Reason> {
        let SaltedModel { resolved, salt } = model;
        let ParsedRequest { request, reuse } = parsed;
        if let Some(mut tokens) = partial
            .extension
            .as_mut()
            .and_then(|extension| extension.token_data.take())
        {
            let max_tokens = self.max_prompt_tokens(resolved);
            let stopped = (tokens.len() > max_tokens).then_some(Reason::PromptTooLong);
            tokens.truncate(max_tokens);
            return Ok(TokenizedPrompts {
                prompts: vec![tokens.into()],
                stop_reason: stopped,
            });
        }
        if request.prompt == openai::PromptInput::OverLimit {
            return Err(Reason::TooManyPrompts);
        }
        if let openai::PromptInput::Unknown(unknown) = &request.prompt {
            return Err(unknown_prompt_reason(*unknown));
        }
        let encoder: &Encoder = resolved.model.encoder.as_ref().ok_or(Reason::NoTokenizer)?;
        let rendered = encoder
            .render_cached(request, *reuse)
            .map_err(encode_error_reason)?;
        partial.stage_times.push(("render", clock.lap()));
        let is_over = clock.expiry_check();
        let budget = TokenBudget::new(self.max_prompt_tokens(resolved), &is_over);
        let mut bounded = encoder.tokenize_bounded(&rendered, salt.cache.as_deref(), &budget);
        // If tokenization after the cached prefix fails, the whole prompt is rendered.
        if bounded.is_err() && rendered.is_resumed() {
            bounded = encoder.render(request).and_then(|rendered| {
                encoder.tokenize_bounded(&rendered, salt.cache.as_deref(), &budget)
            });
        }
        let bounded = bounded.map_err(encode_error_reason)?;
        partial.stage_times.push(("tokenize", clock.lap()));
        partial.is_own_tokenization = !matches!(request.prompt, openai::PromptInput::Tokens(_));
        let stopped = bounded
            .iter()
            .find_map(|prompt| prompt.stopped)
            .map(stop_reason);
        Ok(TokenizedPrompts {
            prompts: bounded.into_iter().map(|prompt| prompt.tokens).collect(),
            stop_reason: stopped,
        })
    }
}

pub(super) fn unknown_prompt_reason(unknown: UnknownPrompt) -> Reason {
    match unknown.reason {
        UnknownPromptReason::BuiltByEngine => Reason::UnknownPrompt,
        UnknownPromptReason::StoredInEngine => Reason::EngineSideState,
    }
}

pub(super) fn encode_error_reason(error: EncodeError) -> Reason {
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
    lap: Instant,
    deadline: Option<Instant>,
}

impl StageTimer {
    pub(super) fn start(until: Option<Instant>) -> Self {
        Self {
            lap: Instant::now(),
            deadline: until,
        }
    }

    pub(super) fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let elapsed = now - self.lap;
        self.lap = now;
        elapsed
    }

    /// Returns a check for whether the deadline has passed.
    pub(super) fn expiry_check(&self) -> impl Fn() -> bool + use<> {
        let until = self.deadline;
        move || until.is_some_and(|until| Instant::now() >= until)
    }
}
