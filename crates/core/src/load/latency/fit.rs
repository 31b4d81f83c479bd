//! Least squares in two unknowns with exponential forgetting and a prior.

use serde::{Deserialize, Serialize};

/// One observation `first * x + second * y = value`.
#[derive(Clone, Copy, Debug)]
pub(super) struct FitSample {
    pub(super) first: f64,
    pub(super) second: f64,
    pub(super) value: f64,
}

/// Two coefficients. Neither is negative.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct FitCoefficients {
    pub(super) first: f64,
    pub(super) second: f64,
}

/// Constants of a fit.
#[derive(Clone, Copy, Debug)]
pub(super) struct FitRules {
    /// Factor by which each observation reduces the weight of all earlier ones.
    pub(super) retention: f64,
    /// Number of typical observations that the prior counts for.
    pub(super) prior_weight: f64,
    /// Coefficients before any observation.
    pub(super) prior: FitCoefficients,
}

/// Minimum share of one observation in the mean squares that scale the prior.
const MIN_SHARE: f64 = 0.02;

/// Keeps the determinant positive before the first observation.
const REGULARIZATION: f64 = 1e-12;

/// Normal equations of a least-squares fit. The prior is a ridge term around the prior
/// coefficients, scaled by the mean squares of the inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct CoefficientFit {
    first_first: f64,
    first_second: f64,
    second_second: f64,
    first_value: f64,
    second_value: f64,
    first_mean_square: f64,
    second_mean_square: f64,
    /// Number of observations.
    observed: u64,
}

impl CoefficientFit {
    /// Returns whether the absolute value of each sum is at most `max`. Sums of another process may be
    /// invalid.
    pub(super) fn is_valid(&self, max: f64) -> bool {
        let sums = [
            self.first_first,
            self.first_second,
            self.second_second,
            self.first_value,
            self.second_value,
            self.first_mean_square,
            self.second_mean_square,
        ];
        sums.iter().all(|sum| sum.abs() <= max)
    }

    /// Returns the number of observations.
    pub(super) fn observed(&self) -> u64 {
        self.observed
    }

    pub(super) fn add(&mut self, sample: FitSample, rules: &FitRules) {
        let FitSample {
            first,
            second,
            value,
        } = sample;
        let keep = rules.retention;
        self.first_first = self.first_first * keep + first * first;
        self.first_second = self.first_second * keep + first * second;
        self.second_second = self.second_second * keep + second * second;
        self.first_value = self.first_value * keep + first * value;
        self.second_value = self.second_value * keep + second * value;
        self.observed = self.observed.saturating_add(1);
        let share = (1.0 / self.observed as f64).max(MIN_SHARE);
        self.first_mean_square += (first * first - self.first_mean_square) * share;
        self.second_mean_square += (second * second - self.second_mean_square) * share;
    }

    /// Solves the normal equations. If one coefficient would not be positive, it is 0 and the other
    /// one fits alone. If neither would be positive, the prior is returned.
    pub(super) fn solve(&self, rules: &FitRules) -> FitCoefficients {
        let prior = rules.prior;
        let first_ridge = rules.prior_weight * self.first_mean_square + REGULARIZATION;
        let second_ridge = rules.prior_weight * self.second_mean_square + REGULARIZATION;
        let first_first = self.first_first + first_ridge;
        let second_second = self.second_second + second_ridge;
        let first_value = self.first_value + first_ridge * prior.first;
        let second_value = self.second_value + second_ridge * prior.second;
        let determinant = first_first * second_second - self.first_second * self.first_second;
        let first = (first_value * second_second - second_value * self.first_second) / determinant;
        let second = (first_first * second_value - self.first_second * first_value) / determinant;
        let solved = match (first > 0.0, second > 0.0) {
            (true, true) => FitCoefficients { first, second },
            (true, false) => FitCoefficients {
                first: first_value / first_first,
                second: 0.0,
            },
            (false, true) => FitCoefficients {
                first: 0.0,
                second: second_value / second_second,
            },
            (false, false) => prior,
        };
        if solved.first.is_finite() && solved.second.is_finite() {
            solved
        } else {
            prior
        }
    }
}
