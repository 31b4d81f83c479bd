//! Age of evicted blocks, to compare the ranks by the age of the blocks that they would evict.

use parking_lot::Mutex;

/// Weight of the earlier evictions after one more eviction.
const DECAY: f64 = 0.99;

/// Blocks that were unused for up to this multiple of the mean age have the full value. Ages differ
/// between ranks by chance.
const FULL_VALUE_AGE: f64 = 2.0;

/// Time from the last use of a block to its eviction: harmonic mean over recent evictions of all
/// ranks.
#[derive(Default)]
pub(super) struct MeanEvictionAge(Mutex<EvictionSums>);

/// Decayed sums.
#[derive(Default)]
struct EvictionSums {
    blocks: f64,
    /// Blocks divided by their age in time steps.
    blocks_per_step: f64,
}

/// Mean age of evicted blocks, at one time.
#[derive(Clone, Copy, Debug)]
pub struct EvictionAge {
    /// Expiry step of a block used now.
    now: u64,
    /// In time steps. `None` before the first eviction.
    mean_steps: Option<f64>,
}

impl MeanEvictionAge {
    /// Records blocks that were evicted this many time steps after their last use.
    pub(super) fn record(&self, blocks: u64, steps: u64) {
        let blocks = blocks as f64;
        let mut sums = self.0.lock();
        sums.blocks = DECAY * sums.blocks + blocks;
        sums.blocks_per_step = DECAY * sums.blocks_per_step + blocks / steps.max(1) as f64;
    }

    /// Returns the mean age. `now` is the expiry step of a block used now.
    pub(super) fn at(&self, now: u64) -> EvictionAge {
        let sums = self.0.lock();
        let has_evictions = sums.blocks > 0.0;
        EvictionAge {
            now,
            mean_steps: has_evictions.then(|| sums.blocks / sums.blocks_per_step),
        }
    }
}

impl EvictionAge {
    /// Returns the value of blocks that expire at this step, relative to the blocks that ranks
    /// evicted recently; at most 1. Blocks are assumed to be used again with a probability that is
    /// inversely proportional to the time since their last use.
    pub(super) fn relative_value(self, expiry_step: u64) -> f64 {
        let unused = self.now.saturating_sub(expiry_step) as f64;
        let mean = self.mean_steps.unwrap_or(f64::INFINITY);
        (FULL_VALUE_AGE * mean / unused.max(1.0)).min(1.0)
    }
}
