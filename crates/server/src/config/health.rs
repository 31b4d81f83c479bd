//! `routing.outlier_detection:`: ejection of worker ranks that fail where others deliver.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_core::health::HealthRules;

/// The `routing.outlier_detection:` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HealthConfig {
    /// Failed requests in a row that eject a worker rank while other ranks of its model deliver.
    /// Failures are lost connections, 5xx, empty responses and responses that are overdue. A 4xx or
    /// a reported overload counts half. Lost connections need no comparison. 0: no ejection.
    pub consecutive_failures: u32,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self {
            consecutive_failures: HealthRules::default().consecutive_failures,
        }
    }
}

impl HealthConfig {
    /// Returns the rules for the core.
    pub fn rules(&self) -> HealthRules {
        HealthRules {
            consecutive_failures: self.consecutive_failures,
            ..HealthRules::default()
        }
    }
}
