mod takeover;

use super::*;
use crate::block::hash::{Windows, locals};
use crate::block::{BlockHashes, Salt};
use crate::index::dump::RankDump;
use crate::index::{GroupNeed, PrefixIndex, RankWriter, Settled, SharedPosition};
use crate::trust::Resync;
use crate::trust::{Facts, Trust};
use crate::worker::{Attach, DpRank, EventSource, Slot, WorkerId};

/// Plays captured batches of a model with a sliding window into a rank with blocks of some size.
fn play(block_size: u32) -> (Arc<Metrics>, Vec<KvEvent>) {
    let session: serde_json::Value =
        serde_json::from_str(include_str!("../../../tests/data/hybrid.json")).unwrap();
    let hex = session["requests"][0]["payloads"][0].as_str().unwrap();
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    let payload: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
    let rank = WorkerRank {
        worker: WorkerId(1),
        rank: DpRank(0),
    };
    let spec = SourceSpec {
        engine: String::new(),
        rank,
        source: EventSource {
            endpoint: String::new(),
            topic: String::new(),
            attach: Attach::Connect,
            replay: None,
        },
        block_size: BlockSize::new(block_size).unwrap(),
        media: Default::default(),
        resync: Default::default(),
        max_message: 1 << 20,
    };
    let (told, metrics) = (
        Arc::new(parking_lot::Mutex::new(Vec::new())),
        Arc::new(Metrics::new()),
    );
    let mut writer = PrefixIndex::new().join(Slot(0));
    let heard = told.clone();
    let apply = move |event: &KvEvent| {
        heard.lock().push(event.clone());
        writer.apply(event)
    };
    let sink = RankSink {
        apply: Box::new(apply),
        doubt: Box::new(|| 0),
        settle: Box::new(Settled::default),
        position: Default::default(),
    };
    assert_eq!(
        Feed::new(&spec, sink, metrics.clone(), Witness::default()).live(0, &payload),
        None
    );
    let told = told.lock().clone();
    (metrics, told)
}

fn count(metrics: &Metrics, outcome: &'static str) -> u64 {
    metrics
        .kv_events
        .get_or_create(&EventLabels {
            kind: "stored",
            outcome,
        })
        .get()
}

