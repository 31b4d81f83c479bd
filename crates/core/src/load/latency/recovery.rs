//! Recovery of a slow rank. Decisions avoid it, so it gets few requests, and its factors would stay
//! as they are. One request at a time therefore tries it at the factors of the fastest rank, and a
//! few fast prefills restore its prefill factor.

use std::time::{Duration, Instant};

use super::slowdown::{RankSlowdown, SlowdownFactors, TimeSums};

/// A rank is tried if one of its factors exceeds that of the fastest rank by this ratio. At light
/// load, even a small difference decides.
const MIN_TRIAL_RATIO: f64 = 1.05;

/// Above this ratio, a rank is slow: trying it costs time, but showing its recovery is worth it.
const SLOW_RATIO: f64 = 1.25;

/// Trials of slow ranks are at most one of this number of requests of a model.
const REQUESTS_PER_TRIAL: u32 = 4;

/// Minimum time between two trials of ranks that have been slow for long. In a fleet of workers of
/// different speed, such trials cost time and never show a recovery.
const LONG_SLOW_INTERVAL: Duration = Duration::from_secs(12);

/// Number of bookings after which a rank that has not recovered has been slow for long.
const LONG_SLOW_BOOKINGS: u32 = 8;

/// Time from a booking of a rank that has been slow for long to its next trial. It exceeds
/// [`LONG_SLOW_INTERVAL`], so that another rank is tried meanwhile.
const LONG_SLOW_PAUSE: Duration = Duration::from_secs(16);

/// Time from a booking or a prefill of a slow rank to its next trial. Each booking doubles it, up to
/// [`MAX_DOUBLINGS`] times, unless the last prefill was fast.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
const MAX_DOUBLINGS: u32 = 3;

/// The trial of a slow rank uses the factors of the fastest rank times this one, so that it wins
/// against equal ranks. Other trials have equal factors.
const TRIAL_PREFERENCE: f64 = 0.9;

/// Number of fast prefills in a row that restore the prefill factor.
const RECOVERY_PREFILLS: u32 = 3;

/// Minimum interval between fast prefills that count. An engine may complete two prefills in one
/// step, so that the second one seems to take no time.
const MIN_PREFILL_INTERVAL: Duration = Duration::from_millis(500);

/// Factors of the fastest observed rank of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FastestFactors {
    pub(super) prefill: f64,
    pub(super) decode: f64,
}

/// Trials of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct RecoveryTrials {
    /// Bookings since the rank became slower than the fastest one, or since its last recovery.
    slow_bookings: u32,
    /// Fast prefills in a row.
    fast_prefills: u32,
    booked_at: Option<Instant>,
    prefill_at: Option<Instant>,
}

impl Default for FastestFactors {
    fn default() -> Self {
        Self {
            prefill: 1.0,
            decode: 1.0,
        }
    }
}

impl FastestFactors {
    /// Returns the factors of a model with these ranks.
    pub(super) fn of_ranks(ranks: &[&RankSlowdown]) -> Self {
        let observed = |observations: fn(&RankSlowdown) -> u64| {
            let ranks = ranks.iter().copied();
            ranks.filter(move |slowdown| observations(slowdown) > 0)
        };
        Self {
            prefill: minimum(
                observed(|slowdown| slowdown.prefill_observations)
                    .map(|slowdown| slowdown.prefill_factor),
            ),
            decode: minimum(
                observed(|slowdown| slowdown.decode_observations)
                    .map(|slowdown| slowdown.decode_factor),
            ),
        }
    }

    /// Returns whether decisions prefer the fastest rank to one with these factors.
    #[inline]
    pub(super) fn are_below(self, factors: SlowdownFactors) -> bool {
        let fastest = SlowdownFactors::new(self.prefill, MIN_TRIAL_RATIO * self.decode);
        factors.prefill > fastest.prefill || factors.decode > fastest.decode
    }

    /// Returns the ratio by which a rank is slower.
    fn ratio_of(self, slowdown: &RankSlowdown) -> f64 {
        let prefill = slowdown.prefill_factor / self.prefill;
        prefill.max(slowdown.decode_factor / self.decode)
    }
}

/// Returns the minimum, or 1 without values.
fn minimum(factors: impl Iterator<Item = f64>) -> f64 {
    factors.reduce(f64::min).unwrap_or(1.0)
}

/// Limits the trials of the slow ranks of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct TrialLimit {
    /// Requests since the last one to a slow rank.
    requests: u32,
    /// Time of the last trial of a slow rank.
    tried_at: Option<Instant>,
}

