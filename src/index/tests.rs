mod model;
mod properties;
mod stress;

use super::*;
use crate::block::{EngineHash, LocalHash};
use crate::tier::Tier;
use crate::worker::BlockSize;

fn prompt(locals: &[LocalHash]) -> BlockHashes {
    BlockHashes::chain(locals.len() * 16, BlockSize::new(16).unwrap(), locals.to_vec())
}

fn stored(parent: Option<u64>, blocks: &[(u64, u64)], tier: Tier) -> KvEvent {
    let blocks =
        blocks.iter().map(|&(local, engine)| StoredBlock { engine: EngineHash(engine), local: LocalHash(local) });
    KvEvent::Stored { parent: parent.map(EngineHash), blocks: blocks.collect(), tier }
}

fn removed(blocks: &[u64]) -> KvEvent {
    KvEvent::Removed { blocks: blocks.iter().copied().map(EngineHash).collect(), tier: Tier::Device }
}

fn device(index: &PrefixIndex, slot: Slot, locals: &[u64]) -> u32 {
    let mut overlaps = Overlaps::new();
    index.overlaps(&prompt(&locals.iter().copied().map(LocalHash).collect::<Vec<_>>()), &mut overlaps);
    overlaps.get(slot).device
}

#[test]
fn a_block_stored_three_times_leaves_at_the_third_removal() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    let event = stored(None, &[(1, 100)], Tier::Device);
    assert_eq!(writer.apply(&event), Outcome::Ok);
    assert_eq!(writer.apply(&event), Outcome::DuplicateStore);
    assert_eq!(writer.apply(&event), Outcome::DuplicateStore);
    for (left, outcome) in [(1, Outcome::Ok), (1, Outcome::Ok), (0, Outcome::Ok), (0, Outcome::BlockNotFound)] {
        assert_eq!(writer.apply(&removed(&[100])), outcome);
        assert_eq!(device(&index, Slot(0), &[1]), left);
    }
}

#[test]
fn two_names_of_one_content_hold_it_together() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    writer.apply(&stored(None, &[(1, 100), (2, 200)], Tier::Device));
    writer.apply(&stored(None, &[(1, 101), (2, 201)], Tier::Device));
    assert_eq!(index.stats().total, BlockCounts { device: 2, copies: 4, ..BlockCounts::default() });
    writer.apply(&removed(&[200, 100]));
    assert_eq!(device(&index, Slot(0), &[1, 2]), 2);
    writer.apply(&removed(&[201]));
    assert_eq!(device(&index, Slot(0), &[1, 2]), 1);
}

#[test]
fn what_lies_behind_a_gap_is_seen_again_when_the_gap_is_filled() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    writer.apply(&stored(None, &[(1, 100), (2, 200), (3, 300)], Tier::Device));
    writer.apply(&removed(&[200]));
    assert_eq!(device(&index, Slot(0), &[1, 2, 3]), 1);
    assert_eq!(writer.apply(&stored(Some(200), &[(4, 400)], Tier::Device)), Outcome::ParentNotFound);
    writer.apply(&stored(Some(100), &[(2, 200)], Tier::Device));
    assert_eq!(device(&index, Slot(0), &[1, 2, 3]), 3);
}

#[test]
fn after_doubt_a_block_stored_again_ends_with_one_removal() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    let event = stored(None, &[(1, 100)], Tier::Device);
    writer.apply(&event);
    writer.apply(&event);
    writer.doubt();
    assert_eq!(device(&index, Slot(0), &[1]), 1);
    assert_eq!(writer.apply(&event), Outcome::DuplicateStore);
    assert_eq!(writer.apply(&removed(&[100])), Outcome::Ok);
    assert_eq!(device(&index, Slot(0), &[1]), 0);
}

#[test]
fn a_slot_taken_over_reports_only_its_present_writer() {
    let index = PrefixIndex::new();
    let mut before = index.join(Slot(0));
    before.apply(&stored(None, &[(1, 100), (2, 200)], Tier::Device));
    let mut after = index.join(Slot(0));
    assert_eq!(device(&index, Slot(0), &[1, 2]), 0);
    after.apply(&stored(None, &[(1, 900)], Tier::Device));
    before.apply(&stored(Some(200), &[(3, 300)], Tier::Device));
    before.apply(&KvEvent::Cleared);
    before.apply(&stored(None, &[(1, 100), (2, 200)], Tier::Device));
    assert_eq!(device(&index, Slot(0), &[1, 2]), 1);
    drop(before);
    assert_eq!(device(&index, Slot(0), &[1, 2]), 1);
    assert_eq!(index.stats().total.device, 1);
}

#[test]
fn overlaps_forget_the_query_before() {
    let index = PrefixIndex::new();
    let mut writers = [index.join(Slot(3)), index.join(Slot(5))];
    writers[0].apply(&stored(None, &[(1, 100)], Tier::Device));
    writers[1].apply(&stored(None, &[(2, 100)], Tier::HostPinned));
    let mut overlaps = Overlaps::new();
    index.overlaps(&prompt(&[LocalHash(1)]), &mut overlaps);
    assert_eq!(overlaps.iter().collect::<Vec<_>>(), [(Slot(3), TierBlocks { device: 1, ..TierBlocks::default() })]);
    index.overlaps(&prompt(&[LocalHash(2)]), &mut overlaps);
    assert_eq!(overlaps.iter().collect::<Vec<_>>(), [(Slot(5), TierBlocks { host: 1, ..TierBlocks::default() })]);
    index.overlaps(&prompt(&[LocalHash(9)]), &mut overlaps);
    assert_eq!(overlaps.iter().count(), 0);
    assert_eq!(overlaps.get(Slot(3)), TierBlocks::default());
}

#[test]
fn many_branches_of_one_prefix_are_found_and_removed() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    writer.apply(&stored(None, &[(1, 1)], Tier::Device));
    for branch in 2..102 {
        writer.apply(&stored(Some(1), &[(branch, branch)], Tier::Device));
    }
    assert!((2..102).all(|branch| device(&index, Slot(0), &[1, branch]) == 2));
    for branch in 2..102 {
        writer.apply(&removed(&[branch]));
        assert_eq!(device(&index, Slot(0), &[1, branch]), 1);
    }
    assert_eq!(index.stats().distinct_blocks, 1);
}

#[test]
fn a_run_cut_short_gives_its_memory_back() {
    let cases: [(&str, Vec<Vec<u64>>); 3] = [
        ("one by one from the end", (2..=1000).rev().map(|block| vec![block]).collect()),
        ("at once", vec![(2..=1000).collect()]),
        ("from the middle, then the end", vec![(2..=600).collect(), (601..=1000).collect()]),
    ];
    for (case, removals) in cases {
        let index = PrefixIndex::new();
        let mut writer = index.join(Slot(0));
        let blocks: Vec<_> = (1..=1000).map(|block| (block, block)).collect();
        writer.apply(&stored(None, &blocks, Tier::Device));
        for blocks in removals {
            assert_eq!(writer.apply(&removed(&blocks)), Outcome::Ok);
        }
        assert_eq!(device(&index, Slot(0), &[1, 2]), 1, "{case}");
        let room: usize = index.shards.iter().map(|shard| trie::tests::room(&shard.read())).sum();
        assert!(room <= 64, "{case}: {room}");
    }
}
