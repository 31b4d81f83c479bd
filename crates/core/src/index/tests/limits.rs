//! Limits of a writer: a publisher that never stops storing is limited and counted.

use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::cache_groups::share;
use super::*;

fn limited(device: u64, lower_tier: u64) -> (std::sync::Arc<PrefixIndex>, RankWriter) {
    let index = PrefixIndex::new();
    let writer = index.create_writer(RankSlot(0));
    index.set_limits(RankSlot(0), BlockLimits { device, lower_tier });
    (index, writer)
}

fn run(from: u64, to: u64) -> Vec<(u64, u64)> {
    (from..to).map(|block| (block, block)).collect()
}

fn over_limit(index: &PrefixIndex) -> u64 {
    index.stats().slots[0].over_limit
}

#[test]
fn store_beyond_tier_limit_keeps_leading_blocks() {
    let (index, mut writer) = limited(10, 4);
    assert_eq!(
        writer.apply(&stored(None, &run(0, 15), StorageTier::Device)),
        ApplyOutcome::IndexFull
    );
    assert_eq!(
        (
            device(&index, RankSlot(0), &(0..15).collect::<Vec<_>>()),
            over_limit(&index)
        ),
        (10, 5)
    );
    assert_eq!(
        writer.apply(&stored(None, &run(0, 10), StorageTier::Device)),
        ApplyOutcome::DuplicateStore,
        "no block is new"
    );
    assert_eq!(
        writer.apply(&stored(Some(9), &run(20, 21), StorageTier::Device)),
        ApplyOutcome::IndexFull
    );
    assert_eq!(
        writer.apply(&stored(None, &run(0, 6), StorageTier::HostPinned)),
        ApplyOutcome::IndexFull
    );
    assert_eq!(index.stats().total.host, 4);
    // One limit for first copies, and one for further copies.
    (0..2).for_each(|_| _ = writer.apply(&removed(&[9, 8])));
    assert_eq!(
        writer.apply(&stored(Some(7), &run(30, 32), StorageTier::Device)),
        ApplyOutcome::Ok,
        "the limit is not reached any more"
    );
    index.set_limits(
        RankSlot(0),
        BlockLimits {
            device: 5,
            lower_tier: 4,
        },
    );
    assert_eq!(index.stats().total.device, 10, "held blocks stay");
    assert_eq!(
        writer.apply(&stored(Some(31), &run(40, 41), StorageTier::Device)),
        ApplyOutcome::IndexFull
    );
}

#[test]
fn hashes_of_one_block_are_limited() {
    let (index, mut writer) = limited(10, 6);
    for name in 0..100 {
        writer.apply(&stored(None, &[(1, name)], StorageTier::Device));
    }
    let total = index.stats().total;
    assert_eq!(
        (total.device, total.copies, over_limit(&index)),
        (1, 16, 84)
    );
}

#[test]
fn group_shares_are_limited() {
    let (index, mut writer) = limited(10, 6);
    assert_eq!(
        writer.apply(&share(1, (1, 1), &(0..16).collect::<Vec<_>>())),
        ApplyOutcome::Ok
    );
    assert_eq!(
        writer.apply(&share(1, (1, 1), &(0..20).collect::<Vec<_>>())),
        ApplyOutcome::IndexFull
    );
    assert_eq!(
        over_limit(&index),
        4,
        "blocks that the main group never named"
    );
}

