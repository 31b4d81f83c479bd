//! Staleness after lost events, through the public interface of the index.

use super::*;

/// Creates a rank that holds a prefix of two blocks and eight other prompts of one block.
fn writer_with_blocks(index: &Arc<PrefixIndex>) -> RankWriter {
    let mut writer = index.create_writer(RankSlot(0));
    writer.apply(&stored(None, &[(1, 100), (2, 200)], StorageTier::Device));
    for other in 10..18 {
        writer.apply(&stored(None, &[(other, other * 100)], StorageTier::Device));
    }
    assert_eq!(writer.record_gap(), 1);
    assert_eq!(index.stale_block_count(RankSlot(0)), Some(10));
    writer
}

fn hashes(locals: &[u64]) -> BlockHashes {
    prompt(&locals.iter().copied().map(LocalHash).collect::<Vec<_>>())
}

#[test]
fn stored_child_confirms_all_ancestors() {
    let index = PrefixIndex::new();
    let mut writer = writer_with_blocks(&index);
    writer.apply(&stored(Some(200), &[(3, 300)], StorageTier::HostPinned));
    assert_eq!(
        index.stale_block_count(RankSlot(0)),
        Some(10),
        "a slower tier is no evidence for the device"
    );
    writer.apply(&stored(Some(200), &[(4, 400)], StorageTier::Device));
    assert_eq!(index.stale_block_count(RankSlot(0)), Some(8));
    writer.apply(&stored(None, &[(10, 1000)], StorageTier::Device));
    assert_eq!(index.stale_block_count(RankSlot(0)), Some(7));
    writer.apply(&removed(&[1100, 1200, 1300]));
    assert_eq!(index.stale_block_count(RankSlot(0)), Some(4));
}

#[test]
fn reported_hit_confirms_unless_sent_before_gap() {
    let index = PrefixIndex::new();
    let mut writer = writer_with_blocks(&index);
    let sent = index.event_cursor(RankSlot(0)).unwrap();
    index.confirm_cached(&hashes(&[1, 2, 3]), 1, RankSlot(0), sent);
    assert_eq!(index.stale_block_count(RankSlot(0)), Some(9));
    index.confirm_cached(&hashes(&[1, 2, 3]), 3, RankSlot(0), sent);
    assert_eq!(index.stale_block_count(RankSlot(0)), Some(8));
    writer.record_gap();
    index.confirm_cached(&hashes(&[1, 2]), 2, RankSlot(0), sent);
    assert_eq!(index.stale_block_count(RankSlot(0)), Some(10));
}

#[test]
fn used_prefix_survives_gaps_and_unused_is_purged() {
    let index = PrefixIndex::new();
    let mut writer = writer_with_blocks(&index);
    // A cache of twelve blocks, whose source loses events all the time, including removals.
    let mut live: std::collections::VecDeque<u64> = Default::default();
    for tail in 1000..1060 {
        writer.apply(&stored(Some(200), &[(tail, tail)], StorageTier::Device));
        live.push_back(tail);
        if live.len() > 10 {
            writer.apply(&removed(&[live.pop_front().unwrap()]));
        }
        writer.record_gap();
        let due = writer.is_purge_due();
        let forgotten = writer.reconcile().purged;
        assert_eq!(due, forgotten.is_some());
        if let Some(forgotten) = forgotten {
            assert!(
                forgotten
                    .blocks
                    .iter()
                    .all(|(name, tier)| name.0 >= 1000 && *tier == StorageTier::Device)
            );
        }
    }
    assert_eq!(device(&index, RankSlot(0), &[1, 2, 1059]), 3);
    assert_eq!(
        device(&index, RankSlot(0), &[12]),
        0,
        "it was not confirmed during several cache turnovers"
    );
    writer.apply(&removed(&live.drain(..9).collect::<Vec<_>>()));
    writer.apply(&stored(Some(200), &[(5, 500)], StorageTier::Device));
    assert_eq!((writer.reconcile().stale_blocks, live), (1, [1059].into()));
}

#[test]
fn gap_cost_is_independent_of_held_blocks() {
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(0));
    let blocks: Vec<(u64, u64)> = (1..50_000).map(|block| (block, block)).collect();
    writer.apply(&stored(None, &blocks, StorageTier::Device));
    // This would take minutes if each gap scanned all blocks.
    for gap in 1..=100_000 {
        assert_eq!(writer.record_gap(), gap);
        assert_eq!(writer.reconcile().stale_blocks, 49_999);
    }
}

