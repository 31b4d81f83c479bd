//! Estimated prefill time: an online least-squares line `seconds = fixed + per_token * tokens` per
//! model and role. Old observations decay, because the speed of an engine changes with its other
//! work. Observed times include queueing inside the engine, so outliers are clamped to a few
//! typical errors.

use std::time::Duration;

/// Number of observations before the first estimate.
const MIN_OBSERVATIONS: u64 = 8;

/// Factor by which each observation reduces the weight of all earlier ones. About the last hundred
/// count.
const DECAY: f64 = 0.99;

/// The corresponding factor for the typical error, which has to follow a lasting change quickly.
const ERROR_DECAY: f64 = 0.95;

/// An observation counts as at most this many typical errors away from the line.
const MAX_TYPICAL_ERRORS: f64 = 3.0;

/// Minimum typical error, relative to the estimate. With 0, a perfect fit could never change.
const MIN_RELATIVE_ERROR: f64 = 0.02;

/// Minimum relative spread of the lengths. Below it, no slope is fitted.
const MIN_RELATIVE_SPREAD: f64 = 0.01;

/// Maximum observed time. Longer times are discarded.
const MAX_PREFILL_TIME: Duration = Duration::from_secs(3600);

/// Maximum relative error that one observation counts for.
const MAX_RELATIVE_ERROR: f64 = 10.0;

/// Regression line of one model and role, with its error.
#[derive(Clone, Debug, Default)]
pub struct PrefillTimeModel {
    sums: WeightedSums,
    observed: u64,
    /// Typical distance between an observation and the line, in seconds.
    typical_error: f64,
    error: Option<f64>,
}

/// Exponentially weighted means of tokens and seconds, with their variance and covariance.
#[derive(Clone, Debug, Default)]
struct WeightedSums {
    weight: f64,
    tokens: f64,
    seconds: f64,
    token_variance: f64,
    covariance: f64,
}

/// Line `seconds = fixed + per_token * tokens`; neither coefficient is negative.
#[derive(Clone, Copy, Debug, PartialEq)]
struct RegressionLine {
    fixed: f64,
    per_token: f64,
}

impl PrefillTimeModel {
    /// Creates a model without observations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records that the prefill of `tokens` uncached tokens took `time`.
    pub fn observe(&mut self, tokens: u64, time: Duration) {
        if tokens == 0 || time.is_zero() || time > MAX_PREFILL_TIME {
            return;
        }
        let tokens = tokens as f64;
        let seconds = time.as_secs_f64();
        let expected = self.sums.line().at(tokens);
        let has_estimate = self.observed >= MIN_OBSERVATIONS;
        let margin = MAX_TYPICAL_ERRORS * self.typical_error.max(MIN_RELATIVE_ERROR * expected);
        let clamped = if has_estimate {
            seconds.clamp((expected - margin).max(0.0), expected + margin)
        } else {
            seconds
        };
        if has_estimate {
            let error = ((expected - seconds).abs() / seconds).min(MAX_RELATIVE_ERROR);
            self.error = Some(
                self.error
                    .map_or(error, |before| DECAY * before + (1.0 - DECAY) * error),
            );
        }
        self.sums.add(tokens, clamped);
        self.observed += 1;
        // The first observations average the error around the line they define themselves.
        let decay = ERROR_DECAY.min(1.0 - 1.0 / self.observed as f64);
        let fitted = if has_estimate {
            expected
        } else {
            self.sums.line().at(tokens)
        };
        let distance = (clamped - fitted).abs();
        self.typical_error = decay * self.typical_error + (1.0 - decay) * distance;
    }

    /// Returns the estimated time of a prefill of `tokens`, or `None` before there are enough
    /// observations.
    pub fn estimate(&self, tokens: u64) -> Option<Duration> {
        if self.observed < MIN_OBSERVATIONS {
            return None;
        }
        let seconds = self
            .sums
            .line()
            .at(tokens as f64)
            .min(MAX_PREFILL_TIME.as_secs_f64());
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// Returns the mean recent error of the estimates, relative to the observed times (0.1 is 10
    /// %).
    pub fn relative_error(&self) -> Option<f64> {
        self.error
    }
}

impl WeightedSums {
    fn add(&mut self, tokens: f64, seconds: f64) {
        self.weight = DECAY * self.weight + 1.0;
        let part = 1.0 / self.weight;
        let tokens_off = tokens - self.tokens;
        let seconds_off = seconds - self.seconds;
        self.tokens += part * tokens_off;
        self.seconds += part * seconds_off;
        self.token_variance = (1.0 - part) * (self.token_variance + part * tokens_off * tokens_off);
        self.covariance = (1.0 - part) * (self.covariance + part * tokens_off * seconds_off);
    }

