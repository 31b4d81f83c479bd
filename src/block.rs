//! Blocks of tokens and their names: what the index, the load tracker and the engines' events agree on.

pub mod agreement;
pub mod hash;
pub mod multimodal;
pub mod placeholders;
pub mod salt;
pub mod tracking;
mod xxh3;

pub use hash::{BlockHashes, Content, EngineHash, LocalHash, SequenceHash, Windows};
pub use multimodal::{ObjectHash, PromptObject};
pub use placeholders::MediaTokens;
pub use salt::Salt;
pub use tracking::TrackingHash;
