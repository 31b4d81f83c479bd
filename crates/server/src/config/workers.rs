//! `workers:`: sources of the fleet.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::fleet::discovery::config::WorkerConfig;
use crate::fleet::discovery::dns::DnsConfig;
use crate::fleet::discovery::kubernetes::KubernetesConfig;

/// The `workers:` section. Exactly one source of workers is configured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WorkersSection {
    /// File that lists the workers. It is reloaded when it changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Fixed list of workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub list: Option<Vec<WorkerConfig>>,
    /// DNS names whose addresses are the workers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub dns: Vec<DnsConfig>,
    /// Pods that are the workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubernetes: Option<KubernetesConfig>,
}
