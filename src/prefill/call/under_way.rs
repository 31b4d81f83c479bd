//! How many prefills are under way, and how long each took.

use std::sync::Arc;
use std::time::Instant;

use crate::metrics::{Metrics, OutcomeLabel};

/// One prefill; dropped, it is under way no longer.
pub(super) struct UnderWay {
    metrics: Arc<Metrics>,
    began: Instant,
}

impl UnderWay {
    pub(super) fn begin(metrics: Arc<Metrics>) -> Self {
        metrics.prefills_under_way.inc();
        Self {
            metrics,
            began: Instant::now(),
        }
    }

    /// It has ended like this.
    pub(super) fn ended(self, outcome: &'static str) {
        self.metrics
            .prefill_calls
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
        let took = self.began.elapsed().as_secs_f64();
        self.metrics
            .prefill_call_seconds
            .get_or_create(&OutcomeLabel { outcome })
            .observe(took);
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.metrics.prefills_under_way.dec();
    }
}
