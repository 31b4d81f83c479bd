use super::*;
use crate::block::LocalHash;
use crate::block::hash::{Windows, locals};
use crate::kv_events::wire::{Part, Tokens};

const DIGEST: &str = "0123456789abcdef00112233445566778899aabbccddeefffedcba9876543210";

fn normalizer() -> Normalizer {
    Normalizer::new(BlockSize::new(4).unwrap(), MediaTokens::default())
}

fn store(hash: u64, parent: Option<u64>) -> Stored {
    Stored {
        hashes: vec![EngineHash(hash)],
        parent: parent.map(EngineHash),
        tokens: Tokens {
            ids: vec![1, 2, 3, 4],
            bigrams: false,
        },
        block_size: 4,
        keys_are_pairs: true,
        ..Stored::default()
    }
}

fn with_keys(hash: u64, parent: Option<u64>, keys: &[ExtraKey]) -> Stored {
    Stored {
        extra_keys: vec![keys.to_vec()],
        ..store(hash, parent)
    }
}

fn text(text: &str) -> ExtraKey {
    ExtraKey::Text(text.to_owned())
}

fn local(normalizer: &mut Normalizer, stored: Stored) -> Result<LocalHash, Filtered> {
    match normalizer.convert(&Event::Stored(Box::new(stored))) {
        Converted::Event(KvEvent::Stored { blocks, .. }) => Ok(blocks[0].local),
        other @ (Converted::Event(_) | Converted::Regrouped(..) | Converted::Resized(_)) => {
            panic!("{other:?}")
        }
        Converted::Filtered(reason) | Converted::Group(reason, _) => Err(reason),
    }
}

fn expected(lora: Option<&str>, cache: Option<&str>, media: &[u64]) -> Result<LocalHash, Filtered> {
    let salt = Salt {
        lora: lora.map(str::to_owned),
        cache: cache.map(str::to_owned),
    };
    let media = [media.to_vec()];
    Ok(locals(
        &[1, 2, 3, 4],
        BlockSize::new(4).unwrap(),
        &salt,
        Windows::Plain,
        &media,
    )[0])
}

#[test]
fn the_first_block_names_the_salt_bare_or_marked() {
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
        let stored = Stored {
            keys_are_pairs,
            ..with_keys(1, None, keys)
        };
        assert_eq!(
            local(&mut normalizer(), stored),
            expected(None, salt, objects),
            "{keys:?}"
        );
    }
    let adapter = Stored {
        lora: Some("a".to_owned()),
        ..with_keys(1, None, &[text("a"), text("tenant")])
    };
    assert_eq!(
        local(&mut normalizer(), adapter),
        expected(Some("a"), Some("tenant"), &[])
    );
    let alone = Stored {
        lora: Some("a".to_owned()),
        ..with_keys(1, None, &[text("a")])
    };
    assert_eq!(
        local(&mut normalizer(), alone),
        expected(Some("a"), None, &[])
    );
}

#[test]
fn a_salt_follows_the_parent_chain_until_the_last_copy_leaves() {
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
    let removed = |hash| Event::Removed {
        hashes: vec![EngineHash(hash)],
        origin: Origin::default(),
    };
    normalizer.convert(&removed(2));
    assert_eq!(
        local(&mut normalizer, store(3, Some(2))),
        salted,
        "another copy of 2 is still there"
    );
    normalizer.convert(&removed(2));
    assert_eq!(
        local(&mut normalizer, store(5, Some(2))),
        expected(None, None, &[])
    );
    normalizer.convert(&Event::Cleared {
        ownership: Ownership::Framework,
    });
    assert_eq!(
        local(&mut normalizer, store(4, Some(1))),
        expected(None, None, &[])
    );
}

