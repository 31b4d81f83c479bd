//! Bodies of APIs whose prompts cannot be known: how much text is in them, counted while reading and without keeping it,
//! and the model they name.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{ParseError, Request};

/// Bytes that stand for a token where tokens are sent.
pub(super) const BYTES_OF_A_TOKEN: usize = 4;

/// The fields with text, of all such APIs.
const TEXTS: [&str; 10] = [
    "input",
    "prompt",
    "query",
    "queries",
    "documents",
    "items",
    "text_1",
    "text_2",
    "data_1",
    "data_2",
];

pub(super) fn parse(text: &str) -> Result<Request, ParseError> {
    let Body { model, text } = serde_json::from_str(text)?;
    Ok(Request::by_load(model, text))
}

#[derive(Default)]
struct Body {
    model: Option<String>,
    text: usize,
}

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(BodyVisitor)
    }
}

struct BodyVisitor;

impl<'de> Visitor<'de> for BodyVisitor {
    type Value = Body;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body, A::Error> {
        let mut body = Body::default();
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            match &*key {
                "model" => body.model = map.next_value()?,
                key if TEXTS.contains(&key) => body.text += map.next_value::<Bytes>()?.0,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(body)
    }
}

/// Bytes of the text in a value, however deep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) usize);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BytesVisitor)
    }
}

struct BytesVisitor;

impl<'de> Visitor<'de> for BytesVisitor {
    type Value = Bytes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Bytes, E> {
        Ok(Bytes(text.len()))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Bytes, E> {
        Ok(Bytes(BYTES_OF_A_TOKEN))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Bytes, E> {
        Ok(Bytes(0))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Bytes, E> {
        Ok(Bytes(0))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Bytes, E> {
        Ok(Bytes(0))
    }

    fn visit_unit<E>(self) -> Result<Bytes, E> {
        Ok(Bytes(0))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Bytes, A::Error> {
        let mut sum = 0;
        while let Some(Bytes(bytes)) = seq.next_element()? {
            sum += bytes;
        }
        Ok(Bytes(sum))
    }

    /// Of an object only what is text: its other strings are names, or images.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Bytes, A::Error> {
        let mut sum = 0;
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            match &*key {
                "text" | "content" => sum += map.next_value::<Bytes>()?.0,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(Bytes(sum))
    }
}
