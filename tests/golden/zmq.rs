//! Decoding and conversion of event batches.

use serde::Deserialize;
use serde_json::{Value, json};
use warmroute_core::block::{EngineHash, StorageTier};
use warmroute_core::index::KvEvent;
use warmroute_core::worker::BlockSize;
use warmroute_engines::kv_events::wire::{
    self, AttentionKind, BlockOwnership, EngineEvent, EventAdapter, EventBatch, EventOrigin,
    ExtraKey, StorageLocality, StorageMedium, StoredEvent,
};
use warmroute_engines::kv_events::{ConvertedEvent, EventNormalizer, MediaTokens};

use super::frame::{CaseCheck, CheckReport, GoldenDeviation, run_cases};

/// Event field of the reference that this router does not keep.
const NOT_KEPT: [&str; 1] = ["session_id"];

const DEVIATIONS: &[GoldenDeviation] = &[GoldenDeviation {
    case: "block_size mismatch: stored with no blocks",
    at: "batch 0, event 0",
    ours: r#"{"event":{"data":{"type":"stored","parent_block_hash":null,"blocks":[
        {"block_hash":"0xbc51e9c7e72f4789","local_hash":"0xcb38e4d7fb2dca5c"},
        {"block_hash":"0x0000000000000001","local_hash":"0xe8d3ec39b907b74c"}]},"dp_rank":0,"event_id":0,
        "storage_tier":"Device"}}"#,
    theirs: r#"{"event":{"data":{"blocks":[],"parent_block_hash":null,"type":"stored"},"dp_rank":0,"event_id":0,
        "storage_tier":"Device"}}"#,
    reason: "an engine block is two blocks of this router, and a store without blocks would make the whole cache unusable",
}];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ZmqCase {
    description: String,
    batches: Vec<BatchCase>,
    kv_block_size: u32,
    listener_dp_rank: u32,
    image_token_id: Option<u32>,
    video_token_id: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BatchCase {
    payload_hex: String,
    output: ZmqOutput,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, untagged)]