#[test]
fn a_salt_is_never_guessed() {
    let mut normalizer = normalizer();
    local(&mut normalizer, with_keys(1, None, &[text("one")])).unwrap();
    local(&mut normalizer, store(1, None)).unwrap();
    assert_eq!(
        local(&mut normalizer, store(2, Some(1))),
        Err(Filtered::AmbiguousSalt)
    );
    normalizer.convert(&Event::Removed {
        hashes: vec![EngineHash(1)],
        origin: Origin::default(),
    });
    assert_eq!(
        local(&mut normalizer, store(2, Some(1))),
        Err(Filtered::AmbiguousSalt)
    );
    normalizer.reset();
    assert_eq!(
        local(&mut normalizer, store(2, Some(1))),
        expected(None, None, &[])
    );
}

#[test]
fn a_salt_that_was_forgotten_is_known_again_when_it_is_told_again() {
    let mut normalizer = normalizer();
    let salted = expected(None, Some("tenant"), &[]);
    let first = || with_keys(1, None, &[text("tenant")]);
    assert_eq!(local(&mut normalizer, first()), salted);
    assert_eq!(local(&mut normalizer, store(2, Some(1))), salted);
    // The parent is taken for gone and was not: what follows it comes without a salt, and is dropped by the index.
    let forgotten = Forgotten {
        before: [1, 0, 0, 0],
        names: vec![(EngineHash(1), Tier::Device)],
    };
    assert_eq!(normalizer.forgotten(&forgotten), []);
    assert_eq!(
        local(&mut normalizer, store(2, Some(1))),
        salted,
        "its own is known"
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
fn storage_below_the_host_counts_whatever_group_it_came_from() {
    let partial = Origin {
        kind: Some(Kind::Partial(Part::Window)),
        group: Some(3),
        ..Origin::default()
    };
    for (tier, outcome) in [
        (Tier::Device, Err(Filtered::NonMainKind)),
        (Tier::HostPinned, Err(Filtered::NonMainKind)),
        (Tier::Disk, expected(None, None, &[])),
        (Tier::External, expected(None, None, &[])),
    ] {
        let origin = Origin {
            medium: Medium::Tier(tier),
            ..partial
        };
        assert_eq!(
            local(
                &mut normalizer(),
                Stored {
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
fn a_foreign_block_size_is_named() {
    let stored = Stored {
        block_size: 6,
        ..store(1, None)
    };
    assert_eq!(
        local(&mut normalizer(), stored),
        Err(Filtered::BlockSize { engine: 6 })
    );
}

fn grouped(group: u32, kind: Option<Kind>, window: Option<u32>) -> Origin {
    Origin {
        group: Some(group),
        kind,
        window,
        ..Origin::default()
    }
}

fn need(blocks: u32, stride: u32) -> GroupNeed {
    GroupNeed::Last {
        blocks,
        stride: NonZeroU32::new(stride).unwrap(),
    }
}

#[test]
fn a_group_beside_the_main_one_tells_what_it_needs() {
    let window = Some(Kind::Partial(Part::Window));
    let state = Some(Kind::Partial(Part::State));
    let other = Some(Kind::Partial(Part::Other));
    let all = GroupNeed::whole(NonZeroU32::MIN);
    // Blocks of four tokens: a window of nine sees eight tokens back, one of ten reaches into a third block.
    let cases = [
        (1, window, Some(9), 4, Filtered::NonMainKind, need(2, 1)),
        (1, window, Some(10), 4, Filtered::NonMainKind, need(3, 1)),
        (1, window, Some(1), 4, Filtered::NonMainKind, need(0, 1)),
        (1, window, Some(10), 8, Filtered::NonMainKind, need(2, 2)),
        (1, window, None, 4, Filtered::NonMainKind, all),
        (1, state, None, 12, Filtered::NonMainKind, need(1, 3)),
        (1, other, Some(64), 4, Filtered::NonMainKind, all),
        (1, Some(Kind::Unknown), None, 4, Filtered::UnknownKind, all),
        (7, None, None, 4, Filtered::UnlearnedGroup, all),
        (
            1,
            window,
            Some(9),
            6,
            Filtered::GroupBlockSize { engine: 6 },
            GroupNeed::Unknown,
        ),
        (
            1,
            window,
            Some(9),
            2,
            Filtered::GroupBlockSize { engine: 2 },
            GroupNeed::Unknown,
        ),
        (
            1,
            window,
            Some(9),
            0,
            Filtered::GroupBlockSize { engine: 0 },
            GroupNeed::Unknown,
        ),
    ];
    for (group, kind, window, block_size, reason, need) in cases {
        let origin = grouped(group, kind, window);
        let stored = Stored {
            origin,
            block_size,
            ..store(5, Some(1))
        };
        let share = KvEvent::GroupStored {
            group,
            need,
            blocks: vec![EngineHash(5)],
        };
        let event = Event::Stored(Box::new(stored));
        assert_eq!(
            normalizer().convert(&event),
            Converted::Group(reason, share),
            "{origin:?} {block_size}"
        );
    }
}

#[test]
fn a_group_explained_once_is_known_by_its_number() {
    let mut normalizer = normalizer();
    let stored = |origin| {
        Event::Stored(Box::new(Stored {
            origin,
            ..store(5, None)
        }))
    };
    let removed = |origin| Event::Removed {
        hashes: vec![EngineHash(5)],
        origin,
    };
    normalizer.convert(&stored(grouped(
        1,
        Some(Kind::Partial(Part::Window)),
        Some(9),
    )));
    let blocks = vec![EngineHash(5)];
    let share = KvEvent::GroupStored {
        group: 1,
        need: need(2, 1),
        blocks: blocks.clone(),
    };
    let bare = grouped(1, None, None);
    assert_eq!(
        normalizer.convert(&stored(bare)),
        Converted::Group(Filtered::NonMainGroup, share)
    );
    let gone = KvEvent::GroupRemoved { group: 1, blocks };
    assert_eq!(
        normalizer.convert(&removed(bare)),
        Converted::Group(Filtered::NonMainGroup, gone.clone())
    );
    let host = Origin {
        medium: Medium::Tier(Tier::HostPinned),
        ..bare
    };
    assert_eq!(
        normalizer.convert(&removed(host)),
        Converted::Filtered(Filtered::NonMainGroup),
        "groups lie on the device"
    );
    normalizer.reset();
    assert_eq!(
        normalizer.convert(&removed(bare)),
        Converted::Group(Filtered::UnlearnedGroup, gone)
    );
}

#[test]
fn of_several_groups_with_whole_prefixes_the_first_names_the_blocks() {
    let mut normalizer = normalizer();
    let main = Some(Kind::Main);
    let of = |group, kind| {
        Event::Stored(Box::new(Stored {
            origin: grouped(group, kind, None),
            ..store(5, None)
        }))
    };
    for kind in [main, None] {
        assert!(matches!(
            normalizer.convert(&of(2, kind)),
            Converted::Event(KvEvent::Stored { .. })
        ));
    }
    let share = KvEvent::GroupStored {
        group: 3,
        need: GroupNeed::whole(NonZeroU32::MIN),
        blocks: vec![EngineHash(5)],
    };
    for kind in [main, None] {
        let further = Converted::Group(Filtered::FurtherMainGroup, share.clone());
        assert_eq!(normalizer.convert(&of(3, kind)), further);
    }
}

#[test]
fn a_partial_list_below_the_host_is_not_paired_with_tokens_it_does_not_hold() {
    let origin = Origin {
        medium: Medium::Tier(Tier::Disk),
        ..grouped(1, Some(Kind::Partial(Part::Window)), Some(9))
    };
    let tokens = Tokens {
        ids: (0..12).collect(),
        bigrams: false,
    };
    let tail = Stored {
        origin,
        tokens,
        ..store(5, None)
    };
    assert_eq!(local(&mut normalizer(), tail), Err(Filtered::NonMainKind));
}
