//! Reading settings that people write: YAML whose every value remembers its line, so that a mistake found long after
//! parsing (two workers of one id, a port that overflows) still points at the text to mend. Mistakes are collected, not
//! met one by one. It lies below the adapters because the configuration file and the workers file share it.

mod place;
mod reader;
mod tree;
mod units;
mod urls;

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use thiserror::Error;

pub use place::{Place, Problem, Step};
pub use tree::{Tree, Value};
pub use units::{Period, Size};
pub use urls::has_credentials;

/// One mistake in a settings file: where it is and what would mend it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct ConfigError {
    /// The file.
    pub path: PathBuf,
    /// Line, from 1; none where the file as a whole is at fault.
    pub line: Option<usize>,
    /// Column, from 1.
    pub column: Option<usize>,
    /// What is wrong and how to mend it, in one sentence.
    pub problem: String,
}

impl ConfigError {
    /// A mistake of the file as a whole.
    pub fn of_file(path: &Path, problem: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line: None,
            column: None,
            problem: problem.into(),
        }
    }

    /// A mistake at a place in the file.
    pub fn at(path: &Path, place: Place, problem: impl Into<String>) -> Self {
        let known = |number: usize| (number > 0).then_some(number);
        Self {
            path: path.to_owned(),
            line: known(place.line),
            column: known(place.column),
            problem: problem.into(),
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.path.display())?;
        for number in [self.line, self.column].into_iter().flatten() {
            write!(f, "{number}:")?;
        }
        write!(f, " {}", self.problem)
    }
}

/// Whether it may stand in front of the colon of an ordinary header.
pub fn is_header_name(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// The words that stand nearest to `word` among `known`, for "did you mean".
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|name| (likeness(word, name), name))
        .filter(|(likeness, _)| *likeness > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

fn likeness(a: &str, b: &str) -> f64 {
    // Two letters swapped in a short word are one slip of the finger, yet far apart by the share of equal letters.
    let slip = if strsim::osa_distance(a, b) == 1 {
        0.9
    } else {
        0.0
    };
    strsim::jaro_winkler(a, b).max(slip)
}

/// A parsed settings file that still knows where everything stands.
pub struct Document {
    path: PathBuf,
    tree: Tree,
}

impl Document {
    /// Parses the bytes of a file; `path` only names it in mistakes.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, ConfigError> {
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let before = &bytes[..error.valid_up_to()];
            let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
            ConfigError::at(
                path,
                Place { line, column: 0 },
                "this is not UTF-8 text; save the file as UTF-8",
            )
        })?;
        let tree =
            tree::parse(text).map_err(|(place, problem)| ConfigError::at(path, place, problem))?;
        Ok(Self {
            path: path.to_owned(),
            tree,
        })
    }

    /// The content, each value with its place.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Reads the content as a `T`; all mistakes of form, in the order of the file.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, Vec<ConfigError>> {
        reader::read(&self.tree).map_err(|mistakes| {
            self.in_order(
                mistakes
                    .into_iter()
                    .map(|(place, problem)| ConfigError::at(&self.path, place, problem)),
            )
        })
    }

    /// Gives each problem the line of the value at fault, in the order of the file.
    pub fn locate(&self, problems: Vec<Problem>) -> Vec<ConfigError> {
        self.in_order(problems.into_iter().map(|problem| {
            ConfigError::at(&self.path, self.tree.place_of(&problem.trail), problem.text)
        }))
    }

    fn in_order(&self, errors: impl Iterator<Item = ConfigError>) -> Vec<ConfigError> {
        let mut errors: Vec<_> = errors.collect();
        errors.sort_by_key(|error| (error.line, error.column));
        errors
    }
}

#[cfg(test)]
mod tests;
