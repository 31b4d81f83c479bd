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

mod entries;

pub(super) use entries::MappedBlock;
use entries::{EntryList, HashEntry};
use prefetch_index::prefetch_index;

use crate::block::EngineHash;
use crate::index::ids::{BlockLocation, PREFETCH_DISTANCE};
use crate::index::layers::LayerSet;
use crate::index::sizes::PARTITION_CAPACITY;

/// Slots per bucket.
const SLOTS_PER_BUCKET: usize = 7;
/// Maximum share of used slots. At seven eighths, insertions and removals leave so many displaced
/// entries that the lookup of a new hash probes dozens of lines.
const MAX_LOAD: (usize, usize) = (3, 4);
/// Lowest and highest bit of each tag byte.
const TAG_LOW_BITS: u64 = 0x0001_0101_0101_0101;
const TAG_HIGH_BITS: u64 = TAG_LOW_BITS << 7;
/// One unit of the overflow count.
const OVERFLOW_UNIT: u64 = 1 << 56;
/// Bits of an entry number. The other bits of the three bytes hold more of the hash.
const NUMBER_BITS: u32 = 21;

/// Position of an entry in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EntryRef {
    partition: u32,
    number: u32,
}

/// All engine hashes of one writer.
#[derive(Debug, Default)]
pub(super) struct EngineBlockMap {
    /// Partitions, selected by the lowest `bits` bits of the mixed hash.
    partitions: Vec<MapPartition>,
    bits: u32,
    len: usize,
}

/// Two buckets in one cache line. A hash that does not fit in one goes to the other at no further
/// cost.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct BucketLine([HashBucket; 2]);

/// Seven slots that are compared at once.
#[derive(Clone, Copy, Debug, Default)]
struct HashBucket {
    /// One tag byte per slot, zero for a free slot. The highest byte is the overflow count: the
    /// number of entries that probed past this bucket. It saturates, and then stays until the table
    /// grows.
    tags: u64,
    entry_numbers: [[u8; 3]; SLOTS_PER_BUCKET],
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
        entries.map(|(_, entry)| (EngineHash(entry.engine), entry.mapped_block()))
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
        let number = self.partitions.get_mut(partition)?.insert(
            HashEntry {
                layers,
                ..HashEntry::new(hash)
            },
            mixed,
        )?;
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
        for (_, entry) in all.iter().flat_map(|partition| partition.entries.iter()) {
            let mixed = mix(entry.engine);
            let partition = self.partition_of(mixed);
            self.partitions[partition].reserve(1);
            self.partitions[partition].insert(*entry, mixed);
        }
    }

    fn partition_of(&self, mixed: u64) -> usize {
        // The lowest bits, because the highest ones select the bucket.
        mixed as usize & ((1 << self.bits) - 1)
    }
}

impl MapPartition {
    /// Returns the entry of a hash, or else the first free slot in its probe sequence.
    fn find(&self, hash: EngineHash, mixed: u64) -> Result<u32, Option<(usize, usize)>> {
        let mut free = None;
        // All buckets may have overflowed, in small tables or after a saturated count. The probe
        // then ends after one round.
        for at in probe_sequence(mixed, self.table.len()) {
            let slots = self.bucket(at);
            let mut matches = slots.slots_with_tag(tag_of(mixed));
            while matches != 0 {
                let slot = slot_index(matches);
                if slots.may_match(slot, mixed) {
                    let number = slots.entry_number(slot);
                    if self.entries.get(number).engine == hash.0 {
                        return Ok(number);
                    }
                }
                matches &= matches - 1;
            }
            if free.is_none() && slots.slots_with_tag(0) != 0 {
                free = Some((at, slot_index(slots.slots_with_tag(0))));
            }
            if slots.tags < OVERFLOW_UNIT {
                break;
            }
        }
        Err(free)
    }

    /// Inserts an entry. Returns `None` if the hash exists.
    fn insert(&mut self, entry: HashEntry, mixed: u64) -> Option<u32> {
        let free = self.find(EngineHash(entry.engine), mixed).err()?;
        let number = self.entries.insert(entry);
        self.insert_slot(number, mixed, free);
        Some(number)
    }

