//! Events as arrays: fields by position, with a tail whose length depends on the engine version.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, SeqAccess, Visitor};

use super::event::{
    AttentionKind, BlockOwnership, EngineEvent, EventOrigin, StorageLocality, StorageMedium,
    StoredEvent,
};
use super::value::{
    self, BlockMedia, CacheNamespace, EnumText, WireHash, WireHashes, next_required,
};

/// Maximum number of tail elements that have a meaning in any layout.
const MAX_TAIL: usize = 8;

pub(super) fn event<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<EngineEvent, A::Error> {
    let EnumText(tag) = next_required(&mut seq, "tag")?;
    let event = match tag {
        EventTag::Stored => stored_event(&mut seq)?,
        EventTag::Removed => removed_event(&mut seq)?,
        EventTag::Cleared => {
            let ownership = value::next_optional::<EnumText<BlockOwnership>, _>(&mut seq)?;
            EngineEvent::Cleared {
                ownership: ownership
                    .map(|EnumText(ownership)| ownership)
                    .unwrap_or_default(),
            }
        }
        EventTag::Ignored => EngineEvent::Ignored,
        EventTag::Unknown(tag) => {
            return Err(de::Error::custom(format_args!("unknown event {tag:?}")));
        }
    };
    while seq.next_element::<IgnoredAny>()?.is_some() {}
    Ok(event)
}

/// Type of an event.
pub(super) enum EventTag {
    Stored,
    Removed,
    Cleared,
    Ignored,
    Unknown(String),
}

impl From<&str> for EventTag {
    fn from(tag: &str) -> Self {
        match tag {
            "BlockStored" => EventTag::Stored,
            "BlockRemoved" => EventTag::Removed,
            "AllBlocksCleared" => EventTag::Cleared,
            "Ignored" => EventTag::Ignored,
            other => EventTag::Unknown(other.chars().take(40).collect()),
        }
    }
}

fn stored_event<'de, A: SeqAccess<'de>>(seq: &mut A) -> Result<EngineEvent, A::Error> {
    let WireHashes(hashes) = next_required(seq, "block_hashes")?;
    let parent =
        next_required::<Option<WireHash>, _>(seq, "parent_block_hash")?.map(|WireHash(hash)| hash);
    let tokens = next_required(seq, "token_ids")?;
    let block_size = next_required(seq, "block_size")?;
    // The numeric adapter id is not stored, because caches are separated by the adapter's name.
    value::next_optional::<u64, _>(seq)?;
    let medium = next_medium(seq)?;
    let (lora, cache_salt) = match value::next_optional::<CacheNamespace, _>(seq)? {
        None => (None, None),
        Some(CacheNamespace::Lora(name)) => (Some(name), None),
        Some(CacheNamespace::Salt {
            cache_salt,
            lora_name,
        }) => (lora_name, Some(cache_salt)),
    };
    let extra_keys = value::per_block(value::next_optional(seq)?);
    let (origin, media) = read_tail(seq, medium)?;
    let keys_are_pairs = false;
    let stored = StoredEvent {
        hashes,
        parent,
        tokens,
        block_size,
        lora_name: lora,
        cache_salt,
        extra_keys,
        media,
        keys_are_pairs,
        origin,
    };
    Ok(EngineEvent::Stored(Box::new(stored)))
}

fn removed_event<'de, A: SeqAccess<'de>>(seq: &mut A) -> Result<EngineEvent, A::Error> {
    let WireHashes(hashes) = next_required(seq, "block_hashes")?;
    let medium = next_medium(seq)?;
    let (origin, _) = read_tail(seq, medium)?;
    Ok(EngineEvent::Removed { hashes, origin })
}

fn next_medium<'de, A: SeqAccess<'de>>(seq: &mut A) -> Result<StorageMedium, A::Error> {
    Ok(value::next_optional::<EnumText<StorageMedium>, _>(seq)?
        .map(|EnumText(medium)| medium)
        .unwrap_or_default())
}

type BlockObjects = Option<Vec<Vec<u64>>>;

/// Decodes the elements after the fields with fixed positions. Four or more elements of the right
/// types are the layout of newer engines. Other tails are searched by type, because older engines
/// omit elements.
fn read_tail<'de, A: SeqAccess<'de>>(
    seq: &mut A,
    medium: StorageMedium,
) -> Result<(EventOrigin, BlockObjects), A::Error> {
    let mut elements = Vec::new();
    while elements.len() < MAX_TAIL {
        match seq.next_element::<TailElement>()? {
            Some(element) => elements.push(element),
            None => break,
        }
    }
    if let Some(origin) = fixed_layout(&elements, medium) {
        return Ok((origin, None));
    }
    let mut origin = EventOrigin {
        medium,
        ..EventOrigin::default()
    };
    let mut media = None;
    for element in elements {
        match element {
            TailElement::Number(number) if origin.group.is_none() => origin.group = Some(number),
            TailElement::Number(number) if origin.window.is_none() => origin.window = Some(number),
            TailElement::Text(text) => origin.kind = Some(AttentionKind::from(text.as_str())),
            TailElement::Media(blocks) => media = Some(blocks),
            TailElement::Number(_) | TailElement::Nil => {}
        }
    }
    Ok((origin, media))
}

fn fixed_layout(elements: &[TailElement], medium: StorageMedium) -> Option<EventOrigin> {
    let [group, kind, window, locality, rest @ ..] = elements else {
        return None;
    };
    Some(EventOrigin {
        medium,
        group: group.number()?,
        kind: kind.text()?.map(AttentionKind::from),
        window: window.number()?,
        locality: locality
            .text()?
            .map(StorageLocality::from)
            .unwrap_or_default(),
        ownership: match rest.first() {
            None => BlockOwnership::default(),
            Some(ownership) => ownership
                .text()?
                .map(BlockOwnership::from)
                .unwrap_or_default(),
        },
    })
}

/// One element of the tail.
enum TailElement {
    Nil,
    Number(u32),
    Text(String),
    Media(Vec<Vec<u64>>),
}

impl TailElement {
    /// Returns the number, or `None` for nil; the outer `None` means neither.
    fn number(&self) -> Option<Option<u32>> {
        match self {
            TailElement::Nil => Some(None),
            TailElement::Number(number) => Some(Some(*number)),
            _ => None,
        }
    }

    /// Returns the text, or `None` for nil; the outer `None` means neither.
    fn text(&self) -> Option<Option<&str>> {
        match self {
            TailElement::Nil => Some(None),
            TailElement::Text(text) => Some(Some(text)),
            _ => None,
        }
    }
}

impl<'de> Deserialize<'de> for TailElement {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ElementVisitor;
        impl<'de> Visitor<'de> for ElementVisitor {
            type Value = TailElement;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, a string, nil or multimodal objects per block")
            }

            fn visit_unit<E>(self) -> Result<TailElement, E> {
                Ok(TailElement::Nil)
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<TailElement, E> {
                u32::try_from(number).map(TailElement::Number).map_err(|_| {
                    E::invalid_value(de::Unexpected::Unsigned(number), &"a group or a window")
                })
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<TailElement, E> {
                Ok(TailElement::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<TailElement, A::Error> {
                let mut blocks = Vec::new();
                while let Some(block) = seq.next_element::<Option<BlockMedia>>()? {
                    blocks.push(block);
                }
                Ok(TailElement::Media(value::media_hashes(blocks)))
            }
        }
        deserializer.deserialize_any(ElementVisitor)
    }
}
