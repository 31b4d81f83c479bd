use proptest::prelude::*;
use serde_bytes::Bytes;
use serde_json::{Value, json};

use super::*;
use warmroute_core::block::{EngineHash, StorageTier};

fn pack(batch: &impl serde::Serialize) -> Vec<u8> {
    rmp_serde::to_vec(batch).unwrap()
}

fn stored(event: &EngineEvent) -> &StoredEvent {
    match event {
        EngineEvent::Stored(stored) => stored,
        other => panic!("{other:?}"),
    }
}

#[test]
fn byte_hash_uses_last_eight_bytes() {
    let digest: Vec<u8> = (0..32).collect();
    let event = (
        "BlockStored",
        [Bytes::new(&digest)],
        Some(Bytes::new(&digest[..8])),
        [1u32, 2],
        2u32,
    );
    let batch = decode(&pack(&(1.0, [event], Some(0)))).unwrap();
    let stored = stored(&batch.events[0]);
    assert_eq!(stored.hashes, [EngineHash(0x18191a1b_1c1d1e1f)]);
    assert_eq!(stored.parent, Some(EngineHash(0x0001_0203_0405_0607)));
    let short = (
        "BlockStored",
        [Bytes::new(&digest[..7])],
        None::<u64>,
        [1u32],
        1u32,
    );
    let batch = decode(&pack(&(1.0, [short], Some(0)))).unwrap();
    assert_eq!(
        batch.events,
        [EngineEvent::Skipped(SkippedEvent::Store("block_hashes"))]
    );
}

#[test]
fn batch_has_two_or_more_elements() {
    let none: [Value; 0] = [];
    let rank = |payload: Vec<u8>| decode(&payload).map(|batch| batch.rank).ok();
    assert_eq!(rank(pack(&(1, &none))), Some(None));
    assert_eq!(rank(pack(&(1, &none, None::<u32>))), Some(None));
    assert_eq!(rank(pack(&(1, &none, 7))), Some(Some(7)));
    assert_eq!(rank(pack(&(1, &none, -1))), None);
    assert_eq!(rank(pack(&(1, &none, 1u64 << 32))), None);
    assert_eq!(rank(pack(&(1, &none, 7, [8, 9], "x"))), Some(Some(7)));
    assert_eq!(
        decode(&pack(&(1, &none, 7, [8, 9], "x")))
            .unwrap()
            .unknown_fields,
        2
    );
    assert_eq!(rank(pack(&(1,))), None);
    assert_eq!(
        rank([pack(&(1, &none, 7)), vec![0xc1, 0xff]].concat()),
        Some(Some(7))
    );
}

#[test]
fn map_fields_are_unordered_and_unknown_are_skipped() {
    let event = json!({
        "future": { "nested": [1, { "deep": null }] }, "group_idx": 1, "token_ids": [[1, 2], [2, 3]], "block_size": 2,
        "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64, "medium": "DISK", "locality": null, "extra_keys": [["s", ["id", -3]], null],
        "block_hashes": [5], "lora_id": 3, "lora_name": "a", "session_id": "x", "ownership": "framework", "type": "BlockStored",
    });
    let batch = decode(&pack(&json!([1.5, [event], null]))).unwrap();
    let expected = StoredEvent {
        hashes: vec![EngineHash(5)],
        tokens: EventTokens {
            ids: vec![1, 2, 3],
            bigrams: true,
        },
        block_size: 2,
        adapter: EventAdapter::Named("a".to_owned()),
        extra_keys: vec![
            vec![
                ExtraKey::Text("s".to_owned()),
                ExtraKey::Media("id".to_owned()),
            ],
            vec![],
        ],
        keys_are_pairs: true,
        origin: EventOrigin {
            medium: StorageMedium::Tier(StorageTier::Disk),
            group: Some(1),
            kind: Some(AttentionKind::Partial(PartialPrefix::Window)),
            window: Some(64),
            ..EventOrigin::default()
        },
        ..StoredEvent::default()
    };
    assert_eq!(*stored(&batch.events[0]), expected);
}

#[test]
fn lookahead_extends_the_last_block() {
    let tokens = |lookahead: Value| {
        let event = json!({
            "type": "BlockStored", "block_hashes": [5, 6], "token_ids": [1, 2, 3, 4], "block_size": 2,
            "lookahead_token_ids": lookahead,
        });
        let batch = decode(&pack(&json!([1.5, [event], null]))).unwrap();
        assert_eq!(batch.unknown_fields, 0);
        stored(&batch.events[0]).tokens.clone()
    };
    let plain = EventTokens {
        ids: vec![1, 2, 3, 4],
        bigrams: false,
    };
    let extended = EventTokens {
        ids: vec![1, 2, 3, 4, 9],
        bigrams: true,
    };
    assert_eq!(tokens(json!([[3], [9]])), extended);
    assert_eq!(
        tokens(json!([[3, 4], [9, 8]])),
        extended,
        "two draft modules"
    );
    for absent in [json!(null), json!([]), json!([null, null]), json!([[], []])] {
        assert_eq!(tokens(absent), plain);
    }
}

