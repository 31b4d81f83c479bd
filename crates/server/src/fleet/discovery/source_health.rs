//! Health of a discovery source in logs and metrics. While a source fails, its workers stay
//! unchanged, and the metrics show since when.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tracing::{info, warn};

use warmroute_metrics::{Metrics, SourceLabel};

/// Health of one discovery source.
pub struct DiscoverySourceHealth {
    label: SourceLabel,
    /// Current error.
    error: Option<String>,
    metrics: Arc<Metrics>,
}

impl DiscoverySourceHealth {
    /// Registers a source that has not reported yet.
    pub fn new(source: String, metrics: &Arc<Metrics>) -> Self {
        let label = SourceLabel {
            source: source.into(),
        };
        metrics.workers.discovery_up.get_or_create(&label).set(0);
        Self {
            label,
            error: None,
            metrics: metrics.clone(),
        }
    }

    /// Records a successful update.
    pub fn mark_up(&mut self) {
        if self.error.take().is_some() {
            info!(
                source = self.label.source.as_str(),
                "discovery source recovered"
            );
        }
        self.metrics
            .workers
            .discovery_up
            .get_or_create(&self.label)
            .set(1);
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        self.metrics
            .workers
            .discovery_last_success_timestamp_seconds
            .get_or_create(&self.label)
            .set(now.as_secs_f64());
    }

    /// Records a failure. The workers of the source stay in use.
    pub fn mark_failed(&mut self, reason: &str) {
        if self.set_error(reason) {
            warn!(
                source = self.label.source.as_str(),
                reason, "discovery source failed; its workers stay in use"
            );
        }
    }

    /// Records that the source selects no workers, with the reason.
    pub fn mark_removed(&mut self, reason: &str) {
        if self.set_error(reason) {
            warn!(
                source = self.label.source.as_str(),
                reason,
                "discovery source selects no workers; its workers are removed after a grace period"
            );
        }
    }

    /// Sets the error. Returns whether it is new.
    fn set_error(&mut self, reason: &str) -> bool {
        self.metrics
            .workers
            .discovery_up
            .get_or_create(&self.label)
            .set(0);
        let is_new = self.error.as_deref() != Some(reason);
        if is_new {
            self.error = Some(reason.to_owned());
        }
        is_new
    }
}

impl Drop for DiscoverySourceHealth {
    fn drop(&mut self) {
        self.metrics.workers.discovery_up.remove(&self.label);
        self.metrics
            .workers
            .discovery_last_success_timestamp_seconds
            .remove(&self.label);
    }
}
