//! Block hashes under which the load tracker counts prompt blocks.
//!
//! By default these are the public sequence hashes. If load data is published, anyone who knows the
//! public formula could test whether a guessed prompt is being served. Hashes with secret seeds
//! reveal nothing. The index never uses them, because engines do not know them.

use std::sync::Arc;

use rand::{Rng, RngExt};

use super::hash::{PromptContent, SequenceHash, chain_locals};
use crate::worker::BlockSize;

/// Seeds of tracked block hashes. The caller derives them from a secret key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackingSeeds {
    /// Seed of the hash of each block.
    pub local: u64,
    /// Seed of the chain over these hashes.
    pub chain: u64,
}

/// Returns the hashes of a prompt's complete blocks under secret seeds.
pub fn seeded_sequences(
    content: &PromptContent<'_>,
    block_size: BlockSize,
    seeds: TrackingSeeds,
) -> Arc<[SequenceHash]> {
    let locals = content.seeded_local_hashes(block_size, seeds.local);
    chain_locals(&locals, seeds.chain)
}

/// Returns random hashes for a request that must not rely on the cache. No other request has them,
/// so every block counts fully.
pub fn random_sequences(count: usize, rng: &mut impl Rng) -> Arc<[SequenceHash]> {
    (0..count).map(|_| SequenceHash(rng.random())).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn random_sequences_differ_each_time() {
        let mut rng = StdRng::seed_from_u64(1);
        let first = random_sequences(100, &mut rng);
        let second = random_sequences(100, &mut rng);
        let distinct: BTreeSet<_> = first.iter().chain(second.iter()).collect();
        assert_eq!(distinct.len(), 200);
    }
}
