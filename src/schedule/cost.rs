//! The cost of one candidate. All terms are in blocks: the prefill still to do, less what is cached, plus the blocks that
//! decoding keeps busy. The arithmetic is in f64 and in the order of the field's routers, because exact ties are broken at
//! random and a different rounding would turn a tie into a preference.

use serde::Serialize;

use super::{Candidate, Question, Weights};
use crate::index::TierBlocks;
use crate::worker::Role;

/// A cost, term by term; lower is better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    /// Prefill that would be outstanding, this request's whole prompt included, in blocks.
    pub prefill_blocks: f64,
    /// What fading leaves of the device credit, 1 when nothing fades.
    pub credit_decay: f64,
    /// What is left of the credit because the event source may be out of date, 1 where it is exact.
    pub trust_credit: f64,
    /// Credit for blocks on the device, after fading and as far as they are believed.
    pub device_credit: f64,
    /// Credit for blocks in host memory.
    pub host_credit: f64,
    /// Credit for blocks on disk or in external storage.
    pub disk_credit: f64,
    /// Credit for blocks in the shared cache.
    pub shared_credit: f64,
    /// Prefill less credit, not below zero, scaled.
    pub prefill_cost: f64,
    /// Blocks busy with live requests, this one included; in a decode choice, less the credit.
    pub decode_cost: f64,
    /// Live requests, weighted.
    pub request_cost: f64,
    /// What the preferred taints multiply the sum by.
    pub taint_factor: f64,
    /// The product.
    pub total: f64,
}

/// What is the same for all candidates of one choice.
pub(super) struct Scale<'a> {
    question: &'a Question,
    weights: &'a Weights,
    block_size: f64,
    /// What a division by the block size may be made by instead, because it comes to the same: only for powers of two.
    per_block: Option<f64>,
    /// Blocks that the prompt takes, at least one.
    prompt_blocks: f64,
    /// No more cached tokens than this are for certain no more than the prompt has; below zero where that cannot be said.
    surely_within: f64,
    /// Least prefill backlog among the candidates, if credit fades.
    least_prefill: Option<u64>,
    decode_variant: bool,
    /// Whether who has nothing of the prompt gets no credit at all: no cache is shared, and all weights are numbers.
    plain: bool,
}

impl<'a> Scale<'a> {
    pub(super) fn new(
        question: &'a Question,
        candidates: &[Candidate],
        weights: &'a Weights,
    ) -> Self {
        let fades = question.track_prefill && weights.overlap_score_credit_decay > 0.0;
        let backlog = candidates
            .iter()
            .map(|candidate| candidate.load.active_prefill_tokens);
        let block_size = question.block_size.tokens();
        let tokens = question.prompt_tokens;
        let decode_variant = question.role == Role::Decode
            && !question.track_prefill
            && weights.overlap_score_credit > 0.0;
        Self {
            question,
            weights,
            block_size: block_size as f64,
            surely_within: if tokens <= 1 << f64::MANTISSA_DIGITS {
                tokens as f64
            } else {
                -1.0
            },
            per_block: block_size
                .is_power_of_two()
                .then_some(1.0 / block_size as f64),
            prompt_blocks: (question.required_blocks() as f64).max(1.0),
            least_prefill: fades.then(|| backlog.min()).flatten(),
            decode_variant,
            plain: !decode_variant && question.shared.is_empty() && weights.validate().is_ok(),
        }
    }

    /// Cached blocks, lower tiers by their weights.
    pub(super) fn effective(&self, candidate: &Candidate) -> f64 {
        candidate.overlap.effective(
            self.weights.host_cache_hit_weight,
            self.weights.disk_cache_hit_weight,
        )
    }

    /// Cached tokens, lower tiers by their weights.
    pub(super) fn cached_tokens(&self, candidate: &Candidate) -> u64 {
        rounded(self.effective(candidate) * self.block_size)
    }

    /// Whether a candidate costs more than that by what it is busy with alone. Then the rest, which takes nothing off the
    /// total, need not be computed: sums of floats do not shrink when a part of them grows.
    #[inline(always)]
    pub(super) fn is_dearer(&self, candidate: &Candidate, than: f64) -> bool {
        let known = !self.decode_variant
            && candidate.preference == 0.0
            && self.weights.prefill_load_scale >= 0.0;
        known && self.busy(candidate) + self.request_cost(candidate) > than
    }

    /// The total alone. Not a number counts as infinitely dear, so that it is never chosen over a number.
    #[inline(always)]
    pub(super) fn total(&self, candidate: &Candidate) -> f64 {
        self.plain_total(candidate).unwrap_or_else(|| {
            let total = self.cost(candidate).total;
            if total.is_nan() { f64::INFINITY } else { total }
        })
    }

