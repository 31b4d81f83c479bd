//! Block weights as fixed-point integers. With floats, the sum would depend on the order in which
//! requests come and go. A `u64` sum has room for 2^33 full blocks.

/// Weight of one block, in units of 2^-31 blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockWeight(u32);

impl BlockWeight {
    /// A full block.
    pub(super) const ONE: BlockWeight = BlockWeight(1 << 31);

    /// Converts a fraction, clamped to 0..=1. Returns `None` for NaN.
    pub(super) fn from_fraction(fraction: f64) -> Option<Self> {
        let scaled = fraction.clamp(0.0, 1.0) * f64::from(Self::ONE.0);
        (!fraction.is_nan()).then_some(BlockWeight(scaled.round() as u32))
    }

    /// Returns the weight of `count` such blocks.
    #[inline]
    pub(super) fn times(self, count: usize) -> u64 {
        u64::from(self.0) * count as u64
    }

    /// Rounds a sum of weights to whole blocks, halves up. A tolerance covers the rounding loss of
    /// the summed fractions.
    #[inline]
    pub(super) fn blocks(sum: u64) -> u64 {
        let tolerance = 1 << 10;
        let one = u64::from(Self::ONE.0);
        (sum + one / 2 + tolerance) / one
    }
}

/// Output blocks of one request. No other request shares them, so only their number is stored.
#[derive(Debug, Default)]
pub(super) struct OutputBlocks {
    full: usize,
    discounted: usize,
    /// Weight of each discounted block.
    discount: Option<BlockWeight>,
}

impl OutputBlocks {
    /// Adds `count` blocks. A weight applies to all blocks so far.
    pub(super) fn add(&mut self, count: usize, weight: Option<BlockWeight>) {
        self.full += count;
        if weight.is_some() {
            self.discounted += std::mem::take(&mut self.full);
            self.discount = weight;
        }
    }

    /// Returns the last weight passed to [`OutputBlocks::add`].
    pub(super) fn discount_weight(&self) -> Option<BlockWeight> {
        self.discount
    }

    pub(super) fn weight(&self) -> u64 {
        BlockWeight::ONE.times(self.full) + self.discount.map_or(0, |to| to.times(self.discounted))
    }
}
