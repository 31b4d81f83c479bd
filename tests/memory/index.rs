//! Memory of the prefix index, per worker rank.

use std::sync::Arc;

use warmroute_core::block::{EngineHash, LocalHash, StorageTier};
use warmroute_core::index::{
    ApplyOutcome, BlockLimits, GroupNeed, KvEvent, PrefixIndex, RankWriter, StoredBlock,
};
use warmroute_core::worker::RankSlot;

use crate::{measure, mix};

/// Default of `index.max_blocks_per_tier`.
const BLOCKS: u64 = 1 << 20;
/// Maximum number of orphan blocks per rank.
const AWAITING: u64 = 1 << 18;
/// Tiers below the device.
const LOWER: [StorageTier; 3] = [
    StorageTier::HostPinned,
    StorageTier::Disk,
    StorageTier::External,
];

type IndexWithWriter = (Arc<PrefixIndex>, RankWriter);

fn limited(blocks: u64) -> IndexWithWriter {
    let index = PrefixIndex::new();
    let writer = index.create_writer(RankSlot(0));
    index.set_limits(RankSlot(0), BlockLimits::for_rank(None, blocks));
    (index, writer)
}

/// Returns blocks that differ from all other blocks.
fn blocks(from: u64, count: u64) -> Vec<StoredBlock> {
    let block = |at| StoredBlock {
        engine: EngineHash(mix(at)),
        local: LocalHash(mix(at + (1 << 40))),
    };
    (from..from + count).map(block).collect()
}

/// Stores prompts until a limit is reached.
fn store_until_full(writer: &mut RankWriter, from: u64, prompt: u64, tier: StorageTier) {
    let mut at = from;
    loop {
        let event = KvEvent::Stored {
            parent: None,
            blocks: blocks(at, prompt),
            tier,
        };
        match writer.apply(&event) {
            ApplyOutcome::Ok | ApplyOutcome::DuplicateStore => at += prompt,
            outcome => return assert_eq!(outcome, ApplyOutcome::IndexFull),
        }
    }
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn blocks_in_long_prompts() {
    measure("index::blocks_in_long_prompts", 80, || {
        let most = BLOCKS;
        let (index, mut writer) = limited(most);
        // Not a divisor of the limit, so that the last prompt is truncated.
        store_until_full(&mut writer, 0, 513, StorageTier::Device);
        assert_eq!(index.stats().total.device, most);
        (most, (index, writer))
    });
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn blocks_in_short_prompts() {
    measure("index::blocks_in_short_prompts", 512, || {
        let most = BLOCKS;
        let (index, mut writer) = limited(most);
        store_until_full(&mut writer, 0, 1, StorageTier::Device);
        assert_eq!(
            (index.stats().total.device, index.stats().runs),
            (most, most)
        );
        (most, (index, writer))
    });
}

/// Stores the maximum number of hashes in all tiers, each with an additional copy, after a gap.
#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn hashes_with_copies_after_gap() {
    measure("index::hashes_with_copies_after_gap", 768, || {
        let most = BLOCKS;
        let (index, mut writer) = limited(most);
        writer.apply(&KvEvent::Stored {
            parent: None,
            blocks: blocks(1 << 50, 1),
            tier: StorageTier::Device,
        });
        for tier in LOWER {
            writer.apply(&KvEvent::Stored {
                parent: None,
                blocks: blocks(1 << 50, 1),
                tier,
            });
        }
        writer.record_gap();
        store_until_full(&mut writer, 0, 1, StorageTier::Device);
        for tier in LOWER {
            store_until_full(&mut writer, 1 << 30, 1, tier);
        }
        // Stores additional copies until their limit is reached.
        store_until_full(&mut writer, 0, 64, StorageTier::Device);
        let mut at = 1 << 30;
        while writer.apply(&KvEvent::Stored {
            parent: None,
            blocks: blocks(at, 1),
            tier: StorageTier::HostPinned,
        }) == ApplyOutcome::DuplicateStore
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
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn hashes_of_one_block() {
    measure("index::hashes_of_one_block", 64, || {
        let most = BLOCKS;
        let (index, mut writer) = limited(most);
        for name in 0..3 * most {
            let blocks = vec![StoredBlock {
                engine: EngineHash(mix(name)),
                local: LocalHash(1),
            }];
            writer.apply(&KvEvent::Stored {
                parent: None,
                blocks,
                tier: StorageTier::Device,
            });
        }
        assert_eq!(index.stats().total.copies, 2 * most);
        (2 * most, (index, writer))
    });
}

/// Stores the maximum number of group entries, each with an additional copy, after a gap.
#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn shares_of_cache_groups() {
    measure("index::shares_of_cache_groups", 320, || {
        let most = BLOCKS;
        let (index, mut writer) = limited(most);
        let need = GroupNeed::Trailing {
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
        writer.record_gap();
        for _ in 0..3 {
            (0..2 * most + 512)
                .step_by(512)
                .for_each(|from| _ = store(&mut writer, from));
        }
        assert_eq!(store(&mut writer, 2 * most + 512), ApplyOutcome::IndexFull);
        assert!(index.stats().slots[0].over_limit >= 3 * 512);
        (2 * most, (index, writer))
    });
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn orphan_blocks() {
    measure("index::orphan_blocks", 256, || {
        let (index, mut writer) = limited(BLOCKS);
        let store = |writer: &mut RankWriter, at: u64| {
            let parent = Some(EngineHash(mix(at + (1 << 50))));
            writer.apply(&KvEvent::Stored {
                parent,
                blocks: blocks(at, 1),
                tier: StorageTier::Disk,
            })
        };
        (0..AWAITING)
            .for_each(|at| assert_eq!(store(&mut writer, at), ApplyOutcome::ParentAwaited));
        assert_eq!(store(&mut writer, AWAITING), ApplyOutcome::TooManyWaiting);
        assert_eq!(index.stats().total.waiting, AWAITING);
        (AWAITING, (index, writer))
    });
}
