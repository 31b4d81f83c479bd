//! Slowdown of one worker rank relative to the latency model.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::change::ChangeDetector;
use super::limits::RankLatency;
use super::recent::RecentTimes;
use super::recovery::{FactorRange, RecoveryTrials};
use super::slow_rank::{PhaseFactors, SlowPeriod, SlowPhase};
use super::totals::{PredictionTotals, TimeSums};

/// Factors of a rank stay in this range.
const MIN_FACTOR: f64 = 0.1;
const MAX_FACTOR: f64 = 10.0;

/// Weight of the prior factor, the median, in observations. A short prefill counts for less than one.
const PRIOR_WEIGHT: f64 = 20.0;

/// Weight of the observations since a detected change. They replace all earlier ones.
const CHANGED_WEIGHT: f64 = 50.0;

/// Factors by which each observation reduces the weight of all earlier ones.
const PREFILL_RETENTION: f64 = 0.995;
const DECODE_RETENTION: f64 = 0.998;

/// Prefills shorter than this many seconds count for less than one observation in the average,
/// because the first token also waits for the step that is running.
const SHORT_PREFILL: f64 = 0.2;

/// The same for the detection of changes. The limits of the evidence make it less sensitive to
/// noise than the average.
const SHORT_CHANGED_PREFILL: f64 = 0.02;

/// Factors that differ from the median by at most this share of it count as the median, and others
/// are moved toward it by that much. Ranks of the same speed have equal costs then, so that ties
/// distribute the requests. The tolerance is larger if the factor is uncertain.
const MIN_TOLERANCE: f64 = 0.05;

/// Tolerance of a factor in standard errors. Three are about two standard errors of the difference
/// between two factors.
const TOLERATED_ERRORS: f64 = 3.0;

/// Maximum tolerance of a factor, as a share of the median.
const MAX_TOLERANCE: f64 = 0.2;

/// Slowdown of one worker rank relative to the latency model: above 1, the rank is slower.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankSlowdown {
    /// Factor on the prefill time of the model.
    pub prefill_factor: f64,
    /// Factor on the decode step time of the model.
    pub decode_factor: f64,
    /// Number of prefills from which the factor was learned.
    pub prefill_observations: u64,
    /// Number of observations of decode steps from which the factor was learned.
    pub decode_observations: u64,
    /// Predicted and observed times to first token.
    pub time_to_first_token: PredictionTotals,
    /// Observations of decode steps in a row that were discarded as stalls.
    #[serde(skip)]
    pub(super) stalled_steps: u32,
    /// Present while the rank counts as slow.
    #[serde(skip)]
    pub(super) slow: Option<SlowPeriod>,
    /// Time since which the factors meet the condition for a change of that.
    #[serde(skip)]
    pub(super) changing_since: Option<Instant>,
    /// Time of the last observation.
    #[serde(skip)]
    observed_at: Option<Instant>,
    /// Values that this rank alone yields.
    #[serde(skip)]
    pub(super) own: RankLatency,
    #[serde(skip)]
    pub(super) trials: RecoveryTrials,
    #[serde(skip)]
    prefill_estimate: FactorEstimate,
    #[serde(skip)]
    decode_estimate: FactorEstimate,
}

/// Factors of a rank, in the size that decisions read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlowdownFactors {
    pub(crate) prefill: f32,
    pub(crate) decode: f32,
}

/// Observed and expected time of one phase.
#[derive(Clone, Copy, Debug)]
pub(super) struct PhaseObservation {
    pub(super) phase: SlowPhase,
    /// Times of a prefill, or mean times of decode steps.
    pub(super) times: TimeSums,
    /// Factor of the fastest rank.
    pub(super) fastest: f64,
    pub(super) at: Instant,
}

/// Weights of an observation, per second.
#[derive(Clone, Copy, Debug)]
struct ObservationWeights {
    average: f64,
    change: f64,
}

/// Observation from which a factor is learned.
#[derive(Clone, Copy, Debug)]
struct FactorObservation {
    times: TimeSums,
    weights: ObservationWeights,
    /// Ratio of observed to predicted times that all ranks are assumed to have now, at most 1.
    common_ratio: f64,
}

/// Estimate of a factor: a slow average, which starts again from the last observations when the
/// factor changes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct FactorEstimate {
    /// Factor of a rank without observations.
    prior: f64,
    sums: TimeSums,
    recent: RecentTimes,
    /// Sum of the squared differences between observed and predicted times, with the weights of
    /// `sums`.
    squared_errors: f64,
    slower: ChangeDetector,
    faster: ChangeDetector,
}

