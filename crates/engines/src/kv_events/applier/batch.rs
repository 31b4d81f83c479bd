//! Applies batches: classifies them by number, decodes, converts, applies and counts them.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::kv_events::convert::EventNormalizer;
use crate::kv_events::sequencer::{
    LiveAction, PayloadDigest, ReplayAction, SequenceGap, Sequencer,
};
use crate::kv_events::source::{RankSink, SharedResync, SourceSpec};
use crate::kv_events::source_monitor::SourceMonitor;
use crate::kv_events::wire::{self, EventBatch, WireError};
use warmroute_core::freshness::{EventSourceState, IndexFreshness, ReceivedBatch};
use warmroute_core::index::{EventPosition, KvEvent, ReaderState};
use warmroute_core::worker::{BlockSize, WorkerRank};
use warmroute_metrics::{EventLabels, Metrics, ReasonLabel, count_outcome};
use warmroute_runtime::lifecycle::run_blocking;

/// Minimum time between log lines about batches that exceed a limit.
const TOO_LARGE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Applies the batches of one worker rank.
pub(in crate::kv_events) struct BatchApplier {
    pub(super) rank: WorkerRank,
    pub(super) worker_name: String,
    pub(super) block_size: BlockSize,
    sequencer: Sequencer,
    pub(super) normalizer: EventNormalizer,
    /// See [`SourceSpec::settings_digest`].
    settings_digest: u64,
    /// Position of another reader from which this one resumes; taken at the first connection.
    resume_position: Option<EventPosition>,
    pub(super) sink: RankSink,
    metrics: Arc<Metrics>,
    event_counts: Vec<(EventLabels, u64)>,
    pub(super) logged_problems: LoggedProblems,
    pub(super) monitor: SourceMonitor,
    resync: SharedResync,
    /// Set if valid stores were dropped, so that the index is incomplete.
    pub(super) has_dropped_stores: bool,
}

/// Problems that were already logged. Each is logged once.
#[derive(Default)]
pub(super) struct LoggedProblems {
    undecodable: bool,
    /// Time of the last log line about a batch that exceeds a limit.
    too_large: Option<Instant>,
    malformed: bool,
    other_rank: bool,
    unknown_fields: bool,
    pub(super) skipped: bool,
    pub(super) unnamed_adapter: bool,
    pub(super) block_size: bool,
    pub(super) group_block_size: bool,
}

impl BatchApplier {
    pub(super) fn new(
        spec: &SourceSpec,
        sink: RankSink,
        metrics: Arc<Metrics>,
        monitor: SourceMonitor,
    ) -> Self {
        let resume_position = sink.position.lock().clone();
        let normalizer = EventNormalizer::new(spec.block_size, spec.media)
            .with_salts(sink.position.salts().clone());
        let (sequencer, normalizer) = match &resume_position {
            Some(from) => (
                Sequencer::resume_after(from.seq, PayloadDigest(from.digest)),
                normalizer.resume_from(&from.reader_state),
            ),
            None => (Sequencer::default(), normalizer),
        };
        Self {
            rank: spec.rank,
            worker_name: spec.worker_name.clone(),
            block_size: spec.block_size,
            sequencer,
            normalizer,
            settings_digest: spec.settings_digest(),
            sink,
            metrics,
            event_counts: Vec::new(),
            logged_problems: LoggedProblems::default(),
            monitor,
            resync: spec.resync.clone(),
            has_dropped_stores: resume_position
                .as_ref()
                .is_some_and(|from| from.reader_state.has_dropped_stores),
            resume_position,
        }
    }

    /// Returns the position in the batch numbers.
    pub(super) fn sequencer(&self) -> &Sequencer {
        &self.sequencer
    }

