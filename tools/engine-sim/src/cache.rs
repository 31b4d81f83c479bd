//! The paged KV cache of one data-parallel rank, modelled on vLLM: physical blocks with reference
//! counts, lookup by a chained hash of the tokens, and least-recently-used eviction. It has no
//! clock and no I/O. Benchmark results (prefix hits, published events) depend on it, so property
//! tests verify it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

/// Index of a physical block.
type BlockId = usize;

/// The engine's own hash of a block; opaque to routers.
pub(crate) type EngineHash = u64;

/// Effect of speculative decoding on the prefix cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum SpeculativeDecoding {
    /// None.
    #[default]
    None,
    /// The engine recomputes the last matched block of each prompt: EAGLE and MTP in vLLM up to 0.32.
    DropLastBlock,
    /// The hash of a block also covers the next token: EAGLE and MTP in vLLM 0.33 and later.
    Lookahead,
}

/// Block size in tokens, and the tokens that a block hash covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockLayout {
    pub(crate) size: usize,
    /// Number of tokens after a block that its hash covers.
    pub(crate) lookahead: usize,
}

impl BlockLayout {
    /// Returns the number of blocks of this many tokens whose hash can be computed.
    fn complete_blocks(self, tokens: usize) -> usize {
        tokens.saturating_sub(self.lookahead) / self.size
    }
}

/// Keys that distinguish blocks with equal tokens. The adapter applies to every block, the cache
/// salt only to the first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockKeys {
    pub(crate) lora: Option<LoraAdapter>,
    pub(crate) salt: Option<Arc<str>>,
    pub(crate) session: Option<Arc<str>>,
}

/// A LoRA adapter: the id assigned by the engine and the served name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoraAdapter {
    pub(crate) id: u32,
    pub(crate) name: Arc<str>,
}

impl BlockKeys {
    /// Returns the extra keys of the block at `position`, in the order in which vLLM publishes
    /// them.
    fn of_block(&self, position: usize) -> Option<Vec<Arc<str>>> {
        let lora = self.lora.iter().map(|lora| &lora.name);
        let salt = self.salt.iter().filter(|_| position == 0);
        let keys: Vec<_> = lora.chain(salt).cloned().collect();
        (!keys.is_empty()).then_some(keys)
    }
}

/// A run of blocks stored by one chunk of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredBlocks {
    pub(crate) hashes: Vec<EngineHash>,
    pub(crate) parent: Option<EngineHash>,
    pub(crate) tokens: Vec<u32>,
    /// Tokens after each block that its hash covers. Empty if there are none.
    pub(crate) lookahead: Vec<Vec<u32>>,
    pub(crate) extra_keys: Vec<Option<Vec<Arc<str>>>>,
    pub(crate) lora: Option<LoraAdapter>,
    pub(crate) session: Option<Arc<str>>,
}

/// A change of the cache's content, in order of occurrence.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum CacheEvent {
    Stored(StoredBlocks),
    Removed(EngineHash),
    Cleared,
}

/// Error: no block is free, cached or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoFreeBlockError;

/// A token sequence and its physical blocks.
#[derive(Debug)]
pub(crate) struct TokenSequence {
    tokens: Vec<u32>,
    keys: BlockKeys,
    hashes: Vec<EngineHash>,
    blocks: Vec<BlockId>,
    computed: usize,
    /// Number of leading blocks that are cached.
    stored: usize,
    reads_prefix_cache: bool,
}

impl TokenSequence {
    pub(crate) fn new(tokens: Vec<u32>, keys: BlockKeys) -> Self {
        Self {
            tokens,
            keys,
            hashes: Vec::new(),
            blocks: Vec::new(),
            computed: 0,
            stored: 0,
            reads_prefix_cache: true,
        }
    }

    /// Sets whether the sequence may reuse cached blocks.
    pub(crate) fn with_cache_reading(self, reads_prefix_cache: bool) -> Self {
        Self {
            reads_prefix_cache,
            ..self
        }
    }

    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub(crate) fn keys(&self) -> &BlockKeys {
        &self.keys
    }

    /// Returns the numbers of the sequence's blocks as vLLM numbers them. vLLM never uses block 0.
    pub(crate) fn block_numbers(&self) -> Vec<usize> {
        self.blocks.iter().map(|id| id + 1).collect()
    }

    /// Returns the number of tokens whose keys and values are in the cache, including those of the
    /// current step.
    pub(crate) fn computed(&self) -> usize {
        self.computed
    }

    fn extend_hashes(&mut self, layout: BlockLayout) {
        let BlockLayout { size, lookahead } = layout;
        for position in self.hashes.len()..layout.complete_blocks(self.tokens.len()) {
            let tokens = &self.tokens[position * size..(position + 1) * size + lookahead];
            let parent = self.hashes.last().copied();
            self.hashes.push(block_hash(
                parent,
                tokens,
                self.keys.of_block(position).as_deref(),
            ));
        }
    }
}

