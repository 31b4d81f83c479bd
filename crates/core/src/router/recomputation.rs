//! Estimate of the prompt tokens that are computed again after they were evicted.

use dashmap::DashMap;

use crate::block::BlockHashes;
use crate::index::AgingBloomFilter;
use crate::worker::ModelName;

/// Hashes per half of the filter of a model.
const HASHES_PER_HALF: usize = 1 << 18;

/// Tokens between the blocks of a prompt that are recorded. A recorded block stands for all blocks
/// before it.
const TOKENS_PER_SAMPLE: usize = 128;

/// Decay of the counts per request, a time constant of 200 requests.
const DECAY: f64 = 0.995;

/// Share before any observation, and its weight in evicted tokens.
const PRIOR_SHARE: f64 = 0.2;
const PRIOR_TOKENS: f64 = 5_000.0;

/// Estimates of all models.
#[derive(Debug, Default)]
pub(super) struct RecomputationEstimator(DashMap<ModelName, ModelRecomputation>);

/// Recent prompts of one model, and its counts.
#[derive(Debug)]
struct ModelRecomputation {
    recent: AgingBloomFilter,
    evicted_tokens: f64,
    recomputed_tokens: f64,
}

impl RecomputationEstimator {
    /// Returns the ratio of recomputed prompt tokens to tokens that are expected to be evicted. It is
    /// at most 1, and 0.2 before any observation.
    pub(super) fn recomputed_share(&self, model: &ModelName) -> f64 {
        let prompts = self.0.get(model);
        prompts.map_or(PRIOR_SHARE, |prompts| prompts.recomputed_share())
    }

    /// Records a prompt. `cached` is its longest prefix on any rank, and `evicted` the expected
    /// evictions, in tokens.
    pub(super) fn record(
        &self,
        model: &ModelName,
        prompt: &BlockHashes,
        cached: u64,
        evicted: u64,
    ) {
        if let Some(mut prompts) = self.0.get_mut(model) {
            prompts.record(prompt, cached, evicted);
        } else {
            let mut prompts = self.0.entry(model.clone()).or_default();
            prompts.record(prompt, cached, evicted);
        }
    }
}

impl Default for ModelRecomputation {
    fn default() -> Self {
        Self {
            recent: AgingBloomFilter::new(HASHES_PER_HALF),
            evicted_tokens: 0.0,
            recomputed_tokens: 0.0,
        }
    }
}

impl ModelRecomputation {
    fn recomputed_share(&self) -> f64 {
        let recomputed = self.recomputed_tokens + PRIOR_SHARE * PRIOR_TOKENS;
        (recomputed / (self.evicted_tokens + PRIOR_TOKENS)).min(1.0)
    }

    fn record(&mut self, prompt: &BlockHashes, cached: u64, evicted: u64) {
        let block = prompt.block_size().tokens();
        let stride = (TOKENS_PER_SAMPLE / block).max(1);
        let known = self.add(prompt, stride) * stride * block;
        let recomputed = (known as u64).saturating_sub(cached);
        self.evicted_tokens = self.evicted_tokens * DECAY + evicted as f64;
        self.recomputed_tokens = self.recomputed_tokens * DECAY + recomputed as f64;
    }

    /// Adds every `stride`-th block of a prompt. Returns the number of leading ones that were
    /// added recently.
    fn add(&mut self, prompt: &BlockHashes, stride: usize) -> usize {
        let mut known = 0;
        let mut is_known = true;
        for sequence in prompt.sequences().iter().skip(stride - 1).step_by(stride) {
            is_known &= self.recent.refresh(sequence.0);
            known += usize::from(is_known);
        }
        known
    }
}
