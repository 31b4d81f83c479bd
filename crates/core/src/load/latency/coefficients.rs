//! Coefficients of the latency model, and their fits to observed times.

use serde::{Deserialize, Serialize};

use super::fit::{CoefficientFit, FitCoefficients, FitRules, FitSample};
use crate::load::timing::RankTiming;

/// Units that bring the inputs of the fits to the order of 1.
const PREFILL_TOKENS: f64 = 1e3;
const PREFILL_PAIRS: f64 = 3e7;
const CONTEXT_TOKENS: f64 = 1e5;

pub(super) const PREFILL_RULES: FitRules = FitRules {
    retention: 0.995,
    prior_weight: 2.0,
    prior: FitCoefficients {
        first: PRIOR.prefill_token * PREFILL_TOKENS,
        second: PRIOR.prefill_pair * PREFILL_PAIRS,
    },
};

pub(super) const DECODE_RULES: FitRules = FitRules {
    retention: 0.999,
    prior_weight: 5.0,
    prior: FitCoefficients {
        first: PRIOR.decode_step,
        second: PRIOR.decode_context_token * CONTEXT_TOKENS,
    },
};

/// Coefficients before any observation. For a token behind 33,000 others, attention costs as much as
/// the rest, which holds within a factor of 2 for dense models of 8 to 70 billion parameters.
pub(super) const PRIOR: LatencyCoefficients = LatencyCoefficients {
    prefill_token: 100e-6,
    prefill_pair: 3e-9,
    decode_step: 20e-3,
    decode_context_token: 100e-9,
};

/// A prefill or KV transfer counts for at most a multiple of its expected time plus this number of
/// seconds.
pub(super) const PREFILL_MARGIN: f64 = 0.05;

/// Seconds that each unit of work takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatencyCoefficients {
    /// Prefill, per uncached token.
    pub prefill_token: f64,
    /// Prefill, per pair of an uncached token and a token before it (attention).
    pub prefill_pair: f64,
    /// Decode step, fixed part.
    pub decode_step: f64,
    /// Decode step, per token in the context of all running requests.
    pub decode_context_token: f64,
}

/// Uncached part of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PrefillWork {
    pub(crate) tokens: f64,
    pub(crate) pairs: f64,
}

/// Fit of the two prefill coefficients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct PrefillFit(pub(super) CoefficientFit);

/// Fit of the two coefficients of a decode step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct DecodeFit(pub(super) CoefficientFit);

impl PrefillFit {
    /// Adds a prefill that took `seconds`, where `expected` seconds were expected. Errors are
    /// relative, so a long prompt does not outweigh many short ones.
    pub(super) fn add(&mut self, work: PrefillWork, seconds: f64, expected: f64) {
        let weight = 1.0 / (expected + PREFILL_MARGIN);
        let sample = FitSample {
            first: weight * work.tokens / PREFILL_TOKENS,
            second: weight * work.pairs / PREFILL_PAIRS,
            value: weight * seconds,
        };
        self.0.add(sample, &PREFILL_RULES);
    }

    /// Returns the seconds per token and per pair.
    pub(super) fn solve(&self) -> (f64, f64) {
        let solved = self.0.solve(&PREFILL_RULES);
        (solved.first / PREFILL_TOKENS, solved.second / PREFILL_PAIRS)
    }
}

impl DecodeFit {
    /// Adds a decode step that took `seconds`.
    pub(super) fn add(&mut self, context_tokens: f64, seconds: f64) {
        let sample = FitSample {
            first: 1.0,
            second: context_tokens / CONTEXT_TOKENS,
            value: seconds,
        };
        self.0.add(sample, &DECODE_RULES);
    }

    /// Returns the seconds per step and per token in the context.
    pub(super) fn solve(&self) -> (f64, f64) {
        let solved = self.0.solve(&DECODE_RULES);
        (solved.first, solved.second / CONTEXT_TOKENS)
    }
}

impl LatencyCoefficients {
    /// Returns the seconds of a prefill.
    #[inline]
    pub(crate) fn prefill_seconds(&self, work: PrefillWork) -> f64 {
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
            * self.prefill_seconds(PrefillWork {
                tokens: timing.prefill_tokens,
                pairs: timing.prefill_pairs,
            });
        let oldest = booked / f64::from(timing.prefills);
        (booked - oldest.min(timing.prefill_elapsed)).max(0.0) + timing.delay
    }

    /// Returns the seconds of a decode step with this many tokens in the context of all requests.
    #[inline]
    pub(crate) fn step_seconds(&self, context_tokens: f64) -> f64 {
        self.decode_step + self.decode_context_token * context_tokens
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
