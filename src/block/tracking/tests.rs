use rand::SeedableRng;
use rand::rngs::StdRng;

use super::*;
use crate::block::{ObjectHash, PromptObject, Salt};
use crate::worker::BlockSize;

const TOKENS: [u32; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];
const SCOPE: Scope<'static> = Scope {
    model: "llama",
    routing_group: "group",
};

fn key(id: &str, byte: u8) -> TrackingHash {
    TrackingHash::Keyed(Key::new(id, [byte; 32]))
}

fn names(family: &TrackingHash, content: &Content<'_>, scope: Scope<'_>) -> Arc<[SequenceHash]> {
    let hashes = BlockHashes::of_content(content, BlockSize::new(4).unwrap());
    family.sequences(content, &hashes, scope)
}

#[test]
fn the_public_names_are_the_sequence_hashes_themselves() {
    let salt = Salt::default();
    let content = Content::plain(&TOKENS, &salt);
    let hashes = BlockHashes::of_content(&content, BlockSize::new(4).unwrap());
    let names = TrackingHash::Public.sequences(&content, &hashes, SCOPE);
    assert!(std::ptr::eq(names.as_ref(), hashes.sequences()), "no copy");
}

#[test]
fn the_keyed_names_come_from_fields_framed_by_hand() {
    let salt = Salt {
        lora: None,
        cache: Some("tenant".into()),
    };
    let mut framed = b"dynamo.router.tracking-hash/keyed-xxh3-v1\0".to_vec();
    framed.extend(b"\x01\x02\0\0\0\0\0\0\0k1");
    framed.extend(b"\x02\x05\0\0\0\0\0\0\0llama");
    framed.extend(b"\x03\x05\0\0\0\0\0\0\0group");
    framed.extend(b"\x04\x04\0\0\0\0\0\0\0\x04\0\0\0");
    framed.extend(b"\x05\x01\x06\0\0\0\0\0\0\0tenant");
    framed.extend(b"\x06\0");
    framed.extend(b"\x07\x01\0\0\0\0\0\0\0\0");
    let digest = blake3::keyed_hash(&[7; 32], &framed);
    let seed = |at: usize| u64::from_le_bytes(digest.as_bytes()[at..at + 8].try_into().unwrap());
    let hash = |bytes: &[u8], seed| xxhash_rust::xxh3::xxh3_64_with_seed(bytes, seed);
    let bytes = |tokens: &[u32]| {
        tokens
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let first = hash(&bytes(&TOKENS[..4]), seed(0));
    let second = hash(&bytes(&TOKENS[4..8]), seed(0));
    let chained = hash(
        &[first.to_le_bytes(), second.to_le_bytes()].concat(),
        seed(8),
    );
    let names = names(&key("k1", 7), &Content::plain(&TOKENS, &salt), SCOPE);
    assert_eq!(*names, [SequenceHash(first), SequenceHash(chained)]);
}

#[test]
fn whatever_separates_prompts_separates_keyed_names() {
    let plain = Salt::default();
    let lora = Salt {
        lora: Some("a".into()),
        cache: None,
    };
    let cache = Salt {
        lora: None,
        cache: Some("a".into()),
    };
    let object = [PromptObject {
        object: ObjectHash(5),
        ranges: std::iter::once(1..2).collect(),
    }];
    let text = Content::plain(&TOKENS, &plain);
    let eagle = Content {
        windows: Windows::Eagle,
        ..text
    };
    let other = |model, routing_group| Scope {
        model,
        routing_group,
    };
    let k = key("k", 1);
    let all = [
        names(&k, &text, SCOPE),
        names(&TrackingHash::Public, &text, SCOPE),
        names(&key("l", 1), &text, SCOPE),
        names(&key("k", 2), &text, SCOPE),
        names(&k, &text, other("llam", "agroup")),
        names(&k, &text, other("llama", "")),
        names(&k, &Content::plain(&TOKENS, &lora), SCOPE),
        names(&k, &Content::plain(&TOKENS, &cache), SCOPE),
        names(&k, &eagle, SCOPE),
        names(
            &k,
            &Content {
                objects: &object,
                ..text
            },
            SCOPE,
        ),
    ];
    for (at, one) in all.iter().enumerate() {
        assert_eq!(one.len(), 2, "case {at}");
        assert!(
            all[..at]
                .iter()
                .all(|other| other[0] != one[0] && other[1] != one[1]),
            "case {at}"
        );
    }
    let empty = Salt {
        lora: Some(String::new()),
        cache: Some(String::new()),
    };
    assert_eq!(
        names(&k, &Content::plain(&TOKENS, &empty), SCOPE),
        all[0],
        "an empty salt is none"
    );
}

#[test]
fn unshared_names_are_fresh_each_time() {
    let mut rng = StdRng::seed_from_u64(1);
    let (one, other) = (unshared(100, &mut rng), unshared(100, &mut rng));
    let distinct: std::collections::BTreeSet<_> = one.iter().chain(other.iter()).collect();
    assert_eq!(distinct.len(), 200);
}

#[test]
fn a_key_does_not_show_its_secret() {
    let shown = format!("{:?}", key("k1", 213));
    assert!(shown.contains("k1") && !shown.contains("213"), "{shown}");
}