#[test]
fn array_tail_is_read_by_position_or_type() {
    let full = EventOrigin {
        group: Some(2),
        kind: Some(AttentionKind::Main),
        ..EventOrigin::default()
    };
    let window = EventOrigin {
        window: Some(64),
        kind: Some(AttentionKind::Partial(PartialPrefix::Window)),
        ..full
    };
    let cases = [
        (json!([2, "sliding_window", 64]), window),
        (json!([2, "sliding_window_mla", 64, null]), window),
        (json!([2, "full_attention"]), full),
        (json!(["full_attention", 2]), full),
        (json!([2, "full_attention", null, null]), full),
        (
            json!([2, "full_attention", null, "LOCAL", "framework", "more", 7]),
            full,
        ),
        (
            json!([null, null, null, "REMOTE"]),
            EventOrigin {
                locality: StorageLocality::Remote,
                ..EventOrigin::default()
            },
        ),
        (
            json!([null, null, null, null, "kvcr"]),
            EventOrigin {
                ownership: BlockOwnership::Kvcr,
                ..EventOrigin::default()
            },
        ),
    ];
    for (tail, origin) in cases {
        let mut event = vec![json!("BlockRemoved"), json!([1]), json!("GPU")];
        event.extend(tail.as_array().unwrap().iter().cloned());
        let batch = decode(&pack(&json!([1, [event], 0]))).unwrap();
        assert_eq!(
            batch.events,
            [EngineEvent::Removed {
                hashes: vec![EngineHash(1)],
                origin
            }],
            "{tail}"
        );
    }
}

/// Decodes an event between two others, which must not be affected.
fn decode_between(event: &Value) -> EngineEvent {
    let around = json!(["BlockRemoved", [9], "GPU"]);
    let batch = decode(&pack(&json!([1.5, [around, event, around], 0]))).unwrap();
    assert_eq!(batch.rank, Some(0), "{event}");
    let [first, own, last] = &batch.events[..] else {
        panic!("{:?}", batch.events)
    };
    assert_eq!(first, last, "{event}");
    own.clone()
}

fn store_with(field: &str, value: Value) -> Value {
    let mut event =
        json!({ "type": "BlockStored", "block_hashes": [5], "token_ids": [1, 2], "block_size": 2 });
    event[field] = value;
    event
}

#[test]
fn unknown_and_unreadable_events_are_skipped_alone() {
    let unknown = |name: &str| SkippedEvent::UnknownType(name.to_owned());
    let cases = [
        (
            json!(["BlockMoved", [1], "GPU", {"to": 2}]),
            unknown("BlockMoved"),
        ),
        (
            json!({"type": "BlockPinned", "block_hashes": [1]}),
            unknown("BlockPinned"),
        ),
        (json!({"type": 7}), unknown("")),
        (json!([]), unknown("")),
        (json!(null), unknown("")),
        (
            store_with("block_hashes", json!(["sha"])),
            SkippedEvent::Store("block_hashes"),
        ),
        (
            store_with("token_ids", json!([1, "image"])),
            SkippedEvent::Store("token_ids"),
        ),
        (
            store_with("group_idx", json!(-1)),
            SkippedEvent::Store("group_idx"),
        ),
        (
            json!(["BlockStored", [1], null, [1, 2]]),
            SkippedEvent::Store("block_size"),
        ),
        (
            json!(["BlockRemoved", "all", "GPU"]),
            SkippedEvent::Removal("block_hashes"),
        ),
    ];
    for (event, expected) in cases {
        assert_eq!(
            decode_between(&event),
            EngineEvent::Skipped(expected),
            "{event}"
        );
    }
}

#[test]
fn events_with_unknown_fields_are_read() {
    let newer_store = json!([
        "BlockStored", [1], null, [1, 2], 2, null, "GPU", null, null, 0, -4, 1.5, [[3], [4]], {"x": 1}, true, 1, 2
    ]);
    let events = [
        newer_store,
        store_with("lookahead_token_ids", json!([[3]])),
        store_with("medium", json!(["GPU", 1])),
        json!([
            "BlockRemoved",
            [1],
            "GPU",
            0,
            "full_attention",
            null,
            null,
            null,
            [[7]],
            8
        ]),
        json!(["AllBlocksCleared", "framework", 1]),
    ];
    for event in events {
        assert!(
            !matches!(decode_between(&event), EngineEvent::Skipped(_)),
            "{event}"
        );
    }
}

#[test]
fn unknown_fields_are_counted() {
    let cases = [
        (
            json!({ "type": "BlockRemoved", "block_hashes": [5], "session_id": "x" }),
            0,
        ),
        (
            json!({ "type": "BlockRemoved", "block_hashes": [5], "reason": { "a": [1] }, "epoch": 3 }),
            2,
        ),
        (
            json!([
                "BlockRemoved",
                [1],
                "GPU",
                0,
                "full_attention",
                null,
                null,
                null,
                7
            ]),
            1,
        ),
        (json!(["BlockRemoved", [1], "GPU", 0, -1, 2.5, 64, 65]), 3),
        (json!(["AllBlocksCleared", null, "x", "y"]), 2),
    ];
    for (event, expected) in cases {
        let batch = decode(&pack(&json!([1, [event], 0]))).unwrap();
        assert_eq!(batch.unknown_fields, expected, "{event}");
    }
}