    /// Applies one live message. Returns the gap before it, if there is one. The caller closes the
    /// gap with a replay and then calls [`BatchApplier::apply_after_replay`].
    pub(in crate::kv_events) fn apply_live(
        &mut self,
        seq: u64,
        payload: &[u8],
    ) -> Option<SequenceGap> {
        let batch = wire::decode(payload);
        if self.is_other_rank(&batch) {
            return None;
        }
        let mut action = self
            .sequencer
            .accept_live(seq, || PayloadDigest::of(payload));
        if action == LiveAction::Restart {
            self.handle_restart("batch number decreased");
            action = self.sequencer.action_for(seq);
        }
        match action {
            LiveAction::Gap(gap) => {
                self.monitor.update(EventSourceState::record_gap);
                return Some(gap);
            }
            LiveAction::Stale | LiveAction::Restart => self.count_batch("stale"),
            // An undecodable batch does not advance the position, so the next batch causes a replay
            // of it.
            LiveAction::Apply => {
                if self.apply_decoded(batch, BatchOrigin::Live(seq)) {
                    self.sequencer.advance(seq, PayloadDigest::of(payload));
                }
            }
        }
        None
    }

    /// Applies the batch that revealed a gap, after the replay.
    pub(in crate::kv_events) fn apply_after_replay(&mut self, gap: SequenceGap, payload: &[u8]) {
        let reached = self.sequencer.next_seq();
        let outcome = match reached {
            _ if reached >= gap.to => "replayed",
            _ if reached > gap.from => "partly_replayed",
            _ => "lost",
        };
        count_outcome(&self.metrics.kv_events.gaps, outcome);
        match self.sequencer.action_for(gap.to) {
            LiveAction::Stale | LiveAction::Restart => self.count_batch("stale"),
            LiveAction::Apply => {
                if self.apply_decoded(wire::decode(payload), BatchOrigin::Live(gap.to)) {
                    self.sequencer.advance(gap.to, PayloadDigest::of(payload));
                }
            }
            LiveAction::Gap(gap) => self.skip_gap(gap, payload),
        }
    }

    /// Applies one replayed batch, unless batches before it are missing.
    pub(in crate::kv_events) fn apply_replayed(
        &mut self,
        seq: u64,
        payload: &[u8],
    ) -> ReplayAction {
        let batch = wire::decode(payload);
        if self.is_other_rank(&batch) {
            return ReplayAction::Duplicate;
        }
        let digest = PayloadDigest::of(payload);
        let action = self.sequencer.accept_replayed(seq, digest);
        match action {
            ReplayAction::Apply => {
                if !self.apply_decoded(batch, BatchOrigin::Replayed(seq)) {
                    // Another replay would return the same bytes.
                    self.record_lost_batches(seq, seq.saturating_add(1));
                }
                self.sequencer.advance(seq, digest);
            }
            ReplayAction::Restart => {
                self.handle_restart("replayed batch differs from the applied one")
            }
            ReplayAction::Duplicate | ReplayAction::Gap(_) => {}
        }
        action
    }

    /// Handles a replay without any batch. Returns true if the engine restarted and the rank was
    /// cleared.
    pub(in crate::kv_events) fn accept_empty_replay(&mut self) -> bool {
        let restarted = self.sequencer.accept_empty_replay();
        if restarted {
            self.handle_restart("engine no longer holds the last applied batch");
        }
        restarted
    }

    /// Skips the missing batches before a batch and applies it.
    pub(in crate::kv_events) fn skip_gap(&mut self, gap: SequenceGap, payload: &[u8]) {
        self.record_lost_batches(gap.from, gap.to);
        if !self.apply_decoded(wire::decode(payload), BatchOrigin::Replayed(gap.to)) {
            self.record_lost_batches(gap.to, gap.to.saturating_add(1));
        }
        self.sequencer.advance(gap.to, PayloadDigest::of(payload));
    }

    /// Returns the position from which another reader could resume, or `None` while the events of
    /// the rank are unusable.
    pub(super) fn position(&self) -> Option<EventPosition> {
        let status = self.monitor.status();
        if status.freshness == IndexFreshness::Absent {
            return None;
        }
        let ((seq, digest), state) = self
            .sequencer
            .applied()
            .zip(self.normalizer.reader_state())?;
        let reader_state = ReaderState {
            engine_block_size: status.engine_block_size.map(|size| size.0.get()),
            has_dropped_stores: self.has_dropped_stores,
            ..state
        };
        Some(EventPosition {
            seq,
            digest: digest.0,
            reader_digest: self.settings_digest,
            is_live: true,
            reader_state,
        })
    }

    /// Takes the position of another reader from which this one resumes.
    pub(super) fn take_resume_position(&mut self) -> Option<EventPosition> {
        self.resume_position.take()
    }

