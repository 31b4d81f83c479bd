//! The blocks of one rank and how much each counts. Blocks are told by their sequence hash, which names all blocks before
//! them as well: who holds one holds those, so prompts that begin alike share their entries without a tree. Weights are
//! whole numbers, because sums of fractions would depend on the order in which requests come and go.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use crate::block::SequenceHash;

/// How much a block counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Weight(u32);

impl Weight {
    /// A block as such.
    pub(super) const ONE: Weight = Weight(1 << 31);

    /// Part of a block, between nothing and one; `None` if it is no number.
    pub(super) fn of(fraction: f64) -> Option<Self> {
        let scaled = fraction.clamp(0.0, 1.0) * f64::from(Self::ONE.0);
        (!fraction.is_nan()).then_some(Weight(scaled.round() as u32))
    }

    /// The weight of so many such blocks.
    pub(super) fn times(self, count: u64) -> u128 {
        u128::from(self.0) * u128::from(count)
    }

    /// The nearest whole number of blocks, halves upwards. A sum may fall short of a half by what its fractions lost when
    /// they were rounded; that much is forgiven.
    pub(super) fn blocks(sum: u128) -> u64 {
        let forgiven = 1 << 10;
        let one = u128::from(Self::ONE.0);
        u64::try_from((sum + one / 2 + forgiven) / one).unwrap_or(u64::MAX)
    }
}

/// Prompt blocks held by live requests.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// Hashed once more, with a key nobody knows: callers may choose the names, and so could make them collide.
    held: HashMap<SequenceHash, Held>,
    /// Of all of them.
    weight: u128,
}

/// One block.
#[derive(Debug)]
struct Held {
    /// How many live requests hold it.
    holders: u32,
    /// Stays when others join.
    weight: Weight,
}

impl Blocks {
    pub(super) fn weight(&self) -> u128 {
        self.weight
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    pub(super) fn holds(&self, sequence: &SequenceHash) -> bool {
        self.held.contains_key(sequence)
    }

    /// One more holder of each.
    pub(super) fn add(&mut self, sequences: &[SequenceHash]) {
        let before = self.held.len();
        for sequence in sequences {
            self.held.entry(*sequence).or_insert(Held { holders: 0, weight: Weight::ONE }).holders += 1;
        }
        self.weight += Weight::ONE.times((self.held.len() - before) as u64);
    }

    /// One holder less of each.
    pub(super) fn remove(&mut self, sequences: &[SequenceHash]) {
        for sequence in sequences {
            if let Entry::Occupied(mut entry) = self.held.entry(*sequence) {
                entry.get_mut().holders -= 1;
                if entry.get().holders == 0 {
                    self.weight -= entry.remove().weight.times(1);
                }
            }
        }
    }

    /// Lets those blocks count for so much that nobody else holds; `sequences` are those of a holder. What requests share
    /// is the beginning, so this looks from the end, as far as the first block that is shared.
    pub(super) fn fade(&mut self, sequences: &[SequenceHash], weight: Weight) {
        for sequence in sequences.iter().rev() {
            let Some(held) = self.held.get_mut(sequence).filter(|held| held.holders == 1) else { break };
            if held.weight != weight {
                self.weight = self.weight - held.weight.times(1) + weight.times(1);
                held.weight = weight;
            }
        }
    }
}

/// The blocks of one answer. Nobody shares them, so they need no names.
#[derive(Debug, Default)]
pub(super) struct Outputs {
    whole: u64,
    faded: u64,
    /// Of each faded one.
    to: Option<Weight>,
}

impl Outputs {
    /// One more; a weight is that of all of them from now on.
    pub(super) fn add(&mut self, weight: Option<Weight>) {
        self.whole += 1;
        if weight.is_some() {
            self.faded += std::mem::take(&mut self.whole);
            self.to = weight;
        }
    }

    /// What each counted for when that was last said.
    pub(super) fn weight_of_each(&self) -> Option<Weight> {
        self.to
    }

    pub(super) fn weight(&self) -> u128 {
        Weight::ONE.times(self.whole) + self.to.map_or(0, |to| to.times(self.faded))
    }
}
