//! Latency model of the ranks that serve one model.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::calibration;
use super::fit::{CoefficientFit, FitCoefficients, FitRules, FitSample};
use super::slowdown::{ActiveRankFactors, RankSlowdown, SlowdownFactors};
use super::totals::{FirstTokenObservation, PredictionTotals};
use super::traffic::TrafficRate;
use crate::load::timing::RankTiming;

/// Units that bring the inputs of the fits to the order of 1.
const PREFILL_TOKENS: f64 = 1e3;
const PREFILL_PAIRS: f64 = 3e7;
const CONTEXT_TOKENS: f64 = 1e5;

const PREFILL_RULES: FitRules = FitRules {
    retention: 0.995,
    prior_weight: 2.0,
    prior: FitCoefficients {
        first: PRIOR.prefill_token * PREFILL_TOKENS,
        second: PRIOR.prefill_pair * PREFILL_PAIRS,
    },
};

const DECODE_RULES: FitRules = FitRules {
    retention: 0.999,
    prior_weight: 5.0,
    prior: FitCoefficients {
        first: PRIOR.decode_step,
        second: PRIOR.decode_context_token * CONTEXT_TOKENS,
    },
};

/// Coefficients before any observation. For a token behind 33,000 others, attention costs as much as
/// the rest, which holds within a factor of 2 for dense models of 8 to 70 billion parameters.
const PRIOR: LatencyCoefficients = LatencyCoefficients {
    prefill_token: 100e-6,
    prefill_pair: 3e-9,
    decode_step: 20e-3,
    decode_context_token: 100e-9,
};

const PRIOR_OUTPUT_TOKENS: f64 = 300.0;

/// Seconds of KV transfer per token before any observation: 200 kB per token at 40 GB/s.
const PRIOR_TRANSFER_TOKEN: f64 = 5e-6;

/// Weight of the prior, in transferred tokens.
const PRIOR_TRANSFER_TOKENS: f64 = 20_000.0;

/// Share of earlier observations that remains after each transfer.
const TRANSFER_RETENTION: f64 = 0.98;

/// Weight of one finished request in the mean answer length.
const OUTPUT_SHARE: f64 = 0.02;

/// Number of prefills before outliers are limited and factors are learned.
const MIN_PREFILLS: u64 = 10;

/// A prefill or KV transfer counts for at most this multiple of its expected time plus
/// [`PREFILL_MARGIN`] seconds. A longer one waited for memory, was preempted, or stalled.
const MAX_PREFILL_RATIO: f64 = 3.0;
const PREFILL_MARGIN: f64 = 0.05;

/// Number of step observations before outliers are discarded and factors are learned.
const MIN_STEPS: u64 = 50;

/// A step counts for at most this multiple of its expected time. Longer ones are discarded as
/// stalls, unless [`MAX_STALLED_STEPS`] observations in a row are that long.
const MAX_STEP_RATIO: f64 = 4.0;
const MAX_STALLED_STEPS: u32 = 64;

/// Minimum time of a step in seconds. Tokens that arrive faster were buffered.
const MIN_STEP_SECONDS: f64 = 1e-4;

/// Maximum length of an answer, in tokens. Engines report the length.
const MAX_OUTPUT_TOKENS: f64 = 1e6;

/// Ranges of a valid copy of a latency model: seconds per unit of work, and sums.
const MAX_WORK_SECONDS: f64 = 60.0;
const MAX_SUM: f64 = 1e12;

/// The decode coefficients are solved after each of the first observations, then at intervals.
const ALWAYS_SOLVED_STEPS: u64 = 32;
const SOLVE_INTERVAL: u64 = 16;

/// Maximum observed time. Longer times are discarded.
const MAX_OBSERVED: Duration = Duration::from_secs(3600);

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

/// Completed prefill.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrefillObservation {
    pub(crate) work: PrefillWork,
    /// Time since the booking or the previous first token, whichever is later.
    pub(crate) elapsed: Duration,
}

/// Decode steps of one request. Unless tokens were observed one by one, the time may include
/// prefills of other requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepObservation {
    /// Tokens in the context of all running requests of the rank, when the observation is made.
    pub(crate) context_tokens: f64,
    pub(crate) steps: u64,
    pub(crate) elapsed: Duration,
}

