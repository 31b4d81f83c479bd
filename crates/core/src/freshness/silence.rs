//! Detects sources that have stopped publishing.
//!
//! One answered request without an event proves nothing: the engine may already hold the blocks,
//! for example from another request a moment before. Several requests and some time are required.
//!
//! Decision 0035.

use std::time::Instant;

use super::rules::FreshnessRules;

/// Requests that must have stored blocks, and after which no event arrived.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SilenceDetector {
    requests: u32,
    first: Option<Instant>,
}

impl SilenceDetector {
    pub(super) fn requests(&self) -> u32 {
        self.requests
    }

    pub(super) fn record_answer(&mut self, now: Instant) {
        self.requests = self.requests.saturating_add(1);
        self.first.get_or_insert(now);
    }

    pub(super) fn is_overdue(&self, now: Instant, rules: &FreshnessRules) -> bool {
        let enough = self.requests >= rules.silence_requests.max(1);
        enough
            && self
                .first
                .is_some_and(|first| now.saturating_duration_since(first) >= rules.silence_after)
    }
}
