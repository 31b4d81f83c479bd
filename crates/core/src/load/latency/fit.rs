//! Least squares in three unknowns with exponential forgetting, a prior and lower bounds.

use serde::{Deserialize, Serialize};

/// Inputs of an observation, or one coefficient for each of them.
pub(super) type FitVector = [f64; 3];

/// Constants of a fit.
#[derive(Clone, Copy, Debug)]
pub(super) struct FitRules {
    /// Factor by which each observation reduces the weight of all earlier ones.
    pub(super) retention: f64,
    /// Number of typical observations that the prior counts for.
    pub(super) prior_weight: f64,
    /// Coefficients before any observation.
    pub(super) prior: FitVector,
}

/// Lower bound of a coefficient, as a share of its scaled prior. Without it, some work would seem to
/// cost nothing.
const MIN_PRIOR_SHARE: f64 = 0.02;

/// Keeps the equations solvable before the first observation. Also the minimum scale of the prior.
const REGULARIZATION: f64 = 1e-12;

/// Sums of a least-squares fit. The prior is a ridge term around the prior coefficients, in units of
/// the mean squares of the inputs. Engines differ in speed by orders of magnitude, but less in the
/// ratios of the coefficients. The prior coefficients are therefore scaled to the observed values: if
/// inputs always occur in the same ratio, the fit divides the time between them as the prior does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct CoefficientFit {
    /// Weighted sums of the products of two inputs.
    products: [FitVector; 3],
    /// Weighted sums of the products of input and value.
    values: FitVector,
    /// Sum of the weights.
    weight: f64,
    /// Number of observations.
    observed: u64,
}

impl CoefficientFit {
    /// Returns whether the absolute value of each sum is at most `max`. Sums of another process may be
    /// invalid.
    pub(super) fn is_valid(&self, max: f64) -> bool {
        let sums = self.products.iter().chain([&self.values]).flatten();
        sums.chain([&self.weight]).all(|sum| sum.abs() <= max)
    }

    /// Returns the number of observations.
    pub(super) fn observed(&self) -> u64 {
        self.observed
    }

    /// Adds an observation. `value` is the dot product of inputs and coefficients, plus an error.
    pub(super) fn add(&mut self, inputs: FitVector, value: f64, rules: &FitRules) {
        for row in 0..3 {
            for column in 0..3 {
                let product = &mut self.products[row][column];
                *product = *product * rules.retention + inputs[row] * inputs[column];
            }
            self.values[row] = self.values[row] * rules.retention + inputs[row] * value;
        }
        self.weight = self.weight * rules.retention + 1.0;
        self.observed = self.observed.saturating_add(1);
    }

    /// Multiplies all observed values by a factor.
    pub(super) fn scale_values(&mut self, factor: f64) {
        self.values = self.values.map(|value| value * factor);
    }

    /// Solves the normal equations. A coefficient below its bound is fixed at the bound, and the
    /// others are solved again.
    pub(super) fn solve(&self, rules: &FitRules) -> FitVector {
        let scale = self.prior_scale(rules);
        let prior = rules.prior.map(|coefficient| coefficient * scale);
        let bounds = prior.map(|coefficient| coefficient * MIN_PRIOR_SHARE);
        let mut equations = NormalEquations {
            products: self.products,
            values: self.values,
        };
        for (input, prior) in prior.into_iter().enumerate() {
            let mean_square = self.products[input][input] / self.weight.max(1.0);
            let ridge = rules.prior_weight * mean_square + REGULARIZATION;
            equations.products[input][input] += ridge;
            equations.values[input] += ridge * prior;
        }
        let mut bounded = [false; 3];
        // Each round sets at least one more coefficient to its bound.
        for _ in 0..3 {
            let solved = equations.with_fixed(bounded, bounds).solve();
            let is_below = |input: usize| !bounded[input] && solved[input] < bounds[input];
            let below = [0, 1, 2].map(is_below);
            if !solved.iter().all(|coefficient| coefficient.is_finite()) {
                return prior;
            }
            if below == [false; 3] {
                return solved;
            }
            bounded = [0, 1, 2].map(|input| bounded[input] || below[input]);
        }
        bounds
    }

    /// Returns the least-squares factor on all prior coefficients. The factor 1 counts for
    /// `prior_weight` observations.
    fn prior_scale(&self, rules: &FitRules) -> f64 {
        let prior = rules.prior;
        let predicted = self.products.map(|row| dot(row, prior));
        let predicted_square = dot(predicted, prior);
        let weight = rules.prior_weight * predicted_square / self.weight.max(1.0) + REGULARIZATION;
        let scale = (dot(self.values, prior) + weight) / (predicted_square + weight);
        scale.max(REGULARIZATION)
    }
}

/// Equations `products * coefficients = values`. The products are positive definite.
struct NormalEquations {
    products: [FitVector; 3],
    values: FitVector,
}

impl NormalEquations {
    /// Returns the equations in which some coefficients have a fixed value.
    fn with_fixed(&self, is_fixed: [bool; 3], fixed: FitVector) -> Self {
        let Self {
            mut products,
            mut values,
        } = *self;
        for index in (0..3).filter(|index| is_fixed[*index]) {
            for other in 0..3 {
                values[other] -= self.products[other][index] * fixed[index];
                products[other][index] = 0.0;
                products[index][other] = 0.0;
            }
            products[index][index] = 1.0;
        }
        for index in (0..3).filter(|index| is_fixed[*index]) {
            values[index] = fixed[index];
        }
        Self { products, values }
    }

    /// Solves the equations by Gaussian elimination. Positive definite products need no pivoting.
    fn solve(mut self) -> FitVector {
        for index in 0..3 {
            for row in index + 1..3 {
                let factor = self.products[row][index] / self.products[index][index];
                for column in index..3 {
                    self.products[row][column] -= factor * self.products[index][column];
                }
                self.values[row] -= factor * self.values[index];
            }
        }
        let mut solved = [0.0; 3];
        for index in (0..3).rev() {
            let others = dot(self.products[index], solved);
            solved[index] = (self.values[index] - others) / self.products[index][index];
        }
        solved
    }
}

fn dot(first: FitVector, second: FitVector) -> f64 {
    first[0] * second[0] + first[1] * second[1] + first[2] * second[2]
}