impl TrialLimit {
    /// Returns whether a rank with these trials may be tried.
    fn permits(&self, trials: &RecoveryTrials, now: Instant) -> bool {
        let is_recent = |at: Instant| now.saturating_duration_since(at) < LONG_SLOW_INTERVAL;
        let must_wait = trials.needs_long_pause() && self.tried_at.is_some_and(is_recent);
        self.requests + 1 >= REQUESTS_PER_TRIAL && !must_wait
    }
}

impl RankSlowdown {
    /// Returns the factors with which the next request may try a rank. `None` if the rank is not
    /// slower than the fastest one, or no trial is due. The rank must have no outstanding prefill. A
    /// rank that is only a little slower is tried while it `is_idle`, without any request.
    #[cold]
    pub(crate) fn trial_factors(
        &self,
        fastest: FastestFactors,
        limit: TrialLimit,
        is_idle: bool,
        now: Instant,
    ) -> Option<SlowdownFactors> {
        let ratio = fastest.ratio_of(self);
        let is_slow = ratio > SLOW_RATIO;
        let is_permitted = if is_slow {
            limit.permits(&self.trials, now)
        } else {
            is_idle
        };
        if ratio <= MIN_TRIAL_RATIO || !is_permitted || !self.trials.is_due(is_slow, now) {
            return None;
        }
        let preference = if is_slow { TRIAL_PREFERENCE } else { 1.0 };
        let lower = |factor: f64, fastest: f64| (preference * fastest).min(factor);
        Some(SlowdownFactors::new(
            lower(self.prefill_factor, fastest.prefill),
            lower(self.decode_factor, fastest.decode),
        ))
    }

    /// Records that a request was routed to the rank.
    pub(crate) fn on_routed(
        &mut self,
        fastest: FastestFactors,
        limit: &mut TrialLimit,
        now: Instant,
    ) {
        let ratio = fastest.ratio_of(self);
        if ratio > SLOW_RATIO && self.trials.is_due(true, now) {
            limit.tried_at = Some(now);
        }
        self.trials.booked_at = Some(now);
        if ratio > MIN_TRIAL_RATIO {
            let bookings = &mut self.trials.slow_bookings;
            *bookings = bookings.saturating_add(1);
        } else {
            self.trials.slow_bookings = 0;
        }
        limit.requests = if ratio > SLOW_RATIO {
            0
        } else {
            limit.requests.saturating_add(1)
        };
    }
}

impl RecoveryTrials {
    /// Creates the trials of a rank that has been slow for long.
    #[cfg(test)]
    pub(super) fn slow_for_long() -> Self {
        Self {
            slow_bookings: LONG_SLOW_BOOKINGS,
            ..Self::default()
        }
    }

    /// Returns whether the long pause between trials applies: the rank has been slow for long, and its
    /// last prefill was slow. A fast prefill may be noise, but it justifies one early trial.
    fn needs_long_pause(&self) -> bool {
        self.slow_bookings >= LONG_SLOW_BOOKINGS && self.fast_prefills == 0
    }

    /// Returns whether the time since the last booking or prefill permits a trial.
    pub(super) fn is_due(&self, is_slow: bool, now: Instant) -> bool {
        let Some(last) = self.booked_at.max(self.prefill_at) else {
            return true;
        };
        let interval = if self.fast_prefills > 0 {
            MIN_INTERVAL
        } else if is_slow && self.needs_long_pause() {
            LONG_SLOW_PAUSE
        } else {
            MIN_INTERVAL * (1 << self.slow_bookings.min(MAX_DOUBLINGS))
        };
        now.saturating_duration_since(last) >= interval
    }

    /// Records a prefill of a rank with this factor. Returns whether the rank has recovered: its last
    /// prefills were closer to the factor of the fastest rank than to its own.
    pub(super) fn record_prefill(
        &mut self,
        times: TimeSums,
        factor: f64,
        fastest: f64,
        now: Instant,
    ) -> bool {
        let last = self.prefill_at.replace(now);
        let is_slower = factor > MIN_TRIAL_RATIO * fastest;
        let is_fast = times.observed < times.expected * (factor * fastest).sqrt();
        if !(is_slower && is_fast) {
            self.fast_prefills = 0;
            return false;
        }
        if last.is_none_or(|last| now.saturating_duration_since(last) >= MIN_PREFILL_INTERVAL) {
            self.fast_prefills += 1;
        }
        let has_recovered = self.fast_prefills >= RECOVERY_PREFILLS;
        if has_recovered {
            self.fast_prefills = 0;
            self.slow_bookings = 0;
        }
        has_recovered
    }
}
