//! Event batches that were captured from a real engine. The tests check that they convert, that
//! different contents have different block hashes, and that overlaps in the index equal the blocks
//! that the engine reused.

mod play;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use warmroute_core::block::{BlockHashes, CacheSalt, StorageTier};
use warmroute_core::index::{ApplyOutcome, KvEvent, Overlaps, PrefixIndex};
use warmroute_core::worker::{BlockSize, RankSlot};
use warmroute_engines::kv_events::wire::{self, EngineEvent};
use warmroute_engines::kv_events::{ConvertedEvent, EventNormalizer, FilterReason, MediaTokens};

fn read(path: impl AsRef<Path>) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(path);
    serde_json::from_slice(&fs::read(&path).unwrap()).unwrap()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect()
}

fn captures() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/kv_events");
    let mut files: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files
}

/// Returns the payloads of one capture in the order of arrival.
fn payloads(capture: &Value) -> Vec<Vec<u8>> {
    let texts = |key: &str| capture[key].as_array().cloned().unwrap_or_default();
    let live = texts("frames").into_iter().map(|frames| frames[2].clone());
    let repeated = texts("replies").into_iter().map(|frames| frames[3].clone());
    live.chain(repeated)
        .map(|hex| bytes(hex.as_str().unwrap()))
        .filter(|payload| !payload.is_empty())
        .collect()
}

#[test]
fn every_captured_batch_converts() {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for file in captures() {
        let capture = read(&file);
        let size = u32::try_from(capture["block_size"].as_u64().unwrap()).unwrap();
        let mut normalizer =
            EventNormalizer::new(BlockSize::new(size).unwrap(), MediaTokens::default());
        for payload in payloads(&capture) {
            let batch = wire::decode(&payload)
                .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            assert!(batch.rank.is_some());
            for event in &batch.events {
                let outcome = match (normalizer.convert(event), event) {
                    (
                        ConvertedEvent::GroupEvent(
                            FilterReason::NonMainKind,
                            KvEvent::GroupStored { .. },
                        ),
                        _,
                    ) => "sliding window",
                    (
                        ConvertedEvent::Event(KvEvent::Stored {
                            parent,
                            blocks,
                            tier,
                        }),
                        EngineEvent::Stored(stored),
                    ) => {
                        let engine: Vec<_> = blocks.iter().map(|block| block.engine).collect();
                        assert_eq!(
                            (engine, parent, tier),
                            (stored.hashes.clone(), stored.parent, StorageTier::Device)
                        );
                        "stored"
                    }
                    (
                        ConvertedEvent::Event(KvEvent::Removed { .. }),
                        EngineEvent::Removed { .. },
                    ) => "removed",
                    (ConvertedEvent::Event(KvEvent::Cleared), EngineEvent::Cleared { .. }) => {
                        "cleared"
                    }
                    other => panic!("{}: {other:?}", file.display()),
                };
                *seen.entry(outcome).or_default() += 1;
            }
        }
    }
    assert_eq!(
        seen.keys().copied().collect::<Vec<_>>(),
        ["cleared", "removed", "sliding window", "stored"],
        "{seen:?}"
    );
}

/// Returns the local hashes of the stored blocks of one capture, event by event.
fn locals(name: &str) -> Vec<Vec<u64>> {
    let capture = read(format!("data/kv_events/{name}.json"));
    let mut normalizer = EventNormalizer::new(BlockSize::new(32).unwrap(), MediaTokens::default());
    let mut stored = Vec::new();
    for payload in payloads(&capture) {
        for event in &wire::decode(&payload).unwrap().events {
            if let ConvertedEvent::Event(KvEvent::Stored { blocks, .. }) = normalizer.convert(event)
            {
                stored.push(blocks.iter().map(|block| block.local.0).collect());
            }
        }
    }
    stored
}

#[test]
fn tenants_and_adapters_never_share_blocks() {
    // Capture a01 has a text without a salt. The first and third event of a05 have the same text
    // with the salts of tenants A and B.
    let plain = &locals("a01-first-and-shared-prefix")[0][..12];
    let salted = locals("a05-cache-salt");
    let adapters = locals("b01-base-then-lora");
    assert_eq!(
        adapters[0], plain,
        "the base model has the same hashes on every engine"
    );
    let variants = [
        plain,
        &salted[0],
        &salted[2],
        &adapters[2],
        &adapters[4],
        &locals("b02-lora-plus-salt")[0],
    ];
    for (at, one) in variants.iter().enumerate() {
        for other in &variants[at + 1..] {
            assert!(one.iter().zip(*other).all(|(one, other)| one != other));
        }
    }
    // The next turn of tenant A has no salt and continues A's chain of blocks. The same text in an
    // unsalted chain has another hash.
    assert_eq!(salted[1].len(), 1);
    assert_ne!(salted[1], salted[3]);
}

#[test]
fn different_images_never_share_blocks() {
    let images = locals("e02-image");
    // In both captures, the first block contains text and the beginning of the image, and the
    // placeholder tokens are equal.
    assert_eq!(images.len(), 2);
    assert!(
        images[0]
            .iter()
            .zip(&images[1])
            .all(|(one, other)| one != other)
    );
}

/// For each prompt of a captured session, the overlap in the index before the prompt equals the
/// blocks that the engine reused. A cache reset is the exception: the engine announces it only with
/// its next batch.
#[test]
fn hybrid_model_overlaps_match_engine_reuse() {
    let session = read("data/hybrid_model_session.json");
    let size =
        BlockSize::new(u32::try_from(session["block_size"].as_u64().unwrap()).unwrap()).unwrap();
    let mut normalizer = EventNormalizer::new(size, MediaTokens::default());
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(0));
    let mut full_attention = Vec::new();
    for request in session["requests"].as_array().unwrap() {
        let prompt: Vec<u32> = request["prompt"]
            .as_array()
            .unwrap()
            .iter()
            .map(|id| id.as_u64().unwrap() as u32)
            .collect();
        let hashes = BlockHashes::from_tokens(&prompt, size, &CacheSalt::default());
        let mut overlaps = Overlaps::new();
        index.query_overlaps(&hashes, &mut overlaps);
        let predicted = u64::from(overlaps.get(RankSlot(0)).device) * size.tokens() as u64;
        match request["scenario"].as_str().unwrap() {
            "d05-reset" => assert_eq!(predicted, 320, "the reset is not announced yet"),
            scenario => assert_eq!(json!(predicted), request["cached_tokens"], "{scenario}"),
        }
        for payload in request["payloads"].as_array().unwrap() {
            for event in &wire::decode(&bytes(payload.as_str().unwrap()))
                .unwrap()
                .events
            {
                match normalizer.convert(event) {
                    ConvertedEvent::Event(event) => drop(writer.apply(&event)),
                    ConvertedEvent::IndexEvents(events, _) => {
                        panic!("the block sizes are equal: {events:?}")
                    }
                    ConvertedEvent::GroupEvent(_, share) => {
                        assert_eq!(writer.apply(&share), ApplyOutcome::Ok)
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        // The full-attention group alone would predict a longer overlap.
        index.query_overlaps(
            &BlockHashes::from_tokens(
                &prompt[..prompt.len().min(200)],
                size,
                &CacheSalt::default(),
            ),
            &mut overlaps,
        );
        full_attention.push((index.stats().total.device, overlaps.get(RankSlot(0)).device));
    }
    assert_eq!(
        full_attention,
        [(10, 0), (13, 6), (13, 6), (17, 1), (10, 0)]
    );
}
