//! Block hashing, compatible with other KV cache routers.
//!
//! A block is hashed with XXH3-64, seed 1337, over its little-endian token ids. The prefix that it
//! ends is hashed with XXH3-64 over (parent, local).
//!
//! Three kinds of hash have three types, because confusing them would go unnoticed. The local hash
//! covers one block, the sequence hash identifies a prefix, and the engine hash is opaque and
//! chosen by the engine.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::multimodal::{PromptObject, objects_by_block};
use super::salt::{CacheSalt, SEED};
use super::xxh3::{ByteHasher, PairHasher, SeededXxh3};
use crate::worker::BlockSize;

/// Hash of the tokens (and salt) of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LocalHash(pub u64);

/// Hash of a block and all blocks before it. Identifies a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SequenceHash(pub u64);

/// Block id in the events of an engine. It is opaque, and unique only within a worker rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EngineHash(pub u64);

impl SequenceHash {
    /// Returns the hash of the prefix that consists of the first block.
    pub fn root(local: LocalHash) -> Self {
        Self(local.0)
    }

    /// Returns the hash of the prefix that `local` ends when it follows `self`.
    pub fn child(self, local: LocalHash) -> Self {
        const STEP: PairHasher = PairHasher::new(SEED);
        self.chain_with(local, STEP)
    }

    #[inline]
    fn chain_with(self, local: LocalHash, step: PairHasher) -> Self {
        Self(step.hash(self.0, local.0))
    }

    /// Returns the hash of the prefix that `local` ends when it follows `last`, if any.
    #[inline]
    fn after(last: Option<Self>, local: LocalHash, step: PairHasher) -> Self {
        last.map_or_else(|| Self::root(local), |last| last.chain_with(local, step))
    }
}

/// Tokens that the hash of each block covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum BlockWindows {
    /// The tokens of the block.
    #[default]
    Plain,
    /// The tokens of the block and the next token: bigrams of SGLang with EAGLE, or lookahead tokens
    /// of vLLM 0.33 and later.
    Eagle,
}

impl BlockWindows {
    /// Returns the windows of block hashes that also cover the next token, or do not.
    pub fn new(covers_next_token: bool) -> Self {
        if covers_next_token {
            Self::Eagle
        } else {
            Self::Plain
        }
    }

    /// Returns the number of complete blocks of this many tokens.
    pub fn blocks(self, tokens: usize, block_size: BlockSize) -> usize {
        match self {
            Self::Plain => tokens / block_size.tokens(),
            Self::Eagle => tokens.saturating_sub(1) / block_size.tokens(),
        }
    }
}

/// Everything that distinguishes two prompts in a KV cache.
#[derive(Clone, Copy, Debug)]
pub struct PromptContent<'a> {
    /// Tokens of the prompt.
    pub tokens: &'a [u32],
    /// Separates caches of equal tokens.
    pub salt: &'a CacheSalt,
    /// Division of the tokens into blocks.
    pub windows: BlockWindows,
    /// Images and other objects, and their positions. Empty if pad tokens represent them.
    pub objects: &'a [PromptObject],
}

impl<'a> PromptContent<'a> {
    /// Returns the content of a prompt without objects, in plain blocks.
    pub fn text(tokens: &'a [u32], salt: &'a CacheSalt) -> Self {
        Self {
            tokens,
            salt,
            windows: BlockWindows::Plain,
            objects: &[],
        }
    }

    /// Returns the object hashes of each block.
    fn objects_by_block(&self, block_size: BlockSize) -> Vec<Vec<u64>> {
        if self.objects.is_empty() {
            return Vec::new();
        }
        let blocks = objects_by_block(self.tokens.len(), block_size, self.objects);
        blocks
            .iter()
            .map(|block| block.iter().map(|entry| entry.object.0).collect())
            .collect()
    }

    /// Returns the local hashes under a seed other than that of the salt.
    pub(super) fn seeded_local_hashes(&self, block_size: BlockSize, seed: u64) -> Vec<LocalHash> {
        seeded_local_hashes(
            self.tokens,
            block_size,
            seed,
            self.windows,
            &self.objects_by_block(block_size),
        )
    }
}

