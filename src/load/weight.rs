//! How much blocks count. Weights are whole numbers, because sums of fractions would depend on the order in which requests
//! come and go. A sum has room for the blocks whose names fill 64 GiB.

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
    #[inline]
    pub(super) fn times(self, count: usize) -> u64 {
        u64::from(self.0) * count as u64
    }

    /// The nearest whole number of blocks, halves upwards. A sum may fall short of a half by what its fractions lost when
    /// they were rounded; that much is forgiven.
    #[inline]
    pub(super) fn blocks(sum: u64) -> u64 {
        let (forgiven, one) = (1 << 10, u64::from(Self::ONE.0));
        (sum + one / 2 + forgiven) / one
    }
}

/// The blocks of one answer. Nobody shares them, so they need no names.
#[derive(Debug, Default)]
pub(super) struct Outputs {
    whole: usize,
    faded: usize,
    /// Of each faded one.
    to: Option<Weight>,
}

impl Outputs {
    /// So many more; a weight is that of all of them from now on.
    pub(super) fn add(&mut self, count: usize, weight: Option<Weight>) {
        self.whole += count;
        if weight.is_some() {
            self.faded += std::mem::take(&mut self.whole);
            self.to = weight;
        }
    }

    /// What each counted for when that was last said.
    pub(super) fn weight_of_each(&self) -> Option<Weight> {
        self.to
    }

    pub(super) fn weight(&self) -> u64 {
        Weight::ONE.times(self.whole) + self.to.map_or(0, |to| to.times(self.faded))
    }
}
