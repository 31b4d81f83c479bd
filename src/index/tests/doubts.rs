//! What remains certain after events were lost, through the index as it is used.

use super::*;

/// A rank that holds a hot prefix of two blocks and eight other prompts of one block.
fn warm(index: &Arc<PrefixIndex>) -> RankWriter {
    let mut writer = index.join(Slot(0));
    writer.apply(&stored(None, &[(1, 100), (2, 200)], Tier::Device));
    for other in 10..18 {
        writer.apply(&stored(None, &[(other, other * 100)], Tier::Device));
    }
    assert_eq!(writer.doubt(), 1);
    assert_eq!(index.doubted(Slot(0)), Some(10));
    writer
}

fn hashes(locals: &[u64]) -> BlockHashes {
    prompt(&locals.iter().copied().map(LocalHash).collect::<Vec<_>>())
}

#[test]
fn a_block_that_something_follows_is_there_and_so_is_all_before_it() {
    let index = PrefixIndex::new();
    let mut writer = warm(&index);
    writer.apply(&stored(Some(200), &[(3, 300)], Tier::HostPinned));
    assert_eq!(
        index.doubted(Slot(0)),
        Some(10),
        "a slower tier says nothing of the device"
    );
    writer.apply(&stored(Some(200), &[(4, 400)], Tier::Device));
    assert_eq!(index.doubted(Slot(0)), Some(8));
    writer.apply(&stored(None, &[(10, 1000)], Tier::Device));
    assert_eq!(index.doubted(Slot(0)), Some(7));
    writer.apply(&removed(&[1100, 1200, 1300]));
    assert_eq!(index.doubted(Slot(0)), Some(4));
}

#[test]
fn what_an_answer_found_is_there_unless_it_was_sent_before_events_were_lost() {
    let index = PrefixIndex::new();
    let mut writer = warm(&index);
    let sent = index.moment(Slot(0)).unwrap();
    index.found(&hashes(&[1, 2, 3]), 1, Slot(0), sent);
    assert_eq!(index.doubted(Slot(0)), Some(9));
    index.found(&hashes(&[1, 2, 3]), 3, Slot(0), sent);
    assert_eq!(index.doubted(Slot(0)), Some(8));
    writer.doubt();
    index.found(&hashes(&[1, 2]), 2, Slot(0), sent);
    assert_eq!(index.doubted(Slot(0)), Some(10));
}

#[test]
fn a_prefix_that_is_always_in_use_outlives_any_number_of_gaps_and_what_is_not_used_does_not() {
    let index = PrefixIndex::new();
    let mut writer = warm(&index);
    // A cache of twelve blocks behind a link that loses something all the time; the removals of the others among it.
    let mut live: std::collections::VecDeque<u64> = Default::default();
    for tail in 1000..1060 {
        writer.apply(&stored(Some(200), &[(tail, tail)], Tier::Device));
        live.push_back(tail);
        if live.len() > 10 {
            writer.apply(&removed(&[live.pop_front().unwrap()]));
        }
        writer.doubt();
        let due = writer.is_due();
        let forgotten = writer.settle().forgotten;
        assert_eq!(due, forgotten.is_some());
        if let Some(forgotten) = forgotten {
            assert!(
                forgotten
                    .names
                    .iter()
                    .all(|(name, tier)| name.0 >= 1000 && *tier == Tier::Device)
            );
        }
    }
    assert_eq!(device(&index, Slot(0), &[1, 2, 1059]), 3);
    assert_eq!(
        device(&index, Slot(0), &[12]),
        0,
        "it was not heard of for several caches"
    );
    writer.apply(&removed(&live.drain(..9).collect::<Vec<_>>()));
    writer.apply(&stored(Some(200), &[(5, 500)], Tier::Device));
    assert_eq!((writer.settle().doubted, live), (1, [1059].into()));
}

#[test]
fn losing_events_costs_nothing_in_proportion_to_what_is_held() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    let blocks: Vec<(u64, u64)> = (1..50_000).map(|block| (block, block)).collect();
    writer.apply(&stored(None, &blocks, Tier::Device));
    // With a look at each block this would take minutes.
    for gap in 1..=100_000 {
        assert_eq!(writer.doubt(), gap);
        assert_eq!(writer.settle().doubted, 49_999);
    }
}

