//! Fields of one response event or complete response, in the formats of chat, completions,
//! embeddings, the Responses API, the Messages API, and SGLang's native API.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::OutputEvidence;
use super::counts::{UsageCounts, object_or_default, parse_object};

/// Usage and content of one event.
#[derive(Debug, Default)]
pub(super) struct ParsedEvent {
    pub(super) counts: Option<UsageCounts>,
    pub(super) content: EventContent,
    pub(super) evidence: OutputEvidence,
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

/// Parses one event. Returns `None` if it is not JSON of a known format.
pub(super) fn parse_event(json: &[u8]) -> Option<ParsedEvent> {
    match json.iter().find(|byte| !byte.is_ascii_whitespace())? {
        // Some front ends send it as a ping.
        _ if json.trim_ascii() == b"{}" => Some(ParsedEvent::default()),
        b'{' => Some(
            serde_json::from_slice::<ResponseEvent<'_>>(json)
                .ok()?
                .to_parsed(),
        ),
        // SGLang's native response to several prompts.
        b'[' => {
            let mut sum = ParsedEvent::default();
            for answer in serde_json::from_slice::<Vec<&RawValue>>(json).ok()? {
                let parsed = parse_object::<ResponseEvent<'_>>(answer)?.to_parsed();
                if let Some(counts) = parsed.counts {
                    sum.counts.get_or_insert_default().add(counts);
                }
                sum.content = sum.content.combine(parsed.content);
                sum.evidence = sum.evidence.max(parsed.evidence);
            }
            Some(sum)
        }
        _ => None,
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ResponseEvent<'a> {
    /// Event type in the Responses and Messages APIs, or type of a complete response.
    #[serde(borrow, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(borrow)]
    meta_info: Option<&'a RawValue>,
    choices: Option<Vec<ResponseChoice>>,
    /// Text, or an object with text.
    #[serde(borrow)]
    delta: Option<&'a RawValue>,
    /// Response so far, in events of the Responses and Messages APIs.
    #[serde(borrow)]
    response: Option<&'a RawValue>,
    #[serde(borrow)]
    message: Option<&'a RawValue>,
    text: NonEmptyValue,
    output_ids: NonEmptyValue,
    /// Content of a complete response.
    content: NonEmptyValue,
    output: NonEmptyValue,
    /// Log probabilities of a Responses API delta.
    logprobs: ListLength,
    /// Output item of a Responses API event.
    #[serde(borrow)]
    item: Option<&'a RawValue>,
    /// Block that a Messages API event starts.
    #[serde(borrow)]
    content_block: Option<&'a RawValue>,
    error: NonEmptyValue,
    /// Type of an object of the OpenAI APIs.
    #[serde(borrow)]
    object: Option<&'a RawValue>,
}

/// Response object nested in an event of the Responses or Messages API.
#[derive(Default, Deserialize)]
#[serde(default)]
struct NestedResponse<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    output: NonEmptyValue,
}

/// Members of an output item of the Responses API, or of a content block of the Messages API, that
/// the engine has generated. Items and blocks without them only announce output.
const GENERATED_MEMBERS: [&str; 10] = [
    "text",
    "thinking",
    "data",
    "name",
    "arguments",
    "input",
    "content",
    "summary",
    "code",
    "action",
];

fn has_generated_member(item: Option<&RawValue>) -> bool {
    let item = item.and_then(parse_object::<HashMap<String, NonEmptyValue>>);
    let item = item.unwrap_or_default();
    item.iter()
        .any(|(name, value)| value.0 && GENERATED_MEMBERS.contains(&name.as_str()))
}

/// Delta of a Messages API event.
#[derive(Default, Deserialize)]
#[serde(default)]
struct AnthropicDelta {
    text: NonEmptyValue,
    thinking: NonEmptyValue,
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
        let nested = nested
            .and_then(parse_object::<NestedResponse<'_>>)
            .unwrap_or_default();
        let counts = [self.usage, self.meta_info, nested.usage]
            .into_iter()
            .flatten()
            .find_map(parse_object::<UsageCounts>);
        let is_last = matches!(
            &*kind,
            "message_stop"
                | "response.completed"
                | "response.incomplete"
                | "response.failed"
                | "response.cancelled"
        );
        let content = self.content(&kind);
        let evidence = if content != EventContent::None || nested.output.0 {
            OutputEvidence::Content
        } else {
            self.evidence_without_delta(&kind)
        };
        // The Messages API counts an output token before the engine has generated one.
        let has_output =
            kind != "message_start" && counts.as_ref().is_some_and(UsageCounts::has_output);
        ParsedEvent {
            counts,
            content,
            evidence: if has_output {
                evidence.max(OutputEvidence::Counted)
            } else if is_last {
                evidence.max(OutputEvidence::Ended)
            } else {
                evidence
            },
            is_last,
        }
    }

