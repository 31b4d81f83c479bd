//! The engines' event batches as they lie on the wire: msgpack, in two encodings (events as arrays or as maps), written by
//! several engines over several years. Everything is read by visitors straight into small values, because a burst
//! carries hundreds of thousands of token ids and an intermediate tree would cost more than the index. What an engine
//! may say in words (medium, attention kind, locality, ownership) is classified while it is read, so nothing is kept as text
//! that nobody compares.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, SeqAccess, Visitor};

use crate::block::EngineHash;
use crate::tier::Tier;

mod array;
mod bounds;
mod map;
mod value;

/// Deepest nesting of a payload; real ones need seven.
const DEPTH: usize = 32;

pub use bounds::BatchLimit;

/// Why a payload is not a batch of KV events.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// A value has another type, or a field is missing.
    #[error("not a batch of KV events: {0}")]
    Malformed(#[from] rmp_serde::decode::Error),
    /// A value is longer than the payload.
    #[error("not a batch of KV events: not MessagePack, or truncated")]
    Truncated,
    /// A limit is exceeded.
    #[error("the batch exceeds the {} limit", .0.as_str())]
    TooLarge(BatchLimit),
}

/// One batch: what one engine step did to one rank's cache.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Engine clock, seconds since 1970.
    pub timestamp: f64,
    /// The changes, in order.
    pub events: Vec<Event>,
    /// Data-parallel rank, where the engine names it.
    pub rank: Option<u32>,
}

/// One change, as the engine words it.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Blocks were stored.
    Stored(Box<Stored>),
    /// Blocks were removed.
    Removed {
        /// Their names.
        hashes: Vec<EngineHash>,
        /// Of what they were part.
        origin: Origin,
    },
    /// Everything was dropped.
    Cleared {
        /// Who owned it.
        ownership: Ownership,
    },
    /// A placeholder the engine asks us to skip.
    Ignored,
}

/// A store event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored {
    /// Names of the blocks.
    pub hashes: Vec<EngineHash>,
    /// The block before the first one.
    pub parent: Option<EngineHash>,
    /// Their tokens.
    pub tokens: Tokens,
    /// Tokens per block.
    pub block_size: u32,
    /// Adapter they were computed with.
    pub lora: Option<String>,
    /// Cache salt, where the engine names it outright.
    pub cache_salt: Option<String>,
    /// Per block, what else entered its hash.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// Per block, the multimodal objects in it, where the engine names them outright.
    pub media: Option<Vec<Vec<u64>>>,
    /// Whether the event came in the map encoding, in which a multimodal key is always a pair and never plain text.
    pub keys_are_pairs: bool,
    /// Of what the blocks are part.
    pub origin: Origin,
}

/// The tokens of a store event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tokens {
    /// Token ids; of bigrams the first of each and the second of the last.
    pub ids: Vec<u32>,
    /// Whether they came as bigrams (EAGLE speculative decoding).
    pub bigrams: bool,
}

/// One thing besides the tokens that entered a block's hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// Plain text: adapter name, cache salt, or a multimodal id of an older engine.
    Text(String),
    /// A multimodal id with its offset.
    Media(String),
    /// Anything else.
    Other,
}

/// Where an event's blocks lie and to which part of the model they belong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// Storage medium.
    pub medium: Medium,
    /// Cache group.
    pub group: Option<u32>,
    /// Attention kind of the group.
    pub kind: Option<Kind>,
    /// Tokens in the window of a sliding-window group.
    pub window: Option<u32>,
    /// Whose storage.
    pub locality: Locality,
    /// Who manages it.
    pub ownership: Ownership,
}

/// Storage medium of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// A tier we know.
    Tier(Tier),
    /// A word we do not know.
    Unknown,
}

impl Default for Medium {
    fn default() -> Self {
        Medium::Tier(Tier::Device)
    }
}

