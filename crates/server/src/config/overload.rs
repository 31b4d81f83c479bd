//! `routing.overload:`: thresholds above which a worker is overloaded. Without thresholds, only the
//! responses 429 and 503 mark a worker.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_core::policy::OverloadThresholds;
use warmroute_core::queue::BusyThreshold;
use warmroute_core::router::OverloadAction;
use warmroute_settings::{DurationSetting, Problem};

/// The `routing.overload:` section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OverloadConfig {
    /// Share of used KV blocks, from 0 to 1, above which a rank is overloaded.
    pub decode_blocks_threshold: Option<f64>,
    /// Prompt tokens waiting for prefill above which a rank is overloaded.
    pub prefill_tokens_threshold: Option<u64>,
    /// The same threshold as a multiple of the worker's `max_num_batched_tokens`.
    pub prefill_tokens_threshold_frac: Option<f64>,
    /// Time without requests for a worker that returned 429 or 503.
    pub backoff: DurationSetting,
    /// Handling of requests while every eligible worker is overloaded.
    pub when_all: OverloadAction,
}

impl Default for OverloadConfig {
    fn default() -> Self {
        let OverloadThresholds {
            decode_blocks,
            prefill,
            mark_duration: backoff,
        } = OverloadThresholds::default();
        Self {
            decode_blocks_threshold: decode_blocks,
            prefill_tokens_threshold: prefill.prefill_tokens,
            prefill_tokens_threshold_frac: prefill.prefill_fraction,
            backoff: DurationSetting(backoff),
            when_all: OverloadAction::Route,
        }
    }
}

impl OverloadConfig {
    /// Returns the thresholds for the core.
    pub fn thresholds(&self) -> OverloadThresholds {
        OverloadThresholds {
            decode_blocks: self.decode_blocks_threshold,
            prefill: BusyThreshold {
                prefill_tokens: self.prefill_tokens_threshold,
                prefill_fraction: self.prefill_tokens_threshold_frac,
            },
            mark_duration: self.backoff.get(),
        }
    }

    /// Checks the values.
    pub fn problems(&self) -> Option<Problem> {
        let (name, text) = self.thresholds().validate().err()?;
        Some(Problem::of(name, format!("`{name}` {text}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_those_of_the_section() {
        assert_eq!(
            OverloadConfig::default().thresholds(),
            OverloadThresholds::default()
        );
        let config: OverloadConfig = serde_json::from_str(r#"{"backoff": "2s"}"#).unwrap();
        assert_eq!(
            config.thresholds().mark_duration,
            std::time::Duration::from_secs(2)
        );
    }
}
