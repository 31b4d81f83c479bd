//! Load of a rank, and the part of it that one request books.

use std::time::Duration;

use serde::Serialize;

use super::latency::PrefillWork;
use super::sequences::PromptSequences;
use crate::worker::{RankSlot, WorkerRank};

/// Maximum number of prefill tokens that one request counts for. Prompt lengths may be estimates
/// from client data, and the sum over all running requests must not overflow.
const MAX_PREFILL_TOKENS: u64 = 1 << 40;

/// Load of one worker rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ActiveLoad {
    /// Distinct blocks held by running requests: prompt blocks, and output blocks if those are
    /// tracked.
    pub active_blocks: u64,
    /// Prompt tokens still to be computed, over requests without a first token.
    pub active_prefill_tokens: u64,
    /// Running requests.
    pub active_requests: u64,
}

/// Load of one worker rank, with its slot and id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RankLoad {
    /// Slot in the fleet.
    pub slot: RankSlot,
    /// Worker id and data-parallel rank.
    pub rank: WorkerRank,
    /// Distinct blocks held by running requests.
    pub active_blocks: u64,
    /// Prompt tokens still to be computed.
    pub active_prefill_tokens: u64,
    /// Running requests.
    pub active_requests: u64,
}

/// End of a booking, unless the reservation is dropped earlier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BookingEnd {
    /// Ends with the request.
    #[default]
    RequestEnd,
    /// Ends with the first token. A prefill worker has no part in the request after that.
    FirstToken,
}

/// Load that one request puts on one worker rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadBooking {
    /// Slot of the worker rank.
    pub slot: RankSlot,
    /// Worker rank that the slot must still belong to. Nothing is booked if the slot was
    /// reassigned.
    pub rank: WorkerRank,
    /// Complete blocks of the prompts.
    pub sequences: PromptSequences,
    /// Length of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// Prompt tokens that are expected to be cached.
    pub cached_tokens: u64,
    /// Whether this rank computes the prefill.
    pub track_prefill: bool,
    /// Estimated duration of the prefill. With an estimate, the outstanding tokens decrease over
    /// time.
    pub prefill_time: Option<Duration>,
    /// Expected time to the first content of the answer, if it is known from observed prefills. A
    /// request that waits much longer increases the cost of its rank.
    pub content_time: Option<Duration>,
    /// End of the booking.
    pub end: BookingEnd,
}

impl LoadBooking {
    /// Returns the prompt tokens that the rank has to compute.
    pub(super) fn prefill_tokens(&self) -> u64 {
        if self.track_prefill {
            self.uncached_tokens()
        } else {
            0
        }
    }

    /// Returns the prompt tokens that the rank computes, or receives by KV transfer if another rank
    /// computes the prefill.
    pub(super) fn uncached_tokens(&self) -> u64 {
        let tokens = self.prompt_tokens.saturating_sub(self.cached_tokens);
        tokens.min(MAX_PREFILL_TOKENS)
    }

    /// Returns the work of the prefill.
    pub(super) fn prefill_work(&self) -> PrefillWork {
        let cached = self.cached_tokens.min(MAX_PREFILL_TOKENS) as f64;
        let tokens = self.prefill_tokens() as f64;
        PrefillWork::new(cached + tokens, cached)
    }

    /// Returns the work of computing the cached tokens.
    pub(super) fn cached_work(&self) -> PrefillWork {
        PrefillWork::new(self.cached_tokens.min(MAX_PREFILL_TOKENS) as f64, 0.0)
    }

    /// Returns the work of computing the prompt after this number of cached tokens.
    pub(super) fn prefill_work_after(&self, cached: u64) -> PrefillWork {
        let cached = cached.min(MAX_PREFILL_TOKENS) as f64;
        PrefillWork::new(self.context_tokens() as f64, cached)
    }

    /// Returns the prompt tokens in the context of the rank.
    pub(super) fn context_tokens(&self) -> u64 {
        self.prompt_tokens.min(MAX_PREFILL_TOKENS)
    }
}