impl From<&str> for Medium {
    fn from(word: &str) -> Self {
        Medium::Tier(match word {
            "" | "GPU" | "DEVICE" => Tier::Device,
            "CPU" | "CPU_PINNED" | "CPU_TIER1" => Tier::HostPinned,
            "CPU_TIER2" | "DISK" | "NVME" | "STORAGE" => Tier::Disk,
            "EXTERNAL" | "NETWORK" | "REMOTE" | "SHARED" => Tier::External,
            _ => return Medium::Unknown,
        })
    }
}

/// Attention kind of a cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Keeps every block of a prefix: what overlap is counted by.
    Main,
    /// Known, and keeps only part of a prefix.
    Partial(Part),
    /// A word we do not know.
    Unknown,
}

/// Which part of a prefix a group keeps that does not keep all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The tokens of a window in front of its end.
    Window,
    /// The state at its end.
    State,
    /// Something that events do not describe.
    Other,
}

impl From<&str> for Kind {
    fn from(word: &str) -> Self {
        match word {
            "full_attention" | "mla_attention" | "sink_full_attention" => Kind::Main,
            "sliding_window" | "sliding_window_mla" => Kind::Partial(Part::Window),
            "mamba" => Kind::Partial(Part::State),
            "chunked_local_attention" | "encoder_only_attention" | "cross_attention" => {
                Kind::Partial(Part::Other)
            }
            _ => Kind::Unknown,
        }
    }
}

/// Whose storage an event is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Locality {
    /// The worker's own.
    #[default]
    Local,
    /// Not the worker's own.
    Elsewhere,
}

impl From<&str> for Locality {
    fn from(word: &str) -> Self {
        if word == "LOCAL" {
            Locality::Local
        } else {
            Locality::Elsewhere
        }
    }
}

/// Who manages the blocks of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ownership {
    /// The engine.
    #[default]
    Framework,
    /// A cache beside the engine that does not serve its prefix hits.
    Kvcr,
    /// A word we do not know.
    Unknown,
}

impl From<&str> for Ownership {
    fn from(word: &str) -> Self {
        match word {
            "framework" => Ownership::Framework,
            "kvcr" => Ownership::Kvcr,
            _ => Ownership::Unknown,
        }
    }
}

/// Reads one batch. Bytes after it are tolerated, as engines' publishers tolerate them.
pub fn decode(payload: &[u8]) -> Result<Batch, WireError> {
    bounds::check(payload)?;
    let mut reader = rmp_serde::Deserializer::from_read_ref(payload);
    reader.set_max_depth(DEPTH);
    Ok(Batch::deserialize(&mut reader)?)
}

impl<'de> Deserialize<'de> for Batch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BatchVisitor;
        impl<'de> Visitor<'de> for BatchVisitor {
            type Value = Batch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of timestamp, events and data-parallel rank")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Batch, A::Error> {
                let value::Number(timestamp) = next(&mut seq, "timestamp")?;
                let value::List(events) = next(&mut seq, "events")?;
                // Engines without data parallelism leave the rank out.
                let rank = seq.next_element::<Option<u32>>()?.flatten();
                if seq.next_element::<IgnoredAny>()?.is_some() {
                    return Err(de::Error::custom("a batch has two or three elements"));
                }
                Ok(Batch {
                    timestamp,
                    events,
                    rank,
                })
            }
        }
        deserializer.deserialize_any(BatchVisitor)
    }
}

impl<'de> Deserialize<'de> for Event {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EventVisitor;
        impl<'de> Visitor<'de> for EventVisitor {
            type Value = Event;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a KV event as array or map")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Event, A::Error> {
                array::event(seq)
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Event, A::Error> {
                map::event(map)
            }
        }
        deserializer.deserialize_any(EventVisitor)
    }
}

/// The next element, which has to be there.
fn next<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(
    seq: &mut A,
    name: &'static str,
) -> Result<T, A::Error> {
    seq.next_element()?
        .ok_or_else(|| de::Error::missing_field(name))
}

#[cfg(test)]
mod tests;
