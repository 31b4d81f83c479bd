//! Under which names the load tracker counts prompt blocks. Usually the public sequence hashes do. Where load figures
//! leave the process, anyone who knows the public formula could test whether a prompt he guesses is being served; with a
//! key the names say nothing to those who lack it. The index never uses these names: engines do not know them.

use std::fmt;
use std::sync::Arc;

use rand::{Rng, RngExt};

use super::hash::{BlockHashes, Content, SequenceHash, Windows, chained};

/// Separates these keyed hashes from any other use of the same key.
const DOMAIN: &[u8] = b"dynamo.router.tracking-hash/keyed-xxh3-v1\0";

/// Separates the keystream of what replicas publish from any other use of the same key.
const STREAM_DOMAIN: &[u8] = b"warmroute.replica.routed/blake3-xof-v1\0";

/// The family of names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TrackingHash {
    /// The public sequence hashes.
    #[default]
    Public,
    /// Names that need the key.
    Keyed(Key),
}

/// A secret and its name. All routers that share load figures need the same.
#[derive(Clone, PartialEq, Eq)]
pub struct Key {
    id: Box<str>,
    secret: [u8; 32],
}

/// Who is served: with a key, equal prompts of two scopes get different names.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scope<'a> {
    /// Name of the model.
    pub model: &'a str,
    /// Workers that share one load table.
    pub routing_group: &'a str,
}

impl Key {
    /// Bytes in a secret.
    pub const LEN: usize = 32;

    /// Bytes in a nonce.
    pub const NONCE: usize = 16;

    /// A key under a name.
    pub fn new(id: &str, secret: [u8; Key::LEN]) -> Self {
        Self {
            id: id.into(),
            secret,
        }
    }

    /// The name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Encrypts values, or decrypts them: each is combined with a keystream of the key and the nonce. A nonce must not be
    /// used for other values.
    pub fn apply_keystream<'v>(
        &self,
        nonce: &[u8; Key::NONCE],
        values: impl Iterator<Item = &'v mut u64>,
    ) {
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        hasher.update(STREAM_DOMAIN).update(nonce);
        let mut stream = hasher.finalize_xof();
        for value in values {
            let mut bytes = [0; size_of::<u64>()];
            stream.fill(&mut bytes);
            *value ^= u64::from_le_bytes(bytes);
        }
    }

    /// The seeds of block hashing and of chaining.
    fn seeds(&self, content: &Content<'_>, block_size: u32, scope: Scope<'_>) -> (u64, u64) {
        let mut frames = Frames(blake3::Hasher::new_keyed(&self.secret));
        frames.0.update(DOMAIN);
        frames.mandatory(1, self.id.as_bytes());
        frames.mandatory(2, scope.model.as_bytes());
        frames.mandatory(3, scope.routing_group.as_bytes());
        frames.mandatory(4, &block_size.to_le_bytes());
        frames.optional(5, content.salt.cache.as_deref());
        frames.optional(6, content.salt.lora.as_deref());
        frames.mandatory(7, &[u8::from(content.windows == Windows::Eagle)]);
        let digest = frames.0.finalize();
        let seed = |at: usize| {
            let bytes: [u8; 8] = std::array::from_fn(|byte| digest.as_bytes()[at + byte]);
            u64::from_le_bytes(bytes)
        };
        (seed(0), seed(8))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// Fields with tag and length, so that no two lists of fields are the same bytes.
struct Frames(blake3::Hasher);

impl Frames {
    fn mandatory(&mut self, tag: u8, bytes: &[u8]) {
        self.0.update(&[tag]);
        self.long(bytes);
    }

    /// An empty text is the same as none, as in the salt.
    fn optional(&mut self, tag: u8, text: Option<&str>) {
        let text = text.filter(|text| !text.is_empty());
        self.0.update(&[tag, u8::from(text.is_some())]);
        if let Some(text) = text {
            self.long(text.as_bytes());
        }
    }

    fn long(&mut self, bytes: &[u8]) {
        self.0
            .update(&(bytes.len() as u64).to_le_bytes())
            .update(bytes);
    }
}

impl TrackingHash {
    /// The names of a prompt's complete blocks. `hashes` are those of the same content, and are taken as they are where
    /// they serve.
    pub fn sequences(
        &self,
        content: &Content<'_>,
        hashes: &BlockHashes,
        scope: Scope<'_>,
    ) -> Arc<[SequenceHash]> {
        match self {
            TrackingHash::Public => hashes.shared_sequences(),
            TrackingHash::Keyed(key) => {
                let block_size = hashes.block_size();
                let (block, chain) = key.seeds(content, block_size.0.get(), scope);
                chained(&content.locals_seeded(block_size, block), chain)
            }
        }
    }
}

/// Names for the blocks of a request that must not count on the cache: nobody else has them, so every block counts whole.
pub fn unshared(count: usize, rng: &mut impl Rng) -> Arc<[SequenceHash]> {
    (0..count).map(|_| SequenceHash(rng.random())).collect()
}

#[cfg(test)]
mod tests;
