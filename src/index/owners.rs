//! Who holds a run, and in which tiers: a sorted array of small words, a seat and four bits each. Runs are split until
//! all their blocks have the same owners, so this is stored once per run and not once per block.

use super::seats::Seat;
use crate::tier::Tier;

/// A set of tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tiers(u8);

impl Tiers {
    pub(super) const NONE: Tiers = Tiers(0);

    pub(super) fn one(tier: Tier) -> Self {
        Self(1 << tier as u8)
    }

    pub(super) fn has(self, tier: Tier) -> bool {
        self.0 & Self::one(tier).0 != 0
    }

    pub(super) fn with(self, tier: Tier) -> Self {
        Self(self.0 | Self::one(tier).0)
    }

    pub(super) fn without(self, tier: Tier) -> Self {
        Self(self.0 & !Self::one(tier).0)
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(super) fn iter(self) -> impl Iterator<Item = Tier> {
        Tier::ALL.into_iter().filter(move |tier| self.has(*tier))
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
    pub(super) fn just(seat: Seat, tier: Tier) -> Self {
        Self(vec![pack(seat, Tiers::one(tier))])
    }

    pub(super) fn is_just(&self, seat: Seat, tier: Tier) -> bool {
        self.0 == [pack(seat, Tiers::one(tier))]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn tiers(&self, seat: Seat) -> Tiers {
        self.find(seat).map_or(Tiers::NONE, |at| unpack(self.0[at]).1)
    }

    /// Replaces what a seat holds; nothing removes it.
    pub(super) fn set(&mut self, seat: Seat, tiers: Tiers) {
        match (self.find(seat), tiers.is_empty()) {
            (Ok(at), true) => {
                self.0.remove(at);
            }
            (Ok(at), false) => self.0[at] = pack(seat, tiers),
            (Err(_), true) => {}
            (Err(at), false) => self.0.insert(at, pack(seat, tiers)),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Seat, Tiers)> {
        self.0.iter().map(|&word| unpack(word))
    }

    fn find(&self, seat: Seat) -> Result<usize, usize> {
        self.0.binary_search_by_key(&seat, |&word| unpack(word).0)
    }
}

fn pack(seat: Seat, tiers: Tiers) -> u32 {
    seat.0 << 4 | u32::from(tiers.0)
}

fn unpack(word: u32) -> (Seat, Tiers) {
    (Seat(word >> 4), Tiers((word & 0b1111) as u8))
}