/// Returns the chained hash of a block, computed from its tokens, its extra keys and the parent
/// hash.
fn block_hash(
    parent: Option<EngineHash>,
    tokens: &[u32],
    extra: Option<&[Arc<str>]>,
) -> EngineHash {
    let mut hash = Xxh3::with_seed(0x656e_6769_6e65);
    hash.update(&[u8::from(parent.is_some())]);
    hash.update(&parent.unwrap_or_default().to_be_bytes());
    for token in tokens {
        hash.update(&token.to_be_bytes());
    }
    for key in extra.unwrap_or_default() {
        hash.update(&(key.len() as u64).to_be_bytes());
        hash.update(key.as_bytes());
    }
    hash.digest()
}

/// Content of a block: the keys and values of these tokens after all tokens before them. A freed
/// block keeps its content until another sequence overwrites it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct BlockContent {
    after: Option<EngineHash>,
    extra_keys: Option<Vec<Arc<str>>>,
    tokens: Vec<u32>,
}

impl BlockContent {
    /// Returns the contents of a prompt's blocks once all of it is computed.
    pub(crate) fn of_prompt(tokens: &[u32], keys: &BlockKeys, block_size: usize) -> Vec<Self> {
        let mut sequence = TokenSequence::new(tokens.to_vec(), keys.clone());
        sequence.extend_hashes(BlockLayout {
            size: block_size,
            lookahead: 0,
        });
        let mut blocks = vec![Self::default(); tokens.len().div_ceil(block_size)];
        for (at, block) in blocks.iter_mut().enumerate() {
            block.set_content(&sequence, at, block_size, tokens.len());
        }
        blocks
    }

    /// Returns true if a request that needs `other` can use this block. The block may contain
    /// additional tokens at the end.
    pub(crate) fn can_serve(&self, other: &Self) -> bool {
        self.after == other.after
            && self.extra_keys == other.extra_keys
            && self.tokens.starts_with(&other.tokens)
    }

    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    fn set_content(
        &mut self,
        sequence: &TokenSequence,
        at: usize,
        block_size: usize,
        computed: usize,
    ) {
        self.after = at.checked_sub(1).map(|before| sequence.hashes[before]);
        self.extra_keys = sequence.keys.of_block(at);
        self.tokens.clear();
        self.tokens.extend_from_slice(
            &sequence.tokens[at * block_size..computed.min((at + 1) * block_size)],
        );
    }
}

/// Blocks of a sequence that a lookup found in the cache and that are not yet referenced.
#[derive(Debug, Default)]
pub(crate) struct PrefixHit(Vec<BlockId>);

#[derive(Debug, Default)]
struct PhysicalBlock {
    hash: Option<EngineHash>,
    refs: u32,
    /// Position in the free list; meaningful only while `refs` is 0.
    free_position: i64,
    content: BlockContent,
}

/// The prefix cache of one rank.
#[derive(Debug)]
pub(crate) struct BlockCache {
    block_size: usize,
    speculative_decoding: SpeculativeDecoding,
    blocks: Vec<PhysicalBlock>,
    /// Free blocks by position; the first is reused next.
    free: BTreeMap<i64, BlockId>,
    /// Physical copies of every cached block, oldest first.
    cached: HashMap<EngineHash, Vec<BlockId>>,
    events: Vec<CacheEvent>,
    /// True if computed blocks are cached for other requests.
    prefix_caching: bool,
    /// Outermost positions used so far at either end of the free list.
    front: i64,
    back: i64,
}

impl BlockCache {
    pub(crate) fn new(block_size: usize, num_blocks: usize) -> Self {
        let mut cache = Self {
            block_size,
            speculative_decoding: SpeculativeDecoding::None,
            blocks: (0..num_blocks).map(|_| PhysicalBlock::default()).collect(),
            free: BTreeMap::new(),
            cached: HashMap::new(),
            events: Vec::new(),
            prefix_caching: true,
            front: 0,
            back: 0,
        };
        for id in 0..num_blocks {
            cache.back += 1;
            cache.put_free(id, cache.back);
        }
        cache
    }

    /// Disables prefix caching, so that every prompt is computed without reuse.
    pub(crate) fn disable_prefix_cache(self) -> Self {
        Self {
            prefix_caching: false,
            ..self
        }
    }

    pub(crate) fn with_speculative_decoding(
        self,
        speculative_decoding: SpeculativeDecoding,
    ) -> Self {
        Self {
            speculative_decoding,
            ..self
        }
    }

