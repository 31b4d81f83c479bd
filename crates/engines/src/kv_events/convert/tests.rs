use super::*;
use crate::kv_events::wire::{EventTokens, PartialPrefix};
use warmroute_core::block::LocalHash;
use warmroute_core::block::hash::{BlockWindows, local_hashes};

const DIGEST: &str = "0123456789abcdef00112233445566778899aabbccddeefffedcba9876543210";

fn normalizer() -> EventNormalizer {
    EventNormalizer::new(BlockSize::new(4).unwrap(), MediaTokens::default())
}

fn store(hash: u64, parent: Option<u64>) -> StoredEvent {
    StoredEvent {
        hashes: vec![EngineHash(hash)],
        parent: parent.map(EngineHash),
        tokens: EventTokens {
            ids: vec![1, 2, 3, 4],
            bigrams: false,
        },
        block_size: 4,
        keys_are_pairs: true,
        ..StoredEvent::default()
    }
}

fn with_keys(hash: u64, parent: Option<u64>, keys: &[ExtraKey]) -> StoredEvent {
    StoredEvent {
        extra_keys: vec![keys.to_vec()],
        ..store(hash, parent)
    }
}

fn text(text: &str) -> ExtraKey {
    ExtraKey::Text(text.to_owned())
}

fn local(normalizer: &mut EventNormalizer, stored: StoredEvent) -> Result<LocalHash, FilterReason> {
    match normalizer.convert(&EngineEvent::Stored(Box::new(stored))) {
        ConvertedEvent::Event(KvEvent::Stored { blocks, .. }) => Ok(blocks[0].local),
        other @ (ConvertedEvent::Event(_)
        | ConvertedEvent::IndexEvents(..)
        | ConvertedEvent::BlockSizeChanged(_)) => {
            panic!("{other:?}")
        }
        ConvertedEvent::Filtered(reason) | ConvertedEvent::GroupEvent(reason, _) => Err(reason),
    }
}

fn expected(
    lora: Option<&str>,
    cache: Option<&str>,
    media: &[u64],
) -> Result<LocalHash, FilterReason> {
    let salt = CacheSalt {
        lora: lora.map(str::to_owned),
        cache: cache.map(str::to_owned),
    };
    let media = [media.to_vec()];
    Ok(local_hashes(
        &[1, 2, 3, 4],
        BlockSize::new(4).unwrap(),
        &salt,
        BlockWindows::Plain,
        &media,
    )[0])
}

#[test]
fn first_block_carries_bare_or_marked_salt() {
    let tail = format!("00000000000000ab{}", "0".repeat(48));
    type Case<'a> = (&'a [ExtraKey], bool, Option<&'a str>, &'a [u64]);
    let cases: [Case<'_>; 8] = [
        (&[text("tenant")], true, Some("tenant"), &[]),
        (
            &[text("dynamo-cache-salt:tenant")],
            true,
            Some("tenant"),
            &[],
        ),
        (
            &[ExtraKey::Media("x".to_owned()), text("tenant")],
            true,
            Some("tenant"),
            &[media::identifier_hash("x").unwrap()],
        ),
        (&[text(DIGEST)], true, Some(DIGEST), &[]),
        (&[text(DIGEST)], false, None, &[]),
        (&[text("tenant")], false, Some("tenant"), &[]),
        (&[text(&tail)], true, None, &[0xab]),
        (&[ExtraKey::Other], true, None, &[]),
    ];
    for (keys, keys_are_pairs, salt, objects) in cases {
        let stored = StoredEvent {
            keys_are_pairs,
            ..with_keys(1, None, keys)
        };
        assert_eq!(
            local(&mut normalizer(), stored),
            expected(None, salt, objects),
            "{keys:?}"
        );
    }
    let adapter = StoredEvent {
        adapter: EventAdapter::Named("a".to_owned()),
        ..with_keys(1, None, &[text("a"), text("tenant")])
    };
    assert_eq!(
        local(&mut normalizer(), adapter),
        expected(Some("a"), Some("tenant"), &[])
    );
    let alone = StoredEvent {
        adapter: EventAdapter::Named("a".to_owned()),
        ..with_keys(1, None, &[text("a")])
    };
    assert_eq!(
        local(&mut normalizer(), alone),
        expected(Some("a"), None, &[])
    );
}

