//! What an answer says about its own size, read from the bytes as they pass by. A stream of server-sent events arrives
//! cut anywhere and may never end, so the scanner keeps at most one event and skips what is too long to be one.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Longest line, and longest event, that is looked at.
const LIMIT: usize = 1 << 20;

/// What the engine counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
    /// Tokens of the prompt that came from the cache, if the engine tells.
    pub cached_tokens: Option<u64>,
}

/// Reads usage and the number of content events from an answer, streamed or whole.
#[derive(Debug, Default)]
pub struct UsageScanner {
    line: Line,
    event: Event,
    usage: Option<Usage>,
    content_events: u64,
    skipped: u64,
    done: bool,
}

/// The current line, as far as it has arrived.
#[derive(Debug, Default)]
struct Line {
    bytes: Vec<u8>,
    too_long: bool,
    /// A carriage return ended the last line, so a line feed right after it belongs to it.
    after_return: bool,
}

/// The data lines of the current event.
#[derive(Debug, Default)]
struct Event {
    data: Vec<u8>,
    has_data: bool,
    broken: bool,
}

impl UsageScanner {
    /// The last usage the answer told.
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Events that brought content: about one per token, where no usage is told.
    pub fn content_events(&self) -> u64 {
        self.content_events
    }

    /// Lines and events that were too long or not understood.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Whether the stream said that it is complete.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Reads the next bytes of a stream.
    pub fn push(&mut self, mut chunk: &[u8]) {
        if !chunk.is_empty() && std::mem::take(&mut self.line.after_return) {
            chunk = chunk.strip_prefix(b"\n").unwrap_or(chunk);
        }
        while let Some(end) = chunk.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            self.extend_line(&chunk[..end]);
            self.end_line();
            let returned = chunk[end] == b'\r';
            chunk = &chunk[end + 1..];
            if returned {
                self.line.after_return = chunk.is_empty();
                chunk = chunk.strip_prefix(b"\n").unwrap_or(chunk);
            }
        }
        self.extend_line(chunk);
    }

    /// The stream has ended; an event that was not closed by an empty line counts too.
    pub fn finish(&mut self) {
        self.end_line();
        self.end_event();
    }

    /// Reads a whole answer that was not streamed.
    pub fn finish_unary(&mut self, body: &[u8]) {
        self.read(body);
        self.done = true;
    }

    fn extend_line(&mut self, bytes: &[u8]) {
        if self.line.too_long || self.line.bytes.len() + bytes.len() > LIMIT {
            self.line.too_long = true;
            self.line.bytes = Vec::new();
        } else {
            self.line.bytes.extend_from_slice(bytes);
        }
    }

    fn end_line(&mut self) {
        if std::mem::take(&mut self.line.too_long) {
            self.skipped += 1;
            self.event.broken = true;
            return;
        }
        if self.line.bytes.is_empty() {
            return self.end_event();
        }
        let mut line = std::mem::take(&mut self.line.bytes);
        if let Some(data) = line.strip_prefix(b"data:") {
            self.extend_event(data.strip_prefix(b" ").unwrap_or(data));
        }
        line.clear();
        self.line.bytes = line;
    }

    fn extend_event(&mut self, data: &[u8]) {
        let event = &mut self.event;
        if event.data.len() + data.len() >= LIMIT {
            self.skipped += u64::from(!event.broken);
            event.broken = true;
        }
        if event.broken {
            event.data = Vec::new();
            return;
        }
        if std::mem::replace(&mut event.has_data, true) {
            event.data.push(b'\n');
        }
        event.data.extend_from_slice(data);
    }

    fn end_event(&mut self) {
        let Event { mut data, has_data, broken } = std::mem::take(&mut self.event);
        if has_data && !broken {
            if data == b"[DONE]" {
                self.done = true;
            } else {
                self.read(&data);
            }
        }
        data.clear();
        self.event.data = data;
    }

    fn read(&mut self, json: &[u8]) {
        let Ok(answer) = serde_json::from_slice::<Answer>(json) else {
            self.skipped += 1;
            return;
        };
        if let Some(usage) = answer.usage {
            self.usage = Some(Usage {
                prompt_tokens: usage.prompt_tokens,
                completion_tokens: usage.completion_tokens.unwrap_or(0),
                cached_tokens: usage.prompt_tokens_details.and_then(|details| details.cached_tokens),
            });
        }
        let choices = answer.choices.unwrap_or_default();
        self.content_events += u64::from(choices.iter().any(Choice::has_content));
    }
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    usage: Option<ToldUsage>,
    #[serde(default)]
    choices: Option<Vec<Choice>>,
}

#[derive(Deserialize)]
struct ToldUsage {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: Filled,
    #[serde(default)]
    delta: Option<Said>,
    #[serde(default)]
    message: Option<Said>,
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
    fn has_content(&self) -> bool {
        let said = |said: &Said| {
            [said.content, said.reasoning, said.reasoning_content, said.refusal, said.tool_calls]
                .contains(&Filled(true))
        };
        self.text.0 || self.delta.as_ref().is_some_and(said) || self.message.as_ref().is_some_and(said)
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
