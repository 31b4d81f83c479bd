//! Keyed hashes of prompt blocks. [`warmroute_core::block::tracking`] describes their purpose.

use std::fmt;
use std::sync::Arc;

use warmroute_core::block::tracking::{TrackingSeeds, seeded_sequences};
use warmroute_core::block::{BlockHashes, BlockWindows, PromptContent, SequenceHash};

/// Separates these keyed hashes from any other use of the same key.
const DOMAIN: &[u8] = b"dynamo.router.tracking-hash/keyed-xxh3-v1\0";

/// Separates the keystream for the data that replicas publish from any other use of the same key.
const STREAM_DOMAIN: &[u8] = b"warmroute.replica.routed/blake3-xof-v1\0";

/// Family of hashes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TrackingHash {
    /// Public sequence hashes.
    #[default]
    Public,
    /// Hashes that depend on a key.
    Keyed(TrackingKey),
}

/// Secret key and its id. All routers that share load data need the same key.
#[derive(Clone, PartialEq, Eq)]
pub struct TrackingKey {
    id: Box<str>,
    secret: [u8; 32],
}

impl TrackingKey {
    /// Length of a secret in bytes.
    pub const LEN: usize = 32;

    /// Length of a nonce in bytes.
    pub const NONCE: usize = 16;

    /// Creates a key.
    pub fn new(id: &str, secret: [u8; TrackingKey::LEN]) -> Self {
        Self {
            id: id.into(),
            secret,
        }
    }

    /// Returns the id of the key.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Encrypts or decrypts values by combining them with a keystream of the key and the nonce. A
    /// nonce must not be reused for other values.
    pub fn apply_keystream<'v>(
        &self,
        nonce: &[u8; TrackingKey::NONCE],
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

    /// Derives the seeds for a prompt of a model. The group of workers that share one load table is
    /// always empty.
    fn seeds(&self, content: &PromptContent<'_>, block_size: u32, model: &str) -> TrackingSeeds {
        let mut frames = FieldFrames(blake3::Hasher::new_keyed(&self.secret));
        frames.0.update(DOMAIN);
        frames.mandatory(1, self.id.as_bytes());
        frames.mandatory(2, model.as_bytes());
        frames.mandatory(3, b"");
        frames.mandatory(4, &block_size.to_le_bytes());
        frames.optional(5, content.salt.cache.as_deref());
        frames.optional(6, content.salt.lora.as_deref());
        frames.mandatory(7, &[u8::from(content.windows == BlockWindows::Eagle)]);
        let digest = frames.0.finalize();
        let seed = |at: usize| {
            let bytes: [u8; 8] = std::array::from_fn(|byte| digest.as_bytes()[at + byte]);
            u64::from_le_bytes(bytes)
        };
        TrackingSeeds {
            local: seed(0),
            chain: seed(8),
        }
    }
}

impl fmt::Debug for TrackingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrackingKey")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// Hashes fields with tag and length, so that different lists of fields never have equal bytes.
struct FieldFrames(blake3::Hasher);

impl FieldFrames {
    fn mandatory(&mut self, tag: u8, bytes: &[u8]) {
        self.0.update(&[tag]);
        self.length_prefixed(bytes);
    }

    /// Hashes an optional field. An empty text equals a missing one, as in
    /// [`CacheSalt`](warmroute_core::block::CacheSalt).
    fn optional(&mut self, tag: u8, text: Option<&str>) {
        let text = text.filter(|text| !text.is_empty());
        self.0.update(&[tag, u8::from(text.is_some())]);
        if let Some(text) = text {
            self.length_prefixed(text.as_bytes());
        }
    }

    fn length_prefixed(&mut self, bytes: &[u8]) {
        self.0
            .update(&(bytes.len() as u64).to_le_bytes())
            .update(bytes);
    }
}

impl TrackingHash {
    /// Returns the hashes of a prompt's complete blocks. Keyed hashes of equal prompts differ between
    /// models. `hashes` must belong to the same content, and are reused if possible.
    pub fn sequences(
        &self,
        content: &PromptContent<'_>,
        hashes: &BlockHashes,
        model: &str,
    ) -> Arc<[SequenceHash]> {
        match self {
            TrackingHash::Public => hashes.shared_sequences(),
            TrackingHash::Keyed(key) => {
                let block_size = hashes.block_size();
                let seeds = key.seeds(content, block_size.0.get(), model);
                seeded_sequences(content, block_size, seeds)
            }
        }
    }
}

#[cfg(test)]
mod tests;
