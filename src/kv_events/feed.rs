//! One worker rank's stream of batches on its way into the index: judged by number, decoded, converted, applied and
//! counted. Synchronous on purpose: a batch is applied whole, and what the network does in between cannot be seen here.

mod takeover;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::convert::{Converted, Filtered, Normalizer};
use super::sequencer::{Digest, Live, Repeated, Sequencer};
use super::wire::{self, Batch, Event, Medium, WireError};
use super::witness::unix_now;
use super::{RankSink, SharedResync, SourceSpec, Witness};
use crate::index::{KvEvent, Outcome, Position};
use crate::lifecycle::aside;
use crate::metrics::{EventLabels, Metrics, OutcomeLabel, ReasonLabel};
use crate::tier::Tier;
use crate::trust::{Because, Heard, Source};
use crate::worker::{BlockSize, WorkerRank};

/// Shortest time between log lines about batches that exceed a limit.
const TOO_LARGE_LOG: Duration = Duration::from_secs(60);

/// A live batch that came too early: the numbers in between are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    /// First missing number.
    pub(super) from: u64,
    /// The number of the batch that came.
    pub(super) to: u64,
}

/// The stream of one worker rank.
pub(super) struct Feed {
    rank: WorkerRank,
    block_size: BlockSize,
    sequencer: Sequencer,
    normalizer: Normalizer,
    /// The settings that events are read by.
    reading: u64,
    /// Where another reader was, while this one goes on in its place and was never attached itself.
    resumed: Option<Position>,
    sink: RankSink,
    metrics: Arc<Metrics>,
    tally: Vec<(EventLabels, u64)>,
    complaints: Complaints,
    witness: Witness,
    resync: SharedResync,
    /// Whether stores were dropped that the engine was right to tell of.
    dropped: bool,
}

/// What was complained of already; the second time says nothing new.
#[derive(Default)]
struct Complaints {
    undecodable: bool,
    /// Time of the last log line about a batch that exceeds a limit.
    too_large: Option<Instant>,
    malformed: bool,
    other_rank: bool,
    block_size: bool,
    group_block_size: bool,
}

impl Feed {
    pub(super) fn new(
        spec: &SourceSpec,
        sink: RankSink,
        metrics: Arc<Metrics>,
        witness: Witness,
    ) -> Self {
        let from = sink.position.lock().clone();
        let anew =
            Normalizer::new(spec.block_size, spec.media).salted(sink.position.salts().clone());
        let (sequencer, normalizer) = match &from {
            Some(from) => (
                Sequencer::resumed(from.seq, Digest(from.digest)),
                anew.resumed(&from.taught),
            ),
            None => (Sequencer::default(), anew),
        };
        Self {
            rank: spec.rank,
            block_size: spec.block_size,
            sequencer,
            normalizer,
            reading: spec.reading(),
            sink,
            metrics,
            tally: Vec::new(),
            complaints: Complaints::default(),
            witness,
            resync: spec.resync.clone(),
            dropped: from.as_ref().is_some_and(|from| from.taught.dropped),
            resumed: from,
        }
    }

    /// Takes one live message. A gap in front of it is handed back, to be closed and then settled.
    pub(super) fn live(&mut self, seq: u64, payload: &[u8]) -> Option<Gap> {
        self.moving(|feed| feed.live_now(seq, payload))
    }

    fn live_now(&mut self, seq: u64, payload: &[u8]) -> Option<Gap> {
        let batch = wire::decode(payload);
        if self.is_foreign(&batch) {
            return None;
        }
        let mut verdict = self.sequencer.live(seq, || Digest::of(payload));
        if verdict == Live::Restart {
            self.restarted("its batch numbers went back");
            verdict = self.sequencer.place(seq);
        }
        match verdict {
            Live::Gap { from, to } => {
                self.witness.note(Source::gap);
                return Some(Gap { from, to });
            }
            Live::Stale | Live::Restart => self.count("stale"),
            // Not moving the mark past a batch that cannot be read makes the next one ask for it again.
            Live::Apply => {
                if self.apply(batch, Way::Live(seq)) {
                    self.sequencer.advance(seq, Digest::of(payload));
                }
            }
        }
        None
    }

    /// Places the batch that showed a gap, whatever the replay brought.
    pub(super) fn settle(&mut self, gap: Gap, payload: &[u8]) {
        self.moving(|feed| feed.settle_now(gap, payload))
    }

