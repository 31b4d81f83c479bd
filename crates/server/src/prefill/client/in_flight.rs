//! Number and duration of running prefills.

use std::sync::Arc;
use std::time::Instant;

use warmroute_metrics::{Metrics, OutcomeLabel, count_outcome};

/// One running prefill. Its end is counted by drop.
pub(super) struct InFlightPrefill {
    metrics: Arc<Metrics>,
    started: Instant,
}

impl InFlightPrefill {
    pub(super) fn begin(metrics: Arc<Metrics>) -> Self {
        metrics.prefill.calls_in_flight.inc();
        Self {
            metrics,
            started: Instant::now(),
        }
    }

    /// Records the outcome.
    pub(super) fn finish(self, outcome: &'static str) {
        count_outcome(&self.metrics.prefill.calls, outcome);
        let duration = self.started.elapsed().as_secs_f64();
        self.metrics
            .prefill
            .call_duration_seconds
            .get_or_create(&OutcomeLabel { outcome })
            .observe(duration);
    }
}

impl Drop for InFlightPrefill {
    fn drop(&mut self) {
        self.metrics.prefill.calls_in_flight.dec();
    }
}
