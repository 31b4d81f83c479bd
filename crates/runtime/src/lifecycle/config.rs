//! Configuration of startup, shutdown and reload.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_settings::DurationSetting;

/// `readiness:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ReadinessConfig {
    /// Minimum number of workers before the process is ready.
    pub min_workers: u32,
    /// Time that readiness waits for the event sources to catch up. After that, requests are served
    /// with the current index.
    pub event_sources_timeout: DurationSetting,
}

impl Default for ReadinessConfig {
    fn default() -> Self {
        Self {
            min_workers: 1,
            event_sources_timeout: DurationSetting::seconds(30),
        }
    }
}

/// `drain:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DrainConfig {
    /// Time after the stop signal during which new exchanges are still served. Meanwhile gRPC
    /// health reports `draining` and a successor may start. While a successor on the unix socket
    /// loads, it is extended, up to the timeout. 0s skips it.
    pub grace_period: DurationSetting,
    /// Maximum time, after the grace period, that a successor has to load and open exchanges have to
    /// end. 0s aborts exchanges at once.
    pub timeout: DurationSetting,
}

impl Default for DrainConfig {
    fn default() -> Self {
        // The grace period is longer than gateways need to remove an endpoint.
        Self {
            grace_period: DurationSetting::seconds(5),
            timeout: DurationSetting::seconds(30),
        }
    }
}

/// `reload:`: automatic reload of the configuration file. SIGHUP reloads it in any case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ReloadConfig {
    /// Whether the file is reloaded when it changes.
    pub watch: bool,
}

impl Default for ReloadConfig {
    fn default() -> Self {
        Self { watch: true }
    }
}
