//! Latency model of the ranks that serve one model.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::coefficients::{
    DecodeBatch, DecodeFit, LatencyCoefficients, PREFILL_MARGIN, PRIOR, PrefillFit, PrefillWork,
};
use super::limits::{LatencyLimits, PRIOR_OUTPUT_TOKENS};
use super::recent::RecentTimes;
use super::recovery::{FastestFactors, TrialLimit};
use super::slow_rank::{
    PhaseFactors, RankSpeed, SlowPhase, SpeedChange, geometric_mean, median, minimum,
};
use super::slowdown::{PhaseObservation, RankSlowdown, SlowdownFactors};
use super::totals::{FirstTokenObservation, PredictionTotals, TimeSums};
use super::traffic::TrafficRate;
use super::transfer::{PRIOR_TRANSFER_TOKEN, TransferTime};
use crate::load::timing::RankTiming;

/// Weight of one finished request in the mean answer length.
const OUTPUT_SHARE: f64 = 0.02;

/// Number of prefills before outliers are limited and factors are learned.
const MIN_PREFILLS: u64 = 10;

/// A prefill or KV transfer counts for at most this multiple of its expected time at factor 1 plus
/// [`PREFILL_MARGIN`]. A longer one waited for memory, was preempted, or stalled.
const MAX_PREFILL_RATIO: f64 = 3.0;

/// Number of step observations before outliers are discarded and factors are learned.
const MIN_STEPS: u64 = 50;

/// A step counts for at most this multiple of the expected time of its rank. Longer ones are
/// discarded as stalls, unless [`MAX_STALLED_STEPS`] observations in a row are that long.
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

/// Completed prefill.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrefillObservation {
    pub(crate) work: PrefillWork,
    /// Time since the booking or the previous first token, whichever is later.
    pub(crate) elapsed: Duration,
    /// Time of the first token.
    pub(crate) at: Instant,
}

/// Decode steps of one request. Unless tokens were observed one by one, the time may include
/// prefills of other requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepObservation {
    /// Requests of the rank, when the observation is made.
    pub(crate) batch: DecodeBatch,
    pub(crate) steps: u64,
    pub(crate) elapsed: Duration,
    /// Time of the last token.
    pub(crate) at: Instant,
}

/// First token after a remote prefill.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferObservation {
    /// Prompt tokens that the decode worker did not have cached.
    pub(crate) tokens: f64,
    /// Requests of the rank.
    pub(crate) batch: DecodeBatch,
    /// Time from the booking of the decode to its first token.
    pub(crate) elapsed: Duration,
}

