//! Where workers come from. A source reports the full list it wants, as `Worker`s ready for the fleet; the difference to
//! the fleet in use is the fleet's business. Text becomes workers in pure functions, files are followed in [`file`].

pub mod config;
pub mod dns;
pub mod file;
mod found;
pub mod kubernetes;
mod labels;
mod resolve;
mod standing;
pub mod template;
pub mod zmq;

use std::path::Path;

use crate::settings::{ConfigError, Document, Value};
use crate::worker::{BlockSize, ModelName, Worker};

pub use resolve::{resolve, resolve_each};
pub use standing::Standing;

/// What discovery needs to know of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedModel {
    /// Name as the engines serve it.
    pub name: ModelName,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Whether its decode workers meet its prefill workers over each request, so that each of these needs a place of its own.
    pub meets: bool,
}

/// The workers that the text of a workers file lists, or every mistake in it. `path` only names the file in mistakes.
pub fn parse(
    path: &Path,
    bytes: &[u8],
    models: &[ServedModel],
) -> Result<Vec<Worker>, Vec<ConfigError>> {
    let document = Document::parse(path, bytes).map_err(|error| vec![error])?;
    if document.tree().value == Value::Null {
        // Most likely a file caught between truncation and writing; nobody means to drop a fleet by saying nothing.
        return Err(vec![ConfigError::of_file(
            path,
            "the file lists nothing; write `[]` for a fleet without workers",
        )]);
    }
    let list: Vec<config::WorkerConfig> = document.read()?;
    resolve(&list, models).map_err(|problems| document.locate(problems))
}

#[cfg(test)]
mod tests;
