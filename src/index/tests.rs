mod doubts;
mod limits;
mod model;
mod properties;
mod stress;
mod watch;

use super::*;
use crate::block::{EngineHash, LocalHash};
use crate::tier::Tier;
use crate::worker::BlockSize;

fn prompt(locals: &[LocalHash]) -> BlockHashes {
    BlockHashes::chain(
        locals.len() * 16,
        BlockSize::new(16).unwrap(),
        locals.to_vec(),
    )
}

fn stored(parent: Option<u64>, blocks: &[(u64, u64)], tier: Tier) -> KvEvent {
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
        tier: Tier::Device,
    }
}

fn device(index: &PrefixIndex, slot: Slot, locals: &[u64]) -> u32 {
    let mut overlaps = Overlaps::new();
    index.overlaps(
        &prompt(&locals.iter().copied().map(LocalHash).collect::<Vec<_>>()),
        &mut overlaps,
    );
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
    for (left, outcome) in [
        (1, Outcome::Ok),
        (1, Outcome::Ok),
        (0, Outcome::Ok),
        (0, Outcome::BlockNotFound),
    ] {
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
    assert_eq!(
        index.stats().total,
        BlockCounts {
            device: 2,
            copies: 4,
            ..BlockCounts::default()
        }
    );
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
    assert_eq!(
        writer.apply(&stored(Some(200), &[(4, 400)], Tier::Device)),
        Outcome::ParentNotFound
    );
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
    assert_eq!(
        overlaps.iter().collect::<Vec<_>>(),
        [(
            Slot(3),
            TierBlocks {
                device: 1,
                ..TierBlocks::default()
            }
        )]
    );
    index.overlaps(&prompt(&[LocalHash(2)]), &mut overlaps);
    assert_eq!(
        overlaps.iter().collect::<Vec<_>>(),
        [(
            Slot(5),
            TierBlocks {
                host: 1,
                ..TierBlocks::default()
            }
        )]
    );
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
        let mut writer = index.join(Slot(0));
        let blocks: Vec<_> = (1..=1000).map(|block| (block, block)).collect();
        writer.apply(&stored(None, &blocks, Tier::Device));
        for blocks in removals {
            assert_eq!(writer.apply(&removed(&blocks)), Outcome::Ok);
        }
        assert_eq!(device(&index, Slot(0), &[1, 2]), 1, "{case}");
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
    index.overlaps(
        &prompt(&locals.iter().copied().map(LocalHash).collect::<Vec<_>>()),
        &mut overlaps,
    );
    overlaps.get(Slot(0))
}

#[test]
fn a_lower_run_counts_as_soon_as_its_chain_exists_and_not_before() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    assert_eq!(
        writer.apply(&stored(Some(200), &[(3, 300), (4, 400)], Tier::HostPinned)),
        Outcome::ParentAwaited
    );
    assert_eq!(
        writer.apply(&stored(Some(400), &[(5, 500)], Tier::Disk)),
        Outcome::ParentAwaited
    );
    assert_eq!(
        writer.apply(&stored(Some(400), &[(5, 500)], Tier::Device)),
        Outcome::ParentNotFound
    );
    writer.apply(&stored(None, &[(1, 100)], Tier::Device));
    assert_eq!(
        found(&index, &[1, 2, 3, 4, 5]),
        TierBlocks {
            device: 1,
            ..TierBlocks::default()
        }
    );
    assert_eq!(
        index.stats().total,
        BlockCounts {
            device: 1,
            host: 2,
            disk: 1,
            copies: 4,
            waiting: 3,
            external: 0
        }
    );
    writer.apply(&stored(Some(100), &[(2, 200)], Tier::Device));
    let all = TierBlocks {
        device: 2,
        host: 2,
        disk: 1,
        external: 0,
    };
    assert_eq!(found(&index, &[1, 2, 3, 4, 5]), all);
    assert_eq!(
        index.stats().total,
        BlockCounts {
            device: 2,
            host: 2,
            disk: 1,
            copies: 5,
            waiting: 0,
            external: 0
        }
    );
}

