//! Comparison of predicted and observed times.

use serde::{Deserialize, Serialize};

/// Predicted and observed time to first token of one request, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FirstTokenObservation {
    /// Queued prefill at the time of the booking, plus the prefill of this request.
    pub predicted: f64,
    /// Time from the booking to the first token.
    pub observed: f64,
    /// Prefill time that the cached tokens were predicted to save; 0 if it is unknown, or if the rank
    /// had other requests.
    pub predicted_saving: f64,
}

/// Minimum observed time that contradicts a predicted cache, as a multiple of the predicted time.
const LATE_RATIO: f64 = 4.0;
/// Minimum delay that contradicts it, as a share of the predicted saving.
const LATE_SHARE: f64 = 0.5;
/// Smaller savings are not distinguished from the delays of a busy engine, in seconds.
const MIN_SAVING: f64 = 0.1;

impl FirstTokenObservation {
    /// Returns whether the first token was so late that the prompt was probably not cached.
    pub(crate) fn contradicts_cache(&self) -> bool {
        let late = self.observed - self.predicted;
        self.predicted_saving >= MIN_SAVING
            && self.observed >= LATE_RATIO * self.predicted
            && late >= LATE_SHARE * self.predicted_saving
    }

    /// Returns the observed time divided by the predicted one; `None` if nothing had to be computed.
    pub fn ratio(&self) -> Option<f64> {
        (self.predicted > 0.0).then(|| self.observed / self.predicted)
    }
}

/// Totals over requests, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PredictionTotals {
    /// Number of requests.
    pub requests: u64,
    /// Sum of the predicted times.
    pub predicted_seconds: f64,
    /// Sum of the observed times.
    pub observed_seconds: f64,
    /// Sum of the absolute differences.
    pub absolute_error_seconds: f64,
}

impl PredictionTotals {
    pub(super) fn add(&mut self, observation: FirstTokenObservation) {
        let FirstTokenObservation {
            predicted,
            observed,
            ..
        } = observation;
        self.requests += 1;
        self.predicted_seconds += predicted;
        self.observed_seconds += observed;
        self.absolute_error_seconds += (observed - predicted).abs();
    }
}

/// Weighted sums of observed and expected times. Their ratio stays correct when one engine step
/// completes two prefills, which a mean of ratios would not.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct TimeSums {
    pub(super) observed: f64,
    pub(super) expected: f64,
}

impl TimeSums {
    pub(super) fn add(&mut self, sums: TimeSums) {
        self.observed += sums.observed;
        self.expected += sums.expected;
    }

    pub(super) fn scaled(self, factor: f64) -> Self {
        Self {
            observed: self.observed * factor,
            expected: self.expected * factor,
        }
    }

    /// Returns the ratio of the observed to the expected times.
    pub(super) fn ratio(self) -> f64 {
        self.observed / self.expected.max(f64::MIN_POSITIVE)
    }

    /// Returns the times with the observed ones divided by a ratio.
    pub(super) fn relative_to(self, ratio: f64) -> Self {
        Self {
            observed: self.observed / ratio,
            ..self
        }
    }
}
