//! Tokenizes a request within the length of the model and the deadline.

use std::time::{Duration, Instant};

use tracing::debug;

use super::{Encoded, Intake, Named};
use crate::block::Salt;
use crate::openai::{self, Hidden, Opaque};
use crate::prompt::{EncodeError, Encoder, StopReason, TokenBudget, Tokens};
use crate::router::Reason;

/// The tokens of the prompts of a request, or the first of them.
pub(super) struct TokenizedPrompts {
    pub(super) prompts: Vec<Tokens>,
    /// The reason why tokenization stopped early.
    pub(super) stopped: Option<Reason>,
}

fn degradation(stop: StopReason) -> Reason {
    match stop {
        StopReason::TooLong => Reason::PromptTooLong,
        StopReason::Deadline => Reason::Deadline,
    }
}

impl Intake {
    /// The tokens of a request.
    pub(super) fn tokens(
        &self,
        (named, salt): (&Named, &Salt),
        request: &openai::Request,
        encoded: &mut Encoded,
        clock: &mut Stopwatch,
    ) -> Result<TokenizedPrompts, Reason> {
        if let Some(mut tokens) = encoded
            .extension
            .as_mut()
            .and_then(|extension| extension.token_data.take())
        {
            let most = self.most_tokens(named);
            let stopped = (tokens.len() > most).then_some(Reason::PromptTooLong);
            tokens.truncate(most);
            return Ok(TokenizedPrompts {
                prompts: vec![tokens.into()],
                stopped,
            });
        }
        if request.prompt == openai::Prompt::TooMany {
            return Err(Reason::TooManyPrompts);
        }
        if let openai::Prompt::Opaque(opaque) = &request.prompt {
            return Err(hidden(*opaque));
        }
        let encoder: &Encoder = named.model.encoder.as_ref().ok_or(Reason::NoTokenizer)?;
        let rendered = encoder.render(request).map_err(reason)?;
        encoded.times.push(("render", clock.lap()));
        let is_over = clock.deadline();
        let budget = TokenBudget::new(self.most_tokens(named), &is_over);
        let bounded = encoder
            .tokenize_within(&rendered, salt.cache.as_deref(), &budget)
            .map_err(reason)?;
        encoded.times.push(("tokenize", clock.lap()));
        encoded.ours = !matches!(request.prompt, openai::Prompt::Tokens(_));
        let stopped = bounded
            .iter()
            .find_map(|prompt| prompt.stopped)
            .map(degradation);
        Ok(TokenizedPrompts {
            prompts: bounded.into_iter().map(|prompt| prompt.tokens).collect(),
            stopped,
        })
    }
}

pub(super) fn hidden(opaque: Opaque) -> Reason {
    match opaque.because {
        Hidden::Assembled => Reason::UnknownPrompt,
        Hidden::Remembered => Reason::EngineState,
    }
}

pub(super) fn reason(error: EncodeError) -> Reason {
    match error {
        EncodeError::Multimodal(_) => Reason::Multimodal,
        EncodeError::TooMany => Reason::TooManyPrompts,
        EncodeError::NoTemplate => Reason::NoChatTemplate,
        error => {
            // The error is not logged, because a template error may quote the prompt.
            debug!(because = error.label(), "prompt refused");
            Reason::EncodeFailed
        }
    }
}

/// The duration of each stage, and the deadline of tokenization.
pub(super) struct Stopwatch {
    lap: Instant,
    until: Option<Instant>,
}

impl Stopwatch {
    pub(super) fn start(until: Option<Instant>) -> Self {
        Self {
            lap: Instant::now(),
            until,
        }
    }

    pub(super) fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let took = now - self.lap;
        self.lap = now;
        took
    }

    /// Whether the time is over, at any moment from now on.
    pub(super) fn deadline(&self) -> impl Fn() -> bool + use<> {
        let until = self.until;
        move || until.is_some_and(|until| Instant::now() >= until)
    }
}