#[test]
fn unreported_blocks_end_when_old_cache_is_evicted() {
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(0));
    assert!(!writer.reconcile().has_unreported);
    writer.record_gap();
    for block in 1..=4 {
        writer.apply(&stored(None, &[(block, block)], StorageTier::Device));
    }
    assert_eq!(
        writer.reconcile(),
        ReconcileReport {
            has_unreported: true,
            ..ReconcileReport::default()
        },
        "no block is stale"
    );
    writer.apply(&removed(&[1, 2]));
    assert_eq!(
        writer.apply(&stored(Some(77), &[(5, 5)], StorageTier::Device)),
        ApplyOutcome::ParentNotFound
    );
    assert!(
        writer.reconcile().has_unreported,
        "a block after an unknown one shows that it is in use"
    );
    writer.apply(&removed(&[3]));
    assert!(!writer.reconcile().has_unreported);
    writer.record_gap();
    writer.apply(&KvEvent::Cleared);
    assert_eq!(writer.reconcile(), ReconcileReport::default());
}

#[test]
fn reinsertion_since_cursor_is_reported() {
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(0));
    writer.apply(&stored(None, &[(1, 100), (2, 200)], StorageTier::Device));
    let sent = index.event_cursor(RankSlot(0)).unwrap();
    let was_reinserted =
        |blocks| index.was_reinserted_since(&hashes(&[1, 2, 3]), blocks, RankSlot(0), sent);
    // Stored again without a removal: it was held all the time.
    writer.apply(&stored(
        None,
        &[(1, 100), (2, 200), (3, 300)],
        StorageTier::Device,
    ));
    assert_eq!(was_reinserted(3), Some(false), "and the third is new");
    writer.apply(&removed(&[200, 200, 300]));
    writer.apply(&stored(
        Some(100),
        &[(2, 200), (3, 300)],
        StorageTier::Device,
    ));
    assert_eq!(
        (was_reinserted(1), was_reinserted(2)),
        (Some(false), Some(true))
    );
    // Stores and evictions of other blocks do not matter until the filter has dropped this one.
    let sent = index.event_cursor(RankSlot(0)).unwrap();
    let was_reinserted =
        |blocks| index.was_reinserted_since(&hashes(&[1, 2, 3]), blocks, RankSlot(0), sent);
    for block in 1000..8000 {
        assert_eq!(was_reinserted(3), Some(false), "{block}");
        writer.apply(&stored(None, &[(block, block)], StorageTier::Device));
        if block < 2000 {
            writer.apply(&removed(&[block]));
        }
    }
    for block in 2000..6000 {
        writer.apply(&removed(&[block]));
    }
    assert_eq!(was_reinserted(3), None);
    let sent = index.event_cursor(RankSlot(0)).unwrap();
    writer.apply(&KvEvent::Cleared);
    writer.apply(&stored(None, &[(1, 100)], StorageTier::Device));
    assert_eq!(
        index.was_reinserted_since(&hashes(&[1]), 1, RankSlot(0), sent),
        Some(true),
        "the whole cache was cleared"
    );
}

#[test]
fn each_tier_purges_by_its_own_evictions() {
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(0));
    for block in 1..=20 {
        writer.apply(&stored(None, &[(block, block)], StorageTier::Device));
        writer.apply(&stored(None, &[(block, block)], StorageTier::HostPinned));
    }
    writer.record_gap();
    // The host evicts each stored block at once, and the device evicts nothing.
    let lower = |block| KvEvent::Removed {
        blocks: vec![EngineHash(block)],
        tier: StorageTier::HostPinned,
    };
    for block in 100..140 {
        writer.apply(&stored(None, &[(block, block)], StorageTier::Device));
        writer.apply(&stored(None, &[(block, block)], StorageTier::HostPinned));
        writer.apply(&lower(block));
        let report = writer.reconcile();
        assert!(report.has_unreported, "the device still holds its blocks");
        let purged_hashes = report
            .purged
            .map(|forgotten| forgotten.blocks)
            .unwrap_or_default();
        assert!(
            purged_hashes
                .iter()
                .all(|(_, tier)| *tier == StorageTier::HostPinned),
            "{purged_hashes:?}"
        );
    }
    let counts = index.stats().total;
    assert_eq!(
        (
            counts.device,
            counts.host,
            index.stale_block_count(RankSlot(0))
        ),
        (60, 0, Some(20))
    );
    // The opposite case: host blocks are stale, and device blocks are confirmed.
    for block in 1..=20 {
        writer.apply(&stored(None, &[(block, block)], StorageTier::HostPinned));
    }
    writer.record_gap();
    for block in (1..=20).chain(100..140) {
        writer.apply(&stored(None, &[(block, block)], StorageTier::Device));
    }
    assert_eq!(
        writer.reconcile().stale_blocks,
        0,
        "no device block is stale"
    );
    for block in 200..500 {
        writer.apply(&stored(None, &[(block, block)], StorageTier::Device));
        writer.apply(&removed(&[block]));
        assert_eq!(writer.reconcile().purged, None);
    }
    assert_eq!(index.stats().total.host, 20);
}

