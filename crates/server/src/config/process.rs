//! `process:`: identity, readiness, shutdown, reload and log of the process.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_runtime::lifecycle::config::{DrainConfig, ReadinessConfig, ReloadConfig};
use warmroute_settings::Problem;

/// The `process:` section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ProcessSection {
    /// Pool of workers that this process serves. For display only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolConfig>,
    /// Conditions of readiness.
    pub readiness: ReadinessConfig,
    /// Graceful shutdown.
    pub drain: DrainConfig,
    /// Monitoring of the configuration file.
    pub reload: ReloadConfig,
    /// Log output.
    pub log: LogConfig,
}

/// The `process.pool:` section: identity of the pool. It appears in the log, in a metric and in
/// `/debug/config`, and has no other effect.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PoolConfig {
    /// Name of the pool, for example of an InferencePool.
    pub name: Option<String>,
    /// Namespace of the pool.
    pub namespace: Option<String>,
}

impl PoolConfig {
    /// Returns the problems of the values.
    pub fn problems(&self) -> Vec<Problem> {
        let named = [("name", &self.name), ("namespace", &self.namespace)];
        let empty = named
            .into_iter()
            .filter(|(_, name)| name.as_ref().is_some_and(String::is_empty));
        empty
            .map(|(key, _)| {
                Problem::of(
                    key,
                    format!("the {key} is empty; write it, or leave it out"),
                )
            })
            .collect()
    }
}

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
