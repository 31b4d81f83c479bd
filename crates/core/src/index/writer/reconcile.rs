//! Reconciles a rank after events were lost: confirms its blocks, and purges the ones that must be
//! gone.

use super::clear::SWEEP_BATCH;
use super::{BlockLocation, MappedBlock, RankWriter};
use crate::block::{EngineHash, StorageTier};
use crate::index::layers::{BlockLayer, LayerSet};
use crate::index::trie::BlockTrie;

/// Result of a reconciliation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReconcileReport {
    /// Number of stale blocks on the device, and stale shares of cache groups.
    pub stale_blocks: u64,
    /// Whether the engine may hold blocks that were never reported.
    pub has_unreported: bool,
    /// Blocks that were purged.
    pub purged: Option<PurgedBlocks>,
}

/// Blocks that were not confirmed for so long that the engine must have evicted them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PurgedBlocks {
    /// By tier: the gap since which the blocks were not confirmed. The first gap is 1. It is 0 if
    /// the tier was not purged.
    pub before_gap: [u32; StorageTier::ALL.len()],
    /// Engine hashes and tiers of the blocks.
    pub blocks: Vec<(EngineHash, StorageTier)>,
}

impl RankWriter {
    /// Records that events were lost for good. The engine may have evicted and stored blocks in
    /// them. The blocks stay in the index. The next store of a block counts its copies from one
    /// again, because a lost removal would otherwise keep the block forever. Returns the number of
    /// gaps so far.
    pub fn record_gap(&mut self) -> u32 {
        let generation = self.shared.record_gap();
        self.copy_epochs.start_generation(generation);
        self.shared.stale.lock().record_gap(generation);
        self.unreported_evictions = Some(0);
        if let Some(groups) = &mut self.groups {
            groups.mark_unconfirmed();
        }
        self.copy_epochs.generation()
    }

    /// Returns whether any block is stale, so that a store could confirm it.
    pub(super) fn has_stale(&self) -> bool {
        self.copy_epochs.generation() > 0 && self.shared.stale.lock().has_stale()
    }

    /// Purges blocks that must be gone, and reports the stale ones.
    pub fn reconcile(&mut self) -> ReconcileReport {
        if self.copy_epochs.generation() == 0 {
            return ReconcileReport::default();
        }
        let purged = self.purge();
        // After as many evictions as it holds blocks, the engine has evicted all blocks that it
        // held at the gap and has not used since. Blocks in use are confirmed by the blocks that
        // follow them.
        let stale_blocks = self.shared.stale.lock();
        self.unreported_evictions = self
            .unreported_evictions
            .filter(|evicted| *evicted < stale_blocks.held_count(StorageTier::Device).max(1));
        ReconcileReport {
            stale_blocks: stale_blocks.stale_count(),
            has_unreported: self.unreported_evictions.is_some(),
            purged,
        }
    }

    /// Checks the counters of stale blocks against the blocks held.
    #[cfg(test)]
    pub(in crate::index) fn check_stale(&self) {
        let held = self.blocks.iter();
        let held = held.flat_map(|(_, mapped)| {
            mapped
                .layers
                .iter()
                .map(move |layer| (mapped.location, layer))
        });
        self.shared.stale.lock().check(&held.collect());
    }

    /// Returns whether the next reconciliation purges blocks, which takes time.
    pub fn is_purge_due(&self) -> bool {
        self.copy_epochs.generation() > 0 && !self.purge_layers().is_empty()
    }

    fn purge_layers(&self) -> LayerSet {
        self.shared
            .stale
            .lock()
            .purge_layers(self.blocks.len() as u64 + self.orphans.len() as u64)
    }

