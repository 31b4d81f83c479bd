//! Workers that a source found, one set after the other: what is wrong with single ones is told once, and only other sets are news.

use tracing::{info, warn};

use super::config::WorkerConfig;
use super::{ServedModel, resolve_each};
use crate::worker::Worker;

/// What a source found last.
pub(super) struct Found {
    by: &'static str,
    models: Vec<ServedModel>,
    in_use: Option<Vec<Worker>>,
    odd: Vec<String>,
}

impl Found {
    /// Nothing yet.
    pub(super) fn new(by: &'static str, models: Vec<ServedModel>) -> Self {
        Self {
            by,
            models,
            in_use: None,
            odd: Vec::new(),
        }
    }

    /// The workers of another set, if they are others.
    pub(super) fn take(&mut self, list: Vec<WorkerConfig>) -> Option<Vec<Worker>> {
        let (workers, odd) = resolve_each(list, &self.models);
        tell(&mut self.odd, odd);
        if self.in_use.as_ref() == Some(&workers) {
            return None;
        }
        info!(by = self.by, workers = workers.len(), "workers found");
        self.in_use = Some(workers.clone());
        Some(workers)
    }
}

/// Tells of oddities that were not there before.
pub(super) fn tell(before: &mut Vec<String>, now: Vec<String>) {
    for reason in now.iter().filter(|reason| !before.contains(reason)) {
        warn!(reason, "what was found cannot be a worker");
    }
    *before = now;
}
