//! What is certain of a rank after events of it were lost, and what is forgotten of the rest.

use super::clear::SWEEP;
use super::{Named, Place, RankWriter};
use crate::block::EngineHash;
use crate::index::owners::{Layer, Layers};
use crate::index::trie::Trie;
use crate::tier::Tier;

/// What has become of doubts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settled {
    /// Blocks on the device that may be gone, and shares of cache groups.
    pub doubted: u64,
    /// Whether the engine may hold blocks that were never told.
    pub untold: bool,
    /// What was taken for gone.
    pub forgotten: Option<Forgotten>,
}

/// Blocks that were not heard of for so long that they are gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// By tier: nothing was heard of them since this gap. The first is 1, and 0 where nothing was looked for.
    pub before: [u32; Tier::ALL.len()],
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

    /// Whether anything is doubted that a store could make certain.
    pub(super) fn has_doubts(&self) -> bool {
        self.generation > 0 && self.tally.doubts.lock().any()
    }

    /// Forgets what is gone, and says what may be.
    pub fn settle(&mut self) -> Settled {
        if self.generation == 0 {
            return Settled::default();
        }
        let forgotten = self.forget_old();
        // All that was there before and not used since has been evicted; what is used shows by what follows it.
        let doubts = self.tally.doubts.lock();
        self.untold = self
            .untold
            .filter(|evicted| *evicted < doubts.placed(Tier::Device).max(1));
        Settled {
            doubted: doubts.doubted(),
            untold: self.untold.is_some(),
            forgotten,
        }
    }

    /// Holds the counts of doubts against what is held.
    #[cfg(test)]
    pub(in crate::index) fn check_doubts(&self) {
        let held = self.names.iter();
        let held =
            held.flat_map(|(_, named)| named.layers.iter().map(move |layer| (named.place, layer)));
        self.tally.doubts.lock().check(&held.collect());
    }

    /// Whether there is so much to forget that it takes a while.
    pub fn is_due(&self) -> bool {
        self.generation > 0 && !self.due().is_empty()
    }

    fn due(&self) -> Layers {
        self.tally
            .doubts
            .lock()
            .due(self.names.len() as u64 + self.waiting.len() as u64)
    }

    fn forget_old(&mut self) -> Option<Forgotten> {
        let due = self.due();
        if due.is_empty() {
            return None;
        }
        let mut forgotten = Forgotten::default();
        for layer in due.iter() {
            match layer.tier() {
                Some(tier) => self.forget_tier(tier, &mut forgotten),
                None => self.forget_shares(layer),
            }
            self.tally.doubts.lock().forgotten(layer);
        }
        if let Some(groups) = &mut self.groups {
            // A name that is stored again inherits nothing of its earlier life.
            groups.forget_others(|engine| self.names.has(engine));
        }
        (forgotten.before != [0; Tier::ALL.len()]).then_some(forgotten)
    }

    fn forget_tier(&mut self, tier: Tier, forgotten: &mut Forgotten) {
        let doubts = self.tally.doubts.lock();
        let Some(before) = doubts.horizon(tier) else {
            return;
        };
        let is_old = |named: &Named| named.layers.has(tier) && doubts.is_old(named.place, tier);
        let mut old: Vec<_> = self
            .names
            .iter()
            .filter(|(_, named)| is_old(named))
            .map(|(engine, _)| engine)
            .collect();
        drop(doubts);
        let waiting = self
            .waiting
            .iter()
            .filter(|(_, apart)| apart.tiers.has(tier) && apart.counted < before);
        old.extend(waiting.map(|(engine, _)| engine));
        for some in old.chunks(SWEEP) {
            some.iter()
                .for_each(|&engine| self.forget_extra(engine, tier));
            self.remove(some, tier);
        }
        forgotten.before[tier as usize] = before;
        forgotten
            .names
            .extend(old.into_iter().map(|engine| (engine, tier)));
    }

    /// The same for what the cache groups of a class hold.
    fn forget_shares(&mut self, layer: Layer) {
        let (Some(groups), Some(class)) = (&mut self.groups, layer.class_number()) else {
            return;
        };
        let doubts = self.tally.doubts.lock();
        let is_old = |named: &Named| named.layers.has(layer) && doubts.is_old(named.place, layer);
        let old: Vec<_> = self
            .names
            .iter()
            .filter(|(_, named)| is_old(named))
            .map(|(engine, _)| engine)
            .collect();
        drop(doubts);
        old.iter().for_each(|engine| groups.forget(*engine, class));
        old.chunks(SWEEP).for_each(|some| self.regroup(some));
    }

    /// Blocks were evicted from a tier whose copies were last counted in these generations.
    pub(super) fn evicted(&mut self, tier: Tier, counted: &[u32]) {
        if counted.is_empty() {
            return;
        }
        if tier == Tier::Device {
            let since = counted
                .iter()
                .filter(|counted| **counted == self.generation)
                .count() as u64;
            self.untold = self.untold.map(|evicted| evicted + since);
        }
        let mut doubts = self.tally.doubts.lock();
        counted
            .iter()
            .for_each(|counted| doubts.evicted(tier, *counted));
    }

    /// Contents were stored, or are there for another reason. Whoever follows a block on the device is only there together
    /// with it, and with all before it.
    pub(super) fn hear(&self, sure: &[(Place, Layer)], parent: Option<(&Trie, Place)>) {
        let mut doubts = self.tally.doubts.lock();
        if !doubts.any() {
            return;
        }
        for &(place, layer) in sure {
            doubts.hear(place, layer);
        }
        let mut next = parent;
        while let Some((trie, place)) = next {
            if trie.layers(place.block, self.seat).has(Tier::Device)
                && !doubts.hear(place, Tier::Device)
            {
                break;
            }
            next = trie
                .origin(place.block)
                .0
                .map(|block| (trie, Place { block, ..place }));
        }
        doubts.close();
    }
}