#[test]
fn that_blocks_may_never_have_been_told_is_known_until_all_that_was_there_must_have_gone() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    assert!(!writer.settle().untold);
    writer.doubt();
    for block in 1..=4 {
        writer.apply(&stored(None, &[(block, block)], Tier::Device));
    }
    assert_eq!(
        writer.settle(),
        Settled {
            untold: true,
            ..Settled::default()
        },
        "nothing is doubted"
    );
    writer.apply(&removed(&[1, 2]));
    assert_eq!(
        writer.apply(&stored(Some(77), &[(5, 5)], Tier::Device)),
        Outcome::ParentNotFound
    );
    assert!(
        writer.settle().untold,
        "what follows an unknown block shows that it is in use"
    );
    writer.apply(&removed(&[3]));
    assert!(!writer.settle().untold);
    writer.doubt();
    writer.apply(&KvEvent::Cleared);
    assert_eq!(writer.settle(), Settled::default());
}

#[test]
fn what_came_again_since_a_moment_is_remembered() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    writer.apply(&stored(None, &[(1, 100), (2, 200)], Tier::Device));
    let sent = index.moment(Slot(0)).unwrap();
    let gained = |blocks| index.regained_since(&hashes(&[1, 2, 3]), blocks, Slot(0), sent);
    // Stored again without having left: it was held all the time, as far as was told.
    writer.apply(&stored(None, &[(1, 100), (2, 200), (3, 300)], Tier::Device));
    assert_eq!(gained(3), Some(false), "and the third is new");
    writer.apply(&removed(&[200, 200, 300]));
    writer.apply(&stored(Some(100), &[(2, 200), (3, 300)], Tier::Device));
    assert_eq!((gained(1), gained(2)), (Some(false), Some(true)));
    // What others evict and store says nothing, until so much left that it cannot be remembered.
    let sent = index.moment(Slot(0)).unwrap();
    let gained = |blocks| index.regained_since(&hashes(&[1, 2, 3]), blocks, Slot(0), sent);
    for block in 1000..8000 {
        assert_eq!(gained(3), Some(false), "{block}");
        writer.apply(&stored(None, &[(block, block)], Tier::Device));
        if block < 2000 {
            writer.apply(&removed(&[block]));
        }
    }
    for block in 2000..6000 {
        writer.apply(&removed(&[block]));
    }
    assert_eq!(gained(3), None);
    let sent = index.moment(Slot(0)).unwrap();
    writer.apply(&KvEvent::Cleared);
    writer.apply(&stored(None, &[(1, 100)], Tier::Device));
    assert_eq!(
        index.regained_since(&hashes(&[1]), 1, Slot(0), sent),
        Some(true),
        "all of it left"
    );
}

#[test]
fn each_tier_forgets_by_its_own_evictions() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    for block in 1..=20 {
        writer.apply(&stored(None, &[(block, block)], Tier::Device));
        writer.apply(&stored(None, &[(block, block)], Tier::HostPinned));
    }
    writer.doubt();
    // The host takes what is stored and evicts it at once, the device evicts nothing.
    let lower = |block| KvEvent::Removed {
        blocks: vec![EngineHash(block)],
        tier: Tier::HostPinned,
    };
    for block in 100..140 {
        writer.apply(&stored(None, &[(block, block)], Tier::Device));
        writer.apply(&stored(None, &[(block, block)], Tier::HostPinned));
        writer.apply(&lower(block));
        let settled = writer.settle();
        assert!(settled.untold, "the device still has what it had");
        let names = settled
            .forgotten
            .map(|forgotten| forgotten.names)
            .unwrap_or_default();
        assert!(
            names.iter().all(|(_, tier)| *tier == Tier::HostPinned),
            "{names:?}"
        );
    }
    let counts = index.stats().total;
    assert_eq!(
        (counts.device, counts.host, index.doubted(Slot(0))),
        (60, 0, Some(20))
    );
    // The other way round: the host is doubted and the device is certain.
    for block in 1..=20 {
        writer.apply(&stored(None, &[(block, block)], Tier::HostPinned));
    }
    writer.doubt();
    for block in (1..=20).chain(100..140) {
        writer.apply(&stored(None, &[(block, block)], Tier::Device));
    }
    assert_eq!(
        writer.settle().doubted,
        0,
        "of the device nothing is doubted"
    );
    for block in 200..500 {
        writer.apply(&stored(None, &[(block, block)], Tier::Device));
        writer.apply(&removed(&[block]));
        assert_eq!(writer.settle().forgotten, None);
    }
    assert_eq!(index.stats().total.host, 20);
}

