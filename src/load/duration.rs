//! How long a prefill will take. Computing a prompt costs something for itself and something for each token, so the time
//! is a line over the tokens; it is fitted while prefills are observed and forgets the old ones, because what an engine
//! manages changes with what else it does. Times include waiting inside the engine, so single ones may be far off: what
//! is beyond the usual error counts only for that much.

use std::time::Duration;

/// Observations before anything is estimated.
const ENOUGH: u64 = 8;

/// What one observation leaves of the weight of all before it: about the last hundred count.
const KEEP: f64 = 0.99;

/// The same for the usual error, so that a lasting change is soon believed.
const KEEP_USUAL: f64 = 0.95;

/// An observation counts as no farther from the line than so many usual errors.
const USUAL_ERRORS: f64 = 3.0;

/// The usual error is at least this part of an estimate; otherwise a perfect line could never learn another.
const LEAST_ERROR: f64 = 0.02;

/// Lengths that spread less than this around their mean say nothing about a slope.
const LEAST_SPREAD: f64 = 0.01;

/// Nothing longer is a prefill.
const LONGEST: Duration = Duration::from_secs(3600);

/// An error counts as at most so many times the time that it is about.
const WORST: f64 = 10.0;

/// The line of one model and role, and its error. Whoever observes keeps one of each.
#[derive(Clone, Debug, Default)]
pub struct PrefillTimes {
    sums: Sums,
    observed: u64,
    /// Usual distance between observation and line, in seconds.
    usual: f64,
    error: Option<f64>,
}

/// Weighted means of tokens and seconds, and how they vary together.
#[derive(Clone, Debug, Default)]
struct Sums {
    weight: f64,
    tokens: f64,
    seconds: f64,
    tokens_tokens: f64,
    tokens_seconds: f64,
}

/// `seconds = fixed + per_token * tokens`; neither is negative.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Line {
    fixed: f64,
    per_token: f64,
}

impl PrefillTimes {
    /// Nothing observed.
    pub fn new() -> Self {
        Self::default()
    }

    /// A prefill of so many tokens, cached ones left out, took so long.
    pub fn observe(&mut self, tokens: u64, took: Duration) {
        if tokens == 0 || took.is_zero() || took > LONGEST {
            return;
        }
        let (tokens, took) = (tokens as f64, took.as_secs_f64());
        let line = self.sums.line();
        let expected = line.at(tokens);
        let trusted = self.observed >= ENOUGH;
        let near = USUAL_ERRORS * self.usual.max(LEAST_ERROR * expected);
        let heard = if trusted {
            took.clamp((expected - near).max(0.0), expected + near)
        } else {
            took
        };
        if trusted {
            let error = ((expected - took).abs() / took).min(WORST);
            self.error = Some(
                self.error
                    .map_or(error, |before| KEEP * before + (1.0 - KEEP) * error),
            );
        }
        self.sums.add(tokens, heard);
        self.observed += 1;
        // The first few say how far observations usually are from the line that they make.
        let keep = KEEP_USUAL.min(1.0 - 1.0 / self.observed as f64);
        let off = (heard
            - if trusted {
                expected
            } else {
                self.sums.line().at(tokens)
            })
        .abs();
        self.usual = keep * self.usual + (1.0 - keep) * off;
    }

    /// How long the prefill of so many tokens will take; `None` until enough was observed.
    pub fn estimate(&self, tokens: u64) -> Option<Duration> {
        if self.observed < ENOUGH {
            return None;
        }
        let seconds = self
            .sums
            .line()
            .at(tokens as f64)
            .min(LONGEST.as_secs_f64());
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// How far estimates were off lately, as a part of the times themselves: 0.1 is ten per cent.
    pub fn relative_error(&self) -> Option<f64> {
        self.error
    }
}

impl Sums {
    fn add(&mut self, tokens: f64, seconds: f64) {
        self.weight = KEEP * self.weight + 1.0;
        let part = 1.0 / self.weight;
        let (tokens_off, seconds_off) = (tokens - self.tokens, seconds - self.seconds);
        self.tokens += part * tokens_off;
        self.seconds += part * seconds_off;
        self.tokens_tokens = (1.0 - part) * (self.tokens_tokens + part * tokens_off * tokens_off);
        self.tokens_seconds =
            (1.0 - part) * (self.tokens_seconds + part * tokens_off * seconds_off);
    }

