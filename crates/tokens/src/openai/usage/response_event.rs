//! Fields of one response event or complete response, in the formats of chat, completions,
//! embeddings, the Responses API, the Messages API, and SGLang's native API.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::TokenUsage;

/// Usage and content of one event.
#[derive(Debug, Default)]
pub(super) struct ParsedEvent {
    pub(super) counts: Option<UsageCounts>,
    pub(super) content: EventContent,
    /// True if the event ends the response.
    pub(super) is_last: bool,
}

/// Output tokens of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum EventContent {
    /// No content.
    #[default]
    None,
    /// Content with an unknown number of tokens.
    Some,
    /// Content with this many tokens, at least one.
    Tokens(u64),
}

impl EventContent {
    /// Returns the number of tokens, or one if it is unknown.
    pub(super) fn tokens(self) -> u64 {
        match self {
            EventContent::None => 0,
            EventContent::Some => 1,
            EventContent::Tokens(tokens) => tokens,
        }
    }

    fn new(is_there: bool, tokens: u64) -> Self {
        match (is_there, tokens) {
            (_, 1..) => EventContent::Tokens(tokens),
            (true, 0) => EventContent::Some,
            (false, 0) => EventContent::None,
        }
    }

    /// Adds the content of two choices.
    fn combine(self, other: Self) -> Self {
        match (self, other) {
            (EventContent::None, content) | (content, EventContent::None) => content,
            (EventContent::Some, EventContent::Some) => EventContent::Some,
            (one, other) => EventContent::Tokens(one.tokens().saturating_add(other.tokens())),
        }
    }
}

/// Token counts by their names in the APIs. A later count replaces an earlier one, unless it is
/// absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct UsageCounts {
    prompt_tokens: OptionalCount,
    completion_tokens: OptionalCount,
    prompt_tokens_details: TokenDetails,
    /// Prompt tokens in the Responses and Messages APIs.
    input_tokens: OptionalCount,
    output_tokens: OptionalCount,
    input_tokens_details: TokenDetails,
    /// The Messages API reports these in addition to `input_tokens`.
    cache_read_input_tokens: OptionalCount,
    cache_creation_input_tokens: OptionalCount,
    /// Cached tokens in SGLang's native API.
    cached_tokens: OptionalCount,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TokenDetails {
    cached_tokens: OptionalCount,
}

/// A count that may be absent or not a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OptionalCount(Option<u64>);

impl UsageCounts {
    pub(super) fn merge(&mut self, mut later: Self) {
        for (count, later) in self.counts_mut().into_iter().zip(later.counts_mut()) {
            count.0 = later.0.or(count.0);
        }
    }

    fn add(&mut self, mut other: Self) {
        for (count, other) in self.counts_mut().into_iter().zip(other.counts_mut()) {
            count.0 = count.0.map_or(other.0, |sum| {
                Some(sum.saturating_add(other.0.unwrap_or(0)))
            });
        }
    }

    fn counts_mut(&mut self) -> [&mut OptionalCount; 9] {
        [
            &mut self.prompt_tokens,
            &mut self.completion_tokens,
            &mut self.prompt_tokens_details.cached_tokens,
            &mut self.input_tokens,
            &mut self.output_tokens,
            &mut self.input_tokens_details.cached_tokens,
            &mut self.cache_read_input_tokens,
            &mut self.cache_creation_input_tokens,
            &mut self.cached_tokens,
        ]
    }

    pub(super) fn into_usage(self) -> TokenUsage {
        let additional = [
            self.cache_read_input_tokens,
            self.cache_creation_input_tokens,
        ];
        let input = additional
            .into_iter()
            .fold(self.input_tokens.0.unwrap_or(0), |sum, count| {
                sum.saturating_add(count.0.unwrap_or(0))
            });
        let details = self
            .prompt_tokens_details
            .cached_tokens
            .0
            .or(self.input_tokens_details.cached_tokens.0);
        TokenUsage {
            prompt_tokens: self.prompt_tokens.0.unwrap_or(input),
            completion_tokens: self
                .completion_tokens
                .0
                .or(self.output_tokens.0)
                .unwrap_or(0),
            cached_tokens: details
                .or(self.cache_read_input_tokens.0)
                .or(self.cached_tokens.0),
        }
    }
}

/// Parses one event. Returns `None` if it is not JSON of a known format.
pub(super) fn parse_event(json: &[u8]) -> Option<ParsedEvent> {
    match json.iter().find(|byte| !byte.is_ascii_whitespace())? {
        b'{' => Some(
            serde_json::from_slice::<ResponseEvent<'_>>(json)
                .ok()?
                .to_parsed(),
        ),
        // SGLang's native response to several prompts.
        b'[' => {
            let mut sum = ParsedEvent::default();
            for answer in serde_json::from_slice::<Vec<&RawValue>>(json).ok()? {
                let parsed = parse_object(answer)?;
                if let Some(counts) = parsed.counts {
                    sum.counts.get_or_insert_default().add(counts);
                }
                sum.content = sum.content.combine(parsed.content);
            }
            Some(sum)
        }
        _ => None,
    }
}

