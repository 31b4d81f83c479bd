//! The current worker set of a discovery source. Only a changed set is reported, and each new error
//! is logged once.

use tracing::{info, warn};
use warmroute_core::worker::Worker;

use super::config::WorkerConfig;
use super::{WorkerModel, resolve_each};

/// Last worker set of a source.
pub struct WorkerSetTracker {
    source: &'static str,
    models: Vec<WorkerModel>,
    current: Option<Vec<Worker>>,
    unusable: Vec<String>,
}

impl WorkerSetTracker {
    /// Creates an empty tracker.
    pub fn new(source: &'static str, models: Vec<WorkerModel>) -> Self {
        Self {
            source,
            models,
            current: None,
            unusable: Vec::new(),
        }
    }

    /// Resolves a new list. Returns the workers if they differ from the current set.
    pub fn update(&mut self, list: Vec<WorkerConfig>) -> Option<Vec<Worker>> {
        let (workers, unusable) = resolve_each(list, &self.models);
        warn_about_new(&mut self.unusable, unusable);
        if self.current.as_ref() == Some(&workers) {
            return None;
        }
        info!(
            by = self.source,
            workers = workers.len(),
            "discovered workers changed"
        );
        self.current = Some(workers.clone());
        Some(workers)
    }
}

/// Logs the errors that are not in `before`, then replaces `before` by `now`.
pub fn warn_about_new(before: &mut Vec<String>, now: Vec<String>) {
    for reason in now.iter().filter(|reason| !before.contains(reason)) {
        warn!(reason, "discovered worker is not usable");
    }
    *before = now;
}