#[test]
fn an_answer_says_of_each_block_that_it_is_in_the_fastest_tier_in_which_it_is_known() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    writer.apply(&stored(None, &[(1, 1), (2, 2)], Tier::Device));
    writer.apply(&stored(
        None,
        &[(1, 1), (2, 2), (3, 3), (4, 4)],
        Tier::HostPinned,
    ));
    writer.doubt();
    let sent = index.moment(Slot(0)).unwrap();
    index.found(&hashes(&[1, 2, 3]), 3, Slot(0), sent);
    assert_eq!(index.doubted(Slot(0)), Some(0));
    // Three of four names on the host were not heard of.
    for block in 10..13 {
        writer.apply(&stored(None, &[(block, block)], Tier::HostPinned));
        writer.apply(&KvEvent::Removed {
            blocks: vec![EngineHash(block)],
            tier: Tier::HostPinned,
        });
    }
    let mut names = writer.settle().forgotten.unwrap().names;
    names.sort_unstable();
    assert_eq!(
        names,
        [1, 2, 4].map(|name| (EngineHash(name), Tier::HostPinned))
    );
}

/// What a group with a window of one block is told to hold.
fn window(blocks: &[u64], is_held: bool) -> KvEvent {
    let need = GroupNeed::Last {
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
fn what_a_cache_group_lost_unheard_is_doubted_and_forgotten_as_it_evicts() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    for block in 1..=10 {
        writer.apply(&stored(None, &[(block, block)], Tier::Device));
        writer.apply(&window(&[block], true));
    }
    let held = |block| device(&index, Slot(0), &[block, 99]);
    writer.doubt();
    for block in 1..=10 {
        writer.apply(&stored(None, &[(block, block)], Tier::Device));
    }
    assert_eq!(
        (writer.settle().doubted, held(1)),
        (10, 1),
        "the shares are doubted when the blocks are not any more"
    );
    writer.apply(&window(&[2], true));
    let sent = index.moment(Slot(0)).unwrap();
    index.found(&hashes(&[3]), 1, Slot(0), sent);
    assert_eq!(writer.settle().doubted, 8, "one was stored, one was found");
    for block in 100..108 {
        writer.apply(&stored(None, &[(block, block)], Tier::Device));
        writer.apply(&window(&[block], true));
        writer.apply(&window(&[block], false));
        writer.settle();
    }
    assert_eq!([1, 2, 3, 4].map(held), [0, 1, 1, 0]);
    assert_eq!(
        (writer.settle().doubted, index.stats().total.device),
        (0, 18)
    );
}

#[test]
fn a_name_that_is_stored_again_inherits_no_share_of_its_earlier_life() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    writer.apply(&stored(None, &[(1, 1)], Tier::Device));
    writer.apply(&window(&[1], true));
    writer.apply(&stored(None, &[(9, 9)], Tier::Device));
    writer.doubt();
    // Its share left in what was lost.
    writer.apply(&removed(&[1]));
    for block in 10..40 {
        writer.apply(&stored(None, &[(block, block)], Tier::Device));
        writer.apply(&window(&[block], true));
        writer.doubt();
        writer.apply(&stored(None, &[(block, block)], Tier::Device));
        writer.apply(&window(&[block], false));
        writer.apply(&removed(&[block]));
        writer.settle();
    }
    writer.apply(&stored(None, &[(1, 1)], Tier::Device));
    assert_eq!(device(&index, Slot(0), &[1, 99]), 0);
}
