//! `index_trust:`: what is made of event sources that may be out of date.

use serde::{Deserialize, Serialize};

use crate::settings::{Period, Problem};
use crate::trust::{Resync, TrustRules};

/// `index_trust:`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IndexTrustConfig {
    /// By what the credit for cached blocks is multiplied while their event source is stale or catching up, from 0 to 1.
    pub stale_credit: f64,
    /// When a source that says nothing is stale.
    pub silence: SilenceConfig,
    /// What becomes of the blocks of a rank when batches are lost for good.
    pub resync: Resync,
}

/// `index_trust.silence:`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SilenceConfig {
    /// So many requests were answered that had to store blocks, and no batch came.
    pub requests: u32,
    /// And so long ago was the first of them.
    pub after: Period,
}

impl Default for IndexTrustConfig {
    fn default() -> Self {
        let TrustRules {
            stale_credit,
            resync,
            ..
        } = TrustRules::default();
        Self {
            stale_credit,
            silence: SilenceConfig::default(),
            resync,
        }
    }
}

impl Default for SilenceConfig {
    fn default() -> Self {
        let TrustRules {
            silence_requests,
            silence_after,
            ..
        } = TrustRules::default();
        Self {
            requests: silence_requests,
            after: Period(silence_after),
        }
    }
}

impl IndexTrustConfig {
    /// What the core is told.
    pub fn rules(&self) -> TrustRules {
        TrustRules {
            stale_credit: self.stale_credit,
            silence_requests: self.silence.requests,
            silence_after: self.silence.after.get(),
            resync: self.resync,
        }
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if !(0.0..=1.0).contains(&self.stale_credit) {
            let text = format!(
                "`stale_credit` is {}, but must be from 0 to 1",
                self.stale_credit
            );
            problems.push(Problem::of("stale_credit", text));
        }
        if self.silence.requests == 0 {
            let text = "0 requests would make every idle engine silent; the default is 3";
            problems.push(Problem::of("requests", text).within("silence"));
        }
        problems
    }
}
