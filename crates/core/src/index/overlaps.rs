//! Result of a query: the number of cached blocks of a prompt per slot and tier.
//!
//! The result is a set of arrays that the caller reuses. In measurements, building a map per query
//! cost more than the lookup. If all blocks are on the device, as is usual, only one number per
//! owner is written. If all owners hold a run, 64 owners are written at once.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::ids::OwnerId;
use super::layers::LayerSet;
use super::owner_table::OwnerMap;
use super::owners::{OwnerSet, set_bits, unpack};
use crate::block::StorageTier;
use crate::worker::RankSlot;

/// Blocks of one prompt on one worker rank: the leading blocks on the device, then the blocks that
/// each slower tier adds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TierBlocks {
    /// Leading blocks in device memory.
    pub device: u32,
    /// Following blocks in host memory.
    pub host: u32,
    /// Following blocks on disk.
    pub disk: u32,
    /// Following blocks in external storage.
    pub external: u32,
}

impl TierBlocks {
    /// Adds the blocks of two prompts of the same request.
    pub fn combine(self, other: TierBlocks) -> TierBlocks {
        TierBlocks {
            device: self.device + other.device,
            host: self.host + other.host,
            disk: self.disk + other.disk,
            external: self.external + other.external,
        }
    }

    /// Returns the number of blocks in all tiers, unweighted.
    pub fn total(self) -> u32 {
        self.device + self.host + self.disk + self.external
    }

    /// Returns the equivalent number of device blocks. Blocks of slower tiers count by their
    /// weight.
    pub fn weighted_total(self, host_weight: f64, disk_weight: f64) -> f64 {
        f64::from(self.device)
            + f64::from(self.host) * host_weight
            + (f64::from(self.disk) + f64::from(self.external)) * disk_weight
    }

    /// Keeps at most the first `max_blocks` blocks.
    pub fn limit_to(self, max_blocks: u32) -> TierBlocks {
        let mut left = max_blocks;
        let mut first = |blocks: u32| {
            let kept = blocks.min(left);
            left -= kept;
            kept
        };
        let device = first(self.device);
        let host = first(self.host);
        TierBlocks {
            device,
            host,
            disk: first(self.disk),
            external: first(self.external),
        }
    }

    /// Returns the blocks if at least `device` leading blocks were on the device. Blocks of slower
    /// tiers that this covers move to the device.
    pub fn with_device(self, device: u32) -> TierBlocks {
        let mut reached = self.device.max(device);
        let mut end = self.device;
        let mut beyond = |blocks: u32| {
            end += blocks;
            let added = end.saturating_sub(reached);
            reached += added;
            added
        };
        let host = beyond(self.host);
        let disk = beyond(self.disk);
        let external = beyond(self.external);
        TierBlocks {
            device: self.device.max(device),
            host,
            disk,
            external,
        }
    }

    fn tier_mut(&mut self, tier: StorageTier) -> &mut u32 {
        match tier {
            StorageTier::Device => &mut self.device,
            StorageTier::HostPinned => &mut self.host,
            StorageTier::Disk => &mut self.disk,
            StorageTier::External => &mut self.external,
        }
    }
}

/// Result of one query, and the buffers to compute the next one without allocating. It is indexed
/// by owner id. Its cost is proportional to the number of owners found, mostly in steps of 64.
#[derive(Clone, Debug, Default)]
pub struct Overlaps {
    /// Mapping from owners to slots at the time of the query.
    owner_map: Option<Arc<OwnerMap>>,
    /// One bit per owner with at least one block.
    found_bits: Vec<u64>,
    /// Indexes of the non-zero words in `found_bits`.
    found_words: Vec<u32>,
    /// Number of leading blocks of each owner found. An owner that does not hold a run stays at its
    /// start and does not advance again.
    reached: Vec<u32>,
    /// One bit per owner that holds some of its blocks only in slower tiers.
    tiered_bits: Vec<u64>,
    /// Blocks by tier of the owners in `tiered_bits`.
    tiered: Vec<TieredOverlap>,
    /// Blocks of slots without an owner id, taken from another result.
    extra: Vec<TierBlocks>,
    extra_slots: Vec<RankSlot>,
}

