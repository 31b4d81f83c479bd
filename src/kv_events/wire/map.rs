//! Events as maps: fields by name, in any order, unknown names skipped.

use serde::de::{self, IgnoredAny, MapAccess};

use super::array::Tag;
use super::value::{self, BlockMedia, Hash, Hashes, List, Word};
use super::{Event, ExtraKey, Origin, Stored, Tokens};

/// A field's name.
#[derive(Clone, Copy)]
enum Field {
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

impl From<&str> for Field {
    fn from(name: &str) -> Self {
        match name {
            "type" => Field::Type,
            "block_hashes" => Field::Hashes,
            "parent_block_hash" => Field::Parent,
            "token_ids" => Field::Tokens,
            "block_size" => Field::BlockSize,
            "lora_id" => Field::LoraId,
            "medium" => Field::Medium,
            "lora_name" => Field::LoraName,
            "cache_salt" => Field::CacheSalt,
            "extra_keys" => Field::ExtraKeys,
            "block_mm_infos" => Field::Media,
            "group_idx" => Field::Group,
            "kv_cache_spec_kind" => Field::Kind,
            "kv_cache_spec_sliding_window" => Field::Window,
            "locality" => Field::Locality,
            "ownership" => Field::Ownership,
            _ => Field::Other,
        }
    }
}

/// What was read so far; the type may come last.
#[derive(Default)]
struct Fields {
    tag: Option<Tag>,
    hashes: Option<Hashes>,
    parent: Option<Hash>,
    tokens: Option<Tokens>,
    block_size: Option<u32>,
    lora: Option<String>,
    cache_salt: Option<String>,
    extra_keys: Vec<Vec<ExtraKey>>,
    media: Option<Vec<Vec<u64>>>,
    origin: Origin,
}

pub(super) fn event<'de, A: MapAccess<'de>>(mut map: A) -> Result<Event, A::Error> {
    let mut fields = Fields::default();
    while let Some(Word(field)) = map.next_key()? {
        read(&mut fields, field, &mut map)?;
    }
    finish(fields)
}

fn read<'de, A: MapAccess<'de>>(
    fields: &mut Fields,
    field: Field,
    map: &mut A,
) -> Result<(), A::Error> {
    match field {
        Field::Type => fields.tag = Some(map.next_value::<Word<_>>()?.0),
        Field::Hashes => fields.hashes = Some(map.next_value()?),
        Field::Parent => fields.parent = map.next_value()?,
        Field::Tokens => fields.tokens = Some(map.next_value()?),
        Field::BlockSize => fields.block_size = Some(map.next_value()?),
        Field::LoraId => drop(map.next_value::<Option<u64>>()?),
        Field::LoraName => fields.lora = map.next_value()?,
        Field::CacheSalt => fields.cache_salt = map.next_value()?,
        Field::ExtraKeys => fields.extra_keys = value::per_block(map.next_value()?),
        Field::Media => {
            fields.media = map
                .next_value::<Option<List<Option<BlockMedia>>>>()?
                .map(|l| value::media(l.0))
        }
        Field::Group => fields.origin.group = map.next_value()?,
        Field::Medium => fields.origin.medium = word(map)?.unwrap_or_default(),
        Field::Kind => fields.origin.kind = word(map)?,
        Field::Window => fields.origin.window = map.next_value()?,
        Field::Locality => fields.origin.locality = word(map)?.unwrap_or_default(),
        Field::Ownership => fields.origin.ownership = word(map)?.unwrap_or_default(),
        Field::Other => drop(map.next_value::<IgnoredAny>()?),
    }
    Ok(())
}

fn word<'de, T: for<'a> From<&'a str>, A: MapAccess<'de>>(
    map: &mut A,
) -> Result<Option<T>, A::Error> {
    Ok(map.next_value::<Option<Word<T>>>()?.map(|Word(word)| word))
}

fn finish<E: de::Error>(fields: Fields) -> Result<Event, E> {
    let hashes = || E::missing_field("block_hashes");
    match fields.tag.ok_or_else(|| E::missing_field("type"))? {
        Tag::Stored => Ok(Event::Stored(Box::new(Stored {
            hashes: fields.hashes.ok_or_else(hashes)?.0,
            parent: fields.parent.map(|Hash(hash)| hash),
            tokens: fields.tokens.ok_or_else(|| E::missing_field("token_ids"))?,
            block_size: fields
                .block_size
                .ok_or_else(|| E::missing_field("block_size"))?,
            lora: fields.lora,
            cache_salt: fields.cache_salt,
            extra_keys: fields.extra_keys,
            media: fields.media,
            keys_are_pairs: true,
            origin: fields.origin,
        }))),
        Tag::Removed => Ok(Event::Removed {
            hashes: fields.hashes.ok_or_else(hashes)?.0,
            origin: fields.origin,
        }),
        Tag::Cleared => Ok(Event::Cleared {
            ownership: fields.origin.ownership,
        }),
        Tag::Ignored => Ok(Event::Ignored),
        Tag::Unknown(tag) => Err(E::custom(format_args!("unknown event {tag:?}"))),
    }
}
