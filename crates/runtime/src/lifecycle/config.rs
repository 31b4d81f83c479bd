//! Configuration of startup, shutdown and reload.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_settings::{DurationSetting, Problem};

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
    /// Poll interval, in case a file notification is lost.
    pub poll_interval: DurationSetting,
    /// Time without changes before the file is read, so that a write in several parts is read once.
    pub debounce: DurationSetting,
}

impl Default for ReloadConfig {
    fn default() -> Self {
        Self {
            watch: true,
            poll_interval: DurationSetting::seconds(5),
            debounce: DurationSetting::millis(100),
        }
    }
}

impl ReloadConfig {
    /// Returns semantic errors.
    pub fn problems(&self) -> Vec<Problem> {
        let zero = self.poll_interval.get().is_zero();
        let text = "an interval of 0s would poll without pause; the default is 5s";
        zero.then(|| Problem::of("poll_interval", text))
            .into_iter()
            .collect()
    }
}
