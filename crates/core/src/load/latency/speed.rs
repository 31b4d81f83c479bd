//! Speed of one worker rank relative to the fleet.

use serde::Serialize;

/// Weight of the prior factor 1, in observations. A short prefill counts for less than one.
const PRIOR_WEIGHT: f64 = 8.0;

/// Factors of a rank stay in this range.
const MIN_FACTOR: f64 = 0.1;
const MAX_FACTOR: f64 = 10.0;

/// Factors by which each observation reduces the weight of all earlier ones. About the last 40
/// prefills and 200 step observations count, so a slow rank is detected soon.
const PREFILL_RETENTION: f64 = 0.975;
const DECODE_RETENTION: f64 = 0.995;

/// Prefills shorter than this many seconds count for less than one observation.
const SHORT_PREFILL: f64 = 0.2;

/// Factors on the latency of the fleet: above 1, the rank is slower.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankSpeed {
    /// Factor on the prefill time.
    pub prefill: f64,
    /// Factor on the decode step time.
    pub decode: f64,
    #[serde(skip)]
    prefill_ratio: DecayedRatio,
    #[serde(skip)]
    decode_ratio: DecayedRatio,
}

/// Factors of a rank, rounded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpeedFactors {
    pub(crate) prefill: f32,
    pub(crate) decode: f32,
}

/// Ratio of two sums, observed over expected. Sums stay correct when one engine step completes two
/// prefills, which a mean of ratios would not.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct DecayedRatio {
    observed: f64,
    expected: f64,
}

impl Default for RankSpeed {
    fn default() -> Self {
        Self {
            prefill: 1.0,
            decode: 1.0,
            prefill_ratio: DecayedRatio::default(),
            decode_ratio: DecayedRatio::default(),
        }
    }
}

impl DecayedRatio {
    fn add(&mut self, observed: f64, expected: f64, retention: f64) -> f64 {
        self.observed = self.observed * retention + observed;
        self.expected = self.expected * retention + expected;
        ((self.observed + PRIOR_WEIGHT) / (self.expected + PRIOR_WEIGHT))
            .clamp(MIN_FACTOR, MAX_FACTOR)
    }
}

/// Steps of a factor per unit.
const FACTOR_STEPS: f64 = 32.0;

impl RankSpeed {
    /// Returns the factors for decisions, in steps of 1/32. Equal ranks differ by less, so they have
    /// equal costs and are chosen at random, instead of always the one with the lowest error.
    pub(crate) fn factors(&self) -> SpeedFactors {
        let rounded = |factor: f64| ((factor * FACTOR_STEPS).round() / FACTOR_STEPS) as f32;
        SpeedFactors {
            prefill: rounded(self.prefill),
            decode: rounded(self.decode),
        }
    }

    /// Records a prefill that took `observed` seconds. The latency model expects `expected` seconds.
    pub(super) fn add_prefill(&mut self, observed: f64, expected: f64) {
        let weight = 1.0 / (expected + SHORT_PREFILL);
        self.prefill =
            self.prefill_ratio
                .add(weight * observed, weight * expected, PREFILL_RETENTION);
    }

    /// Records decode steps with a mean time of `observed` seconds. The latency model expects
    /// `expected` seconds.
    pub(super) fn add_step(&mut self, observed: f64, expected: f64) {
        self.decode = self
            .decode_ratio
            .add(observed / expected, 1.0, DECODE_RETENTION);
    }
}
