mod cache_groups;
mod limits;
mod model;
mod properties;
mod staleness;
mod stress;
mod watch;

use std::sync::Arc;

use super::*;
use crate::block::{BlockHashes, EngineHash, LocalHash, StorageTier};
use crate::worker::{BlockSize, RankSlot};

fn prompt(locals: &[LocalHash]) -> BlockHashes {
    BlockHashes::from_locals(
        locals.len() * 16,
        BlockSize::new(16).unwrap(),
        locals.to_vec(),
    )
}

fn stored(parent: Option<u64>, blocks: &[(u64, u64)], tier: StorageTier) -> KvEvent {
    let blocks = blocks.iter().map(|&(local, engine)| StoredBlock {
        engine: EngineHash(engine),
        local: LocalHash(local),
    });
    KvEvent::Stored {
        parent: parent.map(EngineHash),
        blocks: blocks.collect(),
        tier,
    }
}

fn removed(blocks: &[u64]) -> KvEvent {
    KvEvent::Removed {
        blocks: blocks.iter().copied().map(EngineHash).collect(),
        tier: StorageTier::Device,
    }
}

fn device(index: &PrefixIndex, slot: RankSlot, locals: &[u64]) -> u32 {
    let mut overlaps = Overlaps::new();
    index.query_overlaps(
        &prompt(&locals.iter().copied().map(LocalHash).collect::<Vec<_>>()),
        &mut overlaps,
    );
    overlaps.get(slot).device
}

#[test]
fn replaced_writer_is_no_longer_reported() {
    let index = PrefixIndex::new();
    let mut before = index.create_writer(RankSlot(0));
    before.apply(&stored(None, &[(1, 100), (2, 200)], StorageTier::Device));
    let mut after = index.create_writer(RankSlot(0));
    assert_eq!(device(&index, RankSlot(0), &[1, 2]), 0);
    after.apply(&stored(None, &[(1, 900)], StorageTier::Device));
    before.apply(&stored(Some(200), &[(3, 300)], StorageTier::Device));
    before.apply(&KvEvent::Cleared);
    before.apply(&stored(None, &[(1, 100), (2, 200)], StorageTier::Device));
    assert_eq!(device(&index, RankSlot(0), &[1, 2]), 1);
    drop(before);
    assert_eq!(device(&index, RankSlot(0), &[1, 2]), 1);
    assert_eq!(index.stats().total.device, 1);
}

#[test]
fn truncated_run_returns_memory() {
    let cases: [(&str, Vec<Vec<u64>>); 3] = [
        (
            "one by one from the end",
            (2..=1000).rev().map(|block| vec![block]).collect(),
        ),
        ("at once", vec![(2..=1000).collect()]),
        (
            "from the middle, then the end",
            vec![(2..=600).collect(), (601..=1000).collect()],
        ),
    ];
    for (case, removals) in cases {
        let index = PrefixIndex::new();
        let mut writer = index.create_writer(RankSlot(0));
        let blocks: Vec<_> = (1..=1000).map(|block| (block, block)).collect();
        writer.apply(&stored(None, &blocks, StorageTier::Device));
        for blocks in removals {
            assert_eq!(writer.apply(&removed(&blocks)), ApplyOutcome::Ok);
        }
        assert_eq!(device(&index, RankSlot(0), &[1, 2]), 1, "{case}");
        let room: usize = index
            .shards
            .iter()
            .map(|shard| trie::tests::room(&shard.read()))
            .sum();
        assert!(room <= 3 * arena::CHUNK, "{case}: {room}");
    }
}

fn found(index: &PrefixIndex, locals: &[u64]) -> TierBlocks {
    let mut overlaps = Overlaps::new();
    index.query_overlaps(
        &prompt(&locals.iter().copied().map(LocalHash).collect::<Vec<_>>()),
        &mut overlaps,
    );
    overlaps.get(RankSlot(0))
}

#[test]
fn orphans_are_bounded_and_located_together() {
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(0));
    let mut waiting = 0;
    // Children of one parent, and a chain.
    let outcome = loop {
        let parent = if waiting % 2 == 0 { 1 } else { 1 + waiting };
        let outcome = writer.apply(&stored(
            Some(parent),
            &[(2 + waiting, 2 + waiting)],
            StorageTier::HostPinned,
        ));
        if outcome != ApplyOutcome::ParentAwaited {
            break outcome;
        }
        waiting += 1;
    };
    assert_eq!(outcome, ApplyOutcome::TooManyWaiting);
    let counts = |index: &PrefixIndex| index.stats().slots[0].counts;
    assert_eq!(
        (counts(&index).waiting, counts(&index).host),
        (waiting, waiting)
    );
    writer.apply(&KvEvent::Removed {
        blocks: vec![EngineHash(2)],
        tier: StorageTier::HostPinned,
    });
    assert_eq!(counts(&index).waiting, waiting - 1);
    writer.apply(&stored(None, &[(1, 1)], StorageTier::Device));
    // The block after the removed one has no parent any more.
    assert_eq!(
        (counts(&index).waiting, counts(&index).host),
        (1, waiting - 1)
    );
    assert_eq!(
        found(&index, &[1, 4, 5]),
        TierBlocks {
            device: 1,
            host: 2,
            ..TierBlocks::default()
        }
    );
}

