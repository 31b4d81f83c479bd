//! Token usage of a response, extracted while the response passes through.
//!
//! The response arrives in arbitrary chunks and may never end. The scanner buffers at most one
//! event, or a complete document up to a limit. Of a longer document, it stores only the usage.

mod content_detector;
mod counts;
mod event_pattern;
mod long_document;
mod response_event;

#[cfg(test)]
mod tests;

pub use content_detector::ContentDetector;
use counts::UsageCounts;
use event_pattern::EventPattern;
use long_document::LongDocument;
use response_event::EventContent;

/// Maximum length in bytes of a line, an event, or a document that is parsed as a whole.
const MAX_EVENT_BYTES: usize = 1 << 20;

/// Maximum capacity of a buffer, in bytes, that is kept for the next line or event.
const MAX_RETAINED_BYTES: usize = 16 << 10;

/// Encoding of a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResponseEncoding {
    /// Server-sent events.
    #[default]
    EventStream,
    /// One JSON document.
    Document,
}

/// Evidence in a response that the engine has generated output. A later variant outweighs an
/// earlier one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum OutputEvidence {
    /// None: no event at all, or only events that precede the computation, such as a role, a ping or
    /// `response.created`.
    #[default]
    None,
    /// The engine has reported the end of its output, without a number of output tokens.
    Ended,
    /// The engine has reported a number of output tokens, but no text.
    Counted,
    /// The engine has reported an error.
    Error,
    /// Content: text, reasoning, a refusal, a tool call, audio, token ids or log probabilities.
    /// Events of an unknown format count as content.
    Content,
}

/// Token counts reported by the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenUsage {
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Output tokens.
    pub completion_tokens: u64,
    /// Prompt tokens served from the prefix cache, if reported.
    pub cached_tokens: Option<u64>,
}

/// Reads usage and content events from a streamed or complete response.
#[derive(Debug, Default)]
pub struct UsageScanner {
    encoding: ResponseEncoding,
    line: LineBuffer,
    event: EventBuffer,
    event_pattern: EventPattern,
    /// Buffered part of a JSON document.
    document: Vec<u8>,
    /// Scanner that replaces the buffer of a document that is too long.
    long_document: Option<LongDocument>,
    counts: Option<UsageCounts>,
    content_events: u64,
    content_tokens: u64,
    evidence: OutputEvidence,
    is_complete: bool,
}

/// Buffer of the current line.
#[derive(Debug, Default)]
struct LineBuffer {
    bytes: Vec<u8>,
    is_too_long: bool,
    /// True if the previous line ended with a carriage return. A line feed then belongs to it.
    after_carriage_return: bool,
}

/// Data lines of the current event.
#[derive(Debug, Default)]
struct EventBuffer {
    data: Vec<u8>,
    has_data: bool,
    is_invalid: bool,
}

impl TokenUsage {
    /// Parses the usage of a complete JSON response.
    pub fn from_document(json: &[u8]) -> Option<Self> {
        response_event::parse_event(json)?
            .counts
            .map(UsageCounts::into_usage)
    }
}

impl UsageScanner {
    /// Creates a scanner for responses of this encoding.
    pub fn new(encoding: ResponseEncoding) -> Self {
        Self {
            encoding,
            ..Self::default()
        }
    }

    /// Returns the reported usage. Later counts replace earlier ones.
    pub fn usage(&self) -> Option<TokenUsage> {
        self.counts.map(UsageCounts::into_usage)
    }

    /// Returns the number of events with content.
    pub fn content_events(&self) -> u64 {
        self.content_events
    }

    /// Returns the number of output tokens so far: from usage, token ids or log probabilities. An
    /// event without any of them counts as one token.
    pub fn output_tokens(&self) -> u64 {
        self.usage()
            .map_or(0, |usage| usage.completion_tokens)
            .max(self.content_tokens)
    }

    /// Returns the strongest evidence of output so far.
    pub fn evidence(&self) -> OutputEvidence {
        self.evidence
    }

    /// Returns true if the stream reported its end.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Reads the next bytes of the response.
    pub fn push(&mut self, chunk: &[u8]) {
        match self.encoding {
            ResponseEncoding::EventStream => self.push_lines(chunk),
            ResponseEncoding::Document => self.push_document(chunk),
        }
    }

    fn push_document(&mut self, chunk: &[u8]) {
        if self.long_document.is_none() && self.document.len() + chunk.len() <= MAX_EVENT_BYTES {
            return self.document.extend_from_slice(chunk);
        }
        let long = self.long_document.get_or_insert_default();
        // Takes the buffer to free it, because a long response may last for minutes.
        long.push(&std::mem::take(&mut self.document));
        long.push(chunk);
    }

