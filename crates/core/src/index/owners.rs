//! Owners of a run and the layers they hold.
//!
//! A set is a sorted array of words. Each word contains an owner id and eight bits: four for tiers
//! and four for reuse rules of cache groups. If very many owners hold a run, those that hold it
//! only on the device are stored as one bit each. Runs are split until all their blocks have the
//! same owners, so a set is stored per run and not per block.

use super::ids::OwnerId;
use super::layers::{BlockLayer, LayerSet};
use super::sizes::DENSE_THRESHOLD;
use super::sizes::SPARSE_THRESHOLD;

/// Owners of a run. A run written by decoding has one owner, and a shared system prompt has nearly
/// all.
#[derive(Clone, Debug)]
pub(super) enum OwnerSet {
    /// Exactly one owner.
    One(u32),
    /// Owners, sorted by id.
    List(Vec<u32>),
    /// Very many owners.
    Dense(Box<DenseOwners>),
}

/// Owners with one bit each, and those that hold other layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DenseOwners {
    /// Owners that hold exactly the device layer. The last word is never zero.
    device: Vec<u64>,
    count: usize,
    others: Vec<u32>,
}

impl Default for OwnerSet {
    fn default() -> Self {
        Self::List(Vec::new())
    }
}

impl PartialEq for OwnerSet {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Dense(one), Self::Dense(two)) => one == two,
            (Self::Dense(dense), _) => dense.equals_words(other.words()),
            (_, Self::Dense(dense)) => dense.equals_words(self.words()),
            _ => self.words() == other.words(),
        }
    }
}

impl OwnerSet {
    pub(super) fn single(owner: OwnerId, layer: BlockLayer) -> Self {
        Self::One(pack(owner, LayerSet::of(layer)))
    }

    pub(super) fn is_only(&self, owner: OwnerId, layer: BlockLayer) -> bool {
        matches!(self, Self::One(word) if *word == pack(owner, LayerSet::of(layer)))
    }

    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Self::List(list) if list.is_empty())
    }

    pub(super) fn layers(&self, owner: OwnerId) -> LayerSet {
        match self {
            Self::Dense(dense) => dense.layers(owner),
            _ => layers_in(self.words(), owner),
        }
    }

    /// Replaces the layers of an owner. An empty set removes the owner.
    pub(super) fn set(&mut self, owner: OwnerId, layers: LayerSet) {
        match self {
            Self::One(word) if unpack(*word).0 != owner => {
                let mut list = vec![*word];
                set_in(&mut list, owner, layers);
                *self = Self::from_words(list);
            }
            Self::One(_) if layers.is_empty() => *self = Self::default(),
            Self::One(word) => *word = pack(owner, layers),
            Self::List(list) => {
                set_in(list, owner, layers);
                // Checked only at powers of two, because it scans the whole list.
                let dense =
                    Some(list.len()).filter(|len| *len >= DENSE_THRESHOLD && len.is_power_of_two());
                if let Some(dense) = dense.and_then(|_| DenseOwners::from_words(list)) {
                    *self = Self::Dense(Box::new(dense));
                } else if list.len() < 2 {
                    *self = Self::from_words(std::mem::take(list));
                }
            }
            Self::Dense(dense) => {
                dense.set(owner, layers);
                if !dense.is_compact(SPARSE_THRESHOLD) {
                    *self = Self::from_words(dense.to_words());
                }
            }
        }
    }

    /// Returns the words of the owners that have no bit.
    pub(super) fn words(&self) -> &[u32] {
        match self {
            Self::One(word) => std::slice::from_ref(word),
            Self::List(list) => list,
            Self::Dense(dense) => &dense.others,
        }
    }

    /// Returns the bits of the owners that have one.
    pub(super) fn bits(&self) -> Option<&[u64]> {
        match self {
            Self::Dense(dense) => Some(&dense.device),
            _ => None,
        }
    }

    fn from_words(list: Vec<u32>) -> Self {
        match list[..] {
            [word] => Self::One(word),
            _ => Self::List(list),
        }
    }
}

impl DenseOwners {
    /// Converts a list to bits. Returns `None` if too few owners hold exactly the device layer, or
    /// if their ids are too far apart.
    fn from_words(list: &[u32]) -> Option<Self> {
        let mut dense = Self::default();
        let last = list.last().map(|word| unpack(*word).0)?;
        if last.at() / 64 > list.len() {
            return None;
        }
        list.iter()
            .map(|word| unpack(*word))
            .for_each(|(owner, layers)| dense.set(owner, layers));
        dense.is_compact(DENSE_THRESHOLD).then_some(dense)
    }

    fn is_compact(&self, min_count: usize) -> bool {
        self.count >= min_count
            && self.others.len() <= self.count
            && self.device.len() <= 2 * self.count
    }

