//! Tracks which blocks of a rank are stale after events were lost.
//!
//! A block is confirmed when it is stored again, when a block that follows it is stored on the
//! device, or when a response reports it as cached. Engines publish no event for a cache hit, so
//! blocks in frequent use are not stored again.
//!
//! Engines evict the least recently used blocks first. Once an engine has evicted as many confirmed
//! blocks as there are unconfirmed ones, the unconfirmed ones are gone as well. Each tier and each
//! cache group evicts independently, so every layer has its own state.
//!
//! Recording a gap takes constant time, because a bad link can lose events with every batch.

use super::children::U64HashMap;
use super::ids::BlockLocation;
use super::layers::{BlockLayer, LayerSet};
use crate::block::StorageTier;

/// Stale blocks of one rank, by layer.
#[derive(Debug, Default)]
pub(super) struct StaleBlocks([LayerStaleness; BlockLayer::COUNT]);

/// State of one layer.
#[derive(Debug, Default)]
struct LayerStaleness {
    /// Number of blocks held in this layer.
    held: u64,
    /// Present while any block is stale.
    unconfirmed: Option<UnconfirmedLayer>,
}

/// Confirmations since the first gap that has not been resolved.
#[derive(Debug)]
struct UnconfirmedLayer {
    /// Number of gaps so far.
    generation: u32,
    /// Blocks not confirmed since this gap are purged next.
    horizon: u32,
    /// Gap after which a block was last confirmed. Contains the blocks confirmed since the horizon.
    confirmed_in: U64HashMap<u64, u32>,
    /// Number of blocks confirmed since the latest gap.
    confirmed_count: u64,
    /// Number of confirmed blocks that were evicted since the horizon.
    evicted: u64,
}

impl UnconfirmedLayer {
    fn starting_at(generation: u32) -> Self {
        Self {
            generation,
            horizon: generation,
            confirmed_in: U64HashMap::default(),
            confirmed_count: 0,
            evicted: 0,
        }
    }
}

/// Minimum evictions before a purge, which scans all blocks: one for this many scanned blocks.
const PURGE_COST_FACTOR: u64 = 16;

impl StaleBlocks {
    /// Marks all blocks as stale.
    pub(super) fn record_gap(&mut self, generation: u32) {
        for layer in &mut self.0 {
            match &mut layer.unconfirmed {
                Some(unconfirmed) => {
                    (unconfirmed.generation, unconfirmed.confirmed_count) = (generation, 0)
                }
                None if layer.held > 0 => {
                    layer.unconfirmed = Some(UnconfirmedLayer::starting_at(generation))
                }
                None => {}
            }
        }
    }

    /// Removes all blocks.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Returns whether any block is stale.
    pub(super) fn has_stale(&self) -> bool {
        self.0.iter().any(|layer| layer.unconfirmed.is_some())
    }

    /// Counts the stale blocks on the device, and the stale shares of cache groups.
    pub(super) fn stale_count(&self) -> u64 {
        let is_counted =
            |layer: &BlockLayer| layer.tier().is_none_or(|tier| tier == StorageTier::Device);
        BlockLayer::all()
            .filter(is_counted)
            .map(|layer| self.layer(layer).stale_count())
            .sum()
    }

    /// Counts the blocks held in a layer.
    pub(super) fn held_count(&self, layer: impl Into<BlockLayer>) -> u64 {
        self.layer(layer.into()).held
    }

    /// Adds blocks to a layer.
    pub(super) fn add_held(&mut self, layer: impl Into<BlockLayer>, count: u64) {
        self.layer_mut(layer.into()).held += count;
    }

    /// Removes blocks from a layer.
    pub(super) fn remove_all(
        &mut self,
        locations: impl ExactSizeIterator<Item = BlockLocation>,
        layer: BlockLayer,
    ) {
        let state = self.layer_mut(layer);
        if state.unconfirmed.is_none() {
            state.held -= locations.len() as u64;
        } else {
            locations.for_each(|location| self.remove_held(location, layer));
        }
    }

