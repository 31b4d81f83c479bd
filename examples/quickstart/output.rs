//! Output of the report: a table, JSON, or both.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde::Serialize;

/// Maximum width of a line of a list item.
const WIDTH: usize = 100;

/// Finding of a run with failed requests.
pub(crate) const FAILED_REQUESTS: &str =
    "Requests failed, so the figures of the runs cannot be compared.";

/// Returns a list item with line breaks at spaces.
pub(crate) fn list_item(text: &str) -> String {
    let mut item = String::from("*");
    let mut column = 1;
    for word in text.split(' ') {
        let length = word.chars().count();
        if column + 1 + length > WIDTH {
            item += "\n ";
            column = 1;
        }
        item += " ";
        item += word;
        column += 1 + length;
    }
    item + "\n"
}

/// Destination of the report.
pub(crate) enum ReportOutput {
    /// A table on standard output.
    Table,
    /// JSON on standard output.
    Json,
    /// A table on standard output, and JSON in a file.
    TableAndFile(PathBuf),
}

impl ReportOutput {
    /// Returns the destination that `--json` selects. The directory of a file must exist; otherwise
    /// the results would be lost at the end of the comparison.
    pub(crate) fn new(json: Option<&Option<PathBuf>>) -> anyhow::Result<Self> {
        let file = match json {
            None => return Ok(Self::Table),
            Some(None) => return Ok(Self::Json),
            Some(Some(file)) => file,
        };
        let directory = file.parent().unwrap_or(Path::new(""));
        ensure!(
            directory.as_os_str().is_empty() || directory.is_dir(),
            "--json {}: the directory does not exist; create it first",
            file.display()
        );
        ensure!(
            !file.is_dir(),
            "--json {}: this is a directory; append a file name",
            file.display()
        );
        Ok(Self::TableAndFile(file.clone()))
    }

    /// Writes the report. It does not use the print macros, which panic if standard output is closed.
    pub(crate) fn write(&self, report: &impl Serialize, table: &str) -> anyhow::Result<()> {
        let mut out = io::stdout().lock();
        match self {
            Self::Table => write!(out, "{table}")?,
            Self::Json => writeln!(out, "{}", serde_json::to_string(report)?)?,
            Self::TableAndFile(file) => {
                let text = serde_json::to_string_pretty(report)? + "\n";
                fs::write(file, text)
                    .with_context(|| format!("cannot write {}", file.display()))?;
                write!(out, "{table}\nThe results are in {}.\n", file.display())?;
            }
        }
        Ok(())
    }
}
