//! The parts of a message: texts, and what is shown or played. A part is read as vLLM reads it
//! (`renderers/chat_utils.py` of 0.32): by its type, or where it has none, or where the client names the item itself, by the
//! first key that holds something.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::json::{JsonObject, JsonValue};

/// One part of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// A bare string.
    Bare(String),
    /// A typed part.
    Typed(Typed),
}

// By hand, because what serde derives for such a choice copies each text once more.
impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PartVisitor)
    }
}

struct PartVisitor;

impl<'de> Visitor<'de> for PartVisitor {
    type Value = Part;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a part with a type")
    }

    fn visit_str<E>(self, text: &str) -> Result<Part, E> {
        Ok(Part::Bare(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Part, E> {
        Ok(Part::Bare(text))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut part: A) -> Result<Part, A::Error> {
        let mut wire = Wire::default();
        while let Some(key) = part.next_key::<Cow<'de, str>>()? {
            wire.read(key, &mut part)?;
        }
        Ok(Part::Typed(wire.into()))
    }
}

/// A part with a type, as sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Typed {
    /// `text`, `image_url` and so on.
    pub kind: Option<String>,
    /// Text of a text part.
    pub text: Option<String>,
    /// Everything that most parts do not have.
    pub more: Option<Box<More>>,
}

/// What most parts do not have.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct More {
    /// Text of a refusal.
    pub refusal: Option<String>,
    /// Text of a thought.
    pub thinking: Option<String>,
    /// A tool that is referred to.
    pub name: Option<String>,
    /// The client's name for an item.
    pub uuid: Option<JsonValue>,
    /// What is shown or played.
    pub media: Option<Media>,
    /// Keys of which the engine knows nothing, so that its templates may.
    pub extra: JsonObject,
}

/// Something that is shown or played.
#[derive(Clone, Debug, PartialEq)]
pub struct Media {
    /// What it is.
    pub modality: Modality,
    /// Where it is, or all of it; absent where only its name is given.
    pub source: Option<Source>,
    /// The client's name for it.
    pub uuid: Option<String>,
}

/// Where the content of an item comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// A URL, which may hold the content itself.
    Url(String),
    /// The content in base64.
    Base64(String),
}

/// A kind of content beside text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Modality {
    /// A still image.
    Image,
    /// Sound.
    Audio,
    /// Moving images.
    Video,
}

impl Modality {
    /// As engines and templates call it.
    pub fn as_str(self) -> &'static str {
        match self {
            Modality::Image => "image",
            Modality::Audio => "audio",
            Modality::Video => "video",
        }
    }
}

