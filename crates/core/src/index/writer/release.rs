//! Updates the tries from the layers of engine hashes. A block is held as long as any of its hashes
//! holds it.

use super::{BlockLocation, EventBuffers, RankWriter};
use crate::index::ids::BlockId;
use crate::index::layers::{BlockLayer, LayerSet};
use crate::index::trie::{BlockTrie, LayerHold};

impl RankWriter {
    /// Adds the gained layers of one shard.
    pub(super) fn apply_gained(
        &mut self,
        trie: &mut BlockTrie,
        shard: usize,
        scratch: &mut EventBuffers,
    ) {
        for layer in layers_in(&scratch.gained) {
            let mut locations = Vec::new();
            scratch.gained.retain(|&(location, gained_layer)| {
                let is_match = gained_layer == layer && usize::from(location.shard) == shard;
                locations.extend(is_match.then_some(location));
                !is_match
            });
            locations.sort_unstable_by_key(|location| trie.position_of(location.block));
            scratch.granted.clear();
            for location in locations {
                // Two hashes may have gained the same block.
                let held = scratch.granted.last() == Some(&location.block);
                if held || trie.layers_of(location.block, self.owner).has(layer) {
                    *self.aliases.entry((location, layer)).or_insert(0) += 1;
                } else {
                    scratch.granted.push(location.block);
                }
            }
            self.count_layer(layer, scratch.granted.len() as i64);
            trie.set_hold_all(&scratch.granted, LayerHold::new(self.owner, layer), true);
        }
    }

    /// Adds the gained layers of all shards. The caller holds no lock.
    pub(super) fn apply_all_gained(&mut self, scratch: &mut EventBuffers) {
        let index = self.index.clone();
        while let Some(&(location, _)) = scratch.gained.first() {
            let shard = usize::from(location.shard);
            let mut trie = index.shards[shard].write();
            self.apply_gained(&mut trie, shard, scratch);
        }
    }

    /// Adds one layer of a block.
    pub(super) fn add_layer(
        &mut self,
        trie: &mut BlockTrie,
        location: BlockLocation,
        layer: BlockLayer,
    ) {
        if trie.layers_of(location.block, self.owner).has(layer) {
            *self.aliases.entry((location, layer)).or_insert(0) += 1;
        } else {
            trie.set_hold(location.block, 1, LayerHold::new(self.owner, layer), true);
            self.count_layer(layer, 1);
        }
    }

    /// Removes the lost layers of one shard.
    pub(super) fn apply_lost(
        &mut self,
        trie: &mut BlockTrie,
        shard: usize,
        scratch: &mut EventBuffers,
    ) {
        for layer in layers_in(&scratch.lost) {
            self.collect_lost(shard, layer, scratch);
            self.release_blocks(trie, shard, layer, &scratch.granted);
        }
    }

    /// Removes the lost layers of all shards. The caller holds no lock.
    pub(super) fn apply_all_lost(&mut self, scratch: &mut EventBuffers) {
        let index = self.index.clone();
        while let Some(&(location, layer)) = scratch.lost.first() {
            let shard = usize::from(location.shard);
            // Most events concern one layer.
            self.collect_lost(shard, layer, scratch);
            let mut trie = index.shards[shard].write();
            self.release_blocks(&mut trie, shard, layer, &scratch.granted);
            self.apply_lost(&mut trie, shard, scratch);
        }
    }

    /// Collects the lost blocks of one layer and shard that no other hash holds.
    fn collect_lost(&mut self, shard: usize, layer: BlockLayer, scratch: &mut EventBuffers) {
        let EventBuffers {
            lost,
            granted: released,
            ..
        } = scratch;
        released.clear();
        lost.retain(|&(location, lost_layer)| {
            let is_match = lost_layer == layer && usize::from(location.shard) == shard;
            if is_match && (self.aliases.is_empty() || !self.release_alias(location, layer)) {
                released.push(location.block);
            }
            !is_match
        });
        let breaks = released
            .windows(2)
            .filter(|pair| pair[0].0.abs_diff(pair[1].0) != 1)
            .count();
        if breaks > released.len() / 4 {
            released.sort_unstable();
        }
        if let Some(tier) = layer.tier() {
            self.shared.add_blocks(tier, -(released.len() as i64));
        }
    }

    fn release_blocks(
        &self,
        trie: &mut BlockTrie,
        shard: usize,
        layer: BlockLayer,
        released: &[BlockId],
    ) {
        // Under the lock of the trie: `confirm_cached` checks there whether the block is held.
        self.shared.stale.lock().remove_all(
            released
                .iter()
                .map(|&block| BlockLocation::new(shard, block)),
            layer,
        );
        trie.release(released, LayerHold::new(self.owner, layer));
    }

    /// Removes one hash of a block. Returns whether another one is left.
    fn release_alias(&mut self, location: BlockLocation, layer: BlockLayer) -> bool {
        let Some(others) = self.aliases.get_mut(&(location, layer)) else {
            return false;
        };
        *others -= 1;
        if *others == 0 {
            self.aliases.remove(&(location, layer));
        }
        true
    }

    pub(super) fn count_layer(&self, layer: BlockLayer, by: i64) {
        if let Some(tier) = layer.tier() {
            self.shared.add_blocks(tier, by);
        }
        if let Ok(count) = u64::try_from(by) {
            self.shared.stale.lock().add_held(layer, count);
        }
    }
}

/// Returns the layers in a list.
fn layers_in(list: &[(BlockLocation, BlockLayer)]) -> impl Iterator<Item = BlockLayer> + use<> {
    list.iter()
        .fold(LayerSet::NONE, |layers, (_, layer)| layers.with(*layer))
        .iter()
}
