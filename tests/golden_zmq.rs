//! Event batches as the field's reference router decodes and converts them, and batches captured from a real engine.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use warmroute::block::{BlockHashes, EngineHash, Salt};
use warmroute::index::{KvEvent, Outcome, Overlaps, PrefixIndex};
use warmroute::kv_events::wire::{self, Batch, Event, ExtraKey, Kind, Locality, Medium, Origin, Ownership, Stored};
use warmroute::kv_events::{Converted, Filtered, MediaTokens, Normalizer};
use warmroute::tier::Tier;
use warmroute::worker::{BlockSize, Slot};

/// What the reference shows of events and we do not keep: the session, and what only its own index needs.
const NOT_KEPT: [&str; 1] = ["session_id"];

/// Cases in which we mean to differ from the reference, with the reason and what we do instead.
const DEVIATIONS: [(&str, &str, &str); 1] = [(
    "block_size mismatch: stored with no blocks",
    "a store without blocks would hide a misconfiguration that makes the whole cache unusable",
    "block_size_mismatch",
)];

fn read(path: impl AsRef<Path>) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path);
    serde_json::from_slice(&fs::read(&path).unwrap()).unwrap()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn hex(number: u64) -> Value {
    json!(format!("{number:#018x}"))
}

fn token(case: &Value, name: &str) -> Option<u32> {
    case[name].as_u64().map(|token| u32::try_from(token).unwrap())
}

#[test]
fn every_case_of_the_reference_gives_its_result() {
    let golden = read("golden/zmq_events.json");
    only(&golden, &["case_count", "cases", "notes", "source"]);
    assert_eq!(golden["case_count"], golden["cases"].as_array().unwrap().len());
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 65);
    println!("zmq_events.json: {} cases, all run", cases.len());
    for (name, reason, ours) in DEVIATIONS {
        println!("  differs on purpose: {name}: filtered as {ours}, because {reason}");
    }
    let mut deviations = DEVIATIONS.map(|(name, ..)| name).to_vec();
    for case in cases {
        only(
            case,
            &["description", "batches", "kv_block_size", "listener_dp_rank", "image_token_id", "video_token_id"],
        );
        let name = case["description"].as_str().unwrap();
        let size = BlockSize::new(token(case, "kv_block_size").unwrap()).unwrap();
        let media = MediaTokens { image: token(case, "image_token_id"), video: token(case, "video_token_id") };
        let mut normalizer = Normalizer::new(size, media);
        let mut next_id = 0u64;
        let deviation = DEVIATIONS.iter().find(|(deviating, ..)| *deviating == name);
        deviations.retain(|deviating| *deviating != name);
        for batch in case["batches"].as_array().unwrap() {
            only(batch, &["payload_hex", "output"]);
            let decoded = wire::decode(&bytes(batch["payload_hex"].as_str().unwrap()));
            let expected = &batch["output"];
            if expected.get("decode_error").is_some() {
                only(expected, &["decode_error"]);
                assert!(decoded.is_err(), "{name}: {decoded:?}");
                continue;
            }
            let decoded = decoded.unwrap_or_else(|error| panic!("{name}: {error}"));
            only(expected, &["batch_dp_rank", "effective_dp_rank", "events", "timestamp"]);
            check_batch(name, &decoded, expected, case);
            let rank = expected["effective_dp_rank"].as_u64().unwrap();
            for (event, expected) in decoded.events.iter().zip(expected["events"].as_array().unwrap()) {
                only(expected, &["decoded", "result"]);
                check_decoded(name, event, &expected["decoded"]);
                let result = result(normalizer.convert(event), rank, &mut next_id);
                let expected = comparable(&expected["result"]);
                match deviation {
                    Some((_, reason, ours)) => {
                        assert_eq!(result, json!({ "filtered": ours }), "{name}: {reason}");
                        assert_ne!(result, expected, "{name} is no deviation");
                    }
                    None => assert_eq!(result, expected, "{name}"),
                }
            }
        }
    }
    assert!(deviations.is_empty(), "no such cases: {deviations:?}");
}

fn check_batch(name: &str, batch: &Batch, expected: &Value, case: &Value) {
    assert_eq!(json!(batch.timestamp), expected["timestamp"], "{name}");
    assert_eq!(json!(batch.rank), expected["batch_dp_rank"], "{name}");
    let listener = token(case, "listener_dp_rank").unwrap();
    assert_eq!(json!(batch.rank.unwrap_or(listener)), expected["effective_dp_rank"], "{name}");
    assert_eq!(batch.events.len(), expected["events"].as_array().unwrap().len(), "{name}");
}

/// Fails on a field that no check knows.
fn only(value: &Value, fields: &[&str]) {
    for field in value.as_object().unwrap().keys() {
        assert!(fields.contains(&field.as_str()), "unknown field {field:?} in {value}");
    }
}

