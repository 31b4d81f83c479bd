//! Hash map of a writer from engine hashes to locations.
//!
//! It takes most of the memory of an index, and its cache misses take most of a writer's time. The
//! entries are stored in the order of insertion, next to the hashes they were stored with, because
//! engines refer to them in the same order later.
//!
//! A hash table refers to the entries. Like Folly's F14, it consists of buckets with seven slots,
//! one tag byte per slot and an overflow count. Two buckets fill a cache line. An entry is in the
//! first bucket of its probe sequence that had a free slot. Lookups prefetch the buckets of the
//! following hashes.
//!
//! A slot holds an entry number and eleven more bits of the hash, so unrelated entries are rarely
//! read. Eight of these bits form the tag, and the tags of a bucket are compared at once. Growing
//! rebuilds the table and moves no entry.

mod bucket;
mod entries;

use bucket::{BucketLine, HashBucket, SLOTS_PER_BUCKET};
use entries::EntryList;
pub(super) use entries::MappedBlock;
use prefetch_index::prefetch_index;

use crate::block::EngineHash;
use crate::index::ids::{BlockLocation, PREFETCH_DISTANCE};
use crate::index::layers::LayerSet;
use crate::index::sizes::PARTITION_CAPACITY;

/// Maximum share of used slots. At seven eighths, insertions and removals leave so many displaced
/// entries that the lookup of a new hash probes dozens of lines.
const MAX_LOAD: (usize, usize) = (3, 4);
/// Entries per step of a rebuild. The buckets of a step are prefetched together.
const REBUILD_BATCH: usize = 32;

/// Position of an entry in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EntryRef {
    partition: u32,
    number: u32,
}

/// Number of a bucket and a slot in it. One word, so that the result of a lookup is returned in
/// registers. Returning it through memory took a fifth of the time of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SlotPosition(u32);

impl SlotPosition {
    fn new(bucket: usize, slot: usize) -> Self {
        Self((bucket * 8 + slot) as u32)
    }

    fn bucket(self) -> usize {
        self.0 as usize / 8
    }

    fn slot(self) -> usize {
        self.0 as usize % 8
    }
}

/// All engine hashes of one writer.
#[derive(Debug, Default)]
pub(super) struct EngineBlockMap {
    /// Partitions, selected by the lowest `bits` bits of the mixed hash.
    partitions: Vec<MapPartition>,
    bits: u32,
    len: usize,
}

/// Hashes with the same lowest bits after mixing.
#[derive(Debug, Default)]
struct MapPartition {
    table: Vec<BucketLine>,
    entries: EntryList,
}

