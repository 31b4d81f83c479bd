//! Cache salt: separates the caches of equal tokens by LoRA adapter and tenant. Both are added to
//! the seed of the local hashes, so their order does not matter. An empty name is the same as none.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Base seed of local hashes, and seed of every chaining step.
pub const SEED: u64 = 1337;

/// Salt of a request or a stored event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CacheSalt {
    /// LoRA adapter name.
    pub lora: Option<String>,
    /// Cache salt of a tenant.
    pub cache: Option<String>,
}

impl CacheSalt {
    /// Returns the seed of the local hashes under this salt.
    pub fn seed(&self) -> u64 {
        let part = |text: &Option<String>, seed| match text.as_deref() {
            None | Some("") => 0,
            Some(text) => xxh3_64_with_seed(text.as_bytes(), seed),
        };
        SEED.wrapping_add(part(&self.lora, 0))
            .wrapping_add(part(&self.cache, 1))
    }
}
