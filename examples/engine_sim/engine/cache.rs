//! The paged KV cache of one data-parallel rank, as vLLM keeps it: physical blocks with reference counts, found again by
//! a chained hash of the tokens they hold, evicted least recently used first. It is a plain value without clock or I/O,
//! because everything the benchmarks claim (which prompt hit, which event left) is decided here and must be provable by
//! a property test.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

/// Number of a physical block.
type BlockId = usize;

/// The engine's own name of a block; routers must treat it as opaque.
pub(crate) type EngineHash = u64;

/// What separates equal tokens: the adapter names every block, the cache salt only the first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Keys {
    pub(crate) lora: Option<Lora>,
    pub(crate) salt: Option<Arc<str>>,
    pub(crate) session: Option<Arc<str>>,
}

/// A LoRA adapter: the number the engine gave it and its served name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lora {
    pub(crate) id: u32,
    pub(crate) name: Arc<str>,
}

impl Keys {
    /// The extra keys of the block at `position`, in the order vLLM publishes them.
    fn of_block(&self, position: usize) -> Option<Vec<Arc<str>>> {
        let lora = self.lora.iter().map(|lora| &lora.name);
        let salt = self.salt.iter().filter(|_| position == 0);
        let keys: Vec<_> = lora.chain(salt).cloned().collect();
        (!keys.is_empty()).then_some(keys)
    }
}

/// A run of blocks stored by one chunk of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stored {
    pub(crate) hashes: Vec<EngineHash>,
    pub(crate) parent: Option<EngineHash>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) extra_keys: Vec<Option<Vec<Arc<str>>>>,
    pub(crate) lora: Option<Lora>,
    pub(crate) session: Option<Arc<str>>,
}

/// A change of the cache's content, in the order in which it happened.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum CacheEvent {
    Stored(Stored),
    Removed(EngineHash),
    Cleared,
}

/// No free block is left, cached or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoRoom;

/// A token sequence and the physical blocks it holds.
#[derive(Debug)]
pub(crate) struct Sequence {
    tokens: Vec<u32>,
    keys: Keys,
    hashes: Vec<EngineHash>,
    blocks: Vec<BlockId>,
    computed: usize,
}

impl Sequence {
    pub(crate) fn new(tokens: Vec<u32>, keys: Keys) -> Self {
        Self {
            tokens,
            keys,
            hashes: Vec::new(),
            blocks: Vec::new(),
            computed: 0,
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

    pub(crate) fn keys(&self) -> &Keys {
        &self.keys
    }

    /// The blocks it holds, numbered as vLLM numbers them: its block 0 is never used.
    pub(crate) fn block_numbers(&self) -> Vec<usize> {
        self.blocks.iter().map(|id| id + 1).collect()
    }

    /// Tokens whose keys and values are in the cache, or will be when the current step ends.
    pub(crate) fn computed(&self) -> usize {
        self.computed
    }

    fn extend_hashes(&mut self, block_size: usize) {
        for position in self.hashes.len()..self.tokens.len() / block_size {
            let tokens = &self.tokens[position * block_size..(position + 1) * block_size];
            let parent = self.hashes.last().copied();
            self.hashes.push(block_hash(
                parent,
                tokens,
                self.keys.of_block(position).as_deref(),
            ));
        }
    }
}

/// Chained: a block is named by its tokens, its extra keys and everything before it.
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

/// What keys and values lie in a block: those of these tokens, after everything that came before them. They stay when the
/// block is free, until somebody else's are written there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Written {
    after: Option<EngineHash>,
    extra_keys: Option<Vec<Arc<str>>>,
    tokens: Vec<u32>,
}

impl Written {
    /// What lies in the blocks of a prompt when all of it is computed.
    pub(crate) fn of_prompt(tokens: &[u32], keys: &Keys, block_size: usize) -> Vec<Self> {
        let mut sequence = Sequence::new(tokens.to_vec(), keys.clone());
        sequence.extend_hashes(block_size);
        let mut blocks = vec![Self::default(); tokens.len().div_ceil(block_size)];
        for (at, block) in blocks.iter_mut().enumerate() {
            block.become_part(&sequence, at, block_size, tokens.len());
        }
        blocks
    }

