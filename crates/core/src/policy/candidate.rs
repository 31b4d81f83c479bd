//! Input of the policy: the request and its candidates.

use std::ops::Range;

use crate::index::TierBlocks;
use crate::load::ActiveLoad;
use crate::worker::{BlockSize, WorkerRole};

/// Properties of the request that are the same for all candidates.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyInput {
    /// Length of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Whether the chosen worker computes the prefill; false if another worker does.
    pub track_prefill: bool,
    /// Phases that the chosen worker runs. Only [`WorkerRole::Decode`] without `track_prefill`
    /// changes the cost: cached blocks then offset decode blocks.
    pub role: WorkerRole,
    /// Prompt blocks that the load tracker will count. The rest, the partial last block, is added
    /// to the forecast.
    pub tracked_blocks: u64,
    /// Ranges of blocks in a cache shared by all workers, sorted and disjoint.
    pub shared: Vec<Range<u32>>,
}

impl PolicyInput {
    /// Creates the input for workers that run both phases, without a shared cache.
    pub fn new(prompt_tokens: u64, block_size: BlockSize) -> Self {
        let tracked_blocks = prompt_tokens / block_size.tokens() as u64;
        Self {
            prompt_tokens,
            block_size,
            track_prefill: true,
            role: WorkerRole::Aggregated,
            tracked_blocks,
            shared: Vec::new(),
        }
    }

    /// Returns the blocks of the shared cache beyond the `device` leading blocks that a device
    /// holds.
    pub fn shared_beyond(&self, device: u32) -> u64 {
        let beyond = |range: &Range<u32>| range.end.saturating_sub(range.start.max(device));
        self.shared
            .iter()
            .map(|range| u64::from(beyond(range)))
            .sum()
    }

    /// Returns the blocks of the prompt, including the partial last block.
    pub fn required_blocks(&self) -> u64 {
        self.prompt_tokens.div_ceil(self.block_size.tokens() as u64)
    }

    /// Returns the blocks that a candidate would hold for running requests, including this one.
    pub fn decode_blocks(&self, candidate: &Candidate) -> u64 {
        let tail = self.required_blocks().saturating_sub(self.tracked_blocks);
        candidate.load.active_blocks + candidate.additional_blocks + tail
    }
}

/// One worker rank that may be chosen, identified by its position in the slice of candidates.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Cached prefix of the prompt, per tier.
    pub overlap: TierBlocks,
    /// Factor on the cache credit, by the freshness of the event source; 1 if it is exact.
    pub freshness_credit: f64,
    /// Current load.
    pub load: ActiveLoad,
    /// Prompt blocks that the rank does not hold for running requests yet.
    pub additional_blocks: u64,
    /// Sum of the weights of the preferred taints that the worker has.
    pub taint_preference: f64,
}