#[test]
fn a_lower_run_stays_when_what_it_follows_leaves_and_returns() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    writer.apply(&stored(None, &[(1, 100), (2, 200)], Tier::Device));
    writer.apply(&removed(&[200]));
    writer.apply(&stored(Some(200), &[(3, 300)], Tier::HostPinned));
    writer.apply(&removed(&[100]));
    assert_eq!(found(&index, &[1, 2, 3]), TierBlocks::default());
    writer.apply(&stored(None, &[(1, 100), (2, 200)], Tier::Device));
    assert_eq!(
        found(&index, &[1, 2, 3]),
        TierBlocks {
            device: 2,
            host: 1,
            ..TierBlocks::default()
        }
    );
}

#[test]
fn a_block_that_waits_can_be_removed() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    let host = |blocks: &[u64]| KvEvent::Removed {
        blocks: blocks.iter().copied().map(EngineHash).collect(),
        tier: Tier::HostPinned,
    };
    for tier in [Tier::HostPinned, Tier::HostPinned, Tier::Disk] {
        writer.apply(&stored(Some(100), &[(2, 200)], tier));
    }
    for (outcome, waiting) in [
        (Outcome::Ok, 1),
        (Outcome::Ok, 1),
        (Outcome::BlockNotFound, 1),
    ] {
        assert_eq!(writer.apply(&host(&[200])), outcome);
        assert_eq!(index.stats().total.waiting, waiting);
    }
    let disk = KvEvent::Removed {
        blocks: vec![EngineHash(200)],
        tier: Tier::Disk,
    };
    assert_eq!(writer.apply(&disk), Outcome::Ok);
    assert_eq!(index.stats().total, BlockCounts::default());
    writer.apply(&stored(None, &[(1, 100)], Tier::Device));
    assert_eq!(
        found(&index, &[1, 2]),
        TierBlocks {
            device: 1,
            ..TierBlocks::default()
        }
    );
}

fn share(group: u32, need: (u32, u32), blocks: &[u64]) -> KvEvent {
    let need = GroupNeed::Last {
        blocks: need.0,
        stride: need.1.try_into().unwrap(),
    };
    KvEvent::GroupStored {
        group,
        need,
        blocks: blocks.iter().copied().map(EngineHash).collect(),
    }
}

#[test]
fn the_device_overlap_of_a_hybrid_model_is_what_all_groups_can_serve() {
    let main = stored(
        None,
        &(1..=9).map(|block| (block, block)).collect::<Vec<_>>(),
        Tier::Device,
    );
    let window = |blocks: &[u64]| share(0, (2, 1), blocks);
    let cases: [(&str, Vec<KvEvent>, u32); 10] = [
        (
            "a window at the end of the prefix",
            vec![window(&[7, 8])],
            8,
        ),
        ("a window that was lost there", vec![window(&[4, 5, 8])], 5),
        ("a window with a hole", vec![window(&[2, 4, 6, 8])], 0),
        (
            "the beginning is a window of its own",
            vec![window(&[1])],
            1,
        ),
        ("a group that holds nothing", vec![window(&[])], 0),
        (
            "a state only at some ends",
            vec![share(1, (1, 1), &[3, 6])],
            6,
        ),
        (
            "two windows that meet nowhere",
            vec![window(&[7, 8]), share(1, (1, 1), &[3, 6])],
            0,
        ),
        (
            "two groups of one kind",
            vec![window(&[4, 5, 7, 8]), share(1, (2, 1), &[4, 5, 6, 7])],
            5,
        ),
        (
            "blocks twice as long",
            vec![share(0, (2, 2), &[2, 4, 8])],
            4,
        ),
        ("all of it", vec![share(0, (u32::MAX, 1), &[1, 2, 3, 5])], 3),
    ];
    for (case, shares, expected) in cases {
        for order in [false, true] {
            let index = PrefixIndex::new();
            let mut writer = index.join(Slot(0));
            let mut events = vec![main.clone()];
            events.extend(shares.clone());
            if order {
                events.reverse();
            }
            events
                .iter()
                .for_each(|event| assert_eq!(writer.apply(event), Outcome::Ok));
            assert_eq!(
                device(&index, Slot(0), &(1..=9).collect::<Vec<_>>()),
                expected,
                "{case}"
            );
        }
    }
}

