//! Who holds a run, and in which tiers: a sorted array of small words, a seat and eight bits each, four for tiers and four
//! for classes of cache groups. Runs are split until all their blocks have the same owners, so this is stored once per run
//! and not once per block.

use super::seats::Seat;
use crate::tier::Tier;

/// One thing that can be held of a block: a tier, or the share of a class of cache groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Layer(u8);

impl Layer {
    /// Classes of cache groups that a rank can have.
    pub(super) const CLASSES: usize = 4;

    pub(super) fn class(number: usize) -> Self {
        debug_assert!(number < Self::CLASSES, "a class too many");
        Self(Tier::ALL.len() as u8 + number as u8)
    }

    /// All layers there can be.
    pub(super) const COUNT: usize = Tier::ALL.len() + Self::CLASSES;

    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..Self::COUNT as u8).map(Self)
    }

    pub(super) fn at(self) -> usize {
        usize::from(self.0)
    }

    /// The number of the class, where it is one.
    pub(super) fn class_number(self) -> Option<usize> {
        self.at().checked_sub(Tier::ALL.len())
    }

    pub(super) fn tier(self) -> Option<Tier> {
        Tier::ALL.get(usize::from(self.0)).copied()
    }
}

impl From<Tier> for Layer {
    fn from(tier: Tier) -> Self {
        Self(tier as u8)
    }
}

/// A set of layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Layers(u8);

impl Layers {
    pub(super) const NONE: Layers = Layers(0);

    pub(super) fn one(layer: impl Into<Layer>) -> Self {
        Self(1 << layer.into().0)
    }

    pub(super) fn has(self, layer: impl Into<Layer>) -> bool {
        self.0 & Self::one(layer).0 != 0
    }

    pub(super) fn with(self, layer: impl Into<Layer>) -> Self {
        Self(self.0 | Self::one(layer).0)
    }

    pub(super) fn without(self, layer: impl Into<Layer>) -> Self {
        Self(self.0 & !Self::one(layer).0)
    }

    pub(super) fn and(self, other: Layers) -> Self {
        Self(self.0 | other.0)
    }

    pub(super) fn except(self, other: Layers) -> Self {
        Self(self.0 & !other.0)
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(super) fn iter(self) -> impl Iterator<Item = Layer> {
        Layer::all().filter(move |layer| self.has(*layer))
    }

    /// Only the tiers.
    pub(super) fn tiers(self) -> Self {
        Self(self.0 & 0b1111)
    }

    pub(super) fn iter_tiers(self) -> impl Iterator<Item = Tier> {
        self.iter().filter_map(Layer::tier)
    }

    /// The fastest tier that is not faster than `from`.
    pub(super) fn from(self, from: Tier) -> Option<Tier> {
        let open = self.0 & (0b1111 << from as u8);
        Tier::ALL.get(open.trailing_zeros() as usize).copied()
    }
}

/// The owners of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Owners(Vec<u32>);

impl Owners {
    pub(super) fn just(seat: Seat, layer: Layer) -> Self {
        Self(vec![pack(seat, Layers::one(layer))])
    }

    pub(super) fn is_just(&self, seat: Seat, layer: Layer) -> bool {
        self.0 == [pack(seat, Layers::one(layer))]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn layers(&self, seat: Seat) -> Layers {
        self.find(seat).map_or(Layers::NONE, |at| unpack(self.0[at]).1)
    }

    /// Replaces what a seat holds; nothing removes it.
    pub(super) fn set(&mut self, seat: Seat, layers: Layers) {
        match (self.find(seat), layers.is_empty()) {
            (Ok(at), true) => {
                self.0.remove(at);
            }
            (Ok(at), false) => self.0[at] = pack(seat, layers),
            (Err(_), true) => {}
            (Err(at), false) => self.0.insert(at, pack(seat, layers)),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Seat, Layers)> {
        self.0.iter().map(|&word| unpack(word))
    }

    fn find(&self, seat: Seat) -> Result<usize, usize> {
        self.0.binary_search_by_key(&seat, |&word| unpack(word).0)
    }
}

fn pack(seat: Seat, layers: Layers) -> u32 {
    seat.0 << 8 | u32::from(layers.0)
}

fn unpack(word: u32) -> (Seat, Layers) {
    (Seat(word >> 8), Layers((word & 0xff) as u8))
}