#[test]
fn extra_copies_are_limited() {
    let (index, mut writer) = limited(4, 4);
    writer.apply(&stored(None, &run(0, 4), StorageTier::Device));
    for tier in [
        StorageTier::HostPinned,
        StorageTier::Disk,
        StorageTier::External,
    ] {
        writer.apply(&stored(None, &run(0, 4), tier));
    }
    let again = |writer: &mut RankWriter, tier| writer.apply(&stored(None, &run(0, 4), tier));
    assert_eq!(
        [StorageTier::Device, StorageTier::Disk].map(|tier| again(&mut writer, tier)),
        [ApplyOutcome::DuplicateStore; 2]
    );
    assert_eq!((index.stats().total.copies, over_limit(&index)), (24, 0));
    assert_eq!(
        again(&mut writer, StorageTier::External),
        ApplyOutcome::IndexFull
    );
    assert_eq!(
        (index.stats().total.copies, over_limit(&index)),
        (24, 4),
        "8 names have several copies"
    );
    let rank = crate::worker::WorkerRank {
        worker: crate::worker::WorkerId(1),
        rank: crate::worker::DpRank(0),
    };
    let (smaller, mut restored) = limited(4, 1);
    restored.restore(&writer.snapshot(rank));
    let counts = smaller.stats().total;
    // One block in each lower tier, and further copies of five hashes.
    assert_eq!((counts.device, counts.host, counts.copies), (4, 1, 12));
    writer.apply(&removed(&[0]));
    assert_eq!(
        again(&mut writer, StorageTier::Device),
        ApplyOutcome::DuplicateStore,
        "the limit is not reached any more"
    );
}

#[test]
fn restore_counts_no_copies_beyond_the_limit() {
    let source = PrefixIndex::new();
    let mut unlimited = source.create_writer(RankSlot(0));
    (0..3).for_each(|_| _ = unlimited.apply(&stored(None, &run(0, 15), StorageTier::Device)));
    let rank = crate::worker::WorkerRank {
        worker: crate::worker::WorkerId(1),
        rank: crate::worker::DpRank(0),
    };
    let (index, mut writer) = limited(10, 4);
    writer.restore(&unlimited.snapshot(rank));
    assert_eq!(
        device(&index, RankSlot(0), &(0..15).collect::<Vec<_>>()),
        10
    );
    (0..3).for_each(|_| _ = writer.apply(&removed(&[9, 8, 7])));
    assert_eq!(
        writer.apply(&stored(Some(6), &[(12, 12)], StorageTier::Device)),
        ApplyOutcome::Ok
    );
    let with_dropped = [0, 1, 2, 3, 4, 5, 6, 12];
    assert_eq!(device(&index, RankSlot(0), &with_dropped), 8);
    writer.apply(&removed(&[12]));
    assert_eq!(
        device(&index, RankSlot(0), &with_dropped),
        7,
        "one copy was stored and one removed"
    );
}

#[test]
fn limits_follow_known_capacity() {
    let of = |capacity| {
        let limits = BlockLimits::for_rank(capacity, 1000);
        (limits.device, limits.lower_tier, limits.max_hashes())
    };
    assert_eq!(of(None), (1000, 1000, 2000));
    assert_eq!(of(Some(100)), (400, 1000, 1400));
    assert_eq!(of(Some(1000)), (4000, 4000, 8000));
    assert_eq!(
        of(Some(u64::MAX)),
        (1 << 26, 1 << 26, 1 << 27),
        "an engine cannot remove its limit"
    );
    assert_eq!(
        BlockLimits::for_rank(Some(u64::MAX), 1 << 30).device,
        1 << 30,
        "the setting may be larger"
    );
}

proptest! {
    #![proptest_config(property_config(500))]

    #[test]
    fn no_sequence_of_events_exceeds_the_limits(
        steps in vec((0..4u8, 0..12u64, 0..12u64, 0..5u64, 0..4usize), 1..80),
    ) {
        let (index, mut writer) = limited(12, 7);
        for (kind, parent, from, count, tier) in steps {
            let tier = StorageTier::ALL[tier];
            let blocks: Vec<_> = (from..from + count).map(|block| (block % 5, block * 100 + parent)).collect();
            let names: Vec<_> = blocks.iter().map(|block| block.1).collect();
            match kind {
                0 => writer.apply(&stored(None, &blocks, tier)),
                1 => writer.apply(&stored(Some(parent * 100), &blocks, tier)),
                2 => writer.apply(&share(parent as u32, (1, 1), &names)),
                _ => writer.apply(&KvEvent::Removed { blocks: names.into_iter().map(EngineHash).collect(), tier }),
            };
            let total = index.stats().total;
            prop_assert!(total.device <= 12 && total.host.max(total.disk).max(total.external) <= 7, "{:?}", total);
        }
    }
}