/// Compares everything the reference shows of a decoded event with what we read; words as we class them.
fn check_decoded(name: &str, event: &Event, expected: &Value) {
    let kind = match event {
        Event::Stored(_) => "BlockStored",
        Event::Removed { .. } => "BlockRemoved",
        Event::Cleared { .. } => "AllBlocksCleared",
        Event::Ignored => "Ignored",
    };
    for (field, expected) in expected.as_object().unwrap() {
        let matches = match field.as_str() {
            "type" => json!(kind) == *expected,
            "block_hashes" => {
                let hashes = expected.as_array().unwrap().iter().map(|value| hash(name, value)).collect::<Vec<_>>();
                match event {
                    Event::Stored(stored) => stored.hashes == hashes,
                    Event::Removed { hashes: removed, .. } => *removed == hashes,
                    _ => false,
                }
            }
            "ownership" if kind == "AllBlocksCleared" => {
                *event == Event::Cleared { ownership: Ownership::from(expected.as_str().unwrap()) }
            }
            "group_idx" | "kv_cache_spec_kind" | "medium" | "locality" | "ownership" => {
                is_of_origin(event, field, expected)
            }
            _ => is_of_store(name, event, field, expected),
        };
        assert!(matches, "{name}: {field} is {expected} in {event:?}");
    }
}

fn hash(name: &str, value: &Value) -> EngineHash {
    match (value.as_u64(), value.as_i64()) {
        (Some(hash), _) => EngineHash(hash),
        (None, Some(hash)) => EngineHash(hash.cast_unsigned()),
        _ => panic!("{name}: {value} is no hash"),
    }
}

fn is_of_origin(event: &Event, field: &str, expected: &Value) -> bool {
    let origin: &Origin = match event {
        Event::Stored(stored) => &stored.origin,
        Event::Removed { origin, .. } => origin,
        _ => return false,
    };
    let word = || expected.as_str().unwrap();
    match field {
        "group_idx" => json!(origin.group) == *expected,
        "kv_cache_spec_kind" => origin.kind == Some(Kind::from(word())),
        "medium" => origin.medium == Medium::from(word()),
        "locality" => origin.locality == Locality::from(word()),
        _ => origin.ownership == Ownership::from(word()),
    }
}

/// Objects that are named by marks in the extra keys.
fn marked(stored: &Stored) -> Vec<Vec<u64>> {
    let hash = |key: &ExtraKey| match key {
        ExtraKey::Text(text) => text.strip_suffix(&"0".repeat(48)).and_then(|hex| u64::from_str_radix(hex, 16).ok()),
        _ => None,
    };
    stored.extra_keys.iter().map(|keys| keys.iter().filter_map(hash).collect()).collect()
}

fn is_of_store(name: &str, event: &Event, field: &str, expected: &Value) -> bool {
    let Event::Stored(stored) = event else { return false };
    let media = |blocks: &Value| {
        let objects = |block: &Value| {
            let objects = block["mm_objects"].as_array().cloned().unwrap_or_default();
            objects.iter().map(|object| object["mm_hash"].as_u64().unwrap()).collect::<Vec<_>>()
        };
        blocks.as_array().unwrap().iter().map(objects).collect::<Vec<_>>()
    };
    match field {
        "parent_block_hash" => stored.parent == (!expected.is_null()).then(|| hash(name, expected)),
        "token_ids" => json!(stored.tokens.ids) == *expected,
        "is_eagle" => json!(stored.tokens.bigrams) == *expected,
        "block_size" => json!(stored.block_size) == *expected,
        "lora_name" => json!(stored.lora) == *expected,
        "cache_salt" => {
            let keys = stored.extra_keys.iter().take(1).flatten();
            let mut marked = keys.filter_map(|key| match key {
                ExtraKey::Text(text) => text.strip_prefix("dynamo-cache-salt:"),
                _ => None,
            });
            json!(stored.cache_salt.as_deref().or_else(|| marked.next())) == *expected
        }
        "block_mm_infos" => *stored.media.as_ref().unwrap_or(&marked(stored)) == media(expected),
        other => NOT_KEPT.contains(&other),
    }
}

/// Our result in the words of the golden file; an event that counts takes the next number, a filtered one takes none.
fn result(converted: Converted, rank: u64, next_id: &mut u64) -> Value {
    let event = match converted {
        Converted::Filtered(reason) | Converted::Group(reason, _) => return json!({ "filtered": reason.as_str() }),
        Converted::Event(event) => event,
    };
    let tier = |tier: Tier| match tier {
        Tier::Device => "Device",
        Tier::HostPinned => "HostPinned",
        Tier::Disk => "Disk",
        Tier::External => "External",
    };
    let (data, tier) = match event {
        KvEvent::Stored { parent, blocks, tier: of } => {
            let blocks: Vec<Value> = blocks
                .iter()
                .map(|block| json!({ "block_hash": hex(block.engine.0), "local_hash": hex(block.local.0) }))
                .collect();
            (json!({ "type": "stored", "parent_block_hash": parent.map(|p| hex(p.0)), "blocks": blocks }), tier(of))
        }
        KvEvent::Removed { blocks, tier: of } => {
            let blocks: Vec<Value> = blocks.iter().map(|block| hex(block.0)).collect();
            (json!({ "type": "removed", "block_hashes": blocks }), tier(of))
        }
        KvEvent::Cleared => (json!({ "type": "cleared" }), "Device"),
        group => panic!("{group:?} tells of no prefix"),
    };
    let event = json!({ "event": { "data": data, "dp_rank": rank, "event_id": *next_id, "storage_tier": tier } });
    *next_id += 1;
    event
}