#[test]
fn an_engine_computes_the_last_block_of_a_prompt_that_it_holds_whole() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    writer.apply(&stored(
        None,
        &[(1, 1), (2, 2), (3, 3), (4, 4)],
        Tier::Device,
    ));
    writer.apply(&share(0, (2, 1), &[3, 4]));
    assert_eq!(
        device(&index, Slot(0), &[1, 2, 3, 4]),
        0,
        "block 2 would be needed for the first three"
    );
    assert_eq!(device(&index, Slot(0), &[1, 2, 3, 4, 5]), 4);
}

#[test]
fn a_group_lets_go_of_a_block_with_the_last_copy() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    writer.apply(&stored(None, &[(1, 1), (2, 2)], Tier::Device));
    let gone = KvEvent::GroupRemoved {
        group: 0,
        blocks: vec![EngineHash(1)],
    };
    assert_eq!(writer.apply(&gone), Outcome::BlockNotFound);
    assert_eq!(writer.apply(&share(0, (1, 1), &[1])), Outcome::Ok);
    assert_eq!(
        writer.apply(&share(0, (1, 1), &[1])),
        Outcome::DuplicateStore
    );
    for (left, outcome) in [
        (1, Outcome::Ok),
        (0, Outcome::Ok),
        (0, Outcome::BlockNotFound),
    ] {
        assert_eq!(writer.apply(&gone), outcome);
        assert_eq!(device(&index, Slot(0), &[1, 2]), left);
    }
    writer.apply(&KvEvent::Cleared);
    writer.apply(&stored(None, &[(1, 1), (2, 2)], Tier::Device));
    assert_eq!(
        device(&index, Slot(0), &[1, 2]),
        2,
        "another model may run there now"
    );
}

#[test]
fn groups_that_cannot_be_followed_make_the_device_cache_worth_nothing() {
    let unknown = KvEvent::GroupStored {
        group: 0,
        need: GroupNeed::Unknown,
        blocks: vec![],
    };
    let many = |group: u32| share(group, (group + 1, 1), &[1]);
    let cases: [(&str, Vec<KvEvent>, Outcome); 3] = [
        ("nothing is known", vec![unknown], Outcome::Ok),
        (
            "a class too many",
            (0..5).map(many).collect(),
            Outcome::TooManyGroups,
        ),
        (
            "a group too many",
            (0..65).map(|group| share(group, (1, 1), &[1])).collect(),
            Outcome::TooManyGroups,
        ),
    ];
    for (case, shares, last) in cases {
        let index = PrefixIndex::new();
        let mut writer = index.join(Slot(0));
        writer.apply(&stored(None, &[(1, 1), (2, 2)], Tier::Device));
        writer.apply(&stored(None, &[(7, 7)], Tier::HostPinned));
        let outcome = shares.iter().map(|share| writer.apply(share)).last();
        assert_eq!(outcome, Some(last), "{case}");
        assert_eq!(found(&index, &[1, 2, 3]), TierBlocks::default(), "{case}");
        assert_eq!(
            found(&index, &[7]),
            TierBlocks {
                host: 1,
                ..TierBlocks::default()
            },
            "{case}"
        );
        assert_eq!(
            shares.last().map(|share| writer.apply(share)),
            Some(last),
            "{case}: said every time"
        );
    }
}

#[test]
fn raising_adds_by_slot_what_another_answer_has_more_of_on_the_device() {
    let mut overlaps = Overlaps::new();
    let index = PrefixIndex::new();
    let mut writers: Vec<_> = (0..4).map(|slot| index.join(Slot(slot))).collect();
    writers[0].apply(&stored(None, &[(1, 1)], Tier::Device));
    writers[1].apply(&stored(None, &[(1, 1), (2, 2), (3, 3)], Tier::Disk));
    writers[2].apply(&stored(None, &[(1, 1), (2, 2)], Tier::Device));
    let query = prompt(&[1, 2, 3].map(LocalHash));
    index.overlaps(&query, &mut overlaps);
    let predicted = PrefixIndex::new();
    let mut writers: Vec<_> = (0..6).map(|slot| predicted.join(Slot(slot))).collect();
    for slot in [0, 1, 5] {
        writers[slot].apply(&stored(
            None,
            &[(1, 1), (2, 2)][..2 - slot % 2],
            Tier::Device,
        ));
    }
    let mut other = Overlaps::new();
    predicted.overlaps(&query, &mut other);
    overlaps.raise(&other);
    let mut slots: Vec<_> = overlaps
        .iter()
        .map(|(slot, blocks)| (slot.0, blocks.device, blocks.disk))
        .collect();
    slots.sort_unstable();
    assert_eq!(slots, [(0, 2, 0), (1, 1, 2), (2, 2, 0), (5, 1, 0)]);
    overlaps.raise(&other);
    assert_eq!(overlaps.iter().count(), 4);
}

