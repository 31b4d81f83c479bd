//! Puts the name that a client asked for back into the answer of a model that was served under another. The answer arrives
//! cut anywhere, in one piece or as events, and passes through: only a value that may still turn out to be the served
//! name is held back, so that no token waits.

use std::borrow::Cow;

use memchr::{memchr, memchr2};
use serde_json::Value;

use super::scan::says;
use super::walk::{Mark, Walker, Wanted};

/// Where answers name their model: chat, completions, embeddings and whole answers of every kind; the events of the Responses
/// API; the first event of Anthropic's.
const MODEL: Wanted = &[&["model"], &["response", "model"], &["message", "model"]];

/// How the line of an event begins that carries a piece of the answer.
const FIELD: &[u8] = b"data:";

/// Rewrites the model of one answer as it passes.
#[derive(Debug)]
pub struct Restorer {
    served: String,
    /// What replaces it, as JSON.
    asked: Vec<u8>,
    walker: Walker,
    line: Line,
    /// The beginning of a value that may be the served name.
    held: Vec<u8>,
    /// Inside such a value.
    holding: bool,
}

/// What the current line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// Nothing has come yet that says whether the answer has lines.
    Unknown,
    /// The answer is one document.
    Whole,
    /// So many bytes are as in [`FIELD`].
    Begun(usize),
    /// It carries a piece of the answer.
    Data,
    /// It says something else.
    Other,
    /// A carriage return ended the line before, so a line feed belongs to it.
    Returned,
}

/// One chunk, and how much of it has gone out.
struct Passage<'a> {
    chunk: &'a [u8],
    copied: usize,
    /// Where the value began that is held.
    value: usize,
    out: Vec<u8>,
}

impl Restorer {
    /// For an answer that calls the model `served` where the client asked for `asked`.
    pub fn new(served: &str, asked: &str) -> Self {
        Self {
            served: served.to_owned(),
            asked: Value::from(asked).to_string().into_bytes(),
            walker: Walker::new(MODEL),
            line: Line::Unknown,
            held: Vec::new(),
            holding: false,
        }
    }

