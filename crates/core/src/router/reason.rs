//! Degradation reasons, as metrics, logs and pages show them.

use serde::Serialize;

/// Reason why a request was not routed in exact mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The request has no body.
    NoBody,
    /// The path is unknown, or its API computes nothing.
    NotInference,
    /// Envoy does not send the body: its request body mode is `NONE`. Also counts rejected requests
    /// whose body must be checked and was dropped, because the limit of buffered bodies is reached.
    BodyNotSent,
    /// Only the start of the body was received.
    BodyTruncated,
    /// Envoy streams the body and routes before its end.
    BodyStreamed,
    /// The body is larger than the limit.
    BodyTooLarge,
    /// The body is not valid JSON of the API.
    Unparseable,
    /// The request names a model that is not configured.
    UnknownModel,
    /// The configuration of the model has no tokenizer.
    NoTokenizer,
    /// The request is a conversation, and the model has no chat template.
    NoChatTemplate,
    /// The tokenizer or the chat template rejected the prompt.
    EncodeFailed,
    /// The engine did not return its tokens, and there is no other tokenizer.
    RemoteTokenizerFailed,
    /// The prompt contains images, audio or video.
    Multimodal,
    /// The prompt exceeds the model length or the tokenization limit, so only its start was
    /// tokenized.
    PromptTooLong,
    /// The request has more prompts than the limit.
    TooManyPrompts,
    /// Only the engine knows how the prompt is rendered.
    UnknownPrompt,
    /// The prompt continues state that only an engine holds.
    EngineSideState,
    /// Too many bodies wait for a tokenizer thread, or the body was dropped because the limit of
    /// buffered bodies is reached.
    TokenizerBusy,
    /// The decision took longer than its deadline.
    DecisionTimeout,
    /// No candidate has an event source that has caught up.
    IndexCold,
    /// No index server replied.
    IndexUnreachable,
    /// No candidate's block size is compatible with the configured one.
    BlockSizeMismatch,
    /// The fleet is empty.
    NoWorkers,
    /// No known worker serves the model in that role.
    NoCandidate,
    /// The request is pinned to a worker that cannot serve it.
    InvalidPin,
    /// All eligible workers are overloaded.
    Overloaded,
    /// No worker meets the demands of the request.
    ConstraintsUnsatisfied,
    /// There is no prefill worker, and the operator requires one.
    NoPrefill,
    /// The engines compute other tokens than warmroute.
    ParityMismatch,
    /// The queue limit is reached.
    QueueFull,
    /// The maximum time in the queue has passed.
    QueueTimeout,
    /// Internal error of the router.
    RouterError,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 32] = [
        Self::NoBody,
        Self::NotInference,
        Self::BodyNotSent,
        Self::BodyTruncated,
        Self::BodyStreamed,
        Self::BodyTooLarge,
        Self::Unparseable,
        Self::UnknownModel,
        Self::NoTokenizer,
        Self::NoChatTemplate,
        Self::EncodeFailed,
        Self::RemoteTokenizerFailed,
        Self::Multimodal,
        Self::PromptTooLong,
        Self::TooManyPrompts,
        Self::UnknownPrompt,
        Self::EngineSideState,
        Self::TokenizerBusy,
        Self::DecisionTimeout,
        Self::IndexCold,
        Self::IndexUnreachable,
        Self::BlockSizeMismatch,
        Self::NoWorkers,
        Self::NoCandidate,
        Self::InvalidPin,
        Self::Overloaded,
        Self::ConstraintsUnsatisfied,
        Self::NoPrefill,
        Self::ParityMismatch,
        Self::QueueFull,
        Self::QueueTimeout,
        Self::RouterError,
    ];

    /// Returns the name in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::NoBody => "no_body",
            Reason::NotInference => "not_inference",
            Reason::BodyNotSent => "body_not_sent",
            Reason::BodyTruncated => "body_truncated",
            Reason::BodyStreamed => "body_streamed",
            Reason::BodyTooLarge => "body_too_large",
            Reason::Unparseable => "unparseable",
            Reason::UnknownModel => "unknown_model",
            Reason::NoTokenizer => "no_tokenizer",
            Reason::NoChatTemplate => "no_chat_template",
            Reason::EncodeFailed => "encode_failed",
            Reason::RemoteTokenizerFailed => "remote_tokenizer_failed",
            Reason::Multimodal => "multimodal",
            Reason::PromptTooLong => "prompt_too_long",
            Reason::TooManyPrompts => "too_many_prompts",
            Reason::UnknownPrompt => "unknown_prompt",
            Reason::EngineSideState => "engine_side_state",
            Reason::TokenizerBusy => "tokenizer_busy",
            Reason::DecisionTimeout => "decision_timeout",
            Reason::IndexCold => "index_cold",
            Reason::IndexUnreachable => "index_unreachable",
            Reason::BlockSizeMismatch => "block_size_mismatch",
            Reason::NoWorkers => "no_workers",
            Reason::NoCandidate => "no_candidate",
            Reason::InvalidPin => "invalid_pin",
            Reason::Overloaded => "overloaded",
            Reason::ConstraintsUnsatisfied => "constraints_unsatisfied",
            Reason::NoPrefill => "no_prefill",
            Reason::ParityMismatch => "parity_mismatch",
            Reason::QueueFull => "queue_full",
            Reason::QueueTimeout => "queue_timeout",
            Reason::RouterError => "router_error",
        }
    }
}

/// Fails to compile if `ALL` lacks a reason, as long as the last variant stays last.
const _: () = assert!(Reason::ALL.len() == Reason::RouterError as usize + 1);
