//! Input of the policy: the request and its candidates.

use std::ops::Range;

use crate::index::TierBlocks;
use crate::load::{ActiveLoad, LatencyEstimate, RankTiming};
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
    /// Learned latency of the model.
    pub estimate: LatencyEstimate,
    /// Expected length of the answer, in tokens.
    pub output_tokens: f64,
    /// Number of ranks that compute prefills of the model. `None`: the candidates.
    pub prefill_ranks: Option<usize>,
    /// Share of evicted prompt tokens that are computed again, estimated for the model.
    pub recomputed_share: f64,
}

impl PolicyInput {
    /// Creates the input for workers that run both phases, without a shared cache.
    pub fn new(prompt_tokens: u64, block_size: BlockSize) -> Self {
        let tracked_blocks = prompt_tokens / block_size.tokens() as u64;
        let estimate = LatencyEstimate::default();
        Self {
            prompt_tokens,
            block_size,
            track_prefill: true,
            role: WorkerRole::Aggregated,
            tracked_blocks,
            shared: Vec::new(),
            estimate,
            output_tokens: estimate.output_tokens,
            prefill_ranks: None,
            recomputed_share: 0.0,
        }
    }

    /// Returns the blocks of the shared cache beyond the first `leading` blocks.
    pub fn shared_beyond(&self, leading: u32) -> u64 {
        let beyond = |range: &Range<u32>| range.end.saturating_sub(range.start.max(leading));
        self.shared
            .iter()
            .map(|range| u64::from(beyond(range)))
            .sum()
    }

    /// Returns the blocks of the prompt, including the partial last block.
    pub fn required_blocks(&self) -> u64 {
        self.prompt_tokens.div_ceil(self.block_size.tokens() as u64)
    }

    /// Returns the prefill tokens that would be outstanding, including this request's whole prompt.
    pub fn outstanding_tokens(&self, candidate: &Candidate) -> u64 {
        if self.track_prefill {
            let tokens = candidate.load.active_prefill_tokens;
            tokens.saturating_add(self.prompt_tokens)
        } else {
            0
        }
    }

    /// Returns the cached tokens of the prompt, without tier weights. Engines always compute the
    /// last token.
    #[inline]
    pub(super) fn cached_tokens(&self, candidate: &Candidate) -> f64 {
        let overlap = candidate.expected_overlap();
        let lower = f64::from(overlap.total() - overlap.device) * candidate.freshness_credit;
        let blocks = candidate.device_blocks() + lower;
        let max = (self.prompt_tokens as f64 - 1.0).max(0.0);
        (blocks * self.block_size.tokens() as f64).min(max)
    }

    /// Returns the tokens of the prompt that the candidate computes.
    #[inline]
    pub(super) fn uncached_tokens(&self, candidate: &Candidate) -> f64 {
        if self.track_prefill {
            self.prompt_tokens as f64 - self.cached_tokens(candidate)
        } else {
            0.0
        }
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
    /// Leading blocks that running requests hold or compute.
    pub running_blocks: u32,
    /// Current load.
    pub load: ActiveLoad,
    /// Booked work, if the policy uses it.
    pub timing: RankTiming,
    /// KV blocks of the rank. `None` if unknown, or not used by the policy.
    pub total_blocks: Option<u64>,
    /// Blocks that can be filled without an eviction. 0 if unknown, or not used by the policy.
    pub free_blocks: u64,
    /// Value of the blocks that the rank evicts next, relative to those of other ranks; at most 1.
    pub eviction_value: f64,
    /// Prompt blocks that the rank does not hold for running requests yet.
    pub additional_blocks: u64,
    /// Sum of the weights of the preferred taints that the worker has.
    pub taint_preference: f64,
}

impl Candidate {
    /// Returns the cached blocks, including those of running requests.
    #[inline]
    pub fn expected_overlap(&self) -> TierBlocks {
        self.overlap.with_device(self.running_blocks)
    }

    /// Returns the leading blocks on the device. Blocks of running requests count in full, those of
    /// the index by the freshness of its source.
    #[inline]
    pub(super) fn device_blocks(&self) -> f64 {
        let indexed = f64::from(self.overlap.device) * self.freshness_credit;
        indexed.max(f64::from(self.running_blocks))
    }

    #[inline]
    pub(super) fn has_lower_tiers(&self) -> bool {
        self.overlap.total() > self.overlap.device
    }

    /// Returns whether no block is cached or held by a running request.
    #[inline(always)]
    pub(super) fn is_cold(&self) -> bool {
        self.overlap == TierBlocks::default() && self.running_blocks == 0
    }
}
