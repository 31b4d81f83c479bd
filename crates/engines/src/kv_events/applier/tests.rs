mod resume;

use super::*;
use crate::kv_events::sequencer::ReplayAction;
use crate::kv_events::source::SharedResync;
use warmroute_core::block::hash::{BlockWindows, local_hashes};
use warmroute_core::block::{BlockHashes, CacheSalt};
use warmroute_core::freshness::{IndexFreshness, ResyncMode, SourceFacts, StaleReason};
use warmroute_core::index::dump::RankDump;
use warmroute_core::index::{GroupNeed, KvEvent, PrefixIndex, RankWriter, ReconcileReport};
use warmroute_core::worker::{BlockSize, DpRank, RankSlot, WorkerId, WorkerRank};
use warmroute_metrics::EventLabels;

/// Returns a batch with one event.
fn batch_of(event: impl serde::Serialize) -> Vec<u8> {
    rmp_serde::to_vec(&(1.5, [event], 0)).unwrap()
}

/// Applies captured batches of a sliding-window model to a rank with the given block size.
fn apply_captured_batches(block_size: u32) -> (Arc<Metrics>, Vec<KvEvent>) {
    let session: serde_json::Value = serde_json::from_str(include_str!(
        "../../../../../tests/data/hybrid_model_session.json"
    ))
    .unwrap();
    let hex = session["requests"][0]["payloads"][0].as_str().unwrap();
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    let payload: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
    let spec = SourceSpec::for_test(block_size);
    let events = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let metrics = Arc::new(Metrics::new());
    let mut writer = PrefixIndex::new().create_writer(RankSlot(0));
    let recorded = events.clone();
    let apply = move |event: &KvEvent| {
        recorded.lock().push(event.clone());
        writer.apply(event)
    };
    let sink = RankSink {
        apply: Box::new(apply),
        record_loss: Box::new(|| 0),
        reconcile: Box::new(ReconcileReport::default),
        position: Default::default(),
    };
    assert_eq!(
        EventApplier::new(&spec, sink, metrics.clone(), SourceMonitor::default())
            .update(|batches| batches.apply_live(0, &payload)),
        None
    );
    let events = events.lock().clone();
    (metrics, events)
}

fn count(metrics: &Metrics, outcome: &'static str) -> u64 {
    metrics
        .kv_events
        .events
        .get_or_create(&EventLabels {
            kind: "stored",
            outcome,
        })
        .get()
}

#[test]
fn group_blocks_are_indexed_and_counted_as_filtered() {
    let (metrics, events) = apply_captured_batches(32);
    let [
        KvEvent::GroupStored {
            group: 0,
            need,
            blocks,
        },
        KvEvent::Stored { .. },
    ] = &events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!(
        (*need, blocks.len()),
        (
            GroupNeed::Trailing {
                blocks: 2,
                stride: std::num::NonZeroU32::MIN
            },
            2
        )
    );
    assert_eq!(
        (
            count(&metrics, "filtered_non_main_attention_kind"),
            count(&metrics, "ok")
        ),
        (1, 1)
    );
}

#[test]
fn group_block_size_mismatch_is_counted() {
    let (metrics, events) = apply_captured_batches(24);
    assert!(
        matches!(
            events[..],
            [KvEvent::GroupStored {
                need: GroupNeed::Unknown,
                ..
            }]
        ),
        "{events:?}"
    );
    assert_eq!(count(&metrics, "filtered_group_block_size_mismatch"), 1);
    assert_eq!(count(&metrics, "filtered_block_size_mismatch"), 1);
}

/// An applier with a real index.
struct TestStream {
    applier: EventApplier,
    index: Arc<PrefixIndex>,
    writer: Arc<parking_lot::Mutex<RankWriter>>,
    monitor: SourceMonitor,
    metrics: Arc<Metrics>,
    /// Number of the next batch.
    next: u64,
}

impl TestStream {
    fn new(resync: ResyncMode) -> Self {
        Self::resume_from(resync, None)
    }