#[test]
fn salt_is_inherited_until_last_copy_leaves() {
    let mut normalizer = normalizer();
    let salted = expected(None, Some("tenant"), &[]);
    assert_eq!(
        local(&mut normalizer, with_keys(1, None, &[text("tenant")])),
        salted
    );
    assert_eq!(local(&mut normalizer, store(2, Some(1))), salted);
    assert_eq!(local(&mut normalizer, store(2, Some(1))), salted);
    assert_eq!(
        local(&mut normalizer, store(9, None)),
        expected(None, None, &[])
    );
    let removed = |hash| EngineEvent::Removed {
        hashes: vec![EngineHash(hash)],
        origin: EventOrigin::default(),
    };
    normalizer.convert(&removed(2));
    assert_eq!(
        local(&mut normalizer, store(3, Some(2))),
        salted,
        "another copy of block 2 is left"
    );
    normalizer.convert(&removed(2));
    assert_eq!(
        local(&mut normalizer, store(5, Some(2))),
        expected(None, None, &[])
    );
    normalizer.convert(&EngineEvent::Cleared {
        ownership: BlockOwnership::Framework,
    });
    assert_eq!(
        local(&mut normalizer, store(4, Some(1))),
        expected(None, None, &[])
    );
}

#[test]
fn ambiguous_salt_filters_the_event() {
    let mut normalizer = normalizer();
    local(&mut normalizer, with_keys(1, None, &[text("one")])).unwrap();
    local(&mut normalizer, store(1, None)).unwrap();
    assert_eq!(
        local(&mut normalizer, store(2, Some(1))),
        Err(FilterReason::AmbiguousSalt)
    );
    normalizer.convert(&EngineEvent::Removed {
        hashes: vec![EngineHash(1)],
        origin: EventOrigin::default(),
    });
    assert_eq!(
        local(&mut normalizer, store(2, Some(1))),
        Err(FilterReason::AmbiguousSalt)
    );
    normalizer.reset();
    assert_eq!(
        local(&mut normalizer, store(2, Some(1))),
        expected(None, None, &[])
    );
}

#[test]
fn purged_salt_is_recorded_again_from_event() {
    let mut normalizer = normalizer();
    let salted = expected(None, Some("tenant"), &[]);
    let first = || with_keys(1, None, &[text("tenant")]);
    assert_eq!(local(&mut normalizer, first()), salted);
    assert_eq!(local(&mut normalizer, store(2, Some(1))), salted);
    // The index purged the parent, but the engine still has it. Children of the parent have no
    // known salt, and the index drops them.
    let purged = PurgedBlocks {
        before_gap: [1, 0, 0, 0],
        blocks: vec![(EngineHash(1), StorageTier::Device)],
    };
    assert_eq!(normalizer.discard_blocks(&purged), []);
    assert_eq!(
        local(&mut normalizer, store(2, Some(1))),
        salted,
        "the salt of the block itself is known"
    );
    assert_eq!(
        local(&mut normalizer, store(3, Some(1))),
        expected(None, None, &[])
    );
    assert_eq!(
        local(&mut normalizer, store(4, Some(3))),
        expected(None, None, &[])
    );
    assert_eq!(local(&mut normalizer, first()), salted);
    for (block, parent) in [(3, 1), (4, 3), (2, 1)] {
        assert_eq!(
            local(&mut normalizer, store(block, Some(parent))),
            salted,
            "{block}"
        );
    }
}

#[test]
fn storage_below_host_counts_for_any_group() {
    let partial = EventOrigin {
        kind: Some(AttentionKind::Partial(PartialPrefix::Window)),
        group: Some(3),
        ..EventOrigin::default()
    };
    for (tier, outcome) in [
        (StorageTier::Device, Err(FilterReason::NonMainKind)),
        (StorageTier::HostPinned, Err(FilterReason::NonMainKind)),
        (StorageTier::Disk, expected(None, None, &[])),
        (StorageTier::External, expected(None, None, &[])),
    ] {
        let origin = EventOrigin {
            medium: StorageMedium::Tier(tier),
            ..partial
        };
        assert_eq!(
            local(
                &mut normalizer(),
                StoredEvent {
                    origin,
                    ..store(1, None)
                }
            ),
            outcome,
            "{tier:?}"
        );
    }
}

#[test]
fn incompatible_block_size_is_reported() {
    let stored = StoredEvent {
        block_size: 6,
        ..store(1, None)
    };
    assert_eq!(
        local(&mut normalizer(), stored),
        Err(FilterReason::BlockSize { engine: 6 })
    );
}

fn grouped(group: u32, kind: Option<AttentionKind>, window: Option<u32>) -> EventOrigin {
    EventOrigin {
        group: Some(group),
        kind,
        window,
        ..EventOrigin::default()
    }
}

fn need(blocks: u32, stride: u32) -> GroupNeed {
    GroupNeed::Trailing {
        blocks,
        stride: NonZeroU32::new(stride).unwrap(),
    }
}