impl EngineBlockMap {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, hash: EngineHash) -> Option<MappedBlock> {
        Some(self.find(hash)?.1)
    }

    pub(super) fn contains(&self, hash: EngineHash) -> bool {
        self.find(hash).is_some()
    }

    /// Returns the entry of a hash. The reference is valid until the map is resized.
    pub(super) fn find(&self, hash: EngineHash) -> Option<(EntryRef, MappedBlock)> {
        let mixed = mix(hash.0);
        let partition = self.partition_of(mixed);
        let number = self.partitions.get(partition)?.find(hash, mixed).ok()?;
        Some((
            EntryRef {
                partition: partition as u32,
                number,
            },
            self.partitions[partition]
                .entries
                .get(number)
                .mapped_block(),
        ))
    }

    /// Sets the layers of an entry. An empty set removes the entry.
    pub(super) fn set_layers(&mut self, at: EntryRef, layers: LayerSet) {
        let partition = &mut self.partitions[at.partition as usize];
        if layers.is_empty() {
            partition.remove(at.number);
            self.len -= 1;
        } else {
            partition.entries.get_mut(at.number).layers = layers;
        }
    }

    /// Inserts or replaces a hash.
    pub(super) fn insert(&mut self, hash: EngineHash, mapped: MappedBlock) {
        self.reserve(1);
        if let Some(at) = self.insert_new(hash, mix(hash.0), mapped.layers) {
            self.set_location(at, mapped.location);
        } else if let Some((at, _)) = self.find(hash) {
            self.set_location(at, mapped.location);
            self.set_layers(at, mapped.layers);
        }
    }

    /// Inserts hashes whose locations are set later, up to the first one that exists. Appends their
    /// entries to `into`. The caller must reserve capacity first.
    pub(super) fn insert_unlocated(
        &mut self,
        hashes: impl Iterator<Item = EngineHash> + Clone,
        layers: LayerSet,
        into: &mut Vec<EntryRef>,
    ) {
        let mut later = hashes.clone();
        later
            .by_ref()
            .take(PREFETCH_DISTANCE)
            .for_each(|hash| self.prefetch(hash));
        into.extend(hashes.map_while(|hash| {
            later
                .next()
                .into_iter()
                .for_each(|hash| self.prefetch(hash));
            self.insert_new(hash, mix(hash.0), layers)
        }));
    }

    /// Sets the location of an entry.
    pub(super) fn set_location(&mut self, at: EntryRef, location: BlockLocation) {
        let entry = self.partitions[at.partition as usize]
            .entries
            .get_mut(at.number);
        entry.shard = location.shard;
        entry.block = location.block.0;
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (EngineHash, MappedBlock)> {
        let entries = self
            .partitions
            .iter()
            .flat_map(|partition| partition.entries.iter());
        entries.map(|entry| (EngineHash(entry.engine), entry.mapped_block()))
    }

    /// Reserves capacity for more hashes.
    pub(super) fn reserve(&mut self, additional: usize) {
        let wanted = (self.len + additional)
            .div_ceil(PARTITION_CAPACITY)
            .next_power_of_two();
        if wanted > self.partitions.len() {
            self.repartition(wanted);
        }
        self.partitions
            .iter_mut()
            .for_each(|partition| partition.reserve(additional));
    }

    /// Returns memory if most hashes were removed.
    pub(super) fn shrink(&mut self) {
        if self
            .partitions
            .iter()
            .any(|partition| partition.entries.is_sparse())
        {
            self.repartition(
                self.len
                    .div_ceil(PARTITION_CAPACITY / 2)
                    .next_power_of_two(),
            );
        }
    }

    /// Prefetches the home bucket of a hash.
    pub(super) fn prefetch(&self, hash: EngineHash) {
        self.prefetch_mixed(mix(hash.0));
    }

    fn prefetch_mixed(&self, mixed: u64) {
        if let Some(partition) = self.partitions.get(self.partition_of(mixed)) {
            prefetch_index(
                &partition.table,
                home_bucket(mixed, partition.table.len()) / 2,
            );
        }
    }

    /// Inserts one hash. Returns `None` if it exists.
    fn insert_new(&mut self, hash: EngineHash, mixed: u64, layers: LayerSet) -> Option<EntryRef> {
        let partition = self.partition_of(mixed);
        let number = self
            .partitions
            .get_mut(partition)?
            .insert(hash, layers, mixed)?;
        self.len += 1;
        Some(EntryRef {
            partition: partition as u32,
            number,
        })
    }

    /// Rebuilds the map with another number of partitions.
    fn repartition(&mut self, count: usize) {
        let all = std::mem::take(&mut self.partitions);
        self.bits = count.ilog2();
        self.partitions.resize_with(count, MapPartition::default);
        for entry in all.iter().flat_map(|partition| partition.entries.iter()) {
            let mixed = mix(entry.engine);
            let partition = self.partition_of(mixed);
            let partition = &mut self.partitions[partition];
            partition.reserve(1);
            if let Some(number) = partition.insert(EngineHash(entry.engine), entry.layers, mixed) {
                *partition.entries.get_mut(number) = *entry;
            }
        }
    }

    fn partition_of(&self, mixed: u64) -> usize {
        // The lowest bits, because the highest ones select the bucket.
        mixed as usize & ((1 << self.bits) - 1)
    }
}

impl MapPartition {
    /// Returns the entry of a hash, or else the first free slot in its probe sequence. Most hashes
    /// are decided by their home bucket.
    #[inline]
    fn find(&self, hash: EngineHash, mixed: u64) -> Result<u32, Option<SlotPosition>> {
        if self.table.is_empty() {
            return Err(None);
        }
        let home = home_bucket(mixed, self.table.len());
        let slots = self.bucket(home);
        if let Some(number) = self.find_in(slots, hash, mixed) {
            return Ok(number);
        }
        let free = slots.free_slot().map(|slot| SlotPosition::new(home, slot));
        if slots.has_overflowed() {
            self.find_displaced(hash, mixed, free)
        } else {
            Err(free)
        }
    }

    /// Searches the buckets after the home bucket.
    fn find_displaced(
        &self,
        hash: EngineHash,
        mixed: u64,
        free: Option<SlotPosition>,
    ) -> Result<u32, Option<SlotPosition>> {
        let mut free = free;
        // All buckets may have overflowed, in small tables or after a saturated count. The probe
        // then ends after one round.
        for at in probe_sequence(mixed, self.table.len()).skip(1) {
            let slots = self.bucket(at);
            if let Some(number) = self.find_in(slots, hash, mixed) {
                return Ok(number);
            }
            free = free.or_else(|| slots.free_slot().map(|slot| SlotPosition::new(at, slot)));
            if !slots.has_overflowed() {
                break;
            }
        }
        Err(free)
    }