fn parse_object(json: &RawValue) -> Option<ParsedEvent> {
    json.get()
        .starts_with('{')
        .then(|| serde_json::from_str::<ResponseEvent<'_>>(json.get()).ok())?
        .map(|answer| answer.to_parsed())
}

/// Parses a usage object.
pub(super) fn parse_counts(json: &[u8]) -> Option<UsageCounts> {
    if json.first() != Some(&b'{') {
        return None;
    }
    serde_json::from_slice(json).ok()
}

fn parse_raw_counts(json: Option<&RawValue>) -> Option<UsageCounts> {
    parse_counts(json?.get().as_bytes())
}

#[derive(Deserialize)]
struct ResponseEvent<'a> {
    /// Event type in the Responses and Messages APIs, or type of a complete response.
    #[serde(default, borrow, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(default, borrow)]
    usage: Option<&'a RawValue>,
    #[serde(default, borrow)]
    meta_info: Option<&'a RawValue>,
    #[serde(default)]
    choices: Option<Vec<ResponseChoice>>,
    /// Text, or an object with text.
    #[serde(default, borrow)]
    delta: Option<&'a RawValue>,
    /// Response so far, in events of the Responses and Messages APIs.
    #[serde(default, borrow)]
    response: Option<&'a RawValue>,
    #[serde(default, borrow)]
    message: Option<&'a RawValue>,
    #[serde(default)]
    text: NonEmptyValue,
    #[serde(default)]
    output_ids: NonEmptyValue,
    /// Content of a complete response.
    #[serde(default)]
    content: NonEmptyValue,
    #[serde(default)]
    output: NonEmptyValue,
    /// Log probabilities of a Responses API delta.
    #[serde(default)]
    logprobs: ListLength,
}

/// Response object nested in an event of the Responses or Messages API.
#[derive(Deserialize)]
struct NestedUsage<'a> {
    #[serde(default, borrow)]
    usage: Option<&'a RawValue>,
}

/// Delta of a Messages API event.
#[derive(Deserialize)]
struct AnthropicDelta {
    #[serde(default)]
    text: NonEmptyValue,
    #[serde(default)]
    thinking: NonEmptyValue,
    #[serde(default)]
    partial_json: NonEmptyValue,
}

impl ResponseEvent<'_> {
    fn to_parsed(&self) -> ParsedEvent {
        let kind = self
            .kind
            .and_then(|raw| serde_json::from_str::<Cow<'_, str>>(raw.get()).ok())
            .unwrap_or_default();
        let nested = match &*kind {
            "message_start" => self.message,
            kind if kind.starts_with("response.") => self.response,
            _ => None,
        };
        let nested = nested.filter(|raw| raw.get().starts_with('{'));
        let inner = nested.and_then(|raw| {
            serde_json::from_str::<NestedUsage<'_>>(raw.get())
                .ok()?
                .usage
        });
        let counts = parse_raw_counts(self.usage)
            .or_else(|| parse_raw_counts(self.meta_info))
            .or_else(|| parse_raw_counts(inner));
        let is_last = matches!(
            &*kind,
            "message_stop"
                | "response.completed"
                | "response.incomplete"
                | "response.failed"
                | "response.cancelled"
        );
        ParsedEvent {
            counts,
            content: self.content(&kind),
            is_last,
        }
    }

    fn content(&self, kind: &str) -> EventContent {
        let is_there = match kind {
            "content_block_delta" => {
                let piece = self.delta.filter(|raw| raw.get().starts_with('{'));
                let piece =
                    piece.and_then(|raw| serde_json::from_str::<AnthropicDelta>(raw.get()).ok());
                piece.is_some_and(|piece| {
                    [piece.text, piece.thinking, piece.partial_json].contains(&NonEmptyValue(true))
                })
            }
            "message" => self.content.0,
            _ if kind.starts_with("response.") => {
                kind.ends_with(".delta")
                    && self
                        .delta
                        .is_some_and(|raw| !matches!(raw.get(), "\"\"" | "null"))
            }
            _ => {
                let choices = self.choices.as_deref().unwrap_or_default();
                let content = choices
                    .iter()
                    .map(ResponseChoice::content)
                    .fold(EventContent::None, EventContent::combine);
                if content != EventContent::None {
                    return content;
                }
                [self.text, self.output_ids, self.output].contains(&NonEmptyValue(true))
            }
        };
        EventContent::new(is_there, if is_there { self.logprobs.0 } else { 0 })
    }
}