#[test]
fn overlap_uses_fastest_tier_of_each_block() {
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(0));
    writer.apply(&stored(None, &[(1, 1), (2, 2)], StorageTier::Device));
    writer.apply(&stored(
        None,
        &[(1, 1), (2, 2), (3, 3), (4, 4)],
        StorageTier::HostPinned,
    ));
    writer.record_gap();
    let sent = index.event_cursor(RankSlot(0)).unwrap();
    index.confirm_cached(&hashes(&[1, 2, 3]), 3, RankSlot(0), sent);
    assert_eq!(index.stale_block_count(RankSlot(0)), Some(0));
    // Three of four host blocks are unconfirmed.
    for block in 10..13 {
        writer.apply(&stored(None, &[(block, block)], StorageTier::HostPinned));
        writer.apply(&KvEvent::Removed {
            blocks: vec![EngineHash(block)],
            tier: StorageTier::HostPinned,
        });
    }
    let mut purged_hashes = writer.reconcile().purged.unwrap().blocks;
    purged_hashes.sort_unstable();
    assert_eq!(
        purged_hashes,
        [1, 2, 4].map(|name| (EngineHash(name), StorageTier::HostPinned))
    );
}

/// Returns an event of a group with a window of one block.
fn window(blocks: &[u64], is_held: bool) -> KvEvent {
    let need = GroupNeed::Trailing {
        blocks: 1,
        stride: std::num::NonZeroU32::MIN,
    };
    let blocks = blocks.iter().copied().map(EngineHash).collect();
    if is_held {
        KvEvent::GroupStored {
            group: 1,
            need,
            blocks,
        }
    } else {
        KvEvent::GroupRemoved { group: 1, blocks }
    }
}

#[test]
fn lost_group_share_is_stale_then_purged() {
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(0));
    for block in 1..=10 {
        writer.apply(&stored(None, &[(block, block)], StorageTier::Device));
        writer.apply(&window(&[block], true));
    }
    let held = |block| device(&index, RankSlot(0), &[block, 99]);
    writer.record_gap();
    for block in 1..=10 {
        writer.apply(&stored(None, &[(block, block)], StorageTier::Device));
    }
    assert_eq!(
        (writer.reconcile().stale_blocks, held(1)),
        (10, 1),
        "shares stay stale after blocks are confirmed"
    );
    writer.apply(&window(&[2], true));
    let sent = index.event_cursor(RankSlot(0)).unwrap();
    index.confirm_cached(&hashes(&[3]), 1, RankSlot(0), sent);
    assert_eq!(
        writer.reconcile().stale_blocks,
        8,
        "one was stored, one was found"
    );
    for block in 100..108 {
        writer.apply(&stored(None, &[(block, block)], StorageTier::Device));
        writer.apply(&window(&[block], true));
        writer.apply(&window(&[block], false));
        writer.reconcile();
    }
    assert_eq!([1, 2, 3, 4].map(held), [0, 1, 1, 0]);
    assert_eq!(
        (writer.reconcile().stale_blocks, index.stats().total.device),
        (0, 18)
    );
}

#[test]
fn restored_hash_inherits_no_old_share() {
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(0));
    writer.apply(&stored(None, &[(1, 1)], StorageTier::Device));
    writer.apply(&window(&[1], true));
    writer.apply(&stored(None, &[(9, 9)], StorageTier::Device));
    writer.record_gap();
    // Its share was evicted in the gap.
    writer.apply(&removed(&[1]));
    for block in 10..40 {
        writer.apply(&stored(None, &[(block, block)], StorageTier::Device));
        writer.apply(&window(&[block], true));
        writer.record_gap();
        writer.apply(&stored(None, &[(block, block)], StorageTier::Device));
        writer.apply(&window(&[block], false));
        writer.apply(&removed(&[block]));
        writer.reconcile();
    }
    writer.apply(&stored(None, &[(1, 1)], StorageTier::Device));
    assert_eq!(device(&index, RankSlot(0), &[1, 99]), 0);
}
