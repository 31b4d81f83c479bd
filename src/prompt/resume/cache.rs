//! What is kept of prompts, within a limit in bytes. One table for all tokenizers of the process; names are secret hashes,
//! so that those of different tokenizers never meet. What was not used for longest goes first, and as a prompt is noted from
//! its end to its beginning, the pieces of a prompt go from its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::block::{LocalHash, SequenceHash};
use crate::metrics::{Metrics, OutcomeLabel};

/// Pieces that are looked at or thrown out while the table is locked.
const AT_ONCE: usize = 64;

/// Most that a piece takes beside its contents: its share of the tables when they have just grown, and of the allocator.
const OVERHEAD: usize = 256;

/// A single prompt may take this part of the limit, so that not one alone drives out all others.
const SHARE: usize = 4;

/// The entry that holds the ring together.
const RING: u32 = 0;

/// What is kept of one piece of a prompt.
#[derive(Clone, Debug)]
pub(super) enum Value {
    /// Its tokens.
    Tokens(Arc<[u32]>),
    /// The hashes of the blocks that become complete with it.
    Blocks(Arc<[(LocalHash, SequenceHash)]>),
}

impl Value {
    pub(super) fn tokens(&self) -> Option<Arc<[u32]>> {
        match self {
            Self::Tokens(tokens) => Some(tokens.clone()),
            Self::Blocks(_) => None,
        }
    }

    pub(super) fn blocks(&self) -> Option<Arc<[(LocalHash, SequenceHash)]>> {
        match self {
            Self::Blocks(blocks) => Some(blocks.clone()),
            Self::Tokens(_) => None,
        }
    }

    fn bytes(&self) -> usize {
        OVERHEAD
            + match self {
                Self::Tokens(tokens) => size_of_val::<[u32]>(tokens),
                Self::Blocks(blocks) => size_of_val::<[_]>(blocks),
            }
    }
}

/// What is kept of prompts.
pub struct PromptCache {
    limit: AtomicUsize,
    table: Mutex<Table>,
    metrics: Arc<Metrics>,
}

/// A map, and its entries in a ring in the order of their use, which begins and ends at the first one.
struct Table {
    places: HashMap<u128, u32>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    bytes: usize,
}

struct Entry {
    name: u128,
    /// `None` in what is free, and in the first one, which only holds the ring together.
    value: Option<Value>,
    newer: u32,
    older: u32,
}