#[test]
fn a_prediction_beside_events_reaches_over_what_the_slower_tiers_add() {
    let of = |[device, host, disk, external]: [u32; 4]| TierBlocks {
        device,
        host,
        disk,
        external,
    };
    let cases = [
        ([0, 0, 0, 0], 0, [0, 0, 0, 0]),
        ([4, 2, 3, 1], 0, [4, 2, 3, 1]),
        ([4, 2, 3, 1], 4, [4, 2, 3, 1]),
        ([4, 2, 3, 1], 5, [5, 1, 3, 1]),
        ([4, 2, 3, 1], 8, [8, 0, 1, 1]),
        ([4, 0, 0, 6], 9, [9, 0, 0, 1]),
        ([4, 2, 3, 1], 20, [20, 0, 0, 0]),
    ];
    for (reported, predicted, expected) in cases {
        assert_eq!(
            of(reported).raised(predicted),
            of(expected),
            "{reported:?} {predicted}"
        );
    }
}

#[test]
fn what_cache_groups_do_not_hold_is_not_raised() {
    let (index, predicted) = (PrefixIndex::new(), PrefixIndex::new());
    let prefix = stored(None, &[(1, 1), (2, 2), (3, 3)], Tier::Device);
    let mut writers: Vec<_> = (0..2).map(|slot| index.join(Slot(slot))).collect();
    writers[1].apply(&prefix);
    writers[1].apply(&share(0, (1, 1), &[1]));
    let mut others: Vec<_> = (0..2).map(|slot| predicted.join(Slot(slot))).collect();
    for writer in &mut others {
        writer.apply(&prefix);
    }
    let (query, mut overlaps, mut other) = (
        prompt(&[1, 2, 3, 4].map(LocalHash)),
        Overlaps::new(),
        Overlaps::new(),
    );
    let mut raised = |of: u32| {
        index.overlaps(&query, &mut overlaps);
        predicted.overlaps(&query, &mut other);
        overlaps.raise(&other);
        overlaps.get(Slot(of)).device
    };
    assert_eq!((raised(0), raised(1)), (3, 1));
    writers[1].apply(&KvEvent::Cleared);
    assert_eq!(raised(1), 3, "another model may run there now");
}

#[test]
fn blocks_that_wait_are_bounded_and_all_get_their_places_at_once() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    let mut waiting = 0;
    // Children of one parent, and a chain.
    let outcome = loop {
        let parent = if waiting % 2 == 0 { 1 } else { 1 + waiting };
        let outcome = writer.apply(&stored(
            Some(parent),
            &[(2 + waiting, 2 + waiting)],
            Tier::HostPinned,
        ));
        if outcome != Outcome::ParentAwaited {
            break outcome;
        }
        waiting += 1;
    };
    assert_eq!(outcome, Outcome::TooManyWaiting);
    let counts = |index: &PrefixIndex| index.stats().slots[0].counts;
    assert_eq!(
        (counts(&index).waiting, counts(&index).host),
        (waiting, waiting)
    );
    writer.apply(&KvEvent::Removed {
        blocks: vec![EngineHash(2)],
        tier: Tier::HostPinned,
    });
    assert_eq!(counts(&index).waiting, waiting - 1);
    writer.apply(&stored(None, &[(1, 1)], Tier::Device));
    // The one that followed the removed block has nothing to follow.
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
fn an_index_that_is_full_says_so_and_keeps_what_it_has() {
    let index = PrefixIndex::new();
    index
        .shards
        .iter()
        .for_each(|shard| trie::tests::limit_chunks(&mut shard.write(), 2));
    let mut writers = [index.join(Slot(0)), index.join(Slot(1))];
    let blocks = |from: u64| {
        (from..from + 100)
            .map(|block| (block, block))
            .collect::<Vec<_>>()
    };
    let parent = |from: u64| (from > 0).then(|| from - 1);
    for from in [0, 100] {
        assert_eq!(
            writers[0].apply(&stored(parent(from), &blocks(from), Tier::Device)),
            Outcome::Ok
        );
    }
    assert_eq!(
        writers[0].apply(&stored(parent(200), &blocks(200), Tier::Device)),
        Outcome::IndexFull
    );
    let counts = index.stats().total;
    assert_eq!((counts.device, counts.copies), (256, 256));
    assert_eq!(device(&index, Slot(0), &(0..300).collect::<Vec<_>>()), 256);
    assert_eq!(
        writers[0].apply(&stored(parent(256), &[(256, 256)], Tier::Device)),
        Outcome::IndexFull
    );
    // A name that is known takes the other way through the writer.
    assert_eq!(
        writers[0].apply(&stored(
            parent(255),
            &[(255, 255), (256, 256)],
            Tier::Device
        )),
        Outcome::IndexFull
    );
    // What others hold already needs no room.
    assert_eq!(
        writers[1].apply(&stored(None, &blocks(0), Tier::Device)),
        Outcome::Ok
    );
    // The last one has two copies.
    let all = (100..256).rev().chain([255]).collect::<Vec<_>>();
    assert_eq!(writers[0].apply(&removed(&all)), Outcome::Ok);
    assert_eq!(
        writers[0].apply(&stored(parent(100), &[(700, 700)], Tier::Device)),
        Outcome::Ok
    );
    index
        .shards
        .iter()
        .for_each(|shard| trie::tests::check(&shard.read()));
}

