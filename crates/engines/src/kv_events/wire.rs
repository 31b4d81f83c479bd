//! Decodes the engines' event batches: MessagePack in two encodings (events as arrays or as maps),
//! written by several engines in many versions. The limits are checked while the batch is split
//! into events and fields. Each field is then decoded directly into compact values. A burst carries
//! hundreds of thousands of token ids, and an intermediate tree would cost more than the index.
//! Enumerated texts (medium, attention kind, locality, ownership) are classified while they are
//! decoded, so they are not stored.
//!
//! The decoder is forward compatible. It skips unknown event types and unknown fields, and counts
//! them. An event with an unreadable field is skipped too; the other events of the batch count.

mod bounds;
mod build;
mod event;
mod fields;
mod value;

use strum::IntoStaticStr;

/// Maximum nesting of a field. Real fields need five levels.
const MAX_DEPTH: usize = 32;

pub use event::{
    AttentionKind, BlockOwnership, EngineEvent, EventAdapter, EventBatch, EventOrigin, EventTokens,
    ExtraKey, PartialPrefix, SkippedEvent, StorageLocality, StorageMedium, StoredEvent,
};

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
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
        self.into()
    }
}

/// Decodes one batch: an array of timestamp, events and data-parallel rank. Further elements are
/// skipped. Trailing bytes are ignored, as in the engines' own subscribers.
pub fn decode(payload: &[u8]) -> Result<EventBatch, WireError> {
    let mut reader = bounds::BatchReader::new(payload);
    let elements = reader.read_array_length("batch")?;
    if elements < 2 {
        return Err(WireError::Malformed("events"));
    }
    let timestamp = value::decode(reader.read_raw()?).ok_or(WireError::Malformed("timestamp"))?;
    let count = reader.event_count()?;
    let mut events = Vec::with_capacity(count);
    for _ in 0..count {
        events.push(build::build_event(&reader.event()?));
    }
    // Engines without data parallelism omit the rank.
    let rank = match elements {
        2 => None,
        _ => value::decode(reader.read_raw()?).ok_or(WireError::Malformed("rank"))?,
    };
    for _ in 3..elements {
        reader.skip_unknown()?;
    }
    Ok(EventBatch {
        timestamp,
        events,
        rank,
        unknown_fields: reader.unknown_fields(),
    })
}

#[cfg(test)]
mod tests;
