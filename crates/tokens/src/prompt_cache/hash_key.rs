//! Keyed hashes of the content of requests.

use highway::{HighwayHash as _, HighwayHasher, Key};

/// Secret key of the hashes. Without it, clients cannot construct texts with equal hashes.
#[derive(Clone, Copy)]
pub(crate) struct HashKey([u64; 4]);

impl HashKey {
    /// Creates a random key.
    pub(crate) fn random() -> Self {
        Self(rand::random())
    }

    /// Hashes parts with a secret key, so that clients cannot construct collisions. All parts
    /// except the last have a fixed length. HighwayHash is keyed and as fast as a plain hash, which
    /// matters because it reads every prompt completely.
    pub(crate) fn hash_parts(&self, parts: &[&[u8]]) -> u128 {
        let mut hasher = HighwayHasher::new(Key(self.0));
        for part in parts {
            hasher.append(part);
        }
        let [low, high] = hasher.finalize128();
        u128::from(high) << 64 | u128::from(low)
    }
}
