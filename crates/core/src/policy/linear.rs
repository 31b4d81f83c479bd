//! Policy `linear`: a weighted sum. All terms are in blocks: the outstanding prefill less the cache
//! credit, plus the blocks held by running requests, plus the weighted number of running requests.
//! The order of the f64 operations follows the reference implementation: exact ties are broken at
//! random, and a different rounding would turn a tie into a preference.

use super::candidate::{Candidate, PolicyInput};
use super::cost::{CostModel, CostTerms, PolicyTerms};
use super::weights::Weights;
use crate::worker::WorkerRole;

const TERMS: PolicyTerms = PolicyTerms {
    policy: "linear",
    terms: &[
        "prefill_blocks",
        "credit_decay",
        "freshness_credit",
        "device_credit",
        "host_credit",
        "disk_credit",
        "shared_credit",
        "prefill",
        "decode",
        "requests",
    ],
    summands: 3,
};

/// Cost function of the policy `linear`.
pub(super) struct LinearModel<'a> {
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

impl<'a> LinearModel<'a> {
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

    /// Returns the sum for a candidate without any credit, the common case. Returns `None` for
    /// other candidates.
    #[inline(always)]
    fn plain_sum(&self, candidate: &Candidate) -> Option<f64> {
        if !self.has_plain_costs || !candidate.is_cold() {
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
        let cached = effective_blocks(self.weights, candidate) * self.block_size;
        let prompt = self.input.prompt_tokens;
        let tokens = if cached <= self.exact_token_limit {
            prompt
        } else {
            prompt.max(round_to_u64(cached))
        };
        candidate.load.active_prefill_tokens.saturating_add(tokens)
    }
}

impl CostModel for LinearModel<'_> {
    /// Computes all terms. Inlined, so callers that need only the sum skip the rest.
    #[inline(always)]
    fn terms(&self, _index: usize, candidate: &Candidate) -> CostTerms {
        let weights = self.weights;
        let overlap = candidate.expected_overlap();
        let credit_decay = self.credit_decay(candidate);
        let freshness_credit = candidate.freshness_credit;
        let device_credit = weights.overlap_score_credit * credit_decay * candidate.device_blocks();
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
        CostTerms::new(
            &TERMS,
            [
                prefill_blocks,
                credit_decay,
                freshness_credit,
                device_credit,
                host_credit,
                disk_credit,
                shared_credit,
                prefill_cost,
                decode_cost,
                self.request_cost(candidate),
            ],
        )
    }

    #[inline(always)]
    fn sum(&self, index: usize, candidate: &Candidate) -> f64 {
        self.plain_sum(candidate)
            .unwrap_or_else(|| self.terms(index, candidate).sum())
    }

    /// The prefill term is not negative, and a float sum does not shrink when a term grows.
    #[inline(always)]
    fn lower_bound(&self, candidate: &Candidate) -> f64 {
        if candidate.is_cold() || self.is_decode_only || self.weights.prefill_load_scale < 0.0 {
            f64::NEG_INFINITY
        } else {
            self.decode_blocks(candidate) + self.request_cost(candidate)
        }
    }
}

/// Returns the cached blocks, lower tiers weighted.
pub(super) fn effective_blocks(weights: &Weights, candidate: &Candidate) -> f64 {
    candidate
        .expected_overlap()
        .weighted_total(weights.host_cache_hit_weight, weights.disk_cache_hit_weight)
}

/// Rounds a non-negative number to the nearest integer, halves up. Equal to `round`, which is a
/// function call on targets without a rounding instruction.
#[inline]
pub(super) fn round_to_u64(number: f64) -> u64 {
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