/// First token after a remote prefill.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferObservation {
    /// Prompt tokens that the decode worker did not have cached.
    pub(crate) tokens: f64,
    /// Tokens in the context of all running requests of the rank.
    pub(crate) context_tokens: f64,
    /// Time from the booking of the decode to its first token.
    pub(crate) elapsed: Duration,
}

/// Learned state that a decision reads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LatencyEstimate {
    /// Seconds per unit of work, for a rank with the factor 1.
    #[serde(flatten, serialize_with = "calibration::serialize_with_units")]
    pub coefficients: LatencyCoefficients,
    /// Mean length of an answer, in tokens.
    pub output_tokens: f64,
    /// Seconds of KV transfer per prompt token, from a prefill worker to a decode worker.
    #[serde(rename = "transfer_token_seconds")]
    pub transfer_token: f64,
    /// Requests per second, over all ranks.
    pub request_rate: f64,
    /// Seconds of prefill per second, over all ranks.
    pub prefill_rate: f64,
    /// Number of prefills that were booked.
    pub booked_prefills: u64,
}

/// Latency model of one model's ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ModelLatency {
    prefill: CoefficientFit,
    decode: CoefficientFit,
    coefficients: LatencyCoefficients,
    output_tokens: f64,
    transfer: TransferTime,
    #[serde(skip)]
    active_factors: ActiveRankFactors,
    #[serde(skip)]
    traffic: TrafficRate,
    #[serde(skip)]
    booked_prefills: u64,
    #[serde(skip)]
    time_to_first_token: PredictionTotals,
}

/// Sums of observed KV transfers. Unlike a mean of ratios, they are not dominated by short ones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct TransferTime {
    tokens: f64,
    seconds: f64,
}

impl Default for TransferTime {
    fn default() -> Self {
        Self {
            tokens: PRIOR_TRANSFER_TOKENS,
            seconds: PRIOR_TRANSFER_TOKENS * PRIOR_TRANSFER_TOKEN,
        }
    }
}

impl TransferTime {
    fn token_seconds(self) -> f64 {
        self.seconds / self.tokens
    }

    fn add(&mut self, tokens: f64, seconds: f64) {
        self.tokens = TRANSFER_RETENTION * self.tokens + tokens;
        self.seconds = TRANSFER_RETENTION * self.seconds + seconds;
    }
}

impl Default for LatencyEstimate {
    fn default() -> Self {
        Self {
            coefficients: PRIOR,
            output_tokens: PRIOR_OUTPUT_TOKENS,
            transfer_token: PRIOR_TRANSFER_TOKEN,
            request_rate: 0.0,
            prefill_rate: 0.0,
            booked_prefills: 0,
        }
    }
}

impl Default for ModelLatency {
    fn default() -> Self {
        Self {
            prefill: CoefficientFit::default(),
            decode: CoefficientFit::default(),
            coefficients: PRIOR,
            output_tokens: PRIOR_OUTPUT_TOKENS,
            transfer: TransferTime::default(),
            active_factors: ActiveRankFactors::default(),
            traffic: TrafficRate::default(),
            booked_prefills: 0,
            time_to_first_token: PredictionTotals::default(),
        }
    }
}

impl LatencyCoefficients {
    /// Returns the seconds of a prefill.
    #[inline]
    pub(crate) fn prefill_seconds(&self, work: PrefillWork) -> f64 {
        self.prefill_token * work.tokens + self.prefill_pair * work.pairs
    }

    /// Returns the seconds of prefill that are booked on a rank and not done. The engine has computed
    /// at most the oldest of them, which counts as an average one.
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
        (booked - oldest.min(timing.prefill_elapsed)).max(0.0)
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

impl ModelLatency {
    /// Returns the state for a decision.
    pub(crate) fn estimate(&self, now: Instant) -> LatencyEstimate {
        let traffic = self.traffic.snapshot(now);
        LatencyEstimate {
            coefficients: self.coefficients,
            output_tokens: self.output_tokens,
            transfer_token: self.transfer.token_seconds(),
            request_rate: traffic.requests,
            prefill_rate: traffic.prefill_seconds,
            booked_prefills: self.booked_prefills,
        }
    }

