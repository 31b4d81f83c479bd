//! Blocks of lower tiers whose parent is not known yet. A lower tier keeps blocks longer than the device does and may
//! announce them when the device has long forgotten what they follow, so they are kept by name and get their place in the
//! trie when the parent gets one.

use std::collections::HashMap;

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
}

/// All blocks without a place of one rank.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    blocks: Mixed<EngineHash, Apart>,
    /// By the parent they wait for.
    children: HashMap<EngineHash, Vec<EngineHash>>,
}

impl Waiting {
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn get_mut(&mut self, engine: EngineHash) -> Option<&mut Apart> {
        self.blocks.get_mut(&engine)
    }

    pub(super) fn insert(&mut self, engine: EngineHash, apart: Apart) {
        self.children.entry(apart.parent).or_default().push(engine);
        self.blocks.insert(engine, apart);
    }

    pub(super) fn take(&mut self, engine: EngineHash) -> Option<Apart> {
        let apart = self.blocks.remove(&engine)?;
        if let Some(children) = self.children.get_mut(&apart.parent) {
            children.retain(|child| *child != engine);
            if children.is_empty() {
                self.children.remove(&apart.parent);
            }
        }
        Some(apart)
    }

    /// The blocks that wait for a parent; they wait no longer.
    pub(super) fn take_children(&mut self, parent: EngineHash) -> Vec<(EngineHash, Apart)> {
        let children = self.children.remove(&parent).unwrap_or_default();
        children.into_iter().filter_map(|child| Some((child, self.blocks.remove(&child)?))).collect()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (EngineHash, &Apart)> {
        self.blocks.iter().map(|(engine, apart)| (*engine, apart))
    }

    pub(super) fn doubt(&mut self) {
        for apart in self.blocks.values_mut() {
            apart.doubted = apart.tiers;
        }
    }
}
