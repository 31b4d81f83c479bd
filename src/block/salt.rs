//! What separates equal tokens: the adapter and the tenant. Both enter as additions to the seed of the local hashes, so
//! they commute, and an empty name is the same as none.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Base seed of local hashes, and the seed of every chain step.
pub const SEED: u64 = 1337;

/// The salt of one request or of one stored event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Salt {
    /// LoRA adapter name.
    pub lora: Option<String>,
    /// Cache salt, by which tenants keep their caches apart.
    pub cache: Option<String>,
}

impl Salt {
    /// Seed of the local hashes under this salt.
    pub fn seed(&self) -> u64 {
        let part = |text: &Option<String>, seed| match text.as_deref() {
            None | Some("") => 0,
            Some(text) => xxh3_64_with_seed(text.as_bytes(), seed),
        };
        SEED.wrapping_add(part(&self.lora, 0))
            .wrapping_add(part(&self.cache, 1))
    }
}
