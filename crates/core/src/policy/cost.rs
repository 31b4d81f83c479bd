//! Cost of one candidate. All terms are in blocks: the outstanding prefill less the cache credit,
//! plus the blocks that decoding keeps busy. The order of the f64 operations follows the reference
//! implementation: exact ties are broken at random, and a different rounding would turn a tie into
//! a preference.

use serde::Serialize;

use super::candidate::{Candidate, PolicyInput};
use super::weights::Weights;
use crate::index::TierBlocks;
use crate::worker::WorkerRole;

/// Cost, term by term; lower is better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    /// Prefill that would be outstanding, including this request's whole prompt, in blocks.
    pub prefill_blocks: f64,
    /// Decay of the device credit with the prefill backlog; 1 without decay.
    pub credit_decay: f64,
    /// Factor on the credit by the freshness of the event source; 1 if it is exact.
    pub freshness_credit: f64,
    /// Credit for blocks on the device, after both factors.
    pub device_credit: f64,
    /// Credit for blocks in host memory.
    pub host_credit: f64,
    /// Credit for blocks on disk or in external storage.
    pub disk_credit: f64,
    /// Credit for blocks in the shared cache.
    pub shared_credit: f64,
    /// Outstanding prefill less credit, at least 0, scaled.
    pub prefill_cost: f64,
    /// Blocks held by running requests, including this one; in a decode choice, less the credit.
    pub decode_cost: f64,
    /// Running requests, weighted.
    pub request_cost: f64,
    /// Factor from the preferred taints.
    pub taint_factor: f64,
    /// Sum of the three costs times the taint factor.
    pub total: f64,
}

/// Terms that are the same for all candidates of one choice.
pub(super) struct CostModel<'a> {
    input: &'a PolicyInput,
    weights: &'a Weights,
    block_size: f64,
    /// Reciprocal of the block size, if it is a power of two: multiplying is then exact and faster
    /// than dividing.
    per_block: Option<f64>,
    /// Blocks of the prompt, at least 1.
    prompt_blocks: f64,
    /// Up to this many cached tokens, the prompt is certainly not exceeded; negative if f64 cannot
    /// represent the prompt length.
    exact_token_limit: f64,
    /// Minimum prefill backlog over the candidates, if the credit decays.
    min_prefill_backlog: Option<u64>,
    is_decode_only: bool,
    /// Whether a candidate without cached blocks gets no credit at all: no shared cache, and all
    /// weights are valid.
    has_plain_costs: bool,
}

impl<'a> CostModel<'a> {
    pub(super) fn new(
        input: &'a PolicyInput,
        candidates: &[Candidate],
        weights: &'a Weights,
    ) -> Self {
        let decays = input.track_prefill && weights.overlap_score_credit_decay > 0.0;
        let backlog = candidates
            .iter()
            .map(|candidate| candidate.load.active_prefill_tokens);
        let block_size = input.block_size.tokens();
        let tokens = input.prompt_tokens;
        let is_decode_only = input.role == WorkerRole::Decode
            && !input.track_prefill
            && weights.overlap_score_credit > 0.0;
        Self {
            input,
            weights,
            block_size: block_size as f64,
            exact_token_limit: if tokens <= 1 << f64::MANTISSA_DIGITS {
                tokens as f64
            } else {
                -1.0
            },
            per_block: block_size
                .is_power_of_two()
                .then_some(1.0 / block_size as f64),
            prompt_blocks: (input.required_blocks() as f64).max(1.0),
            min_prefill_backlog: decays.then(|| backlog.min()).flatten(),
            is_decode_only,
            has_plain_costs: !is_decode_only
                && input.shared.is_empty()
                && weights.validate().is_ok(),
        }
    }

    /// Returns the cached blocks, lower tiers weighted.
    pub(super) fn effective_blocks(&self, candidate: &Candidate) -> f64 {
        candidate.overlap.weighted_total(
            self.weights.host_cache_hit_weight,
            self.weights.disk_cache_hit_weight,
        )
    }

    /// Returns the cached tokens, lower tiers weighted.
    pub(super) fn cached_tokens(&self, candidate: &Candidate) -> u64 {
        round_to_u64(self.effective_blocks(candidate) * self.block_size)
    }

    /// Returns whether decode blocks and requests alone already cost more than `limit`. The prefill
    /// term is not negative and a float sum does not shrink when a term grows, so the rest need not
    /// be computed.
    #[inline(always)]
    pub(super) fn exceeds(&self, candidate: &Candidate, limit: f64) -> bool {
        let known = !self.is_decode_only
            && candidate.taint_preference == 0.0
            && self.weights.prefill_load_scale >= 0.0;
        known && self.decode_blocks(candidate) + self.request_cost(candidate) > limit
    }

    /// Returns the total cost. NaN counts as infinity, so it is never chosen over a number.
    #[inline(always)]
    pub(super) fn total(&self, candidate: &Candidate) -> f64 {
        self.plain_total(candidate).unwrap_or_else(|| {
            let total = self.cost(candidate).total;
            if total.is_nan() { f64::INFINITY } else { total }
        })
    }

