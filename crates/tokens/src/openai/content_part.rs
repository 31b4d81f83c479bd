//! Parts of a message: texts and media items.
//!
//! A part is interpreted as in vLLM (`renderers/chat_utils.py` of 0.32). Its type decides, or, for
//! a part without a type or with an id from the client, the first key that has a value.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::json::{JsonObject, JsonValue};

/// One part of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum ContentPart {
    /// A bare string.
    Bare(String),
    /// An object, usually with a type.
    Typed(TypedPart),
}

// Implemented by hand, because the derived code for an untagged enum makes another copy of each
// text.
impl<'de> Deserialize<'de> for ContentPart {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentPartVisitor)
    }
}

struct ContentPartVisitor;

impl<'de> Visitor<'de> for ContentPartVisitor {
    type Value = ContentPart;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a part with a type")
    }

    fn visit_str<E>(self, text: &str) -> Result<ContentPart, E> {
        Ok(ContentPart::Bare(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<ContentPart, E> {
        Ok(ContentPart::Bare(text))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut part: A) -> Result<ContentPart, A::Error> {
        let mut wire = RawPart::default();
        while let Some(key) = part.next_key::<Cow<'de, str>>()? {
            wire.read_key(key, &mut part)?;
        }
        Ok(ContentPart::Typed(wire.into()))
    }
}

/// A part that is an object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TypedPart {
    /// `text`, `image_url` and so on.
    pub kind: Option<String>,
    /// Text of a text part.
    pub text: Option<String>,
    /// Fields that most parts do not have.
    pub extras: Option<Box<PartExtras>>,
}

/// Fields that most parts do not have.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PartExtras {
    /// Text of a refusal.
    pub refusal: Option<String>,
    /// Text of a reasoning part.
    pub thinking: Option<String>,
    /// Name of a referenced tool.
    pub name: Option<String>,
    /// Item id from the client.
    pub uuid: Option<JsonValue>,
    /// Media item of the part.
    pub media: Option<MediaItem>,
    /// Keys that the engine does not know. Templates may read them.
    pub unknown_keys: JsonObject,
}

/// An image, audio or video item.
#[derive(Clone, Debug, PartialEq)]
pub struct MediaItem {
    /// Modality of the item.
    pub modality: MediaModality,
    /// Source of the content. Absent if the client sent only an id.
    pub source: Option<MediaSource>,
    /// Item id from the client.
    pub uuid: Option<String>,
}

/// Source of a media item's content.
#[derive(Clone, Debug, PartialEq)]
pub enum MediaSource {
    /// A URL, possibly a data URL.
    Url(String),
    /// Base64 content.
    Base64(String),
}

/// Modality of a media item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MediaModality {
    /// A still image.
    Image,
    /// Audio.
    Audio,
    /// Video.
    Video,
}

impl MediaModality {
    /// Returns the name that engines and templates use.
    pub fn as_str(self) -> &'static str {
        match self {
            MediaModality::Image => "image",
            MediaModality::Audio => "audio",
            MediaModality::Video => "video",
        }
    }
}

