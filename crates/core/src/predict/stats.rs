//! Size of predicted caches.

use serde::Serialize;

use super::policy::EffectivePolicy;
use crate::worker::{RankSlot, WorkerRank};

/// Size of a predictor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PredictStats {
    /// One entry per open slot, in slot order.
    pub ranks: Vec<RankPrediction>,
    /// Blocks of all ranks.
    pub blocks: u64,
    /// Generated blocks of all ranks.
    pub generated: u64,
    /// Blocks of prompts in flight, over all ranks.
    pub in_flight: u64,
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