/// Local and sequence hash of a block.
pub(super) type BlockHashPair = (LocalHash, SequenceHash);

/// Local and sequence hashes of a request, computed once. Only complete blocks have hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockHashes {
    block_size: BlockSize,
    tokens: usize,
    locals: Vec<LocalHash>,
    sequences: Arc<[SequenceHash]>,
}

impl BlockHashes {
    /// Hashes the tokens of a text prompt.
    pub fn from_tokens(tokens: &[u32], block_size: BlockSize, salt: &CacheSalt) -> Self {
        Self::from_content(&PromptContent::text(tokens, salt), block_size)
    }

    /// Hashes any prompt.
    pub fn from_content(content: &PromptContent<'_>, block_size: BlockSize) -> Self {
        if content.objects.is_empty() {
            return Self::continue_with_text(&[], content.tokens.len(), content, block_size);
        }
        let locals = content.seeded_local_hashes(block_size, content.salt.seed());
        Self::from_locals(content.tokens.len(), block_size, locals)
    }

    /// Continues the hashes of known blocks with the text that follows them. `tokens` is the length
    /// of the whole prompt.
    pub(super) fn continue_with_text(
        known: &[BlockHashPair],
        tokens: usize,
        rest: &PromptContent<'_>,
        block_size: BlockSize,
    ) -> Self {
        let seed = rest.salt.seed();
        let xxh3 = SeededXxh3::new(seed);
        match (rest.windows, block_size.tokens()) {
            (BlockWindows::Plain, 16) => {
                let blocks = rest.tokens.as_chunks().0.iter();
                Self::hash_and_chain(
                    known,
                    tokens,
                    block_size,
                    blocks.map(|block| LocalHash(xxh3.hash_16(block))),
                )
            }
            (BlockWindows::Plain, 32) => {
                let blocks = rest.tokens.as_chunks().0.iter();
                Self::hash_and_chain(
                    known,
                    tokens,
                    block_size,
                    blocks.map(|block| LocalHash(xxh3.hash_32(block))),
                )
            }
            _ => Self::continue_with_locals(
                known,
                tokens,
                block_size,
                &seeded_local_hashes(rest.tokens, block_size, seed, rest.windows, &[]),
            ),
        }
    }

    /// Continues the hashes of known blocks with further local hashes. `tokens` is the length of
    /// the whole prompt.
    pub(super) fn continue_with_locals(
        known: &[BlockHashPair],
        tokens: usize,
        block_size: BlockSize,
        more: &[LocalHash],
    ) -> Self {
        Self::hash_and_chain(known, tokens, block_size, more.iter().copied())
    }

    /// Computes local hashes and chains them in one pass. Chaining is latency-bound: each step
    /// depends on the previous one, so the independent local hashes overlap with it.
    fn hash_and_chain(
        known: &[BlockHashPair],
        tokens: usize,
        block_size: BlockSize,
        more: impl ExactSizeIterator<Item = LocalHash>,
    ) -> Self {
        let blocks = known.len() + more.len();
        let mut locals = vec![LocalHash(0); blocks];
        let mut sequences: Arc<[SequenceHash]> =
            std::iter::repeat_n(SequenceHash(0), blocks).collect();
        let names = Arc::get_mut(&mut sequences).expect("the new slice has one owner");
        for ((local, name), known) in locals.iter_mut().zip(names.iter_mut()).zip(known) {
            (*local, *name) = *known;
        }
        let known_locals = &mut locals[known.len()..];
        let known_names = &mut names[known.len()..];
        let mut last = known.last().map(|(_, sequence)| *sequence);
        let step = PairHasher::new(SEED);
        for ((slot, name), local) in known_locals.iter_mut().zip(known_names).zip(more) {
            *slot = local;
            *name = SequenceHash::after(last, local, step);
            last = Some(*name);
        }
        Self {
            block_size,
            tokens,
            locals,
            sequences,
        }
    }

