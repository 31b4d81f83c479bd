//! Values from the headers that are needed to encode the body, and the tokens that engines
//! returned.

use std::time::{Duration, Instant};

use super::engine_tokens::EngineTokensResult;

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