    /// Returns the least-squares line with coefficients that are not negative.
    fn line(&self) -> RegressionLine {
        if self.token_variance.sqrt() < MIN_RELATIVE_SPREAD * self.tokens || self.tokens == 0.0 {
            return RegressionLine {
                fixed: 0.0,
                per_token: if self.tokens == 0.0 {
                    0.0
                } else {
                    self.seconds / self.tokens
                },
            };
        }
        let per_token = self.covariance / self.token_variance;
        let fixed = self.seconds - per_token * self.tokens;
        if per_token < 0.0 {
            RegressionLine {
                fixed: self.seconds,
                per_token: 0.0,
            }
        } else if fixed < 0.0 {
            let through_zero = self.covariance + self.tokens * self.seconds;
            RegressionLine {
                fixed: 0.0,
                per_token: through_zero / (self.token_variance + self.tokens * self.tokens),
            }
        } else {
            RegressionLine { fixed, per_token }
        }
    }
}

impl RegressionLine {
    fn at(self, tokens: f64) -> f64 {
        self.fixed + self.per_token * tokens
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use warmroute_property_tests::property_config;

    use super::*;

    fn millis(of: u64) -> Duration {
        Duration::from_millis(of)
    }

    /// Iterates over distinct lengths, in no particular order.
    fn lengths() -> impl Iterator<Item = u64> {
        (0..).map(|at: u64| 100 + at * 7919 % 4000)
    }

    fn fitted(count: usize, line: impl Fn(u64) -> Duration) -> PrefillTimeModel {
        let mut times = PrefillTimeModel::new();
        lengths()
            .take(count)
            .for_each(|tokens| times.observe(tokens, line(tokens)));
        times
    }

    fn is_near(times: &PrefillTimeModel, tokens: u64, expected: Duration, within: f64) {
        let estimate = times.estimate(tokens).unwrap().as_secs_f64();
        let expected = expected.as_secs_f64();
        assert!(
            (estimate - expected).abs() <= within * expected,
            "{tokens} tokens: {estimate}, not {expected}"
        );
    }

    #[test]
    fn line_is_recovered_from_exact_times() {
        let line = |tokens| millis(20) + Duration::from_micros(100) * tokens as u32;
        let times = fitted(8, line);
        for tokens in [1, 500, 5000] {
            is_near(&times, tokens, line(tokens), 1e-6);
        }
        assert_eq!(
            times.relative_error(),
            None,
            "no estimate existed before the observations"
        );
        assert!(fitted(100, line).relative_error().unwrap() < 1e-6);
    }

    #[test]
    fn too_few_observations_give_no_estimate() {
        let times = fitted(7, millis);
        assert_eq!(times.estimate(100), None);
        assert_eq!(times.observed, 7);
    }

    #[test]
    fn single_length_gives_proportional_times() {
        let mut times = PrefillTimeModel::new();
        (0..20).for_each(|_| times.observe(1000, millis(100)));
        is_near(&times, 1000, millis(100), 1e-6);
        is_near(&times, 3000, millis(300), 1e-6);
    }

    #[test]
    fn line_is_never_falling_or_negative() {
        let falling = fitted(200, |tokens| millis(5000 - tokens));
        assert_eq!(falling.estimate(1), falling.estimate(4000));
        let steep = fitted(200, |tokens| Duration::from_micros(tokens * tokens));
        assert!(steep.estimate(1).unwrap() < steep.estimate(4000).unwrap());
        assert_eq!(steep.estimate(0), Some(Duration::ZERO));
    }

    #[test]
    fn outliers_hardly_move_the_line() {
        let line = |tokens| millis(20) + Duration::from_micros(100) * tokens as u32;
        let mut times = fitted(100, line);
        (0..3).for_each(|_| times.observe(1000, Duration::from_secs(60)));
        is_near(&times, 1000, line(1000), 0.1);
        assert!(
            times.relative_error().unwrap() > 0.001,
            "outliers still count as errors"
        );
    }

    #[test]
    fn lasting_change_is_learned() {
        let mut times = fitted(200, |tokens| millis(tokens / 10));
        lengths()
            .take(400)
            .for_each(|tokens| times.observe(tokens, millis(tokens)));
        is_near(&times, 2000, millis(2000), 0.1);
    }

    #[test]
    fn noise_averages_out() {
        let mut times = PrefillTimeModel::new();
        for (at, tokens) in lengths().take(400).enumerate() {
            times.observe(
                tokens,
                millis(50 + tokens / 5) * (80 + (at as u32 * 17) % 41) / 100,
            );
        }
        is_near(&times, 2000, millis(450), 0.05);
        assert!((0.05..0.2).contains(&times.relative_error().unwrap()));
    }

    #[test]
    fn invalid_times_are_discarded() {
        let mut times = PrefillTimeModel::new();
        for (tokens, took) in [
            (0, millis(5)),
            (5, Duration::ZERO),
            (5, Duration::from_secs(7200)),
            (5, Duration::MAX),
        ] {
            times.observe(tokens, took);
        }
        assert_eq!(times.observed, 0);
    }

    proptest! {
        #![proptest_config(property_config(2000))]

        #[test]
        fn any_observations_give_a_bounded_estimate(observed in vec((any::<u64>(), 0..4_000_000_000_000u64), 8..40), tokens in any::<u64>()) {
            let mut times = PrefillTimeModel::new();
            observed.iter().for_each(|(tokens, nanos)| times.observe(*tokens, Duration::from_nanos(*nanos)));
            if times.observed >= MIN_OBSERVATIONS {
                let estimate = times.estimate(tokens);
                prop_assert!(estimate.is_some_and(|estimate| estimate <= MAX_PREFILL_TIME));
                prop_assert!(estimate >= times.estimate(tokens / 2));
            }
            prop_assert!(times.relative_error().is_none_or(|error| (0.0..=MAX_RELATIVE_ERROR).contains(&error)));
        }
    }
}