impl Default for RankSlowdown {
    fn default() -> Self {
        Self {
            prefill_factor: 1.0,
            decode_factor: 1.0,
            prefill_observations: 0,
            decode_observations: 0,
            time_to_first_token: PredictionTotals::default(),
            stalled_steps: 0,
            slow: None,
            changing_since: None,
            observed_at: None,
            own: RankLatency::default(),
            trials: RecoveryTrials::default(),
            prefill_estimate: FactorEstimate::default(),
            decode_estimate: FactorEstimate::default(),
        }
    }
}

impl Default for FactorEstimate {
    fn default() -> Self {
        Self {
            prior: 1.0,
            sums: TimeSums::default(),
            recent: RecentTimes::default(),
            squared_errors: 0.0,
            slower: ChangeDetector::slower(),
            faster: ChangeDetector::faster(),
        }
    }
}

impl SlowdownFactors {
    pub(super) fn new(factors: PhaseFactors, median: PhaseFactors) -> Self {
        Self {
            prefill: with_tolerance(factors.prefill, median.prefill, 0.0),
            decode: with_tolerance(factors.decode, median.decode, 0.0),
        }
    }
}

/// Reduces the difference of a factor from the median by the tolerance. There is no jump, so a
/// small change of a factor changes costs by little.
fn with_tolerance(factor: f64, median: f64, standard_error: f64) -> f32 {
    let share = TOLERATED_ERRORS * standard_error / median;
    let tolerance = share.clamp(MIN_TOLERANCE, MAX_TOLERANCE) * median;
    (factor - (factor - median).clamp(-tolerance, tolerance)) as f32
}

impl FactorEstimate {
    /// Returns an estimate of this factor, which counts for [`CHANGED_WEIGHT`] observations.
    fn with_factor(&self, factor: f64) -> Self {
        self.restarted(TimeSums {
            observed: factor * (CHANGED_WEIGHT + PRIOR_WEIGHT) - PRIOR_WEIGHT * self.prior,
            expected: CHANGED_WEIGHT,
        })
    }

    /// Returns an estimate that starts again from these sums, with the same standard error.
    fn restarted(&self, sums: TimeSums) -> Self {
        let error = self.standard_error() * (sums.expected + PRIOR_WEIGHT);
        Self {
            prior: self.prior,
            sums,
            squared_errors: error * error,
            recent: self.recent,
            ..Self::default()
        }
    }

    fn factor(&self) -> f64 {
        let observed = self.sums.observed + PRIOR_WEIGHT * self.prior;
        let factor = observed / (self.sums.expected + PRIOR_WEIGHT);
        factor.clamp(MIN_FACTOR, MAX_FACTOR)
    }

    /// Returns the standard error of the factor; 0 without observations.
    fn standard_error(&self) -> f64 {
        self.squared_errors.sqrt() / (self.sums.expected + PRIOR_WEIGHT)
    }

    /// Divides the factor and the observed times by a mean of factors. The caller multiplies the
    /// expected times of the model by it.
    fn normalize(&mut self, mean: f64) {
        self.prior /= mean;
        self.sums.observed /= mean;
        self.squared_errors /= mean * mean;
        self.slower.normalize(mean);
        self.faster.normalize(mean);
    }

    /// Sets the factor after a recovery.
    fn set_factor(&mut self, factor: f64, model_recent: &mut RecentTimes) {
        self.recent.remove_from(model_recent);
        *self = self.with_factor(factor);
    }

    /// Computes the common ratio for an observation, then adds the observation to the recent ones.
    fn record_recent(
        &mut self,
        times: TimeSums,
        weights: ObservationWeights,
        model_recent: &mut RecentTimes,
    ) -> FactorObservation {
        let common_ratio = self.recent.common_ratio(model_recent);
        let relative = times.relative_to(self.factor());
        self.recent
            .add(relative.scaled(weights.average), model_recent);
        FactorObservation {
            times,
            weights,
            common_ratio,
        }
    }