    /// Whether who needs `other` is served with this: more tokens at the end do no harm.
    pub(crate) fn serves(&self, other: &Self) -> bool {
        self.after == other.after
            && self.extra_keys == other.extra_keys
            && self.tokens.starts_with(&other.tokens)
    }

    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    fn become_part(&mut self, sequence: &Sequence, at: usize, block_size: usize, computed: usize) {
        self.after = at.checked_sub(1).map(|before| sequence.hashes[before]);
        self.extra_keys = sequence.keys.of_block(at);
        self.tokens.clear();
        self.tokens.extend_from_slice(
            &sequence.tokens[at * block_size..computed.min((at + 1) * block_size)],
        );
    }
}

/// Blocks of a sequence found in the cache, not yet taken.
#[derive(Debug, Default)]
pub(crate) struct Hit(Vec<BlockId>);

#[derive(Debug, Default)]
struct Block {
    hash: Option<EngineHash>,
    refs: u32,
    /// Place in the free list; meaningful only while `refs` is 0.
    place: i64,
    written: Written,
}

/// The cache: see the module.
#[derive(Debug)]
pub(crate) struct Cache {
    block_size: usize,
    blocks: Vec<Block>,
    /// Free blocks by place: the first is the next to be reused.
    free: BTreeMap<i64, BlockId>,
    /// Physical copies of every cached block, oldest first.
    cached: HashMap<EngineHash, Vec<BlockId>>,
    events: Vec<CacheEvent>,
    /// Whether computed blocks are kept for others.
    keeps: bool,
    /// Places taken at either end of the free list so far.
    front: i64,
    back: i64,
}

impl Cache {
    pub(crate) fn new(block_size: usize, num_blocks: usize) -> Self {
        let mut cache = Self {
            block_size,
            blocks: (0..num_blocks).map(|_| Block::default()).collect(),
            free: BTreeMap::new(),
            cached: HashMap::new(),
            events: Vec::new(),
            keeps: true,
            front: 0,
            back: 0,
        };
        for id in 0..num_blocks {
            cache.back += 1;
            cache.put_free(id, cache.back);
        }
        cache
    }

    /// The same without prefix caching.
    pub(crate) fn forgetting(self) -> Self {
        Self {
            keeps: false,
            ..self
        }
    }

    pub(crate) fn keeps(&self) -> bool {
        self.keeps
    }

    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    /// The longest cached prefix of `sequence` that leaves at least one token to compute, for the last token's logits
    /// are needed even when all its keys are known.
    pub(crate) fn lookup(&self, sequence: &mut Sequence) -> Hit {
        sequence.extend_hashes(self.block_size);
        let most = sequence.len().saturating_sub(1) / self.block_size;
        Hit(sequence.hashes[..most]
            .iter()
            .map_while(|hash| self.cached.get(hash))
            .map(|copies| copies[0])
            .collect())
    }

    /// Tokens covered by `hit`.
    pub(crate) fn hit_tokens(&self, hit: &Hit) -> usize {
        hit.0.len() * self.block_size
    }

    /// Takes the blocks of `hit` for a sequence that holds none, and room for `new_tokens` after it.
    pub(crate) fn admit(
        &mut self,
        sequence: &mut Sequence,
        hit: &Hit,
        new_tokens: usize,
    ) -> Result<(), NoRoom> {
        self.reserve(sequence, hit, new_tokens)?;
        self.grow(sequence, new_tokens)
    }

    /// The same without computing anything: `new_tokens` come from elsewhere, see [`Cache::receive`].
    pub(crate) fn reserve(
        &mut self,
        sequence: &mut Sequence,
        hit: &Hit,
        new_tokens: usize,
    ) -> Result<(), NoRoom> {
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
            return Err(NoRoom);
        }
        for &id in &hit.0 {
            let block = &mut self.blocks[id];
            if block.refs == 0 {
                self.free.remove(&block.place);
            }
            block.refs += 1;
        }
        sequence.blocks.extend_from_slice(&hit.0);
        sequence.computed = self.hit_tokens(hit);
        self.allocate(sequence, sequence.computed + new_tokens)
    }

    /// Notes that everything a sequence has room for arrived from another engine. As vLLM does it the last token is
    /// computed once more, because its logits are needed.
    pub(crate) fn receive(&mut self, sequence: &mut Sequence) {
        let full = sequence.computed / self.block_size..sequence.len() / self.block_size;
        self.write(sequence, sequence.computed..sequence.len());
        if !full.is_empty() {
            self.store(sequence, full);
        }
        sequence.computed = sequence.len() - 1;
    }

