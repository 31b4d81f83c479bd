//! Rates of a model's traffic with exponential decay.

use std::time::Instant;

/// Time constant of the decay, in seconds.
const TIME_CONSTANT: f64 = 60.0;

/// Minimum age of the estimate, in seconds. Without it, the first request would count as a burst.
const MIN_AGE: f64 = 5.0;

/// Request rate and prefill utilization of all ranks of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TrafficRate {
    requests: f64,
    prefill_seconds: f64,
    started_at: Option<Instant>,
    updated_at: Option<Instant>,
}

/// Rates per second, over all ranks of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct TrafficSnapshot {
    pub(super) requests: f64,
    /// Seconds of prefill per second, without the fixed part.
    pub(super) prefill_seconds: f64,
}

impl TrafficSnapshot {
    /// Returns the mean time of a prefill without its fixed part, in seconds.
    pub(super) fn mean_prefill_seconds(self) -> f64 {
        if self.requests > 0.0 {
            self.prefill_seconds / self.requests
        } else {
            0.0
        }
    }
}

impl TrafficRate {
    /// Records a request whose prefill takes `prefill_seconds`.
    pub(super) fn add(&mut self, prefill_seconds: f64, now: Instant) {
        let decay = self.decay(now);
        self.requests = self.requests * decay + 1.0 / TIME_CONSTANT;
        self.prefill_seconds = self.prefill_seconds * decay + prefill_seconds / TIME_CONSTANT;
        self.started_at.get_or_insert(now);
        self.updated_at = Some(self.updated_at.map_or(now, |before| before.max(now)));
    }

    /// Returns the rates. An estimate younger than the time constant is scaled up, because it
    /// covers only a part of that time.
    pub(super) fn snapshot(&self, now: Instant) -> TrafficSnapshot {
        let Some(started_at) = self.started_at else {
            return TrafficSnapshot::default();
        };
        let age = now
            .saturating_duration_since(started_at)
            .as_secs_f64()
            .max(MIN_AGE);
        let scale = self.decay(now) / (1.0 - (-age / TIME_CONSTANT).exp());
        TrafficSnapshot {
            requests: self.requests * scale,
            prefill_seconds: self.prefill_seconds * scale,
        }
    }

    fn decay(&self, now: Instant) -> f64 {
        self.updated_at.map_or(0.0, |before| {
            let gap = now.saturating_duration_since(before).as_secs_f64();
            (-gap / TIME_CONSTANT).exp()
        })
    }
}