enum ZmqOutput {
    Refused {
        #[serde(rename = "decode_error")]
        _decode_error: String,
    },
    Decoded(DecodedBatch),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DecodedBatch {
    timestamp: f64,
    batch_dp_rank: Option<u32>,
    effective_dp_rank: u32,
    events: Vec<EventCase>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EventCase {
    decoded: Value,
    result: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MediaCase {
    mm_objects: Vec<ObjectCase>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ObjectCase {
    mm_hash: u64,
    /// The position inside the block is not part of the hash.
    #[serde(rename = "offsets")]
    _offsets: Vec<(u32, u32)>,
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect()
}

fn hex(number: u64) -> Value {
    json!(format!("{number:#018x}"))
}

pub(crate) fn run(text: &str) -> CheckReport {
    run_cases(
        text,
        DEVIATIONS,
        |case: &ZmqCase| case.description.clone(),
        |case, comparisons| check(&case, comparisons),
    )
}

/// Returns whether an event is not indexed.
fn is_unusable(event: &EngineEvent) -> bool {
    match event {
        EngineEvent::Skipped(_) => true,
        EngineEvent::Stored(stored) => stored.adapter == EventAdapter::Unnamed,
        _ => false,
    }
}

fn check(case: &ZmqCase, check: &mut CaseCheck) {
    let size = BlockSize::new(case.kv_block_size).unwrap();
    let media = MediaTokens {
        image: case.image_token_id,
        video: case.video_token_id,
    };
    let mut normalizer = EventNormalizer::new(size, media);
    let mut next_id = 0u64;
    for (nth, batch) in case.batches.iter().enumerate() {
        let decoded = wire::decode(&bytes(&batch.payload_hex));
        let expected = match &batch.output {
            ZmqOutput::Refused { .. } => {
                // Only the unreadable event is skipped, where the reference refuses the batch.
                let is_refused = decoded
                    .as_ref()
                    .map_or(true, |batch| batch.events.iter().any(is_unusable));
                assert!(is_refused, "batch {nth}: {decoded:?}");
                continue;
            }
            ZmqOutput::Decoded(expected) => expected,
        };
        let decoded = decoded.unwrap_or_else(|error| panic!("batch {nth}: {error}"));
        check_batch(&decoded, expected, case.listener_dp_rank);
        for (at, (event, expected)) in decoded.events.iter().zip(&expected.events).enumerate() {
            let place = format!("batch {nth}, event {at}");
            check_decoded(&place, event, &expected.decoded);
            let ours = result(
                normalizer.convert(event),
                decoded.rank.unwrap_or(case.listener_dp_rank),
                &mut next_id,
            );
            check_media(&place, event, &expected.result);
            check.same(place, ours, comparable(&expected.result));
        }
    }
}

/// Asserts that the objects in the expected block hashes are those of the event.
fn check_media(place: &str, event: &EngineEvent, expected: &Value) {
    let EngineEvent::Stored(stored) = event else {
        return;
    };
    let media = stored
        .media
        .clone()
        .unwrap_or_else(|| extra_key_objects(stored));
    let blocks = expected["event"]["data"]["blocks"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    for (at, block) in blocks
        .iter()
        .enumerate()
        .filter(|(_, block)| !block["mm_hashes"].is_null())
    {
        let ours: Vec<Value> = media[at].iter().copied().map(hex).collect();
        assert_eq!(json!(ours), block["mm_hashes"], "{place}, block {at}");
    }
}

fn check_batch(batch: &EventBatch, expected: &DecodedBatch, listener: u32) {
    assert_eq!(batch.timestamp, expected.timestamp);
    assert_eq!(batch.rank, expected.batch_dp_rank);
    assert_eq!(batch.rank.unwrap_or(listener), expected.effective_dp_rank);
    assert_eq!(batch.events.len(), expected.events.len());
}

/// Panics on an unknown field.
fn only(value: &Value, fields: &[&str]) {
    for field in value.as_object().unwrap().keys() {
        assert!(
            fields.contains(&field.as_str()),
            "unknown field {field:?} in {value}"
        );
    }
}

/// Compares all fields of a decoded event that the reference prints. Strings are compared after
/// conversion to the enum of the field.
fn check_decoded(name: &str, event: &EngineEvent, expected: &Value) {
    let kind = match event {
        EngineEvent::Stored(_) => "BlockStored",
        EngineEvent::Removed { .. } => "BlockRemoved",
        EngineEvent::Cleared { .. } => "AllBlocksCleared",
        EngineEvent::Ignored => "Ignored",
        EngineEvent::Skipped(_) => "skipped",
    };
    for (field, expected) in expected.as_object().unwrap() {
        let matches = match field.as_str() {
            "type" => json!(kind) == *expected,
            "block_hashes" => {
                let hashes = expected
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|value| hash(name, value))
                    .collect::<Vec<_>>();
                match event {
                    EngineEvent::Stored(stored) => stored.hashes == hashes,
                    EngineEvent::Removed {
                        hashes: removed, ..
                    } => *removed == hashes,
                    _ => false,
                }
            }
            "ownership" if kind == "AllBlocksCleared" => {
                *event
                    == EngineEvent::Cleared {
                        ownership: BlockOwnership::from(expected.as_str().unwrap()),
                    }
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

fn is_of_origin(event: &EngineEvent, field: &str, expected: &Value) -> bool {
    let origin: &EventOrigin = match event {
        EngineEvent::Stored(stored) => &stored.origin,
        EngineEvent::Removed { origin, .. } => origin,
        _ => return false,
    };
    let text = || expected.as_str().unwrap();
    match field {
        "group_idx" => json!(origin.group) == *expected,
        "kv_cache_spec_kind" => origin.kind == Some(AttentionKind::from(text())),
        "medium" => origin.medium == StorageMedium::from(text()),
        "locality" => origin.locality == StorageLocality::from(text()),
        _ => origin.ownership == BlockOwnership::from(text()),
    }
}

/// Returns the hashes of multimodal objects in the extra keys of each block.
fn extra_key_objects(stored: &StoredEvent) -> Vec<Vec<u64>> {
    let hash = |key: &ExtraKey| match key {
        ExtraKey::Text(text) => text
            .strip_suffix(&"0".repeat(48))
            .and_then(|hex| u64::from_str_radix(hex, 16).ok()),
        _ => None,
    };
    stored
        .extra_keys
        .iter()
        .map(|keys| keys.iter().filter_map(hash).collect())
        .collect()
}

fn is_of_store(name: &str, event: &EngineEvent, field: &str, expected: &Value) -> bool {
    let EngineEvent::Stored(stored) = event else {
        return false;
    };
    let media = |blocks: &Value| {
        let objects = |block: &Value| {
            let block: Option<MediaCase> = serde_json::from_value(block.clone()).unwrap();
            block
                .into_iter()
                .flat_map(|block| block.mm_objects)
                .map(|object| object.mm_hash)
                .collect::<Vec<_>>()
        };
        blocks
            .as_array()
            .unwrap()
            .iter()
            .map(objects)
            .collect::<Vec<_>>()
    };
    match field {
        "parent_block_hash" => stored.parent == (!expected.is_null()).then(|| hash(name, expected)),
        "token_ids" => json!(stored.tokens.ids) == *expected,
        "is_eagle" => json!(stored.tokens.bigrams) == *expected,
        "block_size" => json!(stored.block_size) == *expected,
        "lora_name" => json!(stored.adapter.name()) == *expected,
        "cache_salt" => {
            let keys = stored.extra_keys.iter().take(1).flatten();
            let mut salts = keys.filter_map(|key| match key {
                ExtraKey::Text(text) => text.strip_prefix("dynamo-cache-salt:"),
                _ => None,
            });
            json!(stored.cache_salt.as_deref().or_else(|| salts.next())) == *expected
        }
        "block_mm_infos" => {
            *stored.media.as_ref().unwrap_or(&extra_key_objects(stored)) == media(expected)
        }
        other => NOT_KEPT.contains(&other),
    }
}

/// Returns the result in the format of the golden file. Converted events take the next id, and
/// filtered ones take none.
fn result(converted: ConvertedEvent, rank: u32, next_id: &mut u64) -> Value {
    let event = match converted {
        ConvertedEvent::Filtered(reason) | ConvertedEvent::GroupEvent(reason, _) => {
            return json!({ "filtered": reason.as_str() });
        }
        ConvertedEvent::Event(event) => event,
        ConvertedEvent::BlockSizeChanged(converted_again) => {
            return result(*converted_again, rank, next_id);
        }
        ConvertedEvent::IndexEvents(events, _) => panic!("no case has smaller blocks: {events:?}"),
    };
    let tier = |tier: StorageTier| match tier {
        StorageTier::Device => "Device",
        StorageTier::HostPinned => "HostPinned",
        StorageTier::Disk => "Disk",
        StorageTier::External => "External",
    };
    let (data, tier) = match event {
        KvEvent::Stored {
            parent,
            blocks,
            tier: of,
        } => {
            let blocks: Vec<Value> = blocks
                .iter()
                .map(|block| json!({ "block_hash": hex(block.engine.0), "local_hash": hex(block.local.0) }))
                .collect();
            (
                json!({ "type": "stored", "parent_block_hash": parent.map(|p| hex(p.0)), "blocks": blocks }),
                tier(of),
            )
        }
        KvEvent::Removed { blocks, tier: of } => {
            let blocks: Vec<Value> = blocks.iter().map(|block| hex(block.0)).collect();
            (
                json!({ "type": "removed", "block_hashes": blocks }),
                tier(of),
            )
        }
        KvEvent::Cleared => (json!({ "type": "cleared" }), "Device"),
        group => panic!("unexpected group event: {group:?}"),
    };
    let event = json!({ "event": { "data": data, "dp_rank": rank, "event_id": *next_id, "storage_tier": tier } });
    *next_id += 1;
    event
}

/// Removes fields from the golden result that this router does not keep: the session, and
/// multimodal hashes next to the block hash that includes them.
fn comparable(expected: &Value) -> Value {
    only(expected, &["event", "filtered"]);
    let mut expected = expected.clone();
    if let Some(event) = expected.get_mut("event").and_then(Value::as_object_mut) {
        event.remove("session_id");
        let data = event["data"].as_object_mut().unwrap();
        assert_eq!(
            data.remove("start_position").unwrap_or_default(),
            Value::Null,
            "start_position is always null"
        );
        for block in data
            .get_mut("blocks")
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            block.as_object_mut().unwrap().remove("mm_hashes");
        }
    }
    expected
}