    fn purge(&mut self) -> Option<PurgedBlocks> {
        let due = self.purge_layers();
        if due.is_empty() {
            return None;
        }
        let mut purged = PurgedBlocks::default();
        for layer in due.iter() {
            match layer.tier() {
                Some(tier) => self.purge_tier(tier, &mut purged),
                None => self.purge_shares(layer),
            }
            self.shared.stale.lock().finish_purge(layer);
        }
        if let Some(groups) = &mut self.groups {
            // A hash that is stored again must not inherit old shares.
            groups.remove_unconfirmed_except(|engine| self.blocks.contains(engine));
        }
        (purged.before_gap != [0; StorageTier::ALL.len()]).then_some(purged)
    }

    fn purge_tier(&mut self, tier: StorageTier, purged: &mut PurgedBlocks) {
        let Some(before) = self.shared.stale.lock().horizon(tier) else {
            return;
        };
        let mut old = self.unconfirmed_hashes(tier.into());
        let waiting = self
            .orphans
            .iter()
            .filter(|(_, orphan)| orphan.tiers.has(tier) && orphan.generation < before);
        old.extend(waiting.map(|(engine, _)| engine));
        for batch in old.chunks(SWEEP_BATCH) {
            batch
                .iter()
                .for_each(|&engine| self.drop_extra_copies(engine, tier));
            self.remove(batch, tier);
        }
        purged.before_gap[tier as usize] = before;
        purged
            .blocks
            .extend(old.into_iter().map(|engine| (engine, tier)));
    }

    /// Returns the hashes whose blocks are not confirmed in a layer.
    fn unconfirmed_hashes(&self, layer: BlockLayer) -> Vec<EngineHash> {
        let stale_blocks = self.shared.stale.lock();
        let is_old = |mapped: &MappedBlock| {
            mapped.layers.has(layer) && stale_blocks.is_unconfirmed(mapped.location, layer)
        };
        let blocks = self.blocks.iter();
        blocks
            .filter_map(|(engine, mapped)| is_old(&mapped).then_some(engine))
            .collect()
    }

    /// Purges the shares of the cache groups with one reuse rule.
    fn purge_shares(&mut self, layer: BlockLayer) {
        let old = self.unconfirmed_hashes(layer);
        let (Some(groups), Some(rule)) = (&mut self.groups, layer.rule_number()) else {
            return;
        };
        old.iter()
            .for_each(|engine| groups.remove_unconfirmed(*engine, rule));
        old.chunks(SWEEP_BATCH)
            .for_each(|batch| self.update_group_layers(batch));
    }

    /// Counts evictions from a tier. `counted` contains the gaps after which the copies were last
    /// counted.
    pub(super) fn record_evictions(&mut self, tier: StorageTier, counted: &[u32]) {
        if counted.is_empty() {
            return;
        }
        if tier == StorageTier::Device {
            let since = counted
                .iter()
                .filter(|counted| **counted == self.copy_epochs.generation())
                .count() as u64;
            self.unreported_evictions = self.unreported_evictions.map(|evicted| evicted + since);
        }
        let mut stale_blocks = self.shared.stale.lock();
        counted
            .iter()
            .for_each(|counted| stale_blocks.record_eviction(tier, *counted));
    }

    /// Confirms blocks that were stored or reported as cached. A block on the device also confirms
    /// all blocks before it.
    pub(super) fn confirm(
        &self,
        confirmed: &[(BlockLocation, BlockLayer)],
        parent: Option<(&BlockTrie, BlockLocation)>,
    ) {
        let mut stale_blocks = self.shared.stale.lock();
        if !stale_blocks.has_stale() {
            return;
        }
        for &(location, layer) in confirmed {
            stale_blocks.confirm(location, layer);
        }
        let mut next = parent;
        while let Some((trie, location)) = next {
            if trie
                .layers_of(location.block, self.owner)
                .has(StorageTier::Device)
                && !stale_blocks.confirm(location, StorageTier::Device)
            {
                break;
            }
            next = trie
                .origin(location.block)
                .0
                .map(|block| (trie, BlockLocation { block, ..location }));
        }
        stale_blocks.close_confirmed();
    }
}
