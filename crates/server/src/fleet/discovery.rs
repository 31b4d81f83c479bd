//! Worker discovery.
//!
//! Each source reports the complete list of workers; the fleet computes the difference from the
//! current list. Pure functions resolve the configuration text into `Worker`s.
//!
//! Decision 0012.

pub mod config;
pub mod dns;
pub mod file;
pub mod kubernetes;
mod labels;
mod resolve;
mod source_health;
pub mod template;
pub mod worker_list_filter;
pub mod worker_set;
pub mod zmq;

use std::path::Path;

use warmroute_core::worker::{BlockSize, ModelName, Worker};
use warmroute_settings::{ConfigError, SettingsDocument, YamlValue};

pub use resolve::{resolve, resolve_each};
pub use source_health::DiscoverySourceHealth;

/// Settings of a model that discovery needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerModel {
    /// Model name as the engines serve it.
    pub name: ModelName,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// True if decode workers connect to the bootstrap port of prefill workers (SGLang). Each
    /// prefill worker then needs a distinct bootstrap address.
    pub uses_bootstrap: bool,
}

/// Parses a workers file. Returns the workers or all errors. `path` is only used in errors.
pub fn parse(
    path: &Path,
    bytes: &[u8],
    models: &[WorkerModel],
) -> Result<Vec<Worker>, Vec<ConfigError>> {
    let document = SettingsDocument::parse(path, bytes)?;
    if document.tree().value == YamlValue::Null {
        // The file was probably read between truncation and writing, so an empty fleet must be
        // explicit.
        return Err(vec![ConfigError::of_file(
            path,
            "the file is empty; write `[]` for a fleet without workers",
        )]);
    }
    let list: Vec<config::WorkerConfig> = document.read()?;
    resolve(&list, models).map_err(|problems| document.locate(problems))
}

#[cfg(test)]
mod tests;