    fn to_words(&self) -> Vec<u32> {
        let mut list: Vec<_> = owners_in(&self.device)
            .map(|owner| pack(owner, LayerSet::DEVICE))
            .collect();
        list.extend(&self.others);
        list.sort_unstable();
        list
    }

    fn has(&self, owner: OwnerId) -> bool {
        self.device
            .get(owner.at() / 64)
            .is_some_and(|bits| bits & (1 << (owner.at() % 64)) != 0)
    }

    fn layers(&self, owner: OwnerId) -> LayerSet {
        if self.has(owner) {
            LayerSet::DEVICE
        } else {
            layers_in(&self.others, owner)
        }
    }

    fn set(&mut self, owner: OwnerId, layers: LayerSet) {
        let at = owner.at() / 64;
        let bit = 1 << (owner.at() % 64);
        if self.has(owner) {
            self.device[at] &= !bit;
            self.count -= 1;
        }
        if layers == LayerSet::DEVICE {
            self.device.resize(self.device.len().max(at + 1), 0);
            self.device[at] |= bit;
            self.count += 1;
        }
        while self.device.pop_if(|bits| *bits == 0).is_some() {}
        set_in(
            &mut self.others,
            owner,
            if layers == LayerSet::DEVICE {
                LayerSet::NONE
            } else {
                layers
            },
        );
    }

    fn equals_words(&self, words: &[u32]) -> bool {
        words.len() == self.count + self.others.len()
            && words
                .iter()
                .map(|word| unpack(*word))
                .all(|(owner, layers)| self.layers(owner) == layers)
    }
}

/// Iterates over the owners whose bits are set.
pub(super) fn owners_in(bits: &[u64]) -> impl Iterator<Item = OwnerId> {
    bits.iter()
        .enumerate()
        .flat_map(|(at, &bits)| set_bits(bits).map(move |bit| OwnerId(at as u32 * 64 + bit)))
}

/// Iterates over the positions of the set bits.
pub(super) fn set_bits(bits: u64) -> impl Iterator<Item = u32> {
    let mut left = bits;
    std::iter::from_fn(move || {
        let bit = (left != 0).then(|| left.trailing_zeros())?;
        left &= left - 1;
        Some(bit)
    })
}

fn find(words: &[u32], owner: OwnerId) -> Result<usize, usize> {
    words.binary_search_by_key(&owner, |&word| unpack(word).0)
}

fn layers_in(words: &[u32], owner: OwnerId) -> LayerSet {
    find(words, owner).map_or(LayerSet::NONE, |at| unpack(words[at]).1)
}

fn set_in(words: &mut Vec<u32>, owner: OwnerId, layers: LayerSet) {
    match (find(words, owner), layers.is_empty()) {
        (Ok(at), true) => {
            words.remove(at);
        }
        (Ok(at), false) => words[at] = pack(owner, layers),
        (Err(_), true) => {}
        (Err(at), false) => words.insert(at, pack(owner, layers)),
    }
}

fn pack(owner: OwnerId, layers: LayerSet) -> u32 {
    owner.0 << 8 | u32::from(layers.bits())
}

pub(super) fn unpack(word: u32) -> (OwnerId, LayerSet) {
    (OwnerId(word >> 8), LayerSet::from_bits((word & 0xff) as u8))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use warmroute_property_tests::property_config;

    use super::*;

    proptest! {
        #![proptest_config(property_config(2_000))]

        #[test]
        fn all_owner_representations_are_equivalent(
            sets in proptest::collection::vec((0..200u32, 0..4u8), 0..80),
            others in proptest::collection::vec((0..200u32, 0..4u8), 0..10),
        ) {
            let mut owners = OwnerSet::default();
            let mut model = BTreeMap::new();
            for (owner, layers) in sets.iter().chain(&others) {
                let owner = OwnerId(*owner);
                let layers = LayerSet::from_bits(*layers);
                owners.set(owner, layers);
                model.insert(owner, layers);
                model.retain(|_, layers| !layers.is_empty());
                prop_assert_eq!(owners.is_empty(), model.is_empty());
                for owner in (0..200).map(OwnerId) {
                    prop_assert_eq!(owners.layers(owner), model.get(&owner).copied().unwrap_or_default());
                }
                // The same owners, inserted in another order.
                let mut reordered = OwnerSet::default();
                model.iter().rev().for_each(|(owner, layers)| reordered.set(*owner, *layers));
                prop_assert_eq!(&reordered, &owners);
                prop_assert_eq!(&owners, &reordered);
                reordered.set(OwnerId(77), LayerSet::from_bits(4));
                prop_assert_ne!(&reordered, &owners);
                prop_assert_ne!(&owners, &reordered);
            }
        }
    }
}
