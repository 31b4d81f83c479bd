//! Limits of the memory that one worker rank may use in the index. An engine that never reports
//! removals, or a publisher that reports blocks that do not exist, must not exhaust the memory of
//! the process.

use serde::{Serialize, Serializer};

use crate::block::StorageTier;

/// Maximum number of blocks of a writer, per tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BlockLimits {
    /// Limit of device memory.
    #[serde(serialize_with = "serialize_limit")]
    pub device: u64,
    /// Limit of each lower tier.
    #[serde(serialize_with = "serialize_limit")]
    pub lower_tier: u64,
}

/// Factor on the KV blocks that the engine reports. Events of new blocks may arrive before those of
/// removals.
const CAPACITY_FACTOR: u64 = 4;

/// Largest limit derived from the reported capacity. A larger one must be configured.
const MAX_REPORTED_LIMIT: u64 = 1 << 26;

impl Default for BlockLimits {
    /// Returns no limit.
    fn default() -> Self {
        Self {
            device: u64::MAX,
            lower_tier: u64::MAX,
        }
    }
}

impl BlockLimits {
    /// Returns the limits of a rank. They follow from the number of its KV blocks if that is known,
    /// otherwise from `max_blocks_per_tier`. The latter is also the minimum for lower tiers.
    pub fn for_rank(total_kv_blocks: Option<u64>, max_blocks_per_tier: u64) -> Self {
        let ceiling = MAX_REPORTED_LIMIT.max(max_blocks_per_tier);
        let by_capacity =
            total_kv_blocks.map(|blocks| blocks.saturating_mul(CAPACITY_FACTOR).min(ceiling));
        Self {
            device: by_capacity.unwrap_or(max_blocks_per_tier),
            lower_tier: by_capacity.unwrap_or_default().max(max_blocks_per_tier),
        }
    }

    /// Returns the limit of a tier.
    pub fn for_tier(self, tier: StorageTier) -> u64 {
        if tier == StorageTier::Device {
            self.device
        } else {
            self.lower_tier
        }
    }

    /// Returns the maximum number of engine hashes over all tiers. The same limit applies to the
    /// shares of cache groups, and to the hashes with more than one copy in a tier, counted once
    /// per tier.
    pub fn max_hashes(self) -> u64 {
        self.device.saturating_add(self.lower_tier)
    }
}

fn serialize_limit<S: Serializer>(limit: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    Some(*limit)
        .filter(|limit| *limit != u64::MAX)
        .serialize(serializer)
}
