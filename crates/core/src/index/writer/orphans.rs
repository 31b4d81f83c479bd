//! Orphans: blocks of lower tiers whose parent is unknown.
//!
//! A lower tier keeps blocks longer than the device, and may report them when the device has
//! evicted their parents. Orphans are stored by hash, and get a location in the trie when the
//! parent gets one.

use std::collections::BTreeSet;

use crate::block::{EngineHash, LocalHash};
use crate::index::children::U64HashMap;
use crate::index::layers::LayerSet;
use crate::index::sizes::MAX_ORPHANS;

/// Block without a location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OrphanBlock {
    pub(super) parent: EngineHash,
    pub(super) local: LocalHash,
    /// Tiers with at least one copy. Never empty.
    pub(super) tiers: LayerSet,
    /// Tiers whose copies are stale.
    pub(super) stale: LayerSet,
    /// Gap for which `stale` is valid. After a later gap, all tiers are stale.
    pub(super) generation: u32,
}

impl OrphanBlock {
    pub(super) fn stale_tiers(&self, generation: u32) -> LayerSet {
        if self.generation == generation {
            self.stale
        } else {
            self.tiers
        }
    }
}

/// All orphans of one rank.
#[derive(Debug, Default)]
pub(super) struct OrphanBlocks {
    blocks: U64HashMap<EngineHash, OrphanBlock>,
    /// Pairs of parent and orphan.
    children: BTreeSet<(EngineHash, EngineHash)>,
}

impl OrphanBlocks {
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.blocks.len() >= MAX_ORPHANS
    }

    pub(super) fn get(&self, engine: EngineHash) -> Option<&OrphanBlock> {
        self.blocks.get(&engine)
    }

    pub(super) fn get_mut(&mut self, engine: EngineHash) -> Option<&mut OrphanBlock> {
        self.blocks.get_mut(&engine)
    }

    pub(super) fn insert(&mut self, engine: EngineHash, orphan: OrphanBlock) {
        self.children.insert((orphan.parent, engine));
        self.blocks.insert(engine, orphan);
    }

    pub(super) fn take(&mut self, engine: EngineHash) -> Option<OrphanBlock> {
        let orphan = self.blocks.remove(&engine)?;
        self.children.remove(&(orphan.parent, engine));
        Some(orphan)
    }

    /// Returns whether a parent has orphans.
    pub(super) fn has_child(&self, parent: EngineHash) -> bool {
        self.child(parent).is_some()
    }

    /// Removes and returns one orphan of a parent.
    pub(super) fn take_child(&mut self, parent: EngineHash) -> Option<(EngineHash, OrphanBlock)> {
        let child = self.child(parent)?;
        Some((child, self.take(child)?))
    }

    fn child(&self, parent: EngineHash) -> Option<EngineHash> {
        let first = self.children.range((parent, EngineHash(0))..).next()?;
        (first.0 == parent).then_some(first.1)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (EngineHash, &OrphanBlock)> {
        self.blocks.iter().map(|(engine, orphan)| (*engine, orphan))
    }
}
