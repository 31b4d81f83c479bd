//! Decodes the engines' event batches: MessagePack in two encodings (events as arrays or as maps),
//! written by several engines in many versions. Visitors decode directly into compact values. A
//! burst carries hundreds of thousands of token ids, and an intermediate tree would cost more than
//! the index. Enumerated texts (medium, attention kind, locality, ownership) are classified while
//! they are decoded, so they are not stored.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, SeqAccess, Visitor};

mod array;
mod bounds;
mod error;
mod event;
mod map;
mod value;

/// Maximum nesting of a payload. Real payloads need seven levels.
const MAX_DEPTH: usize = 32;

pub use error::{BatchLimit, WireError};
pub use event::{
    AttentionKind, BlockOwnership, EngineEvent, EventBatch, EventOrigin, EventTokens, ExtraKey,
    PartialPrefix, StorageLocality, StorageMedium, StoredEvent,
};

/// Decodes one batch. Trailing bytes are ignored, as in the engines' own subscribers.
pub fn decode(payload: &[u8]) -> Result<EventBatch, WireError> {
    bounds::check(payload)?;
    let mut reader = rmp_serde::Deserializer::from_read_ref(payload);
    reader.set_max_depth(MAX_DEPTH);
    Ok(EventBatch::deserialize(&mut reader)?)
}

impl<'de> Deserialize<'de> for EventBatch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BatchVisitor;
        impl<'de> Visitor<'de> for BatchVisitor {
            type Value = EventBatch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of timestamp, events and data-parallel rank")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<EventBatch, A::Error> {
                let value::WireTimestamp(timestamp) = value::next_required(&mut seq, "timestamp")?;
                let value::SizedList(events) = value::next_required(&mut seq, "events")?;
                // Engines without data parallelism omit the rank.
                let rank = seq.next_element::<Option<u32>>()?.flatten();
                if seq.next_element::<IgnoredAny>()?.is_some() {
                    return Err(de::Error::custom("a batch has two or three elements"));
                }
                Ok(EventBatch {
                    timestamp,
                    events,
                    rank,
                })
            }
        }
        deserializer.deserialize_any(BatchVisitor)
    }
}

impl<'de> Deserialize<'de> for EngineEvent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EventVisitor;
        impl<'de> Visitor<'de> for EventVisitor {
            type Value = EngineEvent;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a KV event as array or map")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<EngineEvent, A::Error> {
                array::event(seq)
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<EngineEvent, A::Error> {
                map::event(map)
            }
        }
        deserializer.deserialize_any(EventVisitor)
    }
}

#[cfg(test)]
mod tests;
