//! Discovery by a workers file. An unusable file does not change the fleet. It is logged once and
//! read again at the next change.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
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

/// Result of reading the workers file.
#[derive(Debug, PartialEq)]
pub enum WorkersFileUpdate {
    /// The fleet has changed.
    Applied(Vec<Worker>),
    /// The file lists the current fleet.
    Unchanged {
        /// True if the previous read was unusable.
        recovered: bool,
    },
    /// The file is unusable; the current fleet stays in use.
    Invalid {
        /// Errors in the file.
        errors: Vec<ConfigError>,
        /// True if the errors differ from those of the previous read.
        is_new: bool,
    },
}

/// State of a workers file. Compares each read with the previous one, without I/O.
pub struct WorkersFileState {
    path: PathBuf,
    models: Vec<WorkerModel>,
    current: Option<Vec<Worker>>,
    /// Content of the last successful read. Unchanged valid content is not parsed again, because
    /// parsing a large file is expensive.
    content: Vec<u8>,
    errors: Vec<ConfigError>,
}

impl WorkersFileState {
    /// Creates the state before the first read.
    pub fn new(path: PathBuf, models: Vec<WorkerModel>) -> Self {
        Self {
            path,
            models,
            current: None,
            content: Vec::new(),
            errors: Vec::new(),
        }
    }

    /// Applies the result of a read.
    pub fn apply(&mut self, bytes: io::Result<Vec<u8>>) -> WorkersFileUpdate {
        let was_valid = self.current.is_some() && self.errors.is_empty();
        let parsed = match bytes {
            Ok(bytes) if was_valid && bytes == self.content => {
                return WorkersFileUpdate::Unchanged { recovered: false };
            }
            Ok(bytes) => {
                let parsed = super::parse(&self.path, &bytes, &self.models);
                self.content = bytes;
                parsed
            }
            Err(error) => Err(vec![ConfigError::of_file(
                &self.path,
                format!("the workers file cannot be read: {error}"),
            )]),
        };
        match parsed {
            Ok(workers) => {
                let recovered = !std::mem::take(&mut self.errors).is_empty();
                if self.current.as_ref() == Some(&workers) {
                    return WorkersFileUpdate::Unchanged { recovered };
                }
                self.current = Some(workers.clone());
                WorkersFileUpdate::Applied(workers)
            }
            Err(errors) => {
                let is_new = self.errors != errors;
                self.errors.clone_from(&errors);
                WorkersFileUpdate::Invalid { errors, is_new }
            }
        }
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
    let mut state = WorkersFileState::new(file.path.clone(), file.models);
    loop {
        let update = state.apply(files::read(&file.path, MAX_SETTINGS_FILE).await);
        report_update(&file.path, &update, &metrics);
        if let WorkersFileUpdate::Applied(workers) = update {
            on_fleet(workers);
        }
        watcher.changed(file.timing).await;
    }
}

fn report_update(path: &Path, update: &WorkersFileUpdate, metrics: &Metrics) {
    let path = path.display();
    let outcome = match update {
        WorkersFileUpdate::Applied(workers) => {
            tracing::info!(%path, workers = workers.len(), "workers file applied");
            "applied"
        }
        WorkersFileUpdate::Unchanged { recovered } => {
            if *recovered {
                tracing::info!(%path, "workers file valid again; the fleet has not changed");
            }
            "unchanged"
        }
        WorkersFileUpdate::Invalid { errors, is_new } => {
            for error in errors.iter().filter(|_| *is_new) {
                tracing::warn!(%error, "workers file rejected; the current fleet stays in use");
            }
            "invalid"
        }
    };
    metrics
        .workers
        .file_last_reload_successful
        .set(i64::from(outcome != "invalid"));
    count_outcome(&metrics.workers.file_reloads, outcome);
}

#[cfg(test)]
mod tests;
