use warmroute_core::block::{CacheSalt, ObjectHash, PromptObject};
use warmroute_core::worker::BlockSize;

use super::*;

const TOKENS: [u32; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];
const MODEL: &str = "llama";

fn key(id: &str, byte: u8) -> TrackingHash {
    TrackingHash::Keyed(TrackingKey::new(id, [byte; 32]))
}

fn hashes_of(
    family: &TrackingHash,
    content: &PromptContent<'_>,
    model: &str,
) -> Arc<[SequenceHash]> {
    let hashes = BlockHashes::from_content(content, BlockSize::new(4).unwrap());
    family.sequences(content, &hashes, model)
}

#[test]
fn public_tracking_hashes_equal_sequence_hashes() {
    let salt = CacheSalt::default();
    let content = PromptContent::text(&TOKENS, &salt);
    let hashes = BlockHashes::from_content(&content, BlockSize::new(4).unwrap());
    let tracked = TrackingHash::Public.sequences(&content, &hashes, MODEL);
    assert!(
        std::ptr::eq(tracked.as_ref(), hashes.sequences()),
        "no copy"
    );
}

#[test]
fn keyed_hashes_match_manual_framing() {
    let salt = CacheSalt {
        lora: None,
        cache: Some("tenant".into()),
    };
    let mut framed = b"dynamo.router.tracking-hash/keyed-xxh3-v1\0".to_vec();
    framed.extend(b"\x01\x02\0\0\0\0\0\0\0k1");
    framed.extend(b"\x02\x05\0\0\0\0\0\0\0llama");
    framed.extend(b"\x03\0\0\0\0\0\0\0\0");
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
    let tracked = hashes_of(&key("k1", 7), &PromptContent::text(&TOKENS, &salt), MODEL);
    assert_eq!(*tracked, [SequenceHash(first), SequenceHash(chained)]);
}

#[test]
fn keyed_hashes_differ_by_every_field() {
    let plain = CacheSalt::default();
    let lora = CacheSalt {
        lora: Some("a".into()),
        cache: None,
    };
    let cache = CacheSalt {
        lora: None,
        cache: Some("a".into()),
    };
    let object = [PromptObject {
        object: ObjectHash(5),
        ranges: std::iter::once(1..2).collect(),
    }];
    let text = PromptContent::text(&TOKENS, &plain);
    let eagle = PromptContent {
        windows: BlockWindows::Eagle,
        ..text
    };
    let k1 = key("k", 1);
    let all = [
        hashes_of(&k1, &text, MODEL),
        hashes_of(&TrackingHash::Public, &text, MODEL),
        hashes_of(&key("l", 1), &text, MODEL),
        hashes_of(&key("k", 2), &text, MODEL),
        hashes_of(&k1, &text, "llam"),
        hashes_of(&k1, &PromptContent::text(&TOKENS, &lora), MODEL),
        hashes_of(&k1, &PromptContent::text(&TOKENS, &cache), MODEL),
        hashes_of(&k1, &eagle, MODEL),
        hashes_of(
            &k1,
            &PromptContent {
                objects: &object,
                ..text
            },
            MODEL,
        ),
    ];
    for (case, hashes) in all.iter().enumerate() {
        assert_eq!(hashes.len(), 2, "case {case}");
        assert!(
            all[..case]
                .iter()
                .all(|other| other[0] != hashes[0] && other[1] != hashes[1]),
            "case {case}"
        );
    }
    let empty = CacheSalt {
        lora: Some(String::new()),
        cache: Some(String::new()),
    };
    assert_eq!(
        hashes_of(&k1, &PromptContent::text(&TOKENS, &empty), MODEL),
        all[0],
        "an empty salt equals no salt"
    );
}

#[test]
fn key_debug_hides_secret() {
    let shown = format!("{:?}", key("k1", 213));
    assert!(shown.contains("k1") && !shown.contains("213"), "{shown}");
}
