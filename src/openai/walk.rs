//! Walks over one JSON document that arrives cut anywhere and tells where wanted values begin and end. Only the keys of the
//! outermost objects are looked at; everything deeper is passed over at the speed of a byte search. Nothing is kept but
//! one short key, and nothing is judged: a document that is none is walked over without a mark.

use memchr::memchr2;

use super::scan::{next_mark, says};

/// Keys of the fields that are wanted, outermost first; at most two.
pub(super) type Wanted = &'static [&'static [&'static str]];

/// Longest key that is looked at: six bytes for each of one that is wanted, and its quotes.
const LONGEST_KEY: usize = 64;

/// What a step came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// The next byte is the first of a wanted value.
    Begin,
    /// The byte before was its last.
    End,
}

/// Where one is in a document.
#[derive(Debug)]
pub(super) struct Walker {
    wanted: Wanted,
    state: State,
    /// The key of the field one is in, raw; empty where it is too long.
    key: Vec<u8>,
    /// The key that leads to the second object, where one is in one.
    outer: Option<&'static str>,
    /// A backslash came last, so the next byte is nothing of itself.
    escaped: bool,
    /// Inside a wanted value.
    taking: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before the document.
    Start,
    BeforeKey,
    InKey,
    AfterKey,
    BeforeValue,
    InText,
    InScalar,
    /// Inside so many brackets of a value.
    InNest(u64),
    /// Inside a text inside so many brackets of a value.
    InNestedText(u64),
    AfterValue,
    /// Behind the document.
    Done,
    /// It is no JSON object.
    Broken,
}

impl Walker {
    pub(super) fn new(wanted: Wanted) -> Self {
        let (state, key) = (State::Start, Vec::new());
        Self {
            wanted,
            state,
            key,
            outer: None,
            escaped: false,
            taking: false,
        }
    }

    /// What comes next is another document.
    pub(super) fn restart(&mut self) {
        self.state = State::Start;
        self.outer = None;
        self.escaped = false;
        self.taking = false;
    }

    /// Whether the document is complete.
    pub(super) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// A line ended, which no text survives.
    pub(super) fn end_line(&mut self) {
        match self.state {
            State::InKey | State::InText | State::InNestedText(_) => self.state = State::Broken,
            State::InScalar => {
                self.state = State::AfterValue;
                self.taking = false;
            }
            _ => {}
        }
    }

    /// Walks to the next mark, or to the end of the bytes; returns how far.
    pub(super) fn step(&mut self, bytes: &[u8]) -> (usize, Option<Mark>) {
        let mut at = 0;
        while at < bytes.len() {
            let (walked, mark) = match self.state {
                State::Done | State::Broken => return (bytes.len(), None),
                State::InKey | State::InText | State::InNestedText(_) => self.in_text(&bytes[at..]),
                State::InNest(depth) => self.in_nest(&bytes[at..], depth),
                State::InScalar => self.in_scalar(&bytes[at..]),
                State::BeforeValue => self.before_value(bytes[at]),
                _ => (1, self.between(bytes[at])),
            };
            at += walked;
            if mark.is_some() {
                return (at, mark);
            }
        }
        (at, None)
    }

    /// One byte that belongs to no key and no value.
    fn between(&mut self, byte: u8) -> Option<Mark> {
        if matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
            return None;
        }
        self.state = match (self.state, byte) {
            (State::Start, b'{') | (State::AfterValue, b',') => State::BeforeKey,
            (State::BeforeKey, b'"') => {
                self.key.clear();
                self.key.push(byte);
                State::InKey
            }
            (State::AfterKey, b':') => State::BeforeValue,
            (State::BeforeKey | State::AfterValue, b'}') if self.outer.take().is_some() => {
                State::AfterValue
            }
            (State::BeforeKey | State::AfterValue, b'}') => State::Done,
            _ => State::Broken,
        };
        None
    }

    fn before_value(&mut self, byte: u8) -> (usize, Option<Mark>) {
        if matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
            return (1, None);
        }
        if !self.taking && self.is_wanted() {
            self.taking = true;
            return (0, Some(Mark::Begin));
        }
        self.state = match byte {
            b'"' => State::InText,
            b'{' => match self.leads_on() {
                Some(key) => {
                    self.outer = Some(key);
                    State::BeforeKey
                }
                None => State::InNest(1),
            },
            b'[' => State::InNest(1),
            _ => {
                self.state = State::InScalar;
                return (0, None);
            }
        };
        (1, None)
    }

    fn is_wanted(&self) -> bool {
        self.wanted.iter().any(|path| match (self.outer, *path) {
            (None, [key]) => says(&self.key, key),
            (Some(outer), [first, key]) => outer == *first && says(&self.key, key),
            _ => false,
        })
    }

    /// The key of this field, where it leads to wanted ones.
    fn leads_on(&self) -> Option<&'static str> {
        let outer = self
            .wanted
            .iter()
            .filter(|path| self.outer.is_none() && path.len() == 2)
            .map(|path| path[0]);
        outer.into_iter().find(|key| says(&self.key, key))
    }

    fn in_text(&mut self, bytes: &[u8]) -> (usize, Option<Mark>) {
        let mut at = usize::from(std::mem::take(&mut self.escaped));
        let closed = loop {
            match memchr2(b'"', b'\\', bytes.get(at..).unwrap_or_default()) {
                None => break false,
                Some(found) if bytes[at + found] == b'"' => {
                    at += found + 1;
                    break true;
                }
                Some(found) => at += found + 2,
            }
        };
        // The escaped byte may not have come yet.
        self.escaped = !closed && at > bytes.len();
        let walked = if closed { at } else { bytes.len() };
        if self.state == State::InKey {
            self.extend_key(&bytes[..walked]);
        }
        if !closed {
            return (walked, None);
        }
        match self.state {
            State::InKey => self.state = State::AfterKey,
            State::InNestedText(depth) => self.state = State::InNest(depth),
            _ => return (walked, self.end_value()),
        }
        (walked, None)
    }

    fn extend_key(&mut self, bytes: &[u8]) {
        if self.key.is_empty() || self.key.len() + bytes.len() > LONGEST_KEY {
            self.key.clear();
        } else {
            self.key.extend_from_slice(bytes);
        }
    }

    fn in_nest(&mut self, bytes: &[u8], depth: u64) -> (usize, Option<Mark>) {
        let Some(at) = next_mark(bytes) else {
            return (bytes.len(), None);
        };
        match bytes[at] {
            b'"' => self.state = State::InNestedText(depth),
            b'{' | b'[' => self.state = State::InNest(depth + 1),
            b'}' | b']' if depth == 1 => return (at + 1, self.end_value()),
            b'}' | b']' => self.state = State::InNest(depth - 1),
            _ => {}
        }
        (at + 1, None)
    }

    fn in_scalar(&mut self, bytes: &[u8]) -> (usize, Option<Mark>) {
        let part = |byte: &&u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
        let length = bytes.iter().take_while(part).count();
        let mark = if length < bytes.len() {
            self.end_value()
        } else {
            None
        };
        (length, mark)
    }

    fn end_value(&mut self) -> Option<Mark> {
        self.state = State::AfterValue;
        std::mem::take(&mut self.taking).then_some(Mark::End)
    }
}
