//! Comparison of predicted and observed times.

use serde::{Deserialize, Serialize};

/// Predicted and observed time to first token of one request, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FirstTokenObservation {
    /// Queued prefill at the time of the booking, plus the prefill of this request.
    pub predicted: f64,
    /// Time from the booking to the first token.
    pub observed: f64,
}

impl FirstTokenObservation {
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
        } = observation;
        self.requests += 1;
        self.predicted_seconds += predicted;
        self.observed_seconds += observed;
        self.absolute_error_seconds += (observed - predicted).abs();
    }
}
