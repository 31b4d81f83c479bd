//! Block hashing, compatible with the KV routers of the field: XXH3-64 with seed 1337 over little-endian token ids for
//! the content of one block, and XXH3-64 over (parent, local) for the prefix it ends. Three kinds of hash exist and are
//! three types, because mixing them is silent: the local hash is ours and knows one block, the sequence hash is ours and
//! names a prefix, the engine hash is the engine's own and opaque.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::multimodal::{PromptObject, objects_by_block};
use super::salt::{SEED, Salt};
use super::xxh3::{OfAny, OfPair, Seeded};
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
        const STEP: OfPair = OfPair::new(SEED);
        self.by(local, STEP)
    }

    #[inline]
    fn by(self, local: LocalHash, step: OfPair) -> Self {
        Self(step.hash(self.0, local.0))
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

impl Windows {
    /// Complete blocks of so many tokens.
    pub fn blocks(self, tokens: usize, block_size: BlockSize) -> usize {
        match self {
            Self::Plain => tokens / block_size.tokens(),
            Self::Eagle => tokens.saturating_sub(1) / block_size.tokens(),
        }
    }
}

/// Everything that makes two prompts equal or different to a cache.
#[derive(Clone, Copy, Debug)]
pub struct Content<'a> {
    /// The prompt.
    pub tokens: &'a [u32],
    /// What separates equal tokens.
    pub salt: &'a Salt,
    /// How the engine cuts tokens into blocks.
    pub windows: Windows,
    /// Images and the like, and where they stand. Empty where pad tokens stand for them.
    pub objects: &'a [PromptObject],
}

impl<'a> Content<'a> {
    /// Text alone, in plain blocks.
    pub fn plain(tokens: &'a [u32], salt: &'a Salt) -> Self {
        Self {
            tokens,
            salt,
            windows: Windows::Plain,
            objects: &[],
        }
    }

    /// The objects of each block, by their hashes.
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

    /// The local hashes with another seed than the salt gives.
    pub(super) fn locals_seeded(&self, block_size: BlockSize, seed: u64) -> Vec<LocalHash> {
        locals_seeded(
            self.tokens,
            block_size,
            seed,
            self.windows,
            &self.objects_by_block(block_size),
        )
    }
}

/// What a block is called, alone and with all before it.
pub(super) type Known = (LocalHash, SequenceHash);

/// A request's local and sequence hashes, computed once. Only complete blocks have hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockHashes {
    block_size: BlockSize,
    tokens: usize,
    locals: Vec<LocalHash>,
    sequences: Arc<[SequenceHash]>,
}

impl BlockHashes {
    /// Hashes of plain text tokens.
    pub fn of(tokens: &[u32], block_size: BlockSize, salt: &Salt) -> Self {
        Self::of_content(&Content::plain(tokens, salt), block_size)
    }

    /// Hashes of any prompt.
    pub fn of_content(content: &Content<'_>, block_size: BlockSize) -> Self {
        if content.objects.is_empty() {
            return Self::after_text(&[], content.tokens.len(), content, block_size);
        }
        let locals = content.locals_seeded(block_size, content.salt.seed());
        Self::chain(content.tokens.len(), block_size, locals)
    }

    /// Goes on from blocks that are known with the text that follows them; `tokens` is the length of the prompt.
    pub(super) fn after_text(
        known: &[Known],
        tokens: usize,
        rest: &Content<'_>,
        block_size: BlockSize,
    ) -> Self {
        let seed = rest.salt.seed();
        let xxh3 = Seeded::new(seed);
        let whole = (tokens, block_size);
        match (rest.windows, block_size.tokens()) {
            (Windows::Plain, 16) => {
                let blocks = rest.tokens.as_chunks().0.iter();
                Self::fused(
                    known,
                    whole,
                    blocks.map(|block| LocalHash(xxh3.of_16(block))),
                )
            }
            (Windows::Plain, 32) => {
                let blocks = rest.tokens.as_chunks().0.iter();
                Self::fused(
                    known,
                    whole,
                    blocks.map(|block| LocalHash(xxh3.of_32(block))),
                )
            }
            _ => Self::after(
                known,
                whole,
                &locals_seeded(rest.tokens, block_size, seed, rest.windows, &[]),
            ),
        }
    }