    /// Restores the status of the source at the position.
    pub(super) fn resume(&mut self, from: &EventPosition) {
        let engine = from.reader_state.engine_block_size.and_then(BlockSize::new);
        self.monitor.update(|source| {
            engine
                .into_iter()
                .for_each(|engine| source.set_block_size(engine));
            if let Some(windows) = from.reader_state.windows {
                source.set_windows(windows);
            }
        });
        self.reconcile();
    }

    /// Marks the rank as stale: the batches that were missed while disconnected are unknown.
    pub(in crate::kv_events) fn record_loss(&mut self) {
        self.monitor.update(EventSourceState::mark_unreported);
        if self.resync.is_clear() {
            tracing::info!(rank = %self.rank, name = self.worker_name, "KV event batches lost; clearing the blocks of the rank");
            self.normalizer.clear_blocks();
            self.clear_index();
        }
        self.normalizer.record_loss((self.sink.record_loss)());
        self.reconcile();
    }

    /// Clears the blocks of the rank in the index.
    fn clear_index(&mut self) {
        self.has_dropped_stores = false;
        (self.sink.apply)(&KvEvent::Cleared);
        self.monitor.update(EventSourceState::record_emptied);
    }

    /// Clears the rank because the engine's block size changed. A cache has one block size, so the
    /// engine may have restarted without being detected.
    pub(super) fn handle_block_size_change(&mut self) {
        tracing::warn!(
            rank = %self.rank, name = self.worker_name, engine = self.normalizer.engine_block_size().map(BlockSize::tokens),
            "engine block size changed; clearing the blocks of the rank"
        );
        self.monitor.update(EventSourceState::mark_unreported);
        self.clear_index();
        self.normalizer.record_loss((self.sink.record_loss)());
    }

    /// Evicts stale blocks that are presumed gone, and updates the status of the source with the
    /// numbers of stale and unreported blocks.
    fn reconcile(&mut self) {
        let reconciled = (self.sink.reconcile)();
        if let Some(evicted) = &reconciled.purged {
            tracing::info!(
                rank = %self.rank, name = self.worker_name, blocks = evicted.blocks.len(),
                "stale blocks evicted: not confirmed since events were lost, and as many newer \
                ones were evicted"
            );
            for event in run_blocking(|| self.normalizer.discard_blocks(evicted)) {
                (self.sink.apply)(&event);
            }
        }
        let has_unreported = reconciled.has_unreported || self.has_dropped_stores;
        self.monitor.update(|source| {
            source.set_stale_blocks(reconciled.stale_blocks);
            source.set_unreported(has_unreported);
        });
    }

    /// Counts a message that exceeded a limit of the socket and was skipped. Its sequence number is
    /// unknown. The source is stale until the next batch reveals the gap.
    pub(in crate::kv_events) fn record_too_large(&mut self, limit: &'static str) {
        self.count_batch("too_large");
        self.metrics
            .kv_events
            .batches_too_large
            .get_or_create(&ReasonLabel { reason: limit })
            .inc();
        self.monitor.update(EventSourceState::record_undecodable);
        let is_due = self
            .logged_problems
            .too_large
            .is_none_or(|at| at.elapsed() >= TOO_LARGE_LOG_INTERVAL);
        if is_due {
            self.logged_problems.too_large = Some(Instant::now());
            tracing::warn!(rank = %self.rank, name = self.worker_name, limit, "KV event batch exceeds a limit and is lost");
        }
    }

    /// Counts a message that does not have the shape of a batch.
    pub(in crate::kv_events) fn record_malformed(&mut self, problem: &str) {
        self.count_batch("malformed_frames");
        if !std::mem::replace(&mut self.logged_problems.malformed, true) {
            tracing::warn!(rank = %self.rank, name = self.worker_name, problem, "malformed KV event message skipped");
        }
    }

    /// Counts frames, elements and fields that this version does not know.
    pub(in crate::kv_events) fn record_unknown_fields(&mut self, count: u64) {
        if count == 0 {
            return;
        }
        self.metrics.kv_events.unknown_fields.inc_by(count);
        if !std::mem::replace(&mut self.logged_problems.unknown_fields, true) {
            tracing::info!(rank = %self.rank, name = self.worker_name, count, "unknown fields of KV events skipped");
        }
    }

