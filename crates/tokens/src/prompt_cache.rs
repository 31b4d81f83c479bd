//! LRU cache of the pieces of prompts, with a limit in bytes. All tokenizers of the process share
//! one table; keys are hashes with a secret key, so entries of different owners never collide. The pieces of a
//! prompt are touched from the last to the first, so the last ones are evicted first.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hashbrown::HashMap;
use highway::{HighwayHash as _, HighwayHasher, Key};
use parking_lot::Mutex;

use warmroute_metrics::{Metrics, count_outcome};

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

/// Value of one cache entry, of any type.
pub(crate) type SharedCachedValue = Arc<dyn CachedValue>;

/// Value with a known use of memory.
pub(crate) trait CachedValue: Any + Send + Sync {
    /// Returns the used memory in bytes.
    fn memory_bytes(&self) -> usize;
}

impl<T: Copy + Send + Sync + 'static> CachedValue for Vec<T> {
    fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.capacity() * size_of::<T>()
    }
}

fn entry_bytes(value: &dyn CachedValue) -> usize {
    ENTRY_OVERHEAD_BYTES + value.memory_bytes()
}

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

/// Cache of the pieces of prompts.
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
    value: Option<SharedCachedValue>,
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

    /// Returns the cached value of a key.
    pub(crate) fn find<T: CachedValue>(&self, key: u128) -> Option<Arc<T>> {
        self.table.lock().get(key)
    }

    /// Returns the cached values of the leading keys, up to the first key without one.
    pub(crate) fn find_leading<T: CachedValue>(&self, keys: &[u128]) -> Vec<Arc<T>> {
        let mut found = Vec::with_capacity(keys.len().min(LOCK_BATCH));
        for batch in keys.chunks(LOCK_BATCH) {
            let before = found.len();
            let table = self.table.lock();
            found.extend(batch.iter().map_while(|key| table.get(*key)));
            if found.len() - before < batch.len() {
                break;
            }
        }
        found
    }

    /// Marks the keys in `known` as used and stores the pieces that follow them.
    pub(crate) fn store(&self, known: &[u128], mut new_pieces: Vec<(u128, SharedCachedValue)>) {
        let mut room = self.limit() / MAX_PROMPT_SHARE;
        let mut fitting = 0;
        for (_, value) in &new_pieces {
            let Some(rest) = room.checked_sub(entry_bytes(&**value)) else {
                break;
            };
            room = rest;
            fitting += 1;
        }
        new_pieces.truncate(fitting);
        let changed = !new_pieces.is_empty();
        for (key, value) in new_pieces.iter().rev() {
            self.insert_piece(*key, value);
        }
        for batch in known.rchunks(LOCK_BATCH) {
            let mut table = self.table.lock();
            for key in batch.iter().rev() {
                table.touch(*key);
            }
        }
        if changed {
            self.report();
        }
    }

    fn insert_piece(&self, key: u128, value: &SharedCachedValue) {
        let bytes = entry_bytes(&**value);
        let insert = |table: &mut PromptCacheTable| table.insert(key, value.clone());
        while bytes <= self.limit() && !self.evict_for(bytes, insert) {}
    }

    /// Evicts a batch of pieces. If there is then room for `bytes`, calls `then` and returns true.
    fn evict_for(&self, bytes: usize, then: impl FnOnce(&mut PromptCacheTable)) -> bool {
        // The pieces are freed after the lock is released.
        let mut evicted = Vec::new();
        let mut table = self.table.lock();
        while table.bytes + bytes > self.limit() && evicted.len() < LOCK_BATCH {
            let Some(value) = table.remove_oldest() else {
                break;
            };
            evicted.push(value);
        }
        let has_room = table.bytes + bytes <= self.limit();
        if has_room {
            then(&mut table);
        }
        drop(table);
        self.metrics
            .tokens
            .prompt_cache_evictions
            .inc_by(evicted.len() as u64);
        has_room
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
        count_outcome(&self.metrics.tokens.prompt_cache_lookups, outcome);
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
    fn get<T: CachedValue>(&self, key: u128) -> Option<Arc<T>> {
        let index = *self.positions.get(&key)?;
        let value: Arc<dyn Any + Send + Sync> = self.entries[index as usize].value.clone()?;
        value.downcast().ok()
    }

    fn touch(&mut self, key: u128) {
        if let Some(&index) = self.positions.get(&key) {
            self.unlink(index);
            self.link(index);
        }
    }

    /// Stores a piece. If the key is present, its piece is equal and stays.
    fn insert(&mut self, key: u128, value: SharedCachedValue) {
        if self.positions.contains_key(&key) {
            return self.touch(key);
        }
        let bytes = entry_bytes(&*value);
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
    fn remove_oldest(&mut self) -> Option<SharedCachedValue> {
        let oldest = self.entries[RING_HEAD as usize].newer;
        let value = self.entries[oldest as usize].value.take()?;
        self.unlink(oldest);
        self.positions.remove(&self.entries[oldest as usize].key);
        self.free.push(oldest);
        self.bytes -= entry_bytes(&*value);
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
