//! One worker rank's stream of batches on its way into the index: judged by number, decoded, converted, applied and
//! counted. Synchronous on purpose: a batch is applied whole, and what the network does in between cannot be seen here.

use std::sync::Arc;
use std::time::Instant;

use super::convert::{Converted, Filtered, Normalizer};
use super::doubts::{self, Doubts, Due};
use super::sequencer::{Digest, Live, Repeated, Sequencer};
use super::wire::{self, Batch, Event};
use super::witness::unix_now;
use super::{RankSink, SharedResync, SourceSpec, Witness};
use crate::index::{KvEvent, Outcome};
use crate::metrics::{EventLabels, Metrics, OutcomeLabel};
use crate::trust::{Because, Heard, Source};
use crate::worker::{BlockSize, WorkerRank};

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
    sink: RankSink,
    metrics: Arc<Metrics>,
    tally: Vec<(EventLabels, u64)>,
    complaints: Complaints,
    witness: Witness,
    resync: SharedResync,
    doubts: Doubts,
}

/// What was complained of already; the second time says nothing new.
#[derive(Default)]
struct Complaints {
    undecodable: bool,
    malformed: bool,
    other_rank: bool,
    block_size: bool,
    group_block_size: bool,
}

impl Feed {
    pub(super) fn new(spec: &SourceSpec, sink: RankSink, metrics: Arc<Metrics>, witness: Witness) -> Self {
        Self {
            rank: spec.rank,
            block_size: spec.block_size,
            sequencer: Sequencer::default(),
            normalizer: Normalizer::new(spec.block_size, spec.media),
            sink,
            metrics,
            tally: Vec::new(),
            complaints: Complaints::default(),
            witness,
            resync: spec.resync.clone(),
            doubts: Doubts::default(),
        }
    }