    fn record_lost_batches(&mut self, from: u64, to: u64) {
        tracing::warn!(rank = %self.rank, name = self.worker_name, from, to, "KV event batches lost; index of the rank is stale");
        self.monitor
            .update(|source| source.record_lost(to.saturating_sub(from)));
        self.record_loss();
    }

    fn handle_restart(&mut self, evidence: &'static str) {
        tracing::info!(rank = %self.rank, name = self.worker_name, evidence, "engine restarted; clearing the blocks of the rank");
        self.metrics.kv_events.engine_restarts.inc();
        self.normalizer.reset();
        (self.sink.apply)(&KvEvent::Cleared);
        self.has_dropped_stores = false;
        self.monitor.update(EventSourceState::record_restart);
    }

    /// Returns true if a batch belongs to another rank. Applied to this rank, it would add prefixes
    /// that do not exist. Its number and arrival time do not concern this rank either.
    fn is_other_rank(&mut self, batch: &Result<EventBatch, WireError>) -> bool {
        let rank = batch.as_ref().ok().and_then(|batch| batch.rank);
        let Some(other) = rank.filter(|&rank| rank != self.rank.rank.0) else {
            return false;
        };
        self.count_batch("other_rank");
        self.monitor
            .update(|source| source.record_batch_rank(false));
        if !std::mem::replace(&mut self.logged_problems.other_rank, true) {
            tracing::error!(
                rank = %self.rank, name = self.worker_name, other,
                "dropping KV events of another data-parallel rank; \
                correct the worker's ranks or the endpoints of its event sources"
            );
        }
        true
    }

    /// Applies one decoded batch. Returns false if decoding failed.
    fn apply_decoded(&mut self, batch: Result<EventBatch, WireError>, origin: BatchOrigin) -> bool {
        match batch {
            Ok(batch) => {
                self.logged_problems.undecodable = false;
                self.apply_batch(&batch);
                self.record_received(&batch, origin);
                true
            }
            Err(WireError::TooLarge(limit)) => {
                self.record_too_large(limit.as_str());
                false
            }
            Err(error) => {
                self.count_batch("undecodable");
                self.monitor.update(EventSourceState::record_undecodable);
                if !std::mem::replace(&mut self.logged_problems.undecodable, true) {
                    tracing::warn!(rank = %self.rank, name = self.worker_name, %error, "KV event batch cannot be decoded");
                }
                false
            }
        }
    }

    fn apply_batch(&mut self, batch: &EventBatch) {
        self.record_unknown_fields(batch.unknown_fields);
        for event in &batch.events {
            let converted = self.normalizer.convert(event);
            let labels = self.apply_converted(event, converted);
            match self
                .event_counts
                .iter_mut()
                .find(|(counted, _)| *counted == labels)
            {
                Some((_, count)) => *count += 1,
                None => self.event_counts.push((labels, 1)),
            }
        }
        self.count_batch("applied");
        self.reconcile();
        for (labels, count) in self.event_counts.drain(..) {
            self.metrics
                .kv_events
                .events
                .get_or_create(&labels)
                .inc_by(count);
        }
    }

    /// Records the arrival of an applied batch.
    fn record_received(&mut self, batch: &EventBatch, origin: BatchOrigin) {
        let (number, timestamp) = match origin {
            BatchOrigin::Live(number) => (number, Some(batch.timestamp)),
            BatchOrigin::Replayed(number) => (number, None),
        };
        let engine = self.normalizer.engine_block_size();
        let windows = self.normalizer.windows();
        self.monitor.update(|source| {
            source.record_batch(ReceivedBatch {
                at: Instant::now(),
                received: SystemTime::now().into(),
                written: timestamp,
                number,
            });
            if let Some(engine) = engine {
                source.set_block_size(engine);
            }
            if let Some(windows) = windows {
                source.set_windows(windows);
            }
            source.record_batch_rank(true);
        });
    }

    fn count_batch(&self, outcome: &'static str) {
        count_outcome(&self.metrics.kv_events.batches, outcome);
    }
}

/// Origin of a batch, with its number.
#[derive(Clone, Copy, Debug)]
enum BatchOrigin {
    /// Published by the engine.
    Live(u64),
    /// Requested by a replay.
    Replayed(u64),
}
