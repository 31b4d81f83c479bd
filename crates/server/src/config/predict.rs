//! `index.approximate:`: prediction of the caches of engines that publish no KV events, or whose
//! events have not arrived yet.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_core::predict::{EvictionPolicy, TtlPolicy};
use warmroute_settings::{DurationSetting, Problem};

/// The `index.approximate:` section. The blocks of routed prompts are predicted to be cached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ApproximateConfig {
    /// Eviction of predicted blocks of workers without KV events; `off` predicts nothing for them.
    pub policy: ApproximatePolicy,
    /// Lifetime of a block after its last use in a prompt. With `lru` it applies only to ranks with
    /// an unknown number of KV blocks.
    pub ttl: DurationSetting,
    /// Maximum number of blocks of a rank whose predictions expire by `ttl` or `ttl_with_events`.
    pub max_blocks_per_rank: u64,
    /// With `lru`: number of KV blocks of a rank for which it is unknown.
    pub default_kv_blocks: Option<u64>,
    /// For workers with KV events: lifetime of a prediction, which bridges the time until its event
    /// arrives. `None`: no predictions.
    pub ttl_with_events: Option<DurationSetting>,
}

/// Eviction of predicted blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ApproximatePolicy {
    /// Nothing is predicted.
    Off,
    /// Blocks are evicted when their lifetime ends.
    Ttl,
    /// The least recently used blocks are evicted when the rank is full.
    #[default]
    Lru,
}

impl Default for ApproximateConfig {
    fn default() -> Self {
        Self {
            policy: ApproximatePolicy::default(),
            ttl: DurationSetting::seconds(120),
            // With 16 tokens per block: 16 million tokens, more than the cache of any rank today.
            max_blocks_per_rank: 1 << 20,
            default_kv_blocks: None,
            ttl_with_events: None,
        }
    }
}

impl ApproximateConfig {
    /// Returns the policy for workers without KV events, if these are predicted.
    pub fn without_events(&self) -> Option<EvictionPolicy> {
        let ttl = TtlPolicy {
            ttl: self.ttl.get(),
            max_blocks_per_rank: self.max_blocks_per_rank,
        };
        match self.policy {
            ApproximatePolicy::Off => None,
            ApproximatePolicy::Ttl => Some(EvictionPolicy::Ttl(ttl)),
            ApproximatePolicy::Lru => Some(EvictionPolicy::Lru {
                default_blocks: self.default_kv_blocks,
                fallback: ttl,
            }),
        }
    }

    /// Returns the policy for workers with KV events, if these are predicted.
    pub fn beside_events(&self) -> Option<EvictionPolicy> {
        let max_blocks_per_rank = self.max_blocks_per_rank;
        self.ttl_with_events.map(|ttl| {
            EvictionPolicy::Ttl(TtlPolicy {
                ttl: ttl.get(),
                max_blocks_per_rank,
            })
        })
    }

    /// Checks the values.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.ttl.get().is_zero() {
            let text = "blocks would expire at once; the default is 120s, and `policy: off` \
                predicts nothing";
            problems.push(Problem::of("ttl", text));
        }
        if self.max_blocks_per_rank == 0 {
            let text = "no block would have room; the default is 1048576, and `policy: off` \
                predicts nothing";
            problems.push(Problem::of("max_blocks_per_rank", text));
        }
        if self.default_kv_blocks == Some(0) {
            let text = "no block would have room; leave it out where the number is not known";
            problems.push(Problem::of("default_kv_blocks", text));
        }
        if self.default_kv_blocks.is_some() && self.policy != ApproximatePolicy::Lru {
            problems.push(Problem::of(
                "default_kv_blocks",
                "only `policy: lru` goes by the number of blocks",
            ));
        }
        if self.ttl_with_events.is_some_and(|ttl| ttl.get().is_zero()) {
            problems.push(Problem::of(
                "ttl_with_events",
                "blocks would expire at once; omit it to use events only",
            ));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use warmroute_settings::SettingsDocument;

    fn read(text: &str) -> ApproximateConfig {
        SettingsDocument::parse(Path::new("test.yaml"), text.as_bytes())
            .unwrap()
            .read()
            .unwrap()
    }

    #[test]
    fn predictions_follow_capacity_by_default() {
        let config = read("{}");
        assert_eq!(config, ApproximateConfig::default());
        let policy = EvictionPolicy::Lru {
            default_blocks: None,
            fallback: TtlPolicy {
                ttl: Duration::from_secs(120),
                max_blocks_per_rank: 1 << 20,
            },
        };
        assert_eq!(config.without_events(), Some(policy));
        assert_eq!(config.beside_events(), None);
        assert!(config.problems().is_empty());
    }

    #[test]
    fn every_policy_is_parsed() {
        let config = read(
            "policy: lru\nttl: 30s\nmax_blocks_per_rank: 9\ndefault_kv_blocks: 5\nttl_with_events: 2s",
        );
        let fallback = TtlPolicy {
            ttl: Duration::from_secs(30),
            max_blocks_per_rank: 9,
        };
        assert_eq!(
            config.without_events(),
            Some(EvictionPolicy::Lru {
                default_blocks: Some(5),
                fallback
            })
        );
        let with_events = TtlPolicy {
            ttl: Duration::from_secs(2),
            ..fallback
        };
        assert_eq!(
            config.beside_events(),
            Some(EvictionPolicy::Ttl(with_events))
        );
        assert_eq!(read("policy: off").without_events(), None);
        assert_eq!(read("ttl_with_events: null").beside_events(), None);
    }
}
