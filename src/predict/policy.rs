//! By which rule predicted blocks leave: after a time, or when the rank would have no room for them.

use std::time::Duration;

use serde::Serialize;

/// How blocks leave, for all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// After a time.
    Ttl(Ttl),
    /// When there is no room: least recently released first. What live requests hold stays.
    Lru {
        /// Capacity of ranks that did not report one.
        default_blocks: Option<u64>,
        /// For ranks whose capacity is not known at all.
        fallback: Ttl,
    },
}

/// Blocks leave a time after they were last recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ttl {
    /// How long a block stays; rounded up to the next [`Ttl::STEP`].
    pub ttl: Duration,
    /// Most blocks of one rank; beyond it the least recently recorded leave before their time.
    pub most_blocks_per_rank: u64,
}

/// How the blocks of one rank leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "policy")]
pub enum EffectivePolicy {
    /// After a time, and at most so many at once.
    Ttl {
        /// Most blocks.
        most_blocks: u64,
        /// Whether this rank should have had a capacity to go by.
        fallback: bool,
    },
    /// When there is no room.
    Lru {
        /// Blocks that there is room for.
        capacity: u64,
    },
}

impl Ttl {
    /// Ends of life are grouped in steps of this length.
    pub const STEP: Duration = Duration::from_millis(100);
}

impl Policy {
    /// What the policy means for a rank of this capacity.
    pub(super) fn for_capacity(&self, capacity: Option<u64>) -> EffectivePolicy {
        match *self {
            Policy::Ttl(ttl) => EffectivePolicy::Ttl {
                most_blocks: ttl.most_blocks_per_rank,
                fallback: false,
            },
            Policy::Lru {
                default_blocks,
                fallback,
            } => match capacity.or(default_blocks) {
                Some(capacity) => EffectivePolicy::Lru { capacity },
                None => EffectivePolicy::Ttl {
                    most_blocks: fallback.most_blocks_per_rank,
                    fallback: true,
                },
            },
        }
    }

    /// The life of blocks on ranks that go by time.
    pub(super) fn ttl(&self) -> Duration {
        match self {
            Policy::Ttl(ttl) | Policy::Lru { fallback: ttl, .. } => ttl.ttl,
        }
    }
}

impl EffectivePolicy {
    /// Most blocks the rank may hold.
    pub(super) fn most_blocks(self) -> u64 {
        match self {
            EffectivePolicy::Ttl { most_blocks, .. } => most_blocks,
            EffectivePolicy::Lru { capacity } => capacity,
        }
    }

    /// Whether live requests hold their blocks.
    pub(super) fn leases(self) -> bool {
        matches!(self, EffectivePolicy::Lru { .. })
    }
}