    /// Continues from another latency model, unless prefills were observed already. Request rates
    /// stay. Returns whether the model was replaced.
    pub(super) fn restore(&mut self, learned: ModelLatency) -> bool {
        if self.prefill.observed() > 0 {
            return false;
        }
        *self = Self {
            traffic: std::mem::take(&mut self.traffic),
            booked_prefills: self.booked_prefills,
            time_to_first_token: self.time_to_first_token,
            ..learned
        };
        true
    }

    /// Returns the factors for decisions on a rank that was inactive for this time.
    pub(crate) fn update_factors(
        &mut self,
        slowdown: &RankSlowdown,
        inactive: Duration,
    ) -> SlowdownFactors {
        self.active_factors.update(slowdown, inactive)
    }

    /// Returns the number of observed prefills.
    pub(super) fn prefill_observations(&self) -> u64 {
        self.prefill.observed()
    }

    /// Returns the number of observations of decode steps.
    pub(super) fn decode_observations(&self) -> u64 {
        self.decode.observed()
    }

    /// Returns the predicted and observed times to first token.
    pub(super) fn time_to_first_token(&self) -> PredictionTotals {
        self.time_to_first_token
    }

    /// Returns whether all numbers are in their ranges. The model of another process may be invalid.
    pub(super) fn is_valid(&self) -> bool {
        let coefficients = &self.coefficients;
        let seconds = [
            coefficients.prefill_token,
            coefficients.prefill_pair,
            coefficients.decode_step,
            coefficients.decode_context_token,
            self.transfer.token_seconds(),
        ];
        self.prefill.is_valid(MAX_SUM)
            && self.decode.is_valid(MAX_SUM)
            && (1.0..=MAX_SUM).contains(&self.transfer.tokens)
            && (0.0..=MAX_OUTPUT_TOKENS).contains(&self.output_tokens)
            && seconds
                .iter()
                .all(|seconds| (0.0..=MAX_WORK_SECONDS).contains(seconds))
    }

    /// Returns the estimated time of a prefill on a rank, or `None` before enough prefills were
    /// observed.
    pub(crate) fn prefill_time(&self, work: PrefillWork, factor: f64) -> Option<Duration> {
        if self.prefill.observed() < MIN_PREFILLS {
            return None;
        }
        let seconds = factor * self.coefficients.prefill_seconds(work);
        Duration::try_from_secs_f64(seconds.min(MAX_OBSERVED.as_secs_f64())).ok()
    }

    /// Returns the predicted time to the first token of a request that is about to be booked, in
    /// seconds.
    pub(crate) fn first_token_seconds(&self, work: PrefillWork, timing: &RankTiming) -> f64 {
        let coefficients = &self.coefficients;
        let prefill = timing.prefill_factor * coefficients.prefill_seconds(work);
        coefficients.queue_seconds(timing) + prefill
    }

    /// Records a predicted and observed time to first token.
    pub(crate) fn observe_first_token(
        &mut self,
        observation: FirstTokenObservation,
        slowdown: &mut RankSlowdown,
    ) {
        self.time_to_first_token.add(observation);
        slowdown.time_to_first_token.add(observation);
    }

    /// Records a booked request.
    pub(crate) fn on_booked(&mut self, work: PrefillWork, slowdown: &RankSlowdown, now: Instant) {
        self.booked_prefills += 1;
        let seconds = slowdown.prefill_factor * self.coefficients.prefill_seconds(work);
        self.traffic.add(seconds, now);
    }

