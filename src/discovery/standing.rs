//! How it is with a source of workers. While it says nothing that can be used the fleet stays as it is, and for how long
//! that has been so everybody can see.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tracing::{info, warn};

use crate::metrics::{Metrics, SourceLabel};

/// One source.
pub struct Standing {
    label: SourceLabel,
    /// What is wrong with it.
    wrong: Option<String>,
    metrics: Arc<Metrics>,
}

impl Standing {
    /// Nothing was heard of it yet.
    pub fn new(source: String, metrics: &Arc<Metrics>) -> Self {
        let label = SourceLabel { source };
        metrics.discovery_up.get_or_create(&label).set(0);
        Self {
            label,
            wrong: None,
            metrics: metrics.clone(),
        }
    }

    /// It said what can be used.
    pub fn good(&mut self) {
        if self.wrong.take().is_some() {
            info!(source = self.label.source, "workers can be found again");
        }
        self.metrics.discovery_up.get_or_create(&self.label).set(1);
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        self.metrics
            .discovery_success_timestamp_seconds
            .get_or_create(&self.label)
            .set(now.as_secs_f64());
    }

    /// It failed for this reason. Its workers stay in use.
    pub fn bad(&mut self, reason: &str) {
        if self.fail(reason) {
            warn!(
                source = self.label.source,
                reason, "workers cannot be found; the fleet in use is kept"
            );
        }
    }

    /// It has no workers any more, for this reason.
    pub fn removed(&mut self, reason: &str) {
        if self.fail(reason) {
            warn!(
                source = self.label.source,
                reason, "source selects no workers; its workers are removed"
            );
        }
    }

    /// Returns whether the reason is a new one.
    fn fail(&mut self, reason: &str) -> bool {
        self.metrics.discovery_up.get_or_create(&self.label).set(0);
        let is_new = self.wrong.as_deref() != Some(reason);
        if is_new {
            self.wrong = Some(reason.to_owned());
        }
        is_new
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        self.metrics.discovery_up.remove(&self.label);
        self.metrics
            .discovery_success_timestamp_seconds
            .remove(&self.label);
    }
}
