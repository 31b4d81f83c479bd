//! The prefix index of one worker rank.

use std::sync::Arc;

use warmroute::block::{EngineHash, LocalHash};
use warmroute::index::{
    BlockLimits, GroupNeed, KvEvent, Outcome, PrefixIndex, RankWriter, StoredBlock,
};
use warmroute::tier::Tier;
use warmroute::worker::Slot;

use crate::{measure, mix, setting};

/// Default of `index.most_blocks_per_tier`.
const BLOCKS: u64 = 1 << 20;
/// Blocks of a rank whose parent is unknown.
const AWAITING: u64 = 1 << 18;
/// Tiers below the device.
const LOWER: [Tier; 3] = [Tier::HostPinned, Tier::Disk, Tier::External];

type IndexWithWriter = (Arc<PrefixIndex>, RankWriter);

fn limited(blocks: u64) -> IndexWithWriter {
    let index = PrefixIndex::new();
    let writer = index.join(Slot(0));
    index.set_limits(Slot(0), BlockLimits::of_rank(None, blocks));
    (index, writer)
}

/// Blocks that are unlike any others.
fn blocks(from: u64, count: u64) -> Vec<StoredBlock> {
    let block = |at| StoredBlock {
        engine: EngineHash(mix(at)),
        local: LocalHash(mix(at + (1 << 40))),
    };
    (from..from + count).map(block).collect()
}

/// Stores prompts of some blocks until a limit is reached.
fn store_until_full(writer: &mut RankWriter, from: u64, prompt: u64, tier: Tier) {
    let mut at = from;
    loop {
        let event = KvEvent::Stored {
            parent: None,
            blocks: blocks(at, prompt),
            tier,
        };
        match writer.apply(&event) {
            Outcome::Ok | Outcome::DuplicateStore => at += prompt,
            outcome => return assert_eq!(outcome, Outcome::IndexFull),
        }
    }
}

#[test]
fn blocks_in_long_prompts() {
    measure("index::blocks_in_long_prompts", 128, || {
        let most = setting(BLOCKS);
        let (index, mut writer) = limited(most);
        // One more than divides the limit, so that the last prompt is cut.
        store_until_full(&mut writer, 0, 513, Tier::Device);
        assert_eq!(index.stats().total.device, most);
        (most, (index, writer))
    });
}

#[test]
fn blocks_in_short_prompts() {
    measure("index::blocks_in_short_prompts", 512, || {
        let most = setting(BLOCKS);
        let (index, mut writer) = limited(most);
        store_until_full(&mut writer, 0, 1, Tier::Device);
        assert_eq!(
            (index.stats().total.device, index.stats().runs),
            (most, most)
        );
        (most, (index, writer))
    });
}

/// As many names as a rank may have, in all tiers, each with a further copy, after events were lost.
#[test]
fn names_with_copies_after_lost_events() {
    measure("index::names_with_copies_after_lost_events", 768, || {
        let most = setting(BLOCKS);
        let (index, mut writer) = limited(most);
        writer.apply(&KvEvent::Stored {
            parent: None,
            blocks: blocks(1 << 50, 1),
            tier: Tier::Device,
        });
        for tier in LOWER {
            writer.apply(&KvEvent::Stored {
                parent: None,
                blocks: blocks(1 << 50, 1),
                tier,
            });
        }
        writer.doubt();
        store_until_full(&mut writer, 0, 1, Tier::Device);
        for tier in LOWER {
            store_until_full(&mut writer, 1 << 30, 1, tier);
        }
        // Further copies, until as many are counted as there may be names.
        store_until_full(&mut writer, 0, 64, Tier::Device);
        let mut at = 1 << 30;
        while writer.apply(&KvEvent::Stored {
            parent: None,
            blocks: blocks(at, 1),
            tier: Tier::HostPinned,
        }) == Outcome::DuplicateStore
        {
            at += 1;
        }
        let total = index.stats().total;
        assert_eq!(
            [total.device, total.host, total.disk, total.external],
            [most; 4]
        );
        assert!(total.copies > 5 * most, "{total:?}");
        (2 * most, (index, writer))
    });
}

#[test]
fn names_of_one_block() {
    measure("index::names_of_one_block", 64, || {
        let most = setting(BLOCKS);
        let (index, mut writer) = limited(most);
        for name in 0..3 * most {
            let blocks = vec![StoredBlock {
                engine: EngineHash(mix(name)),
                local: LocalHash(1),
            }];
            writer.apply(&KvEvent::Stored {
                parent: None,
                blocks,
                tier: Tier::Device,
            });
        }
        assert_eq!(index.stats().total.copies, 2 * most);
        (2 * most, (index, writer))
    });
}

/// As many shares as a rank may have, each with a further copy, after events were lost.
#[test]
fn shares_of_cache_groups() {
    measure("index::shares_of_cache_groups", 320, || {
        let most = setting(BLOCKS);
        let (index, mut writer) = limited(most);
        let need = GroupNeed::Last {
            blocks: 2,
            stride: 1.try_into().unwrap(),
        };
        let store = |writer: &mut RankWriter, from: u64| {
            let blocks = (from..from + 512).map(|at| EngineHash(mix(at))).collect();
            writer.apply(&KvEvent::GroupStored {
                group: 1,
                need,
                blocks,
            })
        };
        store(&mut writer, 0);
        writer.doubt();
        for _ in 0..3 {
            (0..2 * most + 512)
                .step_by(512)
                .for_each(|from| _ = store(&mut writer, from));
        }
        assert_eq!(store(&mut writer, 2 * most + 512), Outcome::IndexFull);
        assert!(index.stats().slots[0].over_limit >= 3 * 512);
        (2 * most, (index, writer))
    });
}

#[test]
fn blocks_that_await_parents() {
    measure("index::blocks_that_await_parents", 256, || {
        let (index, mut writer) = limited(BLOCKS);
        let store = |writer: &mut RankWriter, at: u64| {
            let parent = Some(EngineHash(mix(at + (1 << 50))));
            writer.apply(&KvEvent::Stored {
                parent,
                blocks: blocks(at, 1),
                tier: Tier::Disk,
            })
        };
        (0..AWAITING).for_each(|at| assert_eq!(store(&mut writer, at), Outcome::ParentAwaited));
        assert_eq!(store(&mut writer, AWAITING), Outcome::TooManyWaiting);
        assert_eq!(index.stats().total.waiting, AWAITING);
        (AWAITING, (index, writer))
    });
}
