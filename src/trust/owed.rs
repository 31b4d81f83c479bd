//! Requests after which something had to be heard. One request proves nothing: another may have had the same prompt a moment
//! before, or an engine may know the blocks that we do not. So it takes several, and time.

use std::time::Instant;

use super::TrustRules;

/// Requests that were answered, had to store blocks, and left no trace.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Owed {
    requests: u32,
    first: Option<Instant>,
}

impl Owed {
    pub(super) fn requests(&self) -> u32 {
        self.requests
    }

    pub(super) fn answered(&mut self, now: Instant) {
        self.requests = self.requests.saturating_add(1);
        self.first.get_or_insert(now);
    }

    pub(super) fn is_overdue(&self, now: Instant, rules: &TrustRules) -> bool {
        let enough = self.requests >= rules.silence_requests.max(1);
        enough
            && self
                .first
                .is_some_and(|first| now.saturating_duration_since(first) >= rules.silence_after)
    }
}
