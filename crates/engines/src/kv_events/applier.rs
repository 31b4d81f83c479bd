//! Applies the events of one worker rank to the index. The index and the position in the event
//! stream change together. A reader with a copy of both can therefore resume right after the copied
//! state. The code is synchronous, so that a batch is applied as a whole.
//!
//! Decision 0034.

mod batch;
mod index_events;

use std::sync::Arc;

use super::sequencer::Sequencer;
use super::source::{RankSink, SourceSpec};
use super::source_monitor::SourceMonitor;
use warmroute_core::index::SharedPosition;
use warmroute_metrics::Metrics;
use warmroute_runtime::lifecycle::run_blocking;

pub(super) use batch::BatchApplier;

/// The event stream of one worker rank, with the position that other readers copy.
pub(super) struct EventApplier {
    position: SharedPosition,
    batches: BatchApplier,
}

impl EventApplier {
    pub(super) fn new(
        spec: &SourceSpec,
        sink: RankSink,
        metrics: Arc<Metrics>,
        monitor: SourceMonitor,
    ) -> Self {
        Self {
            position: sink.position.clone(),
            batches: BatchApplier::new(spec, sink, metrics, monitor),
        }
    }

    /// Applies a change to the index and updates the position under one lock, so that copies are
    /// consistent.
    pub(super) fn update<T>(&mut self, change: impl FnOnce(&mut BatchApplier) -> T) -> T {
        // If another reader is copying the rank, the lock is held for long, and this thread also
        // serves other tasks.
        let mut position = self
            .position
            .try_lock()
            .unwrap_or_else(|| run_blocking(|| self.position.lock()));
        let result = change(&mut self.batches);
        *position = self.batches.position();
        result
    }

    /// Ends the resumption at the first connection. Returns true if the resumed position was live.
    /// The next batch number then shows whether batches are missing.
    pub(super) fn finish_resume(&mut self) -> bool {
        match self.batches.take_resume_position() {
            Some(from) => {
                self.update(|batches| batches.resume(&from));
                from.is_live
            }
            None => false,
        }
    }

    /// Returns the position in the batch numbers.
    pub(super) fn sequencer(&self) -> &Sequencer {
        self.batches.sequencer()
    }
}

#[cfg(test)]
mod tests;