    /// The total of a candidate that gets no credit for anything, as most do.
    #[inline(always)]
    pub(super) fn plain_total(&self, candidate: &Candidate) -> Option<f64> {
        if !self.plain || candidate.overlap != TierBlocks::default() || candidate.preference != 0.0
        {
            return None;
        }
        let tokens = candidate
            .load
            .active_prefill_tokens
            .saturating_add(self.question.prompt_tokens);
        let prefill = if self.question.track_prefill {
            self.in_blocks(tokens)
        } else {
            0.0
        };
        Some(
            self.weights.prefill_load_scale * prefill
                + self.busy(candidate)
                + self.request_cost(candidate),
        )
    }

    /// All terms. Inlined, so that what only wants the total computes no more than that.
    #[inline(always)]
    pub(super) fn cost(&self, candidate: &Candidate) -> Cost {
        let weights = self.weights;
        let overlap = candidate.overlap;
        let credit_decay = self.credit_decay(candidate);
        let trust_credit = candidate.trust_credit;
        let device_credit =
            weights.overlap_score_credit * credit_decay * f64::from(overlap.device) * trust_credit;
        let host_credit = weights.host_cache_hit_weight * f64::from(overlap.host) * trust_credit;
        let lowest = f64::from(overlap.disk) + f64::from(overlap.external);
        let disk_credit = weights.disk_cache_hit_weight * lowest * trust_credit;
        let shared_credit =
            weights.shared_cache_multiplier * self.question.shared_beyond(overlap.device) as f64;
        let credit = device_credit + host_credit + disk_credit + shared_credit;
        let prefill_blocks = self.in_blocks(self.prefill_tokens(candidate));
        let busy = self.busy(candidate);
        let (prefill_cost, decode_cost) = if self.decode_variant {
            (0.0, (busy - credit).max(0.0))
        } else {
            (
                weights.prefill_load_scale * (prefill_blocks - credit).max(0.0),
                busy,
            )
        };
        let request_cost = self.request_cost(candidate);
        let taint_factor = if candidate.preference == 0.0 {
            1.0
        } else {
            (-candidate.preference.tanh()).exp()
        };
        Cost {
            prefill_blocks,
            credit_decay,
            trust_credit,
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
    fn busy(&self, candidate: &Candidate) -> f64 {
        candidate.load.active_blocks as f64 + candidate.additional_blocks as f64
    }

    #[inline]
    fn request_cost(&self, candidate: &Candidate) -> f64 {
        self.weights.decode_active_request_weight * candidate.load.active_requests as f64
    }

    #[inline]
    fn credit_decay(&self, candidate: &Candidate) -> f64 {
        let Some(least) = self.least_prefill else {
            return 1.0;
        };
        let above = self.in_blocks(candidate.load.active_prefill_tokens.saturating_sub(least));
        1.0 / (1.0 + self.weights.overlap_score_credit_decay * above / self.prompt_blocks)
    }

    #[inline]
    fn in_blocks(&self, tokens: u64) -> f64 {
        match self.per_block {
            Some(per_block) => tokens as f64 * per_block,
            None => tokens as f64 / self.block_size,
        }
    }

    /// Cached tokens count in full here: the credit takes them off again, by its own weights.
    #[inline]
    fn prefill_tokens(&self, candidate: &Candidate) -> u64 {
        if !self.question.track_prefill {
            return 0;
        }
        let cached = self.effective(candidate) * self.block_size;
        let prompt = self.question.prompt_tokens;
        let tokens = if cached <= self.surely_within {
            prompt
        } else {
            prompt.max(rounded(cached))
        };
        candidate.load.active_prefill_tokens.saturating_add(tokens)
    }
}

/// The nearest whole number, halves upwards, of what is not below zero. Equal to `round`, which is a call of a function
/// where the processor that we are compiled for has no instruction for it.
#[inline]
fn rounded(number: f64) -> u64 {
    let whole = number as u64;
    whole.saturating_add(u64::from(number - whole as f64 >= 0.5))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::rounded;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn rounding_is_that_of_the_language(number in prop_oneof![0.0..1e6, 0.0..1e20, proptest::num::f64::POSITIVE], halves: u32) {
            for number in [number, f64::from(halves) / 2.0, (f64::from(halves) / 2.0).next_down()] {
                prop_assert_eq!(rounded(number), number.round() as u64);
            }
        }
    }
}