impl PromptCache {
    /// An empty cache that may hold this many bytes; with none it is off.
    pub fn new(limit: usize, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            limit: AtomicUsize::new(limit),
            table: Mutex::default(),
            metrics,
        })
    }

    /// Another limit from now on.
    pub fn resize(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
        while self.bytes() > self.limit() {
            self.evicting(0, |_| ());
        }
        if limit == 0 {
            let tables = std::mem::take(&mut *self.table.lock());
            drop(tables);
        }
        self.report();
    }

    /// The most it may hold.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// What it holds.
    pub fn bytes(&self) -> usize {
        self.table.lock().bytes
    }

    /// The leading names whose pieces are known, without a gap.
    pub(super) fn walk<T>(&self, names: &[u128], piece: impl Fn(&Value) -> Option<T>) -> Vec<T> {
        let mut found = Vec::with_capacity(names.len().min(AT_ONCE));
        for some in names.chunks(AT_ONCE) {
            let before = found.len();
            let table = self.table.lock();
            found.extend(
                some.iter()
                    .map_while(|name| table.get(*name).and_then(&piece)),
            );
            if found.len() - before < some.len() {
                break;
            }
        }
        found
    }

    /// Notes that the names in `known` were used, and keeps the pieces that follow them.
    pub(super) fn keep(&self, known: &[u128], mut made: Vec<(u128, Value)>) {
        let mut room = self.limit() / SHARE;
        let fits = made.iter().position(|(_, value)| {
            let bytes = value.bytes();
            let fits = bytes <= room;
            room = room.saturating_sub(bytes);
            !fits
        });
        made.truncate(fits.unwrap_or(made.len()));
        let changed = !made.is_empty();
        for (name, value) in made.into_iter().rev() {
            self.put(name, value);
        }
        for some in known.rchunks(AT_ONCE) {
            let mut table = self.table.lock();
            some.iter().rev().for_each(|name| table.touch(*name));
        }
        if changed {
            self.report();
        }
    }

    fn put(&self, name: u128, value: Value) {
        let bytes = value.bytes();
        let mut value = Some(value);
        while value.is_some() && bytes <= self.limit() {
            self.evicting(bytes, |table| {
                if let Some(value) = value.take() {
                    table.insert(name, value);
                }
            });
        }
    }

    /// Throws out a few pieces if there is no room for so many bytes; else does what is to be done with the room.
    fn evicting(&self, bytes: usize, then: impl FnOnce(&mut Table)) {
        // Freed without the lock.
        let mut gone = Vec::new();
        let mut table = self.table.lock();
        while table.bytes + bytes > self.limit() && gone.len() < AT_ONCE {
            let Some(value) = table.pop() else { break };
            gone.push(value);
        }
        if table.bytes + bytes <= self.limit() {
            then(&mut table);
        }
        drop(table);
        self.metrics
            .prompt_cache_evictions
            .inc_by(gone.len() as u64);
    }

    /// Counts a prompt of which this many tokens were known.
    pub(super) fn count(&self, resumed: usize, all: usize) {
        let outcome = if resumed > 0 { "hit" } else { "miss" };
        self.count_outcome(outcome);
        self.metrics
            .prompt_cache_resumed_tokens
            .inc_by(resumed as u64);
        self.metrics
            .prompt_cache_looked_up_tokens
            .inc_by(all as u64);
    }

    /// Counts a prompt by what became of it.
    pub(super) fn count_outcome(&self, outcome: &'static str) {
        self.metrics
            .prompt_cache_lookups
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }

    fn report(&self) {
        self.metrics
            .prompt_cache_bytes
            .set(i64::try_from(self.bytes()).unwrap_or(i64::MAX));
    }
}

impl Default for Table {
    fn default() -> Self {
        let ring = Entry {
            name: 0,
            value: None,
            newer: RING,
            older: RING,
        };
        Self {
            places: HashMap::new(),
            entries: vec![ring],
            free: Vec::new(),
            bytes: 0,
        }
    }
}

impl Table {
    fn get(&self, name: u128) -> Option<&Value> {
        let place = *self.places.get(&name)?;
        self.entries[place as usize].value.as_ref()
    }

    fn touch(&mut self, name: u128) {
        if let Some(&place) = self.places.get(&name) {
            self.unlink(place);
            self.link(place);
        }
    }

    /// Keeps a piece; of two under one name, the first, which is the same.
    fn insert(&mut self, name: u128, value: Value) {
        if self.places.contains_key(&name) {
            return self.touch(name);
        }
        let bytes = value.bytes();
        let entry = Entry {
            name,
            value: Some(value),
            newer: RING,
            older: RING,
        };
        let place = match self.free.pop() {
            Some(place) => {
                self.entries[place as usize] = entry;
                place
            }
            None => {
                // Only a limit of a terabyte has room for so many.
                let Ok(place) = u32::try_from(self.entries.len()) else {
                    return;
                };
                self.entries.push(entry);
                place
            }
        };
        self.bytes += bytes;
        self.places.insert(name, place);
        self.link(place);
    }

    /// Takes out what was not used for longest.
    fn pop(&mut self) -> Option<Value> {
        let oldest = self.entries[RING as usize].newer;
        let value = self.entries[oldest as usize].value.take()?;
        self.unlink(oldest);
        self.places.remove(&self.entries[oldest as usize].name);
        self.free.push(oldest);
        self.bytes -= value.bytes();
        Some(value)
    }

    fn unlink(&mut self, place: u32) {
        let Entry { newer, older, .. } = self.entries[place as usize];
        self.entries[newer as usize].older = older;
        self.entries[older as usize].newer = newer;
    }

    /// Makes an entry the newest.
    fn link(&mut self, place: u32) {
        let newest = self.entries[RING as usize].older;
        self.entries[newest as usize].newer = place;
        self.entries[place as usize].older = newest;
        self.entries[place as usize].newer = RING;
        self.entries[RING as usize].older = place;
    }
}

#[cfg(test)]
mod tests;
