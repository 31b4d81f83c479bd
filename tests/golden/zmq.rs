//! Event batches, as they are decoded and converted.

use serde::Deserialize;
use serde_json::{Value, json};
use warmroute::block::EngineHash;
use warmroute::index::KvEvent;
use warmroute::kv_events::wire::{
    self, Batch, Event, ExtraKey, Kind, Locality, Medium, Origin, Ownership, Stored,
};
use warmroute::kv_events::{Converted, MediaTokens, Normalizer};
use warmroute::tier::Tier;
use warmroute::worker::BlockSize;

use super::frame::{Check, Deviation, Report, run_cases};

/// What the reference shows of events and we do not keep: the session, and what only its own index needs.
const NOT_KEPT: [&str; 1] = ["session_id"];

const DEVIATIONS: &[Deviation] = &[Deviation {
    case: "block_size mismatch: stored with no blocks",
    at: "batch 0, event 0",
    ours: r#"{"event":{"data":{"type":"stored","parent_block_hash":null,"blocks":[
        {"block_hash":"0xbc51e9c7e72f4789","local_hash":"0xcb38e4d7fb2dca5c"},
        {"block_hash":"0x0000000000000001","local_hash":"0xe8d3ec39b907b74c"}]},"dp_rank":0,"event_id":0,
        "storage_tier":"Device"}}"#,
    theirs: r#"{"event":{"data":{"blocks":[],"parent_block_hash":null,"type":"stored"},"dp_rank":0,"event_id":0,
        "storage_tier":"Device"}}"#,
    reason: "a block of the engine is two of ours, and a store without blocks would make the whole cache unusable",
}];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
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
    output: Output,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, untagged)]
enum Output {
    Refused {
        #[serde(rename = "decode_error")]
        _decode_error: String,
    },
    Decoded(Decoded),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Decoded {
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
    /// Where in the block it lies enters no hash.
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

pub(crate) fn run(text: &str) -> Report {
    run_cases(
        text,
        DEVIATIONS,
        |case: &Case| case.description.clone(),
        |case, comparisons| check(&case, comparisons),
    )
}

fn check(case: &Case, check: &mut Check) {
    let size = BlockSize::new(case.kv_block_size).unwrap();
    let media = MediaTokens {
        image: case.image_token_id,
        video: case.video_token_id,
    };
    let mut normalizer = Normalizer::new(size, media);
    let mut next_id = 0u64;
    for (nth, batch) in case.batches.iter().enumerate() {
        let decoded = wire::decode(&bytes(&batch.payload_hex));
        let expected = match &batch.output {
            Output::Refused { .. } => {
                assert!(decoded.is_err(), "batch {nth}: {decoded:?}");
                continue;
            }
            Output::Decoded(expected) => expected,
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

/// The objects that entered the block hashes are those of the event.
fn check_media(place: &str, event: &Event, expected: &Value) {
    let Event::Stored(stored) = event else { return };
    let media = stored.media.clone().unwrap_or_else(|| marked(stored));
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

fn check_batch(batch: &Batch, expected: &Decoded, listener: u32) {
    assert_eq!(batch.timestamp, expected.timestamp);
    assert_eq!(batch.rank, expected.batch_dp_rank);
    assert_eq!(batch.rank.unwrap_or(listener), expected.effective_dp_rank);
    assert_eq!(batch.events.len(), expected.events.len());
}

/// Fails on a field that no check knows.
fn only(value: &Value, fields: &[&str]) {
    for field in value.as_object().unwrap().keys() {
        assert!(
            fields.contains(&field.as_str()),
            "unknown field {field:?} in {value}"
        );
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
                let hashes = expected
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|value| hash(name, value))
                    .collect::<Vec<_>>();
                match event {
                    Event::Stored(stored) => stored.hashes == hashes,
                    Event::Removed {
                        hashes: removed, ..
                    } => *removed == hashes,
                    _ => false,
                }
            }
            "ownership" if kind == "AllBlocksCleared" => {
                *event
                    == Event::Cleared {
                        ownership: Ownership::from(expected.as_str().unwrap()),
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

fn is_of_store(name: &str, event: &Event, field: &str, expected: &Value) -> bool {
    let Event::Stored(stored) = event else {
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
fn result(converted: Converted, rank: u32, next_id: &mut u64) -> Value {
    let event = match converted {
        Converted::Filtered(reason) | Converted::Group(reason, _) => {
            return json!({ "filtered": reason.as_str() });
        }
        Converted::Event(event) => event,
        Converted::Resized(anew) => return result(*anew, rank, next_id),
        Converted::Regrouped(events, _) => panic!("no case has smaller blocks: {events:?}"),
    };
    let tier = |tier: Tier| match tier {
        Tier::Device => "Device",
        Tier::HostPinned => "HostPinned",
        Tier::Disk => "Disk",
        Tier::External => "External",
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
        assert_eq!(
            data.remove("start_position").unwrap_or_default(),
            Value::Null,
            "nobody names positions"
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