    /// Chains existing local hashes. `tokens` is the length of their prompt.
    pub fn from_locals(tokens: usize, block_size: BlockSize, locals: Vec<LocalHash>) -> Self {
        let sequences = chain_locals(&locals, SEED);
        Self {
            block_size,
            tokens,
            locals,
            sequences,
        }
    }

    /// Returns the number of tokens per block.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Returns the length of the prompt in tokens, including the incomplete last block.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the number of complete blocks.
    pub fn len(&self) -> usize {
        self.locals.len()
    }

    /// Returns whether the prompt is shorter than one block.
    pub fn is_empty(&self) -> bool {
        self.locals.is_empty()
    }

    /// Returns the local hashes, first block first.
    pub fn locals(&self) -> &[LocalHash] {
        &self.locals
    }

    /// Returns the sequence hashes, first block first.
    pub fn sequences(&self) -> &[SequenceHash] {
        &self.sequences
    }

    /// Returns the sequence hashes without copying them.
    pub fn shared_sequences(&self) -> Arc<[SequenceHash]> {
        self.sequences.clone()
    }
}

/// Returns the sequence hashes of a prompt, chained with this seed.
pub(super) fn chain_locals(locals: &[LocalHash], seed: u64) -> Arc<[SequenceHash]> {
    let step = PairHasher::new(seed);
    let mut last = None;
    let locals = locals.iter();
    locals
        .map(|local| *last.insert(SequenceHash::after(last, *local, step)))
        .collect()
}

/// Returns the local hashes of the complete blocks of `tokens`. `mm_hashes` contains the hashes of
/// the multimodal objects that overlap each block. Blocks beyond its end have none.
pub fn local_hashes(
    tokens: &[u32],
    block_size: BlockSize,
    salt: &CacheSalt,
    windows: BlockWindows,
    mm_hashes: &[Vec<u64>],
) -> Vec<LocalHash> {
    seeded_local_hashes(tokens, block_size, salt.seed(), windows, mm_hashes)
}

fn seeded_local_hashes(
    tokens: &[u32],
    block_size: BlockSize,
    seed: u64,
    windows: BlockWindows,
    mm_hashes: &[Vec<u64>],
) -> Vec<LocalHash> {
    let xxh3 = SeededXxh3::new(seed);
    match (windows, block_size.tokens(), mm_hashes) {
        (BlockWindows::Plain, 16, []) => tokens
            .as_chunks()
            .0
            .iter()
            .map(|block| LocalHash(xxh3.hash_16(block)))
            .collect(),
        (BlockWindows::Plain, 32, []) => tokens
            .as_chunks()
            .0
            .iter()
            .map(|block| LocalHash(xxh3.hash_32(block)))
            .collect(),
        _ => general_local_hashes(tokens, block_size, &xxh3.byte_hasher(), windows, mm_hashes),
    }
}

fn general_local_hashes(
    tokens: &[u32],
    block_size: BlockSize,
    xxh3: &ByteHasher,
    windows: BlockWindows,
    mm_hashes: &[Vec<u64>],
) -> Vec<LocalHash> {
    let stride = block_size.tokens();
    let count = windows.blocks(tokens.len(), block_size);
    let width = match windows {
        BlockWindows::Plain => stride,
        BlockWindows::Eagle => stride + 1,
    };
    let mut bytes = vec![0; width * 4];
    (0..count)
        .map(|block| {
            bytes.truncate(width * 4);
            let words = bytes.as_chunks_mut().0.iter_mut();
            let block_tokens = &tokens[block * stride..block * stride + width];
            words
                .zip(block_tokens)
                .for_each(|(bytes, token)| *bytes = token.to_le_bytes());
            if let Some(objects) = mm_hashes.get(block) {
                let mut sorted = objects.clone();
                sorted.sort_unstable();
                bytes.extend(sorted.iter().flat_map(|object| object.to_le_bytes()));
            }
            LocalHash(xxh3.hash(&bytes))
        })
        .collect()
}

#[cfg(test)]
mod tests;