/// Interpretation of a part by the engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PartMeaning<'p> {
    /// A text.
    Text(&'p str),
    /// A `null` text, which the engine skips.
    Skipped,
    /// A media item.
    Media(&'p MediaItem),
    /// The name of a tool.
    Reference(&'p str),
    /// A part of this known type without its value.
    MissingValue(&'p str),
    /// A part of this unknown type.
    Unknown(&'p str),
}

/// Keys that the engine knows, independent of the part's type.
const KNOWN_KEYS: [&str; 18] = [
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];

/// Keys that take precedence over those of audio and video, in the engine's order.
const EMBEDDING_KEYS: [&str; 5] = [
    "image_pil",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "prompt_embeds",
];

impl ContentPart {
    /// Returns the engine's interpretation.
    pub fn meaning(&self) -> PartMeaning<'_> {
        match self {
            ContentPart::Bare(text) => PartMeaning::Text(text),
            ContentPart::Typed(part) => part.meaning(),
        }
    }

    /// Returns the media item of the part.
    pub fn media(&self) -> Option<&MediaItem> {
        match self.meaning() {
            PartMeaning::Media(media) => Some(media),
            _ => None,
        }
    }

    /// Returns the keys that the engine does not know.
    pub fn unknown_keys(&self) -> impl Iterator<Item = (&String, &JsonValue)> {
        let extras = match self {
            ContentPart::Bare(_) => None,
            ContentPart::Typed(part) => part.extras.as_deref(),
        };
        extras
            .into_iter()
            .flat_map(|extras| &extras.unknown_keys)
            .filter(|(key, _)| !KNOWN_KEYS.contains(&key.as_str()))
    }

    /// Returns true if the part is not text.
    pub(super) fn is_media(&self) -> bool {
        matches!(
            self.meaning(),
            PartMeaning::Media(_) | PartMeaning::Unknown(_)
        )
    }

    pub(super) fn text_bytes(&self) -> usize {
        match (self, self.meaning()) {
            (_, PartMeaning::Text(text)) => text.len(),
            // Parts of other APIs, such as reasoning parts.
            (ContentPart::Typed(part), PartMeaning::Unknown(_)) => {
                part.text.as_ref().map_or(0, String::len)
            }
            _ => 0,
        }
    }

    pub(super) fn with_type(kind: &str, text: Option<String>) -> Self {
        ContentPart::Typed(TypedPart {
            kind: Some(kind.to_owned()),
            text,
            extras: None,
        })
    }

    pub(crate) fn from_media(media: MediaItem) -> Self {
        let kind = format!("{}_url", media.modality.as_str());
        let extras = PartExtras {
            media: Some(media),
            ..PartExtras::default()
        };
        ContentPart::Typed(TypedPart {
            kind: Some(kind),
            text: None,
            extras: Some(Box::new(extras)),
        })
    }
}

impl TypedPart {
    fn meaning(&self) -> PartMeaning<'_> {
        let extras = self.extras.as_deref();
        let media = extras.and_then(|extras| extras.media.as_ref());
        let named = extras.is_some_and(|extras| extras.uuid.is_some());
        match self.kind.as_deref() {
            kind if named || kind.is_none() => media.map_or(
                PartMeaning::Unknown(kind.unwrap_or("unnamed")),
                PartMeaning::Media,
            ),
            Some("text") => self
                .text
                .as_deref()
                .map_or(PartMeaning::Skipped, PartMeaning::Text),
            Some("refusal") => extras
                .and_then(|extras| extras.refusal.as_deref())
                .map_or(PartMeaning::Skipped, PartMeaning::Text),
            Some(kind @ ("input_text" | "output_text")) => self
                .text
                .as_deref()
                .map_or(PartMeaning::MissingValue(kind), PartMeaning::Text),
            Some(kind @ "thinking") => extras
                .and_then(|extras| extras.thinking.as_deref())
                .map_or(PartMeaning::MissingValue(kind), PartMeaning::Text),
            Some(kind @ "tool_reference") => extras
                .and_then(|extras| extras.name.as_deref())
                .map_or(PartMeaning::MissingValue(kind), PartMeaning::Reference),
            Some(kind) => media.map_or(PartMeaning::Unknown(kind), PartMeaning::Media),
            None => PartMeaning::Unknown("unnamed"),
        }
    }
}

/// The fields of a part before its interpretation.
#[derive(Default)]
struct RawPart {
    kind: Option<String>,
    text: Option<String>,
    extras: PartExtras,
    image_url: Option<UrlField>,
    audio_url: Option<UrlField>,
    video_url: Option<UrlField>,
    input_audio: Option<InputAudioField>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum UrlField {
    Bare(String),
    Object { url: String },
    Other(IgnoredAny),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum InputAudioField {
    Object { data: String },
    Other(IgnoredAny),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NameField {
    Text(String),
    Other(IgnoredAny),
}

impl UrlField {
    fn source(self) -> Option<MediaSource> {
        match self {
            UrlField::Bare(url) | UrlField::Object { url } => Some(MediaSource::Url(url)),
            UrlField::Other(IgnoredAny) => None,
        }
    }
}

impl InputAudioField {
    fn source(self) -> Option<MediaSource> {
        match self {
            InputAudioField::Object { data } if !data.is_empty() => Some(MediaSource::Base64(data)),
            InputAudioField::Object { .. } | InputAudioField::Other(IgnoredAny) => None,
        }
    }
}

impl RawPart {
    /// Deserializes the value of a key. A media key is present even if its value is `null`.
    fn read_key<'de, A: MapAccess<'de>>(
        &mut self,
        key: Cow<'de, str>,
        part: &mut A,
    ) -> Result<(), A::Error> {
        match &*key {
            "type" => self.kind = part.next_value()?,
            "text" => self.text = part.next_value()?,
            "refusal" => self.extras.refusal = part.next_value()?,
            "thinking" => self.extras.thinking = part.next_value()?,
            "name" => {
                self.extras.name = match part.next_value()? {
                    NameField::Text(name) => Some(name),
                    NameField::Other(IgnoredAny) => None,
                }
            }
            "uuid" => self.extras.uuid = part.next_value()?,
            "image_url" => self.image_url = Some(part.next_value()?),
            "audio_url" => self.audio_url = Some(part.next_value()?),
            "video_url" => self.video_url = Some(part.next_value()?),
            "input_audio" => self.input_audio = Some(part.next_value()?),
            _ => {
                self.extras
                    .unknown_keys
                    .insert(key.into_owned(), part.next_value()?);
            }
        }
        Ok(())
    }

    /// Removes the media item from the part and returns it.
    fn take_media(&mut self) -> Option<(MediaModality, Option<MediaSource>)> {
        let image = |wire: &mut Self| Some((MediaModality::Image, wire.image_url.take()?.source()));
        let audio = |wire: &mut Self| Some((MediaModality::Audio, wire.audio_url.take()?.source()));
        let sound =
            |wire: &mut Self| Some((MediaModality::Audio, wire.input_audio.take()?.source()));
        let video = |wire: &mut Self| Some((MediaModality::Video, wire.video_url.take()?.source()));
        match self.kind.as_deref().filter(|_| self.extras.uuid.is_none()) {
            Some("image_url" | "input_image") => image(self),
            Some("audio_url") => audio(self),
            Some("input_audio") => sound(self),
            Some("video_url") => video(self),
            Some(_) => None,
            None if self.image_url.is_some() => image(self),
            None if EMBEDDING_KEYS
                .iter()
                .any(|key| self.extras.unknown_keys.contains_key(*key)) =>
            {
                None
            }
            None => audio(self).or_else(|| sound(self)).or_else(|| video(self)),
        }
    }
}

impl From<RawPart> for TypedPart {
    fn from(mut wire: RawPart) -> Self {
        let media = wire.take_media();
        // The engine converts other values with Python's `str`, which is not reproduced.
        let name_of = |uuid: &JsonValue| match uuid {
            JsonValue::String(name) => Some(name.clone()),
            JsonValue::Integer(number) => Some(number.to_string()),
            _ => None,
        };
        let name = wire.extras.uuid.as_ref().map(name_of);
        let media = media.filter(|_| name != Some(None));
        let media = media.map(|(modality, source)| MediaItem {
            modality,
            source,
            uuid: name.flatten(),
        });
        let extras = PartExtras {
            media,
            ..wire.extras
        };
        Self {
            kind: wire.kind,
            text: wire.text,
            extras: (extras != PartExtras::default()).then(|| Box::new(extras)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(json: &str) -> ContentPart {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn image_part_meaning_matches_engine() {
        let image = |source: Option<&str>, uuid: Option<&str>| MediaItem {
            modality: MediaModality::Image,
            source: source.map(|url| MediaSource::Url(url.to_owned())),
            uuid: uuid.map(str::to_owned),
        };
        for (json, media) in [
            (
                r#"{"type":"image_url","image_url":{"url":"u","detail":"low"}}"#,
                image(Some("u"), None),
            ),
            (
                r#"{"type":"image_url","image_url":"u"}"#,
                image(Some("u"), None),
            ),
            (r#"{"image_url":"u"}"#, image(Some("u"), None)),
            (
                r#"{"type":"input_image","image_url":"u"}"#,
                image(Some("u"), None),
            ),
            (
                r#"{"type":"image_url","image_url":null,"uuid":"n"}"#,
                image(None, Some("n")),
            ),
            (
                r#"{"type":"any","image_url":{"url":"u"},"uuid":"n"}"#,
                image(Some("u"), Some("n")),
            ),
            (r#"{"type":"image_url","image_url":7}"#, image(None, None)),
            (
                r#"{"type":"image_url","image_url":"u","uuid":7}"#,
                image(Some("u"), Some("7")),
            ),
        ] {
            assert_eq!(part(json).meaning(), PartMeaning::Media(&media), "{json}");
        }
    }

    #[test]
    fn other_part_meaning_matches_engine() {
        let sound = part(r#"{"type":"input_audio","input_audio":{"data":"AA","format":"wav"}}"#);
        let PartMeaning::Media(MediaItem {
            modality: MediaModality::Audio,
            source: Some(MediaSource::Base64(_)),
            ..
        }) = sound.meaning()
        else {
            panic!("{sound:?}")
        };
        for (json, meaning) in [
            (r#""a""#, PartMeaning::Text("a")),
            (
                r#"{"type":"text","text":"a","cache_control":{}}"#,
                PartMeaning::Text("a"),
            ),
            (r#"{"type":"text","text":null}"#, PartMeaning::Skipped),
            (
                r#"{"type":"refusal","refusal":"a"}"#,
                PartMeaning::Text("a"),
            ),
            (
                r#"{"type":"thinking","thinking":"a"}"#,
                PartMeaning::Text("a"),
            ),
            (
                r#"{"type":"input_text"}"#,
                PartMeaning::MissingValue("input_text"),
            ),
            (
                r#"{"type":"tool_reference","name":"f"}"#,
                PartMeaning::Reference("f"),
            ),
            (
                r#"{"type":"text","text":"a","uuid":"u"}"#,
                PartMeaning::Unknown("text"),
            ),
            (
                r#"{"type":"image_url","image_url":"u","uuid":[]}"#,
                PartMeaning::Unknown("image_url"),
            ),
            (r#"{"text":"a"}"#, PartMeaning::Unknown("unnamed")),
            (
                r#"{"type":"image_embeds","image_embeds":"AA"}"#,
                PartMeaning::Unknown("image_embeds"),
            ),
            (
                r#"{"image_embeds":"AA","video_url":"u"}"#,
                PartMeaning::Unknown("unnamed"),
            ),
        ] {
            assert_eq!(part(json).meaning(), meaning, "{json}");
        }
    }

    #[test]
    fn only_unknown_keys_reach_templates() {
        let part =
            part(r#"{"type":"text","text":"a","cache_control":{"x":1},"name":"n","file":1}"#);
        let extra: Vec<_> = part.unknown_keys().map(|(key, _)| key.as_str()).collect();
        assert_eq!(extra, ["cache_control"]);
    }
}
