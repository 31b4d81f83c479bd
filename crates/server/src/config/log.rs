//! `process.log:`: level and format of the log.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The `process.log:` section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// Minimum level. Libraries log at most at `info`. The environment variable `RUST_LOG` overrides it,
    /// for example with `info,h2=debug`.
    pub level: LogLevel,
    /// Format of the lines.
    pub format: LogFormat,
}

/// Level of a log line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogLevel {
    /// Failures.
    Error,
    /// Degradations.
    Warn,
    /// Changes of the state of the process.
    #[default]
    Info,
    /// Details of each request.
    Debug,
    /// Details of internal steps.
    Trace,
}

impl LogLevel {
    /// Returns the name in log filters.
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

/// Format of a log line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Plain text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}
