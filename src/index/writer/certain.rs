//! What is certain of a rank after events of it were lost, and what is forgotten of the rest.

use super::clear::SWEEP;
use super::{Place, RankWriter};
use crate::block::EngineHash;
use crate::index::trie::Trie;
use crate::tier::Tier;

/// What has become of doubts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settled {
    /// Blocks that may be gone.
    pub doubted: u64,
    /// Whether the engine may hold blocks that were never told.
    pub untold: bool,
    /// What was taken for gone.
    pub forgotten: Option<Forgotten>,
}

/// Blocks that were not heard of for so long that they are gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// Nothing was heard of them since this gap; the first is 1.
    pub before: u32,
    /// By name, and where they lay.
    pub names: Vec<(EngineHash, Tier)>,
}

impl RankWriter {
    /// Events were lost for good, so blocks may have gone unnoticed, and others come. They stay, but the next time the
    /// engine stores one, its copies are counted from one again: otherwise a removal that was lost would keep it for ever.
    /// Says how often that was so.
    pub fn doubt(&mut self) -> u32 {
        self.generation = self.tally.note_gap();
        self.tally.doubts.lock().gap(self.generation);
        self.untold = Some(0);
        if let Some(groups) = &mut self.groups {
            groups.doubt();
        }
        self.generation
    }

    /// Forgets what is gone, and says what may be.
    pub fn settle(&mut self) -> Settled {
        if self.generation == 0 {
            return Settled::default();
        }
        let forgotten = self.forget_old();
        // All that was there before and not used since has been evicted; what is used shows by what follows it.
        self.untold = self.untold.filter(|evicted| *evicted < (self.held.len() as u64).max(1));
        Settled { doubted: self.tally.doubts.lock().doubted(), untold: self.untold.is_some(), forgotten }
    }

    /// Holds the counts of doubts against what is held.
    #[cfg(test)]
    pub(in crate::index) fn check_doubts(&self) {
        let held = self.held.values().flat_map(|named| named.layers.iter_tiers().map(|tier| (named.place, tier)));
        self.tally.doubts.lock().check(&held.collect());
    }

    fn forget_old(&mut self) -> Option<Forgotten> {
        let doubts = self.tally.doubts.lock();
        let before = doubts.due()?;
        let mut names = Vec::new();
        for (&engine, named) in &self.held {
            let old = named.layers.iter_tiers().filter(|tier| doubts.is_old(named.place, *tier));
            names.extend(old.map(|tier| (engine, tier)));
        }
        drop(doubts);
        for (engine, apart) in self.waiting.iter().filter(|(_, apart)| apart.counted < before) {
            names.extend(apart.tiers.iter_tiers().map(|tier| (engine, tier)));
        }
        for tier in Tier::ALL {
            let old: Vec<_> = names.iter().filter(|(_, of)| *of == tier).map(|(engine, _)| *engine).collect();
            for some in old.chunks(SWEEP) {
                some.iter().for_each(|&engine| self.forget_extra(engine, tier));
                self.remove(some, tier);
            }
        }
        self.tally.doubts.lock().forgotten();
        Some(Forgotten { before, names })
    }

    /// Blocks were evicted whose copies were last counted in these generations.
    pub(super) fn evicted(&mut self, counted: &[u32]) {
        if counted.is_empty() {
            return;
        }
        let since = counted.iter().filter(|counted| **counted == self.generation).count() as u64;
        self.untold = self.untold.map(|evicted| evicted + since);
        let mut doubts = self.tally.doubts.lock();
        counted.iter().for_each(|counted| doubts.evicted(*counted));
    }

    /// Blocks were stored here, or are there for another reason. Whoever follows a block on the device is only there
    /// together with it, and with all before it.
    pub(super) fn hear(&self, trie: &Trie, sure: &[(Place, Tier)], parent: Option<Place>) {
        let mut doubts = self.tally.doubts.lock();
        if !doubts.any() {
            return;
        }
        for &(place, tier) in sure {
            doubts.hear(place, tier);
        }
        let mut next = parent;
        while let Some(place) = next {
            if trie.layers(place.block, self.seat).has(Tier::Device) && !doubts.hear(place, Tier::Device) {
                break;
            }
            next = trie.origin(place.block).0.map(|block| Place { block, ..place });
        }
        doubts.close();
    }
}
