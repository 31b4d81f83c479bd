//! Size and use of predicted caches.

use serde::Serialize;

use super::policy::EffectivePolicy;
use crate::worker::{RankSlot, WorkerRank};

/// Use of the blocks of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PredictedUsage {
    /// Prompt blocks and generated blocks.
    pub used_blocks: u64,
    /// Value of the blocks that the rank evicts next, relative to recently evicted blocks of all
    /// ranks; at most 1.
    pub eviction_value: f64,
}

impl PredictedUsage {
    /// No blocks.
    pub const NONE: Self = Self {
        used_blocks: 0,
        eviction_value: 1.0,
    };
}

/// Predicted cache of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankPrediction {
    /// Slot of the rank.
    pub slot: RankSlot,
    /// Worker id and rank.
    pub rank: WorkerRank,
    /// Eviction policy of the rank.
    pub policy: EffectivePolicy,
    /// Prompt blocks.
    pub blocks: u64,
    /// Generated blocks, whose content is unknown.
    pub generated: u64,
    /// Runs that contain the prompt blocks.
    pub runs: u64,
    /// Blocks evicted for lack of capacity since the slot was opened.
    pub evicted: u64,
    /// Blocks whose time to live ended.
    pub expired: u64,
    /// Blocks that were not recorded, because running requests held the whole capacity, or because
    /// the prompt exceeded the capacity.
    pub refused: u64,
    /// Blocks of prompts in flight, not included above.
    pub in_flight: u64,
}