    /// Resumes from a copy of another reader.
    fn resume_from(resync: ResyncMode, from: Option<&RankDump>) -> Self {
        let shared = SharedResync::default();
        shared.set(resync);
        let spec = SourceSpec {
            resync: shared,
            ..SourceSpec::for_test(2)
        };
        let index = PrefixIndex::new();
        let monitor = SourceMonitor::default();
        let metrics = Arc::new(Metrics::new());
        let writer = Arc::new(parking_lot::Mutex::new(index.create_writer(RankSlot(0))));
        let position = SharedPosition::default();
        if let Some(from) = from {
            position.restore(from, || writer.lock().restore(from));
        }
        let applied = writer.clone();
        let lost = writer.clone();
        let reconciled = writer.clone();
        let sink = RankSink {
            apply: Box::new(move |event| applied.lock().apply(event)),
            record_loss: Box::new(move || lost.lock().record_gap()),
            reconcile: Box::new(move || reconciled.lock().reconcile()),
            position,
        };
        monitor.update(|source| source.set_link(warmroute_core::freshness::SourceLink::Attached));
        let applier = EventApplier::new(&spec, sink, metrics.clone(), monitor.clone());
        let next = applier.sequencer().next_seq();
        Self {
            applier,
            index,
            writer,
            monitor,
            metrics,
            next,
        }
    }

    /// Sends a batch. There is no replay endpoint.
    fn send(&mut self, payload: &[u8]) {
        self.receive(self.next, payload);
        self.next = self.next.wrapping_add(1);
    }

    fn receive(&mut self, number: u64, payload: &[u8]) {
        if let Some(gap) = self
            .applier
            .update(|batches| batches.apply_live(number, payload))
        {
            self.applier
                .update(|batches| batches.apply_after_replay(gap, payload));
        }
    }

    fn lose(&mut self, batches: u64) {
        self.next += batches;
    }

    /// Stores blocks of two tokens each. Both token ids are the block's hash.
    fn store(&mut self, parent: Option<u64>, blocks: &[u64]) {
        self.store_sized(parent, blocks, 2);
    }

    /// Stores blocks of another size.
    fn store_sized(&mut self, parent: Option<u64>, blocks: &[u64], size: u32) {
        let tokens: Vec<u64> = blocks
            .iter()
            .flat_map(|block| vec![*block; size as usize])
            .collect();
        self.send(&batch_of(("BlockStored", blocks, parent, tokens, size)));
    }

    fn remove(&mut self, blocks: &[u64]) {
        self.send(&batch_of(("BlockRemoved", blocks)));
    }

    /// Applies a batch of another rank, with a number of that rank.
    fn receive_other_rank_batch(&mut self, number: u64) {
        let payload = rmp_serde::to_vec(&(
            1.5,
            [("BlockStored", [77u64], None::<u64>, [7u64, 7], 2u32)],
            1,
        ))
        .unwrap();
        assert_eq!(
            self.applier
                .update(|batches| batches.apply_live(number, &payload)),
            None
        );
        assert_eq!(
            self.applier
                .update(|batches| batches.apply_replayed(number, &payload)),
            ReplayAction::Duplicate
        );
    }

    /// Returns the number of leading blocks of a prompt in the index.
    fn holds(&self, blocks: &[u32]) -> usize {
        let tokens: Vec<u32> = blocks.iter().flat_map(|block| [*block, *block]).collect();
        let size = BlockSize::new(2).unwrap();
        let hashes = BlockHashes::from_locals(
            tokens.len(),
            size,
            local_hashes(
                &tokens,
                size,
                &CacheSalt::default(),
                BlockWindows::Plain,
                &[],
            ),
        );
        self.index
            .watch(&hashes, RankSlot(0))
            .map_or(0, |watch| watch.max_held())
    }

    fn status(&self) -> (IndexFreshness, Option<StaleReason>) {
        let status = self.monitor.status();
        (status.freshness, status.reason)
    }

