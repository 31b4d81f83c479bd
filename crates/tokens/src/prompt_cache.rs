//! LRU cache of prompt pieces, parsed messages and rendered prefixes, with a limit in bytes. All
//! tokenizers of the process share one table; keys are secret hashes, so entries of different
//! owners never collide. The pieces of a prompt are touched from the last to the first, so the last
//! ones are evicted first.

mod hash_key;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hashbrown::HashMap;
use parking_lot::Mutex;

use warmroute_core::block::{LocalHash, SequenceHash};
use warmroute_metrics::{Metrics, OutcomeLabel};

use crate::openai::ChunkMessages;
use crate::prompt::RenderedPrefix;
pub(crate) use hash_key::HashKey;

/// Number of pieces that are read or evicted under one lock.
const LOCK_BATCH: usize = 64;

/// Maximum overhead per piece in bytes: its share of tables that have just grown, and of the
/// allocator.
const ENTRY_OVERHEAD_BYTES: usize = 256;

/// A single prompt may use at most the limit divided by this number, so that it cannot evict all
/// others.
const MAX_PROMPT_SHARE: usize = 4;

/// Index of the list head.
const RING_HEAD: u32 = 0;

/// Value of one cache entry.
#[derive(Clone, Debug)]
pub(crate) enum CachedPiece {
    /// Tokens of the piece.
    Tokens(Arc<[u32]>),
    /// Hashes of the blocks that the piece completes.
    Blocks(Arc<[(LocalHash, SequenceHash)]>),
    /// Messages that end in a chunk of a request body.
    Messages(Arc<ChunkMessages>),
    /// Beginning of a rendered conversation.
    Rendered(Arc<RenderedPrefix>),
}

impl CachedPiece {
    pub(crate) fn tokens(&self) -> Option<Arc<[u32]>> {
        match self {
            Self::Tokens(tokens) => Some(tokens.clone()),
            _ => None,
        }
    }

    pub(crate) fn blocks(&self) -> Option<Arc<[(LocalHash, SequenceHash)]>> {
        match self {
            Self::Blocks(blocks) => Some(blocks.clone()),
            _ => None,
        }
    }

    pub(crate) fn chunk_messages(&self) -> Option<Arc<ChunkMessages>> {
        match self {
            Self::Messages(chunk) => Some(chunk.clone()),
            _ => None,
        }
    }

    pub(crate) fn rendered_prefix(&self) -> Option<Arc<RenderedPrefix>> {
        match self {
            Self::Rendered(prefix) => Some(prefix.clone()),
            _ => None,
        }
    }

    fn bytes(&self) -> usize {
        ENTRY_OVERHEAD_BYTES
            + match self {
                Self::Tokens(tokens) => size_of_val::<[u32]>(tokens),
                Self::Blocks(blocks) => size_of_val::<[_]>(blocks),
                Self::Messages(chunk) => chunk.memory_bytes(),
                Self::Rendered(prefix) => prefix.memory_bytes(),
            }
    }
}

/// Cache of the messages, tokens and block hashes of prompts.
pub struct PromptCache {
    limit: AtomicUsize,
    table: Mutex<PromptCacheTable>,
    metrics: Arc<Metrics>,
}

/// A map and its entries in a circular list, ordered by last use.
struct PromptCacheTable {
    positions: HashMap<u128, u32>,
    entries: Vec<PromptCacheEntry>,
    free: Vec<u32>,
    bytes: usize,
}

struct PromptCacheEntry {
    key: u128,
    /// `None` in free entries and in the list head.
    value: Option<CachedPiece>,
    newer: u32,
    older: u32,
}