    fn settle_now(&mut self, gap: Gap, payload: &[u8]) {
        let reached = self.sequencer.expected();
        let outcome = match reached {
            _ if reached >= gap.to => "replayed",
            _ if reached > gap.from => "partly_replayed",
            _ => "lost",
        };
        self.metrics
            .kv_event_gaps
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
        match self.sequencer.place(gap.to) {
            Live::Stale | Live::Restart => self.count("stale"),
            Live::Apply => {
                if self.apply(wire::decode(payload), Way::Live(gap.to)) {
                    self.sequencer.advance(gap.to, Digest::of(payload));
                }
            }
            Live::Gap { from, to } => self.jump_now(Gap { from, to }, payload),
        }
    }

    /// Takes one batch of a replay. A hole is handed back with the batch untouched.
    pub(super) fn repeated(&mut self, seq: u64, payload: &[u8]) -> Repeated {
        self.moving(|feed| feed.repeated_now(seq, payload))
    }

    fn repeated_now(&mut self, seq: u64, payload: &[u8]) -> Repeated {
        let batch = wire::decode(payload);
        if self.is_foreign(&batch) {
            return Repeated::Known;
        }
        let digest = Digest::of(payload);
        let verdict = self.sequencer.repeated(seq, digest);
        match verdict {
            Repeated::Apply => {
                if !self.apply(batch, Way::Repeated(seq)) {
                    // Asking a third time would bring the same bytes.
                    self.lost(seq, seq.saturating_add(1));
                }
                self.sequencer.advance(seq, digest);
            }
            Repeated::Restart => {
                self.restarted("it repeated another batch under the number last applied")
            }
            Repeated::Known | Repeated::Hole { .. } => {}
        }
        verdict
    }

    /// Judges a replay without a single batch; true if the rank was cleared, because the engine is a new one.
    pub(super) fn repeated_nothing(&mut self) -> bool {
        self.moving(|feed| feed.repeated_nothing_now())
    }

    fn repeated_nothing_now(&mut self) -> bool {
        let restarted = self.sequencer.repeated_nothing();
        if restarted {
            self.restarted("it no longer holds the batch last applied");
        }
        restarted
    }

    /// Gives up what is missing in front of a batch and applies it.
    pub(super) fn jump(&mut self, gap: Gap, payload: &[u8]) {
        self.moving(|feed| feed.jump_now(gap, payload))
    }

    fn jump_now(&mut self, gap: Gap, payload: &[u8]) {
        self.lost(gap.from, gap.to);
        if !self.apply(wire::decode(payload), Way::Repeated(gap.to)) {
            self.lost(gap.to, gap.to.saturating_add(1));
        }
        self.sequencer.advance(gap.to, Digest::of(payload));
    }

    /// The number to start a replay at.
    pub(super) fn ask_from(&self) -> u64 {
        self.sequencer.ask_from()
    }

    /// The next number that is not yet applied.
    pub(super) fn expected(&self) -> u64 {
        self.sequencer.expected()
    }

    /// Whether nothing was applied yet in this life of the engine.
    pub(super) fn is_fresh(&self) -> bool {
        self.sequencer.is_fresh()
    }

    /// What was missed while detached cannot be found out.
    pub(super) fn doubt(&mut self) {
        self.moving(Self::doubt_now);
    }

    fn doubt_now(&mut self) {
        self.witness.note(Source::missed);
        if self.resync.clears() {
            tracing::info!(rank = %self.rank, "what is known of this rank is forgotten, to be learned anew");
            self.normalizer.emptied();
            self.forget_all();
        }
        self.normalizer.doubt((self.sink.doubt)());
        self.settle_doubts();
    }

    /// Nothing is held any more as far as is known.
    fn forget_all(&mut self) {
        self.dropped = false;
        (self.sink.apply)(&KvEvent::Cleared);
        self.witness.note(Source::emptied);
    }

    /// The engine's blocks have another size than they had, so its cache is another one: it may be a new engine whose start
    /// was not noticed.
    fn resized(&mut self) {
        tracing::warn!(
            rank = %self.rank, engine = self.normalizer.engine_block_size().map(BlockSize::tokens),
            "the engine's blocks have another size than before; those that were known are forgotten"
        );
        self.witness.note(Source::missed);
        self.forget_all();
        self.normalizer.doubt((self.sink.doubt)());
    }