    fn layout(&self) -> BlockLayout {
        BlockLayout {
            size: self.block_size,
            lookahead: usize::from(self.speculative_decoding == SpeculativeDecoding::Lookahead),
        }
    }

    pub(crate) fn prefix_caching(&self) -> bool {
        self.prefix_caching
    }

    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Returns the longest cached prefix of `sequence` that leaves at least one token to compute.
    /// The logits of the last token are needed even if all keys are cached.
    pub(crate) fn lookup(&self, sequence: &mut TokenSequence) -> PrefixHit {
        sequence.extend_hashes(self.layout());
        let most = if sequence.reads_prefix_cache {
            sequence.len().saturating_sub(1) / self.block_size
        } else {
            0
        };
        let mut found: Vec<BlockId> = sequence.hashes[..most]
            .iter()
            .map_while(|hash| self.cached.get(hash))
            .map(|copies| copies[0])
            .collect();
        if self.speculative_decoding == SpeculativeDecoding::DropLastBlock {
            found.pop();
        }
        PrefixHit(found)
    }

    /// Returns the number of tokens covered by `hit`.
    pub(crate) fn hit_tokens(&self, hit: &PrefixHit) -> usize {
        hit.0.len() * self.block_size
    }

    /// Assigns the blocks of `hit` to an empty sequence and allocates blocks for `new_tokens` after
    /// them.
    pub(crate) fn admit(
        &mut self,
        sequence: &mut TokenSequence,
        hit: &PrefixHit,
        new_tokens: usize,
    ) -> Result<(), NoFreeBlockError> {
        self.reserve(sequence, hit, new_tokens)?;
        self.grow(sequence, new_tokens)
    }

    /// Assigns and allocates blocks like [`BlockCache::admit`], but computes nothing: `new_tokens`
    /// are received from another engine, see [`BlockCache::receive`].
    pub(crate) fn reserve(
        &mut self,
        sequence: &mut TokenSequence,
        hit: &PrefixHit,
        new_tokens: usize,
    ) -> Result<(), NoFreeBlockError> {
        debug_assert!(
            sequence.blocks.is_empty(),
            "a sequence is admitted once, until it is released"
        );
        let reused_free = hit
            .0
            .iter()
            .filter(|&&id| self.blocks[id].refs == 0)
            .count();
        let needed = (self.hit_tokens(hit) + new_tokens).div_ceil(self.block_size) - hit.0.len();
        if needed > self.free.len() - reused_free {
            return Err(NoFreeBlockError);
        }
        for &id in &hit.0 {
            let block = &mut self.blocks[id];
            if block.refs == 0 {
                self.free.remove(&block.free_position);
            }
            block.refs += 1;
        }
        sequence.blocks.extend_from_slice(&hit.0);
        sequence.computed = self.hit_tokens(hit);
        sequence.stored = hit.0.len();
        self.allocate(sequence, sequence.computed + new_tokens)
    }

    /// Marks all allocated blocks of a sequence as received from another engine. As in vLLM, the
    /// last token is computed again, because its logits are needed.
    pub(crate) fn receive(&mut self, sequence: &mut TokenSequence) {
        self.write(sequence, sequence.computed..sequence.len());
        self.store(sequence, sequence.len());
        sequence.computed = sequence.len() - 1;
    }

    /// Allocates blocks for the next `new_tokens` of `sequence` and caches the blocks that they
    /// fill. As in vLLM, a block is cached as soon as its step is planned, so an identical request
    /// in the same step already hits it.
    pub(crate) fn grow(
        &mut self,
        sequence: &mut TokenSequence,
        new_tokens: usize,
    ) -> Result<(), NoFreeBlockError> {
        let computed = sequence.computed + new_tokens;
        debug_assert!(computed <= sequence.len(), "only known tokens are computed");
        self.allocate(sequence, computed)?;
        self.write(sequence, sequence.computed..computed);
        sequence.computed = computed;
        self.store(sequence, computed);
        Ok(())
    }

    fn write(&mut self, sequence: &mut TokenSequence, tokens: std::ops::Range<usize>) {
        sequence.extend_hashes(self.layout());
        for at in tokens.start / self.block_size..tokens.end.div_ceil(self.block_size) {
            let content = &mut self.blocks[sequence.blocks[at]].content;
            content.set_content(sequence, at, self.block_size, tokens.end);
        }
    }

    /// Returns the current contents of blocks, whichever request they belong to, and `None` for an
    /// invalid number. The numbers are those of [`TokenSequence::block_numbers`].
    pub(crate) fn read(&self, numbers: &[usize]) -> Vec<Option<BlockContent>> {
        let block = |number: &usize| {
            self.blocks
                .get(number.checked_sub(1)?)
                .map(|block| block.content.clone())
        };
        numbers.iter().map(block).collect()
    }

