//! Values inside an event: hashes, token lists, enumerated texts and extra keys.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, SeqAccess, Visitor};

use super::event::{EventTokens, ExtraKey};
use warmroute_core::block::EngineHash;

/// Decodes one value. Returns `None` if it has another type.
pub(super) fn decode<'a, T: Deserialize<'a>>(value: &'a [u8]) -> Option<T> {
    let mut reader = rmp_serde::Deserializer::from_read_ref(value);
    reader.set_max_depth(super::MAX_DEPTH);
    T::deserialize(&mut reader).ok()
}

/// A list that reserves exactly its length, which [`super::bounds`] has checked.
pub(super) struct SizedList<T>(pub(super) Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for SizedList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ListVisitor<T> {
            type Value = SizedList<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<SizedList<T>, A::Error> {
                let mut list = Vec::with_capacity(seq.size_hint().unwrap_or(0));
                while let Some(element) = seq.next_element()? {
                    list.push(element);
                }
                Ok(SizedList(list))
            }
        }
        deserializer.deserialize_seq(ListVisitor(PhantomData))
    }
}

/// A block hash as encoded by engines.
pub(super) struct WireHash(pub(super) EngineHash);

impl<'de> Deserialize<'de> for WireHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HashVisitor;
        impl Visitor<'_> for HashVisitor {
            type Value = WireHash;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a block hash: 64-bit integer or bytes")
            }

            fn visit_u64<E: de::Error>(self, hash: u64) -> Result<WireHash, E> {
                Ok(WireHash(EngineHash(hash)))
            }

            fn visit_i64<E: de::Error>(self, hash: i64) -> Result<WireHash, E> {
                Ok(WireHash(EngineHash(hash.cast_unsigned())))
            }

            fn visit_bytes<E: de::Error>(self, digest: &[u8]) -> Result<WireHash, E> {
                match digest.last_chunk::<8>() {
                    Some(tail) => Ok(WireHash(EngineHash(u64::from_be_bytes(*tail)))),
                    None => Err(E::invalid_length(digest.len(), &"at least 8 bytes")),
                }
            }
        }
        deserializer.deserialize_any(HashVisitor)
    }
}

impl<'de> Deserialize<'de> for EventTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TokensVisitor;
        impl<'de> Visitor<'de> for TokensVisitor {
            type Value = EventTokens;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of token ids or of pairs of them")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<EventTokens, A::Error> {
                let mut ids = Vec::with_capacity(seq.size_hint().unwrap_or(0) + 1);
                let mut last = match seq.next_element()? {
                    None => return Ok(EventTokens::default()),
                    Some(LeadingToken::Single(id)) => {
                        ids.push(id);
                        while let Some(id) = seq.next_element()? {
                            ids.push(id);
                        }
                        return Ok(EventTokens {
                            ids,
                            bigrams: false,
                        });
                    }
                    Some(LeadingToken::Pair(first, second)) => {
                        ids.push(first);
                        second
                    }
                };
                while let Some((first, second)) = seq.next_element::<(u32, u32)>()? {
                    ids.push(first);
                    last = second;
                }
                ids.push(last);
                Ok(EventTokens { ids, bigrams: true })
            }
        }
        deserializer.deserialize_seq(TokensVisitor)
    }
}

/// The first token of a list. It determines how the others are decoded.
enum LeadingToken {
    Single(u32),
    Pair(u32, u32),
}

impl<'de> Deserialize<'de> for LeadingToken {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TokenVisitor;
        impl<'de> Visitor<'de> for TokenVisitor {
            type Value = LeadingToken;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token id or a pair of them")
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<LeadingToken, E> {
                u32::try_from(id)
                    .map(LeadingToken::Single)
                    .map_err(|_| E::invalid_value(de::Unexpected::Unsigned(id), &"a token id"))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<LeadingToken, A::Error> {
                let pair = SeqAccessDeserializer::new(seq);
                <(u32, u32)>::deserialize(pair)
                    .map(|(first, second)| LeadingToken::Pair(first, second))
            }
        }
        deserializer.deserialize_any(TokenVisitor)
    }
}