    /// Removes a block from a layer.
    fn remove_held(&mut self, location: BlockLocation, layer: BlockLayer) {
        let state = self.layer_mut(layer);
        state.held -= 1;
        let Some(unconfirmed) = &mut state.unconfirmed else {
            return;
        };
        let confirmed = unconfirmed.confirmed_in.remove(&location_key(location));
        unconfirmed.confirmed_count -= u64::from(confirmed == Some(unconfirmed.generation));
        // Tiers count evictions in `record_eviction`: the writer knows which copies were counted
        // after the gap.
        unconfirmed.evicted += u64::from(confirmed.is_some() && layer.tier().is_none());
        state.close_if_confirmed();
    }

    /// Marks a block as confirmed. Returns whether it was stale before.
    pub(super) fn confirm(
        &mut self,
        location: BlockLocation,
        layer: impl Into<BlockLayer>,
    ) -> bool {
        let Some(unconfirmed) = &mut self.layer_mut(layer.into()).unconfirmed else {
            return false;
        };
        let is_new = unconfirmed
            .confirmed_in
            .insert(location_key(location), unconfirmed.generation)
            != Some(unconfirmed.generation);
        unconfirmed.confirmed_count += u64::from(is_new);
        is_new
    }

    /// Counts an eviction. `counted` is the gap after which the copies of the block were last
    /// counted.
    pub(super) fn record_eviction(&mut self, tier: StorageTier, counted: u32) {
        let unconfirmed = self.layer_mut(tier.into()).unconfirmed.as_mut();
        if let Some(unconfirmed) = unconfirmed.filter(|unconfirmed| counted >= unconfirmed.horizon)
        {
            unconfirmed.evicted += 1;
        }
    }

    /// Resolves the layers in which all blocks are confirmed.
    pub(super) fn close_confirmed(&mut self) {
        self.0
            .iter_mut()
            .for_each(LayerStaleness::close_if_confirmed);
    }

    /// Returns the layers whose unconfirmed blocks must have been evicted, if the evictions justify
    /// a scan of this many blocks.
    pub(super) fn purge_layers(&self, scanned_blocks: u64) -> LayerSet {
        BlockLayer::all()
            .filter(|layer| self.layer(*layer).is_purge_due(scanned_blocks))
            .fold(LayerSet::NONE, LayerSet::with)
    }

    /// Returns the gap before which unconfirmed blocks were last confirmed.
    pub(super) fn horizon(&self, layer: impl Into<BlockLayer>) -> Option<u32> {
        Some(self.layer(layer.into()).unconfirmed.as_ref()?.horizon)
    }

    /// Returns whether a block was not confirmed since the horizon.
    pub(super) fn is_unconfirmed(
        &self,
        location: BlockLocation,
        layer: impl Into<BlockLayer>,
    ) -> bool {
        self.layer(layer.into())
            .unconfirmed
            .as_ref()
            .is_some_and(|unconfirmed| {
                !unconfirmed
                    .confirmed_in
                    .contains_key(&location_key(location))
            })
    }

    /// Ends a purge of the unconfirmed blocks. Blocks that were confirmed before the latest gap are
    /// candidates for the next purge.
    pub(super) fn finish_purge(&mut self, layer: BlockLayer) {
        let state = self.layer_mut(layer);
        if let Some(unconfirmed) = &mut state.unconfirmed {
            let generation = unconfirmed.generation;
            unconfirmed
                .confirmed_in
                .retain(|_, confirmed| *confirmed == generation);
            unconfirmed.horizon = generation;
            unconfirmed.evicted = 0;
        }
        state.close_if_confirmed();
    }

    fn layer(&self, layer: BlockLayer) -> &LayerStaleness {
        &self.0[layer.index()]
    }

    fn layer_mut(&mut self, layer: BlockLayer) -> &mut LayerStaleness {
        &mut self.0[layer.index()]
    }
}

impl LayerStaleness {
    fn stale_count(&self) -> u64 {
        self.unconfirmed
            .as_ref()
            .map_or(0, |unconfirmed| self.held - unconfirmed.confirmed_count)
    }

    fn close_if_confirmed(&mut self) {
        if self.stale_count() == 0 {
            self.unconfirmed = None;
        }
    }

    fn is_purge_due(&self, scanned_blocks: u64) -> bool {
        let Some(unconfirmed) = &self.unconfirmed else {
            return false;
        };
        let old = self.held - unconfirmed.confirmed_in.len() as u64;
        unconfirmed.evicted >= old.max(scanned_blocks / PURGE_COST_FACTOR).max(1)
    }
}