/// The golden result without what we do not keep: the session, and multimodal hashes beside the block hash they entered.
fn comparable(expected: &Value) -> Value {
    only(expected, &["event", "filtered"]);
    let mut expected = expected.clone();
    if let Some(event) = expected.get_mut("event").and_then(Value::as_object_mut) {
        event.remove("session_id");
        let data = event["data"].as_object_mut().unwrap();
        assert_eq!(data.remove("start_position").unwrap_or_default(), Value::Null, "nobody names positions");
        for block in data.get_mut("blocks").and_then(Value::as_array_mut).into_iter().flatten() {
            block.as_object_mut().unwrap().remove("mm_hashes");
        }
    }
    expected
}

fn captures() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/kv_events");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Payloads of one capture, in the order of arrival.
fn payloads(capture: &Value) -> Vec<Vec<u8>> {
    let texts = |key: &str| capture[key].as_array().cloned().unwrap_or_default();
    let live = texts("frames").into_iter().map(|frames| frames[2].clone());
    let repeated = texts("replies").into_iter().map(|frames| frames[3].clone());
    live.chain(repeated).map(|hex| bytes(hex.as_str().unwrap())).filter(|payload| !payload.is_empty()).collect()
}

#[test]
fn every_captured_batch_converts() {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for file in captures() {
        let capture = read(&file);
        let size = u32::try_from(capture["block_size"].as_u64().unwrap()).unwrap();
        let mut normalizer = Normalizer::new(BlockSize::new(size).unwrap(), MediaTokens::default());
        for payload in payloads(&capture) {
            let batch = wire::decode(&payload).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            assert!(batch.rank.is_some());
            for event in &batch.events {
                let outcome = match (normalizer.convert(event), event) {
                    (Converted::Group(Filtered::NonMainKind, KvEvent::GroupStored { .. }), _) => "sliding window",
                    (Converted::Event(KvEvent::Stored { parent, blocks, tier }), Event::Stored(stored)) => {
                        let engine: Vec<_> = blocks.iter().map(|block| block.engine).collect();
                        assert_eq!((engine, parent, tier), (stored.hashes.clone(), stored.parent, Tier::Device));
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
    assert_eq!(adapters[0], plain, "the base model hashes alike on every engine");
    let variants = [plain, &salted[0], &salted[2], &adapters[2], &adapters[4], &locals("b02-lora-plus-salt")[0]];
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
    assert!(images[0].iter().zip(&images[1]).all(|(one, other)| one != other));
}

/// What a hybrid model's engine reused of each prompt of a captured session is what the index says before the prompt comes.
/// Only a reset that the engine does not announce before its next batch is seen late.
#[test]
fn the_reusable_prefix_of_a_hybrid_model_is_what_its_engine_reused() {
    let session = read("data/hybrid.json");
    let size = BlockSize::new(u32::try_from(session["block_size"].as_u64().unwrap()).unwrap()).unwrap();
    let mut normalizer = Normalizer::new(size, MediaTokens::default());
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    let mut full_attention = Vec::new();
    for request in session["requests"].as_array().unwrap() {
        let prompt: Vec<u32> =
            request["prompt"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let hashes = BlockHashes::of(&prompt, size, &Salt::default());
        let mut overlaps = Overlaps::new();
        index.overlaps(&hashes, &mut overlaps);
        let predicted = u64::from(overlaps.get(Slot(0)).device) * size.tokens() as u64;
        match request["scenario"].as_str().unwrap() {
            "d05-reset" => assert_eq!(predicted, 320, "nothing has told of the reset yet"),
            scenario => assert_eq!(json!(predicted), request["cached_tokens"], "{scenario}"),
        }
        for payload in request["payloads"].as_array().unwrap() {
            for event in &wire::decode(&bytes(payload.as_str().unwrap())).unwrap().events {
                match normalizer.convert(event) {
                    Converted::Event(event) => drop(writer.apply(&event)),
                    Converted::Group(_, share) => assert_eq!(writer.apply(&share), Outcome::Ok),
                    Converted::Filtered(reason) => panic!("{reason:?}"),
                }
            }
        }
        // The main group alone would promise more.
        index.overlaps(&BlockHashes::of(&prompt[..prompt.len().min(200)], size, &Salt::default()), &mut overlaps);
        full_attention.push((index.stats().total.device, overlaps.get(Slot(0)).device));
    }
    assert_eq!(full_attention, [(10, 0), (13, 6), (13, 6), (17, 1), (10, 0)]);
}