#[test]
fn very_many_ranks_are_found_as_few_are() {
    let index = PrefixIndex::new();
    let query: Vec<LocalHash> = (0..16).map(LocalHash).collect();
    let blocks = |range: std::ops::Range<u32>| {
        range
            .map(|at| (u64::from(at), u64::from(at)))
            .collect::<Vec<_>>()
    };
    let (mut writers, mut expected) = (Vec::new(), Vec::new());
    for slot in 0..300 {
        let mut writer = index.join(Slot(slot));
        // Most hold a few lengths on the device alone, some go on in host memory, some begin there.
        let (device, host) = match slot % 17 {
            0 => (0, slot % 5),
            1 => (slot % 7, slot % 3),
            2 => (0, 0),
            _ => (1 + slot / 64 % 3 * 4, 0),
        };
        let parent = device.checked_sub(1).map(u64::from);
        writer.apply(&stored(None, &blocks(0..device), Tier::Device));
        writer.apply(&stored(
            parent,
            &blocks(device..device + host),
            Tier::HostPinned,
        ));
        writers.push(Some(writer));
        expected.push(TierBlocks {
            device,
            host,
            ..TierBlocks::default()
        });
    }
    let mut overlaps = Overlaps::new();
    for round in 0..3 {
        index.overlaps(&prompt(&query), &mut overlaps);
        let found: Vec<_> = (0..300).map(|slot| overlaps.get(Slot(slot))).collect();
        assert_eq!(found, expected, "round {round}");
        let mut listed: Vec<_> = overlaps.iter().collect();
        listed.sort_unstable_by_key(|(slot, _)| slot.0);
        let some = (0..)
            .map(Slot)
            .zip(expected.iter().copied())
            .filter(|(_, blocks)| blocks.total() > 0);
        assert_eq!(listed, some.collect::<Vec<_>>());
        // A shorter query, a raised answer and nothing at all leave no trace.
        index.overlaps(&prompt(&query[..2]), &mut overlaps);
        let found: Vec<_> = (0..300).map(|slot| overlaps.get(Slot(slot))).collect();
        assert_eq!(
            found,
            expected
                .iter()
                .map(|blocks| blocks.cut(2))
                .collect::<Vec<_>>()
        );
        let other = overlaps.clone();
        index.overlaps(&prompt(&[LocalHash(99)]), &mut overlaps);
        assert_eq!(overlaps.iter().count(), 0);
        overlaps.raise(&other);
        assert!(
            overlaps
                .iter()
                .all(|(slot, blocks)| blocks.device == expected[slot.at()].device.min(2))
        );
        assert_eq!(
            overlaps.iter().count(),
            expected.iter().filter(|blocks| blocks.device > 0).count()
        );
        // Whoever left is not found any more.
        writers[3 + round] = None;
        expected[3 + round] = TierBlocks::default();
    }
    index
        .shards
        .iter()
        .for_each(|shard| trie::tests::check(&shard.read()));
}
