//! Blocks of tokens and their hashes, as used by the index, the load tracker and KV events.

pub mod fingerprint;
pub mod hash;
pub mod multimodal;
pub mod placeholders;
pub mod salt;
mod tier;
pub mod tracking;
mod xxh3;

pub use hash::{BlockHashes, BlockWindows, EngineHash, LocalHash, PromptContent, SequenceHash};
pub use multimodal::{ObjectHash, PromptObject};
pub use placeholders::MediaTokens;
pub use salt::CacheSalt;
pub use tier::StorageTier;
