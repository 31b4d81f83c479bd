//! Data-parallel ranks of one worker.

use std::num::NonZeroU32;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::DpRank;

/// Data-parallel ranks of one worker: `start .. start + size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct RankRange {
    /// First rank.
    pub start: u32,
    /// Number of ranks.
    pub size: NonZeroU32,
}

impl Default for RankRange {
    fn default() -> Self {
        Self::ONE
    }
}

impl RankRange {
    /// One rank with number 0: an engine without data parallelism.
    pub const ONE: RankRange = RankRange {
        start: 0,
        size: NonZeroU32::MIN,
    };

    /// Maximum number of ranks, more than any engine has. A larger number is a configuration error,
    /// and would allocate huge tables.
    pub const MAX_SIZE: u32 = 1024;

    /// Iterates over the ranks in order.
    pub fn iter(self) -> impl Iterator<Item = DpRank> {
        self.range().map(DpRank)
    }

    /// Returns whether the rank belongs to the worker.
    pub fn contains(self, rank: DpRank) -> bool {
        self.range().contains(&rank.0)
    }

    fn range(self) -> Range<u32> {
        self.start..self.start.saturating_add(self.size.get())
    }
}
