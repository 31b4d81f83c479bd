//! Learned time of KV transfers from prefill workers to decode workers.

use serde::{Deserialize, Serialize};

/// Seconds of KV transfer per token before any observation: 200 kB per token at 40 GB/s.
pub(super) const PRIOR_TRANSFER_TOKEN: f64 = 5e-6;

/// Weight of the prior, in transferred tokens.
const PRIOR_TRANSFER_TOKENS: f64 = 20_000.0;

/// Share of earlier observations that remains after each transfer.
const TRANSFER_RETENTION: f64 = 0.98;

/// Sums of observed KV transfers. Unlike a mean of ratios, they are not dominated by short ones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct TransferTime {
    pub(super) tokens: f64,
    seconds: f64,
}

impl Default for TransferTime {
    fn default() -> Self {
        Self {
            tokens: PRIOR_TRANSFER_TOKENS,
            seconds: PRIOR_TRANSFER_TOKENS * PRIOR_TRANSFER_TOKEN,
        }
    }
}

impl TransferTime {
    pub(super) fn token_seconds(self) -> f64 {
        self.seconds / self.tokens
    }

    pub(super) fn add(&mut self, tokens: f64, seconds: f64) {
        self.tokens = TRANSFER_RETENTION * self.tokens + tokens;
        self.seconds = TRANSFER_RETENTION * self.seconds + seconds;
    }
}
