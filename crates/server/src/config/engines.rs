//! `engines:`: communication with the engines.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_engines::engine_client::config::EnginesConfig;
use warmroute_settings::{ByteSize, DurationSetting, Problem};

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

/// The `engines.discovery:` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EngineDiscoveryConfig {
    /// True to query each worker for its cache settings and the addresses of its event sources.
    pub enabled: bool,
    /// Interval between two queries to one worker.
    pub interval: DurationSetting,
}

impl Default for EngineDiscoveryConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            interval: DurationSetting::seconds(300),
        }
    }
}

impl EngineDiscoveryConfig {
    /// Returns the problems of the values.
    pub fn problems(&self) -> Option<Problem> {
        let is_zero = self.interval.get().is_zero();
        let text = "an interval of 0s would query without pause; the default is 5m";
        is_zero.then(|| Problem::of("interval", text))
    }
}

/// Smallest allowed interval. Engines update their counters at most once per step.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

/// The `engines.load` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EngineLoadConfig {
    /// True to read running requests, waiting requests and KV usage from each worker's metrics page.
    pub enabled: bool,
    /// Interval between two scrapes of one worker. It is longer with more than 200 workers per
    /// second of the interval.
    pub interval: DurationSetting,
}

impl Default for EngineLoadConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            interval: DurationSetting::seconds(1),
        }
    }
}

impl EngineLoadConfig {
    /// Returns the problems of the values.
    pub fn problems(&self) -> Option<Problem> {
        if self.interval.get() >= MIN_INTERVAL {
            return None;
        }
        let text = format!(
            "`interval` is {}, but must be at least 100ms; the default is 1s. To scrape no engine, \
            set `enabled: false`",
            self.interval
        );
        Some(Problem::of("interval", text))
    }
}

/// Smallest allowed limit. The batches of a single engine step have up to some hundred KiB.
const SMALLEST_MESSAGE: ByteSize = ByteSize::mib(1);
/// Largest allowed limit, because a message is held in memory as a whole.
const LARGEST_MESSAGE: ByteSize = ByteSize::mib(1024);

/// The `engines.kv_events:` section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KvEventsLimits {
    /// Maximum size of a message. A larger message is skipped and counts as a lost batch.
    pub max_message_size: ByteSize,
}

impl Default for KvEventsLimits {
    fn default() -> Self {
        Self {
            max_message_size: ByteSize::mib(64),
        }
    }
}

impl KvEventsLimits {
    /// Returns the problems of the values.
    pub fn problems(&self) -> Option<Problem> {
        if (SMALLEST_MESSAGE..=LARGEST_MESSAGE).contains(&self.max_message_size) {
            return None;
        }
        let text = format!(
            "`max_message_size` is {}, but must be from {SMALLEST_MESSAGE} to {LARGEST_MESSAGE}; \
            the default is 64MiB",
            self.max_message_size
        );
        Some(Problem::of("max_message_size", text))
    }
}
