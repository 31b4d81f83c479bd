//! The workers file, followed while we run. An unusable file never touches the fleet in use: it is reported once and read
//! again at the next change.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::ServedModel;
use super::config::DiscoveryConfig;
use crate::lifecycle::follow::FileWatch;
use crate::metrics::{Metrics, OutcomeLabel};
use crate::settings::ConfigError;
use crate::worker::Worker;

/// What to follow and how.
#[derive(Clone, Debug)]
pub struct WorkersFile {
    /// The file.
    pub path: PathBuf,
    /// What its workers may serve.
    pub models: Vec<ServedModel>,
    /// How closely.
    pub follow: DiscoveryConfig,
}

/// What one reading of the file came to.
#[derive(Debug, PartialEq)]
pub enum Reading {
    /// A fleet other than the one in use.
    Applied(Vec<Worker>),
    /// The fleet in use.
    Unchanged {
        /// Whether the reading before was unusable.
        healed: bool,
    },
    /// Nothing usable; the fleet in use stays.
    Invalid {
        /// Why.
        errors: Vec<ConfigError>,
        /// Whether the reading before said something else.
        news: bool,
    },
}

/// The pure part of following: what was read before decides what a new reading means.
pub struct Follower {
    path: PathBuf,
    models: Vec<ServedModel>,
    in_use: Option<Vec<Worker>>,
    errors: Vec<ConfigError>,
}

impl Follower {
    /// Nothing read yet.
    pub fn new(path: PathBuf, models: Vec<ServedModel>) -> Self {
        Self {
            path,
            models,
            in_use: None,
            errors: Vec::new(),
        }
    }

    /// Takes the outcome of reading the file.
    pub fn take(&mut self, bytes: io::Result<Vec<u8>>) -> Reading {
        let parsed = match bytes {
            Ok(bytes) => super::parse(&self.path, &bytes, &self.models),
            Err(error) => Err(vec![ConfigError::of_file(
                &self.path,
                format!("the workers file cannot be read: {error}"),
            )]),
        };
        match parsed {
            Ok(workers) => {
                let healed = !std::mem::take(&mut self.errors).is_empty();
                if self.in_use.as_ref() == Some(&workers) {
                    return Reading::Unchanged { healed };
                }
                self.in_use = Some(workers.clone());
                Reading::Applied(workers)
            }
            Err(errors) => {
                let news = self.errors != errors;
                self.errors.clone_from(&errors);
                Reading::Invalid { errors, news }
            }
        }
    }
}

/// Follows the file for ever and reports each new fleet, the first one as soon as it is read.
pub async fn watch(
    file: WorkersFile,
    metrics: Arc<Metrics>,
    mut on_fleet: impl FnMut(Vec<Worker>),
) -> Infallible {
    // Listening starts before the first reading, so that no change falls between the two.
    let watch = FileWatch::new(&file.path);
    let mut follower = Follower::new(file.path.clone(), file.models);
    loop {
        let reading = follower.take(tokio::fs::read(&file.path).await);
        report(&file.path, &reading, &metrics);
        if let Reading::Applied(workers) = reading {
            on_fleet(workers);
        }
        watch
            .changed(file.follow.poll.get(), file.follow.debounce.get())
            .await;
    }
}

fn report(path: &Path, reading: &Reading, metrics: &Metrics) {
    let path = path.display();
    let outcome = match reading {
        Reading::Applied(workers) => {
            tracing::info!(%path, workers = workers.len(), "workers file read");
            "applied"
        }
        Reading::Unchanged { healed } => {
            if *healed {
                tracing::info!(%path, "workers file usable again, with the fleet in use");
            }
            "unchanged"
        }
        Reading::Invalid { errors, news } => {
            for error in errors.iter().filter(|_| *news) {
                tracing::warn!(%error, "workers file not usable; the fleet in use is kept");
            }
            "invalid"
        }
    };
    metrics
        .workers_file_valid
        .set(i64::from(outcome != "invalid"));
    metrics
        .workers_file_reloads
        .get_or_create(&OutcomeLabel { outcome })
        .inc();
}

#[cfg(test)]
mod tests;
