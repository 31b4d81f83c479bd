//! `process:`: identity, readiness, shutdown, reload and log of the process.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_runtime::lifecycle::config::{DrainConfig, ReadinessConfig, ReloadConfig};

use super::{LogConfig, PoolConfig};

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
