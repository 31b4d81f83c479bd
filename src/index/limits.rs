//! Limits of the memory that one worker rank may use in the index. An engine that never reports removals, or a publisher that reports blocks
//! that do not exist, must not exhaust the memory of the process.

use serde::{Serialize, Serializer};

use crate::tier::Tier;

/// Blocks that a writer may hold, per tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BlockLimits {
    /// On the device.
    #[serde(serialize_with = "limit")]
    pub device: u64,
    /// In each lower tier.
    #[serde(serialize_with = "limit")]
    pub lower_tier: u64,
}

/// Factor on the KV blocks that the engine reports: events of new blocks may arrive before those of removals.
const TIMES_CAPACITY: u64 = 4;

/// Largest limit that follows from what an engine reports of itself; a larger one must be configured.
const LARGEST_REPORTED: u64 = 1 << 26;

impl BlockLimits {
    /// No limit.
    pub const NONE: Self = Self {
        device: u64::MAX,
        lower_tier: u64::MAX,
    };

    /// The limits of a rank: from its number of KV blocks where that is known, else `most_blocks_per_tier`, which is also the
    /// least that a lower tier may hold.
    pub fn of_rank(total_kv_blocks: Option<u64>, most_blocks_per_tier: u64) -> Self {
        let ceiling = LARGEST_REPORTED.max(most_blocks_per_tier);
        let by_capacity =
            total_kv_blocks.map(|blocks| blocks.saturating_mul(TIMES_CAPACITY).min(ceiling));
        Self {
            device: by_capacity.unwrap_or(most_blocks_per_tier),
            lower_tier: by_capacity.unwrap_or_default().max(most_blocks_per_tier),
        }
    }

    /// The limit of a tier.
    pub fn of(self, tier: Tier) -> u64 {
        if tier == Tier::Device {
            self.device
        } else {
            self.lower_tier
        }
    }

    /// Names of blocks that a writer may hold, over all tiers. The shares of cache groups have the same limit, and so have the names
    /// of which a tier holds more than one copy, each counted once per tier.
    pub fn names(self) -> u64 {
        self.device.saturating_add(self.lower_tier)
    }
}

fn limit<S: Serializer>(limit: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    Some(*limit)
        .filter(|limit| *limit != u64::MAX)
        .serialize(serializer)
}
