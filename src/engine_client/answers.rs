//! The answers of engines, in vLLM's shapes, as far as they are needed. Whatever else they say is not looked at.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::EngineError;

/// The answer of `/tokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Tokenized {
    /// The prompt.
    pub tokens: Vec<u32>,
}

/// One prompt as an engine would compute it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The prompt.
    pub token_ids: Vec<u32>,
    /// Images and the like in it, in the order of their places.
    pub objects: Vec<RenderedObject>,
}

/// An image or the like in a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedObject {
    /// `image`, `audio`, `video`.
    pub modality: String,
    /// Under which name the engine caches it.
    pub hash: String,
    /// Its first placeholder token.
    pub offset: usize,
    /// How many there are.
    pub length: usize,
}

/// One model of `/v1/models`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct EngineModel {
    /// Under which name it is asked for.
    pub id: String,
    /// What it was loaded from.
    #[serde(default)]
    pub root: Option<String>,
    /// The model below it, where it is an adapter.
    #[serde(default)]
    pub parent: Option<String>,
    /// Its longest context.
    #[serde(default)]
    pub max_model_len: Option<u64>,
}

/// Where one rank publishes its KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventsOfRank {
    /// Which rank.
    pub rank: u32,
    /// Whether it publishes any.
    pub enabled: bool,
    /// ZMQ endpoint of the events, as the engine writes it: `tcp://*:5557` is at the engine's own host.
    pub endpoint: String,
    /// Where missed batches are asked for.
    pub replay_endpoint: Option<String>,
    /// First frame of its messages.
    pub topic: String,
}

#[derive(Deserialize)]
pub(super) struct ModelList {
    pub(super) data: Vec<EngineModel>,
}

#[derive(Deserialize)]
pub(super) struct Version {
    pub(super) version: String,
}

/// What a render endpoint says: a list, or the one where there is only one. Read as it comes: to try one shape and then the
/// other, serde would keep all of it meanwhile, and an answer may be megabytes of numbers.
pub(super) struct Renderings(Vec<Rendering>);

impl<'de> Deserialize<'de> for Renderings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = Renderings;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a prompt, or a list of prompts")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Renderings, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(Renderings)
            }

            fn visit_map<A: MapAccess<'de>>(self, one: A) -> Result<Renderings, A::Error> {
                Rendering::deserialize(MapAccessDeserializer::new(one))
                    .map(|one| Renderings(vec![one]))
            }
        }

        deserializer.deserialize_any(Either)
    }
}

#[derive(Deserialize)]
pub(super) struct Rendering {
    token_ids: Vec<u32>,
    #[serde(default)]
    features: Option<Features>,
}

#[derive(Deserialize)]
struct Features {
    #[serde(default)]
    mm_hashes: BTreeMap<String, Vec<String>>,
    #[serde(default)]
    mm_placeholders: BTreeMap<String, Vec<Placeholder>>,
}

#[derive(Deserialize)]
struct Placeholder {
    offset: usize,
    length: usize,
}

impl Renderings {
    pub(super) fn read(self) -> Result<Vec<Rendered>, EngineError> {
        self.0.into_iter().map(Rendering::read).collect()
    }
}

impl Rendering {
    fn read(self) -> Result<Rendered, EngineError> {
        let objects = self.features.map_or_else(
            || Ok(Vec::new()),
            |features| features.objects(self.token_ids.len()),
        )?;
        if self.token_ids.is_empty() {
            return Err(EngineError::Unreadable("a prompt without tokens"));
        }
        Ok(Rendered {
            token_ids: self.token_ids,
            objects,
        })
    }
}

impl Features {
    /// Names and places belong together by their order; where they do not fit, nothing is certain.
    fn objects(mut self, tokens: usize) -> Result<Vec<RenderedObject>, EngineError> {
        let mut objects = Vec::new();
        for (modality, hashes) in self.mm_hashes {
            let places = self.mm_placeholders.remove(&modality).unwrap_or_default();
            if places.len() != hashes.len() {
                return Err(EngineError::Unreadable("not as many places as objects"));
            }
            for (hash, Placeholder { offset, length }) in hashes.into_iter().zip(places) {
                if offset.checked_add(length).is_none_or(|end| end > tokens) {
                    return Err(EngineError::Unreadable(
                        "an object behind the end of its prompt",
                    ));
                }
                objects.push(RenderedObject {
                    modality: modality.clone(),
                    hash,
                    offset,
                    length,
                });
            }
        }
        if self
            .mm_placeholders
            .values()
            .any(|places| !places.is_empty())
        {
            return Err(EngineError::Unreadable("not as many objects as places"));
        }
        objects.sort_by_key(|object| object.offset);
        Ok(objects)
    }
}

/// By rank; the keys are numbers, which JSON writes as text.
#[derive(Deserialize)]
#[serde(transparent)]
pub(super) struct EventSources(BTreeMap<String, Events>);

#[derive(Deserialize)]
struct Events {
    #[serde(default)]
    enable_kv_cache_events: bool,
    #[serde(default)]
    publisher: Option<String>,
    #[serde(default)]
    endpoint: String,
    #[serde(default)]
    replay_endpoint: Option<String>,
    #[serde(default)]
    topic: String,
}

impl EventSources {
    pub(super) fn read(self) -> Result<Vec<EventsOfRank>, EngineError> {
        let one = |(rank, events): (String, Events)| {
            let rank = rank
                .parse()
                .map_err(|_| EngineError::Unreadable("a rank that is no number"))?;
            let silent = events.publisher.as_deref() == Some("null");
            Ok(EventsOfRank {
                rank,
                enabled: events.enable_kv_cache_events && !silent,
                endpoint: events.endpoint,
                replay_endpoint: events
                    .replay_endpoint
                    .filter(|endpoint| !endpoint.is_empty()),
                topic: events.topic,
            })
        };
        let mut ranks: Vec<_> = self
            .0
            .into_iter()
            .map(one)
            .collect::<Result<_, EngineError>>()?;
        ranks.sort_by_key(|events| events.rank);
        Ok(ranks)
    }
}

/// What an engine says with a refusal: OpenAI's shape, the older flat one, or FastAPI's.
pub(super) fn message(text: &[u8]) -> Option<String> {
    let said: Value = serde_json::from_slice(text).ok()?;
    let found = [
        &said["error"]["message"],
        &said["message"],
        &said["detail"],
        &said["error"],
    ];
    found
        .into_iter()
        .find_map(|value| Some(value.as_str()?.to_owned()))
}
