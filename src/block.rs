//! Blocks of tokens and their names: what the index, the load tracker and the engines' events agree on.

pub mod hash;
pub mod multimodal;
pub mod salt;

pub use hash::{BlockHashes, EngineHash, LocalHash, SequenceHash};
pub use multimodal::ObjectHash;
pub use salt::Salt;
