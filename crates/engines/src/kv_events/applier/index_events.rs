//! Applies converted events to the index.

use super::batch::BatchApplier;
use crate::kv_events::convert::{ConvertedEvent, FilterReason};
use crate::kv_events::wire::{EngineEvent, SkippedEvent, StorageMedium};
use warmroute_core::block::StorageTier;
use warmroute_core::freshness::{EventSourceState, StaleReason};
use warmroute_core::index::{ApplyOutcome, KvEvent};
use warmroute_core::worker::BlockSize;
use warmroute_metrics::EventLabels;

impl BatchApplier {
    /// Applies a converted event and returns its metric labels.
    pub(super) fn apply_converted(
        &mut self,
        event: &EngineEvent,
        converted: ConvertedEvent,
    ) -> EventLabels {
        match converted {
            ConvertedEvent::Event(event) => EventLabels {
                kind: event.kind(),
                outcome: self.apply_to_index(&event).as_str(),
            },
            ConvertedEvent::IndexEvents(events, outcome) => {
                let outcomes: Vec<_> = events
                    .iter()
                    .map(|event| self.apply_to_index(event))
                    .collect();
                let failed = outcomes.into_iter().find(|outcome| !is_success(*outcome));
                self.has_dropped_stores |= outcome == ApplyOutcome::TooManyWaiting;
                if outcome == ApplyOutcome::ParentNotFound {
                    self.report_unknown_parent(event);
                }
                EventLabels {
                    kind: event_kind(event),
                    outcome: failed.unwrap_or(outcome).as_str(),
                }
            }
            ConvertedEvent::GroupEvent(reason, event_of_group) => {
                self.report_filtered(reason);
                let outcome = match self.apply_to_index(&event_of_group) {
                    ApplyOutcome::TooManyGroups => ApplyOutcome::TooManyGroups.as_str(),
                    _ => reason.label(),
                };
                EventLabels {
                    kind: event_kind(event),
                    outcome,
                }
            }
            ConvertedEvent::Filtered(reason) => {
                self.report_filtered(reason);
                self.log_skipped(event);
                EventLabels {
                    kind: event_kind(event),
                    outcome: reason.label(),
                }
            }
            ConvertedEvent::BlockSizeChanged(inner) => {
                self.handle_block_size_change();
                self.apply_converted(event, *inner)
            }
        }
    }

    /// Reports a block on the device whose parent was never stored, so that the index marks the
    /// rank as incomplete. If the engine's blocks are smaller than those of the index, the index
    /// does not see such events itself.
    fn report_unknown_parent(&mut self, event: &EngineEvent) {
        if let EngineEvent::Stored(stored) = event
            && stored.origin.medium == StorageMedium::Tier(StorageTier::Device)
        {
            self.apply_to_index(&KvEvent::Stored {
                parent: stored.parent,
                blocks: Vec::new(),
                tier: StorageTier::Device,
            });
        }
    }

    /// Applies one event to the index.
    fn apply_to_index(&mut self, event: &KvEvent) -> ApplyOutcome {
        let outcome = (self.sink.apply)(event);
        self.has_dropped_stores |= matches!(
            outcome,
            ApplyOutcome::TooManyWaiting | ApplyOutcome::IndexFull
        );
        if *event == KvEvent::Cleared {
            self.has_dropped_stores = false;
            self.monitor.update(EventSourceState::record_cleared);
        }
        outcome
    }

    /// Updates the source for a filtered event, and logs each problem once.
    fn report_filtered(&mut self, reason: FilterReason) {
        match reason {
            FilterReason::AmbiguousSalt | FilterReason::UnreadableStore => {
                self.has_dropped_stores = true
            }
            // The index may hold blocks that the engine removed.
            FilterReason::UnreadableRemoval => self.record_loss(),
            FilterReason::UnnamedAdapter
                if !std::mem::replace(&mut self.logged_problems.unnamed_adapter, true) =>
            {
                tracing::warn!(
                    rank = %self.rank, name = self.worker_name,
                    "KV events of a LoRA adapter have no lora_name; its blocks are not indexed"
                );
            }
            FilterReason::BlockSize { engine } => self.report_block_size(engine),
            FilterReason::GroupBlockSize { engine }
                if !std::mem::replace(&mut self.logged_problems.group_block_size, true) =>
            {
                tracing::warn!(
                    rank = %self.rank, name = self.worker_name, engine, configured = self.block_size.tokens(),
                    "block size of a cache group is no multiple of the configured one; \
                    reuse on the device is unknown, and no device block of this rank is counted"
                );
            }
            _ => {}
        }
    }

    /// Logs the first event that this version cannot use.
    fn log_skipped(&mut self, event: &EngineEvent) {
        if let EngineEvent::Skipped(skipped) = event
            && !std::mem::replace(&mut self.logged_problems.skipped, true)
        {
            tracing::warn!(rank = %self.rank, name = self.worker_name, %skipped, "unsupported KV event skipped");
        }
    }

    /// Reports an incompatible block size. If the device has no known block size yet, the events of
    /// the rank are unusable. Otherwise only the blocks of one tier are missing.
    fn report_block_size(&mut self, engine: u32) {
        let device = self.normalizer.engine_block_size();
        if device.is_none() {
            let engine = BlockSize::new(engine);
            self.monitor
                .update(|source| source.set_unusable(StaleReason::BlockSizeMismatch, engine));
        } else {
            self.has_dropped_stores = true;
        }
        if std::mem::replace(&mut self.logged_problems.block_size, true) {
            return;
        }
        if device.is_none() {
            tracing::error!(
                rank = %self.rank, name = self.worker_name, engine, configured = self.block_size.tokens(),
                "engine block size and configured block size are incompatible: neither divides the \
                other; the rank is chosen by load, correct the block size"
            );
        } else {
            tracing::warn!(
                rank = %self.rank, name = self.worker_name, engine,
                "KV event blocks ignored: their tier has several block sizes, or one that is \
                incompatible with the index"
            );
        }
    }
}

fn is_success(outcome: ApplyOutcome) -> bool {
    matches!(outcome, ApplyOutcome::Ok | ApplyOutcome::DuplicateStore)
}

fn event_kind(event: &EngineEvent) -> &'static str {
    match event {
        EngineEvent::Stored(_) => "stored",
        EngineEvent::Removed { .. } => "removed",
        EngineEvent::Cleared { .. } => "cleared",
        EngineEvent::Ignored => "ignored",
        EngineEvent::Skipped(SkippedEvent::UnknownType(_)) => "unknown",
        EngineEvent::Skipped(SkippedEvent::Store(_)) => "stored",
        EngineEvent::Skipped(SkippedEvent::Removal(_)) => "removed",
    }
}