#[test]
fn adapter_without_name_is_not_the_base_model() {
    let cases = [
        (json!(null), json!(null), EventAdapter::Base),
        (json!(0), json!(null), EventAdapter::Base),
        (json!(3), json!(null), EventAdapter::Unnamed),
        (json!(3), json!(""), EventAdapter::Unnamed),
        (json!("hex"), json!(null), EventAdapter::Unnamed),
        (json!(3), json!("a"), EventAdapter::Named("a".to_owned())),
        (json!(null), json!("a"), EventAdapter::Named("a".to_owned())),
    ];
    for (id, name, expected) in cases {
        let array = json!(["BlockStored", [1], null, [1, 2], 2, id, "GPU", name]);
        let map = json!({ "type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2,
            "lora_id": id, "lora_name": name });
        for event in [array, map] {
            let batch = decode(&pack(&json!([1, [event], 0]))).unwrap();
            assert_eq!(stored(&batch.events[0]).adapter, expected, "{event}");
        }
    }
}

#[test]
fn length_reserves_no_memory_and_depth_is_bounded() {
    // A length of four billion tokens in a payload of a few bytes.
    let mut claims = vec![0x93, 0x01, 0x91, 0x95, 0xab];
    claims.extend(b"BlockStored");
    claims.extend([0x91, 0x01, 0xc0, 0xdd, 0xff, 0xff, 0xff, 0xff, 0x01]);
    assert!(decode(&claims).is_err());
    let mut deep = vec![0x93, 0x01, 0x91, 0x82];
    deep.extend(b"\xa1x");
    deep.extend([0x91; 100_000]);
    assert!(decode(&deep).is_err());
}

proptest! {
    #[test]
    fn decoding_never_panics(payload in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode(&payload);
    }

    #[test]
    fn decoding_damaged_batches_never_panics(damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let event = json!({ "type": "BlockStored", "block_hashes": [1, -2], "parent_block_hash": null, "block_size": 2,
            "token_ids": [1, 2, 300, 70000], "extra_keys": [["salt"], [["id", 3]]], "block_mm_infos": [null, { "mm_objects": [] }] });
        let array = json!(["BlockStored", [1], 2, [[1, 2]], 1, null, "GPU", { "cache_salt": "x" }, [["a"]], 1, "mamba", 3, null]);
        let mut payload = pack(&json!([1.5, [event, array, { "type": "Ignored" }], 0]));
        for (at, byte) in damage {
            let at = at.index(payload.len());
            payload[at] = byte;
        }
        let _ = decode(&payload);
    }
}

#[test]
fn enum_texts_match_the_field_classification() {
    let tiers = [
        (StorageTier::Device, vec!["", "GPU", "DEVICE"]),
        (
            StorageTier::HostPinned,
            vec!["CPU", "CPU_PINNED", "CPU_TIER1"],
        ),
        (
            StorageTier::Disk,
            vec!["CPU_TIER2", "DISK", "NVME", "STORAGE"],
        ),
        (
            StorageTier::External,
            vec!["EXTERNAL", "NETWORK", "REMOTE", "SHARED"],
        ),
    ];
    for (tier, words) in tiers {
        words.iter().for_each(|word| {
            assert_eq!(
                StorageMedium::from(*word),
                StorageMedium::Tier(tier),
                "{word}"
            )
        });
    }
    ["FS", "OBJ", "gpu", "Cpu"]
        .iter()
        .for_each(|word| assert_eq!(StorageMedium::from(*word), StorageMedium::Unknown, "{word}"));
    let kinds = [
        (
            AttentionKind::Main,
            vec!["full_attention", "mla_attention", "sink_full_attention"],
        ),
        (
            AttentionKind::Partial(PartialPrefix::Window),
            vec!["sliding_window", "sliding_window_mla"],
        ),
        (AttentionKind::Partial(PartialPrefix::State), vec!["mamba"]),
        (
            AttentionKind::Partial(PartialPrefix::Other),
            vec![
                "chunked_local_attention",
                "encoder_only_attention",
                "cross_attention",
            ],
        ),
        (AttentionKind::Unknown, vec!["", "Mamba", "next"]),
    ];
    for (kind, words) in kinds {
        words
            .iter()
            .for_each(|word| assert_eq!(AttentionKind::from(*word), kind, "{word}"));
    }
    assert_eq!(StorageLocality::from("LOCAL"), StorageLocality::Local);
    assert_eq!(StorageLocality::from("local"), StorageLocality::Remote);
    assert_eq!(BlockOwnership::from("framework"), BlockOwnership::Framework);
    assert_eq!(BlockOwnership::from("kvcr"), BlockOwnership::Kvcr);
    assert_eq!(BlockOwnership::from(""), BlockOwnership::Unknown);
}
