//! Coefficients of the latency model, and their fits to observed times.

use serde::{Deserialize, Serialize};

use super::fit::{CoefficientFit, FitRules, FitVector};
use crate::load::timing::RankTiming;

/// Units that bring the inputs of the fits to the order of 1.
const PREFILL_TOKENS: f64 = 1e3;
const PREFILL_PAIRS: f64 = 3e7;
const DECODE_REQUESTS: f64 = 10.0;
const CONTEXT_TOKENS: f64 = 1e5;

pub(super) const PREFILL_RULES: FitRules = FitRules {
    retention: 0.995,
    prior_weight: 2.0,
    prior: [
        PRIOR.prefill_base,
        PRIOR.prefill_token * PREFILL_TOKENS,
        PRIOR.prefill_pair * PREFILL_PAIRS,
    ],
};

pub(super) const DECODE_RULES: FitRules = FitRules {
    retention: 0.999,
    prior_weight: 5.0,
    prior: [
        PRIOR.decode_step,
        PRIOR.decode_request * DECODE_REQUESTS,
        PRIOR.decode_context_token * CONTEXT_TOKENS,
    ],
};

/// Coefficients before any observation. A token costs 100 us, as with a model of 8 billion
/// parameters on an L40S GPU. For a token behind 33,000 others, attention costs as much as the rest,
/// which holds within a factor of 2 for dense models of 8 to 70 billion parameters. A step of 20 ms
/// reads the weights of such a model once. The fixed part of a prefill is half of a step. A request
/// costs 30 us per step for sampling and scheduling.
pub(super) const PRIOR: LatencyCoefficients = LatencyCoefficients {
    prefill_base: 10e-3,
    prefill_token: 100e-6,
    prefill_pair: 3e-9,
    decode_step: 20e-3,
    decode_request: 30e-6,
    decode_context_token: 100e-9,
};

/// A prefill or KV transfer counts for at most a multiple of its expected time plus this number of
/// seconds.
pub(super) const PREFILL_MARGIN: f64 = 0.05;

/// Seconds that each unit of work takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatencyCoefficients {
    /// Prefill, fixed part: HTTP, scheduling, and the rest of the step that is running. It delays no
    /// other request of the engine.
    #[serde(rename = "prefill_base_seconds")]
    pub prefill_base: f64,
    /// Prefill, per uncached token.
    #[serde(rename = "prefill_token_seconds")]
    pub prefill_token: f64,
    /// Prefill, per pair of an uncached token and a token before it (attention).
    #[serde(rename = "prefill_pair_seconds")]
    pub prefill_pair: f64,
    /// Decode step, fixed part.
    #[serde(rename = "decode_step_seconds")]
    pub decode_step: f64,
    /// Decode step, per running request.
    #[serde(rename = "decode_request_seconds")]
    pub decode_request: f64,
    /// Decode step, per token in the context of all running requests.
    #[serde(rename = "decode_context_token_seconds")]
    pub decode_context_token: f64,
}

/// Uncached part of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PrefillWork {
    pub(crate) tokens: f64,
    pub(crate) pairs: f64,
}

/// Size of a decode step. Requests that wait for their prefill count as well.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct DecodeBatch {
    /// Number of requests.
    pub(crate) requests: f64,
    /// Tokens in the contexts of these requests.
    pub(crate) context_tokens: f64,
}

/// Fit of the prefill coefficients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct PrefillFit(pub(super) CoefficientFit);

/// Fit of the coefficients of a decode step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct DecodeFit(pub(super) CoefficientFit);

impl PrefillFit {
    /// Adds a prefill that took `seconds`, where `expected` seconds were expected. Errors are
    /// relative, so a long prompt does not outweigh many short ones.
    pub(super) fn add(&mut self, work: PrefillWork, seconds: f64, expected: f64) {
        let weight = 1.0 / (expected + PREFILL_MARGIN);
        let inputs = [
            1.0,
            work.tokens / PREFILL_TOKENS,
            work.pairs / PREFILL_PAIRS,
        ];
        let inputs = inputs.map(|input| weight * input);
        self.0.add(inputs, weight * seconds, &PREFILL_RULES);
    }

