//! Tracks the messages on which an output depends, to find checkpoints.

use std::cell::Cell;

use crate::prompt::direct::value::MessageRange;

/// Messages on which the output so far may depend.
#[derive(Default)]
pub(super) struct DependencyTracker {
    /// Number of leading messages; `usize::MAX` if the output may depend on all messages, on their
    /// number, or on the time.
    leading: Cell<usize>,
}

impl DependencyTracker {
    /// Records a value that depends on all messages, on their number, or on the time.
    pub(super) fn record_all(&self) {
        self.leading.set(usize::MAX);
    }

    /// Records a dependency on the first `count` messages.
    pub(super) fn record_leading(&self, count: usize) {
        self.leading.set(self.leading.get().max(count));
    }

    /// Records the lookup of a message.
    pub(super) fn record_item(&self, messages: MessageRange, index: i64) {
        self.record_leading(messages.leading_count(index).unwrap_or(usize::MAX));
    }

    /// Records the bounds of a slice, which may depend on the number of messages.
    pub(super) fn record_slice(
        &self,
        messages: MessageRange,
        start: Option<i64>,
        stop: Option<i64>,
    ) {
        let bounds = [start, stop].into_iter().flatten();
        for bound in bounds.filter(|bound| *bound != 0) {
            self.record_item(messages, bound.saturating_sub(1));
        }
    }

    /// Returns whether the output depends only on the first `count` messages.
    pub(super) fn is_within(&self, count: usize) -> bool {
        self.leading.get() <= count
    }
}
