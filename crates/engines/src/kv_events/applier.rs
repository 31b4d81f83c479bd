//! Applies the events of one worker rank to the index. The index and the position in the event
//! stream change together, so that a reader with a copy of both resumes right after the copied
//! state. Synchronous on purpose: a batch is applied as a whole, without awaiting the network in
//! between.

mod batch;
mod index_events;

use std::sync::Arc;

use super::sequencer::Sequencer;
use super::source::{RankSink, SourceSpec};
use super::source_monitor::SourceMonitor;
use warmroute_core::index::SharedPosition;
use warmroute_metrics::Metrics;
use warmroute_runtime::lifecycle::run_blocking;

pub(super) use batch::{BatchApplier, SequenceGap};

/// The event stream of one worker rank, with the position that others copy.
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

    /// Applies a change to the index and updates the position under one lock, so that a copy
    /// contains both.
    pub(super) fn update<T>(&mut self, change: impl FnOnce(&mut BatchApplier) -> T) -> T {
        // Copying a rank takes long, and this thread also serves other tasks.
        let mut position = self
            .position
            .try_lock()
            .unwrap_or_else(|| run_blocking(|| self.position.lock()));
        let result = change(&mut self.batches);
        *position = self.batches.position();
        result
    }

    /// Ends the resumption at the first connection. Returns true if the position was live, so that
    /// the next batch number shows whether batches are missing.
    pub(super) fn finish_resume(&mut self) -> bool {
        match self.batches.take_resume_position() {
            Some(from) => {
                self.update(|batches| batches.resume(&from));
                from.is_live
            }
            None => false,
        }
    }

    /// Position in the batch numbers.
    pub(super) fn sequencer(&self) -> &Sequencer {
        self.batches.sequencer()
    }
}

#[cfg(test)]
mod tests;
