//! Request bodies of APIs whose prompts cannot be known. The text bytes are counted during parsing,
//! and only the model name is retained.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::error::ParseError;
use super::request::ApiRequest;

/// Estimated bytes of text per token. It converts the number of token ids in a body to bytes.
pub(super) const BYTES_PER_TOKEN: usize = 4;

/// Fields with text in these APIs.
const TEXT_FIELDS: [&str; 11] = [
    "input",
    "prompt",
    "query",
    "queries",
    "documents",
    "items",
    "state",
    "text_1",
    "text_2",
    "data_1",
    "data_2",
];

pub(super) fn parse(text: &str) -> Result<ApiRequest, ParseError> {
    let UntokenizedBody { model, text_bytes } = serde_json::from_str(text)?;
    Ok(ApiRequest::untokenized(model, text_bytes))
}

#[derive(Default)]
struct UntokenizedBody {
    model: Option<String>,
    text_bytes: usize,
}

impl<'de> Deserialize<'de> for UntokenizedBody {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UntokenizedBodyVisitor)
    }
}

struct UntokenizedBodyVisitor;

impl<'de> Visitor<'de> for UntokenizedBodyVisitor {
    type Value = UntokenizedBody;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UntokenizedBody, A::Error> {
        let mut body = UntokenizedBody::default();
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            match &*key {
                "model" => body.model = map.next_value()?,
                key if TEXT_FIELDS.contains(&key) => {
                    body.text_bytes += map.next_value::<TextByteCount>()?.0
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(body)
    }
}

/// Number of bytes of text in a value at any depth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TextByteCount(pub(super) usize);

impl<'de> Deserialize<'de> for TextByteCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextByteCountVisitor)
    }
}

struct TextByteCountVisitor;

impl<'de> Visitor<'de> for TextByteCountVisitor {
    type Value = TextByteCount;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, text: &str) -> Result<TextByteCount, E> {
        Ok(TextByteCount(text.len()))
    }

    fn visit_u64<E>(self, _: u64) -> Result<TextByteCount, E> {
        Ok(TextByteCount(BYTES_PER_TOKEN))
    }

    fn visit_i64<E>(self, _: i64) -> Result<TextByteCount, E> {
        Ok(TextByteCount(0))
    }

    fn visit_f64<E>(self, _: f64) -> Result<TextByteCount, E> {
        Ok(TextByteCount(0))
    }

    fn visit_bool<E>(self, _: bool) -> Result<TextByteCount, E> {
        Ok(TextByteCount(0))
    }

    fn visit_unit<E>(self) -> Result<TextByteCount, E> {
        Ok(TextByteCount(0))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<TextByteCount, A::Error> {
        let mut sum = 0;
        while let Some(TextByteCount(bytes)) = seq.next_element()? {
            sum += bytes;
        }
        Ok(TextByteCount(sum))
    }

    /// Counts the text in the fields `text` and `content`. Other strings are names or images.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TextByteCount, A::Error> {
        let mut sum = 0;
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            match &*key {
                "text" | "content" => sum += map.next_value::<TextByteCount>()?.0,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(TextByteCount(sum))
    }
}