#[test]
fn secondary_group_reports_its_reuse_need() {
    let window = Some(AttentionKind::Partial(PartialPrefix::Window));
    let state = Some(AttentionKind::Partial(PartialPrefix::State));
    let other = Some(AttentionKind::Partial(PartialPrefix::Other));
    let all = GroupNeed::full(NonZeroU32::MIN);
    // With blocks of four tokens, a window of nine covers eight earlier tokens. A window of ten
    // reaches into a third block.
    let unknown = Some(AttentionKind::Unknown);
    let other_kind = FilterReason::NonMainKind;
    let other_size = |engine| FilterReason::GroupBlockSize { engine };
    let cases = [
        (1, window, Some(9), 4, other_kind, need(2, 1)),
        (1, window, Some(10), 4, other_kind, need(3, 1)),
        (1, window, Some(1), 4, other_kind, need(0, 1)),
        (1, window, Some(10), 8, other_kind, need(2, 2)),
        (1, window, None, 4, other_kind, all),
        (1, state, None, 12, other_kind, need(1, 3)),
        (1, other, Some(64), 4, other_kind, all),
        (1, unknown, None, 4, FilterReason::UnknownKind, all),
        (7, None, None, 4, FilterReason::UnknownGroup, all),
        (1, window, Some(9), 6, other_size(6), GroupNeed::Unknown),
        (1, window, Some(9), 2, other_size(2), GroupNeed::Unknown),
        (1, window, Some(9), 0, other_size(0), GroupNeed::Unknown),
    ];
    for (group, kind, window, block_size, reason, need) in cases {
        let origin = grouped(group, kind, window);
        let stored = StoredEvent {
            origin,
            block_size,
            ..store(5, Some(1))
        };
        let group_stored = KvEvent::GroupStored {
            group,
            need,
            blocks: vec![EngineHash(5)],
        };
        let event = EngineEvent::Stored(Box::new(stored));
        assert_eq!(
            normalizer().convert(&event),
            ConvertedEvent::GroupEvent(reason, group_stored),
            "{origin:?} {block_size}"
        );
    }
}

#[test]
fn group_kind_is_remembered_by_number() {
    let mut normalizer = normalizer();
    let stored = |origin| {
        EngineEvent::Stored(Box::new(StoredEvent {
            origin,
            ..store(5, None)
        }))
    };
    let removed = |origin| EngineEvent::Removed {
        hashes: vec![EngineHash(5)],
        origin,
    };
    normalizer.convert(&stored(grouped(
        1,
        Some(AttentionKind::Partial(PartialPrefix::Window)),
        Some(9),
    )));
    let blocks = vec![EngineHash(5)];
    let group_stored = KvEvent::GroupStored {
        group: 1,
        need: need(2, 1),
        blocks: blocks.clone(),
    };
    let bare = grouped(1, None, None);
    assert_eq!(
        normalizer.convert(&stored(bare)),
        ConvertedEvent::GroupEvent(FilterReason::NonMainGroup, group_stored)
    );
    let group_removed = KvEvent::GroupRemoved { group: 1, blocks };
    assert_eq!(
        normalizer.convert(&removed(bare)),
        ConvertedEvent::GroupEvent(FilterReason::NonMainGroup, group_removed.clone())
    );
    let host = EventOrigin {
        medium: StorageMedium::Tier(StorageTier::HostPinned),
        ..bare
    };
    assert_eq!(
        normalizer.convert(&removed(host)),
        ConvertedEvent::Filtered(FilterReason::NonMainGroup),
        "only groups on the device are tracked"
    );
    normalizer.reset();
    assert_eq!(
        normalizer.convert(&removed(bare)),
        ConvertedEvent::GroupEvent(FilterReason::UnknownGroup, group_removed)
    );
}

#[test]
fn first_full_attention_group_is_the_main_one() {
    let mut normalizer = normalizer();
    let main = Some(AttentionKind::Main);
    let of = |group, kind| {
        EngineEvent::Stored(Box::new(StoredEvent {
            origin: grouped(group, kind, None),
            ..store(5, None)
        }))
    };
    for kind in [main, None] {
        assert!(matches!(
            normalizer.convert(&of(2, kind)),
            ConvertedEvent::Event(KvEvent::Stored { .. })
        ));
    }
    let group_stored = KvEvent::GroupStored {
        group: 3,
        need: GroupNeed::full(NonZeroU32::MIN),
        blocks: vec![EngineHash(5)],
    };
    for kind in [main, None] {
        let further =
            ConvertedEvent::GroupEvent(FilterReason::SecondaryMainGroup, group_stored.clone());
        assert_eq!(normalizer.convert(&of(3, kind)), further);
    }
}

#[test]
fn partial_store_below_host_is_filtered() {
    let origin = EventOrigin {
        medium: StorageMedium::Tier(StorageTier::Disk),
        ..grouped(
            1,
            Some(AttentionKind::Partial(PartialPrefix::Window)),
            Some(9),
        )
    };
    let tokens = EventTokens {
        ids: (0..12).collect(),
        bigrams: false,
    };
    let tail = StoredEvent {
        origin,
        tokens,
        ..store(5, None)
    };
    assert_eq!(
        local(&mut normalizer(), tail),
        Err(FilterReason::NonMainKind)
    );
}
