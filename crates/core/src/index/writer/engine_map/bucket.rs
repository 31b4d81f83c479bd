//! Buckets of an engine map: seven slots, one tag byte per slot and an overflow count. Two buckets
//! fill a cache line. A slot holds an entry number and eleven bits of the hash, so unrelated entries
//! are rarely read.

/// Slots per bucket.
pub(super) const SLOTS_PER_BUCKET: usize = 7;
/// Lowest and highest bit of each tag byte.
const TAG_LOW_BITS: u64 = 0x0001_0101_0101_0101;
const TAG_HIGH_BITS: u64 = TAG_LOW_BITS << 7;
/// One unit of the overflow count.
const OVERFLOW_UNIT: u64 = 1 << 56;
/// Bits of an entry number. The other bits of the three bytes hold more of the hash.
const NUMBER_BITS: u32 = 21;

/// Two buckets in one cache line. A hash that does not fit in one goes to the other at no further
/// cost.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
pub(super) struct BucketLine(pub(super) [HashBucket; 2]);

/// Seven slots that are compared at once.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HashBucket {
    /// One tag byte per slot, zero for a free slot. The highest byte is the overflow count: the
    /// number of entries that probed past this bucket. It saturates, and then stays until the table
    /// grows.
    tags: u64,
    entry_numbers: [[u8; 3]; SLOTS_PER_BUCKET],
}

impl HashBucket {
    /// Returns the highest bit of every slot with this tag. Slots after the first match may be
    /// false positives.
    fn slots_with_tag(&self, tag: u64) -> u64 {
        let zero = self.tags ^ (TAG_LOW_BITS * tag);
        zero.wrapping_sub(TAG_LOW_BITS) & !zero & TAG_HIGH_BITS
    }

    pub(super) fn free_slot(&self) -> Option<usize> {
        let free = self.slots_with_tag(0);
        (free != 0).then(|| slot_index(free))
    }

    /// Returns whether entries probed past this bucket.
    pub(super) fn has_overflowed(&self) -> bool {
        self.tags >= OVERFLOW_UNIT
    }

    /// Iterates over the slots that may refer to a hash.
    #[inline]
    pub(super) fn matching_slots(&self, mixed: u64) -> impl Iterator<Item = usize> {
        let mut matches = self.slots_with_tag(tag_of(mixed));
        std::iter::from_fn(move || {
            let slot = (matches != 0).then(|| slot_index(matches))?;
            matches &= matches - 1;
            Some(slot)
        })
        .filter(move |slot| self.may_match(*slot, mixed))
    }

    /// Returns whether a slot may refer to a hash.
    fn may_match(&self, slot: usize, mixed: u64) -> bool {
        self.tags >> (8 * slot) & 0xff == tag_of(mixed)
            && self.raw_entry(slot) >> NUMBER_BITS == extra_tag_bits(mixed)
    }

    pub(super) fn entry_number(&self, slot: usize) -> u32 {
        self.raw_entry(slot) & ((1 << NUMBER_BITS) - 1)
    }

    fn raw_entry(&self, slot: usize) -> u32 {
        let [a, b, c] = self.entry_numbers[slot];
        u32::from_le_bytes([a, b, c, 0])
    }

    pub(super) fn set_slot(&mut self, slot: usize, number: u32, mixed: u64) {
        debug_assert!(number < 1 << NUMBER_BITS, "too many entries in a partition");
        self.tags |= tag_of(mixed) << (8 * slot);
        let [a, b, c, _] = (number | extra_tag_bits(mixed) << NUMBER_BITS).to_le_bytes();
        self.entry_numbers[slot] = [a, b, c];
    }

    /// Frees the slot of an entry. Returns whether the bucket had one.
    pub(super) fn remove_slot(&mut self, number: u32, mixed: u64) -> bool {
        let found = self
            .matching_slots(mixed)
            .find(|slot| self.entry_number(*slot) == number);
        if let Some(slot) = found {
            self.tags &= !(0xff << (8 * slot));
        }
        found.is_some()
    }

    pub(super) fn add_overflow(&mut self) {
        if self.tags >> 56 < 0xff {
            self.tags += OVERFLOW_UNIT;
        }
    }

    pub(super) fn remove_overflow(&mut self) {
        if self.tags >> 56 < 0xff {
            self.tags -= OVERFLOW_UNIT;
        }
    }
}

fn slot_index(bits: u64) -> usize {
    bits.trailing_zeros() as usize / 8
}

/// Returns the tag of a hash.
fn tag_of(mixed: u64) -> u64 {
    (mixed >> 24 & 0xff).max(1)
}

/// Returns the bits of a hash that are stored beside the entry number.
fn extra_tag_bits(mixed: u64) -> u32 {
    (mixed >> 21) as u32 & 7
}
