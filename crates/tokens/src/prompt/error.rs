//! Reasons why the tokens of a request are not known.

use thiserror::Error;

/// The tokens of a request are not known. The request may still be valid and is then routed without
/// them.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum EncodeError {
    /// The prompt has a part that is not text.
    #[error("the prompt has a part of type {0}")]
    Multimodal(String),
    /// The prompt consists of embeddings.
    #[error("the prompt is made of embeddings")]
    Embeddings,
    /// The request has too many prompts.
    #[error("the request has too many prompts")]
    TooManyPrompts,
    /// The model has no chat template.
    #[error("the model has no chat template")]
    NoTemplate,
    /// The client sent its own chat template.
    #[error("the request has its own chat template")]
    RequestTemplate,
    /// The engine rejects the request.
    #[error("the engine rejects this request: {0}")]
    Rejected(String),
    /// The engine's behavior is unknown or differs between versions.
    #[error("the engine's tokens are uncertain: {0}")]
    Uncertain(String),
    /// The chat template failed.
    #[error("the chat template failed: {0}")]
    Render(String),
    /// The tokenizer failed.
    #[error("the tokenizer failed: {0}")]
    Tokenize(String),
}

impl EncodeError {
    /// Returns the metric label of the error. It contains no text of the prompt.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Multimodal(_) => "multimodal",
            Self::Embeddings => "embeddings",
            Self::TooManyPrompts => "too_many_prompts",
            Self::NoTemplate => "no_template",
            Self::RequestTemplate => "request_template",
            Self::Rejected(_) => "rejected_by_engine",
            Self::Uncertain(_) => "uncertain",
            Self::Render(_) => "template_failed",
            Self::Tokenize(_) => "tokenizer_failed",
        }
    }

    pub(super) fn uncertain(reason: impl Into<String>) -> Self {
        Self::Uncertain(reason.into())
    }

    pub(super) fn rejected(reason: impl Into<String>) -> Self {
        Self::Rejected(reason.into())
    }
}
