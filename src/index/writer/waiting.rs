//! Blocks of lower tiers whose parent is not known yet. A lower tier keeps blocks longer than the device does and may
//! announce them when the device has long forgotten what they follow, so they are kept by name and get their place in the
//! trie when the parent gets one.

use std::collections::BTreeSet;

use crate::block::{EngineHash, LocalHash};
use crate::index::children::Mixed;
use crate::index::owners::Layers;

/// A block without a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Apart {
    pub(super) parent: EngineHash,
    pub(super) local: LocalHash,
    /// Tiers with at least one copy; never empty.
    pub(super) tiers: Layers,
    /// Tiers whose copies may be gone.
    pub(super) doubted: Layers,
    /// The generation in which that was so; after another gap all of them may be.
    pub(super) counted: u32,
}

impl Apart {
    pub(super) fn doubts(&self, generation: u32) -> Layers {
        if self.counted == generation {
            self.doubted
        } else {
            self.tiers
        }
    }
}

/// Most blocks without a place of one rank. Nobody is routed by them, so they may not take memory without end.
const MOST: usize = if cfg!(test) { 1 << 12 } else { 1 << 18 };

/// All blocks without a place of one rank.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    blocks: Mixed<EngineHash, Apart>,
    /// After the parent they wait for.
    children: BTreeSet<(EngineHash, EngineHash)>,
}

impl Waiting {
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.blocks.len() >= MOST
    }

    pub(super) fn get(&self, engine: EngineHash) -> Option<&Apart> {
        self.blocks.get(&engine)
    }

    pub(super) fn get_mut(&mut self, engine: EngineHash) -> Option<&mut Apart> {
        self.blocks.get_mut(&engine)
    }

    pub(super) fn insert(&mut self, engine: EngineHash, apart: Apart) {
        self.children.insert((apart.parent, engine));
        self.blocks.insert(engine, apart);
    }

    pub(super) fn take(&mut self, engine: EngineHash) -> Option<Apart> {
        let apart = self.blocks.remove(&engine)?;
        self.children.remove(&(apart.parent, engine));
        Some(apart)
    }

    /// Whether any block waits for a parent.
    pub(super) fn has_child(&self, parent: EngineHash) -> bool {
        self.child(parent).is_some()
    }

    /// One of the blocks that wait for a parent; it waits no longer.
    pub(super) fn take_child(&mut self, parent: EngineHash) -> Option<(EngineHash, Apart)> {
        let child = self.child(parent)?;
        Some((child, self.take(child)?))
    }

    fn child(&self, parent: EngineHash) -> Option<EngineHash> {
        let first = self.children.range((parent, EngineHash(0))..).next()?;
        (first.0 == parent).then_some(first.1)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (EngineHash, &Apart)> {
        self.blocks.iter().map(|(engine, apart)| (*engine, apart))
    }
}
