//! Event batches captured from a real engine: they decode, they convert, what must be apart stays apart, and what the index
//! makes of them is what the engine reused.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "captures/play.rs"]
mod play;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use warmroute::block::{BlockHashes, Salt};
use warmroute::index::{KvEvent, Outcome, Overlaps, PrefixIndex};
use warmroute::kv_events::wire::{self, Event};
use warmroute::kv_events::{Converted, Filtered, MediaTokens, Normalizer};
use warmroute::tier::Tier;
use warmroute::worker::{BlockSize, Slot};

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
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/kv_events");
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files
}

/// Payloads of one capture, in the order of arrival.
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
        let mut normalizer = Normalizer::new(BlockSize::new(size).unwrap(), MediaTokens::default());
        for payload in payloads(&capture) {
            let batch = wire::decode(&payload)
                .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            assert!(batch.rank.is_some());
            for event in &batch.events {
                let outcome = match (normalizer.convert(event), event) {
                    (Converted::Group(Filtered::NonMainKind, KvEvent::GroupStored { .. }), _) => {
                        "sliding window"
                    }
                    (
                        Converted::Event(KvEvent::Stored {
                            parent,
                            blocks,
                            tier,
                        }),
                        Event::Stored(stored),
                    ) => {
                        let engine: Vec<_> = blocks.iter().map(|block| block.engine).collect();
                        assert_eq!(
                            (engine, parent, tier),
                            (stored.hashes.clone(), stored.parent, Tier::Device)
                        );
                        "stored"
                    }
                    (Converted::Event(KvEvent::Removed { .. }), Event::Removed { .. }) => "removed",
                    (Converted::Event(KvEvent::Cleared), Event::Cleared { .. }) => "cleared",
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

/// Local hashes of the stored blocks of one capture, event by event.
fn locals(name: &str) -> Vec<Vec<u64>> {
    let capture = read(format!("data/kv_events/{name}.json"));
    let mut normalizer = Normalizer::new(BlockSize::new(32).unwrap(), MediaTokens::default());
    let mut stored = Vec::new();
    for payload in payloads(&capture) {
        for event in &wire::decode(&payload).unwrap().events {
            if let Converted::Event(KvEvent::Stored { blocks, .. }) = normalizer.convert(event) {
                stored.push(blocks.iter().map(|block| block.local.0).collect());
            }
        }
    }
    stored
}

#[test]
fn tenants_and_adapters_never_share_blocks_of_equal_text() {
    // The same text under no salt, tenant A and tenant B: a01, then the first and third event of a05.
    let plain = &locals("a01-first-and-shared-prefix")[0][..12];
    let salted = locals("a05-cache-salt");
    let adapters = locals("b01-base-then-lora");
    assert_eq!(
        adapters[0], plain,
        "the base model hashes alike on every engine"
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
    // Tenant A's next turn names no salt and hangs on A's chain; the same text in plain has another hash.
    assert_eq!(salted[1].len(), 1);
    assert_ne!(salted[1], salted[3]);
}

#[test]
fn different_images_never_share_blocks() {
    let images = locals("e02-image");
    // Block one holds text and the image's beginning in both; the placeholders are equal.
    assert_eq!(images.len(), 2);
    assert!(
        images[0]
            .iter()
            .zip(&images[1])
            .all(|(one, other)| one != other)
    );
}

/// What a hybrid model's engine reused of each prompt of a captured session is what the index says before the prompt comes.
/// Only a reset that the engine does not announce before its next batch is seen late.
#[test]
fn the_reusable_prefix_of_a_hybrid_model_is_what_its_engine_reused() {
    let session = read("data/hybrid.json");
    let size =
        BlockSize::new(u32::try_from(session["block_size"].as_u64().unwrap()).unwrap()).unwrap();
    let mut normalizer = Normalizer::new(size, MediaTokens::default());
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    let mut full_attention = Vec::new();
    for request in session["requests"].as_array().unwrap() {
        let prompt: Vec<u32> = request["prompt"]
            .as_array()
            .unwrap()
            .iter()
            .map(|id| id.as_u64().unwrap() as u32)
            .collect();
        let hashes = BlockHashes::of(&prompt, size, &Salt::default());
        let mut overlaps = Overlaps::new();
        index.overlaps(&hashes, &mut overlaps);
        let predicted = u64::from(overlaps.get(Slot(0)).device) * size.tokens() as u64;
        match request["scenario"].as_str().unwrap() {
            "d05-reset" => assert_eq!(predicted, 320, "nothing has told of the reset yet"),
            scenario => assert_eq!(json!(predicted), request["cached_tokens"], "{scenario}"),
        }
        for payload in request["payloads"].as_array().unwrap() {
            for event in &wire::decode(&bytes(payload.as_str().unwrap()))
                .unwrap()
                .events
            {
                match normalizer.convert(event) {
                    Converted::Event(event) => drop(writer.apply(&event)),
                    Converted::Regrouped(events, _) => panic!("the sizes are the same: {events:?}"),
                    Converted::Group(_, share) => assert_eq!(writer.apply(&share), Outcome::Ok),
                    other => panic!("{other:?}"),
                }
            }
        }
        // The main group alone would promise more.
        index.overlaps(
            &BlockHashes::of(&prompt[..prompt.len().min(200)], size, &Salt::default()),
            &mut overlaps,
        );
        full_attention.push((index.stats().total.device, overlaps.get(Slot(0)).device));
    }
    assert_eq!(
        full_attention,
        [(10, 0), (13, 6), (13, 6), (17, 1), (10, 0)]
    );
}
