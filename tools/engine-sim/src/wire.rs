//! KV events in both msgpack formats that vLLM has published: arrays (0.18, the first version with
//! extra keys) and maps (0.24 and later). The enclosing batch is an array in both.

use std::sync::Arc;

use serde::{Serialize, Serializer};

use super::cache::{CacheEvent, StoredBlocks};

/// Encoding of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum EventEncoding {
    /// `{"type": "BlockStored", ...}`, vLLM 0.24 and later.
    Map,
    /// `["BlockStored", ...]`, older versions.
    Array,
}

const MEDIUM: &str = "GPU";

type ExtraKeys = [Option<Vec<Arc<str>>>];

#[derive(Serialize)]
#[serde(tag = "type")]
enum MapEvent<'a> {
    BlockStored {
        block_hashes: &'a [u64],
        parent_block_hash: Option<u64>,
        token_ids: &'a [u32],
        block_size: usize,
        lora_id: Option<u32>,
        medium: &'static str,
        lora_name: Option<&'a str>,
        extra_keys: &'a ExtraKeys,
        group_idx: u32,
        kv_cache_spec_kind: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        session_id: Option<&'a str>,
        #[serde(skip_serializing_if = "<[_]>::is_empty")]
        lookahead_token_ids: &'a [Vec<u32>],
    },
    BlockRemoved {
        block_hashes: [u64; 1],
        medium: &'static str,
        group_idx: u32,
    },
    AllBlocksCleared,
}

impl<'a> MapEvent<'a> {
    fn of(event: &'a CacheEvent, block_size: usize) -> Self {
        match event {
            CacheEvent::Stored(stored) => Self::BlockStored {
                block_hashes: &stored.hashes,
                parent_block_hash: stored.parent,
                token_ids: &stored.tokens,
                block_size,
                lora_id: stored.lora.as_ref().map(|lora| lora.id),
                medium: MEDIUM,
                lora_name: stored.lora.as_ref().map(|lora| &*lora.name),
                extra_keys: &stored.extra_keys,
                group_idx: 0,
                kv_cache_spec_kind: "full_attention",
                session_id: stored.session.as_deref(),
                lookahead_token_ids: &stored.lookahead,
            },
            CacheEvent::Removed(hash) => Self::BlockRemoved {
                block_hashes: [*hash],
                medium: MEDIUM,
                group_idx: 0,
            },
            CacheEvent::Cleared => Self::AllBlocksCleared,
        }
    }
}

/// An event as an array. msgspec writes the tag first and then every field, whether set or not.
struct ArrayEvent<'a>(&'a CacheEvent, usize);

impl Serialize for ArrayEvent<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            CacheEvent::Stored(stored) => array_of(stored, self.1).serialize(serializer),
            CacheEvent::Removed(hash) => ("BlockRemoved", [hash], MEDIUM).serialize(serializer),
            CacheEvent::Cleared => ("AllBlocksCleared",).serialize(serializer),
        }
    }
}

fn array_of(stored: &StoredBlocks, block_size: usize) -> impl Serialize + '_ {
    (
        "BlockStored",
        &stored.hashes,
        stored.parent,
        &stored.tokens,
        block_size,
        stored.lora.as_ref().map(|lora| lora.id),
        MEDIUM,
        stored.lora.as_ref().map(|lora| &*lora.name),
        &stored.extra_keys,
    )
}

/// Encodes one batch as `[ts, events, rank]`.
pub(crate) fn encode(
    encoding: EventEncoding,
    ts: f64,
    events: &[CacheEvent],
    block_size: usize,
    rank: u32,
) -> Vec<u8> {
    let encoded = match encoding {
        EventEncoding::Map => {
            let events: Vec<_> = events
                .iter()
                .map(|event| MapEvent::of(event, block_size))
                .collect();
            rmp_serde::to_vec_named(&(ts, events, rank))
        }
        EventEncoding::Array => {
            let events: Vec<_> = events
                .iter()
                .map(|event| ArrayEvent(event, block_size))
                .collect();
            rmp_serde::to_vec(&(ts, events, rank))
        }
    };
    encoded.expect("numbers and strings always encode into memory")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::cache::LoraAdapter;
    use super::*;

    fn events() -> Vec<CacheEvent> {
        let stored = StoredBlocks {
            hashes: vec![u64::MAX, 7],
            parent: Some(3),
            tokens: vec![1, 2, 3, 151_000],
            lookahead: Vec::new(),
            extra_keys: vec![Some(vec![Arc::from("lora-x"), Arc::from("tenant")]), None],
            lora: Some(LoraAdapter {
                id: 1,
                name: Arc::from("lora-x"),
            }),
            session: Some(Arc::from("sess-1")),
        };
        vec![
            CacheEvent::Cleared,
            CacheEvent::Removed(5),
            CacheEvent::Stored(stored),
        ]
    }

    fn decoded(encoding: EventEncoding) -> Value {
        rmp_serde::from_slice(&encode(encoding, 1.5, &events(), 2, 4)).unwrap()
    }

    #[test]
    fn map_events_match_captured_field_order() {
        let batch = decoded(EventEncoding::Map);
        let expected = json!([1.5, [
            {"type": "AllBlocksCleared"},
            {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 0},
            {"type": "BlockStored", "block_hashes": [u64::MAX, 7], "parent_block_hash": 3,
             "token_ids": [1, 2, 3, 151_000], "block_size": 2, "lora_id": 1, "medium": "GPU", "lora_name": "lora-x",
             "extra_keys": [["lora-x", "tenant"], null], "group_idx": 0, "kv_cache_spec_kind": "full_attention",
             "session_id": "sess-1"},
        ], 4]);
        // Events are compared as text, because the order of the fields must match too.
        assert_eq!(batch.to_string(), expected.to_string());
    }

    #[test]
    fn array_events_have_tag_and_every_field() {
        let expected = json!([
            1.5,
            [
                ["AllBlocksCleared"],
                ["BlockRemoved", [5], "GPU"],
                [
                    "BlockStored",
                    [u64::MAX, 7],
                    3,
                    [1, 2, 3, 151_000],
                    2,
                    1,
                    "GPU",
                    "lora-x",
                    [["lora-x", "tenant"], null]
                ],
            ],
            4
        ]);
        assert_eq!(decoded(EventEncoding::Array), expected);
    }

    #[test]
    fn stored_event_bytes_match_captured_prefix() {
        let stored = StoredBlocks {
            hashes: vec![15_055_828_968_291_616_402],
            parent: None,
            tokens: vec![1000],
            lookahead: Vec::new(),
            extra_keys: vec![None],
            lora: None,
            session: None,
        };
        let bytes = encode(
            EventEncoding::Map,
            1_795_208_337.22,
            &[CacheEvent::Stored(stored)],
            1,
            0,
        );
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(&text[..4], "93cb");
        // fixarray(1), fixmap(11), "type", "BlockStored", "block_hashes", [u64], "parent_block_hash", nil.
        let captured = "918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfd0f10cad6e0ec692\
                        b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647391cd03e8aa626c6f636b5f73697a6501";
        assert_eq!(&text[20..20 + captured.len()], captured);
        assert!(text.ends_with("00"));
    }
}