/// Prefix that spans several tiers, or is not in the fastest one.
#[derive(Clone, Copy, Debug, Default)]
struct TieredOverlap {
    /// Tier of the last block. The following blocks are in this tier or a slower one.
    tier: StorageTier,
    blocks: TierBlocks,
}

impl Overlaps {
    /// Creates an empty result.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the cached blocks of a slot, or zero if none were found.
    #[inline]
    pub fn get(&self, slot: RankSlot) -> TierBlocks {
        match self.owner(slot) {
            Some(owner) if !is_set(&self.found_bits, owner) => TierBlocks::default(),
            Some(owner) => self.found_at(owner),
            None => self.extra.get(slot.index()).copied().unwrap_or_default(),
        }
    }

    /// Iterates over the slots with cached blocks, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (RankSlot, TierBlocks)> {
        let owner_map = self.owner_map.as_deref();
        let by_owner = self
            .found_owners()
            .filter_map(move |owner| Some((owner_map?.slot(owner)?, self.found_at(owner))));
        by_owner.chain(
            self.extra_slots
                .iter()
                .map(|&slot| (slot, self.extra[slot.index()])),
        )
    }

    /// Raises the result to the device blocks of another one. Slots with several cache groups are
    /// unchanged: a prompt that was sent there does not show which shares the groups have kept.
    pub fn raise(&mut self, other: &Overlaps) {
        self.raise_where(other, |_| true);
    }

    /// Like [`Self::raise`], for the slots that `applies` accepts.
    pub fn raise_where(&mut self, other: &Overlaps, applies: impl Fn(RankSlot) -> bool) {
        for (slot, blocks) in other
            .iter()
            .filter(|(slot, blocks)| blocks.device > 0 && applies(*slot))
        {
            let raised = self.get(slot).with_device(blocks.device);
            match self.owner(slot) {
                Some(owner)
                    if self
                        .owner_map
                        .as_ref()
                        .is_some_and(|owner_map| owner_map.rules(owner).is_some()) => {}
                Some(owner) => self.set_found(owner, raised),
                None => self.set_extra(slot, raised),
            }
        }
    }

    /// Replaces the result with one computed elsewhere.
    pub fn replace_with(&mut self, found: impl IntoIterator<Item = (RankSlot, TierBlocks)>) {
        self.clear();
        self.owner_map = None;
        found
            .into_iter()
            .filter(|(_, blocks)| blocks.total() > 0)
            .for_each(|(slot, found)| self.set_extra(slot, found));
    }

    fn set_extra(&mut self, slot: RankSlot, blocks: TierBlocks) {
        if self.extra.len() <= slot.index() {
            self.extra.resize(slot.index() + 1, TierBlocks::default());
        }
        // Entries in `extra_slots` are never zero.
        if self.extra[slot.index()].total() == 0 {
            self.extra_slots.push(slot);
        }
        self.extra[slot.index()] = blocks;
    }

    pub(super) fn clear(&mut self) {
        for word in self.found_words.drain(..) {
            self.found_bits[word as usize] = 0;
            if let Some(tiered) = self.tiered_bits.get_mut(word as usize) {
                *tiered = 0;
            }
        }
        for slot in self.extra_slots.drain(..) {
            self.extra[slot.index()] = TierBlocks::default();
        }
    }

    /// Advances the owners of the next `blocks` blocks after `start`. Returns whether any prefix
    /// reaches their end.
    pub(super) fn advance(&mut self, start: u32, blocks: u32, owners: &OwnerSet) -> bool {
        let mut any = false;
        if let Some(bits) = owners.bits() {
            any = if start == 0 {
                self.start_all(blocks, bits)
            } else {
                self.advance_all(start, blocks, bits)
            };
        }
        for &word in owners.words() {
            let (owner, layers) = unpack(word);
            any |= if start == 0 {
                self.start_owner(owner, layers, blocks)
            } else {
                self.advance_owner(owner, layers, start, blocks)
            };
        }
        any
    }

    /// Limits the blocks of owners with several cache groups to the prefix that all groups can
    /// serve. `path` contains the runs along the prompt, with their owners.
    pub(super) fn limit_to_reusable<'t>(
        &mut self,
        path: impl Iterator<Item = (Range<u32>, &'t OwnerSet)>,
        map: &OwnerMap,
        max_blocks: u32,
    ) {
        let limited: Vec<OwnerId> = self
            .found_owners()
            .filter(|owner| map.rules(*owner).is_some())
            .collect();
        if limited.is_empty() {
            return;
        }
        let path: Vec<_> = path.collect();
        for owner in limited {
            let Some(rules) = map.rules(owner) else {
                continue;
            };
            let found = self.found_at(owner);
            let held = path
                .iter()
                .map(|(run, owners)| (run.clone(), owners.layers(owner)));
            let device = rules.reusable_prefix(held, found.device.min(max_blocks));
            if device < found.device {
                // Slower tiers continue a prefix that cannot be reused this far.
                self.set_found(
                    owner,
                    TierBlocks {
                        device,
                        ..TierBlocks::default()
                    },
                );
            }
        }
    }

    /// Ends a query and stores the mapping of its owner ids.
    pub(super) fn set_owner_map(&mut self, owner_map: &Arc<OwnerMap>) {
        if !self
            .owner_map
            .as_ref()
            .is_some_and(|known| Arc::ptr_eq(known, owner_map))
        {
            self.owner_map = Some(owner_map.clone());
        }
    }

    fn owner(&self, slot: RankSlot) -> Option<OwnerId> {
        self.owner_map.as_ref()?.owner(slot)
    }

    fn found_owners(&self) -> impl Iterator<Item = OwnerId> {
        self.found_words.iter().flat_map(|&word| {
            set_bits(self.found_bits[word as usize]).map(move |bit| OwnerId(word * 64 + bit))
        })
    }

    /// Returns the blocks of an owner that was found.
    fn found_at(&self, owner: OwnerId) -> TierBlocks {
        if is_set(&self.tiered_bits, owner) {
            return self.tiered[owner.at()].blocks;
        }
        TierBlocks {
            device: self.reached[owner.at()],
            ..TierBlocks::default()
        }
    }

    /// Replaces the blocks of an owner.
    fn set_found(&mut self, owner: OwnerId, blocks: TierBlocks) {
        if blocks.total() == 0 {
            if let Some(bits) = self.found_bits.get_mut(owner.at() / 64) {
                *bits &= !(1 << (owner.at() % 64));
            }
            return;
        }
        let word = owner.at() / 64;
        if self.found_bits.get(word).is_some_and(|bits| *bits == 0)
            && self.found_words.contains(&(word as u32))
        {
            // All owners of this word were removed before.
            self.found_bits[word] = 1 << (owner.at() % 64);
        }
        self.mark_found(owner);
        self.reached[owner.at()] = blocks.total();
        if blocks.device < blocks.total() || is_set(&self.tiered_bits, owner) {
            *self.by_tier(owner) = TieredOverlap {
                tier: StorageTier::Device,
                blocks,
            };
        }
    }

    fn mark_found(&mut self, owner: OwnerId) {
        let at = owner.at() / 64;
        self.reserve_words(at + 1);
        if self.found_bits[at] == 0 {
            self.found_words.push(at as u32);
        }
        self.found_bits[at] |= 1 << (owner.at() % 64);
    }

    /// Reserves space for this many words, each with the bits of 64 owners.
    fn reserve_words(&mut self, words: usize) {
        if self.found_bits.len() < words {
            self.found_bits.resize(words, 0);
            self.reached.resize(words * 64, 0);
        }
    }

    fn by_tier(&mut self, owner: OwnerId) -> &mut TieredOverlap {
        if self.tiered_bits.len() <= owner.at() / 64 {
            self.tiered_bits.resize(owner.at() / 64 + 1, 0);
            self.tiered
                .resize(self.tiered_bits.len() * 64, TieredOverlap::default());
        }
        self.tiered_bits[owner.at() / 64] |= 1 << (owner.at() % 64);
        &mut self.tiered[owner.at()]
    }

    /// Sets the blocks of one owner at the start of a prompt.
    fn start_owner(&mut self, owner: OwnerId, layers: LayerSet, blocks: u32) -> bool {
        let Some(tier) = layers.fastest_from(StorageTier::Device) else {
            return false;
        };
        self.mark_found(owner);
        self.reached[owner.at()] = blocks;
        if tier != StorageTier::Device {
            let mut by_tier = TieredOverlap {
                tier,
                ..TieredOverlap::default()
            };
            *by_tier.blocks.tier_mut(tier) = blocks;
            *self.by_tier(owner) = by_tier;
        }
        true
    }

    /// Sets the blocks of all these owners, on the device, at the start of a prompt.
    fn start_all(&mut self, blocks: u32, bits: &[u64]) -> bool {
        self.reserve_words(bits.len());
        for (at, &bits) in bits.iter().enumerate().filter(|(_, bits)| **bits != 0) {
            self.found_words.push(at as u32);
            self.found_bits[at] = bits;
            // Values of other owners in the word are never read.
            self.reached[at * 64..][..64].fill(blocks);
        }
        true
    }

    /// Advances one owner, if it has reached `start`.
    fn advance_owner(&mut self, owner: OwnerId, layers: LayerSet, start: u32, blocks: u32) -> bool {
        if !is_set(&self.found_bits, owner) || self.reached[owner.at()] != start {
            return false;
        }
        let is_tiered = is_set(&self.tiered_bits, owner);
        let from = if is_tiered {
            self.tiered[owner.at()].tier
        } else {
            StorageTier::Device
        };
        let Some(tier) = layers.fastest_from(from) else {
            return false;
        };
        self.reached[owner.at()] += blocks;
        if is_tiered || tier != StorageTier::Device {
            let by_tier = self.by_tier(owner);
            if !is_tiered {
                by_tier.blocks = TierBlocks {
                    device: start,
                    ..TierBlocks::default()
                };
            }
            by_tier.tier = tier;
            *by_tier.blocks.tier_mut(tier) += blocks;
        }
        true
    }

    /// Advances all these owners on the device, as far as they have reached `start`.
    fn advance_all(&mut self, start: u32, blocks: u32, bits: &[u64]) -> bool {
        let mut any = false;
        for &at in &self.found_words {
            let at = at as usize;
            let tiered = self.tiered_bits.get(at).copied().unwrap_or(0);
            let both = self.found_bits[at] & bits.get(at).copied().unwrap_or(0) & !tiered;
            let reached = &mut self.reached[at * 64..][..64];
            if both != 0
                && both == self.found_bits[at]
                && set_bits(both).all(|bit| reached[bit as usize] == start)
            {
                reached.fill(start + blocks);
                any = true;
                continue;
            }
            for bit in set_bits(both) {
                let reached = &mut reached[bit as usize];
                if *reached == start {
                    *reached += blocks;
                    any = true;
                }
            }
            for bit in set_bits(self.found_bits[at] & bits.get(at).copied().unwrap_or(0) & tiered) {
                any |= self.tiered[at * 64 + bit as usize].advance(
                    start,
                    blocks,
                    &mut reached[bit as usize],
                );
            }
        }
        any
    }
}

impl TieredOverlap {
    /// Advances on the device.
    fn advance(&mut self, start: u32, blocks: u32, reached: &mut u32) -> bool {
        let advances = *reached == start && self.tier == StorageTier::Device;
        if advances {
            *reached += blocks;
            self.blocks.device += blocks;
        }
        advances
    }
}

fn is_set(bits: &[u64], owner: OwnerId) -> bool {
    bits.get(owner.at() / 64)
        .is_some_and(|bits| bits & (1 << (owner.at() % 64)) != 0)
}
