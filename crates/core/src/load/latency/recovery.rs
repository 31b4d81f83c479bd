//! Recovery of a slow rank. Decisions avoid it, so it gets few requests, and its factors would stay
//! as they are. One prefill at a time therefore tries it at the factors of the fastest rank, and a
//! few fast prefills or decode steps restore the factor.

use std::time::{Duration, Instant};

use super::slow_rank::{PhaseFactors, SlowPhase};
use super::slowdown::{RankSlowdown, SlowdownFactors};
use super::totals::TimeSums;

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
/// [`MAX_DOUBLINGS`] times, unless the last observations were fast.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
const MAX_DOUBLINGS: u32 = 3;

/// The trial of a slow rank uses the factors of the fastest rank times this one, so that it wins
/// against equal ranks. Other trials have equal factors.
const TRIAL_PREFERENCE: f64 = 0.9;

/// Sum of ratings that restores a factor: two fast observations, or more that are less clear.
const RECOVERY_RATING: f64 = 2.0;

/// Sum of ratings that permits an early trial of a rank that has been slow for long.
const EARLY_TRIAL_RATING: f64 = 0.5;

/// Time after the last rating in which the sum permits that. Decode steps that are discarded as
/// stalls are not rated, so a sum may be older.
const MAX_RATING_AGE: Duration = Duration::from_secs(8);

/// Minimum interval between ratings. All times of an interval are added up: an engine may complete
/// two prefills in one step, so that the second one seems to take no time.
const MIN_RATING_INTERVAL: Duration = Duration::from_millis(500);

/// Factors of the fastest observed rank of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct FastestFactors {
    pub(super) factors: PhaseFactors,
    /// Medians of the observed ranks, for the tolerance of factors.
    pub(super) median: PhaseFactors,
}

/// Factor of a rank in one phase, and that of the fastest rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct FactorRange {
    pub(super) own: f64,
    pub(super) fastest: f64,
}

/// Trials of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct RecoveryTrials {
    /// Bookings since the rank became slower than the fastest one, or since its last recovery.
    slow_bookings: u32,
    booked_at: Option<Instant>,
    prefill_at: Option<Instant>,
    prefill: RecoveryEvidence,
    decode: RecoveryEvidence,
}

/// Evidence that a rank runs one phase as fast as the fastest rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct RecoveryEvidence {
    /// Sum of the ratings, each from -1 to 1. It is at least 0.
    sum: f64,
    /// Observed and expected times since the last rating.
    times: TimeSums,
    rated_at: Option<Instant>,
}

impl FastestFactors {
    /// Returns whether decisions prefer the fastest rank to one with these factors.
    #[inline]
    pub(super) fn are_below(self, factors: SlowdownFactors) -> bool {
        let fastest = SlowdownFactors::new(self.factors, self.median);
        factors.prefill > fastest.prefill || factors.decode > fastest.decode
    }

    /// Returns the ratio by which a rank is slower.
    fn ratio_of(self, slowdown: &RankSlowdown) -> f64 {
        let prefill = slowdown.prefill_factor / self.factors.prefill;
        prefill.max(slowdown.decode_factor / self.factors.decode)
    }
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
        let must_wait = trials.needs_long_pause(now) && self.tried_at.is_some_and(is_recent);
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
        let factors = PhaseFactors {
            prefill: lower(self.prefill_factor, fastest.factors.prefill),
            decode: lower(self.decode_factor, fastest.factors.decode),
        };
        Some(SlowdownFactors::new(factors, fastest.median))
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

    /// Returns whether the last observations of one phase were fast.
    fn has_evidence(&self, now: Instant) -> bool {
        self.prefill.permits_early_trial(now) || self.decode.permits_early_trial(now)
    }

    /// Returns whether the long pause between trials applies: the rank has been slow for long, and its
    /// last observations were slow. Fast observations may be noise, but they justify an early trial.
    fn needs_long_pause(&self, now: Instant) -> bool {
        self.slow_bookings >= LONG_SLOW_BOOKINGS && !self.has_evidence(now)
    }

    /// Returns whether the time since the last booking or prefill permits a trial.
    pub(super) fn is_due(&self, is_slow: bool, now: Instant) -> bool {
        let Some(last) = self.booked_at.max(self.prefill_at) else {
            return true;
        };
        let interval = if self.has_evidence(now) {
            MIN_INTERVAL
        } else if is_slow && self.needs_long_pause(now) {
            LONG_SLOW_PAUSE
        } else {
            MIN_INTERVAL * (1 << self.slow_bookings.min(MAX_DOUBLINGS))
        };
        now.saturating_duration_since(last) >= interval
    }

    /// Records the time of a prefill, or the mean time of decode steps. Returns whether the rank has
    /// recovered in this phase. If so, its count of bookings while slow restarts at 0.
    pub(super) fn record(
        &mut self,
        phase: SlowPhase,
        times: TimeSums,
        range: FactorRange,
        now: Instant,
    ) -> bool {
        let evidence = match phase {
            SlowPhase::Prefill => {
                self.prefill_at = Some(now);
                &mut self.prefill
            }
            SlowPhase::Decode => &mut self.decode,
        };
        let has_recovered = evidence.add(times, range, now);
        if has_recovered {
            self.slow_bookings = 0;
        }
        has_recovered
    }
}

impl RecoveryEvidence {
    fn permits_early_trial(&self, now: Instant) -> bool {
        let is_recent = |at: Instant| now.saturating_duration_since(at) < MAX_RATING_AGE;
        self.sum >= EARLY_TRIAL_RATING && self.rated_at.is_some_and(is_recent)
    }

    /// Adds observed and expected times. Returns whether the evidence suffices.
    fn add(&mut self, times: TimeSums, range: FactorRange, now: Instant) -> bool {
        if range.own <= MIN_TRIAL_RATIO * range.fastest {
            *self = Self::default();
            return false;
        }
        self.times.add(times);
        let is_recent = |at: Instant| now.saturating_duration_since(at) < MIN_RATING_INTERVAL;
        if self.rated_at.is_some_and(is_recent) {
            return false;
        }
        self.rated_at = Some(now);
        let times = std::mem::take(&mut self.times);
        self.sum = (self.sum + range.rating(times)).max(0.0);
        let suffices = self.sum >= RECOVERY_RATING;
        if suffices {
            *self = Self::default();
        }
        suffices
    }
}

impl FactorRange {
    /// Returns `1 - 2 ln(ratio / fastest) / ln(own / fastest)`, limited to -1 to 1, for the ratio of the
    /// observed to the expected time. `own` counts as at least [`SLOW_RATIO`] times `fastest`, because
    /// smaller differences are below the noise.
    fn rating(self, times: TimeSums) -> f64 {
        let ratio = times.ratio().max(f64::MIN_POSITIVE);
        let slow = self.own.max(SLOW_RATIO * self.fastest);
        let position = (ratio / self.fastest).ln() / (slow / self.fastest).ln();
        (1.0 - 2.0 * position).clamp(-1.0, 1.0)
    }
}
