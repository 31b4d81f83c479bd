//! Gaps at which the copies of engine hashes were last counted.
//!
//! Lost events may have contained removals, so the copies of all hashes not stored since are stale.
//! Most sources never lose events, so nothing is stored until the first gap.

use crate::block::{EngineHash, StorageTier};
use crate::index::children::U64HashMap;
use crate::index::layers::LayerSet;

/// State of the copies of one hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CopyEpoch {
    /// Tiers whose copies are stale.
    pub(super) stale: LayerSet,
    /// Gap for which `stale` is valid. After a later gap, all tiers are stale.
    pub(super) generation: u32,
}

/// Epochs of all engine hashes of a writer.
#[derive(Debug, Default)]
pub(super) struct CopyEpochs {
    /// Contains hashes stored since the first gap.
    by_hash: U64HashMap<EngineHash, CopyEpoch>,
    /// Number of gaps in the event stream.
    generation: u32,
}

impl CopyEpochs {
    /// Returns the number of gaps in the event stream.
    pub(super) fn generation(&self) -> u32 {
        self.generation
    }

    /// Records a gap. From now on, the copies of all hashes are stale.
    pub(super) fn start_generation(&mut self, generation: u32) {
        self.generation = generation;
    }

    /// Removes the epochs of all hashes. The generation continues.
    pub(super) fn clear(&mut self) {
        self.by_hash = U64HashMap::default();
    }

    fn get(&self, engine: EngineHash) -> CopyEpoch {
        if self.generation == 0 {
            CopyEpoch::default()
        } else {
            self.by_hash.get(&engine).copied().unwrap_or_default()
        }
    }

    /// Returns the tiers of a hash whose copies are stale.
    pub(super) fn stale_tiers(&self, engine: EngineHash, layers: LayerSet) -> LayerSet {
        let epoch = self.get(engine);
        if epoch.generation == self.generation {
            epoch.stale
        } else {
            layers.tiers()
        }
    }

    /// Marks the copies of a hash as counted, except in the stale tiers.
    pub(super) fn set_counted_now(&mut self, engine: EngineHash, stale_layers: LayerSet) {
        self.set(
            engine,
            CopyEpoch {
                stale: stale_layers,
                generation: self.generation,
            },
        );
    }

    /// Sets the epoch of a hash.
    pub(super) fn set(&mut self, engine: EngineHash, epoch: CopyEpoch) {
        if epoch != CopyEpoch::default() {
            self.by_hash.insert(engine, epoch);
        } else if !self.by_hash.is_empty() {
            self.by_hash.remove(&engine);
        }
    }

    /// Returns the gap after which the copies of an evicted block were counted, or 0 if they were
    /// stale.
    pub(super) fn epoch_at_eviction(&mut self, engine: EngineHash, tier: StorageTier) -> u32 {
        let Some(epoch) = self.by_hash.get_mut(&engine) else {
            return 0;
        };
        let counted_in = if epoch.stale.has(tier) {
            0
        } else {
            epoch.generation
        };
        epoch.stale = epoch.stale.without(tier);
        counted_in
    }

    /// Removes the epoch of a hash.
    pub(super) fn remove(&mut self, engine: EngineHash) {
        if !self.by_hash.is_empty() {
            self.by_hash.remove(&engine);
        }
    }
}
