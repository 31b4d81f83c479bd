//! Decoded batches and events.

use std::fmt;

use warmroute_core::block::{EngineHash, StorageTier};

/// One batch: the changes of one engine step to one rank's cache.
#[derive(Clone, Debug, PartialEq)]
pub struct EventBatch {
    /// Engine clock, seconds since 1970.
    pub timestamp: f64,
    /// The changes, in order.
    pub events: Vec<EngineEvent>,
    /// Data-parallel rank, if the engine reports it.
    pub rank: Option<u32>,
    /// Number of elements and event fields that this version does not know, and skipped.
    pub unknown_fields: u64,
}

/// One change, as published by the engine.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    /// Blocks were stored.
    Stored(Box<StoredEvent>),
    /// Blocks were removed.
    Removed {
        /// Hashes of the blocks.
        hashes: Vec<EngineHash>,
        /// Storage and cache group.
        origin: EventOrigin,
    },
    /// The cache was cleared.
    Cleared {
        /// Manager of the cache.
        ownership: BlockOwnership,
    },
    /// A placeholder without effect.
    Ignored,
    /// An event that this version cannot use.
    Skipped(SkippedEvent),
}

/// An event that was skipped, because a newer engine wrote it or it is damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SkippedEvent {
    /// Its type is unknown. Contains the beginning of the type's name.
    UnknownType(String),
    /// A store; the named field is missing or has an unknown type.
    Store(&'static str),
    /// A removal; the named field is missing or has an unknown type.
    Removal(&'static str),
}

impl fmt::Display for SkippedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SkippedEvent::UnknownType(name) => write!(f, "unknown type `{name}`"),
            SkippedEvent::Store(field) => write!(f, "store with unreadable `{field}`"),
            SkippedEvent::Removal(field) => write!(f, "removal with unreadable `{field}`"),
        }
    }
}

/// A store event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoredEvent {
    /// Hashes of the blocks.
    pub hashes: Vec<EngineHash>,
    /// Parent of the first block.
    pub parent: Option<EngineHash>,
    /// Tokens of the blocks.
    pub tokens: EventTokens,
    /// Tokens per block.
    pub block_size: u32,
    /// LoRA adapter.
    pub adapter: EventAdapter,
    /// Cache salt, if the event names it explicitly.
    pub cache_salt: Option<String>,
    /// Extra keys of each block's hash.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// Multimodal objects of each block, if the event names them explicitly.
    pub media: Option<Vec<Vec<u64>>>,
    /// Set for the map encoding, in which a multimodal key is always a pair and never plain text.
    pub keys_are_pairs: bool,
    /// Storage and cache group.
    pub origin: EventOrigin,
}

/// LoRA adapter of a store event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EventAdapter {
    /// None: blocks of the base model.
    #[default]
    Base,
    /// The adapter with this name.
    Named(String),
    /// An adapter that the event identifies only by a number.
    Unnamed,
}

impl EventAdapter {
    /// Returns the name, if the event has one.
    pub fn name(&self) -> Option<&str> {
        match self {
            EventAdapter::Named(name) => Some(name),
            EventAdapter::Base | EventAdapter::Unnamed => None,
        }
    }
}

/// The tokens of a store event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventTokens {
    /// Token ids. With bigrams, the first token of each one, followed by the second token of the
    /// last one.
    pub ids: Vec<u32>,
    /// Set if the key of each block covers the next token: bigrams of SGLang, or the lookahead of
    /// vLLM (EAGLE speculative decoding).
    pub bigrams: bool,
}

/// Input of a block's hash besides the tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// Plain text: adapter name, cache salt, or a multimodal id of an older engine.
    Text(String),
    /// A multimodal id with its offset.
    Media(String),
    /// Anything else.
    Other,
}

/// Storage and cache group of an event's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventOrigin {
    /// Storage medium.
    pub medium: StorageMedium,
    /// Cache group.
    pub group: Option<u32>,
    /// Attention kind of the group.
    pub kind: Option<AttentionKind>,
    /// Tokens in the window of a sliding-window group.
    pub window: Option<u32>,
    /// Owner of the storage.
    pub locality: StorageLocality,
    /// Manager of the blocks.
    pub ownership: BlockOwnership,
}

/// Storage medium of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageMedium {
    /// A known tier.
    Tier(StorageTier),
    /// Unknown text.
    Unknown,
}

impl Default for StorageMedium {
    fn default() -> Self {
        StorageMedium::Tier(StorageTier::Device)
    }
}

impl From<&str> for StorageMedium {
    fn from(text: &str) -> Self {
        StorageMedium::Tier(match text {
            "" | "GPU" | "DEVICE" => StorageTier::Device,
            "CPU" | "CPU_PINNED" | "CPU_TIER1" => StorageTier::HostPinned,
            "CPU_TIER2" | "DISK" | "NVME" | "STORAGE" => StorageTier::Disk,
            "EXTERNAL" | "NETWORK" | "REMOTE" | "SHARED" => StorageTier::External,
            _ => return StorageMedium::Unknown,
        })
    }
}

/// Attention kind of a cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKind {
    /// Holds every block of a prefix. Overlaps are counted in a group of this kind.
    Main,
    /// A known kind that holds only part of a prefix.
    Partial(PartialPrefix),
    /// Unknown text.
    Unknown,
}

/// Part of a prefix that a cache group holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartialPrefix {
    /// The tokens of the window before the end.
    Window,
    /// The recurrent state at the end.
    State,
    /// A part that events do not describe.
    Other,
}

impl From<&str> for AttentionKind {
    fn from(text: &str) -> Self {
        match text {
            "full_attention" | "mla_attention" | "sink_full_attention" => AttentionKind::Main,
            "sliding_window" | "sliding_window_mla" => {
                AttentionKind::Partial(PartialPrefix::Window)
            }
            "mamba" => AttentionKind::Partial(PartialPrefix::State),
            "chunked_local_attention" | "encoder_only_attention" | "cross_attention" => {
                AttentionKind::Partial(PartialPrefix::Other)
            }
            _ => AttentionKind::Unknown,
        }
    }
}

/// Owner of the storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StorageLocality {
    /// The worker.
    #[default]
    Local,
    /// Another owner.
    Remote,
}

impl From<&str> for StorageLocality {
    fn from(text: &str) -> Self {
        if text == "LOCAL" {
            StorageLocality::Local
        } else {
            StorageLocality::Remote
        }
    }
}

/// Manager of the blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockOwnership {
    /// The engine.
    #[default]
    Framework,
    /// A cache outside the engine that does not serve the engine's prefix hits.
    Kvcr,
    /// Unknown text.
    Unknown,
}

impl From<&str> for BlockOwnership {
    fn from(text: &str) -> Self {
        match text {
            "framework" => BlockOwnership::Framework,
            "kvcr" => BlockOwnership::Kvcr,
            _ => BlockOwnership::Unknown,
        }
    }
}
