//! Responses of engines, in vLLM's format. Only the fields in use are parsed.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::EngineError;

/// Response of `/tokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct TokenizeResponse {
    /// Token ids of the prompt.
    pub tokens: Vec<u32>,
}

/// One prompt as the engine would compute it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineRendering {
    /// Token ids of the prompt.
    pub token_ids: Vec<u32>,
    /// Multimodal objects, in the order of their positions.
    pub objects: Vec<RenderedObject>,
}

/// A multimodal object in a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedObject {
    /// `image`, `audio`, `video`.
    pub modality: String,
    /// Identifier under which the engine caches the object.
    pub hash: String,
    /// Index of the first placeholder token.
    pub offset: usize,
    /// Number of placeholder tokens.
    pub length: usize,
}

/// One model of `/v1/models`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct EngineModel {
    /// Name in requests.
    pub id: String,
    /// Model path or repository that the engine loaded.
    pub root: Option<String>,
    /// Base model of an adapter.
    pub parent: Option<String>,
    /// Maximum context length in tokens.
    pub max_model_len: Option<u64>,
}

/// Event source of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankEventSource {
    /// Data-parallel rank.
    pub rank: u32,
    /// True if the rank publishes events.
    pub enabled: bool,
    /// ZMQ endpoint of the events as configured in the engine. The host of `tcp://*:5557` is the
    /// engine's own.
    pub endpoint: String,
    /// ZMQ endpoint of replays.
    pub replay_endpoint: Option<String>,
    /// First frame of the messages.
    pub topic: String,
}

#[derive(Deserialize)]
pub(super) struct ModelList {
    pub(super) data: Vec<EngineModel>,
}

#[derive(Deserialize)]
pub(super) struct VersionResponse {
    pub(super) version: String,
}

/// Response of a render endpoint: a list of prompts or a single prompt. A visitor decodes it in one
/// pass, because an untagged enum would buffer the response, which may contain megabytes of
/// numbers.
pub(super) struct RenderResponse(Vec<RenderedPromptBody>);

impl<'de> Deserialize<'de> for RenderResponse {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptOrListVisitor;

        impl<'de> Visitor<'de> for PromptOrListVisitor {
            type Value = RenderResponse;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a prompt, or a list of prompts")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<RenderResponse, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(RenderResponse)
            }

            fn visit_map<A: MapAccess<'de>>(self, one: A) -> Result<RenderResponse, A::Error> {
                RenderedPromptBody::deserialize(MapAccessDeserializer::new(one))
                    .map(|one| RenderResponse(vec![one]))
            }
        }

        deserializer.deserialize_any(PromptOrListVisitor)
    }
}

#[derive(Deserialize)]
pub(super) struct RenderedPromptBody {
    token_ids: Vec<u32>,
    features: Option<MultimodalFeatures>,
}

#[derive(Deserialize)]
struct MultimodalFeatures {
    #[serde(default)]
    mm_hashes: BTreeMap<String, Vec<String>>,
    #[serde(default)]
    mm_placeholders: BTreeMap<String, Vec<PlaceholderRange>>,
}

#[derive(Deserialize)]
struct PlaceholderRange {
    offset: usize,
    length: usize,
}

impl RenderResponse {
    pub(super) fn into_renderings(self) -> Result<Vec<EngineRendering>, EngineError> {
        self.0
            .into_iter()
            .map(RenderedPromptBody::into_rendering)
            .collect()
    }
}

impl RenderedPromptBody {
    fn into_rendering(self) -> Result<EngineRendering, EngineError> {
        let objects = self.features.map_or_else(
            || Ok(Vec::new()),
            |features| features.objects(self.token_ids.len()),
        )?;
        if self.token_ids.is_empty() {
            return Err(EngineError::Unreadable("a prompt without tokens"));
        }
        Ok(EngineRendering {
            token_ids: self.token_ids,
            objects,
        })
    }
}

impl MultimodalFeatures {
    /// Matches hashes and placeholder ranges by order. If their numbers differ, the response is
    /// invalid.
    fn objects(mut self, tokens: usize) -> Result<Vec<RenderedObject>, EngineError> {
        let mut objects = Vec::new();
        for (modality, hashes) in self.mm_hashes {
            let ranges = self.mm_placeholders.remove(&modality).unwrap_or_default();
            if ranges.len() != hashes.len() {
                return Err(EngineError::Unreadable(
                    "fewer or more placeholder ranges than objects",
                ));
            }
            for (hash, PlaceholderRange { offset, length }) in hashes.into_iter().zip(ranges) {
                if offset.checked_add(length).is_none_or(|end| end > tokens) {
                    return Err(EngineError::Unreadable(
                        "an object beyond the end of its prompt",
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
            .any(|ranges| !ranges.is_empty())
        {
            return Err(EngineError::Unreadable(
                "placeholder ranges without objects",
            ));
        }
        objects.sort_by_key(|object| object.offset);
        Ok(objects)
    }
}

/// Event settings by rank. JSON keys are strings, so ranks are parsed.
#[derive(Deserialize)]
#[serde(transparent)]
pub(super) struct EventSourcesResponse(BTreeMap<String, RankEventsConfig>);

#[derive(Deserialize)]
struct RankEventsConfig {
    #[serde(default)]
    enable_kv_cache_events: bool,
    publisher: Option<String>,
    #[serde(default)]
    endpoint: String,
    replay_endpoint: Option<String>,
    #[serde(default)]
    topic: String,
}

impl EventSourcesResponse {
    pub(super) fn into_sources(self) -> Result<Vec<RankEventSource>, EngineError> {
        let one = |(rank, events): (String, RankEventsConfig)| {
            let rank = rank
                .parse()
                .map_err(|_| EngineError::Unreadable("a rank that is not a number"))?;
            let silent = events.publisher.as_deref() == Some("null");
            Ok(RankEventSource {
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

/// Returns the message of an error response in OpenAI's form, the older flat form, or FastAPI's.
pub(super) fn error_message(text: &[u8]) -> Option<String> {
    let body: Value = serde_json::from_slice(text).ok()?;
    let found = [
        &body["error"]["message"],
        &body["message"],
        &body["detail"],
        &body["error"],
    ];
    found
        .into_iter()
        .find_map(|value| Some(value.as_str()?.to_owned()))
}
