//! `log:`: how much is said, and in which form.

use serde::{Deserialize, Serialize};

/// How much is logged and how.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// The least important level that is written; the variable `RUST_LOG` has the last word.
    pub level: LogLevel,
    /// For people or for machines.
    pub format: LogFormat,
}

/// Importance of a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogLevel {
    /// Something is broken.
    Error,
    /// Something is worse than it should be.
    Warn,
    /// What the process does as a whole.
    #[default]
    Info,
    /// What it does with each request.
    Debug,
    /// Everything.
    Trace,
}

impl LogLevel {
    /// The name that log filters use.
    pub fn as_str(self) -> &'static str {
        match self {
            LogLevel::Error => "error",
            LogLevel::Warn => "warn",
            LogLevel::Info => "info",
            LogLevel::Debug => "debug",
            LogLevel::Trace => "trace",
        }
    }
}

/// Form of a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}
