//! Eviction policy of predicted blocks: by time to live, or by capacity.

use std::time::Duration;

use serde::Serialize;

/// Eviction policy of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionPolicy {
    /// Evicts blocks after their time to live.
    Ttl(TtlPolicy),
    /// Evicts the least recently released blocks if the capacity is exceeded. Blocks held by
    /// running requests stay.
    Lru {
        /// Capacity of ranks that report none.
        default_blocks: Option<u64>,
        /// Policy of ranks without a known capacity.
        fallback: TtlPolicy,
    },
}

/// Time to live since a block was last recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TtlPolicy {
    /// Time to live of a block, rounded up to the next [`TtlPolicy::STEP`].
    pub ttl: Duration,
    /// Maximum number of blocks per rank. Beyond it, the least recently recorded blocks are evicted
    /// early.
    pub max_blocks_per_rank: u64,
}

/// Eviction policy of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "policy")]
pub enum EffectivePolicy {
    /// Time to live, with a maximum number of blocks.
    Ttl {
        /// Maximum number of blocks.
        max_blocks: u64,
        /// Whether the rank uses the fallback, because its capacity is unknown.
        fallback: bool,
    },
    /// Eviction by capacity.
    Lru {
        /// Capacity in blocks.
        capacity: u64,
    },
}

impl TtlPolicy {
    /// Granularity of the time to live.
    pub const STEP: Duration = Duration::from_millis(100);
}

impl EvictionPolicy {
    /// Returns the policy of a rank with this capacity.
    pub(super) fn for_capacity(&self, capacity: Option<u64>) -> EffectivePolicy {
        match *self {
            EvictionPolicy::Ttl(ttl) => EffectivePolicy::Ttl {
                max_blocks: ttl.max_blocks_per_rank,
                fallback: false,
            },
            EvictionPolicy::Lru {
                default_blocks,
                fallback,
            } => match capacity.or(default_blocks) {
                Some(capacity) => EffectivePolicy::Lru { capacity },
                None => EffectivePolicy::Ttl {
                    max_blocks: fallback.max_blocks_per_rank,
                    fallback: true,
                },
            },
        }
    }

    /// Returns the time to live on ranks that use it.
    pub(super) fn ttl(&self) -> Duration {
        match self {
            EvictionPolicy::Ttl(ttl) | EvictionPolicy::Lru { fallback: ttl, .. } => ttl.ttl,
        }
    }
}

impl EffectivePolicy {
    /// Returns the maximum number of blocks of the rank.
    pub(super) fn max_blocks(self) -> u64 {
        match self {
            EffectivePolicy::Ttl { max_blocks, .. } => max_blocks,
            EffectivePolicy::Lru { capacity } => capacity,
        }
    }

    /// Returns whether running requests hold their blocks.
    pub(super) fn has_leases(self) -> bool {
        matches!(self, EffectivePolicy::Lru { .. })
    }
}
