//! Content of a response: evidence that the engine has generated output, as far as the response was
//! observed.

use warmroute_tokens::openai::usage::OutputEvidence;

/// Content of a response at its end. It has no meaning for a response without a 2xx status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResponseContent {
    /// Unknown: the body of an event stream was not observed up to its first content or its end. The
    /// configuration may exclude it, the client may have disconnected, or the probe may have failed.
    #[default]
    NotObserved,
    /// The response is not an event stream, so its headers follow the computation. Its body was not
    /// examined, except that it is not empty if it was observed.
    Assumed,
    /// Content was observed. With `first_token_signal: headers`, the headers of a stream suffice.
    Delivered,
    /// The response has ended without content.
    Missing(MissingContent),
}

/// Reason why a response has no content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingContent {
    /// The body is empty or contains no output at all.
    Empty,
    /// The engine has reported the end of its output, for example if its first token ends the
    /// sequence. The prompt may have been computed.
    OutputEnded,
    /// The engine has reported the number of its output tokens. The prompt was computed.
    OutputCounted,
    /// The engine has reported an error after the headers.
    Error,
}

/// Report of an observer of the response body. The first report of a response decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentReport {
    /// The first content has arrived.
    Content,
    /// The observer has stopped before the first content, because it has seen too many pieces.
    Stopped,
    /// The response has ended without content.
    Ended(MissingContent),
}

impl MissingContent {
    /// Returns the reason at the end of a response with this evidence; `None` if it has content.
    pub fn from_evidence(evidence: OutputEvidence) -> Option<Self> {
        match evidence {
            OutputEvidence::None => Some(Self::Empty),
            OutputEvidence::Ended => Some(Self::OutputEnded),
            OutputEvidence::Counted => Some(Self::OutputCounted),
            OutputEvidence::Error => Some(Self::Error),
            OutputEvidence::Content => None,
        }
    }
}

impl ResponseContent {
    /// Returns whether the response contradicts that the engine has computed the prompt.
    pub fn excludes_prefill(self) -> bool {
        matches!(
            self,
            Self::Missing(MissingContent::Empty | MissingContent::Error)
        )
    }
}