    /// Makes room for the next `new_tokens` of `sequence` and caches the blocks they fill. As in vLLM a block counts as
    /// cached from the moment its step is planned, so a twin request in the same step already hits it.
    pub(crate) fn grow(
        &mut self,
        sequence: &mut Sequence,
        new_tokens: usize,
    ) -> Result<(), NoRoom> {
        let computed = sequence.computed + new_tokens;
        debug_assert!(computed <= sequence.len(), "only known tokens are computed");
        self.allocate(sequence, computed)?;
        let full = sequence.computed / self.block_size..computed / self.block_size;
        self.write(sequence, sequence.computed..computed);
        sequence.computed = computed;
        if !full.is_empty() {
            self.store(sequence, full);
        }
        Ok(())
    }

    fn write(&mut self, sequence: &mut Sequence, tokens: std::ops::Range<usize>) {
        sequence.extend_hashes(self.block_size);
        for at in tokens.start / self.block_size..tokens.end.div_ceil(self.block_size) {
            let written = &mut self.blocks[sequence.blocks[at]].written;
            written.become_part(sequence, at, self.block_size, tokens.end);
        }
    }

    /// What lies in blocks now, whoever's it is; nothing where a number is no block's. Numbers are vLLM's, see
    /// [`Sequence::block_numbers`].
    pub(crate) fn read(&self, numbers: &[usize]) -> Vec<Option<Written>> {
        let block = |number: &usize| {
            self.blocks
                .get(number.checked_sub(1)?)
                .map(|block| block.written.clone())
        };
        numbers.iter().map(block).collect()
    }

    fn allocate(&mut self, sequence: &mut Sequence, tokens: usize) -> Result<(), NoRoom> {
        let needed = tokens
            .div_ceil(self.block_size)
            .saturating_sub(sequence.blocks.len());
        if needed > self.free.len() {
            return Err(NoRoom);
        }
        for _ in 0..needed {
            let id = self.take_free();
            sequence.blocks.push(id);
        }
        Ok(())
    }

    /// Gives all blocks back, the tail first, so that the tail of a prefix is evicted before its head. A block that was
    /// never filled is of use to nobody and goes before all others.
    pub(crate) fn release(&mut self, sequence: &mut Sequence) {
        sequence.computed = 0;
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

    fn put_free(&mut self, id: BlockId, place: i64) {
        self.blocks[id].place = place;
        self.free.insert(place, id);
    }

    /// Forgets every cached block; refused while a request holds any, as vLLM does.
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

    /// Blocks held by requests.
    pub(crate) fn used_blocks(&self) -> usize {
        self.blocks.len() - self.free.len()
    }

    /// Blocks, held or free, that a prefix can hit.
    pub(crate) fn cached_blocks(&self) -> usize {
        self.cached.values().map(Vec::len).sum()
    }

    /// Every cached block with its number of physical copies, in hash order.
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
            self.forget(hash, id);
        }
        self.blocks[id].refs = 1;
        id
    }

    fn forget(&mut self, hash: EngineHash, id: BlockId) {
        if let Some(copies) = self.cached.get_mut(&hash) {
            copies.retain(|&copy| copy != id);
            if copies.is_empty() {
                self.cached.remove(&hash);
            }
        }
        self.events.push(CacheEvent::Removed(hash));
    }

    fn store(&mut self, sequence: &mut Sequence, full: std::ops::Range<usize>) {
        if !self.keeps {
            return;
        }
        sequence.extend_hashes(self.block_size);
        // A block that was received whole is known before its last token is computed once more.
        let known = full
            .clone()
            .take_while(|&at| self.blocks[sequence.blocks[at]].hash.is_some())
            .count();
        let full = full.start + known..full.end;
        if full.is_empty() {
            return;
        }
        for position in full.clone() {
            let (id, hash) = (sequence.blocks[position], sequence.hashes[position]);
            self.blocks[id].hash = Some(hash);
            self.cached.entry(hash).or_default().push(id);
        }
        let tokens = full.start * self.block_size..full.end * self.block_size;
        self.events.push(CacheEvent::Stored(Stored {
            hashes: sequence.hashes[full.clone()].to_vec(),
            parent: full
                .start
                .checked_sub(1)
                .map(|position| sequence.hashes[position]),
            tokens: sequence.tokens[tokens].to_vec(),
            extra_keys: full
                .map(|position| sequence.keys.of_block(position))
                .collect(),
            lora: sequence.keys.lora.clone(),
            session: sequence.keys.session.clone(),
        }));
    }
}

#[cfg(test)]
#[path = "cache/tests.rs"]
mod tests;
