//! Events as arrays: fields by position, and a tail that grew over the versions of the engines.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, SeqAccess, Visitor};

use super::value::{self, BlockMedia, Hash, Hashes, Namespace, Word};
use super::{Event, Kind, Locality, Medium, Origin, Ownership, Stored, next};

/// Tail elements that any layout gives a meaning.
const TAIL: usize = 8;

pub(super) fn event<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<Event, A::Error> {
    let Word(tag) = next(&mut seq, "tag")?;
    let event = match tag {
        Tag::Stored => stored(&mut seq)?,
        Tag::Removed => removed(&mut seq)?,
        Tag::Cleared => {
            let ownership = value::optional::<Word<Ownership>, _>(&mut seq)?;
            Event::Cleared {
                ownership: ownership
                    .map(|Word(ownership)| ownership)
                    .unwrap_or_default(),
            }
        }
        Tag::Ignored => Event::Ignored,
        Tag::Unknown(tag) => return Err(de::Error::custom(format_args!("unknown event {tag:?}"))),
    };
    while seq.next_element::<IgnoredAny>()?.is_some() {}
    Ok(event)
}

/// What kind of event it is.
pub(super) enum Tag {
    Stored,
    Removed,
    Cleared,
    Ignored,
    Unknown(String),
}

impl From<&str> for Tag {
    fn from(tag: &str) -> Self {
        match tag {
            "BlockStored" => Tag::Stored,
            "BlockRemoved" => Tag::Removed,
            "AllBlocksCleared" => Tag::Cleared,
            "Ignored" => Tag::Ignored,
            other => Tag::Unknown(other.chars().take(40).collect()),
        }
    }
}

fn stored<'de, A: SeqAccess<'de>>(seq: &mut A) -> Result<Event, A::Error> {
    let Hashes(hashes) = next(seq, "block_hashes")?;
    let parent = next::<Option<Hash>, _>(seq, "parent_block_hash")?.map(|Hash(hash)| hash);
    let tokens = next(seq, "token_ids")?;
    let block_size = next(seq, "block_size")?;
    // The numeric adapter id is checked for its type and otherwise unused: only the name separates caches.
    value::optional::<u64, _>(seq)?;
    let medium = medium(seq)?;
    let (lora, cache_salt) = match value::optional::<Namespace, _>(seq)? {
        None => (None, None),
        Some(Namespace::Lora(name)) => (Some(name), None),
        Some(Namespace::Salt {
            cache_salt,
            lora_name,
        }) => (lora_name, Some(cache_salt)),
    };
    let extra_keys = value::per_block(value::optional(seq)?);
    let (origin, media) = tail(seq, medium)?;
    let keys_are_pairs = false;
    let stored = Stored {
        hashes,
        parent,
        tokens,
        block_size,
        lora,
        cache_salt,
        extra_keys,
        media,
        keys_are_pairs,
        origin,
    };
    Ok(Event::Stored(Box::new(stored)))
}

fn removed<'de, A: SeqAccess<'de>>(seq: &mut A) -> Result<Event, A::Error> {
    let Hashes(hashes) = next(seq, "block_hashes")?;
    let medium = medium(seq)?;
    let (origin, _) = tail(seq, medium)?;
    Ok(Event::Removed { hashes, origin })
}

fn medium<'de, A: SeqAccess<'de>>(seq: &mut A) -> Result<Medium, A::Error> {
    Ok(value::optional::<Word<Medium>, _>(seq)?
        .map(|Word(medium)| medium)
        .unwrap_or_default())
}

type Media = Option<Vec<Vec<u64>>>;

/// What follows the named positions. Four or more elements of the right types are the layout of newer engines; anything
/// else is searched by type, as older ones left elements out.
fn tail<'de, A: SeqAccess<'de>>(seq: &mut A, medium: Medium) -> Result<(Origin, Media), A::Error> {
    let mut elements = Vec::new();
    while elements.len() < TAIL {
        match seq.next_element::<Element>()? {
            Some(element) => elements.push(element),
            None => break,
        }
    }
    if let Some(origin) = fixed(&elements, medium) {
        return Ok((origin, None));
    }
    let mut origin = Origin {
        medium,
        ..Origin::default()
    };
    let mut media = None;
    for element in elements {
        match element {
            Element::Number(number) if origin.group.is_none() => origin.group = Some(number),
            Element::Number(number) if origin.window.is_none() => origin.window = Some(number),
            Element::Text(text) => origin.kind = Some(Kind::from(text.as_str())),
            Element::Media(blocks) => media = Some(blocks),
            Element::Number(_) | Element::Nil => {}
        }
    }
    Ok((origin, media))
}

fn fixed(elements: &[Element], medium: Medium) -> Option<Origin> {
    let [group, kind, window, locality, rest @ ..] = elements else {
        return None;
    };
    Some(Origin {
        medium,
        group: group.number()?,
        kind: kind.text()?.map(Kind::from),
        window: window.number()?,
        locality: locality.text()?.map(Locality::from).unwrap_or_default(),
        ownership: match rest.first() {
            None => Ownership::default(),
            Some(ownership) => ownership.text()?.map(Ownership::from).unwrap_or_default(),
        },
    })
}

/// One element of the tail.
enum Element {
    Nil,
    Number(u32),
    Text(String),
    Media(Vec<Vec<u64>>),
}

impl Element {
    /// A number or nil; `None` if it is neither.
    fn number(&self) -> Option<Option<u32>> {
        match self {
            Element::Nil => Some(None),
            Element::Number(number) => Some(Some(*number)),
            _ => None,
        }
    }

    /// A text or nil; `None` if it is neither.
    fn text(&self) -> Option<Option<&str>> {
        match self {
            Element::Nil => Some(None),
            Element::Text(text) => Some(Some(text)),
            _ => None,
        }
    }
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ElementVisitor;
        impl<'de> Visitor<'de> for ElementVisitor {
            type Value = Element;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, a string, nil or multimodal objects per block")
            }

            fn visit_unit<E>(self) -> Result<Element, E> {
                Ok(Element::Nil)
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Element, E> {
                u32::try_from(number).map(Element::Number).map_err(|_| {
                    E::invalid_value(de::Unexpected::Unsigned(number), &"a group or a window")
                })
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Element, E> {
                Ok(Element::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
                let mut blocks = Vec::new();
                while let Some(block) = seq.next_element::<Option<BlockMedia>>()? {
                    blocks.push(block);
                }
                Ok(Element::Media(value::media(blocks)))
            }
        }
        deserializer.deserialize_any(ElementVisitor)
    }
}
