use super::*;
use crate::block::LocalHash;
use crate::kv_events::wire::{Part, Tokens};

const DIGEST: &str = "0123456789abcdef00112233445566778899aabbccddeefffedcba9876543210";

fn normalizer() -> Normalizer {
    Normalizer::new(BlockSize::new(4).unwrap(), MediaTokens::default())
}

fn store(hash: u64, parent: Option<u64>) -> Stored {
    Stored {
        hashes: vec![EngineHash(hash)],
        parent: parent.map(EngineHash),
        tokens: Tokens { ids: vec![1, 2, 3, 4], bigrams: false },
        block_size: 4,
        keys_are_pairs: true,
        ..Stored::default()
    }
}

fn with_keys(hash: u64, parent: Option<u64>, keys: &[ExtraKey]) -> Stored {
    Stored { extra_keys: vec![keys.to_vec()], ..store(hash, parent) }
}

fn text(text: &str) -> ExtraKey {
    ExtraKey::Text(text.to_owned())
}

fn local(normalizer: &mut Normalizer, stored: Stored) -> Result<LocalHash, Filtered> {
    match normalizer.convert(&Event::Stored(Box::new(stored))) {
        Converted::Event(KvEvent::Stored { blocks, .. }) => Ok(blocks[0].local),
        Converted::Event(other) => panic!("{other:?}"),
        Converted::Filtered(reason) | Converted::Group(reason, _) => Err(reason),
    }
}

fn expected(lora: Option<&str>, cache: Option<&str>, media: &[u64]) -> Result<LocalHash, Filtered> {
    let salt = Salt { lora: lora.map(str::to_owned), cache: cache.map(str::to_owned) };
    let media = [media.to_vec()];
    Ok(locals(&[1, 2, 3, 4], BlockSize::new(4).unwrap(), &salt, Windows::Plain, &media)[0])
}

#[test]
fn the_first_block_names_the_salt_bare_or_marked() {
    let tail = format!("00000000000000ab{}", "0".repeat(48));
    type Case<'a> = (&'a [ExtraKey], bool, Option<&'a str>, &'a [u64]);
    let cases: [Case<'_>; 8] = [
        (&[text("tenant")], true, Some("tenant"), &[]),
        (&[text("dynamo-cache-salt:tenant")], true, Some("tenant"), &[]),
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
        let stored = Stored { keys_are_pairs, ..with_keys(1, None, keys) };
        assert_eq!(local(&mut normalizer(), stored), expected(None, salt, objects), "{keys:?}");
    }
    let adapter = Stored { lora: Some("a".to_owned()), ..with_keys(1, None, &[text("a"), text("tenant")]) };
    assert_eq!(local(&mut normalizer(), adapter), expected(Some("a"), Some("tenant"), &[]));
    let alone = Stored { lora: Some("a".to_owned()), ..with_keys(1, None, &[text("a")]) };
    assert_eq!(local(&mut normalizer(), alone), expected(Some("a"), None, &[]));
}

#[test]
fn a_salt_follows_the_parent_chain_until_the_last_copy_leaves() {
    let mut normalizer = normalizer();
    let salted = expected(None, Some("tenant"), &[]);
    assert_eq!(local(&mut normalizer, with_keys(1, None, &[text("tenant")])), salted);
    assert_eq!(local(&mut normalizer, store(2, Some(1))), salted);
    assert_eq!(local(&mut normalizer, store(2, Some(1))), salted);
    assert_eq!(local(&mut normalizer, store(9, None)), expected(None, None, &[]));
    let removed = |hash| Event::Removed { hashes: vec![EngineHash(hash)], origin: Origin::default() };
    normalizer.convert(&removed(2));
    assert_eq!(local(&mut normalizer, store(3, Some(2))), salted, "another copy of 2 is still there");
    normalizer.convert(&removed(2));
    assert_eq!(local(&mut normalizer, store(3, Some(2))), expected(None, None, &[]));
    normalizer.convert(&Event::Cleared { ownership: Ownership::Framework });
    assert_eq!(local(&mut normalizer, store(4, Some(1))), expected(None, None, &[]));
}

#[test]
fn a_salt_is_never_guessed() {
    let mut normalizer = normalizer();
    local(&mut normalizer, with_keys(1, None, &[text("one")])).unwrap();
    local(&mut normalizer, store(1, None)).unwrap();
    assert_eq!(local(&mut normalizer, store(2, Some(1))), Err(Filtered::AmbiguousSalt));
    normalizer.convert(&Event::Removed { hashes: vec![EngineHash(1)], origin: Origin::default() });
    assert_eq!(local(&mut normalizer, store(2, Some(1))), Err(Filtered::AmbiguousSalt));
    normalizer.reset();
    assert_eq!(local(&mut normalizer, store(2, Some(1))), expected(None, None, &[]));
}

#[test]
fn storage_below_the_host_counts_whatever_group_it_came_from() {
    let partial = Origin { kind: Some(Kind::Partial(Part::Window)), group: Some(3), ..Origin::default() };
    for (tier, outcome) in [
        (Tier::Device, Err(Filtered::NonMainKind)),
        (Tier::HostPinned, Err(Filtered::NonMainKind)),
        (Tier::Disk, expected(None, None, &[])),
        (Tier::External, expected(None, None, &[])),
    ] {
        let origin = Origin { medium: Medium::Tier(tier), ..partial };
        assert_eq!(local(&mut normalizer(), Stored { origin, ..store(1, None) }), outcome, "{tier:?}");
    }
}

#[test]
fn a_foreign_block_size_is_named() {
    let stored = Stored { block_size: 16, ..store(1, None) };
    assert_eq!(local(&mut normalizer(), stored), Err(Filtered::BlockSize { engine: 16 }));
}
