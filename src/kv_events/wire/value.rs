//! The leaves of an event: hashes, token lists, words, and what entered a block's hash besides its tokens.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{
    self, Deserialize, DeserializeOwned, Deserializer, IgnoredAny, SeqAccess, Visitor,
};

use super::{ExtraKey, Tokens};
use crate::block::EngineHash;

/// A list that reserves exactly its length, which [`super::bounds`] has checked.
pub(super) struct List<T>(pub(super) Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ListVisitor<T> {
            type Value = List<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<List<T>, A::Error> {
                let mut list = Vec::with_capacity(seq.size_hint().unwrap_or(0));
                while let Some(element) = seq.next_element()? {
                    list.push(element);
                }
                Ok(List(list))
            }
        }
        deserializer.deserialize_seq(ListVisitor(PhantomData))
    }
}

/// A timestamp, integer or float.
pub(super) struct Number(pub(super) f64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        f64::deserialize(deserializer).map(Number)
    }
}

/// A block's name as engines write it.
pub(super) struct Hash(pub(super) EngineHash);

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HashVisitor;
        impl Visitor<'_> for HashVisitor {
            type Value = Hash;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a block hash: 64-bit integer or bytes")
            }

            fn visit_u64<E: de::Error>(self, hash: u64) -> Result<Hash, E> {
                Ok(Hash(EngineHash(hash)))
            }

            fn visit_i64<E: de::Error>(self, hash: i64) -> Result<Hash, E> {
                Ok(Hash(EngineHash(hash.cast_unsigned())))
            }

            fn visit_bytes<E: de::Error>(self, digest: &[u8]) -> Result<Hash, E> {
                match digest.last_chunk::<8>() {
                    Some(tail) => Ok(Hash(EngineHash(u64::from_be_bytes(*tail)))),
                    None => Err(E::invalid_length(digest.len(), &"at least 8 bytes")),
                }
            }
        }
        deserializer.deserialize_any(HashVisitor)
    }
}

/// Block names in order.
pub(super) struct Hashes(pub(super) Vec<EngineHash>);

impl<'de> Deserialize<'de> for Hashes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let List(hashes) = List::<Hash>::deserialize(deserializer)?;
        Ok(Hashes(hashes.into_iter().map(|Hash(hash)| hash).collect()))
    }
}

/// A word that is classified while it is read; nil and absence are `None`.
pub(super) struct Word<T>(pub(super) T);

impl<'de, T: for<'a> From<&'a str>> Deserialize<'de> for Word<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WordVisitor<T>(PhantomData<T>);
        impl<T: for<'a> From<&'a str>> Visitor<'_> for WordVisitor<T> {
            type Value = Word<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<Word<T>, E> {
                Ok(Word(T::from(word)))
            }
        }
        deserializer.deserialize_str(WordVisitor(PhantomData))
    }
}

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TokensVisitor;
        impl<'de> Visitor<'de> for TokensVisitor {
            type Value = Tokens;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of token ids or of pairs of them")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Tokens, A::Error> {
                let mut ids = Vec::with_capacity(seq.size_hint().unwrap_or(0) + 1);
                let mut last = match seq.next_element()? {
                    None => return Ok(Tokens::default()),
                    Some(Token::Single(id)) => {
                        ids.push(id);
                        while let Some(id) = seq.next_element()? {
                            ids.push(id);
                        }
                        return Ok(Tokens {
                            ids,
                            bigrams: false,
                        });
                    }
                    Some(Token::Pair(first, second)) => {
                        ids.push(first);
                        second
                    }
                };
                while let Some((first, second)) = seq.next_element::<(u32, u32)>()? {
                    ids.push(first);
                    last = second;
                }
                ids.push(last);
                Ok(Tokens { ids, bigrams: true })
            }
        }
        deserializer.deserialize_seq(TokensVisitor)
    }
}

/// The first token of a list, which decides how the others are read.
enum Token {
    Single(u32),
    Pair(u32, u32),
}

impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TokenVisitor;
        impl<'de> Visitor<'de> for TokenVisitor {
            type Value = Token;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token id or a pair of them")
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<Token, E> {
                u32::try_from(id)
                    .map(Token::Single)
                    .map_err(|_| E::invalid_value(de::Unexpected::Unsigned(id), &"a token id"))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Token, A::Error> {
                let pair = Token::Pair(
                    super::next(&mut seq, "first token")?,
                    super::next(&mut seq, "second token")?,
                );
                match seq.next_element::<IgnoredAny>()? {
                    None => Ok(pair),
                    Some(_) => Err(de::Error::invalid_length(3, &"a pair of token ids")),
                }
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

/// Per block a list or nil; nil is the empty list.
pub(super) fn per_block<T>(blocks: Option<List<Option<List<T>>>>) -> Vec<Vec<T>> {
    let per_block = |keys: Option<List<T>>| keys.map_or_else(Vec::new, |List(keys)| keys);
    blocks.map_or_else(Vec::new, |List(blocks)| {
        blocks.into_iter().map(per_block).collect()
    })
}

/// Multimodal objects of one block, as some publishers name them outright.
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
        reason = "named so that the array form of the struct is accepted too; offsets are not hashed"
    )]
    offsets: Option<IgnoredAny>,
}

/// Hashes of the objects, per block.
pub(super) fn media(blocks: Vec<Option<BlockMedia>>) -> Vec<Vec<u64>> {
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

/// The place of the adapter name: a name, or the map in which SGLang names the salt.
pub(super) enum Namespace {
    Lora(String),
    Salt {
        cache_salt: String,
        lora_name: Option<String>,
    },
}

impl<'de> Deserialize<'de> for Namespace {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        struct Names {
            cache_salt: String,
            #[serde(default)]
            lora_name: Option<String>,
        }
        struct NamespaceVisitor;
        impl<'de> Visitor<'de> for NamespaceVisitor {
            type Value = Namespace;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an adapter name or a map with a cache salt")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Namespace, E> {
                Ok(Namespace::Lora(name.to_owned()))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Namespace, A::Error> {
                let names = Names::deserialize(de::value::MapAccessDeserializer::new(map))?;
                Ok(Namespace::Salt {
                    cache_salt: names.cache_salt,
                    lora_name: names.lora_name,
                })
            }
        }
        deserializer.deserialize_any(NamespaceVisitor)
    }
}

/// Reads an optional element that may be missing or nil.
pub(super) fn optional<'de, T: DeserializeOwned, A: SeqAccess<'de>>(
    seq: &mut A,
) -> Result<Option<T>, A::Error> {
    Ok(seq.next_element::<Option<T>>()?.flatten())
}
