//! Limits of the influence of one rank on the learned values of its model. Each rank also learns the
//! values from its own observations alone. With three ranks or more, the values of a model stay near
//! the median of its ranks, which no single rank can move beyond the values of the others.

use super::coefficients::{DecodeFit, LatencyCoefficients, PRIOR, PrefillFit};
use super::fit::FitVector;
use super::slowdown::RankSlowdown;
use super::transfer::{PRIOR_TRANSFER_TOKEN, TransferTime};

pub(super) const PRIOR_OUTPUT_TOKENS: f64 = 300.0;

/// Number of ranks from which the median limits a value.
const MIN_RANKS: usize = 3;

/// Maximum ratio between a value of a model and the median of its ranks, in both directions.
pub(super) const MAX_MEDIAN_RATIO: f64 = 4.0;

/// The same between a value and its prior, with fewer ranks.
pub(super) const MAX_PRIOR_RATIO: f64 = 100.0;

/// Number of observations of a rank before its values count in the medians.
const MIN_PREFILLS: u64 = 10;
const MIN_STEPS: u64 = 50;
const MIN_ANSWERS: u64 = 10;
const MIN_TRANSFERS: u64 = 10;

/// Weight of one answer in the mean length of a rank's answers.
const ANSWER_SHARE: f64 = 0.05;

/// Values that the observations of one rank yield.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct RankLatency {
    pub(super) prefill: PrefillFit,
    pub(super) decode: DecodeFit,
    transfer: TransferTime,
    transfers: u64,
    output_tokens: f64,
    answers: u64,
}

/// Limits of all values of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LatencyLimits {
    prefill: [ValueLimits; 3],
    decode: [ValueLimits; 3],
    output_tokens: ValueLimits,
    transfer_token: ValueLimits,
}

/// Smallest and largest permitted value.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ValueLimits {
    min: f64,
    max: f64,
}

impl RankLatency {
    /// Adds a KV transfer.
    pub(super) fn add_transfer(&mut self, tokens: f64, seconds: f64) {
        self.transfer.add(tokens, seconds);
        self.transfers += 1;
    }

    /// Adds the length of an answer.
    pub(super) fn add_answer(&mut self, tokens: f64) {
        self.answers += 1;
        let share = (1.0 / self.answers as f64).max(ANSWER_SHARE);
        self.output_tokens += (tokens - self.output_tokens) * share;
    }
}

impl ValueLimits {
    /// Returns the limits around the median of these values, or around the prior if they are few.
    fn around(values: impl Iterator<Item = f64>, prior: f64) -> Self {
        let mut values: Vec<f64> = values.collect();
        let middle = values.len() / 2;
        let (center, ratio) = if values.len() < MIN_RANKS {
            (prior, MAX_PRIOR_RATIO)
        } else {
            let (_, median, _) = values.select_nth_unstable_by(middle, f64::total_cmp);
            (*median, MAX_MEDIAN_RATIO)
        };
        Self {
            min: center / ratio,
            max: center * ratio,
        }
    }

    fn clamp(self, value: f64) -> f64 {
        value.max(self.min).min(self.max)
    }
}

/// Returns the limits of three coefficients, around the medians of the ranks or around the prior.
fn limits_of(values: &[FitVector], prior: FitVector) -> [ValueLimits; 3] {
    [0, 1, 2].map(|index| {
        let medians = values.iter().map(|values| values[index]);
        ValueLimits::around(medians, prior[index])
    })
}

impl Default for LatencyLimits {
    fn default() -> Self {
        Self::of_ranks(&[])
    }
}

impl LatencyLimits {
    /// Returns the limits of a model with these ranks.
    pub(super) fn of_ranks(ranks: &[&RankSlowdown]) -> Self {
        let own = || ranks.iter().map(|slowdown| &slowdown.own);
        let prefills: Vec<_> = own()
            .filter(|own| own.prefill.0.observed() >= MIN_PREFILLS)
            .map(|own| own.prefill.solve())
            .collect();
        let steps: Vec<_> = own()
            .filter(|own| own.decode.0.observed() >= MIN_STEPS)
            .map(|own| own.decode.solve())
            .collect();
        let answers = own().filter(|own| own.answers >= MIN_ANSWERS);
        let transfers = own().filter(|own| own.transfers >= MIN_TRANSFERS);
        Self {
            prefill: limits_of(&prefills, PRIOR.prefill()),
            decode: limits_of(&steps, PRIOR.decode()),
            output_tokens: ValueLimits::around(
                answers.map(|own| own.output_tokens),
                PRIOR_OUTPUT_TOKENS,
            ),
            transfer_token: ValueLimits::around(
                transfers.map(|own| own.transfer.token_seconds()),
                PRIOR_TRANSFER_TOKEN,
            ),
        }
    }

    /// Limits the coefficients.
    pub(super) fn clamp(&self, coefficients: LatencyCoefficients) -> LatencyCoefficients {
        let clamp = |limits: [ValueLimits; 3], values: FitVector| {
            [0, 1, 2].map(|index| limits[index].clamp(values[index]))
        };
        LatencyCoefficients::new(
            clamp(self.prefill, coefficients.prefill()),
            clamp(self.decode, coefficients.decode()),
        )
    }

    /// Limits the mean length of an answer.
    pub(super) fn clamp_output(&self, tokens: f64) -> f64 {
        self.output_tokens.clamp(tokens)
    }

    /// Limits the time of a KV transfer per token.
    pub(super) fn clamp_transfer(&self, seconds: f64) -> f64 {
        self.transfer_token.clamp(seconds)
    }
}
