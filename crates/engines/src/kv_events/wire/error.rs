//! Reasons why a payload is not a batch.

/// Reason why a payload is not a batch of KV events.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The named element is missing or has another type.
    #[error("not a batch of KV events: {0} missing or of another type")]
    Malformed(&'static str),
    /// A value is longer than the payload.
    #[error("not a batch of KV events: not MessagePack, or truncated")]
    Truncated,
    /// A limit is exceeded.
    #[error("the batch exceeds the {} limit", .0.as_str())]
    TooLarge(BatchLimit),
}

/// The limit that a batch exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchLimit {
    /// Events.
    Events,
    /// Block hashes.
    Hashes,
    /// Tokens.
    Tokens,
    /// Extra keys: more lists than blocks, too many keys of one block, or too many in all.
    ExtraKeys,
}

impl BatchLimit {
    /// Returns the name of the limit in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            BatchLimit::Events => "events",
            BatchLimit::Hashes => "hashes",
            BatchLimit::Tokens => "tokens",
            BatchLimit::ExtraKeys => "extra_keys",
        }
    }
}
