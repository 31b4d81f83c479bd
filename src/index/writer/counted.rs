//! When the copies of a name were last counted: after events were lost, a removal may have been among them, so the copies of
//! all names may be gone that were not stored since. Most sources never lose any, so nothing is kept until one does.

use super::RankWriter;
use crate::block::EngineHash;
use crate::index::owners::Layers;
use crate::tier::Tier;

/// When copies were counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    /// Tiers whose copies may be gone: events were lost since they were counted.
    pub(super) doubted: Layers,
    /// The generation in which that was so; after another gap all of them may be.
    pub(super) since: u32,
}

impl RankWriter {
    fn counted(&self, engine: EngineHash) -> Counted {
        if self.generation == 0 {
            Counted::default()
        } else {
            self.counts.get(&engine).copied().unwrap_or_default()
        }
    }

    /// The tiers among those a name has copies in whose copies may be gone.
    pub(super) fn doubts(&self, engine: EngineHash, layers: Layers) -> Layers {
        let counted = self.counted(engine);
        if counted.since == self.generation {
            counted.doubted
        } else {
            layers.tiers()
        }
    }

    /// The copies of a name are counted now, but for those in some tiers.
    pub(super) fn count_now(&mut self, engine: EngineHash, doubted: Layers) {
        self.set_counted(
            engine,
            Counted {
                doubted,
                since: self.generation,
            },
        );
    }

    pub(super) fn set_counted(&mut self, engine: EngineHash, counted: Counted) {
        if counted != Counted::default() {
            self.counts.insert(engine, counted);
        } else if !self.counts.is_empty() {
            self.counts.remove(&engine);
        }
    }

    /// The generation for which the eviction of a block counts, which is none where its copies may have been gone before.
    pub(super) fn counted_when_evicted(&mut self, engine: EngineHash, tier: Tier) -> u32 {
        let Some(counted) = self.counts.get_mut(&engine) else {
            return 0;
        };
        let was = if counted.doubted.has(tier) {
            0
        } else {
            counted.since
        };
        counted.doubted = counted.doubted.without(tier);
        was
    }

    /// A name is gone.
    pub(super) fn uncount(&mut self, engine: EngineHash) {
        if !self.counts.is_empty() {
            self.counts.remove(&engine);
        }
    }
}
