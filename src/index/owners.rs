//! Who holds a run, and in which tiers: a sorted array of small words, a seat and eight bits each, four for tiers and four
//! for classes of cache groups; where very many hold it, a bit for each that has it on the device alone. Runs are split until all their blocks have the same owners, so this is stored once per run
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

/// From so many owners on, bits; and below so many a list again.
const MANY: usize = if cfg!(test) { 2 } else { 32 };
const FEW: usize = if cfg!(test) { 2 } else { 16 };

/// The owners of a run. A run that decoding fills has one, a shared system prompt has nearly all there are.
#[derive(Clone, Debug)]
pub(super) enum Owners {
    /// Exactly one.
    One(u32),
    /// In the order of the seats.
    List(Vec<u32>),
    /// Very many.
    Dense(Box<Dense>),
}

/// Owners by a bit each, and those that hold something else than the blocks on the device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Dense {
    /// Those that hold the blocks on the device and nothing more. The last word is never zero.
    device: Vec<u64>,
    count: usize,
    others: Vec<u32>,
}

impl Default for Owners {
    fn default() -> Self {
        Self::List(Vec::new())
    }
}

impl PartialEq for Owners {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Dense(one), Self::Dense(two)) => one == two,
            (Self::Dense(dense), _) => dense.is_same(other.words()),
            (_, Self::Dense(dense)) => dense.is_same(self.words()),
            _ => self.words() == other.words(),
        }
    }
}

impl Owners {
    pub(super) fn just(seat: Seat, layer: Layer) -> Self {
        Self::One(pack(seat, Layers::one(layer)))
    }

    pub(super) fn is_just(&self, seat: Seat, layer: Layer) -> bool {
        matches!(self, Self::One(word) if *word == pack(seat, Layers::one(layer)))
    }

    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Self::List(list) if list.is_empty())
    }

    pub(super) fn layers(&self, seat: Seat) -> Layers {
        match self {
            Self::Dense(dense) => dense.layers(seat),
            _ => layers_in(self.words(), seat),
        }
    }

    /// Replaces what a seat holds; nothing removes it.
    pub(super) fn set(&mut self, seat: Seat, layers: Layers) {
        match self {
            Self::One(word) if unpack(*word).0 != seat => {
                let mut list = vec![*word];
                set_in(&mut list, seat, layers);
                *self = Self::of(list);
            }
            Self::One(_) if layers.is_empty() => *self = Self::default(),
            Self::One(word) => *word = pack(seat, layers),
            Self::List(list) => {
                set_in(list, seat, layers);
                // Only now and then: to look at all takes long.
                let dense = Some(list.len()).filter(|len| *len >= MANY && len.is_power_of_two());
                if let Some(dense) = dense.and_then(|_| Dense::of(list)) {
                    *self = Self::Dense(Box::new(dense));
                } else if list.len() < 2 {
                    *self = Self::of(std::mem::take(list));
                }
            }
            Self::Dense(dense) => {
                dense.set(seat, layers);
                if !dense.is_worth_it(FEW) {
                    *self = Self::of(dense.list());
                }
            }
        }
    }

    /// The words of few owners.
    pub(super) fn words(&self) -> &[u32] {
        match self {
            Self::One(word) => std::slice::from_ref(word),
            Self::List(list) => list,
            Self::Dense(dense) => &dense.others,
        }
    }

    /// The bits of many.
    pub(super) fn bits(&self) -> Option<&[u64]> {
        match self {
            Self::Dense(dense) => Some(&dense.device),
            _ => None,
        }
    }

    fn of(list: Vec<u32>) -> Self {
        match list[..] {
            [word] => Self::One(word),
            _ => Self::List(list),
        }
    }
}

impl Dense {
    /// Owners by bits, where most are alike and the seats lie close together.
    fn of(list: &[u32]) -> Option<Self> {
        let mut dense = Self::default();
        let last = list.last().map(|word| unpack(*word).0)?;
        if last.at() / 64 > list.len() {
            return None;
        }
        list.iter()
            .map(|word| unpack(*word))
            .for_each(|(seat, layers)| dense.set(seat, layers));
        dense.is_worth_it(MANY).then_some(dense)
    }

    fn is_worth_it(&self, least: usize) -> bool {
        self.count >= least
            && self.others.len() <= self.count
            && self.device.len() <= 2 * self.count
    }