    /// The line of least squares among those that make sense.
    fn line(&self) -> Line {
        if self.tokens_tokens.sqrt() < LEAST_SPREAD * self.tokens || self.tokens == 0.0 {
            return Line {
                fixed: 0.0,
                per_token: if self.tokens == 0.0 {
                    0.0
                } else {
                    self.seconds / self.tokens
                },
            };
        }
        let per_token = self.tokens_seconds / self.tokens_tokens;
        let fixed = self.seconds - per_token * self.tokens;
        if per_token < 0.0 {
            Line {
                fixed: self.seconds,
                per_token: 0.0,
            }
        } else if fixed < 0.0 {
            let through_zero = self.tokens_seconds + self.tokens * self.seconds;
            Line {
                fixed: 0.0,
                per_token: through_zero / (self.tokens_tokens + self.tokens * self.tokens),
            }
        } else {
            Line { fixed, per_token }
        }
    }
}

impl Line {
    fn at(self, tokens: f64) -> f64 {
        self.fixed + self.per_token * tokens
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn millis(of: u64) -> Duration {
        Duration::from_millis(of)
    }

    /// Lengths that differ, in no order.
    fn lengths() -> impl Iterator<Item = u64> {
        (0..).map(|at: u64| 100 + at * 7919 % 4000)
    }

    fn fitted(count: usize, line: impl Fn(u64) -> Duration) -> PrefillTimes {
        let mut times = PrefillTimes::new();
        lengths()
            .take(count)
            .for_each(|tokens| times.observe(tokens, line(tokens)));
        times
    }

    fn is_near(times: &PrefillTimes, tokens: u64, expected: Duration, within: f64) {
        let estimate = times.estimate(tokens).unwrap().as_secs_f64();
        let expected = expected.as_secs_f64();
        assert!(
            (estimate - expected).abs() <= within * expected,
            "{tokens} tokens: {estimate}, not {expected}"
        );
    }

    #[test]
    fn a_line_is_found() {
        let line = |tokens| millis(20) + Duration::from_micros(100) * tokens as u32;
        let times = fitted(8, line);
        for tokens in [1, 500, 5000] {
            is_near(&times, tokens, line(tokens), 1e-6);
        }
        assert_eq!(
            times.relative_error(),
            None,
            "nothing was estimated before it was observed"
        );
        assert!(fitted(100, line).relative_error().unwrap() < 1e-6);
    }

    #[test]
    fn nothing_is_estimated_from_too_little() {
        let times = fitted(7, millis);
        assert_eq!(times.estimate(100), None);
        assert_eq!(times.observed, 7);
    }

    #[test]
    fn of_a_single_length_the_time_is_in_proportion() {
        let mut times = PrefillTimes::new();
        (0..20).for_each(|_| times.observe(1000, millis(100)));
        is_near(&times, 1000, millis(100), 1e-6);
        is_near(&times, 3000, millis(300), 1e-6);
    }

    #[test]
    fn no_line_goes_down_or_below_zero() {
        let falling = fitted(200, |tokens| millis(5000 - tokens));
        assert_eq!(falling.estimate(1), falling.estimate(4000));
        let steep = fitted(200, |tokens| Duration::from_micros(tokens * tokens));
        assert!(steep.estimate(1).unwrap() < steep.estimate(4000).unwrap());
        assert_eq!(steep.estimate(0), Some(Duration::ZERO));
    }

    #[test]
    fn single_times_far_off_hardly_count() {
        let line = |tokens| millis(20) + Duration::from_micros(100) * tokens as u32;
        let mut times = fitted(100, line);
        (0..3).for_each(|_| times.observe(1000, Duration::from_secs(60)));
        is_near(&times, 1000, line(1000), 0.1);
        assert!(
            times.relative_error().unwrap() > 0.001,
            "but they are errors"
        );
    }

    #[test]
    fn a_lasting_change_is_learned() {
        let mut times = fitted(200, |tokens| millis(tokens / 10));
        lengths()
            .take(400)
            .for_each(|tokens| times.observe(tokens, millis(tokens)));
        is_near(&times, 2000, millis(2000), 0.1);
    }

    #[test]
    fn noise_averages_out() {
        let mut times = PrefillTimes::new();
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
    fn what_is_no_prefill_is_not_observed() {
        let mut times = PrefillTimes::new();
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
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_times_give_a_time(observed in vec((any::<u64>(), 0..4_000_000_000_000u64), 8..40), tokens in any::<u64>()) {
            let mut times = PrefillTimes::new();
            observed.iter().for_each(|(tokens, nanos)| times.observe(*tokens, Duration::from_nanos(*nanos)));
            if times.observed >= ENOUGH {
                let estimate = times.estimate(tokens);
                prop_assert!(estimate.is_some_and(|estimate| estimate <= LONGEST));
                prop_assert!(estimate >= times.estimate(tokens / 2));
            }
            prop_assert!(times.relative_error().is_none_or(|error| (0.0..=WORST).contains(&error)));
        }
    }
}