    /// Looks what has become of doubts.
    fn settle_doubts(&mut self) {
        let settled = (self.sink.settle)();
        if let Some(forgotten) = &settled.forgotten {
            tracing::info!(
                rank = %self.rank, blocks = forgotten.names.len(),
                "blocks that nothing was heard of since events were lost are forgotten: as many newer ones were evicted since"
            );
            for event in aside(|| self.normalizer.forgotten(forgotten)) {
                (self.sink.apply)(&event);
            }
        }
        let untold = settled.untold || self.dropped;
        self.witness.note(|source| {
            source.doubted(settled.doubted);
            source.untold(untold);
        });
    }

    /// Counts a message that exceeded a limit of the socket and was skipped. Its sequence number is unknown. The source counts as
    /// stale until the next batch shows the gap.
    pub(super) fn skipped_message(&mut self, limit: &'static str) {
        self.moving(|feed| feed.too_large(limit));
    }

    fn too_large(&mut self, limit: &'static str) {
        self.count("too_large");
        self.metrics
            .kv_event_batches_too_large
            .get_or_create(&ReasonLabel { reason: limit })
            .inc();
        self.witness.note(Source::undecodable);
        let is_due = self
            .complaints
            .too_large
            .is_none_or(|at| at.elapsed() >= TOO_LARGE_LOG);
        if is_due {
            self.complaints.too_large = Some(Instant::now());
            tracing::warn!(rank = %self.rank, limit, "KV event batch exceeds a limit and is lost");
        }
    }

    /// Notes a message that does not have the shape of a batch.
    pub(super) fn malformed(&mut self, problem: &str) {
        self.count("malformed_frames");
        if !std::mem::replace(&mut self.complaints.malformed, true) {
            tracing::warn!(rank = %self.rank, problem, "KV event message without topic, number and payload was skipped");
        }
    }

    fn lost(&mut self, from: u64, to: u64) {
        tracing::warn!(rank = %self.rank, from, to, "KV event batches are lost; what is known of this rank may be out of date");
        self.witness.note(|source| source.lost(to - from));
        self.doubt_now();
    }

    fn restarted(&mut self, evidence: &'static str) {
        tracing::info!(rank = %self.rank, evidence, "engine restarted; its blocks are forgotten");
        self.metrics.kv_event_restarts.inc();
        self.normalizer.reset();
        (self.sink.apply)(&KvEvent::Cleared);
        self.dropped = false;
        self.witness.note(Source::restarted);
    }

    /// Whether a batch is another rank's. Its blocks under this rank's name would be prefixes that do not exist, and its
    /// number and its being heard say nothing of this rank.
    fn is_foreign(&mut self, batch: &Result<Batch, WireError>) -> bool {
        let named = batch.as_ref().ok().and_then(|batch| batch.rank);
        let Some(named) = named.filter(|&named| named != self.rank.rank.0) else {
            return false;
        };
        self.count("other_rank");
        self.witness.note(|source| source.named(false));
        if !std::mem::replace(&mut self.complaints.other_rank, true) {
            tracing::error!(
                rank = %self.rank, named,
                "KV events of another data-parallel rank arrive here and are dropped; \
                 correct the worker's ranks or the endpoints of its event sources"
            );
        }
        true
    }

    /// Applies one batch; false if it cannot be read.
    fn apply(&mut self, batch: Result<Batch, WireError>, way: Way) -> bool {
        match batch {
            Ok(batch) => {
                self.complaints.undecodable = false;
                self.apply_batch(&batch);
                self.heard(&batch, way);
                true
            }
            Err(WireError::TooLarge(limit)) => {
                self.too_large(limit.as_str());
                false
            }
            Err(error) => {
                self.count("undecodable");
                self.witness.note(Source::undecodable);
                if !std::mem::replace(&mut self.complaints.undecodable, true) {
                    tracing::warn!(rank = %self.rank, %error, "KV event batch cannot be read");
                }
                false
            }
        }
    }

    fn apply_batch(&mut self, batch: &Batch) {
        for event in &batch.events {
            let converted = self.normalizer.convert(event);
            let labels = self.told(event, converted);
            match self.tally.iter_mut().find(|(known, _)| *known == labels) {
                Some((_, count)) => *count += 1,
                None => self.tally.push((labels, 1)),
            }
        }
        self.count("applied");
        self.settle_doubts();
        for (labels, count) in self.tally.drain(..) {
            self.metrics.kv_events.get_or_create(&labels).inc_by(count);
        }
    }