    /// What goes on of the next bytes; borrowed where they go on as they are.
    pub fn push<'a>(&mut self, chunk: &'a [u8]) -> Cow<'a, [u8]> {
        let mut passage = Passage {
            chunk,
            copied: 0,
            value: 0,
            out: Vec::new(),
        };
        let mut at = 0;
        while at < chunk.len() {
            at = match self.line {
                Line::Unknown => self.look(chunk, at),
                Line::Whole => self.walk(&mut passage, at, chunk.len()),
                Line::Data => {
                    let end =
                        memchr2(b'\n', b'\r', &chunk[at..]).map_or(chunk.len(), |found| at + found);
                    let at = self.walk(&mut passage, at, end);
                    if at < chunk.len() && at == end {
                        self.end_line(&mut passage, at)
                    } else {
                        at
                    }
                }
                Line::Other => match memchr2(b'\n', b'\r', &chunk[at..]) {
                    Some(found) => self.end_line(&mut passage, at + found),
                    None => chunk.len(),
                },
                Line::Begun(_) | Line::Returned => self.begin_line(&mut passage, at),
            };
        }
        if self.holding {
            self.keep(&mut passage);
        }
        passage.rest()
    }

    /// What was still held; the answer has ended.
    pub fn finish(&mut self) -> Vec<u8> {
        self.holding = false;
        std::mem::take(&mut self.held)
    }

    /// Finds out whether the answer has lines.
    fn look(&mut self, chunk: &[u8], at: usize) -> usize {
        match chunk[at] {
            b' ' | b'\t' | b'\n' | b'\r' => return at + 1,
            b'{' => self.line = Line::Whole,
            _ => self.line = Line::Begun(0),
        }
        at
    }

    fn begin_line(&mut self, passage: &mut Passage<'_>, at: usize) -> usize {
        let byte = passage.chunk[at];
        let matched = match self.line {
            Line::Returned if byte == b'\n' => {
                self.line = Line::Begun(0);
                return at + 1;
            }
            Line::Begun(matched) => matched,
            _ => 0,
        };
        if byte == FIELD[matched] {
            let whole = matched + 1 == FIELD.len();
            self.line = if whole {
                Line::Data
            } else {
                Line::Begun(matched + 1)
            };
            if whole && self.walker.is_done() {
                self.walker.restart();
            }
            return at + 1;
        }
        if matches!(byte, b'\n' | b'\r') {
            if matched == 0 {
                // An empty line ends the event.
                self.release(passage);
                self.walker.restart();
            }
            return self.end_line(passage, at);
        }
        self.line = Line::Other;
        at
    }

    /// Returns the place after the end of a line.
    fn end_line(&mut self, passage: &mut Passage<'_>, at: usize) -> usize {
        if self.line == Line::Data {
            self.release(passage);
            self.walker.end_line();
        }
        self.line = if passage.chunk[at] == b'\r' {
            Line::Returned
        } else {
            Line::Begun(0)
        };
        at + 1
    }

    /// Walks over a piece of a document, to its end or to the next mark.
    fn walk(&mut self, passage: &mut Passage<'_>, at: usize, end: usize) -> usize {
        let (walked, mark) = self.walker.step(&passage.chunk[at..end]);
        let at = at + walked;
        match mark {
            Some(Mark::Begin) if passage.chunk[at] == b'"' => {
                self.holding = true;
                passage.value = at;
            }
            Some(Mark::End) if self.holding => self.decide(passage, at),
            _ => {}
        }
        at
    }

    /// The value that is held is complete.
    fn decide(&mut self, passage: &mut Passage<'_>, end: usize) {
        self.holding = false;
        let raw = &passage.chunk[passage.value..end];
        let is_served = if self.held.is_empty() {
            says(raw, &self.served)
        } else {
            says(&[&self.held, raw].concat(), &self.served)
        };
        if is_served {
            self.held.clear();
            passage.replace(end, &self.asked);
        } else {
            passage.out.append(&mut self.held);
        }
    }

    /// The value that is held is none.
    fn release(&mut self, passage: &mut Passage<'_>) {
        self.holding = false;
        passage.out.append(&mut self.held);
    }

    /// The chunk ends inside the value that is held: keeps it as long as it may be the served name.
    fn keep(&mut self, passage: &mut Passage<'_>) {
        let begun = &passage.chunk[passage.value..];
        self.held.extend_from_slice(begun);
        if may_say(&self.held, &self.served) {
            passage.replace(passage.chunk.len(), b"");
            return;
        }
        self.held.truncate(self.held.len() - begun.len());
        self.release(passage);
    }
}

impl<'a> Passage<'a> {
    /// Puts something else in the place of the value that ends at `end`.
    fn replace(&mut self, end: usize, by: &[u8]) {
        self.out
            .extend_from_slice(&self.chunk[self.copied..self.value]);
        self.out.extend_from_slice(by);
        self.copied = end;
    }

    fn rest(mut self) -> Cow<'a, [u8]> {
        if self.out.is_empty() {
            return Cow::Borrowed(&self.chunk[self.copied..]);
        }
        self.out.extend_from_slice(&self.chunk[self.copied..]);
        Cow::Owned(self.out)
    }
}

/// Whether a raw text that is not complete may come to say `text`.
fn may_say(raw: &[u8], text: &str) -> bool {
    let begun = &raw[1..];
    match memchr(b'\\', begun) {
        None => text.as_bytes().starts_with(begun),
        // A byte is at most six when it is escaped.
        Some(escape) => {
            text.as_bytes().starts_with(&begun[..escape]) && begun.len() <= 6 * text.len()
        }
    }
}

#[cfg(test)]
mod tests;
