//! Events as maps: fields by name, in any order; unknown fields are skipped.

use serde::de::{self, IgnoredAny, MapAccess};

use super::array::EventTag;
use super::event::{EngineEvent, EventOrigin, EventTokens, ExtraKey, StoredEvent};
use super::value::{self, BlockMedia, EnumText, SizedList, WireHash, WireHashes};

/// Name of a field.
#[derive(Clone, Copy)]
enum EventField {
    Type,
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    CacheSalt,
    ExtraKeys,
    Media,
    Group,
    Kind,
    Window,
    Locality,
    Ownership,
    Other,
}

impl From<&str> for EventField {
    fn from(name: &str) -> Self {
        match name {
            "type" => EventField::Type,
            "block_hashes" => EventField::Hashes,
            "parent_block_hash" => EventField::Parent,
            "token_ids" => EventField::Tokens,
            "block_size" => EventField::BlockSize,
            "lora_id" => EventField::LoraId,
            "medium" => EventField::Medium,
            "lora_name" => EventField::LoraName,
            "cache_salt" => EventField::CacheSalt,
            "extra_keys" => EventField::ExtraKeys,
            "block_mm_infos" => EventField::Media,
            "group_idx" => EventField::Group,
            "kv_cache_spec_kind" => EventField::Kind,
            "kv_cache_spec_sliding_window" => EventField::Window,
            "locality" => EventField::Locality,
            "ownership" => EventField::Ownership,
            _ => EventField::Other,
        }
    }
}

/// Fields decoded so far. The type field may come last.
#[derive(Default)]
struct EventFields {
    tag: Option<EventTag>,
    hashes: Option<WireHashes>,
    parent: Option<WireHash>,
    tokens: Option<EventTokens>,
    block_size: Option<u32>,
    lora: Option<String>,
    cache_salt: Option<String>,
    extra_keys: Vec<Vec<ExtraKey>>,
    media: Option<Vec<Vec<u64>>>,
    origin: EventOrigin,
}

pub(super) fn event<'de, A: MapAccess<'de>>(mut map: A) -> Result<EngineEvent, A::Error> {
    let mut fields = EventFields::default();
    while let Some(EnumText(field)) = map.next_key()? {
        read_field(&mut fields, field, &mut map)?;
    }
    build_event(fields)
}

fn read_field<'de, A: MapAccess<'de>>(
    fields: &mut EventFields,
    field: EventField,
    map: &mut A,
) -> Result<(), A::Error> {
    match field {
        EventField::Type => fields.tag = Some(map.next_value::<EnumText<_>>()?.0),
        EventField::Hashes => fields.hashes = Some(map.next_value()?),
        EventField::Parent => fields.parent = map.next_value()?,
        EventField::Tokens => fields.tokens = Some(map.next_value()?),
        EventField::BlockSize => fields.block_size = Some(map.next_value()?),
        EventField::LoraId => drop(map.next_value::<Option<u64>>()?),
        EventField::LoraName => fields.lora = map.next_value()?,
        EventField::CacheSalt => fields.cache_salt = map.next_value()?,
        EventField::ExtraKeys => fields.extra_keys = value::per_block(map.next_value()?),
        EventField::Media => {
            fields.media = map
                .next_value::<Option<SizedList<Option<BlockMedia>>>>()?
                .map(|l| value::media_hashes(l.0))
        }
        EventField::Group => fields.origin.group = map.next_value()?,
        EventField::Medium => fields.origin.medium = next_text(map)?.unwrap_or_default(),
        EventField::Kind => fields.origin.kind = next_text(map)?,
        EventField::Window => fields.origin.window = map.next_value()?,
        EventField::Locality => fields.origin.locality = next_text(map)?.unwrap_or_default(),
        EventField::Ownership => fields.origin.ownership = next_text(map)?.unwrap_or_default(),
        EventField::Other => drop(map.next_value::<IgnoredAny>()?),
    }
    Ok(())
}

fn next_text<'de, T: for<'a> From<&'a str>, A: MapAccess<'de>>(
    map: &mut A,
) -> Result<Option<T>, A::Error> {
    Ok(map
        .next_value::<Option<EnumText<T>>>()?
        .map(|EnumText(word)| word))
}

fn build_event<E: de::Error>(fields: EventFields) -> Result<EngineEvent, E> {
    let hashes = || E::missing_field("block_hashes");
    match fields.tag.ok_or_else(|| E::missing_field("type"))? {
        EventTag::Stored => Ok(EngineEvent::Stored(Box::new(StoredEvent {
            hashes: fields.hashes.ok_or_else(hashes)?.0,
            parent: fields.parent.map(|WireHash(hash)| hash),
            tokens: fields.tokens.ok_or_else(|| E::missing_field("token_ids"))?,
            block_size: fields
                .block_size
                .ok_or_else(|| E::missing_field("block_size"))?,
            lora_name: fields.lora,
            cache_salt: fields.cache_salt,
            extra_keys: fields.extra_keys,
            media: fields.media,
            keys_are_pairs: true,
            origin: fields.origin,
        }))),
        EventTag::Removed => Ok(EngineEvent::Removed {
            hashes: fields.hashes.ok_or_else(hashes)?.0,
            origin: fields.origin,
        }),
        EventTag::Cleared => Ok(EngineEvent::Cleared {
            ownership: fields.origin.ownership,
        }),
        EventTag::Ignored => Ok(EngineEvent::Ignored),
        EventTag::Unknown(tag) => Err(E::custom(format_args!("unknown event {tag:?}"))),
    }
}
