//! What an answer says about its own size, read from the bytes as they pass by. It arrives cut anywhere and may never end,
//! so the scanner keeps at most one event, or the beginning of an answer in one piece; of a longer one only its usage.

mod answer;
mod long;
mod shape;

#[cfg(test)]
mod tests;

use answer::{Counts, EventContent};
use long::Long;
use shape::Shape;

/// Longest line, longest event, and longest answer in one piece that is looked at as a whole.
const LIMIT: usize = 1 << 20;

/// How an answer comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// As server-sent events.
    #[default]
    EventStream,
    /// In one piece of JSON.
    Whole,
}

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
    kind: Kind,
    line: Line,
    event: Event,
    shape: Shape,
    /// The answer in one piece, as far as it has arrived.
    whole: Vec<u8>,
    /// What takes its place where that becomes too long.
    long: Option<Long>,
    counts: Option<Counts>,
    content_events: u64,
    content_tokens: u64,
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

impl Usage {
    /// Parses the usage of a complete response without a stream.
    pub fn of_document(json: &[u8]) -> Option<Self> {
        answer::read(json)?.counts.map(Counts::usage)
    }
}

impl UsageScanner {
    /// For an answer that comes like this.
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            ..Self::default()
        }
    }

    /// What the answer told of its usage, the last word on each number.
    pub fn usage(&self) -> Option<Usage> {
        self.counts.map(Counts::usage)
    }

    /// Events that brought content.
    pub fn content_events(&self) -> u64 {
        self.content_events
    }

    /// Tokens of the answer so far, by its usage, or by the token ids or log probabilities of its events. An event without any
    /// of these counts as one token.
    pub fn output_tokens(&self) -> u64 {
        self.usage()
            .map_or(0, |usage| usage.completion_tokens)
            .max(self.content_tokens)
    }

    /// Lines and events that were too long or not understood.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Whether the stream said that it is complete.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Reads the next bytes of the answer.
    pub fn push(&mut self, chunk: &[u8]) {
        match self.kind {
            Kind::EventStream => self.push_lines(chunk),
            Kind::Whole => self.push_whole(chunk),
        }
    }

    fn push_whole(&mut self, chunk: &[u8]) {
        if self.long.is_none() && self.whole.len() + chunk.len() <= LIMIT {
            return self.whole.extend_from_slice(chunk);
        }
        let long = self.long.get_or_insert_default();
        // Given back at once: this is the only long life of an answer's bytes here.
        long.push(&std::mem::take(&mut self.whole));
        long.push(chunk);
    }

    fn push_lines(&mut self, mut chunk: &[u8]) {
        if !chunk.is_empty() && std::mem::take(&mut self.line.after_return) {
            chunk = chunk.strip_prefix(b"\n").unwrap_or(chunk);
        }
        loop {
            if let Some((data, rest)) = self.event_in(chunk) {
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
                self.line.after_return = chunk.is_empty();
                chunk = chunk.strip_prefix(b"\n").unwrap_or(chunk);
            }
        }
        self.extend_line(chunk);
    }

    /// The data of an event that lies whole at the beginning of a chunk, as most do, and what is behind it: such an event is
    /// not copied.
    fn event_in<'c>(&self, chunk: &'c [u8]) -> Option<(&'c [u8], &'c [u8])> {
        let Self { line, event, .. } = self;
        let begins = line.bytes.is_empty() && !line.too_long && !event.has_data && !event.broken;
        let data = chunk.strip_prefix(b"data:").filter(|_| begins)?;
        let (data, rest) = data.split_at(memchr::memchr2(b'\n', b'\r', data)?);
        let rest = rest.strip_prefix(b"\n\n")?;
        (chunk.len() - rest.len() <= LIMIT).then(|| (data.strip_prefix(b" ").unwrap_or(data), rest))
    }

    /// The answer has ended; an event that was not closed by an empty line counts too.
    pub fn finish(&mut self) {
        if self.kind == Kind::EventStream {
            self.end_line();
            return self.end_event();
        }
        if std::mem::replace(&mut self.done, true) {
            return;
        }
        match self.long.take() {
            None => {
                let whole = std::mem::take(&mut self.whole);
                self.read(&whole);
            }
            Some(long) => match long.usage() {
                Some(counts) => self.counts = Some(counts),
                None => self.skipped += 1,
            },
        }
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
        let Event {
            mut data,
            has_data,
            broken,
        } = std::mem::take(&mut self.event);
        if has_data && !broken {
            self.read_event(&data);
        }
        data.clear();
        self.event.data = data;
    }

    fn read_event(&mut self, data: &[u8]) {
        if self.shape.fits(data) {
            self.content_events += 1;
            self.content_tokens += 1;
        } else if data == b"[DONE]" {
            self.done = true;
        } else {
            self.read(data);
        }
    }

    fn read(&mut self, json: &[u8]) {
        let Some(told) = answer::read(json) else {
            self.skipped += 1;
            return;
        };
        if told.counts.is_none() && told.content == EventContent::Some && !told.last {
            self.shape.learn(json);
        }
        if let Some(counts) = told.counts {
            self.counts.get_or_insert_default().merge(counts);
        }
        self.content_events += u64::from(told.content != EventContent::None);
        self.content_tokens = self.content_tokens.saturating_add(told.content.tokens());
        self.done |= told.last;
    }
}