    /// Learns from a prefill.
    pub(crate) fn observe_prefill(
        &mut self,
        observation: PrefillObservation,
        slowdown: &mut RankSlowdown,
    ) {
        let PrefillObservation { work, elapsed } = observation;
        if elapsed > MAX_OBSERVED || work.tokens <= 0.0 {
            return;
        }
        let expected = self.coefficients.prefill_seconds(work).max(1e-6);
        let mut observed = elapsed.as_secs_f64();
        if self.prefill.observed() >= MIN_PREFILLS {
            observed = observed
                .min(MAX_PREFILL_RATIO * expected * slowdown.prefill_factor + PREFILL_MARGIN);
            slowdown.add_prefill(observed, expected);
        }
        // Errors are relative, so a long prompt does not outweigh many short ones.
        let weight = 1.0 / (expected + PREFILL_MARGIN);
        let sample = FitSample {
            first: weight * work.tokens / PREFILL_TOKENS,
            second: weight * work.pairs / PREFILL_PAIRS,
            value: weight * observed / slowdown.prefill_factor,
        };
        self.prefill.add(sample, &PREFILL_RULES);
        let solved = self.prefill.solve(&PREFILL_RULES);
        self.coefficients.prefill_token = solved.first / PREFILL_TOKENS;
        self.coefficients.prefill_pair = solved.second / PREFILL_PAIRS;
    }

    /// Learns from decode steps.
    pub(crate) fn observe_steps(
        &mut self,
        observation: StepObservation,
        slowdown: &mut RankSlowdown,
    ) {
        let StepObservation {
            context_tokens,
            steps,
            elapsed,
        } = observation;
        if elapsed > MAX_OBSERVED || elapsed.is_zero() || steps == 0 {
            return;
        }
        let mut observed = elapsed.as_secs_f64() / steps as f64;
        if observed < MIN_STEP_SECONDS {
            return;
        }
        let expected = self.coefficients.step_seconds(context_tokens).max(1e-6);
        if self.decode.observed() > MIN_STEPS {
            let limit = MAX_STEP_RATIO * expected * slowdown.decode_factor;
            if observed > limit && slowdown.stalled_steps < MAX_STALLED_STEPS {
                slowdown.stalled_steps += 1;
                return;
            }
            if observed <= limit {
                slowdown.stalled_steps = 0;
            }
            observed = observed.min(limit);
            slowdown.add_step(observed, expected);
        }
        let sample = FitSample {
            first: 1.0,
            second: context_tokens / CONTEXT_TOKENS,
            value: observed / slowdown.decode_factor,
        };
        self.decode.add(sample, &DECODE_RULES);
        let count = self.decode.observed();
        if count <= ALWAYS_SOLVED_STEPS || count.is_multiple_of(SOLVE_INTERVAL) {
            let solved = self.decode.solve(&DECODE_RULES);
            self.coefficients.decode_step = solved.first;
            self.coefficients.decode_context_token = solved.second / CONTEXT_TOKENS;
        }
    }

    /// Learns from a KV transfer. The observed time includes the decode step of the first token and,
    /// on average, half of the step that ran when the blocks arrived. Both are subtracted.
    pub(crate) fn observe_transfer(
        &mut self,
        observation: TransferObservation,
        slowdown: &RankSlowdown,
    ) {
        let TransferObservation {
            tokens,
            context_tokens,
            elapsed,
        } = observation;
        if elapsed > MAX_OBSERVED || tokens <= 0.0 {
            return;
        }
        let step = slowdown.decode_factor * self.coefficients.step_seconds(context_tokens);
        let expected = self.transfer.token_seconds() * tokens;
        let observed = (elapsed.as_secs_f64() - 1.5 * step).max(0.0);
        let limit = MAX_PREFILL_RATIO * expected + PREFILL_MARGIN;
        self.transfer.add(tokens, observed.min(limit));
    }

    /// Learns from an answer of unknown length that took `elapsed` after its first token.
    pub(crate) fn observe_duration(
        &mut self,
        elapsed: Duration,
        context_tokens: f64,
        decode_factor: f64,
    ) {
        if elapsed <= MAX_OBSERVED {
            let step = decode_factor * self.coefficients.step_seconds(context_tokens).max(1e-6);
            self.observe_output(1.0 + elapsed.as_secs_f64() / step);
        }
    }

    /// Learns from the length of a finished answer.
    pub(crate) fn observe_output(&mut self, tokens: f64) {
        let tokens = tokens.min(MAX_OUTPUT_TOKENS);
        self.output_tokens += (tokens - self.output_tokens) * OUTPUT_SHARE;
    }
}