/// What a part is to the engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Meaning<'p> {
    /// A text.
    Text(&'p str),
    /// A text that is not there, over which the engine passes.
    Nothing,
    /// Something shown or played.
    Media(&'p Media),
    /// The name of a tool.
    Reference(&'p str),
    /// A part of a known type without what it should hold.
    Hollow(&'p str),
    /// Something of this type, of which we know nothing.
    Other(&'p str),
}

/// Keys that the engine knows, whatever the type of the part.
const KNOWN: [&str; 18] = [
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

/// Keys that go before those of sound and moving images, in the engine's order of looking.
const EMBEDDINGS: [&str; 5] = [
    "image_pil",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "prompt_embeds",
];

impl Part {
    /// What it is to the engine.
    pub fn meaning(&self) -> Meaning<'_> {
        match self {
            Part::Bare(text) => Meaning::Text(text),
            Part::Typed(part) => part.meaning(),
        }
    }

    /// What it shows or plays.
    pub fn media(&self) -> Option<&Media> {
        match self.meaning() {
            Meaning::Media(media) => Some(media),
            _ => None,
        }
    }

    /// Keys of which the engine knows nothing.
    pub fn extra(&self) -> impl Iterator<Item = (&String, &JsonValue)> {
        let more = match self {
            Part::Bare(_) => None,
            Part::Typed(part) => part.more.as_deref(),
        };
        more.into_iter()
            .flat_map(|more| &more.extra)
            .filter(|(key, _)| !KNOWN.contains(&key.as_str()))
    }

    /// Whether it is something else than text.
    pub(super) fn is_media(&self) -> bool {
        matches!(self.meaning(), Meaning::Media(_) | Meaning::Other(_))
    }

    pub(super) fn text_bytes(&self) -> usize {
        match (self, self.meaning()) {
            (_, Meaning::Text(text)) => text.len(),
            // Parts of other APIs, such as those of reasoning.
            (Part::Typed(part), Meaning::Other(_)) => part.text.as_ref().map_or(0, String::len),
            _ => 0,
        }
    }

    pub(super) fn typed(kind: &str, text: Option<String>) -> Self {
        Part::Typed(Typed {
            kind: Some(kind.to_owned()),
            text,
            more: None,
        })
    }

    pub(crate) fn of_media(media: Media) -> Self {
        let kind = format!("{}_url", media.modality.as_str());
        let more = More {
            media: Some(media),
            ..More::default()
        };
        Part::Typed(Typed {
            kind: Some(kind),
            text: None,
            more: Some(Box::new(more)),
        })
    }
}

impl Typed {
    fn meaning(&self) -> Meaning<'_> {
        let more = self.more.as_deref();
        let media = more.and_then(|more| more.media.as_ref());
        let named = more.is_some_and(|more| more.uuid.is_some());
        match self.kind.as_deref() {
            kind if named || kind.is_none() => {
                media.map_or(Meaning::Other(kind.unwrap_or("unnamed")), Meaning::Media)
            }
            Some("text") => self.text.as_deref().map_or(Meaning::Nothing, Meaning::Text),
            Some("refusal") => more
                .and_then(|more| more.refusal.as_deref())
                .map_or(Meaning::Nothing, Meaning::Text),
            Some(kind @ ("input_text" | "output_text")) => self
                .text
                .as_deref()
                .map_or(Meaning::Hollow(kind), Meaning::Text),
            Some(kind @ "thinking") => more
                .and_then(|more| more.thinking.as_deref())
                .map_or(Meaning::Hollow(kind), Meaning::Text),
            Some(kind @ "tool_reference") => more
                .and_then(|more| more.name.as_deref())
                .map_or(Meaning::Hollow(kind), Meaning::Reference),
            Some(kind) => media.map_or(Meaning::Other(kind), Meaning::Media),
            None => Meaning::Other("unnamed"),
        }
    }
}

/// A part as it is sent.
#[derive(Default)]
struct Wire {
    kind: Option<String>,
    text: Option<String>,
    refusal: Option<String>,
    thinking: Option<String>,
    name: Option<String>,
    uuid: Option<JsonValue>,
    image_url: Option<Url>,
    audio_url: Option<Url>,
    video_url: Option<Url>,
    input_audio: Option<Sound>,
    extra: JsonObject,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Url {
    Bare(String),
    Object { url: String },
    Other(IgnoredAny),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Sound {
    Object { data: String },
    Other(IgnoredAny),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Named {
    Text(String),
    Other(IgnoredAny),
}

impl Url {
    fn source(self) -> Option<Source> {
        match self {
            Url::Bare(url) | Url::Object { url } => Some(Source::Url(url)),
            Url::Other(IgnoredAny) => None,
        }
    }
}

impl Sound {
    fn source(self) -> Option<Source> {
        match self {
            Sound::Object { data } if !data.is_empty() => Some(Source::Base64(data)),
            Sound::Object { .. } | Sound::Other(IgnoredAny) => None,
        }
    }
}

impl Wire {
    /// Reads the value of a key. For media a key counts as present even if its value is `null`.
    fn read<'de, A: MapAccess<'de>>(
        &mut self,
        key: Cow<'de, str>,
        part: &mut A,
    ) -> Result<(), A::Error> {
        match &*key {
            "type" => self.kind = part.next_value()?,
            "text" => self.text = part.next_value()?,
            "refusal" => self.refusal = part.next_value()?,
            "thinking" => self.thinking = part.next_value()?,
            "name" => {
                self.name = match part.next_value()? {
                    Named::Text(name) => Some(name),
                    Named::Other(IgnoredAny) => None,
                }
            }
            "uuid" => self.uuid = part.next_value()?,
            "image_url" => self.image_url = Some(part.next_value()?),
            "audio_url" => self.audio_url = Some(part.next_value()?),
            "video_url" => self.video_url = Some(part.next_value()?),
            "input_audio" => self.input_audio = Some(part.next_value()?),
            _ => {
                self.extra.insert(key.into_owned(), part.next_value()?);
            }
        }
        Ok(())
    }

    /// What the part shows or plays, taken out of it.
    fn media(&mut self) -> Option<(Modality, Option<Source>)> {
        let image = |wire: &mut Self| Some((Modality::Image, wire.image_url.take()?.source()));
        let audio = |wire: &mut Self| Some((Modality::Audio, wire.audio_url.take()?.source()));
        let sound = |wire: &mut Self| Some((Modality::Audio, wire.input_audio.take()?.source()));
        let video = |wire: &mut Self| Some((Modality::Video, wire.video_url.take()?.source()));
        match self.kind.as_deref().filter(|_| self.uuid.is_none()) {
            Some("image_url" | "input_image") => image(self),
            Some("audio_url") => audio(self),
            Some("input_audio") => sound(self),
            Some("video_url") => video(self),
            Some(_) => None,
            None if self.image_url.is_some() => image(self),
            None if EMBEDDINGS.iter().any(|key| self.extra.contains_key(*key)) => None,
            None => audio(self).or_else(|| sound(self)).or_else(|| video(self)),
        }
    }
}

impl From<Wire> for Typed {
    fn from(mut wire: Wire) -> Self {
        let media = wire.media();
        // Other values have names that only Python gives them.
        let name_of = |uuid: &JsonValue| match uuid {
            JsonValue::String(name) => Some(name.clone()),
            JsonValue::Integer(number) => Some(number.to_string()),
            _ => None,
        };
        let name = wire.uuid.as_ref().map(name_of);
        let media = media.filter(|_| name != Some(None));
        let media = media.map(|(modality, source)| Media {
            modality,
            source,
            uuid: name.flatten(),
        });
        let Wire {
            kind,
            text,
            refusal,
            thinking,
            name,
            uuid,
            extra,
            ..
        } = wire;
        let more = More {
            refusal,
            thinking,
            name,
            uuid,
            media,
            extra,
        };
        let more = (more != More::default()).then(|| Box::new(more));
        Self { kind, text, more }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(json: &str) -> Part {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn parts_mean_what_they_mean_to_the_engine() {
        let image = |source: Option<&str>, uuid: Option<&str>| Media {
            modality: Modality::Image,
            source: source.map(|url| Source::Url(url.to_owned())),
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
            assert_eq!(part(json).meaning(), Meaning::Media(&media), "{json}");
        }
        let sound = part(r#"{"type":"input_audio","input_audio":{"data":"AA","format":"wav"}}"#);
        let Meaning::Media(Media {
            modality: Modality::Audio,
            source: Some(Source::Base64(_)),
            ..
        }) = sound.meaning()
        else {
            panic!("{sound:?}")
        };
        for (json, meaning) in [
            (r#""a""#, Meaning::Text("a")),
            (
                r#"{"type":"text","text":"a","cache_control":{}}"#,
                Meaning::Text("a"),
            ),
            (r#"{"type":"text","text":null}"#, Meaning::Nothing),
            (r#"{"type":"refusal","refusal":"a"}"#, Meaning::Text("a")),
            (r#"{"type":"thinking","thinking":"a"}"#, Meaning::Text("a")),
            (r#"{"type":"input_text"}"#, Meaning::Hollow("input_text")),
            (
                r#"{"type":"tool_reference","name":"f"}"#,
                Meaning::Reference("f"),
            ),
            (
                r#"{"type":"text","text":"a","uuid":"u"}"#,
                Meaning::Other("text"),
            ),
            (
                r#"{"type":"image_url","image_url":"u","uuid":[]}"#,
                Meaning::Other("image_url"),
            ),
            (r#"{"text":"a"}"#, Meaning::Other("unnamed")),
            (
                r#"{"type":"image_embeds","image_embeds":"AA"}"#,
                Meaning::Other("image_embeds"),
            ),
            (
                r#"{"image_embeds":"AA","video_url":"u"}"#,
                Meaning::Other("unnamed"),
            ),
        ] {
            assert_eq!(part(json).meaning(), meaning, "{json}");
        }
    }

    #[test]
    fn only_keys_that_the_engine_does_not_know_reach_templates() {
        let part =
            part(r#"{"type":"text","text":"a","cache_control":{"x":1},"name":"n","file":1}"#);
        let extra: Vec<_> = part.extra().map(|(key, _)| key.as_str()).collect();
        assert_eq!(extra, ["cache_control"]);
    }
}
