//! `listeners:`: addresses, TLS and limits of the servers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::admin::config::AdminConfig;
use crate::api::ApiConfig;
use crate::ext_proc::config::{ListenConfig, ListenerLimitsConfig};

/// The `listeners:` section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ListenersSection {
    /// ext_proc gRPC server.
    pub ext_proc: ListenConfig,
    /// HTTP server of the metrics, health and status pages.
    pub admin: AdminConfig,
    /// gRPC server of the router API for callers other than Envoy. `None`: no such server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api: Option<ApiConfig>,
    /// Limits of each listener.
    pub limits: ListenerLimitsConfig,
}
