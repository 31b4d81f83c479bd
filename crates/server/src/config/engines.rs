//! `engines:`: communication with the engines.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_engines::engine_client::config::EnginesConfig;

use super::{EngineDiscoveryConfig, EngineLoadConfig, KvEventsLimits};
use crate::self_test::config::SelfTestConfig;

/// The `engines:` section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EnginesSection {
    /// HTTP requests to engines.
    pub http: EnginesConfig,
    /// Queries to engines for their settings.
    pub discovery: EngineDiscoveryConfig,
    /// Scrapes of the engines' own load gauges.
    pub load: EngineLoadConfig,
    /// Comparison of warmroute's tokens with those of the engines.
    pub parity_check: SelfTestConfig,
    /// Connections to the KV event sources.
    pub kv_events: KvEventsLimits,
}