    /// Returns the evidence of an event that has no delta with content.
    fn evidence_without_delta(&self, kind: &str) -> OutputEvidence {
        let is_error = self.error.0
            || matches!(kind, "error" | "response.failed")
            || self.object.is_some_and(|raw| raw.get() == "\"error\"");
        if is_error {
            return OutputEvidence::Error;
        }
        let has_content = match kind {
            "content_block_start" => has_generated_member(self.content_block),
            "message_delta" => return OutputEvidence::Ended,
            "message_start"
            | "ping"
            | "content_block_delta"
            | "content_block_stop"
            | "message_stop"
            | "message" => false,
            kind if kind.starts_with("response.") => self.text.0 || has_generated_member(self.item),
            _ => {
                let choices = self.choices.as_deref().unwrap_or_default();
                if choices.iter().any(|choice| choice.finish_reason.0) {
                    return OutputEvidence::Ended;
                }
                // Events of an unknown format count as content.
                self.choices.is_none() && self.usage.is_none() && self.meta_info.is_none()
            }
        };
        if has_content {
            OutputEvidence::Content
        } else {
            OutputEvidence::None
        }
    }

    fn content(&self, kind: &str) -> EventContent {
        let is_there = match kind {
            "content_block_delta" => {
                let piece = self.delta.and_then(parse_object::<AnthropicDelta>);
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

#[derive(Default, Deserialize)]
#[serde(default)]
struct ResponseChoice {
    text: NonEmptyValue,
    delta: Option<ChoiceContent>,
    message: Option<ChoiceContent>,
    finish_reason: NonEmptyValue,
    token_ids: ListLength,
    #[serde(deserialize_with = "object_or_default")]
    logprobs: LogprobTokens,
}

/// True for a delta or message with content: text, reasoning, a refusal, tool calls, audio, or a
/// member that is not known. The role is no content.
#[derive(Clone, Copy, Debug, Default)]
struct ChoiceContent(bool);

impl<'de> Deserialize<'de> for ChoiceContent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ChoiceContentVisitor)
    }
}

struct ChoiceContentVisitor;

impl<'de> Visitor<'de> for ChoiceContentVisitor {
    type Value = ChoiceContent;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a delta or message")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ChoiceContent, A::Error> {
        #[derive(Deserialize)]
        #[serde(field_identifier, rename_all = "snake_case")]
        enum ChoiceKey {
            Role,
            Name,
            #[serde(other)]
            Other,
        }
        let mut has_content = false;
        while let Some(key) = map.next_key::<ChoiceKey>()? {
            let value = map.next_value::<NonEmptyValue>()?;
            has_content |= value.0 && matches!(key, ChoiceKey::Other);
        }
        Ok(ChoiceContent(has_content))
    }
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
        let parts = [self.delta, self.message];
        self.text.0 || parts.into_iter().flatten().any(|part| part.0)
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
#[derive(Default, Deserialize)]
#[serde(default)]
struct LogprobTokens {
    content: ListLength,
    tokens: ListLength,
}

/// True for a value that is present and not empty. The value itself is not stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct NonEmptyValue(bool);

impl<'de> Deserialize<'de> for NonEmptyValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let is_empty = match <&RawValue>::deserialize(deserializer)?.get() {
            "null" | "false" | "\"\"" => true,
            text => text
                .strip_prefix(['[', '{'])
                .is_some_and(|inner| inner.trim_start().len() == 1),
        };
        Ok(Self(!is_empty))
    }
}