    #[inline]
    fn find_in(&self, slots: &HashBucket, hash: EngineHash, mixed: u64) -> Option<u32> {
        slots
            .matching_slots(mixed)
            .map(|slot| slots.entry_number(slot))
            .find(|number| self.entries.get(*number).engine == hash.0)
    }

    /// Inserts a hash without a location. Returns `None` if the hash exists.
    #[inline]
    fn insert(&mut self, hash: EngineHash, layers: LayerSet, mixed: u64) -> Option<u32> {
        let free = self.find(hash, mixed).err()?;
        let number = self.entries.insert(hash, layers);
        let home = home_bucket(mixed, self.table.len());
        match free {
            Some(free) if free.bucket() == home => {
                self.bucket_mut(home).set_slot(free.slot(), number, mixed)
            }
            _ => self.insert_displaced(number, mixed, free),
        }
        Some(number)
    }

    /// Stores the number of an entry whose hash is not in the table yet.
    #[inline]
    fn insert_slot(&mut self, number: u32, mixed: u64) {
        let home = home_bucket(mixed, self.table.len());
        let slots = self.bucket_mut(home);
        match slots.free_slot() {
            Some(slot) => slots.set_slot(slot, number, mixed),
            None => self.insert_displaced(number, mixed, None),
        }
    }

    /// Stores an entry number in the first free slot, which the caller may know already. A free
    /// slot always exists, because a table is never full.
    fn insert_displaced(&mut self, number: u32, mixed: u64, free: Option<SlotPosition>) {
        for at in probe_sequence(mixed, self.table.len()) {
            let slots = self.bucket_mut(at);
            let free_slot = match free {
                Some(free) => (free.bucket() == at).then_some(free.slot()),
                None => slots.free_slot(),
            };
            if let Some(slot) = free_slot {
                return slots.set_slot(slot, number, mixed);
            }
            slots.add_overflow();
        }
    }

    fn remove(&mut self, number: u32) {
        let mixed = mix(self.entries.get(number).engine);
        self.entries.remove(number);
        let home = home_bucket(mixed, self.table.len());
        if self.bucket_mut(home).remove_slot(number, mixed) {
            return;
        }
        for at in probe_sequence(mixed, self.table.len()) {
            let slots = self.bucket_mut(at);
            if slots.remove_slot(number, mixed) {
                return;
            }
            slots.remove_overflow();
        }
    }

    fn reserve(&mut self, additional: usize) {
        let min_lines = (self.entries.len() + additional) * MAX_LOAD.1
            / (MAX_LOAD.0 * 2 * SLOTS_PER_BUCKET)
            + 1;
        if min_lines <= self.table.len() {
            return;
        }
        let length = min_lines.max(self.table.len() * 2);
        self.table = Vec::new();
        self.table.reserve_exact(length);
        // Touches the pages now. Reading them first would cost two page faults instead of one.
        self.table.resize(length, BucketLine::default());
        let list = std::mem::take(&mut self.entries);
        let mut mixed = [0; REBUILD_BATCH];
        for (first, batch) in list.batches(REBUILD_BATCH) {
            for (mixed, entry) in mixed.iter_mut().zip(batch) {
                *mixed = mix(entry.engine);
                prefetch_index(&self.table, home_bucket(*mixed, length) / 2);
            }
            for ((number, entry), mixed) in (first..).zip(batch).zip(mixed) {
                if !entry.is_free() {
                    self.insert_slot(number, mixed);
                }
            }
        }
        self.entries = list;
    }

    fn bucket(&self, at: usize) -> &HashBucket {
        &self.table[at / 2].0[at % 2]
    }

    fn bucket_mut(&mut self, at: usize) -> &mut HashBucket {
        &mut self.table[at / 2].0[at % 2]
    }
}

/// Returns the home bucket of a hash.
fn home_bucket(mixed: u64, lines: usize) -> usize {
    (((mixed >> 32) * 2 * lines as u64) >> 32) as usize
}

/// Returns the probe sequence of a hash: the home bucket, the other bucket of the line, and then
/// the buckets after a second, independent position. Linear probing would cluster.
fn probe_sequence(mixed: u64, lines: usize) -> impl Iterator<Item = usize> {
    let first = home_bucket(mixed, lines);
    let second_probe = move |at: usize| {
        let second = home_bucket(
            u64::from(mixed as u32).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            lines,
        );
        let line = second / 2 + at / 2;
        2 * if line < lines { line } else { line - lines } + (second ^ at) % 2
    };
    // A partition without entries has no table.
    [first, first ^ 1]
        .into_iter()
        .take(2 * lines)
        .chain((0..2 * lines).map(second_probe))
}

/// Spreads a hash over all bits, because some engines number their blocks.
fn mix(hash: u64) -> u64 {
    let product = u128::from(hash ^ 0x2545_f491_4f6c_dd1d) * 0x9e37_79b9_7f4a_7c15;
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
mod tests;
