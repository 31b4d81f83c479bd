//! What one event, or one answer in one piece, says of itself, in any of the shapes that engines answer in: chat, completions,
//! embeddings, the Responses API, Anthropic's messages, SGLang's own.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::Usage;

/// What one event says.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) counts: Option<Counts>,
    pub(super) content: EventContent,
    /// Whether it says that it is the last.
    pub(super) last: bool,
}

/// The output tokens in an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum EventContent {
    /// Nothing.
    #[default]
    None,
    /// Content with an unknown number of tokens.
    Some,
    /// This many tokens, at least one.
    Tokens(u64),
}

impl EventContent {
    /// Its tokens, one where their number is not known.
    pub(super) fn tokens(self) -> u64 {
        match self {
            EventContent::None => 0,
            EventContent::Some => 1,
            EventContent::Tokens(tokens) => tokens,
        }
    }

    fn of(is_there: bool, tokens: u64) -> Self {
        match (is_there, tokens) {
            (_, 1..) => EventContent::Tokens(tokens),
            (true, 0) => EventContent::Some,
            (false, 0) => EventContent::None,
        }
    }

    /// Both together.
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (EventContent::None, content) | (content, EventContent::None) => content,
            (EventContent::Some, EventContent::Some) => EventContent::Some,
            (one, other) => EventContent::Tokens(one.tokens().saturating_add(other.tokens())),
        }
    }
}

/// What was counted, by the names it has in the APIs; a later word on a number replaces an earlier one, and silence does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Counts {
    prompt_tokens: Count,
    completion_tokens: Count,
    prompt_tokens_details: Details,
    /// Where the Responses API and Anthropic have the prompt.
    input_tokens: Count,
    output_tokens: Count,
    input_tokens_details: Details,
    /// Anthropic counts these beside `input_tokens`.
    cache_read_input_tokens: Count,
    cache_creation_input_tokens: Count,
    /// SGLang's own.
    cached_tokens: Count,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Details {
    cached_tokens: Count,
}

/// A number that may be missing, or be none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count(Option<u64>);

impl Counts {
    pub(super) fn merge(&mut self, mut later: Self) {
        for (count, later) in self.numbers().into_iter().zip(later.numbers()) {
            count.0 = later.0.or(count.0);
        }
    }

    fn add(&mut self, mut other: Self) {
        for (count, other) in self.numbers().into_iter().zip(other.numbers()) {
            count.0 = count.0.map_or(other.0, |sum| {
                Some(sum.saturating_add(other.0.unwrap_or(0)))
            });
        }
    }