    fn list(&self) -> Vec<u32> {
        let mut list: Vec<_> = seats_in(&self.device)
            .map(|seat| pack(seat, DEVICE))
            .collect();
        list.extend(&self.others);
        list.sort_unstable();
        list
    }

    fn has(&self, seat: Seat) -> bool {
        self.device
            .get(seat.at() / 64)
            .is_some_and(|bits| bits & (1 << (seat.at() % 64)) != 0)
    }

    fn layers(&self, seat: Seat) -> Layers {
        if self.has(seat) {
            DEVICE
        } else {
            layers_in(&self.others, seat)
        }
    }

    fn set(&mut self, seat: Seat, layers: Layers) {
        let (at, bit) = (seat.at() / 64, 1 << (seat.at() % 64));
        if self.has(seat) {
            self.device[at] &= !bit;
            self.count -= 1;
        }
        if layers == DEVICE {
            self.device.resize(self.device.len().max(at + 1), 0);
            self.device[at] |= bit;
            self.count += 1;
        }
        while self.device.pop_if(|bits| *bits == 0).is_some() {}
        set_in(
            &mut self.others,
            seat,
            if layers == DEVICE {
                Layers::NONE
            } else {
                layers
            },
        );
    }

    fn is_same(&self, words: &[u32]) -> bool {
        words.len() == self.count + self.others.len()
            && words
                .iter()
                .map(|word| unpack(*word))
                .all(|(seat, layers)| self.layers(seat) == layers)
    }
}

/// What most owners hold.
const DEVICE: Layers = Layers(1 << Tier::Device as u8);

/// The seats whose bits are set.
pub(super) fn seats_in(bits: &[u64]) -> impl Iterator<Item = Seat> {
    bits.iter()
        .enumerate()
        .flat_map(|(at, &bits)| ones(bits).map(move |bit| Seat(at as u32 * 64 + bit)))
}

/// The places of the bits that are set.
pub(super) fn ones(bits: u64) -> impl Iterator<Item = u32> {
    let mut left = bits;
    std::iter::from_fn(move || {
        let bit = (left != 0).then(|| left.trailing_zeros())?;
        left &= left - 1;
        Some(bit)
    })
}

fn find(words: &[u32], seat: Seat) -> Result<usize, usize> {
    words.binary_search_by_key(&seat, |&word| unpack(word).0)
}

fn layers_in(words: &[u32], seat: Seat) -> Layers {
    find(words, seat).map_or(Layers::NONE, |at| unpack(words[at]).1)
}

fn set_in(words: &mut Vec<u32>, seat: Seat, layers: Layers) {
    match (find(words, seat), layers.is_empty()) {
        (Ok(at), true) => {
            words.remove(at);
        }
        (Ok(at), false) => words[at] = pack(seat, layers),
        (Err(_), true) => {}
        (Err(at), false) => words.insert(at, pack(seat, layers)),
    }
}

fn pack(seat: Seat, layers: Layers) -> u32 {
    seat.0 << 8 | u32::from(layers.0)
}

pub(super) fn unpack(word: u32) -> (Seat, Layers) {
    (Seat(word >> 8), Layers((word & 0xff) as u8))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn owners_are_the_same_whatever_they_are_kept_in(
            sets in proptest::collection::vec((0..200u32, 0..4u8), 0..80),
            others in proptest::collection::vec((0..200u32, 0..4u8), 0..10),
        ) {
            let (mut owners, mut model) = (Owners::default(), BTreeMap::new());
            for (seat, layers) in sets.iter().chain(&others) {
                let (seat, layers) = (Seat(*seat), Layers(*layers));
                owners.set(seat, layers);
                model.insert(seat, layers);
                model.retain(|_, layers| !layers.is_empty());
                prop_assert_eq!(owners.is_empty(), model.is_empty());
                for seat in (0..200).map(Seat) {
                    prop_assert_eq!(owners.layers(seat), model.get(&seat).copied().unwrap_or_default());
                }
                // The same, grown in another order.
                let mut again = Owners::default();
                model.iter().rev().for_each(|(seat, layers)| again.set(*seat, *layers));
                prop_assert_eq!(&again, &owners);
                prop_assert_eq!(&owners, &again);
                again.set(Seat(77), Layers(4));
                prop_assert_ne!(&again, &owners);
                prop_assert_ne!(&owners, &again);
            }
        }
    }
}
