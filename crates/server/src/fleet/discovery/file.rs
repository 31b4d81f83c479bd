//! Discovery by a workers file. An unusable file does not change the fleet. It is logged once and
//! read again at the next change.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::{io, slice};

use warmroute_core::worker::Worker;
use warmroute_metrics::{Metrics, count_outcome};
use warmroute_runtime::files;
use warmroute_runtime::lifecycle::file_watcher::{FileWatchTiming, FileWatcher};
use warmroute_settings::{ConfigError, MAX_SETTINGS_FILE};

use super::WorkerModel;

/// A workers file and the settings to follow it.
#[derive(Clone, Debug)]
pub struct WorkersFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Models that its workers may serve.
    pub models: Vec<WorkerModel>,
    /// Poll and debounce intervals.
    pub timing: FileWatchTiming,
}

/// State of a workers file. Compares each read with the previous one, without I/O.
pub struct WorkersFileState {
    path: PathBuf,
    models: Vec<WorkerModel>,
    metrics: Arc<Metrics>,
    current: Option<Vec<Worker>>,
    /// Content of the last file that could be read. Unchanged valid content is not parsed again,
    /// because parsing a large file is expensive.
    content: Option<Vec<u8>>,
    /// Errors of the last read.
    errors: Vec<ConfigError>,
}

impl WorkersFileState {
    /// Creates the state before the first read.
    pub fn new(path: PathBuf, models: Vec<WorkerModel>, metrics: Arc<Metrics>) -> Self {
        Self {
            path,
            models,
            metrics,
            current: None,
            content: None,
            errors: Vec::new(),
        }
    }

    /// Applies the result of a read. Returns the fleet if it has changed.
    pub fn apply(&mut self, bytes: io::Result<Vec<u8>>) -> Option<Vec<Worker>> {
        let path = self.path.display();
        let parsed = match bytes {
            Ok(bytes) if self.content.as_ref() == Some(&bytes) && self.errors.is_empty() => {
                self.count_read("unchanged");
                return None;
            }
            Ok(bytes) => {
                let parsed = super::parse(&self.path, &bytes, &self.models);
                self.content = Some(bytes);
                parsed
            }
            Err(error) => Err(vec![ConfigError::of_file(
                &self.path,
                format!("the workers file cannot be read: {error}"),
            )]),
        };
        match parsed {
            Ok(workers) => {
                let has_recovered = !std::mem::take(&mut self.errors).is_empty();
                if self.current.as_ref() == Some(&workers) {
                    if has_recovered {
                        tracing::info!(%path, "workers file valid again; the fleet has not changed");
                    }
                    self.count_read("unchanged");
                    return None;
                }
                tracing::info!(%path, workers = workers.len(), "workers file applied");
                self.count_read("applied");
                self.current = Some(workers.clone());
                Some(workers)
            }
            Err(errors) => {
                if self.errors != errors {
                    for error in &errors {
                        tracing::warn!(%error, "workers file rejected; the current fleet stays in use");
                    }
                    self.errors = errors;
                }
                self.count_read("invalid");
                None
            }
        }
    }

    fn count_read(&self, outcome: &'static str) {
        let metrics = &self.metrics.workers;
        let is_valid = i64::from(self.errors.is_empty());
        metrics.file_last_reload_successful.set(is_valid);
        count_outcome(&metrics.file_reloads, outcome);
    }
}

/// Follows the file and reports each new fleet. The first one is reported after the first valid
/// read.
pub async fn watch(
    file: WorkersFile,
    metrics: Arc<Metrics>,
    mut on_fleet: impl FnMut(Vec<Worker>),
) -> Infallible {
    // The watcher starts before the first read, so that no change is missed.
    let watcher = FileWatcher::new(slice::from_ref(&file.path));
    let mut state = WorkersFileState::new(file.path.clone(), file.models, metrics);
    loop {
        if let Some(workers) = state.apply(files::read(&file.path, MAX_SETTINGS_FILE).await) {
            on_fleet(workers);
        }
        watcher.changed(file.timing).await;
    }
}

#[cfg(test)]
mod tests;