    fn numbers(&mut self) -> [&mut Count; 9] {
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

    pub(super) fn usage(self) -> Usage {
        let beside = [
            self.cache_read_input_tokens,
            self.cache_creation_input_tokens,
        ];
        let input = beside
            .into_iter()
            .fold(self.input_tokens.0.unwrap_or(0), |sum, count| {
                sum.saturating_add(count.0.unwrap_or(0))
            });
        let details = self
            .prompt_tokens_details
            .cached_tokens
            .0
            .or(self.input_tokens_details.cached_tokens.0);
        Usage {
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

/// Reads one event; `None` where it is none.
pub(super) fn read(json: &[u8]) -> Option<Told> {
    match json.iter().find(|byte| !byte.is_ascii_whitespace())? {
        b'{' => Some(serde_json::from_slice::<Answer<'_>>(json).ok()?.told()),
        // SGLang's own answer to several prompts.
        b'[' => {
            let mut sum = Told::default();
            for answer in serde_json::from_slice::<Vec<&RawValue>>(json).ok()? {
                let told = read_object(answer)?;
                if let Some(counts) = told.counts {
                    sum.counts.get_or_insert_default().add(counts);
                }
                sum.content = sum.content.and(told.content);
            }
            Some(sum)
        }
        _ => None,
    }
}

fn read_object(json: &RawValue) -> Option<Told> {
    json.get()
        .starts_with('{')
        .then(|| serde_json::from_str::<Answer<'_>>(json.get()).ok())?
        .map(|answer| answer.told())
}

/// A usage alone.
pub(super) fn counts(json: &[u8]) -> Option<Counts> {
    if json.first() != Some(&b'{') {
        return None;
    }
    serde_json::from_slice(json).ok()
}

fn counts_of(json: Option<&RawValue>) -> Option<Counts> {
    counts(json?.get().as_bytes())
}

#[derive(Deserialize)]
struct Answer<'a> {
    /// What the event is, in the Responses API and Anthropic's; what the answer is, in one piece.
    #[serde(default, borrow, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(default, borrow)]
    usage: Option<&'a RawValue>,
    #[serde(default, borrow)]
    meta_info: Option<&'a RawValue>,
    #[serde(default)]
    choices: Option<Vec<Choice>>,
    /// The text, or an object with it.
    #[serde(default, borrow)]
    delta: Option<&'a RawValue>,
    /// The answer so far, in events of the Responses API and Anthropic's.
    #[serde(default, borrow)]
    response: Option<&'a RawValue>,
    #[serde(default, borrow)]
    message: Option<&'a RawValue>,
    #[serde(default)]
    text: Filled,
    #[serde(default)]
    output_ids: Filled,
    /// In one piece.
    #[serde(default)]
    content: Filled,
    #[serde(default)]
    output: Filled,
    /// Of a piece of the Responses API.
    #[serde(default)]
    logprobs: ListLength,
}

/// What an event of the Responses API or of Anthropic's brings of the answer.
#[derive(Deserialize)]
struct Around<'a> {
    #[serde(default, borrow)]
    usage: Option<&'a RawValue>,
}

/// A piece of an Anthropic answer.
#[derive(Deserialize)]
struct Piece {
    #[serde(default)]
    text: Filled,
    #[serde(default)]
    thinking: Filled,
    #[serde(default)]
    partial_json: Filled,
}

impl Answer<'_> {
    fn told(&self) -> Told {
        let kind = self
            .kind
            .and_then(|raw| serde_json::from_str::<Cow<'_, str>>(raw.get()).ok())
            .unwrap_or_default();
        let around = match &*kind {
            "message_start" => self.message,
            kind if kind.starts_with("response.") => self.response,
            _ => None,
        };
        let around = around.filter(|raw| raw.get().starts_with('{'));
        let inner =
            around.and_then(|raw| serde_json::from_str::<Around<'_>>(raw.get()).ok()?.usage);
        let counts = counts_of(self.usage)
            .or_else(|| counts_of(self.meta_info))
            .or_else(|| counts_of(inner));
        let last = matches!(
            &*kind,
            "message_stop"
                | "response.completed"
                | "response.incomplete"
                | "response.failed"
                | "response.cancelled"
        );
        Told {
            counts,
            content: self.content(&kind),
            last,
        }
    }

    fn content(&self, kind: &str) -> EventContent {
        let is_there = match kind {
            "content_block_delta" => {
                let piece = self.delta.filter(|raw| raw.get().starts_with('{'));
                let piece = piece.and_then(|raw| serde_json::from_str::<Piece>(raw.get()).ok());
                piece.is_some_and(|piece| {
                    [piece.text, piece.thinking, piece.partial_json].contains(&Filled(true))
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
                    .map(Choice::content)
                    .fold(EventContent::None, EventContent::and);
                if content != EventContent::None {
                    return content;
                }
                [self.text, self.output_ids, self.output].contains(&Filled(true))
            }
        };
        EventContent::of(is_there, if is_there { self.logprobs.0 } else { 0 })
    }
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: Filled,
    #[serde(default)]
    delta: Option<Said>,
    #[serde(default)]
    message: Option<Said>,
    #[serde(default)]
    token_ids: ListLength,
    #[serde(default)]
    logprobs: LogprobTokens,
}

#[derive(Deserialize)]
struct Said {
    #[serde(default)]
    content: Filled,
    #[serde(default)]
    reasoning: Filled,
    #[serde(default)]
    reasoning_content: Filled,
    #[serde(default)]
    refusal: Filled,
    #[serde(default)]
    tool_calls: Filled,
}

impl Choice {
    fn content(&self) -> EventContent {
        let tokens = self
            .token_ids
            .0
            .max(self.logprobs.content.0)
            .max(self.logprobs.tokens.0);
        EventContent::of(self.has_content(), tokens)
    }

    fn has_content(&self) -> bool {
        let said = |said: &Said| {
            [
                said.content,
                said.reasoning,
                said.reasoning_content,
                said.refusal,
                said.tool_calls,
            ]
            .contains(&Filled(true))
        };
        self.text.0
            || self.delta.as_ref().is_some_and(said)
            || self.message.as_ref().is_some_and(said)
    }
}

/// How many elements a list has; 0 for anything else.
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

/// The probabilities of the tokens of a choice, a list per token in either API.
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

/// Whether a value is there and not empty; the value itself is dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Filled(bool);

impl<'de> Deserialize<'de> for Filled {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FilledVisitor)
    }
}

struct FilledVisitor;

impl<'de> Visitor<'de> for FilledVisitor {
    type Value = Filled;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Filled, E> {
        Ok(Filled(false))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Filled, E> {
        Ok(Filled(value))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Filled, E> {
        Ok(Filled(true))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Filled, E> {
        Ok(Filled(true))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Filled, E> {
        Ok(Filled(true))
    }

    fn visit_str<E>(self, text: &str) -> Result<Filled, E> {
        Ok(Filled(!text.is_empty()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Filled, A::Error> {
        let mut filled = false;
        while seq.next_element::<IgnoredAny>()?.is_some() {
            filled = true;
        }
        Ok(Filled(filled))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Filled, A::Error> {
        let mut filled = false;
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            filled = true;
        }
        Ok(Filled(filled))
    }
}

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?;
        Ok(Self(raw.get().parse().ok()))
    }
}

impl<'de> Deserialize<'de> for Details {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Told {
            cached_tokens: Count,
        }
        let raw = <&RawValue>::deserialize(deserializer)?.get();
        let told = if raw.starts_with('{') {
            serde_json::from_str::<Told>(raw).unwrap_or_default()
        } else {
            Told::default()
        };
        Ok(Self {
            cached_tokens: told.cached_tokens,
        })
    }
}
