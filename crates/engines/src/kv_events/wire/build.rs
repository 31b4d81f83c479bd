//! Builds events from their undecoded fields.

use serde::Deserialize;
use warmroute_core::block::EngineHash;

use super::event::{
    BlockOwnership, EngineEvent, EventAdapter, EventOrigin, EventTokens, SkippedEvent,
    StorageMedium, StoredEvent,
};
use super::fields::{EventEncoding, EventField, EventFields, EventType};
use super::value::{self, BlockMedia, CacheNamespace, SizedList, WireHash};

/// Maximum length of an unknown event type in logs, in characters.
const MAX_TYPE_NAME: usize = 40;

/// Builds one event. An event of an unknown type, or with an unreadable field, is skipped.
pub(super) fn build_event(raw: &EventFields<'_>) -> EngineEvent {
    let name = raw.get(EventField::Type).and_then(value::decode::<&str>);
    let name = name.unwrap_or_default();
    let built = match EventType::of(name.as_bytes()) {
        Some(EventType::Stored) => build_stored(raw)
            .map(|stored| EngineEvent::Stored(Box::new(stored)))
            .map_err(SkippedEvent::Store),
        Some(EventType::Removed) => build_removed(raw).map_err(SkippedEvent::Removal),
        Some(EventType::Cleared) => Ok(EngineEvent::Cleared {
            ownership: raw.text(EventField::Ownership, BlockOwnership::Unknown),
        }),
        Some(EventType::Ignored) => Ok(EngineEvent::Ignored),
        None => Err(SkippedEvent::UnknownType(
            name.chars().take(MAX_TYPE_NAME).collect(),
        )),
    };
    built.unwrap_or_else(EngineEvent::Skipped)
}

fn build_stored(raw: &EventFields<'_>) -> Result<StoredEvent, &'static str> {
    let (lora_name, namespace_salt) = match raw.read(EventField::LoraName)? {
        None => (None, None),
        Some(CacheNamespace::Lora(name)) => (Some(name), None),
        Some(CacheNamespace::Salt(fields)) => (fields.lora_name, Some(fields.cache_salt)),
    };
    let media = raw.read::<SizedList<Option<BlockMedia>>>(EventField::Media)?;
    Ok(StoredEvent {
        hashes: hashes(raw)?,
        parent: raw.read(EventField::Parent)?.map(|WireHash(parent)| parent),
        tokens: add_lookahead(
            raw.require(EventField::Tokens)?,
            raw.read(EventField::Lookahead)?,
        ),
        block_size: raw.require(EventField::BlockSize)?,
        adapter: adapter(lora_name, raw.get(EventField::LoraId)),
        cache_salt: raw.read(EventField::CacheSalt)?.or(namespace_salt),
        extra_keys: value::per_block(raw.read(EventField::ExtraKeys)?),
        media: media.map(|SizedList(blocks)| value::media_hashes(blocks)),
        keys_are_pairs: raw.encoding == EventEncoding::Map,
        origin: origin(raw)?,
    })
}

/// Adds the token after the last block, if block hashes cover the next token. The tokens after the
/// other blocks are known: each is the first one of the next block. Further lookahead tokens are
/// not used.
fn add_lookahead(
    mut tokens: EventTokens,
    lookahead: Option<SizedList<Option<SizedList<u32>>>>,
) -> EventTokens {
    let last = lookahead.and_then(|SizedList(mut blocks)| blocks.pop().flatten());
    if let Some(next) = last.and_then(|SizedList(next)| next.first().copied())
        && !tokens.bigrams
    {
        tokens.ids.push(next);
        tokens.bigrams = true;
    }
    tokens
}

fn build_removed(raw: &EventFields<'_>) -> Result<EngineEvent, &'static str> {
    Ok(EngineEvent::Removed {
        hashes: hashes(raw)?,
        origin: origin(raw)?,
    })
}

fn hashes(raw: &EventFields<'_>) -> Result<Vec<EngineHash>, &'static str> {
    let SizedList(hashes) = raw.require::<SizedList<WireHash>>(EventField::Hashes)?;
    Ok(hashes.into_iter().map(|WireHash(hash)| hash).collect())
}

/// Returns the adapter of a store. Caches are separated by the adapter's name, so the numeric id
/// only shows that there is an adapter. Engines number adapters from one.
fn adapter(name: Option<String>, id: Option<&[u8]>) -> EventAdapter {
    match name.filter(|name| !name.is_empty()) {
        Some(name) => EventAdapter::Named(name),
        None if id.is_none_or(|id| value::decode(id) == Some(0_u64)) => EventAdapter::Base,
        None => EventAdapter::Unnamed,
    }
}

fn origin(raw: &EventFields<'_>) -> Result<EventOrigin, &'static str> {
    Ok(EventOrigin {
        medium: raw.text(EventField::Medium, StorageMedium::Unknown),
        group: raw.read(EventField::Group)?,
        kind: raw.read::<&str>(EventField::Kind)?.map(Into::into),
        window: raw.read(EventField::Window)?,
        locality: raw.text(EventField::Locality, super::StorageLocality::Remote),
        ownership: raw.text(EventField::Ownership, BlockOwnership::Unknown),
    })
}

impl<'a> EventFields<'a> {
    /// Decodes an optional field. Fails with its name if its type is unknown.
    fn read<T: Deserialize<'a>>(&self, field: EventField) -> Result<Option<T>, &'static str> {
        self.get(field)
            .map(|value| value::decode(value).ok_or(field.name()))
            .transpose()
    }

    /// Decodes a field that the event must have.
    fn require<T: Deserialize<'a>>(&self, field: EventField) -> Result<T, &'static str> {
        self.read(field)?.ok_or(field.name())
    }

    /// Classifies an optional text. A value of another type is classified as `unknown`.
    fn text<T: Default + for<'t> From<&'t str>>(&self, field: EventField, unknown: T) -> T {
        match self.get(field).map(value::decode::<&str>) {
            None => T::default(),
            Some(Some(known)) => known.into(),
            Some(None) => unknown,
        }
    }
}