    /// Takes one live message. A gap in front of it is handed back, to be closed and then settled.
    pub(super) fn live(&mut self, seq: u64, payload: &[u8]) -> Option<Gap> {
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
                if self.apply(payload, Way::Live(seq)) {
                    self.sequencer.advance(seq, Digest::of(payload));
                }
            }
        }
        None
    }

    /// Places the batch that showed a gap, whatever the replay brought.
    pub(super) fn settle(&mut self, gap: Gap, payload: &[u8]) {
        let reached = self.sequencer.expected();
        let outcome = match reached {
            _ if reached >= gap.to => "replayed",
            _ if reached > gap.from => "partly_replayed",
            _ => "lost",
        };
        self.metrics.kv_event_gaps.get_or_create(&OutcomeLabel { outcome }).inc();
        match self.sequencer.place(gap.to) {
            Live::Stale | Live::Restart => self.count("stale"),
            Live::Apply => {
                if self.apply(payload, Way::Live(gap.to)) {
                    self.sequencer.advance(gap.to, Digest::of(payload));
                }
            }
            Live::Gap { from, to } => self.jump(Gap { from, to }, payload),
        }
    }

    /// Takes one batch of a replay. A hole is handed back with the batch untouched.
    pub(super) fn repeated(&mut self, seq: u64, payload: &[u8]) -> Repeated {
        let digest = Digest::of(payload);
        let verdict = self.sequencer.repeated(seq, digest);
        match verdict {
            Repeated::Apply => {
                if !self.apply(payload, Way::Repeated(seq)) {
                    // Asking a third time would bring the same bytes.
                    self.lost(seq, seq.saturating_add(1));
                }
                self.sequencer.advance(seq, digest);
            }
            Repeated::Restart => self.restarted("it repeated another batch under the number last applied"),
            Repeated::Known | Repeated::Hole { .. } => {}
        }
        verdict
    }

    /// Judges a replay without a single batch; true if the rank was cleared, because the engine is a new one.
    pub(super) fn repeated_nothing(&mut self) -> bool {
        let restarted = self.sequencer.repeated_nothing();
        if restarted {
            self.restarted("it no longer holds the batch last applied");
        }
        restarted
    }

    /// Gives up what is missing in front of a batch and applies it.
    pub(super) fn jump(&mut self, gap: Gap, payload: &[u8]) {
        self.lost(gap.from, gap.to);
        if !self.apply(payload, Way::Repeated(gap.to)) {
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
        self.witness.note(Source::missed);
        if self.resync.clears() {
            tracing::info!(rank = %self.rank, "what is known of this rank is forgotten, to be learned anew");
            self.normalizer.emptied();
            (self.sink.apply)(&KvEvent::Cleared);
            self.emptied();
            return;
        }
        self.normalizer.doubt();
        (self.sink.doubt)();
        let held = (self.sink.held)();
        let room = doubts::room(self.normalizer.engine_block_size(), self.block_size, held);
        self.doubts.begin(held, room);
        self.witness.note(|source| source.doubted(held.doubted));
    }

    /// Nothing is held any more.
    fn emptied(&mut self) {
        self.doubts.end();
        self.witness.note(Source::emptied);
    }

    /// Looks what has become of doubts.
    fn look_at_doubts(&mut self) {
        match self.doubts.due() {
            Due::Nothing => return,
            Due::Count => {}
            Due::Forget => {
                tracing::info!(
                    rank = %self.rank,
                    "blocks that may be gone since events were lost are forgotten: a whole cache of others was stored since"
                );
                for event in self.normalizer.forget_doubted() {
                    (self.sink.apply)(&event);
                }
                (self.sink.forget_doubted)();
            }
        }
        let held = (self.sink.held)();
        self.doubts.counted(held);
        self.witness.note(|source| source.doubted(held.doubted));
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
        self.doubt();
    }

    fn restarted(&mut self, evidence: &'static str) {
        tracing::info!(rank = %self.rank, evidence, "engine restarted; its blocks are forgotten");
        self.metrics.kv_event_restarts.inc();
        self.normalizer.reset();
        (self.sink.apply)(&KvEvent::Cleared);
        self.doubts.end();
        self.witness.note(Source::restarted);
    }

    /// Decodes and applies one batch; false if it cannot be read.
    fn apply(&mut self, payload: &[u8], way: Way) -> bool {
        match wire::decode(payload) {
            Ok(batch) => {
                self.complaints.undecodable = false;
                self.apply_batch(&batch);
                self.heard(&batch, way);
                true
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
        if let Some(named) = batch.rank.filter(|&named| named != self.rank.rank.0) {
            // Another rank's blocks under this rank's name would be prefixes that do not exist.
            self.count("other_rank");
            self.witness.note(|source| source.named(false));
            if !std::mem::replace(&mut self.complaints.other_rank, true) {
                tracing::error!(
                    rank = %self.rank, named,
                    "KV events of another data-parallel rank arrive here and are dropped; \
                     correct the worker's ranks or the endpoints of its event sources"
                );
            }
            return;
        }
        for event in &batch.events {
            let labels = match self.normalizer.convert(event) {
                Converted::Event(event) => EventLabels { kind: event.kind(), outcome: self.tell(&event).as_str() },
                Converted::Regrouped(events, outcome) => {
                    let told: Vec<_> = events.iter().map(|event| self.tell(event)).collect();
                    let failed = told.into_iter().find(|outcome| !is_fine(*outcome));
                    EventLabels { kind: kind(event), outcome: failed.unwrap_or(outcome).as_str() }
                }
                Converted::Group(reason, share) => {
                    self.complain(reason);
                    let outcome = match self.tell(&share) {
                        Outcome::TooManyGroups => Outcome::TooManyGroups.as_str(),
                        _ => reason.label(),
                    };
                    EventLabels { kind: kind(event), outcome }
                }
                Converted::Filtered(reason) => {
                    self.complain(reason);
                    EventLabels { kind: kind(event), outcome: reason.label() }
                }
            };
            match self.tally.iter_mut().find(|(known, _)| *known == labels) {
                Some((_, count)) => *count += 1,
                None => self.tally.push((labels, 1)),
            }
        }
        self.count("applied");
        self.look_at_doubts();
        for (labels, count) in self.tally.drain(..) {
            self.metrics.kv_events.get_or_create(&labels).inc_by(count);
        }
    }

    /// Hands one event to the index.
    fn tell(&mut self, event: &KvEvent) -> Outcome {
        let outcome = (self.sink.apply)(event);
        match event {
            KvEvent::Stored { blocks, .. } => self.doubts.stored(blocks.len() as u64),
            KvEvent::Removed { blocks, .. } => self.doubts.removed(blocks.len() as u64),
            KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. } => {}
            KvEvent::Cleared => {
                self.doubts.end();
                self.witness.note(Source::cleared);
            }
        }
        outcome
    }

    /// Tells of a batch that was taken.
    fn heard(&mut self, batch: &Batch, way: Way) {
        let (number, written) = match way {
            Way::Live(number) => (number, Some(batch.timestamp)),
            Way::Repeated(number) => (number, None),
        };
        let own = batch.rank.is_none_or(|named| named == self.rank.rank.0);
        let engine = self.normalizer.engine_block_size();
        self.witness.note(|source| {
            source.heard(Heard { at: Instant::now(), unix: unix_now(), written, number });
            if let Some(engine) = engine {
                source.sized(engine);
            }
            source.named(own);
        });
    }

    fn complain(&mut self, reason: Filtered) {
        if let Filtered::BlockSize { engine } = reason
            && self.normalizer.engine_block_size().is_none()
        {
            let engine = BlockSize::new(engine);
            self.witness.note(|source| source.unusable(Because::BlockSizeMismatch, engine));
        }
        let configured = self.block_size.tokens();
        match reason {
            Filtered::BlockSize { engine } if !std::mem::replace(&mut self.complaints.block_size, true) => {
                tracing::error!(
                    rank = %self.rank, engine, configured,
                    "the engine's blocks have another size than configured, and neither divides the other, so its cache \
                     cannot be used and it is chosen by load; correct the block size"
                );
            }
            Filtered::GroupBlockSize { engine } if !std::mem::replace(&mut self.complaints.group_block_size, true) => {
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
        self.metrics.kv_event_batches.get_or_create(&OutcomeLabel { outcome }).inc();
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
mod tests {
    use super::*;
    use crate::index::{GroupNeed, PrefixIndex};
    use crate::kv_events::Held;
    use crate::worker::{Attach, DpRank, EventSource, Slot, WorkerId};

    /// Plays captured batches of a model with a sliding window into a rank with blocks of some size.
    fn play(block_size: u32) -> (Arc<Metrics>, Vec<KvEvent>) {
        let session: serde_json::Value = serde_json::from_str(include_str!("../../tests/data/hybrid.json")).unwrap();
        let hex = session["requests"][0]["payloads"][0].as_str().unwrap();
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        let payload: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        let rank = WorkerRank { worker: WorkerId(1), rank: DpRank(0) };
        let spec = SourceSpec {
            rank,
            source: EventSource {
                endpoint: String::new(),
                topic: String::new(),
                attach: Attach::Connect,
                replay: None,
            },
            block_size: BlockSize::new(block_size).unwrap(),
            media: Default::default(),
            resync: SharedResync::default(),
        };
        let (told, metrics) = (Arc::new(parking_lot::Mutex::new(Vec::new())), Arc::new(Metrics::new()));
        let mut writer = PrefixIndex::new().join(Slot(0));
        let heard = told.clone();
        let apply = move |event: &KvEvent| {
            heard.lock().push(event.clone());
            writer.apply(event)
        };
        let sink = RankSink {
            apply: Box::new(apply),
            doubt: Box::new(|| {}),
            held: Box::new(Held::default),
            forget_doubted: Box::new(|| {}),
        };
        assert_eq!(Feed::new(&spec, sink, metrics.clone(), Witness::default()).live(0, &payload), None);
        let told = told.lock().clone();
        (metrics, told)
    }

    fn count(metrics: &Metrics, outcome: &'static str) -> u64 {
        metrics.kv_events.get_or_create(&EventLabels { kind: "stored", outcome }).get()
    }

    #[test]
    fn what_a_group_holds_is_told_and_still_counted_as_filtered() {
        let (metrics, told) = play(32);
        let [KvEvent::GroupStored { group: 0, need, blocks }, KvEvent::Stored { .. }] = &told[..] else {
            panic!("{told:?}")
        };
        assert_eq!((*need, blocks.len()), (GroupNeed::Last { blocks: 2, stride: std::num::NonZeroU32::MIN }, 2));
        assert_eq!((count(&metrics, "filtered_non_main_attention_kind"), count(&metrics, "ok")), (1, 1));
    }

    #[test]
    fn a_group_with_blocks_of_another_size_is_counted_by_that_reason() {
        let (metrics, told) = play(24);
        assert!(matches!(told[..], [KvEvent::GroupStored { need: GroupNeed::Unknown, .. }]), "{told:?}");
        assert_eq!(count(&metrics, "filtered_group_block_size_mismatch"), 1);
        assert_eq!(count(&metrics, "filtered_block_size_mismatch"), 1);
    }
}