    fn push_lines(&mut self, mut chunk: &[u8]) {
        if !chunk.is_empty() && std::mem::take(&mut self.line.after_carriage_return) {
            chunk = chunk.strip_prefix(b"\n").unwrap_or(chunk);
        }
        loop {
            if let Some((data, rest)) = self.whole_event(chunk) {
                self.read_event(data);
                chunk = rest;
                continue;
            }
            let Some(end) = memchr::memchr2(b'\n', b'\r', chunk) else {
                break;
            };
            self.extend_line(&chunk[..end]);
            self.end_line();
            let returned = chunk[end] == b'\r';
            chunk = &chunk[end + 1..];
            if returned {
                self.line.after_carriage_return = chunk.is_empty();
                chunk = chunk.strip_prefix(b"\n").unwrap_or(chunk);
            }
        }
        self.extend_line(chunk);
    }

    /// Returns the data of an event that is complete at the start of a chunk, and the bytes after
    /// it. Most events arrive in this way and are not copied.
    fn whole_event<'c>(&self, chunk: &'c [u8]) -> Option<(&'c [u8], &'c [u8])> {
        let Self { line, event, .. } = self;
        let begins =
            line.bytes.is_empty() && !line.is_too_long && !event.has_data && !event.is_invalid;
        let data = chunk.strip_prefix(b"data:").filter(|_| begins)?;
        let (data, rest) = data.split_at(memchr::memchr2(b'\n', b'\r', data)?);
        let rest = rest.strip_prefix(b"\n\n")?;
        (chunk.len() - rest.len() <= MAX_EVENT_BYTES)
            .then(|| (data.strip_prefix(b" ").unwrap_or(data), rest))
    }

    /// Handles the end of the response. An event without a terminating empty line is complete too.
    pub fn finish(&mut self) {
        if self.encoding == ResponseEncoding::EventStream {
            self.end_line();
            return self.end_event();
        }
        if std::mem::replace(&mut self.is_complete, true) {
            return;
        }
        match self.long_document.take() {
            None => {
                let whole = std::mem::take(&mut self.document);
                self.read(&whole);
            }
            Some(long) => self.counts = long.into_counts(),
        }
    }

    fn extend_line(&mut self, bytes: &[u8]) {
        if self.line.is_too_long || self.line.bytes.len() + bytes.len() > MAX_EVENT_BYTES {
            self.line.is_too_long = true;
            self.line.bytes = Vec::new();
        } else {
            self.line.bytes.extend_from_slice(bytes);
        }
    }

    fn end_line(&mut self) {
        if std::mem::take(&mut self.line.is_too_long) {
            self.event.is_invalid = true;
            return;
        }
        if self.line.bytes.is_empty() {
            return self.end_event();
        }
        let line = std::mem::take(&mut self.line.bytes);
        if let Some(data) = line.strip_prefix(b"data:") {
            self.extend_event(data.strip_prefix(b" ").unwrap_or(data));
        }
        self.line.bytes = emptied(line);
    }

    fn extend_event(&mut self, data: &[u8]) {
        let event = &mut self.event;
        if event.data.len() + data.len() >= MAX_EVENT_BYTES {
            event.is_invalid = true;
        }
        if event.is_invalid {
            event.data = Vec::new();
            return;
        }
        if std::mem::replace(&mut event.has_data, true) {
            event.data.push(b'\n');
        }
        event.data.extend_from_slice(data);
    }

    fn end_event(&mut self) {
        let EventBuffer {
            data,
            has_data,
            is_invalid,
        } = std::mem::take(&mut self.event);
        if has_data && !is_invalid {
            self.read_event(&data);
        }
        self.event.data = emptied(data);
    }

    fn read_event(&mut self, data: &[u8]) {
        if self.event_pattern.matches(data) {
            self.content_events += 1;
            self.content_tokens += 1;
            self.evidence = OutputEvidence::Content;
        } else if data == b"[DONE]" {
            self.is_complete = true;
        } else {
            self.read(data);
        }
    }

    fn read(&mut self, json: &[u8]) {
        let Some(parsed) = response_event::parse_event(json) else {
            // Text that is not JSON has an unknown format.
            if !json.trim_ascii().is_empty() {
                self.evidence = OutputEvidence::Content;
            }
            return;
        };
        self.evidence = self.evidence.max(parsed.evidence);
        if parsed.counts.is_none() && parsed.content == EventContent::Some && !parsed.is_last {
            self.event_pattern.record(json);
        }
        if let Some(counts) = parsed.counts {
            self.counts.get_or_insert_default().merge(counts);
        }
        self.content_events += u64::from(parsed.content != EventContent::None);
        self.content_tokens = self.content_tokens.saturating_add(parsed.content.tokens());
        self.is_complete |= parsed.is_last;
    }
}

/// Empties a buffer. A large one is freed, because the next event may be minutes away.
fn emptied(mut buffer: Vec<u8>) -> Vec<u8> {
    buffer.clear();
    if buffer.capacity() > MAX_RETAINED_BYTES {
        return Vec::new();
    }
    buffer
}