    fn allocate(
        &mut self,
        sequence: &mut TokenSequence,
        tokens: usize,
    ) -> Result<(), NoFreeBlockError> {
        let needed = tokens
            .div_ceil(self.block_size)
            .saturating_sub(sequence.blocks.len());
        if needed > self.free.len() {
            return Err(NoFreeBlockError);
        }
        for _ in 0..needed {
            let id = self.take_free();
            sequence.blocks.push(id);
        }
        Ok(())
    }

    /// Releases all blocks, the last one first, so that the tail of a prefix is evicted before its
    /// head. A partially filled block cannot be reused, so it is evicted before all others.
    pub(crate) fn release(&mut self, sequence: &mut TokenSequence) {
        sequence.computed = 0;
        sequence.stored = 0;
        for id in std::mem::take(&mut sequence.blocks).into_iter().rev() {
            let block = &mut self.blocks[id];
            block.refs -= 1;
            match (block.refs, block.hash) {
                (0, Some(_)) => {
                    self.back += 1;
                    self.put_free(id, self.back);
                }
                (0, None) => {
                    self.front -= 1;
                    self.put_free(id, self.front);
                }
                _ => {}
            }
        }
    }

    fn put_free(&mut self, id: BlockId, position: i64) {
        self.blocks[id].free_position = position;
        self.free.insert(position, id);
    }

    /// Clears the cache. As in vLLM, this fails while a request holds any block.
    pub(crate) fn reset(&mut self) -> bool {
        if self.free.len() != self.blocks.len() {
            return false;
        }
        self.cached.clear();
        for block in &mut self.blocks {
            block.hash = None;
        }
        self.events.push(CacheEvent::Cleared);
        true
    }

    pub(crate) fn take_events(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }

    pub(crate) fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the number of blocks held by requests.
    pub(crate) fn used_blocks(&self) -> usize {
        self.blocks.len() - self.free.len()
    }

    /// Returns the number of blocks, held or free, that a prefix can hit.
    pub(crate) fn cached_blocks(&self) -> usize {
        self.cached.values().map(Vec::len).sum()
    }

    /// Returns every cached block with its number of physical copies, in hash order.
    pub(crate) fn content(&self) -> BTreeMap<EngineHash, usize> {
        self.cached
            .iter()
            .map(|(&hash, copies)| (hash, copies.len()))
            .collect()
    }

    fn take_free(&mut self) -> BlockId {
        let (_, id) = self
            .free
            .pop_first()
            .expect("the caller counted the free blocks");
        if let Some(hash) = self.blocks[id].hash.take() {
            self.evict(hash, id);
        }
        self.blocks[id].refs = 1;
        id
    }

    fn evict(&mut self, hash: EngineHash, id: BlockId) {
        if let Some(copies) = self.cached.get_mut(&hash) {
            copies.retain(|&copy| copy != id);
            if copies.is_empty() {
                self.cached.remove(&hash);
            }
        }
        self.events.push(CacheEvent::Removed(hash));
    }

    /// Caches the blocks among the first `computed` tokens that are complete and not cached yet.
    fn store(&mut self, sequence: &mut TokenSequence, computed: usize) {
        if !self.prefix_caching {
            return;
        }
        let layout = self.layout();
        sequence.extend_hashes(layout);
        let complete = (computed / layout.size).min(layout.complete_blocks(sequence.len()));
        let full = sequence.stored..complete.max(sequence.stored);
        sequence.stored = full.end;
        // A completely received block is already cached when its last token is computed again.
        let known = full
            .clone()
            .take_while(|&at| self.blocks[sequence.blocks[at]].hash.is_some())
            .count();
        let full = full.start + known..full.end;
        if full.is_empty() {
            return;
        }
        for position in full.clone() {
            let id = sequence.blocks[position];
            let hash = sequence.hashes[position];
            self.blocks[id].hash = Some(hash);
            self.cached.entry(hash).or_default().push(id);
        }
        let tokens = full.start * self.block_size..full.end * self.block_size;
        self.events.push(CacheEvent::Stored(StoredBlocks {
            hashes: sequence.hashes[full.clone()].to_vec(),
            parent: full
                .start
                .checked_sub(1)
                .map(|position| sequence.hashes[position]),
            tokens: sequence.tokens[tokens].to_vec(),
            lookahead: full
                .clone()
                .filter(|_| layout.lookahead > 0)
                .map(|position| (position + 1) * layout.size)
                .map(|next| sequence.tokens[next..next + layout.lookahead].to_vec())
                .collect(),
            extra_keys: full
                .map(|position| sequence.keys.of_block(position))
                .collect(),
            lora: sequence.keys.lora.clone(),
            session: sequence.keys.session.clone(),
        }));
    }
}

#[cfg(test)]
mod tests;