    /// Adds an observation to the average and to the detection of changes.
    fn add(
        &mut self,
        observation: FactorObservation,
        retention: f64,
        model_recent: &mut RecentTimes,
    ) {
        let FactorObservation {
            times,
            weights,
            common_ratio,
        } = observation;
        let factor = self.factor();
        let compared = observation.compared();
        let weighted = compared.scaled(weights.average);
        let error = weighted.observed - factor * weighted.expected;
        self.squared_errors = retention * retention * self.squared_errors + error * error;
        self.sums = self.sums.scaled(retention);
        self.sums.add(weighted);
        // The common ratio can explain a change of this rank, but is no evidence for one. It is
        // uncertain, so an observation counts for less if all ranks are faster than predicted.
        let slower = times.scaled(weights.change);
        let faster = compared.scaled(weights.change * common_ratio);
        let changed = self.slower.add(slower, factor);
        let changed = self.faster.add(faster, factor).or(changed);
        if let Some(since) = changed {
            self.recent.remove_from(model_recent);
            *self = self.restarted(since.scaled(CHANGED_WEIGHT / since.expected));
        }
    }
}

impl FactorObservation {
    /// Returns the observed times, and those expected of a rank with the factor 1 now.
    fn compared(&self) -> TimeSums {
        self.times.relative_to(self.common_ratio)
    }
}

impl RankSlowdown {
    /// Creates the slowdown of a rank whose factors were learned before. Returns `None` if a factor
    /// is out of range.
    pub(super) fn restored(self) -> Option<Self> {
        let is_valid = |factor: f64| (MIN_FACTOR..=MAX_FACTOR).contains(&factor);
        (is_valid(self.prefill_factor) && is_valid(self.decode_factor)).then(|| Self {
            prefill_factor: self.prefill_factor,
            decode_factor: self.decode_factor,
            prefill_estimate: FactorEstimate::default().with_factor(self.prefill_factor),
            decode_estimate: FactorEstimate::default().with_factor(self.decode_factor),
            ..Self::default()
        })
    }

    /// Returns the number of observations.
    pub(crate) fn observations(&self) -> u64 {
        self.prefill_observations + self.decode_observations
    }

    /// Returns the factors that decisions use.
    pub(super) fn factors(&self, median: PhaseFactors) -> SlowdownFactors {
        let prefill_error = self.prefill_estimate.standard_error();
        let decode_error = self.decode_estimate.standard_error();
        SlowdownFactors {
            prefill: with_tolerance(self.prefill_factor, median.prefill, prefill_error),
            decode: with_tolerance(self.decode_factor, median.decode, decode_error),
        }
    }

    /// Sets the prior of the factors.
    pub(super) fn set_prior(&mut self, prior: PhaseFactors) {
        self.prefill_estimate.prior = prior.prefill;
        self.decode_estimate.prior = prior.decode;
        self.update_factors();
    }

    /// Divides the factors by the means.
    pub(super) fn normalize(&mut self, mean: PhaseFactors) {
        self.prefill_estimate.normalize(mean.prefill);
        self.decode_estimate.normalize(mean.decode);
        self.update_factors();
    }

    fn update_factors(&mut self) {
        self.prefill_factor = self.prefill_estimate.factor();
        self.decode_factor = self.decode_estimate.factor();
    }

    /// Returns the time since the last observation.
    pub(super) fn age(&self, now: Instant) -> Option<Duration> {
        let observed_at = self.observed_at?;
        Some(now.saturating_duration_since(observed_at))
    }

    /// Records an observation of one phase.
    pub(super) fn add(&mut self, observation: PhaseObservation, model_recent: &mut RecentTimes) {
        let PhaseObservation {
            phase,
            times,
            fastest,
            at,
        } = observation;
        let (estimate, own) = match phase {
            SlowPhase::Prefill => (&mut self.prefill_estimate, self.prefill_factor),
            SlowPhase::Decode => (&mut self.decode_estimate, self.decode_factor),
        };
        let (short, short_changed, retention) = match phase {
            SlowPhase::Prefill => (SHORT_PREFILL, SHORT_CHANGED_PREFILL, PREFILL_RETENTION),
            SlowPhase::Decode => (0.0, 0.0, DECODE_RETENTION),
        };
        let weights = ObservationWeights {
            average: 1.0 / (times.expected + short),
            change: 1.0 / (times.expected + short_changed),
        };
        let observation = estimate.record_recent(times, weights, model_recent);
        let range = FactorRange { own, fastest };
        let compared = observation.compared();
        if self.trials.record(phase, compared, range, at) {
            estimate.set_factor(fastest, model_recent);
        } else {
            estimate.add(observation, retention, model_recent);
        }
        match phase {
            SlowPhase::Prefill => self.prefill_observations += 1,
            SlowPhase::Decode => self.decode_observations += 1,
        }
        self.update_factors();
        self.observed_at = Some(at);
    }
}