impl<'de> Deserialize<'de> for ExtraKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = ExtraKey;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an extra key of a block")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ExtraKey, E> {
                Ok(ExtraKey::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<ExtraKey, A::Error> {
                let first = seq.next_element()?;
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(match first {
                    Some(ExtraKey::Text(id)) => ExtraKey::Media(id),
                    _ => ExtraKey::Other,
                })
            }

            fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<ExtraKey, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(ExtraKey::Other)
            }

            fn visit_u64<E>(self, _: u64) -> Result<ExtraKey, E> {
                Ok(ExtraKey::Other)
            }

            fn visit_i64<E>(self, _: i64) -> Result<ExtraKey, E> {
                Ok(ExtraKey::Other)
            }

            fn visit_f64<E>(self, _: f64) -> Result<ExtraKey, E> {
                Ok(ExtraKey::Other)
            }

            fn visit_bool<E>(self, _: bool) -> Result<ExtraKey, E> {
                Ok(ExtraKey::Other)
            }

            fn visit_bytes<E>(self, _: &[u8]) -> Result<ExtraKey, E> {
                Ok(ExtraKey::Other)
            }

            fn visit_unit<E>(self) -> Result<ExtraKey, E> {
                Ok(ExtraKey::Other)
            }
        }
        deserializer.deserialize_any(KeyVisitor)
    }
}

/// Converts a list or nil per block to a list per block; nil becomes the empty list.
pub(super) fn per_block<T>(blocks: Option<SizedList<Option<SizedList<T>>>>) -> Vec<Vec<T>> {
    let per_block = |keys: Option<SizedList<T>>| keys.map_or_else(Vec::new, |SizedList(keys)| keys);
    blocks.map_or_else(Vec::new, |SizedList(blocks)| {
        blocks.into_iter().map(per_block).collect()
    })
}

/// Multimodal objects of one block, as some publishers name them explicitly.
#[derive(serde::Deserialize)]
pub(super) struct BlockMedia {
    mm_objects: Vec<MediaObject>,
}

#[derive(serde::Deserialize)]
struct MediaObject {
    mm_hash: u64,
    #[serde(default)]
    #[expect(
        dead_code,
        reason = "named so that the array form of the struct is accepted too; offsets are not \
            hashed"
    )]
    offsets: Option<IgnoredAny>,
}

/// Returns the hashes of the objects of each block.
pub(super) fn media_hashes(blocks: Vec<Option<BlockMedia>>) -> Vec<Vec<u64>> {
    let hashes = |objects: BlockMedia| {
        objects
            .mm_objects
            .into_iter()
            .map(|object| object.mm_hash)
            .collect()
    };
    blocks
        .into_iter()
        .map(|block| block.map(hashes).unwrap_or_default())
        .collect()
}

/// Value at the position of the adapter name: a name, or SGLang's map with the salt.
pub(super) enum CacheNamespace {
    Lora(String),
    Salt(NamespaceFields),
}

#[derive(serde::Deserialize)]
pub(super) struct NamespaceFields {
    pub(super) cache_salt: String,
    pub(super) lora_name: Option<String>,
}

impl<'de> Deserialize<'de> for CacheNamespace {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NamespaceVisitor;
        impl<'de> Visitor<'de> for NamespaceVisitor {
            type Value = CacheNamespace;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an adapter name or a map with a cache salt")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<CacheNamespace, E> {
                Ok(CacheNamespace::Lora(name.to_owned()))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<CacheNamespace, A::Error> {
                let fields = MapAccessDeserializer::new(map);
                NamespaceFields::deserialize(fields).map(CacheNamespace::Salt)
            }
        }
        deserializer.deserialize_any(NamespaceVisitor)
    }
}