    fn facts(&self) -> SourceFacts {
        self.monitor.source().lock().facts()
    }
}

const EXACT: (IndexFreshness, Option<StaleReason>) = (IndexFreshness::Exact, None);
const STALE: (IndexFreshness, Option<StaleReason>) =
    (IndexFreshness::Stale, Some(StaleReason::LostBatches));
const INCOMPLETE: (IndexFreshness, Option<StaleReason>) = (
    IndexFreshness::Incomplete,
    Some(StaleReason::UnreportedBlocks),
);

#[test]
fn shared_prefix_survives_gap_and_lost_blocks_leave() {
    let mut stream = TestStream::new(ResyncMode::Keep);
    stream.store(None, &[1, 2]);
    for prompt in 10..20 {
        stream.store(Some(2), &[prompt]);
    }
    assert_eq!(stream.status(), EXACT);
    // Half of the prompts are evicted in lost batches. The cache has twenty blocks, and the system
    // prompt is hit all the time without being stored again.
    stream.lose(5);
    let mut live: std::collections::VecDeque<u64> = (15..20).collect();
    stream.store(Some(2), &[20]);
    assert_eq!(
        (stream.status(), stream.facts().stale_blocks),
        (STALE, 10),
        "the store confirms the prefix"
    );
    for prompt in 21..80 {
        stream.store(Some(2), &[prompt]);
        live.push_back(prompt);
        if live.len() > 16 {
            stream.remove(&[live.pop_front().unwrap()]);
        }
    }
    assert_eq!(stream.status(), EXACT, "{:?}", stream.facts());
    assert_eq!(
        (stream.holds(&[1, 2, 79]), stream.holds(&[1, 2, 12])),
        (3, 2),
        "the cached prompt is found, the evicted one is not"
    );
}

#[test]
fn initial_loss_is_incomplete_until_engine_restart() {
    for resync in [ResyncMode::Keep, ResyncMode::Clear] {
        let mut stream = TestStream::new(resync);
        stream.lose(5_000);
        stream.store(None, &[1]);
        assert_eq!(stream.status(), INCOMPLETE, "{resync:?}");
        stream.store(None, &[2]);
        assert_eq!(
            (stream.status(), stream.holds(&[1])),
            (INCOMPLETE, 1),
            "{resync:?}"
        );
        stream.next = 0;
        stream.store(None, &[3]);
        assert_eq!(stream.status(), EXACT, "{resync:?}");
        stream.lose(1);
        stream.store(None, &[4]);
        let (after, held) = if resync == ResyncMode::Keep {
            (STALE, 1)
        } else {
            (INCOMPLETE, 0)
        };
        assert_eq!(
            (stream.status(), stream.holds(&[3])),
            (after, held),
            "{resync:?}"
        );
    }
}

#[test]
fn new_block_size_clears_the_rank() {
    let mut stream = TestStream::new(ResyncMode::Keep);
    stream.store(None, &[1, 2]);
    stream.store_sized(None, &[7], 4);
    assert_eq!(
        (stream.holds(&[1, 2]), stream.holds(&[7, 7])),
        (0, 2),
        "one engine block of four tokens is two index blocks"
    );
    assert_eq!(stream.monitor.status().engine_block_size, BlockSize::new(4));
    assert_eq!(
        stream.status(),
        INCOMPLETE,
        "its first events were not received"
    );
    stream.store_sized(None, &[9], 3);
    assert_eq!(
        stream.status(),
        (IndexFreshness::Absent, Some(StaleReason::BlockSizeMismatch))
    );
    assert_eq!(stream.monitor.status().engine_block_size, BlockSize::new(3));
    assert_eq!(count(&stream.metrics, "filtered_block_size_mismatch"), 1);
    stream.store_sized(None, &[5], 2);
    assert_eq!(
        (stream.status(), stream.holds(&[5]), stream.holds(&[7, 7])),
        (INCOMPLETE, 1, 0)
    );
}