#[cfg(test)]
impl StaleBlocks {
    /// Checks the counters against the blocks that are held.
    pub(super) fn check(&self, held: &std::collections::HashSet<(BlockLocation, BlockLayer)>) {
        for layer in BlockLayer::all() {
            let state = self.layer(layer);
            let held: Vec<BlockLocation> = held
                .iter()
                .filter(|(_, held_layer)| *held_layer == layer)
                .map(|(location, _)| *location)
                .collect();
            assert_eq!(state.held, held.len() as u64, "{layer:?}");
            let Some(unconfirmed) = &state.unconfirmed else {
                continue;
            };
            let confirmed = held
                .iter()
                .filter_map(|location| unconfirmed.confirmed_in.get(&location_key(*location)));
            assert_eq!(
                confirmed.clone().count(),
                unconfirmed.confirmed_in.len(),
                "a confirmed block is not held"
            );
            assert_eq!(
                confirmed
                    .filter(|confirmed| **confirmed == unconfirmed.generation)
                    .count() as u64,
                unconfirmed.confirmed_count
            );
            assert!(state.stale_count() > 0, "no block is stale");
        }
    }
}

fn location_key(location: BlockLocation) -> u64 {
    u64::from(location.block.0) << 8 | u64::from(location.shard)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::ids::BlockId;

    fn location(block: u32) -> BlockLocation {
        BlockLocation {
            shard: 3,
            block: BlockId(block),
        }
    }

    #[test]
    fn stale_blocks_end_when_confirmed_or_removed() {
        let mut stale_blocks = StaleBlocks::default();
        stale_blocks.record_gap(1);
        assert!(!stale_blocks.has_stale(), "no block is held");
        stale_blocks.add_held(StorageTier::Device, 3);
        for generation in 2..1_000_000 {
            stale_blocks.record_gap(generation);
        }
        assert_eq!(stale_blocks.stale_count(), 3);
        assert!(
            stale_blocks.confirm(location(1), StorageTier::Device)
                && !stale_blocks.confirm(location(1), StorageTier::Device)
        );
        stale_blocks.remove_all([location(2)].into_iter(), StorageTier::Device.into());
        assert_eq!(stale_blocks.stale_count(), 1);
        stale_blocks.record_gap(1_000_000);
        assert_eq!(
            stale_blocks.stale_count(),
            2,
            "the block was confirmed before"
        );
        assert!(
            stale_blocks.confirm(location(1), StorageTier::Device)
                && stale_blocks.confirm(location(3), StorageTier::Device)
        );
        stale_blocks.close_confirmed();
        assert!(!stale_blocks.has_stale());
    }

    #[test]
    fn unconfirmed_blocks_are_purged_after_equal_evictions() {
        let mut stale_blocks = StaleBlocks::default();
        stale_blocks.add_held(StorageTier::Device, 10);
        stale_blocks.add_held(StorageTier::HostPinned, 10);
        stale_blocks.record_gap(1);
        for block in 0..4 {
            stale_blocks.confirm(location(block), StorageTier::Device);
        }
        for generation in 2..8 {
            assert_eq!(stale_blocks.purge_layers(20), LayerSet::NONE);
            stale_blocks.record_eviction(StorageTier::Device, 0);
            stale_blocks.record_gap(generation);
            stale_blocks.record_eviction(StorageTier::Device, generation);
        }
        assert_eq!(
            stale_blocks.purge_layers(20),
            LayerSet::of(StorageTier::Device),
            "six evictions for six unconfirmed blocks, and none in another tier"
        );
        assert_eq!(
            stale_blocks.purge_layers(200),
            LayerSet::NONE,
            "too few evictions for a purge"
        );
        assert_eq!(stale_blocks.horizon(StorageTier::Device), Some(1));
        assert!(
            stale_blocks.is_unconfirmed(location(4), StorageTier::Device)
                && !stale_blocks.is_unconfirmed(location(3), StorageTier::Device)
        );
        assert!(
            stale_blocks.is_unconfirmed(location(3), StorageTier::HostPinned),
            "another tier"
        );
        stale_blocks.remove_all((4..10).map(location), StorageTier::Device.into());
        stale_blocks.finish_purge(StorageTier::Device.into());
        assert_eq!(
            (stale_blocks.stale_count(), stale_blocks.purge_layers(20)),
            (4, LayerSet::NONE),
            "they were confirmed before the last gap"
        );
    }
}