    /// Stores an entry number in the first free slot, which the caller may know already. A free
    /// slot always exists, because a table is never full.
    fn insert_slot(&mut self, number: u32, mixed: u64, free: Option<(usize, usize)>) {
        for at in probe_sequence(mixed, self.table.len()) {
            let free_slot = match free {
                Some((free, slot)) => (free == at).then_some(slot),
                None => Some(self.bucket(at).slots_with_tag(0))
                    .filter(|free| *free != 0)
                    .map(slot_index),
            };
            let slots = self.bucket_mut(at);
            if let Some(slot) = free_slot {
                return slots.set_slot(slot, number, mixed);
            }
            slots.add_overflow();
        }
    }

    fn remove(&mut self, number: u32) {
        let mixed = mix(self.entries.get(number).engine);
        self.entries.remove(number);
        for at in probe_sequence(mixed, self.table.len()) {
            let slots = self.bucket_mut(at);
            let mut matches = slots.slots_with_tag(tag_of(mixed));
            while matches != 0 {
                let slot = slot_index(matches);
                if slots.may_match(slot, mixed) && slots.entry_number(slot) == number {
                    slots.tags &= !(0xff << (8 * slot));
                    return;
                }
                matches &= matches - 1;
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
        let mut entries = list
            .iter()
            .map(|(number, entry)| (number, mix(entry.engine)));
        let mut batch = [(0, 0); PREFETCH_DISTANCE];
        loop {
            let count = batch
                .iter_mut()
                .zip(entries.by_ref())
                .map(|(to, from)| *to = from)
                .count();
            batch[..count].iter().for_each(|(_, mixed)| {
                prefetch_index(&self.table, home_bucket(*mixed, length) / 2)
            });
            batch[..count]
                .iter()
                .for_each(|(number, mixed)| self.insert_slot(*number, *mixed, None));
            if count < PREFETCH_DISTANCE {
                break;
            }
        }
        drop(entries);
        self.entries = list;
    }

    fn bucket(&self, at: usize) -> &HashBucket {
        &self.table[at / 2].0[at % 2]
    }

    fn bucket_mut(&mut self, at: usize) -> &mut HashBucket {
        &mut self.table[at / 2].0[at % 2]
    }
}

impl HashBucket {
    /// Returns the highest bit of every slot with this tag. Slots after the first match may be
    /// false positives.
    fn slots_with_tag(&self, tag: u64) -> u64 {
        let zero = self.tags ^ (TAG_LOW_BITS * tag);
        zero.wrapping_sub(TAG_LOW_BITS) & !zero & TAG_HIGH_BITS
    }

    /// Returns whether a slot may refer to a hash.
    fn may_match(&self, slot: usize, mixed: u64) -> bool {
        self.tags >> (8 * slot) & 0xff == tag_of(mixed)
            && self.raw_entry(slot) >> NUMBER_BITS == extra_tag_bits(mixed)
    }

    fn entry_number(&self, slot: usize) -> u32 {
        self.raw_entry(slot) & ((1 << NUMBER_BITS) - 1)
    }

    fn raw_entry(&self, slot: usize) -> u32 {
        let [a, b, c] = self.entry_numbers[slot];
        u32::from_le_bytes([a, b, c, 0])
    }

    fn set_slot(&mut self, slot: usize, number: u32, mixed: u64) {
        debug_assert!(number < 1 << NUMBER_BITS, "too many entries in a partition");
        self.tags |= tag_of(mixed) << (8 * slot);
        let [a, b, c, _] = (number | extra_tag_bits(mixed) << NUMBER_BITS).to_le_bytes();
        self.entry_numbers[slot] = [a, b, c];
    }

    fn add_overflow(&mut self) {
        if self.tags >> 56 < 0xff {
            self.tags += OVERFLOW_UNIT;
        }
    }

    fn remove_overflow(&mut self) {
        if self.tags >> 56 < 0xff {
            self.tags -= OVERFLOW_UNIT;
        }
    }
}

fn slot_index(bits: u64) -> usize {
    bits.trailing_zeros() as usize / 8
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

/// Returns the tag of a hash.
fn tag_of(mixed: u64) -> u64 {
    (mixed >> 24 & 0xff).max(1)
}

/// Returns the bits of a hash that are stored beside the entry number.
fn extra_tag_bits(mixed: u64) -> u32 {
    (mixed >> 21) as u32 & 7
}

/// Spreads a hash over all bits, because some engines number their blocks.
fn mix(hash: u64) -> u64 {
    let product = u128::from(hash ^ 0x2545_f491_4f6c_dd1d) * 0x9e37_79b9_7f4a_7c15;
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
mod tests;
