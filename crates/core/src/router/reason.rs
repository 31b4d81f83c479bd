//! Degradation reasons, as metrics, logs and pages show them.

use serde::Serialize;
use strum::{IntoStaticStr, VariantArray};

/// Reason why a request was not routed in exact mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, IntoStaticStr, VariantArray)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
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
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Returns the name in metrics and logs.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
