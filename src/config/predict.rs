//! `approximate:`: what is believed of caches whose engines say nothing, or have not said it yet.

use serde::{Deserialize, Serialize};

use crate::predict::{Policy, Ttl};
use crate::settings::{Period, Problem};

/// What our own decisions are taken to have left in the caches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApproximateConfig {
    /// How predicted blocks of workers without KV events leave; `off` predicts nothing for them.
    pub policy: ApproximatePolicy,
    /// Under `ttl`: how long a block stays after it was last part of a prompt. Under `lru`: the same, for ranks whose
    /// number of KV blocks is not known.
    pub ttl: Period,
    /// Under `ttl`: most blocks of one rank.
    pub most_blocks_per_rank: u64,
    /// Under `lru`: KV blocks of a rank that does not report how many it has.
    pub default_blocks: Option<u64>,
    /// For workers with KV events: how long a decision stands for the event that will follow it. None: only events count.
    pub predicted_ttl: Option<Period>,
}

/// How predicted blocks leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ApproximatePolicy {
    /// Nothing is predicted.
    Off,
    /// After a time.
    #[default]
    Ttl,
    /// When the rank would have no room.
    Lru,
}

impl Default for ApproximateConfig {
    fn default() -> Self {
        Self {
            policy: ApproximatePolicy::default(),
            ttl: Period::seconds(120),
            // Of 16 tokens: 16 million tokens, more than the cache of any one rank today.
            most_blocks_per_rank: 1 << 20,
            default_blocks: None,
            predicted_ttl: None,
        }
    }
}

impl ApproximateConfig {
    /// The policy for workers without KV events, if they are predicted.
    pub fn without_events(&self) -> Option<Policy> {
        let ttl = Ttl {
            ttl: self.ttl.get(),
            most_blocks_per_rank: self.most_blocks_per_rank,
        };
        match self.policy {
            ApproximatePolicy::Off => None,
            ApproximatePolicy::Ttl => Some(Policy::Ttl(ttl)),
            ApproximatePolicy::Lru => Some(Policy::Lru {
                default_blocks: self.default_blocks,
                fallback: ttl,
            }),
        }
    }

    /// The policy beside real KV events, if decisions stand in for them.
    pub fn beside_events(&self) -> Option<Policy> {
        let most_blocks_per_rank = self.most_blocks_per_rank;
        self.predicted_ttl.map(|ttl| {
            Policy::Ttl(Ttl {
                ttl: ttl.get(),
                most_blocks_per_rank,
            })
        })
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.ttl.get().is_zero() {
            let text = "blocks would leave as they come; the default is 120s, and `policy: off` predicts nothing";
            problems.push(Problem::of("ttl", text));
        }
        if self.most_blocks_per_rank == 0 {
            let text = "no block would have room; the default is 1048576, and `policy: off` predicts nothing";
            problems.push(Problem::of("most_blocks_per_rank", text));
        }
        if self.default_blocks == Some(0) {
            let text = "no block would have room; leave it out where the number is not known";
            problems.push(Problem::of("default_blocks", text));
        }
        if self.default_blocks.is_some() && self.policy != ApproximatePolicy::Lru {
            problems.push(Problem::of(
                "default_blocks",
                "only `policy: lru` goes by the number of blocks",
            ));
        }
        if self.predicted_ttl.is_some_and(|ttl| ttl.get().is_zero()) {
            problems.push(Problem::of(
                "predicted_ttl",
                "blocks would leave as they come; leave it out to go by events",
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
    use crate::settings::Document;

    fn read(text: &str) -> ApproximateConfig {
        Document::parse(Path::new("test.yaml"), text.as_bytes())
            .unwrap()
            .read()
            .unwrap()
    }

    #[test]
    fn the_defaults_predict_for_two_minutes_and_only_where_there_are_no_events() {
        let config = read("{}");
        assert_eq!(config, ApproximateConfig::default());
        let ttl = Ttl {
            ttl: Duration::from_secs(120),
            most_blocks_per_rank: 1 << 20,
        };
        assert_eq!(config.without_events(), Some(Policy::Ttl(ttl)));
        assert_eq!(config.beside_events(), None);
        assert!(config.problems().is_empty());
    }

    #[test]
    fn every_policy_can_be_written() {
        let config = read(
            "policy: lru\nttl: 30s\nmost_blocks_per_rank: 9\ndefault_blocks: 5\npredicted_ttl: 2s",
        );
        let fallback = Ttl {
            ttl: Duration::from_secs(30),
            most_blocks_per_rank: 9,
        };
        assert_eq!(
            config.without_events(),
            Some(Policy::Lru {
                default_blocks: Some(5),
                fallback
            })
        );
        let beside = Ttl {
            ttl: Duration::from_secs(2),
            ..fallback
        };
        assert_eq!(config.beside_events(), Some(Policy::Ttl(beside)));
        assert_eq!(read("policy: off").without_events(), None);
        assert_eq!(read("predicted_ttl: null").beside_events(), None);
    }

    #[test]
    fn what_cannot_work_is_named() {
        let cases = [
            ("ttl: 0s", "ttl"),
            ("most_blocks_per_rank: 0", "most_blocks_per_rank"),
            ("policy: lru\ndefault_blocks: 0", "default_blocks"),
            ("default_blocks: 10", "default_blocks"),
            ("predicted_ttl: 0s", "predicted_ttl"),
        ];
        for (text, key) in cases {
            let problems = read(text).problems();
            assert_eq!(problems.len(), 1, "{text}: {problems:?}");
            assert!(
                format!("{:?}", problems[0].trail).contains(key),
                "{text}: {problems:?}"
            );
        }
    }
}