    /// Goes on from blocks that are known with the local hashes of those that follow; `tokens` is the length of the prompt.
    pub(super) fn after(known: &[Known], whole: (usize, BlockSize), more: &[LocalHash]) -> Self {
        Self::fused(known, whole, more.iter().copied())
    }

    /// Local hashes and the chain of them in one pass: they are computed while a step of the chain waits for the last.
    fn fused(
        known: &[Known],
        (tokens, block_size): (usize, BlockSize),
        more: impl ExactSizeIterator<Item = LocalHash>,
    ) -> Self {
        let blocks = known.len() + more.len();
        let mut locals = vec![LocalHash(0); blocks];
        let mut sequences: Arc<[SequenceHash]> =
            std::iter::repeat_n(SequenceHash(0), blocks).collect();
        let names = Arc::get_mut(&mut sequences).expect("nobody else has it yet");
        for ((local, name), known) in locals.iter_mut().zip(names.iter_mut()).zip(known) {
            (*local, *name) = *known;
        }
        let (known_locals, known_names) = (&mut locals[known.len()..], &mut names[known.len()..]);
        let mut last = known.last().map(|(_, sequence)| *sequence);
        let step = OfPair::new(SEED);
        for ((slot, name), local) in known_locals.iter_mut().zip(known_names).zip(more) {
            *slot = local;
            *name = last.map_or_else(
                || SequenceHash::root(local),
                |parent| parent.by(local, step),
            );
            last = Some(*name);
        }
        Self {
            block_size,
            tokens,
            locals,
            sequences,
        }
    }

    /// Chains local hashes that were computed elsewhere; `tokens` is the length of the prompt they came from.
    pub fn chain(tokens: usize, block_size: BlockSize, locals: Vec<LocalHash>) -> Self {
        let sequences = chained(&locals, SEED);
        Self {
            block_size,
            tokens,
            locals,
            sequences,
        }
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

    /// The sequence hashes to keep, without a copy.
    pub fn shared_sequences(&self) -> Arc<[SequenceHash]> {
        self.sequences.clone()
    }
}

/// The sequence hashes of a prompt, each step with this seed.
pub(super) fn chained(locals: &[LocalHash], seed: u64) -> Arc<[SequenceHash]> {
    chain(None, locals.iter().copied(), seed).collect()
}

/// The sequence hashes of blocks that follow `last`.
fn chain(
    mut last: Option<SequenceHash>,
    locals: impl Iterator<Item = LocalHash>,
    seed: u64,
) -> impl Iterator<Item = SequenceHash> {
    let step = OfPair::new(seed);
    locals.map(move |local| {
        let next = last.map_or_else(
            || SequenceHash::root(local),
            |parent| parent.by(local, step),
        );
        last = Some(next);
        next
    })
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
    locals_seeded(tokens, block_size, salt.seed(), windows, mm_hashes)
}

fn locals_seeded(
    tokens: &[u32],
    block_size: BlockSize,
    seed: u64,
    windows: Windows,
    mm_hashes: &[Vec<u64>],
) -> Vec<LocalHash> {
    let xxh3 = Seeded::new(seed);
    match (windows, block_size.tokens(), mm_hashes) {
        (Windows::Plain, 16, []) => tokens
            .as_chunks()
            .0
            .iter()
            .map(|block| LocalHash(xxh3.of_16(block)))
            .collect(),
        (Windows::Plain, 32, []) => tokens
            .as_chunks()
            .0
            .iter()
            .map(|block| LocalHash(xxh3.of_32(block)))
            .collect(),
        _ => locals_of_any(tokens, block_size, &xxh3.of_any(), windows, mm_hashes),
    }
}

fn locals_of_any(
    tokens: &[u32],
    block_size: BlockSize,
    xxh3: &OfAny,
    windows: Windows,
    mm_hashes: &[Vec<u64>],
) -> Vec<LocalHash> {
    let (stride, count) = (
        block_size.tokens(),
        windows.blocks(tokens.len(), block_size),
    );
    let width = match windows {
        Windows::Plain => stride,
        Windows::Eagle => stride + 1,
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
