//! Reasons of degradations, as metrics, logs and pages name them.

use serde::Serialize;

/// Why a request took a lower step than exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The request has no body.
    NoBody,
    /// The path is unknown, or its API has nothing computed.
    NotInference,
    /// Envoy does not show us the body before it routes.
    BodyNotShown,
    /// Only the beginning of the body was shown.
    BodyCut,
    /// Envoy shows us the body chunk by chunk, and has routed before the end of it.
    BodyStreamed,
    /// The body is larger than the limit.
    BodyTooLarge,
    /// The body is not JSON of that API.
    Unreadable,
    /// The request names a model that is not configured.
    UnknownModel,
    /// The model has no tokenizer, or it is still loading.
    NoTokenizer,
    /// The request is a conversation, and the model has no chat template.
    NoChatTemplate,
    /// The tokenizer or the chat template refused the prompt.
    EncodeFailed,
    /// The engine was asked for its tokens and did not give them, and there are no others.
    EngineTokensFailed,
    /// The prompt holds images, audio or video.
    Multimodal,
    /// The prompt exceeds the length of the model or the limit of tokenization, so only its beginning was tokenized.
    PromptTooLong,
    /// The request has more prompts than are looked at.
    TooManyPrompts,
    /// Only the engine knows how it puts the prompt together.
    UnknownPrompt,
    /// The prompt goes on from something that only an engine remembers.
    EngineState,
    /// Too many prompts are waiting for the tokenizer.
    TokenizerBusy,
    /// The decision took longer than its deadline.
    Deadline,
    /// No event source of any candidate has caught up.
    IndexCold,
    /// No server of the index answered.
    IndexAway,
    /// The blocks of no candidate's engine can be brought to the size that is configured.
    BlockSizeMismatch,
    /// No worker is known.
    NoFleet,
    /// No known worker serves the model in that role.
    NoCandidate,
    /// The request is pinned to a worker that will not do.
    BadPin,
    /// All eligible workers are overloaded.
    Overloaded,
    /// No worker satisfies the constraints of the request.
    Unsatisfied,
    /// There is no prefill worker, and there has to be one.
    NoPrefill,
    /// Its engines make other tokens of prompts than we do.
    ParityMismatch,
    /// Too many requests wait already.
    QueueFull,
    /// No worker was free in time.
    QueueDeadline,
    /// The router made a mistake.
    RouterFailed,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 32] = [
        Self::NoBody,
        Self::NotInference,
        Self::BodyNotShown,
        Self::BodyCut,
        Self::BodyStreamed,
        Self::BodyTooLarge,
        Self::Unreadable,
        Self::UnknownModel,
        Self::NoTokenizer,
        Self::NoChatTemplate,
        Self::EncodeFailed,
        Self::EngineTokensFailed,
        Self::Multimodal,
        Self::PromptTooLong,
        Self::TooManyPrompts,
        Self::UnknownPrompt,
        Self::EngineState,
        Self::TokenizerBusy,
        Self::Deadline,
        Self::IndexCold,
        Self::IndexAway,
        Self::BlockSizeMismatch,
        Self::NoFleet,
        Self::NoCandidate,
        Self::BadPin,
        Self::Overloaded,
        Self::Unsatisfied,
        Self::NoPrefill,
        Self::ParityMismatch,
        Self::QueueFull,
        Self::QueueDeadline,
        Self::RouterFailed,
    ];

    /// The name used in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::NoBody => "no_body",
            Reason::NotInference => "not_inference",
            Reason::BodyNotShown => "body_not_shown",
            Reason::BodyCut => "body_cut",
            Reason::BodyStreamed => "body_streamed",
            Reason::BodyTooLarge => "body_too_large",
            Reason::Unreadable => "unreadable",
            Reason::UnknownModel => "unknown_model",
            Reason::NoTokenizer => "no_tokenizer",
            Reason::NoChatTemplate => "no_chat_template",
            Reason::EncodeFailed => "encode_failed",
            Reason::EngineTokensFailed => "engine_tokens_failed",
            Reason::Multimodal => "multimodal",
            Reason::PromptTooLong => "prompt_too_long",
            Reason::TooManyPrompts => "too_many_prompts",
            Reason::UnknownPrompt => "unknown_prompt",
            Reason::EngineState => "engine_state",
            Reason::TokenizerBusy => "tokenizer_busy",
            Reason::Deadline => "deadline",
            Reason::IndexCold => "index_cold",
            Reason::IndexAway => "index_away",
            Reason::BlockSizeMismatch => "block_size_mismatch",
            Reason::NoFleet => "no_fleet",
            Reason::NoCandidate => "no_candidate",
            Reason::BadPin => "bad_pin",
            Reason::Overloaded => "overloaded",
            Reason::Unsatisfied => "unsatisfied",
            Reason::NoPrefill => "no_prefill",
            Reason::ParityMismatch => "parity_mismatch",
            Reason::QueueFull => "queue_full",
            Reason::QueueDeadline => "queue_deadline",
            Reason::RouterFailed => "router_failed",
        }
    }
}

/// A reason that is missing in the list fails to compile, as long as the last one stays the last.
const _: () = assert!(Reason::ALL.len() == Reason::RouterFailed as usize + 1);
