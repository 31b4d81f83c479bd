//! `overload:`: from when on a worker has too much to do. Without thresholds only the workers' own word counts.

use serde::{Deserialize, Serialize};

use crate::router::WhenOverloaded;
use crate::schedule::Thresholds;
use crate::settings::{Period, Problem};

/// `overload:`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OverloadConfig {
    /// Used share of the KV blocks, from 0 to 1, above which a rank takes no more.
    pub decode_blocks: Option<f64>,
    /// Prompt tokens still to prefill above which a rank takes no more.
    pub prefill_tokens: Option<u64>,
    /// The same as a multiple of the worker's `max_num_batched_tokens`.
    pub prefill_tokens_fraction: Option<f64>,
    /// For how long a worker that answered 429 or 503 gets no requests.
    pub mark: Period,
    /// What happens while every eligible worker is overloaded.
    pub when_all: WhenOverloaded,
}

impl Default for OverloadConfig {
    fn default() -> Self {
        let Thresholds {
            decode_blocks,
            prefill_tokens,
            prefill_tokens_fraction,
            mark,
        } = Thresholds::default();
        Self {
            decode_blocks,
            prefill_tokens,
            prefill_tokens_fraction,
            mark: Period(mark),
            when_all: WhenOverloaded::Route,
        }
    }
}

impl OverloadConfig {
    /// What the core is told.
    pub fn thresholds(&self) -> Thresholds {
        Thresholds {
            decode_blocks: self.decode_blocks,
            prefill_tokens: self.prefill_tokens,
            prefill_tokens_fraction: self.prefill_tokens_fraction,
            mark: self.mark.get(),
        }
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let found = self.thresholds().validate().err();
        found
            .map(|(name, text)| Problem::of(name, format!("`{name}` {text}")))
            .into_iter()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_blocks_is_at_most_one_and_all_is_off_by_default() {
        assert_eq!(
            OverloadConfig::default().thresholds(),
            Thresholds::default()
        );
        let wrong = OverloadConfig {
            decode_blocks: Some(1.5),
            ..OverloadConfig::default()
        };
        assert_eq!(
            wrong.problems()[0].text,
            "`decode_blocks` is 1.5, but must be from 0 to 1"
        );
        let read = |text: &str| serde_json::from_str::<OverloadConfig>(text);
        assert_eq!(
            read(r#"{"mark": "2s"}"#).unwrap().thresholds().mark,
            std::time::Duration::from_secs(2)
        );
        assert!(read(r#"{"blocks": 1}"#).is_err());
    }
}