    /// Returns the seconds per prefill, per token and per pair.
    pub(super) fn solve(&self) -> FitVector {
        let [base, token, pair] = self.0.solve(&PREFILL_RULES);
        [base, token / PREFILL_TOKENS, pair / PREFILL_PAIRS]
    }
}

impl DecodeFit {
    /// Adds a decode step that took `seconds`.
    pub(super) fn add(&mut self, batch: DecodeBatch, seconds: f64) {
        let inputs = [
            1.0,
            batch.requests / DECODE_REQUESTS,
            batch.context_tokens / CONTEXT_TOKENS,
        ];
        self.0.add(inputs, seconds, &DECODE_RULES);
    }

    /// Returns the seconds per step, per running request and per token in the context.
    pub(super) fn solve(&self) -> FitVector {
        let [base, request, context_token] = self.0.solve(&DECODE_RULES);
        [
            base,
            request / DECODE_REQUESTS,
            context_token / CONTEXT_TOKENS,
        ]
    }
}

impl LatencyCoefficients {
    /// Creates coefficients from those of prefills and of decode steps, in the order of the fields.
    pub(super) fn new(prefill: FitVector, decode: FitVector) -> Self {
        let [prefill_base, prefill_token, prefill_pair] = prefill;
        let [decode_step, decode_request, decode_context_token] = decode;
        Self {
            prefill_base,
            prefill_token,
            prefill_pair,
            decode_step,
            decode_request,
            decode_context_token,
        }
    }

    /// Returns the seconds per prefill, per token and per pair.
    pub(super) fn prefill(&self) -> FitVector {
        [self.prefill_base, self.prefill_token, self.prefill_pair]
    }

    /// Returns the seconds per step, per request and per token in the context.
    pub(super) fn decode(&self) -> FitVector {
        [
            self.decode_step,
            self.decode_request,
            self.decode_context_token,
        ]
    }

    /// Multiplies the coefficients of prefills and those of decode steps by one factor each.
    pub(super) fn scaled(&self, prefill: f64, decode: f64) -> Self {
        Self::new(
            self.prefill().map(|seconds| seconds * prefill),
            self.decode().map(|seconds| seconds * decode),
        )
    }

    /// Returns the seconds of a prefill.
    #[inline]
    pub(crate) fn prefill_seconds(&self, work: PrefillWork) -> f64 {
        self.prefill_base + self.compute_seconds(work)
    }

    /// Returns the seconds for which a prefill occupies the engine: those without the fixed part.
    #[inline]
    pub(crate) fn compute_seconds(&self, work: PrefillWork) -> f64 {
        self.prefill_token * work.tokens + self.prefill_pair * work.pairs
    }

    /// Returns the seconds of prefill that are booked on a rank and not done. The engine has computed
    /// at most the oldest of them, which counts as an average one. A delayed rank is assumed to need
    /// its delay once more.
    #[inline(always)]
    pub(crate) fn queue_seconds(&self, timing: &RankTiming) -> f64 {
        if timing.prefills == 0 {
            return 0.0;
        }
        let booked = timing.prefill_factor
            * self.compute_seconds(PrefillWork {
                tokens: timing.prefill_tokens,
                pairs: timing.prefill_pairs,
            });
        let oldest = booked / f64::from(timing.prefills);
        (booked - oldest.min(timing.prefill_elapsed)).max(0.0) + timing.delay
    }

    /// Returns the seconds of a decode step.
    #[inline]
    pub(crate) fn step_seconds(&self, batch: DecodeBatch) -> f64 {
        self.decode_step
            + self.decode_request * batch.requests
            + self.decode_context_token * batch.context_tokens
    }
}

impl PrefillWork {
    /// Returns the work of computing a prompt behind `cached` tokens.
    #[inline]
    pub(crate) fn new(prompt: f64, cached: f64) -> Self {
        let tokens = (prompt - cached).max(0.0);
        Self {
            tokens,
            pairs: tokens * (cached + 0.5 * tokens),
        }
    }
}
