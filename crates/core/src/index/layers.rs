//! Layers of a block: its tiers, and the shares of its cache groups.

use serde::{Deserialize, Serialize};

use crate::block::StorageTier;

/// Part of a block that can be held: the block in a tier, or the share of the cache groups with one
/// reuse rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct BlockLayer(u8);

impl BlockLayer {
    /// Maximum number of reuse rules per rank.
    pub(super) const MAX_RULES: usize = 4;

    pub(super) fn rule(number: usize) -> Self {
        debug_assert!(number < Self::MAX_RULES, "too many reuse rules");
        Self(StorageTier::ALL.len() as u8 + number as u8)
    }

    /// Number of layers.
    pub(super) const COUNT: usize = StorageTier::ALL.len() + Self::MAX_RULES;

    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..Self::COUNT as u8).map(Self)
    }

    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }

    /// Returns the number of the reuse rule if the layer is one.
    pub(super) fn rule_number(self) -> Option<usize> {
        self.index().checked_sub(StorageTier::ALL.len())
    }

    pub(super) fn tier(self) -> Option<StorageTier> {
        StorageTier::ALL.get(usize::from(self.0)).copied()
    }
}

impl From<StorageTier> for BlockLayer {
    fn from(tier: StorageTier) -> Self {
        Self(tier as u8)
    }
}

/// Set of layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LayerSet(u8);

impl LayerSet {
    pub(super) const NONE: LayerSet = LayerSet(0);

    /// Layers that most owners hold: only the device.
    pub(super) const DEVICE: LayerSet = LayerSet(1 << StorageTier::Device as u8);

    /// Returns one bit per layer.
    pub(super) fn bits(self) -> u8 {
        self.0
    }

    pub(super) fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    pub(super) fn of(layer: impl Into<BlockLayer>) -> Self {
        Self(1 << layer.into().0)
    }

    pub(super) fn has(self, layer: impl Into<BlockLayer>) -> bool {
        self.0 & Self::of(layer).0 != 0
    }

    pub(super) fn with(self, layer: impl Into<BlockLayer>) -> Self {
        Self(self.0 | Self::of(layer).0)
    }

    pub(super) fn without(self, layer: impl Into<BlockLayer>) -> Self {
        Self(self.0 & !Self::of(layer).0)
    }

    pub(super) fn union(self, other: LayerSet) -> Self {
        Self(self.0 | other.0)
    }

    pub(super) fn intersection(self, other: LayerSet) -> Self {
        Self(self.0 & other.0)
    }

    pub(super) fn difference(self, other: LayerSet) -> Self {
        Self(self.0 & !other.0)
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(super) fn iter(self) -> impl Iterator<Item = BlockLayer> {
        BlockLayer::all().filter(move |layer| self.has(*layer))
    }

    /// Returns the tiers in the set.
    pub(super) fn tiers(self) -> Self {
        Self(self.0 & 0b1111)
    }

    pub(super) fn iter_tiers(self) -> impl Iterator<Item = StorageTier> {
        self.iter().filter_map(BlockLayer::tier)
    }

    /// Returns the fastest tier in the set that is not faster than `from`.
    pub(super) fn fastest_from(self, from: StorageTier) -> Option<StorageTier> {
        let open = self.0 & (0b1111 << from as u8);
        StorageTier::ALL
            .get(open.trailing_zeros() as usize)
            .copied()
    }
}