impl PromptCache {
    /// Creates a cache with a limit in bytes; 0 disables it.
    pub fn new(limit: usize, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            limit: AtomicUsize::new(limit),
            table: Mutex::default(),
            metrics,
        })
    }

    /// Changes the limit and evicts pieces that exceed it.
    pub fn resize(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
        while self.bytes() > self.limit() {
            self.evict_for(0, |_| ());
        }
        if limit == 0 {
            let tables = std::mem::take(&mut *self.table.lock());
            drop(tables);
        }
        self.report();
    }

    /// Returns the limit in bytes.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Returns the used bytes.
    pub fn bytes(&self) -> usize {
        self.table.lock().bytes
    }

    /// Returns the cached piece of a key.
    pub(crate) fn find<T>(
        &self,
        key: u128,
        piece: impl Fn(&CachedPiece) -> Option<T>,
    ) -> Option<T> {
        self.table.lock().get(key).and_then(piece)
    }

    /// Returns the cached pieces of the leading keys, up to the first key without one.
    pub(crate) fn find_leading<T>(
        &self,
        keys: &[u128],
        piece: impl Fn(&CachedPiece) -> Option<T>,
    ) -> Vec<T> {
        let mut found = Vec::with_capacity(keys.len().min(LOCK_BATCH));
        for batch in keys.chunks(LOCK_BATCH) {
            let before = found.len();
            let table = self.table.lock();
            found.extend(
                batch
                    .iter()
                    .map_while(|key| table.get(*key).and_then(&piece)),
            );
            if found.len() - before < batch.len() {
                break;
            }
        }
        found
    }

    /// Marks the keys in `known` as used and stores the pieces that follow them.
    pub(crate) fn store(&self, known: &[u128], mut new_pieces: Vec<(u128, CachedPiece)>) {
        let mut room = self.limit() / MAX_PROMPT_SHARE;
        let fits = new_pieces.iter().position(|(_, value)| {
            let bytes = value.bytes();
            let fits = bytes <= room;
            room = room.saturating_sub(bytes);
            !fits
        });
        new_pieces.truncate(fits.unwrap_or(new_pieces.len()));
        let changed = !new_pieces.is_empty();
        for (key, value) in new_pieces.into_iter().rev() {
            self.insert_piece(key, value);
        }
        for batch in known.rchunks(LOCK_BATCH) {
            let mut table = self.table.lock();
            batch.iter().rev().for_each(|key| table.touch(*key));
        }
        if changed {
            self.report();
        }
    }

    fn insert_piece(&self, key: u128, value: CachedPiece) {
        let bytes = value.bytes();
        let mut value = Some(value);
        while value.is_some() && bytes <= self.limit() {
            self.evict_for(bytes, |table| {
                if let Some(value) = value.take() {
                    table.insert(key, value);
                }
            });
        }
    }

    /// Evicts a batch of pieces. If there is then room for `bytes`, calls `then`.
    fn evict_for(&self, bytes: usize, then: impl FnOnce(&mut PromptCacheTable)) {
        // The pieces are freed after the lock is released.
        let mut evicted = Vec::new();
        let mut table = self.table.lock();
        while table.bytes + bytes > self.limit() && evicted.len() < LOCK_BATCH {
            let Some(value) = table.remove_oldest() else {
                break;
            };
            evicted.push(value);
        }
        if table.bytes + bytes <= self.limit() {
            then(&mut table);
        }
        drop(table);
        self.metrics
            .tokens
            .prompt_cache_evictions
            .inc_by(evicted.len() as u64);
    }

    /// Counts a prompt with this many cached tokens.
    pub(crate) fn record_lookup(&self, resumed: usize, all: usize) {
        let outcome = if resumed > 0 { "hit" } else { "miss" };
        self.record_outcome(outcome);
        self.metrics
            .tokens
            .prompt_cache_hit_tokens
            .inc_by(resumed as u64);
        self.metrics
            .tokens
            .prompt_cache_lookup_tokens
            .inc_by(all as u64);
    }

    /// Counts a prompt by outcome.
    pub(crate) fn record_outcome(&self, outcome: &'static str) {
        self.metrics
            .tokens
            .prompt_cache_lookups
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }

    fn report(&self) {
        self.metrics
            .tokens
            .prompt_cache_bytes
            .set(i64::try_from(self.bytes()).unwrap_or(i64::MAX));
    }
}

impl Default for PromptCacheTable {
    fn default() -> Self {
        let ring = PromptCacheEntry {
            key: 0,
            value: None,
            newer: RING_HEAD,
            older: RING_HEAD,
        };
        Self {
            positions: HashMap::new(),
            entries: vec![ring],
            free: Vec::new(),
            bytes: 0,
        }
    }
}

impl PromptCacheTable {
    fn get(&self, key: u128) -> Option<&CachedPiece> {
        let index = *self.positions.get(&key)?;
        self.entries[index as usize].value.as_ref()
    }

    fn touch(&mut self, key: u128) {
        if let Some(&index) = self.positions.get(&key) {
            self.unlink(index);
            self.link(index);
        }
    }

    /// Stores a piece. If the key is present, its piece is equal and stays.
    fn insert(&mut self, key: u128, value: CachedPiece) {
        if self.positions.contains_key(&key) {
            return self.touch(key);
        }
        let bytes = value.bytes();
        let entry = PromptCacheEntry {
            key,
            value: Some(value),
            newer: RING_HEAD,
            older: RING_HEAD,
        };
        let index = match self.free.pop() {
            Some(index) => {
                self.entries[index as usize] = entry;
                index
            }
            None => {
                // So many entries fit only into a limit of about a terabyte.
                let Ok(index) = u32::try_from(self.entries.len()) else {
                    return;
                };
                self.entries.push(entry);
                index
            }
        };
        self.bytes += bytes;
        self.positions.insert(key, index);
        self.link(index);
    }

    /// Removes the least recently used piece.
    fn remove_oldest(&mut self) -> Option<CachedPiece> {
        let oldest = self.entries[RING_HEAD as usize].newer;
        let value = self.entries[oldest as usize].value.take()?;
        self.unlink(oldest);
        self.positions.remove(&self.entries[oldest as usize].key);
        self.free.push(oldest);
        self.bytes -= value.bytes();
        Some(value)
    }

    fn unlink(&mut self, index: u32) {
        let PromptCacheEntry { newer, older, .. } = self.entries[index as usize];
        self.entries[newer as usize].older = older;
        self.entries[older as usize].newer = newer;
    }

    /// Links an entry as the most recently used.
    fn link(&mut self, index: u32) {
        let newest = self.entries[RING_HEAD as usize].older;
        self.entries[newest as usize].newer = index;
        self.entries[index as usize].older = newest;
        self.entries[index as usize].newer = RING_HEAD;
        self.entries[RING_HEAD as usize].older = index;
    }
}

#[cfg(test)]
mod tests;