#[derive(Deserialize)]
struct ResponseChoice {
    #[serde(default)]
    text: NonEmptyValue,
    #[serde(default)]
    delta: Option<ChoiceText>,
    #[serde(default)]
    message: Option<ChoiceText>,
    #[serde(default)]
    token_ids: ListLength,
    #[serde(default)]
    logprobs: LogprobTokens,
}

#[derive(Deserialize)]
struct ChoiceText {
    #[serde(default)]
    content: NonEmptyValue,
    #[serde(default)]
    reasoning: NonEmptyValue,
    #[serde(default)]
    reasoning_content: NonEmptyValue,
    #[serde(default)]
    refusal: NonEmptyValue,
    #[serde(default)]
    tool_calls: NonEmptyValue,
}

impl ResponseChoice {
    fn content(&self) -> EventContent {
        let tokens = self
            .token_ids
            .0
            .max(self.logprobs.content.0)
            .max(self.logprobs.tokens.0);
        EventContent::new(self.has_content(), tokens)
    }

    fn has_content(&self) -> bool {
        let has_text = |choice: &ChoiceText| {
            [
                choice.content,
                choice.reasoning,
                choice.reasoning_content,
                choice.refusal,
                choice.tool_calls,
            ]
            .contains(&NonEmptyValue(true))
        };
        self.text.0
            || self.delta.as_ref().is_some_and(has_text)
            || self.message.as_ref().is_some_and(has_text)
    }
}

/// Length of a list, or 0 for any other value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ListLength(u64);

impl<'de> Deserialize<'de> for ListLength {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?;
        Ok(Self(
            serde_json::from_str::<Vec<IgnoredAny>>(raw.get()).map_or(0, |list| list.len() as u64),
        ))
    }
}

/// Number of log probabilities of a choice. Chat completions list them in `content`, and
/// completions in `tokens`.
#[derive(Clone, Copy, Debug, Default)]
struct LogprobTokens {
    content: ListLength,
    tokens: ListLength,
}

impl<'de> Deserialize<'de> for LogprobTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct LogprobLists {
            content: ListLength,
            tokens: ListLength,
        }
        let raw = <&RawValue>::deserialize(deserializer)?.get();
        let lists = if raw.starts_with('{') {
            serde_json::from_str::<LogprobLists>(raw).unwrap_or_default()
        } else {
            LogprobLists::default()
        };
        Ok(Self {
            content: lists.content,
            tokens: lists.tokens,
        })
    }
}

/// True for a value that is present and not empty. The value itself is not stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct NonEmptyValue(bool);

impl<'de> Deserialize<'de> for NonEmptyValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NonEmptyValueVisitor)
    }
}

struct NonEmptyValueVisitor;

impl<'de> Visitor<'de> for NonEmptyValueVisitor {
    type Value = NonEmptyValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<NonEmptyValue, E> {
        Ok(NonEmptyValue(false))
    }

    fn visit_bool<E>(self, value: bool) -> Result<NonEmptyValue, E> {
        Ok(NonEmptyValue(value))
    }

    fn visit_u64<E>(self, _: u64) -> Result<NonEmptyValue, E> {
        Ok(NonEmptyValue(true))
    }

    fn visit_i64<E>(self, _: i64) -> Result<NonEmptyValue, E> {
        Ok(NonEmptyValue(true))
    }

    fn visit_f64<E>(self, _: f64) -> Result<NonEmptyValue, E> {
        Ok(NonEmptyValue(true))
    }

    fn visit_str<E>(self, text: &str) -> Result<NonEmptyValue, E> {
        Ok(NonEmptyValue(!text.is_empty()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<NonEmptyValue, A::Error> {
        let mut filled = false;
        while seq.next_element::<IgnoredAny>()?.is_some() {
            filled = true;
        }
        Ok(NonEmptyValue(filled))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<NonEmptyValue, A::Error> {
        let mut filled = false;
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            filled = true;
        }
        Ok(NonEmptyValue(filled))
    }
}

impl<'de> Deserialize<'de> for OptionalCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?;
        Ok(Self(raw.get().parse().ok()))
    }
}

impl<'de> Deserialize<'de> for TokenDetails {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct CachedTokensField {
            cached_tokens: OptionalCount,
        }
        let raw = <&RawValue>::deserialize(deserializer)?.get();
        let parsed = if raw.starts_with('{') {
            serde_json::from_str::<CachedTokensField>(raw).unwrap_or_default()
        } else {
            CachedTokensField::default()
        };
        Ok(Self {
            cached_tokens: parsed.cached_tokens,
        })
    }
}