/// Learned state that a decision reads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LatencyEstimate {
    /// Seconds per unit of work, for a rank with the factor 1.
    #[serde(flatten)]
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
    prefill: PrefillFit,
    decode: DecodeFit,
    coefficients: LatencyCoefficients,
    output_tokens: f64,
    transfer: TransferTime,
    #[serde(skip)]
    recent_prefills: RecentTimes,
    #[serde(skip)]
    recent_steps: RecentTimes,
    #[serde(skip)]
    fastest: FastestFactors,
    #[serde(skip)]
    trial_limit: TrialLimit,
    #[serde(skip)]
    limits: LatencyLimits,
    #[serde(skip)]
    traffic: TrafficRate,
    #[serde(skip)]
    booked_prefills: u64,
    #[serde(skip)]
    time_to_first_token: PredictionTotals,
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
            prefill: PrefillFit::default(),
            decode: DecodeFit::default(),
            coefficients: PRIOR,
            output_tokens: PRIOR_OUTPUT_TOKENS,
            transfer: TransferTime::default(),
            recent_prefills: RecentTimes::default(),
            recent_steps: RecentTimes::default(),
            fastest: FastestFactors::default(),
            trial_limit: TrialLimit::default(),
            limits: LatencyLimits::default(),
            traffic: TrafficRate::default(),
            booked_prefills: 0,
            time_to_first_token: PredictionTotals::default(),
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
            transfer_token: self.transfer_token(),
            request_rate: traffic.requests,
            prefill_rate: traffic.prefill_seconds,
            booked_prefills: self.booked_prefills,
        }
    }

    /// Continues from another latency model, unless prefills were observed already. Request rates
    /// stay. Returns whether the model was replaced.
    pub(super) fn restore(&mut self, learned: &ModelLatency) -> bool {
        if self.prefill.0.observed() > 0 {
            return false;
        }
        *self = Self {
            recent_steps: self.recent_steps,
            traffic: std::mem::take(&mut self.traffic),
            booked_prefills: self.booked_prefills,
            time_to_first_token: self.time_to_first_token,
            ..*learned
        };
        true
    }

    /// Normalizes the factors of the ranks. Then updates the medians, the factors of the fastest rank,
    /// and the limits of the influence of one rank on the model.
    pub(crate) fn compare_ranks(&mut self, ranks: &mut [&mut RankSlowdown]) {
        self.normalize_factors(ranks);
        let ranks = as_shared(ranks);
        self.fastest = FastestFactors {
            factors: PhaseFactors::of_ranks(&ranks, minimum),
            median: PhaseFactors::of_ranks(&ranks, median),
        };
        self.limits = LatencyLimits::of_ranks(&ranks);
    }

    /// Divides the factors of the ranks by their geometric mean, and multiplies the times of the model
    /// by it. Only the products of factors and times are observed, so both could drift otherwise. A
    /// rank with few observations is assumed to be as fast as the median.
    fn normalize_factors(&mut self, ranks: &mut [&mut RankSlowdown]) {
        let median = PhaseFactors::of_ranks(&as_shared(ranks), median);
        for slowdown in ranks.iter_mut() {
            slowdown.set_prior(median);
        }
        let mean = PhaseFactors::of_ranks(&as_shared(ranks), geometric_mean);
        for slowdown in ranks {
            slowdown.normalize(mean);
        }
        self.prefill.0.scale_values(mean.prefill);
        self.decode.0.scale_values(mean.decode);
        let scaled = self.coefficients.scaled(mean.prefill, mean.decode);
        self.coefficients = self.limits.clamp(scaled);
    }

    /// Returns the factors that decisions use.
    pub(crate) fn decision_factors(&self, slowdown: &RankSlowdown) -> SlowdownFactors {
        slowdown.factors(self.fastest.median)
    }

    /// Returns whether [`Self::trial_factors`] may have a result for a rank with these factors.
    #[inline]
    pub(crate) fn may_try(&self, factors: SlowdownFactors) -> bool {
        self.fastest.are_below(factors)
    }

    /// Returns the factors with which the next request may try a rank without outstanding prefills,
    /// if it is slower than others and a trial is due.
    pub(crate) fn trial_factors(
        &self,
        slowdown: &RankSlowdown,
        is_idle: bool,
        now: Instant,
    ) -> Option<SlowdownFactors> {
        slowdown.trial_factors(self.fastest, self.trial_limit, is_idle, now)
    }

    /// Records that a request was routed to a rank.
    pub(crate) fn on_routed(&mut self, slowdown: &mut RankSlowdown, now: Instant) {
        slowdown.on_routed(self.fastest, &mut self.trial_limit, now);
    }

    /// Compares the speed of a slow rank with that of the model.
    pub(crate) fn slow_speed(&self, slowdown: &RankSlowdown) -> Option<RankSpeed> {
        self.fastest.median.compare_slow(slowdown)
    }

    /// Updates whether a rank is slow. Returns its speed, in the slow phase, and the change.
    pub(crate) fn update_speed(
        &self,
        slowdown: &mut RankSlowdown,
        now: Instant,
    ) -> Option<(RankSpeed, SpeedChange)> {
        let compute = self.traffic.snapshot(now).mean_prefill_seconds();
        let speed = self
            .fastest
            .median
            .compare(slowdown, self.coefficients.prefill_base + compute);
        let was_slow = self.slow_speed(slowdown);
        let change = slowdown.update_speed(speed, now)?;
        Some((was_slow.unwrap_or(speed), change))
    }

    fn transfer_token(&self) -> f64 {
        self.limits.clamp_transfer(self.transfer.token_seconds())
    }

    /// Returns the number of observed prefills.
    pub(super) fn prefill_observations(&self) -> u64 {
        self.prefill.0.observed()
    }

    /// Returns the number of observations of decode steps.
    pub(super) fn decode_observations(&self) -> u64 {
        self.decode.0.observed()
    }

    /// Returns the predicted and observed times to first token.
    pub(super) fn time_to_first_token(&self) -> PredictionTotals {
        self.time_to_first_token
    }

    /// Returns whether all numbers are in their ranges. The model of another process may be invalid.
    pub(super) fn is_valid(&self) -> bool {
        let coefficients = &self.coefficients;
        let seconds = [coefficients.prefill(), coefficients.decode()].into_iter();
        let mut seconds = seconds.flatten().chain([self.transfer.token_seconds()]);
        self.prefill.0.is_valid(MAX_SUM)
            && self.decode.0.is_valid(MAX_SUM)
            && (1.0..=MAX_SUM).contains(&self.transfer.tokens)
            && (0.0..=MAX_OUTPUT_TOKENS).contains(&self.output_tokens)
            && seconds.all(|seconds| (0.0..=MAX_WORK_SECONDS).contains(&seconds))
    }

    /// Returns the seconds of a prefill per token, without attention.
    pub(crate) fn prefill_token_seconds(&self) -> f64 {
        self.coefficients.prefill_token
    }

    /// Returns the estimated time of a prefill on a rank, or `None` before enough prefills were
    /// observed.
    pub(crate) fn prefill_time(&self, work: PrefillWork, factor: f64) -> Option<Duration> {
        if self.prefill.0.observed() < MIN_PREFILLS {
            return None;
        }
        let seconds = factor * self.coefficients.prefill_seconds(work);
        Duration::try_from_secs_f64(seconds.min(MAX_OBSERVED.as_secs_f64())).ok()
    }

    /// Returns the seconds for which this prefill occupies the engine of a rank, or 0 before enough
    /// prefills were observed.
    pub(crate) fn prefill_compute_seconds(
        &self,
        work: PrefillWork,
        slowdown: &RankSlowdown,
    ) -> f64 {
        if self.prefill.0.observed() < MIN_PREFILLS {
            return 0.0;
        }
        let factor = f64::from(self.decision_factors(slowdown).prefill);
        factor * self.coefficients.compute_seconds(work)
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
        let seconds = slowdown.prefill_factor * self.coefficients.compute_seconds(work);
        self.traffic.add(seconds, now);
    }

    /// Learns from a prefill.
    pub(crate) fn observe_prefill(
        &mut self,
        observation: PrefillObservation,
        slowdown: &mut RankSlowdown,
    ) {
        let PrefillObservation { work, elapsed, at } = observation;
        if elapsed > MAX_OBSERVED || work.tokens <= 0.0 {
            return;
        }
        let expected = self.coefficients.prefill_seconds(work).max(1e-6);
        let mut observed = elapsed.as_secs_f64();
        if self.prefill.0.observed() >= MIN_PREFILLS {
            observed = observed.min(MAX_PREFILL_RATIO * expected + PREFILL_MARGIN);
            let observation = PhaseObservation {
                phase: SlowPhase::Prefill,
                times: TimeSums { observed, expected },
                fastest: self.fastest.factors.prefill,
                at,
            };
            slowdown.add(observation, &mut self.recent_prefills);
        }
        slowdown.own.prefill.add(work, observed, expected);
        let normalized = observed / slowdown.prefill_factor;
        self.prefill.add(work, normalized, expected);
        let decode = self.coefficients.decode();
        let solved = LatencyCoefficients::new(self.prefill.solve(), decode);
        self.coefficients = self.limits.clamp(solved);
    }

    /// Learns from decode steps.
    pub(crate) fn observe_steps(
        &mut self,
        observation: StepObservation,
        slowdown: &mut RankSlowdown,
    ) {
        let StepObservation {
            batch,
            steps,
            elapsed,
            at,
        } = observation;
        if elapsed > MAX_OBSERVED || elapsed.is_zero() || steps == 0 {
            return;
        }
        let mut observed = elapsed.as_secs_f64() / steps as f64;
        if observed < MIN_STEP_SECONDS {
            return;
        }
        let expected = self.coefficients.step_seconds(batch).max(1e-6);
        if self.decode.0.observed() > MIN_STEPS {
            let limit = MAX_STEP_RATIO * expected * slowdown.decode_factor;
            if observed > limit && slowdown.stalled_steps < MAX_STALLED_STEPS {
                slowdown.stalled_steps += 1;
                return;
            }
            if observed <= limit {
                slowdown.stalled_steps = 0;
            }
            observed = observed.min(limit);
            let observation = PhaseObservation {
                phase: SlowPhase::Decode,
                times: TimeSums { observed, expected },
                fastest: self.fastest.factors.decode,
                at,
            };
            slowdown.add(observation, &mut self.recent_steps);
        }
        slowdown.own.decode.add(batch, observed);
        let normalized = observed / slowdown.decode_factor;
        self.decode.add(batch, normalized);
        let count = self.decode.0.observed();
        if count <= ALWAYS_SOLVED_STEPS || count.is_multiple_of(SOLVE_INTERVAL) {
            let prefill = self.coefficients.prefill();
            let solved = LatencyCoefficients::new(prefill, self.decode.solve());
            self.coefficients = self.limits.clamp(solved);
        }
    }

    /// Learns from a KV transfer. The observed time includes the decode step of the first token and,
    /// on average, half of the step that ran when the blocks arrived. Both are subtracted.
    pub(crate) fn observe_transfer(
        &mut self,
        observation: TransferObservation,
        slowdown: &mut RankSlowdown,
    ) {
        let TransferObservation {
            tokens,
            batch,
            elapsed,
        } = observation;
        if elapsed > MAX_OBSERVED || tokens <= 0.0 {
            return;
        }
        let step = slowdown.decode_factor * self.coefficients.step_seconds(batch);
        let expected = self.transfer_token() * tokens;
        let observed = (elapsed.as_secs_f64() - 1.5 * step).max(0.0);
        let limit = MAX_PREFILL_RATIO * expected + PREFILL_MARGIN;
        let observed = observed.min(limit);
        slowdown.own.add_transfer(tokens, observed);
        self.transfer.add(tokens, observed);
    }

    /// Learns from an answer of unknown length that took `elapsed` after its first token.
    pub(crate) fn observe_duration(
        &mut self,
        elapsed: Duration,
        batch: DecodeBatch,
        slowdown: &mut RankSlowdown,
    ) {
        if elapsed <= MAX_OBSERVED {
            let step = slowdown.decode_factor * self.coefficients.step_seconds(batch).max(1e-6);
            self.observe_output(1.0 + elapsed.as_secs_f64() / step, slowdown);
        }
    }

    /// Learns from the length of a finished answer.
    pub(crate) fn observe_output(&mut self, tokens: f64, slowdown: &mut RankSlowdown) {
        let tokens = tokens.min(MAX_OUTPUT_TOKENS);
        slowdown.own.add_answer(tokens);
        let mean = self.output_tokens + (tokens - self.output_tokens) * OUTPUT_SHARE;
        self.output_tokens = self.limits.clamp_output(mean);
    }
}

/// Returns shared references to the slowdowns.
fn as_shared<'a>(ranks: &'a [&mut RankSlowdown]) -> Vec<&'a RankSlowdown> {
    ranks.iter().map(|slowdown| &**slowdown).collect()
}