#[test]
fn full_index_reports_it_and_keeps_blocks() {
    let index = PrefixIndex::new();
    index
        .shards
        .iter()
        .for_each(|shard| trie::tests::limit_chunks(&mut shard.write(), 2));
    let mut writers = [
        index.create_writer(RankSlot(0)),
        index.create_writer(RankSlot(1)),
    ];
    let blocks = |from: u64| {
        (from..from + 100)
            .map(|block| (block, block))
            .collect::<Vec<_>>()
    };
    let parent = |from: u64| (from > 0).then(|| from - 1);
    for from in [0, 100] {
        assert_eq!(
            writers[0].apply(&stored(parent(from), &blocks(from), StorageTier::Device)),
            ApplyOutcome::Ok
        );
    }
    assert_eq!(
        writers[0].apply(&stored(parent(200), &blocks(200), StorageTier::Device)),
        ApplyOutcome::IndexFull
    );
    let counts = index.stats().total;
    assert_eq!((counts.device, counts.copies), (256, 256));
    assert_eq!(
        device(&index, RankSlot(0), &(0..300).collect::<Vec<_>>()),
        256
    );
    assert_eq!(
        writers[0].apply(&stored(parent(256), &[(256, 256)], StorageTier::Device)),
        ApplyOutcome::IndexFull
    );
    // A known hash uses the other code path of the writer.
    assert_eq!(
        writers[0].apply(&stored(
            parent(255),
            &[(255, 255), (256, 256)],
            StorageTier::Device
        )),
        ApplyOutcome::IndexFull
    );
    // Blocks that other ranks hold need no memory.
    assert_eq!(
        writers[1].apply(&stored(None, &blocks(0), StorageTier::Device)),
        ApplyOutcome::Ok
    );
    // The last one has two copies.
    let all = (100..256).rev().chain([255]).collect::<Vec<_>>();
    assert_eq!(writers[0].apply(&removed(&all)), ApplyOutcome::Ok);
    assert_eq!(
        writers[0].apply(&stored(parent(100), &[(700, 700)], StorageTier::Device)),
        ApplyOutcome::Ok
    );
    index
        .shards
        .iter()
        .for_each(|shard| trie::tests::check(&shard.read()));
}

#[test]
fn many_ranks_are_found_like_few() {
    let index = PrefixIndex::new();
    let query: Vec<LocalHash> = (0..16).map(LocalHash).collect();
    let blocks = |range: std::ops::Range<u32>| {
        range
            .map(|at| (u64::from(at), u64::from(at)))
            .collect::<Vec<_>>()
    };
    let mut writers = Vec::new();
    let mut expected = Vec::new();
    for slot in 0..300 {
        let mut writer = index.create_writer(RankSlot(slot));
        let blocks_of_slot = varied_blocks(slot);
        let TierBlocks { device, host, .. } = blocks_of_slot;
        let parent = device.checked_sub(1).map(u64::from);
        writer.apply(&stored(None, &blocks(0..device), StorageTier::Device));
        writer.apply(&stored(
            parent,
            &blocks(device..device + host),
            StorageTier::HostPinned,
        ));
        writers.push(Some(writer));
        expected.push(blocks_of_slot);
    }
    let mut overlaps = Overlaps::new();
    for round in 0..3 {
        index.query_overlaps(&prompt(&query), &mut overlaps);
        let found: Vec<_> = (0..300).map(|slot| overlaps.get(RankSlot(slot))).collect();
        assert_eq!(found, expected, "round {round}");
        let mut listed: Vec<_> = overlaps.iter().collect();
        listed.sort_unstable_by_key(|(slot, _)| slot.0);
        let some = (0..)
            .map(RankSlot)
            .zip(expected.iter().copied())
            .filter(|(_, blocks)| blocks.total() > 0);
        assert_eq!(listed, some.collect::<Vec<_>>());
        query_shorter_prompts(&index, &query, &mut overlaps, &expected);
        // A writer that was dropped is not found any more.
        writers[3 + round] = None;
        expected[3 + round] = TierBlocks::default();
    }
    index
        .shards
        .iter()
        .for_each(|shard| trie::tests::check(&shard.read()));
}

/// Returns the cached blocks of a rank. Most ranks hold a few lengths on the device only. Some
/// continue in host memory, and some begin there.
fn varied_blocks(slot: u32) -> TierBlocks {
    let (device, host) = match slot % 17 {
        0 => (0, slot % 5),
        1 => (slot % 7, slot % 3),
        2 => (0, 0),
        _ => (1 + slot / 64 % 3 * 4, 0),
    };
    TierBlocks {
        device,
        host,
        ..TierBlocks::default()
    }
}

/// Checks a shorter query, a raised result and an empty one. They do not affect later queries.
fn query_shorter_prompts(
    index: &PrefixIndex,
    query: &[LocalHash],
    overlaps: &mut Overlaps,
    expected: &[TierBlocks],
) {
    index.query_overlaps(&prompt(&query[..2]), overlaps);
    let found: Vec<_> = (0..300).map(|slot| overlaps.get(RankSlot(slot))).collect();
    assert_eq!(
        found,
        expected
            .iter()
            .map(|blocks| blocks.limit_to(2))
            .collect::<Vec<_>>()
    );
    let other = overlaps.clone();
    index.query_overlaps(&prompt(&[LocalHash(99)]), overlaps);
    assert_eq!(overlaps.iter().count(), 0);
    overlaps.raise(&other);
    assert!(
        overlaps
            .iter()
            .all(|(slot, blocks)| blocks.device == expected[slot.index()].device.min(2))
    );
    assert_eq!(
        overlaps.iter().count(),
        expected.iter().filter(|blocks| blocks.device > 0).count()
    );
}