#[test]
fn unusable_blocks_of_slower_tier_are_incomplete() {
    let mut stream = TestStream::new(ResyncMode::Keep);
    stream.store(None, &[1, 2]);
    let slower = (
        "BlockStored",
        [7],
        None::<u64>,
        [7, 7, 7],
        3u32,
        None::<u64>,
        "CPU",
    );
    stream.send(&batch_of(slower));
    assert_eq!(
        (stream.status(), stream.holds(&[1, 2])),
        (INCOMPLETE, 2),
        "the device blocks are unchanged"
    );
    assert_eq!(count(&stream.metrics, "filtered_block_size_mismatch"), 1);
    stream.next = 0;
    stream.store(None, &[1]);
    assert_eq!(stream.status(), EXACT, "the engine restarted");
}

#[test]
fn unknown_parent_of_small_block_is_incomplete() {
    for unknown_in_use in [false, true] {
        let mut stream = TestStream::new(ResyncMode::Keep);
        stream.lose(5_000);
        for block in 0..10 {
            stream.store_sized(None, &[100 + block], 1);
            stream.store_sized(Some(100 + block), &[200 + block], 1);
        }
        assert_eq!((stream.status(), stream.holds(&[100])), (INCOMPLETE, 0));
        for block in 0..8 {
            stream.remove(&[200 + block]);
            stream.remove(&[100 + block]);
            if unknown_in_use {
                stream.store_sized(Some(7), &[8], 1);
            }
        }
        assert_eq!(
            stream.status(),
            if unknown_in_use { INCOMPLETE } else { EXACT }
        );
    }
}

#[test]
fn stores_dropped_at_capacity_make_source_inexact() {
    // Each case exceeds one limit: orphans, partial blocks (with the limit for tests), or bytes of
    // salts.
    let orphans: Vec<u64> = (1000..264_000).collect();
    let many: Vec<u64> = (1000..6000).collect();
    let salt = "s".repeat(60_000);
    let nil = None::<u64>;
    let none = None::<&str>;
    let slower = (
        "BlockStored",
        &orphans,
        Some(7u64),
        vec![1u64; 2 * orphans.len()],
        2u32,
        nil,
        "CPU",
    );
    let smaller = ("BlockStored", &many, nil, &many, 1u32);
    let salted = (
        "BlockStored",
        &many,
        nil,
        vec![1u64; 10_000],
        2u32,
        nil,
        none,
        none,
        vec![vec![&salt]],
    );
    let after = ("BlockStored", [1u64], Some(5999u64), [1u64, 1], 2u32);
    let cases = [
        batch_of(slower),
        batch_of(smaller),
        rmp_serde::to_vec(&(1.5, (salted, after), 0)).unwrap(),
    ];
    for (at, payload) in cases.iter().enumerate() {
        let mut stream = TestStream::new(ResyncMode::Keep);
        stream.send(payload);
        assert_eq!(stream.status(), INCOMPLETE, "{at}");
        stream.next = 0;
        stream.store(None, &[1]);
        assert_eq!(stream.status(), EXACT, "{at}: the engine restarted");
    }
}

#[test]
fn batches_of_another_rank_are_dropped_and_reported() {
    let mut stream = TestStream::new(ResyncMode::Keep);
    stream.store(None, &[1]);
    // Batches of another publisher, whose numbers are far ahead or restart at zero.
    for (block, number) in [(2, 500), (3, 501), (4, 0), (5, 1)] {
        stream.receive_other_rank_batch(number);
        let before = stream.facts();
        stream.store(None, &[block]);
        assert_eq!(
            stream.status(),
            (IndexFreshness::Absent, Some(StaleReason::OtherRank)),
            "{number}"
        );
        let facts = stream.facts();
        assert_eq!(
            (facts.restarts, facts.gaps, facts.lost_batches),
            (0, 0, 0),
            "{number}"
        );
        assert_eq!(
            facts.batches,
            before.batches + 1,
            "only batches of this rank count"
        );
    }
    assert_eq!(
        (stream.holds(&[1]), stream.holds(&[5]), stream.holds(&[7])),
        (1, 1, 0)
    );
    for block in 10..80 {
        stream.store(None, &[block]);
    }
    assert_eq!(stream.status(), EXACT, "the other rank stopped publishing");
}

