//! Block hashing, compatible with the KV routers of the field: XXH3-64 with seed 1337 over little-endian token ids for
//! the content of one block, and XXH3-64 over (parent, local) for the prefix it ends. Three kinds of hash exist and are
//! three types, because mixing them is silent: the local hash is ours and knows one block, the sequence hash is ours and
//! names a prefix, the engine hash is the engine's own and opaque.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::salt::{SEED, Salt};
use crate::worker::BlockSize;

/// Hash of one block's tokens (and salt) alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LocalHash(pub u64);

/// Hash of a block and all before it; names a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SequenceHash(pub u64);

/// The id an engine puts into its events; opaque, and unique only within a worker rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EngineHash(pub u64);

impl SequenceHash {
    /// The prefix that a first block names.
    pub fn root(local: LocalHash) -> Self {
        Self(local.0)
    }

    /// The prefix that `local` makes when it follows `self`.
    pub fn then(self, local: LocalHash) -> Self {
        let mut bytes = [0u8; 16];
        bytes[..8].copy_from_slice(&self.0.to_le_bytes());
        bytes[8..].copy_from_slice(&local.0.to_le_bytes());
        Self(xxh3_64_with_seed(&bytes, SEED))
    }
}

/// How the tokens of a request are cut into blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Windows {
    /// Blocks side by side.
    #[default]
    Plain,
    /// EAGLE speculative decoding keys blocks by bigrams: each window holds one token more and shares it with the next.
    Eagle,
}

/// A request's local and sequence hashes, computed once. Only complete blocks have hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockHashes {
    block_size: BlockSize,
    tokens: usize,
    locals: Vec<LocalHash>,
    sequences: Vec<SequenceHash>,
}

impl BlockHashes {
    /// Hashes of plain text tokens.
    pub fn of(tokens: &[u32], block_size: BlockSize, salt: &Salt) -> Self {
        Self::chain(tokens.len(), block_size, locals(tokens, block_size, salt, Windows::Plain, &[]))
    }

    /// Chains local hashes that were computed elsewhere; `tokens` is the length of the prompt they came from.
    pub fn chain(tokens: usize, block_size: BlockSize, locals: Vec<LocalHash>) -> Self {
        let mut sequences = Vec::with_capacity(locals.len());
        let mut last: Option<SequenceHash> = None;
        for &local in &locals {
            let next = last.map_or_else(|| SequenceHash::root(local), |parent| parent.then(local));
            sequences.push(next);
            last = Some(next);
        }
        Self { block_size, tokens, locals, sequences }
    }

    /// Tokens per block.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Length of the prompt in tokens, the partial tail included.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Complete blocks.
    pub fn len(&self) -> usize {
        self.locals.len()
    }

    /// Whether the prompt is shorter than one block.
    pub fn is_empty(&self) -> bool {
        self.locals.is_empty()
    }

    /// Local hashes, first block first.
    pub fn locals(&self) -> &[LocalHash] {
        &self.locals
    }

    /// Sequence hashes, first block first.
    pub fn sequences(&self) -> &[SequenceHash] {
        &self.sequences
    }
}

/// Local hashes of the complete blocks of `tokens`. `mm_hashes` names, per block, the multimodal objects that touch it;
/// a shorter list means that later blocks have none.
pub fn locals(
    tokens: &[u32],
    block_size: BlockSize,
    salt: &Salt,
    windows: Windows,
    mm_hashes: &[Vec<u64>],
) -> Vec<LocalHash> {
    let stride = block_size.tokens();
    let (width, count) = match windows {
        Windows::Plain => (stride, tokens.len() / stride),
        Windows::Eagle => (stride + 1, tokens.len().saturating_sub(1) / stride),
    };
    let seed = salt.seed();
    let mut bytes = Vec::with_capacity(width * 4);
    (0..count)
        .map(|block| {
            bytes.clear();
            for token in &tokens[block * stride..block * stride + width] {
                bytes.extend_from_slice(&token.to_le_bytes());
            }
            if let Some(objects) = mm_hashes.get(block) {
                let mut sorted = objects.clone();
                sorted.sort_unstable();
                bytes.extend(sorted.iter().flat_map(|object| object.to_le_bytes()));
            }
            LocalHash(xxh3_64_with_seed(&bytes, seed))
        })
        .collect()
}
