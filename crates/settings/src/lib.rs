//! Reader of settings files in YAML: the configuration file and the workers file. Every value has
//! its position, so an error found after parsing (two workers with the same id, a port that
//! overflows) points at the text to fix. The reader collects all errors of a file.
//!
//! Decision 0053.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod files;
mod problem;
mod reader;
mod schema;
mod settings_error;
mod tree;
mod units;
mod urls;
mod variables;

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Serialize, Serializer};
use thiserror::Error;

pub use files::{
    MAX_SECRET_FILE, MAX_SETTINGS_FILE, describe_missing_file, open_regular_file, read_limited,
    read_regular_file,
};
pub use problem::{
    PathStep, Problem, SourcePosition, all_within, header_name_problem, header_name_problems,
};
pub use schema::{ADDRESS_PATTERN, settings_schema};
pub use tree::{YamlNode, YamlValue};
pub use units::{ByteSize, DurationSetting, format_elapsed};
pub use urls::has_credentials;
use variables::UnresolvedText;
pub use variables::escape_references;

/// Error in a settings file, with its position and fix.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize)]
pub struct ConfigError {
    /// Path of the file.
    #[serde(rename = "file", serialize_with = "serialize_path")]
    pub path: PathBuf,
    /// Line, from 1. `None` if the error concerns the whole file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// Column, from 1. `None` if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub column: Option<usize>,
    /// Problem and fix, in one sentence.
    #[serde(rename = "message")]
    pub problem: String,
}

impl ConfigError {
    /// Creates an error that concerns the whole file.
    pub fn of_file(path: &Path, problem: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line: None,
            column: None,
            problem: problem.into(),
        }
    }

    /// Creates an error at a position in the file.
    pub fn at(path: &Path, position: SourcePosition, problem: impl Into<String>) -> Self {
        let known = |number: usize| (number > 0).then_some(number);
        Self {
            path: path.to_owned(),
            line: known(position.line),
            column: known(position.column),
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

/// Serializes a path as text, in which invalid UTF-8 is replaced.
pub fn serialize_path<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// Returns the name in `known` that is most similar to `word`, for the hint "did you mean". Returns
/// `None` if no name is similar enough.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|name| (similarity(&word.to_lowercase(), &name.to_lowercase()), name))
        .filter(|(similarity, _)| *similarity > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

fn similarity(a: &str, b: &str) -> f64 {
    // Jaro-Winkler rates a short word with two swapped letters as dissimilar, although it differs
    // by a single typo.
    let typo = if strsim::osa_distance(a, b) == 1 {
        0.9
    } else {
        0.0
    };
    strsim::jaro_winkler(a, b).max(typo)
}

/// Returns a number with a noun in singular or plural.
pub fn format_count(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

/// Parsed settings file in which every value has its position.
pub struct SettingsDocument {
    path: PathBuf,
    text: String,
    tree: YamlNode,
    /// Texts with variables that have no value. [`Self::read`] returns their errors.
    unresolved: Vec<UnresolvedText>,
}

impl SettingsDocument {
    /// Parses the bytes of the file at `path`. `${NAME}` in a text stands for an environment
    /// variable.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, Vec<ConfigError>> {
        Self::parse_with(path, bytes, &variables::read)
    }

    /// Like [`Self::parse`], with the values of variables.
    fn parse_with(
        path: &Path,
        bytes: &[u8],
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, Vec<ConfigError>> {
        let mut document = Self::parse_text(path, bytes).map_err(|error| vec![error])?;
        document.unresolved = variables::interpolate(&mut document.tree, variable);
        Ok(document)
    }

    fn parse_text(path: &Path, bytes: &[u8]) -> Result<Self, ConfigError> {
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let before = &bytes[..error.valid_up_to()];
            let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
            ConfigError::at(
                path,
                SourcePosition { line, column: 0 },
                "this is not UTF-8 text; save the file as UTF-8",
            )
        })?;
        let tree = tree::parse(text)
            .map_err(|(position, problem)| ConfigError::at(path, position, problem))?;
        Ok(Self {
            path: path.to_owned(),
            text: text.to_owned(),
            tree,
            unresolved: Vec::new(),
        })
    }

    /// Returns the content of the file, with the position of each value.
    pub fn tree(&self) -> &YamlNode {
        &self.tree
    }

    /// Returns the directory of the file. Without a working directory, a relative path stays
    /// relative, and checks report its files as missing.
    pub fn directory(&self) -> PathBuf {
        let mut path = std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone());
        path.pop();
        path
    }

    /// Deserializes the content, and makes paths absolute. Returns all deserialization errors in
    /// the order of the file.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, Vec<ConfigError>> {
        if self.tree.value == YamlValue::Null {
            let text = "the file is empty; `warmroute config init` writes a first configuration";
            return Err(vec![ConfigError::of_file(&self.path, text)]);
        }
        if let Some(position) = self.tree.position_of_key("apiVersion") {
            let text = "this is a Kubernetes manifest, not a settings file; pass the text inside \
                its `data`";
            return Err(vec![ConfigError::at(&self.path, position, text)]);
        }
        let directory = self.directory();
        reader::read(&self.tree, &self.text, &directory, &self.unresolved).map_err(|errors| {
            self.in_order(
                errors
                    .into_iter()
                    .map(|(position, problem)| ConfigError::at(&self.path, position, problem)),
            )
        })
    }

    /// Adds to each problem the position of its value. Returns the errors in the order of the file.
    /// The errors contain the names of variables instead of their values.
    pub fn locate(&self, problems: Vec<Problem>) -> Vec<ConfigError> {
        let substituted = variables::substituted_texts(&self.tree);
        let hide_values = |text: String| {
            let texts = substituted.iter();
            texts.fold(text, |text, (value, written)| {
                variables::hide_value(&text, value, written)
            })
        };
        self.in_order(problems.into_iter().map(|problem| {
            ConfigError::at(
                &self.path,
                self.tree.position_of(&problem.path),
                hide_values(problem.text),
            )
        }))
    }

    fn in_order(&self, errors: impl Iterator<Item = ConfigError>) -> Vec<ConfigError> {
        let mut errors: Vec<_> = errors.collect();
        errors.sort_by_key(|error| (error.line, error.column));
        // Aliases repeat the errors of an anchored text.
        errors.dedup();
        errors
    }
}

#[cfg(test)]
mod tests;