    /// Returns the total cost of a candidate without any credit, the common case. Returns `None`
    /// for other candidates.
    #[inline(always)]
    pub(super) fn plain_total(&self, candidate: &Candidate) -> Option<f64> {
        if !self.has_plain_costs
            || candidate.overlap != TierBlocks::default()
            || candidate.taint_preference != 0.0
        {
            return None;
        }
        let tokens = candidate
            .load
            .active_prefill_tokens
            .saturating_add(self.input.prompt_tokens);
        let prefill = if self.input.track_prefill {
            self.in_blocks(tokens)
        } else {
            0.0
        };
        Some(
            self.weights.prefill_load_scale * prefill
                + self.decode_blocks(candidate)
                + self.request_cost(candidate),
        )
    }

    /// Computes all terms. Inlined, so callers that need only the total skip the rest.
    #[inline(always)]
    pub(super) fn cost(&self, candidate: &Candidate) -> Cost {
        let weights = self.weights;
        let overlap = candidate.overlap;
        let credit_decay = self.credit_decay(candidate);
        let freshness_credit = candidate.freshness_credit;
        let device_credit = weights.overlap_score_credit
            * credit_decay
            * f64::from(overlap.device)
            * freshness_credit;
        let host_credit =
            weights.host_cache_hit_weight * f64::from(overlap.host) * freshness_credit;
        let lowest = f64::from(overlap.disk) + f64::from(overlap.external);
        let disk_credit = weights.disk_cache_hit_weight * lowest * freshness_credit;
        let shared_credit =
            weights.shared_cache_multiplier * self.input.shared_beyond(overlap.device) as f64;
        let credit = device_credit + host_credit + disk_credit + shared_credit;
        let prefill_blocks = self.in_blocks(self.prefill_tokens(candidate));
        let decode_blocks = self.decode_blocks(candidate);
        let prefill_cost;
        let decode_cost;
        if self.is_decode_only {
            prefill_cost = 0.0;
            decode_cost = (decode_blocks - credit).max(0.0);
        } else {
            prefill_cost = weights.prefill_load_scale * (prefill_blocks - credit).max(0.0);
            decode_cost = decode_blocks;
        }
        let request_cost = self.request_cost(candidate);
        let taint_factor = if candidate.taint_preference == 0.0 {
            1.0
        } else {
            (-candidate.taint_preference.tanh()).exp()
        };
        Cost {
            prefill_blocks,
            credit_decay,
            freshness_credit,
            device_credit,
            host_credit,
            disk_credit,
            shared_credit,
            prefill_cost,
            decode_cost,
            request_cost,
            taint_factor,
            total: (prefill_cost + decode_cost + request_cost) * taint_factor,
        }
    }

    #[inline]
    fn decode_blocks(&self, candidate: &Candidate) -> f64 {
        candidate.load.active_blocks as f64 + candidate.additional_blocks as f64
    }

    #[inline]
    fn request_cost(&self, candidate: &Candidate) -> f64 {
        self.weights.decode_active_request_weight * candidate.load.active_requests as f64
    }

    #[inline]
    fn credit_decay(&self, candidate: &Candidate) -> f64 {
        let Some(min_backlog) = self.min_prefill_backlog else {
            return 1.0;
        };
        let backlog = candidate.load.active_prefill_tokens;
        let above = self.in_blocks(backlog.saturating_sub(min_backlog));
        1.0 / (1.0 + self.weights.overlap_score_credit_decay * above / self.prompt_blocks)
    }

    #[inline]
    fn in_blocks(&self, tokens: u64) -> f64 {
        match self.per_block {
            Some(per_block) => tokens as f64 * per_block,
            None => tokens as f64 / self.block_size,
        }
    }

    /// Returns the prefill tokens with this request. Its cached tokens count in full, because the
    /// credit subtracts them with its own weights.
    #[inline]
    fn prefill_tokens(&self, candidate: &Candidate) -> u64 {
        if !self.input.track_prefill {
            return 0;
        }
        let cached = self.effective_blocks(candidate) * self.block_size;
        let prompt = self.input.prompt_tokens;
        let tokens = if cached <= self.exact_token_limit {
            prompt
        } else {
            prompt.max(round_to_u64(cached))
        };
        candidate.load.active_prefill_tokens.saturating_add(tokens)
    }
}

/// Rounds a non-negative number to the nearest integer, halves up. Equal to `round`, which is a
/// function call on targets without a rounding instruction.
#[inline]
fn round_to_u64(number: f64) -> u64 {
    let integer = number as u64;
    integer.saturating_add(u64::from(number - integer as f64 >= 0.5))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use warmroute_property_tests::property_config;

    use super::round_to_u64;

    proptest! {
        #![proptest_config(property_config(20_000))]

        #[test]
        fn rounding_equals_the_standard_library(number in prop_oneof![0.0..1e6, 0.0..1e20, proptest::num::f64::POSITIVE], halves: u32) {
            for number in [number, f64::from(halves) / 2.0, (f64::from(halves) / 2.0).next_down()] {
                prop_assert_eq!(round_to_u64(number), number.round() as u64);
            }
        }
    }
}