/// Returns a store of one block in the map encoding, with further fields.
fn store_event(block: u64, fields: &serde_json::Value) -> serde_json::Value {
    let mut event = serde_json::json!({
        "type": "BlockStored", "block_hashes": [block], "token_ids": [block, block], "block_size": 2,
    });
    let further = fields.as_object().unwrap().clone();
    event.as_object_mut().unwrap().extend(further);
    event
}

fn pack(batch: &serde_json::Value) -> Vec<u8> {
    rmp_serde::to_vec(batch).unwrap()
}

#[test]
fn events_of_newer_engines_do_not_interrupt_the_stream() {
    let mut stream = TestStream::new(ResyncMode::Keep);
    let newer = serde_json::json!([
        1.5,
        [
            {"type": "BlockPinned", "block_hashes": [1]},
            store_event(1, &serde_json::json!({"checksum": [1, 2]})),
            ["BlockMoved", [1], "GPU"],
            ["BlockStored", [2], null, [2, 2], 2, null, "GPU", null, null, 0, "full_attention", null, null, null, "new"],
        ],
        0,
        {"epoch": 3},
    ]);
    stream.send(&pack(&newer));
    assert_eq!((stream.holds(&[1]), stream.holds(&[2])), (1, 1));
    assert_eq!(stream.status(), EXACT);
    stream.store(None, &[3]);
    let facts = stream.facts();
    assert_eq!(
        (facts.batches, facts.gaps, facts.undecodable, facts.restarts),
        (2, 0, 0, 0)
    );
    assert_eq!(stream.metrics.kv_events.unknown_fields.get(), 3);
    let unknown = EventLabels {
        kind: "unknown",
        outcome: "filtered_unknown_event",
    };
    assert_eq!(
        stream
            .metrics
            .kv_events
            .events
            .get_or_create(&unknown)
            .get(),
        2
    );
}

#[test]
fn unreadable_events_make_the_source_inexact() {
    let mut stream = TestStream::new(ResyncMode::Keep);
    let text_tokens = store_event(1, &serde_json::json!({"token_ids": [1, "image"]}));
    stream.send(&batch_of(text_tokens));
    assert_eq!(stream.status(), INCOMPLETE);
    let mut stream = TestStream::new(ResyncMode::Keep);
    stream.store(None, &[1]);
    stream.send(&batch_of(("BlockRemoved", ["sha"])));
    assert_eq!(stream.status(), STALE, "the removed block is unknown");
    stream.store(None, &[2]);
    assert_eq!((stream.facts().undecodable, stream.facts().gaps), (0, 0));
}

#[test]
fn blocks_of_unnamed_adapter_are_not_indexed() {
    let mut stream = TestStream::new(ResyncMode::Keep);
    let lora = |id| batch_of(store_event(1, &serde_json::json!({"lora_id": id})));
    stream.send(&lora(Some(3)));
    assert_eq!(stream.holds(&[1]), 0);
    assert_eq!(count(&stream.metrics, "filtered_unnamed_adapter"), 1);
    stream.send(&lora(None));
    assert_eq!(stream.holds(&[1]), 1);
}

#[test]
fn forged_batch_numbers_count_as_a_plausible_gap() {
    let mut stream = TestStream::new(ResyncMode::Keep);
    let mut before = 0;
    for number in [0, 5, 1 << 63, u64::MAX, 3, 2, 1 << 40, u64::MAX - 1] {
        stream.next = number;
        stream.send(&pack(&serde_json::json!([1.5, [], 0])));
        stream.monitor.reset();
        let lost = stream.facts().lost_batches;
        assert!(
            (before..=before + (1 << 20)).contains(&lost),
            "{number}: {before}, {lost}"
        );
        before = lost;
    }
    assert!(before > 1 << 20, "{before}");
}
