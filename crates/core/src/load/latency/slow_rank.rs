//! Slow ranks, as logs and pages show them. A rank is slow if one of its learned factors exceeds the
//! median of its model by far. Decisions do not use this state: they use the factors themselves.

use std::time::{Duration, Instant};

use serde::Serialize;
use strum::IntoStaticStr;

use super::slowdown::RankSlowdown;
use crate::worker::WorkerRank;

/// A rank becomes slow if its factor exceeds this multiple of the median.
const SLOW_RATIO: f64 = 2.0;

/// The prefill factor counts only if a prefill of average length takes this many seconds longer than
/// with the median. The factors of very short prefills depend on other work of the machine.
const MIN_EXCESS: f64 = 0.02;

/// The speed of a rank changes if its factor meets the condition for this time.
const MIN_CHANGE_TIME: Duration = Duration::from_secs(3);

/// A slow rank is no longer slow if its factor is below this multiple of the median. The distance to
/// [`SLOW_RATIO`] is larger than the noise of the factors.
const RECOVERED_RATIO: f64 = 1.4;

/// Phase of a request whose time a factor describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum SlowPhase {
    /// Prefill.
    Prefill,
    /// Decode steps.
    Decode,
}

impl SlowPhase {
    /// Returns the name in logs and on pages.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Comparison of a rank with the other ranks of its model, in the phase in which it is slowest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankSpeed {
    /// Phase.
    pub phase: SlowPhase,
    /// Factor of the rank on the time of the latency model.
    pub factor: f64,
    /// Median of the factors of all ranks of the model. Of two ranks, that of the faster one.
    pub median: f64,
}

/// Slow rank, for pages.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SlowRank {
    /// Rank.
    #[serde(skip)]
    pub rank: WorkerRank,
    /// Comparison with its model.
    #[serde(flatten)]
    pub speed: RankSpeed,
    /// Seconds since the rank became slow.
    pub age_seconds: u64,
}

/// Change of the speed of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpeedTransition {
    /// Rank.
    pub rank: WorkerRank,
    /// Change.
    pub change: SpeedChange,
    /// Comparison with its model.
    pub speed: RankSpeed,
}

/// Direction of a change of speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpeedChange {
    /// The rank became slow.
    Slowed,
    /// The rank is no longer slow.
    Recovered,
}

/// Time in which a rank counts as slow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SlowPeriod {
    since: Instant,
    /// Phase in which the rank was last slow.
    phase: SlowPhase,
}

/// Factors of both phases: of one rank, or a summary of the ranks of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PhaseFactors {
    pub(super) prefill: f64,
    pub(super) decode: f64,
}

impl Default for PhaseFactors {
    fn default() -> Self {
        Self {
            prefill: 1.0,
            decode: 1.0,
        }
    }
}

impl PhaseFactors {
    /// Summarizes the factors of the ranks with observations.
    pub(super) fn of_ranks(ranks: &[&RankSlowdown], summarize: fn(&mut [f64]) -> f64) -> Self {
        let prefills = ranks.iter().filter(|rank| rank.prefill_observations > 0);
        let mut prefills: Vec<f64> = prefills.map(|rank| rank.prefill_factor).collect();
        let steps = ranks.iter().filter(|rank| rank.decode_observations > 0);
        let mut steps: Vec<f64> = steps.map(|rank| rank.decode_factor).collect();
        Self {
            prefill: summarize(&mut prefills),
            decode: summarize(&mut steps),
        }
    }

    /// Compares a rank with the medians. `prefill_seconds` is the mean time of a prefill.
    pub(super) fn compare(self, slowdown: &RankSlowdown, prefill_seconds: f64) -> RankSpeed {
        let prefill = self.compare_phase(slowdown, SlowPhase::Prefill);
        let decode = self.compare_phase(slowdown, SlowPhase::Decode);
        let excess = (prefill.factor - prefill.median) * prefill_seconds;
        if excess >= MIN_EXCESS && prefill.ratio() > decode.ratio() {
            prefill
        } else {
            decode
        }
    }

    fn compare_phase(self, slowdown: &RankSlowdown, phase: SlowPhase) -> RankSpeed {
        let (factor, median) = match phase {
            SlowPhase::Prefill => (slowdown.prefill_factor, self.prefill),
            SlowPhase::Decode => (slowdown.decode_factor, self.decode),
        };
        RankSpeed {
            phase,
            factor,
            median,
        }
    }

    /// Compares a slow rank with the medians, in the phase in which it was last slow.
    pub(super) fn compare_slow(self, slowdown: &RankSlowdown) -> Option<RankSpeed> {
        Some(self.compare_phase(slowdown, slowdown.slow?.phase))
    }
}

/// Returns the median, or 1 without values. Of two values, the lower one.
pub(super) fn median(factors: &mut [f64]) -> f64 {
    let Some(last) = factors.len().checked_sub(1) else {
        return 1.0;
    };
    let (_, median, _) = factors.select_nth_unstable_by(last / 2, f64::total_cmp);
    *median
}

/// Returns the minimum, or 1 without values.
pub(super) fn minimum(factors: &mut [f64]) -> f64 {
    factors.iter().copied().reduce(f64::min).unwrap_or(1.0)
}

/// Returns the geometric mean, or 1 without values.
pub(super) fn geometric_mean(factors: &mut [f64]) -> f64 {
    let sum: f64 = factors.iter().map(|factor| factor.ln()).sum();
    (sum / (factors.len() as f64).max(1.0)).exp()
}

impl RankSpeed {
    fn ratio(self) -> f64 {
        self.factor / self.median
    }
}

impl RankSlowdown {
    /// Returns the time since the rank became slow; `None` if it is not slow.
    pub(super) fn slow_age(&self, now: Instant) -> Option<Duration> {
        Some(now.saturating_duration_since(self.slow?.since))
    }

    /// Updates since when and in which phase the rank is slow. Returns the change.
    pub(super) fn update_speed(&mut self, speed: RankSpeed, now: Instant) -> Option<SpeedChange> {
        let changes = match self.slow {
            None => speed.ratio() > SLOW_RATIO,
            Some(_) => speed.ratio() < RECOVERED_RATIO,
        };
        if !changes {
            self.changing_since = None;
            if let Some(slow) = &mut self.slow {
                slow.phase = speed.phase;
            }
            return None;
        }
        let since = *self.changing_since.get_or_insert(now);
        if now.saturating_duration_since(since) < MIN_CHANGE_TIME {
            return None;
        }
        self.changing_since = None;
        match self.slow.take() {
            None => {
                self.slow = Some(SlowPeriod {
                    since,
                    phase: speed.phase,
                });
                Some(SpeedChange::Slowed)
            }
            Some(_) => Some(SpeedChange::Recovered),
        }
    }
}