    /// Tells the index what became of an event.
    fn told(&mut self, event: &Event, converted: Converted) -> EventLabels {
        match converted {
            Converted::Event(event) => EventLabels {
                kind: event.kind(),
                outcome: self.tell(&event).as_str(),
            },
            Converted::Regrouped(events, outcome) => {
                let told: Vec<_> = events.iter().map(|event| self.tell(event)).collect();
                let failed = told.into_iter().find(|outcome| !is_fine(*outcome));
                self.dropped |= outcome == Outcome::TooManyWaiting;
                if outcome == Outcome::ParentNotFound {
                    self.tell_unfounded(event);
                }
                EventLabels {
                    kind: kind(event),
                    outcome: failed.unwrap_or(outcome).as_str(),
                }
            }
            Converted::Group(reason, share) => {
                self.complain(reason);
                let outcome = match self.tell(&share) {
                    Outcome::TooManyGroups => Outcome::TooManyGroups.as_str(),
                    _ => reason.label(),
                };
                EventLabels {
                    kind: kind(event),
                    outcome,
                }
            }
            Converted::Filtered(reason) => {
                self.complain(reason);
                EventLabels {
                    kind: kind(event),
                    outcome: reason.label(),
                }
            }
            Converted::Resized(anew) => {
                self.resized();
                self.told(event, *anew)
            }
        }
    }

    /// A block is in use on the device that was never told. The index, which judges by that, does not see it where the
    /// engine's blocks are smaller than ours.
    fn tell_unfounded(&mut self, event: &Event) {
        if let Event::Stored(stored) = event
            && stored.origin.medium == Medium::Tier(Tier::Device)
        {
            self.tell(&KvEvent::Stored {
                parent: stored.parent,
                blocks: Vec::new(),
                tier: Tier::Device,
            });
        }
    }

    /// Hands one event to the index.
    fn tell(&mut self, event: &KvEvent) -> Outcome {
        let outcome = (self.sink.apply)(event);
        self.dropped |= matches!(outcome, Outcome::TooManyWaiting | Outcome::IndexFull);
        if *event == KvEvent::Cleared {
            self.dropped = false;
            self.witness.note(Source::cleared);
        }
        outcome
    }

    /// Tells of a batch that was taken.
    fn heard(&mut self, batch: &Batch, way: Way) {
        let (number, written) = match way {
            Way::Live(number) => (number, Some(batch.timestamp)),
            Way::Repeated(number) => (number, None),
        };
        let engine = self.normalizer.engine_block_size();
        self.witness.note(|source| {
            source.heard(Heard {
                at: Instant::now(),
                unix: unix_now(),
                written,
                number,
            });
            if let Some(engine) = engine {
                source.sized(engine);
            }
            source.named(true);
        });
    }

    fn complain(&mut self, reason: Filtered) {
        let configured = self.block_size.tokens();
        match reason {
            Filtered::AmbiguousSalt => self.dropped = true,
            Filtered::BlockSize { engine } => {
                let known = self.normalizer.engine_block_size();
                match known {
                    None => {
                        let engine = BlockSize::new(engine);
                        self.witness
                            .note(|source| source.unusable(Because::BlockSizeMismatch, engine));
                    }
                    // Only in a slower tier: on the device it would be another cache.
                    Some(_) => self.dropped = true,
                }
                if std::mem::replace(&mut self.complaints.block_size, true) {
                    return;
                }
                match known {
                    None => tracing::error!(
                        rank = %self.rank, engine, configured,
                        "the engine's blocks have another size than configured, and neither divides the other, so its \
                         cache cannot be used and it is chosen by load; correct the block size"
                    ),
                    Some(_) => tracing::warn!(
                        rank = %self.rank, engine,
                        "a tier has blocks of several sizes, or of one that cannot be brought to ours; those are not known"
                    ),
                }
            }
            Filtered::GroupBlockSize { engine }
                if !std::mem::replace(&mut self.complaints.group_block_size, true) =>
            {
                tracing::warn!(
                    rank = %self.rank, engine, configured,
                    "a cache group's blocks are no multiple of the configured size, so it cannot be told what of this \
                     rank's device cache is reusable, and none of it is counted"
                );
            }
            _ => {}
        }
    }

    fn count(&self, outcome: &'static str) {
        self.metrics
            .kv_event_batches
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }
}

/// How a batch came.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// By itself, with this number.
    Live(u64),
    /// Because it was asked for.
    Repeated(u64),
}

fn is_fine(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Ok | Outcome::DuplicateStore)
}

fn kind(event: &Event) -> &'static str {
    match event {
        Event::Stored(_) => "stored",
        Event::Removed { .. } => "removed",
        Event::Cleared { .. } => "cleared",
        Event::Ignored => "ignored",
    }
}

#[cfg(test)]
mod tests;