#[test]
fn what_a_group_holds_is_told_and_still_counted_as_filtered() {
    let (metrics, told) = play(32);
    let [
        KvEvent::GroupStored {
            group: 0,
            need,
            blocks,
        },
        KvEvent::Stored { .. },
    ] = &told[..]
    else {
        panic!("{told:?}")
    };
    assert_eq!(
        (*need, blocks.len()),
        (
            GroupNeed::Last {
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
fn a_group_with_blocks_of_another_size_is_counted_by_that_reason() {
    let (metrics, told) = play(24);
    assert!(
        matches!(
            told[..],
            [KvEvent::GroupStored {
                need: GroupNeed::Unknown,
                ..
            }]
        ),
        "{told:?}"
    );
    assert_eq!(count(&metrics, "filtered_group_block_size_mismatch"), 1);
    assert_eq!(count(&metrics, "filtered_block_size_mismatch"), 1);
}

/// A feed into a real index.
struct Real {
    feed: Feed,
    index: Arc<PrefixIndex>,
    writer: Arc<parking_lot::Mutex<RankWriter>>,
    witness: Witness,
    metrics: Arc<Metrics>,
    /// The number of the next batch.
    next: u64,
}

impl Real {
    fn new(resync: Resync) -> Self {
        Self::begun(resync, None)
    }

    /// It goes on with what another one knows.
    fn begun(resync: Resync, from: Option<&RankDump>) -> Self {
        let shared = SharedResync::default();
        shared.set(resync);
        let spec = SourceSpec {
            engine: String::new(),
            rank: WorkerRank {
                worker: WorkerId(1),
                rank: DpRank(0),
            },
            source: EventSource {
                endpoint: String::new(),
                topic: String::new(),
                attach: Attach::Connect,
                replay: None,
            },
            block_size: BlockSize::new(2).unwrap(),
            media: Default::default(),
            resync: shared,
            max_message: 1 << 20,
        };
        let (index, witness, metrics) = (
            PrefixIndex::new(),
            Witness::default(),
            Arc::new(Metrics::new()),
        );
        let writer = Arc::new(parking_lot::Mutex::new(index.join(Slot(0))));
        let position = SharedPosition::default();
        if let Some(from) = from {
            position.restore(from, || writer.lock().restore(from));
        }
        let (applied, doubted, settled) = (writer.clone(), writer.clone(), writer.clone());
        let sink = RankSink {
            apply: Box::new(move |event| applied.lock().apply(event)),
            doubt: Box::new(move || doubted.lock().doubt()),
            settle: Box::new(move || settled.lock().settle()),
            position,
        };
        witness.note(|source| source.linked(crate::trust::Link::Attached));
        let feed = Feed::new(&spec, sink, metrics.clone(), witness.clone());
        let next = feed.expected();
        Self {
            feed,
            index,
            writer,
            witness,
            metrics,
            next,
        }
    }

    /// Sends a batch without a replay endpoint.
    fn send(&mut self, payload: &[u8]) {
        if let Some(gap) = self.feed.live(self.next, payload) {
            self.feed.settle(gap, payload);
        }
        self.next += 1;
    }

    fn lose(&mut self, batches: u64) {
        self.next += batches;
    }

    /// Stores blocks of two tokens each that bear the numbers of their tokens.
    fn store(&mut self, parent: Option<u64>, blocks: &[u64]) {
        let tokens: Vec<u64> = blocks.iter().flat_map(|block| [*block, *block]).collect();
        self.send(
            &rmp_serde::to_vec(&(1.5, [("BlockStored", blocks, parent, tokens, 2u32)], 0)).unwrap(),
        );
    }

    /// The same for another size of the engine's blocks.
    fn store_sized(&mut self, blocks: &[u64], size: u32) {
        let tokens: Vec<u64> = blocks
            .iter()
            .flat_map(|block| vec![*block; size as usize])
            .collect();
        self.send(
            &rmp_serde::to_vec(&(1.5, [("BlockStored", blocks, None::<u64>, tokens, size)], 0))
                .unwrap(),
        );
    }

    /// A block of one token, half of one of ours.
    fn store_half(&mut self, parent: Option<u64>, block: u64) {
        self.send(
            &rmp_serde::to_vec(&(1.5, [("BlockStored", [block], parent, [block], 1u32)], 0))
                .unwrap(),
        );
    }

    fn remove(&mut self, blocks: &[u64]) {
        self.send(&rmp_serde::to_vec(&(1.5, [("BlockRemoved", blocks)], 0)).unwrap());
    }

    /// A batch of another rank, under a number of that one's.
    fn foreign(&mut self, number: u64) {
        let payload = rmp_serde::to_vec(&(
            1.5,
            [("BlockStored", [77u64], None::<u64>, [7u64, 7], 2u32)],
            1,
        ))
        .unwrap();
        assert_eq!(self.feed.live(number, &payload), None);
        assert_eq!(self.feed.repeated(number, &payload), Repeated::Known);
    }

    /// Leading blocks of a prompt.
    fn holds(&self, blocks: &[u32]) -> usize {
        let tokens: Vec<u32> = blocks.iter().flat_map(|block| [*block, *block]).collect();
        let size = BlockSize::new(2).unwrap();
        let hashes = BlockHashes::chain(
            tokens.len(),
            size,
            locals(&tokens, size, &Salt::default(), Windows::Plain, &[]),
        );
        self.index
            .watch(&hashes, Slot(0))
            .map_or(0, |watch| watch.most_held())
    }

    fn stands(&self) -> (Trust, Option<Because>) {
        let standing = self.witness.standing();
        (standing.trust, standing.because)
    }

    fn facts(&self) -> Facts {
        self.witness.source().lock().facts()
    }
}

const EXACT: (Trust, Option<Because>) = (Trust::Exact, None);
const STALE: (Trust, Option<Because>) = (Trust::Stale, Some(Because::LostBatches));
const INCOMPLETE: (Trust, Option<Because>) = (Trust::Incomplete, Some(Because::UntoldBlocks));

#[test]
fn after_a_gap_the_prefix_that_everybody_uses_stays_and_what_it_lost_goes() {
    let mut real = Real::new(Resync::Keep);
    real.store(None, &[1, 2]);
    for prompt in 10..20 {
        real.store(Some(2), &[prompt]);
    }
    assert_eq!(real.stands(), EXACT);
    // Half of the prompts leave in batches that are lost. A cache of twenty blocks; the system prompt is hit all the time
    // and never told again.
    real.lose(5);
    let mut live: std::collections::VecDeque<u64> = (15..20).collect();
    real.store(Some(2), &[20]);
    assert_eq!(
        (real.stands(), real.facts().doubted_blocks),
        (STALE, 10),
        "the prefix is confirmed at once"
    );
    for prompt in 21..80 {
        real.store(Some(2), &[prompt]);
        live.push_back(prompt);
        if live.len() > 16 {
            real.remove(&[live.pop_front().unwrap()]);
        }
    }
    assert_eq!(real.stands(), EXACT, "{:?}", real.facts());
    assert_eq!(
        (real.holds(&[1, 2, 79]), real.holds(&[1, 2, 12])),
        (3, 2),
        "one is in use, one is gone"
    );
}

#[test]
fn what_was_lost_before_anything_was_held_is_known_to_be_missing_until_the_engine_begins_anew() {
    for resync in [Resync::Keep, Resync::Clear] {
        let mut real = Real::new(resync);
        real.lose(5_000);
        real.store(None, &[1]);
        assert_eq!(real.stands(), INCOMPLETE, "{resync:?}");
        real.store(None, &[2]);
        assert_eq!(
            (real.stands(), real.holds(&[1])),
            (INCOMPLETE, 1),
            "{resync:?}"
        );
        real.next = 0;
        real.store(None, &[3]);
        assert_eq!(real.stands(), EXACT, "{resync:?}");
        real.lose(1);
        real.store(None, &[4]);
        let (after, held) = if resync == Resync::Keep {
            (STALE, 1)
        } else {
            (INCOMPLETE, 0)
        };
        assert_eq!(
            (real.stands(), real.holds(&[3])),
            (after, held),
            "{resync:?}"
        );
    }
}

#[test]
fn blocks_of_another_size_are_another_cache() {
    let mut real = Real::new(Resync::Keep);
    real.store(None, &[1, 2]);
    real.store_sized(&[7], 4);
    assert_eq!(
        (real.holds(&[1, 2]), real.holds(&[7, 7])),
        (0, 2),
        "one of four tokens is two of ours"
    );
    assert_eq!(real.witness.standing().engine_block_size, BlockSize::new(4));
    assert_eq!(real.stands(), INCOMPLETE, "how it began was not heard");
    real.store_sized(&[9], 3);
    assert_eq!(
        real.stands(),
        (Trust::Absent, Some(Because::BlockSizeMismatch))
    );
    assert_eq!(real.witness.standing().engine_block_size, BlockSize::new(3));
    assert_eq!(count(&real.metrics, "filtered_block_size_mismatch"), 1);
    real.store_sized(&[5], 2);
    assert_eq!(
        (real.stands(), real.holds(&[5]), real.holds(&[7, 7])),
        (INCOMPLETE, 1, 0)
    );
}

#[test]
fn what_a_slower_tier_has_in_blocks_that_cannot_be_used_is_missing() {
    let mut real = Real::new(Resync::Keep);
    real.store(None, &[1, 2]);
    let slower = (
        "BlockStored",
        [7],
        None::<u64>,
        [7, 7, 7],
        3u32,
        None::<u64>,
        "CPU",
    );
    real.send(&rmp_serde::to_vec(&(1.5, [slower], 0)).unwrap());
    assert_eq!(
        (real.stands(), real.holds(&[1, 2])),
        (INCOMPLETE, 2),
        "the device is as it was"
    );
    assert_eq!(count(&real.metrics, "filtered_block_size_mismatch"), 1);
    real.next = 0;
    real.store(None, &[1]);
    assert_eq!(real.stands(), EXACT, "a new engine");
}

#[test]
fn with_smaller_blocks_too_what_follows_an_unknown_one_shows_that_more_was_never_told() {
    for unknown_in_use in [false, true] {
        let mut real = Real::new(Resync::Keep);
        real.lose(5_000);
        for block in 0..10 {
            real.store_half(None, 100 + block);
            real.store_half(Some(100 + block), 200 + block);
        }
        assert_eq!((real.stands(), real.holds(&[100])), (INCOMPLETE, 0));
        for block in 0..8 {
            real.remove(&[200 + block]);
            real.remove(&[100 + block]);
            if unknown_in_use {
                real.store_half(Some(7), 8);
            }
        }
        assert_eq!(
            real.stands(),
            if unknown_in_use { INCOMPLETE } else { EXACT }
        );
    }
}

#[test]
fn a_source_whose_stores_are_lost_for_want_of_memory_is_not_exact() {
    // More than each memory takes in a test.
    let many: Vec<u64> = (1000..6000).collect();
    let (nil, none) = (None::<u64>, None::<&str>);
    let slower = (
        "BlockStored",
        &many,
        Some(7u64),
        vec![1u64; 10_000],
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
        vec![vec!["tenant"]],
    );
    let after = ("BlockStored", [1u64], Some(5999u64), [1u64, 1], 2u32);
    let cases = [
        rmp_serde::to_vec(&(1.5, [slower], 0)).unwrap(),
        rmp_serde::to_vec(&(1.5, [smaller], 0)).unwrap(),
        rmp_serde::to_vec(&(1.5, (salted, after), 0)).unwrap(),
    ];
    for (at, payload) in cases.iter().enumerate() {
        let mut real = Real::new(Resync::Keep);
        real.send(payload);
        assert_eq!(real.stands(), INCOMPLETE, "{at}");
        real.next = 0;
        real.store(None, &[1]);
        assert_eq!(real.stands(), EXACT, "{at}: a new engine");
    }
}

#[test]
fn batches_of_another_rank_neither_count_nor_hide_that_they_come() {
    let mut real = Real::new(Resync::Keep);
    real.store(None, &[1]);
    // Another publisher, whose numbers are far ahead of ours, or begin anew.
    for (block, number) in [(2, 500), (3, 501), (4, 0), (5, 1)] {
        real.foreign(number);
        let before = real.facts();
        real.store(None, &[block]);
        assert_eq!(
            real.stands(),
            (Trust::Absent, Some(Because::OtherRank)),
            "{number}"
        );
        let facts = real.facts();
        assert_eq!(
            (facts.restarts, facts.gaps, facts.lost_batches),
            (0, 0, 0),
            "{number}"
        );
        assert_eq!(facts.batches, before.batches + 1, "only its own are heard");
    }
    assert_eq!(
        (real.holds(&[1]), real.holds(&[5]), real.holds(&[7])),
        (1, 1, 0)
    );
    for block in 10..80 {
        real.store(None, &[block]);
    }
    assert_eq!(real.stands(), EXACT, "it has gone");
}
