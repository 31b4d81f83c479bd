//! Overlaps of ranks with several cache groups, and raised overlaps.

use super::*;

pub(super) fn share(group: u32, need: (u32, u32), blocks: &[u64]) -> KvEvent {
    let need = GroupNeed::Trailing {
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
fn hybrid_overlap_is_limited_by_all_groups() {
    let main = stored(
        None,
        &(1..=9).map(|block| (block, block)).collect::<Vec<_>>(),
        StorageTier::Device,
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
            "two windows that never overlap",
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
        let mut events = vec![main.clone()];
        events.extend(shares);
        assert_eq!(overlap_after(&events), expected, "{case}");
        events.reverse();
        assert_eq!(overlap_after(&events), expected, "{case}, reversed");
    }
}

/// Returns the device blocks of the prompt 1 to 9 in a new index after these events.
fn overlap_after(events: &[KvEvent]) -> u32 {
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(0));
    for event in events {
        assert_eq!(writer.apply(event), ApplyOutcome::Ok);
    }
    device(&index, RankSlot(0), &(1..=9).collect::<Vec<_>>())
}

#[test]
fn untracked_groups_disable_device_overlap() {
    let unknown = KvEvent::GroupStored {
        group: 0,
        need: GroupNeed::Unknown,
        blocks: vec![],
    };
    let many = |group: u32| share(group, (group + 1, 1), &[1]);
    let cases: [(&str, Vec<KvEvent>, ApplyOutcome); 3] = [
        ("no requirement is known", vec![unknown], ApplyOutcome::Ok),
        (
            "one rule too many",
            (0..5).map(many).collect(),
            ApplyOutcome::TooManyGroups,
        ),
        (
            "one group too many",
            (0..65).map(|group| share(group, (1, 1), &[1])).collect(),
            ApplyOutcome::TooManyGroups,
        ),
    ];
    for (case, shares, last) in cases {
        let index = PrefixIndex::new();
        let mut writer = index.create_writer(RankSlot(0));
        writer.apply(&stored(None, &[(1, 1), (2, 2)], StorageTier::Device));
        writer.apply(&stored(None, &[(7, 7)], StorageTier::HostPinned));
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
            "{case}: reported every time"
        );
    }
}

#[test]
fn raise_adds_device_blocks_per_slot() {
    let mut overlaps = Overlaps::new();
    let index = PrefixIndex::new();
    let mut writers: Vec<_> = (0..4)
        .map(|slot| index.create_writer(RankSlot(slot)))
        .collect();
    writers[0].apply(&stored(None, &[(1, 1)], StorageTier::Device));
    writers[1].apply(&stored(None, &[(1, 1), (2, 2), (3, 3)], StorageTier::Disk));
    writers[2].apply(&stored(None, &[(1, 1), (2, 2)], StorageTier::Device));
    let query = prompt(&[1, 2, 3].map(LocalHash));
    index.query_overlaps(&query, &mut overlaps);
    let predicted = PrefixIndex::new();
    let mut writers: Vec<_> = (0..6)
        .map(|slot| predicted.create_writer(RankSlot(slot)))
        .collect();
    for slot in [0, 1, 5] {
        writers[slot].apply(&stored(
            None,
            &[(1, 1), (2, 2)][..2 - slot % 2],
            StorageTier::Device,
        ));
    }
    let mut other = Overlaps::new();
    predicted.query_overlaps(&query, &mut other);
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
fn prediction_covers_blocks_of_slower_tiers() {
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
            of(reported).with_device(predicted),
            of(expected),
            "{reported:?} {predicted}"
        );
    }
}

#[test]
fn raise_skips_slots_with_cache_groups() {
    let index = PrefixIndex::new();
    let predicted = PrefixIndex::new();
    let prefix = stored(None, &[(1, 1), (2, 2), (3, 3)], StorageTier::Device);
    let mut writers: Vec<_> = (0..2)
        .map(|slot| index.create_writer(RankSlot(slot)))
        .collect();
    writers[1].apply(&prefix);
    writers[1].apply(&share(0, (1, 1), &[1]));
    let mut others: Vec<_> = (0..2)
        .map(|slot| predicted.create_writer(RankSlot(slot)))
        .collect();
    for writer in &mut others {
        writer.apply(&prefix);
    }
    let query = prompt(&[1, 2, 3, 4].map(LocalHash));
    let mut overlaps = Overlaps::new();
    let mut other = Overlaps::new();
    let mut raised = |of: u32| {
        index.query_overlaps(&query, &mut overlaps);
        predicted.query_overlaps(&query, &mut other);
        overlaps.raise(&other);
        overlaps.get(RankSlot(of)).device
    };
    assert_eq!((raised(0), raised(1)), (3, 1));
    writers[1].apply(&KvEvent::Cleared);
    assert_eq!(raised(1), 3, "another model may run there now");
}
