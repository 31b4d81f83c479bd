//! Mends the beginning of a request body that was cut somewhere, because the proxy showed no more of it or the rest has not
//! come yet: what is open is closed, what cannot be known is dropped, and the usual readers take the result. A prompt's
//! beginning is all that a prefix cache needs.

use serde_json::Value;

use super::scan::{end_of_text, skip_space};

/// Deepest nesting that the usual readers take.
const DEEPEST: usize = 127;

/// The beginning of a body, closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mended {
    /// The beginning as a document of its own.
    pub json: Vec<u8>,
    /// What was open.
    pub cut: Cut,
    /// What is open around the cut, outermost first.
    open: Vec<Open>,
    /// Length of what stays when the open text is dropped.
    whole: usize,
}

/// Where a body was cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Behind its end: it is complete.
    Nowhere,
    /// Inside the text there; what is left of it is true as far as it goes.
    Text(Vec<Step>),
    /// In the object or list there, of which all that is left is complete.
    Between(Vec<Step>),
}

/// One step from the outside of a document to the inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Into a field of an object.
    Key(String),
    /// Into an element of a list, from 0.
    Index(usize),
}

impl From<&str> for Step {
    fn from(key: &str) -> Self {
        Self::Key(key.to_owned())
    }
}

impl From<usize> for Step {
    fn from(index: usize) -> Self {
        Self::Index(index)
    }
}

/// An object or a list that is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Open {
    /// Length of what is complete before it in what is around it.
    before: usize,
    place: Place,
}

/// Where one is in an object or a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the field whose key lies there.
    Object(usize, usize),
    /// In this element.
    List(usize),
}

/// Closes what is open at the end of `prefix`; `None` where it is no beginning of a JSON object, or nested too deeply. A
/// text that was cut stays as far as it came; a key, a number or a word that was cut is dropped, because it may go on.
pub fn mend(prefix: &[u8]) -> Option<Mended> {
    let start = skip_space(prefix, 0);
    if prefix.get(start) != Some(&b'{') {
        return None;
    }
    let mut mender = Mender {
        prefix,
        at: start,
        whole: start,
        open: Vec::new(),
    };
    let end = loop {
        match mender.value()? {
            Next::Value => {}
            Next::End(end) => break end,
        }
    };
    Some(mender.mended(end))
}

struct Mender<'a> {
    prefix: &'a [u8],
    at: usize,
    /// Length of what is complete.
    whole: usize,
    open: Vec<Open>,
}

/// What comes after a value.
enum Next {
    /// Another one.
    Value,
    /// Nothing.
    End(End),
}

/// How the prefix ends.
#[derive(Clone, Copy)]
enum End {
    Complete,
    Text(usize),
    Between,
}

impl Mender<'_> {
    /// Reads one value, which begins here, and what follows to the next.
    fn value(&mut self) -> Option<Next> {
        let rest = &self.prefix[self.at..];
        match rest.first() {
            None => return Some(Next::End(End::Between)),
            Some(b'{') => return self.enter(Place::Object(0, 0)),
            Some(b'[') => return self.enter(Place::List(0)),
            Some(b'"') => match end_of_text(self.prefix, self.at) {
                Some(end) => self.at = end,
                None => {
                    return Some(Next::End(End::Text(end_of_cut_text(
                        self.prefix,
                        self.at + 1,
                    ))));
                }
            },
            Some(b't' | b'f' | b'n') => match word(rest)? {
                Some(length) => self.at += length,
                None => return Some(Next::End(End::Between)),
            },
            Some(b'-' | b'0'..=b'9') => {
                let part =
                    |byte: &&u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
                self.at += rest.iter().take_while(part).count();
                if self.at == self.prefix.len() {
                    return Some(Next::End(End::Between));
                }
            }
            Some(_) => return None,
        }
        self.whole = self.at;
        self.leave()
    }

    /// Goes into an object or a list, to its first value.
    fn enter(&mut self, place: Place) -> Option<Next> {
        if self.open.len() == DEEPEST {
            return None;
        }
        self.open.push(Open {
            before: self.whole,
            place,
        });
        self.at += 1;
        self.whole = self.at;
        self.at = skip_space(self.prefix, self.at);
        let close = if matches!(place, Place::Object(..)) {
            b'}'
        } else {
            b']'
        };
        if self.prefix.get(self.at) == Some(&close) {
            self.leave()
        } else {
            self.field()
        }
    }

    /// Goes to the value of the next field or element, which begins here.
    fn field(&mut self) -> Option<Next> {
        let Some(Open {
            place: Place::Object(..),
            ..
        }) = self.open.last()
        else {
            return Some(Next::Value);
        };
        let key = self.at;
        match self.prefix.get(self.at) {
            None => return Some(Next::End(End::Between)),
            Some(b'"') => {}
            Some(_) => return None,
        }
        let Some(end) = end_of_text(self.prefix, key) else {
            return Some(Next::End(End::Between));
        };
        if let Some(open) = self.open.last_mut() {
            open.place = Place::Object(key, end);
        }
        self.at = skip_space(self.prefix, end);
        match self.prefix.get(self.at) {
            None => return Some(Next::End(End::Between)),
            Some(b':') => self.at = skip_space(self.prefix, self.at + 1),
            Some(_) => return None,
        }
        Some(Next::Value)
    }

    /// Goes over closing brackets and a comma to the next value.
    fn leave(&mut self) -> Option<Next> {
        loop {
            self.at = skip_space(self.prefix, self.at);
            let byte = self.prefix.get(self.at);
            let Some(open) = self.open.last_mut() else {
                return byte.is_none().then_some(Next::End(End::Complete));
            };
            match (byte, &mut open.place) {
                (None, _) => return Some(Next::End(End::Between)),
                (Some(b'}'), Place::Object(..)) | (Some(b']'), Place::List(_)) => {
                    self.open.pop();
                    self.at += 1;
                    self.whole = self.at;
                }
                (Some(b','), place) => {
                    if let Place::List(index) = place {
                        *index += 1;
                    }
                    self.at = skip_space(self.prefix, self.at + 1);
                    return self.field();
                }
                _ => return None,
            }
        }
    }

    fn mended(self, end: End) -> Mended {
        let Self {
            prefix,
            whole,
            open,
            ..
        } = self;
        let steps = |count: usize| open[..count].iter().map(|open| open.step(prefix)).collect();
        let (mut json, cut) = match end {
            End::Complete => (prefix.to_vec(), Cut::Nowhere),
            End::Text(end) => (
                [&prefix[..end], b"\""].concat(),
                Cut::Text(steps(open.len())),
            ),
            End::Between => (
                prefix[..whole].to_vec(),
                Cut::Between(steps(open.len() - 1)),
            ),
        };
        close(&mut json, &open);
        Mended {
            json,
            cut,
            open,
            whole,
        }
    }
}

impl Mended {
    /// The same without what was open innermost: its text, or else its object or list. For readers that miss in it what may
    /// only have come later. `None` where nothing is left to drop.
    pub fn shorter(mut self) -> Option<Self> {
        match &mut self.cut {
            Cut::Nowhere => return None,
            Cut::Text(path) => {
                path.pop();
                self.cut = Cut::Between(std::mem::take(path));
            }
            Cut::Between(path) => {
                path.pop()?;
                self.whole = self.open.pop()?.before;
            }
        }
        self.json.truncate(self.whole);
        close(&mut self.json, &self.open);
        Some(self)
    }
}

impl Open {
    fn step(&self, prefix: &[u8]) -> Step {
        match self.place {
            Place::List(index) => Step::Index(index),
            Place::Object(start, end) => {
                let raw = &prefix[start..end];
                let key = serde_json::from_slice::<Value>(raw)
                    .ok()
                    .and_then(|key| key.as_str().map(str::to_owned));
                Step::Key(key.unwrap_or_else(|| String::from_utf8_lossy(raw).into_owned()))
            }
        }
    }
}

fn close(json: &mut Vec<u8>, open: &[Open]) {
    json.extend(open.iter().rev().map(|open| match open.place {
        Place::Object(..) => b'}',
        Place::List(_) => b']',
    }));
}

/// Length of the word these bytes begin with; `Some(None)` where it is cut, `None` where it is none.
fn word(rest: &[u8]) -> Option<Option<usize>> {
    let words: [&[u8]; 3] = [b"true", b"false", b"null"];
    words.into_iter().find_map(
        |word| match (rest.starts_with(word), word.starts_with(rest)) {
            (true, _) => Some(Some(word.len())),
            (false, true) => Some(None),
            (false, false) => None,
        },
    )
}

/// Where a text that is not closed can be closed: before an escape or a character that is not complete.
fn end_of_cut_text(prefix: &[u8], start: usize) -> usize {
    let mut at = start;
    while let Some(found) = memchr::memchr(b'\\', &prefix[at..]) {
        at += found;
        let length = escape_length(&prefix[at..]);
        if at + length > prefix.len() {
            return at;
        }
        at += length;
    }
    prefix.len() - cut_character(&prefix[at..])
}

/// Bytes of the escape these bytes begin with, the second half of a pair counted with the first.
fn escape_length(escape: &[u8]) -> usize {
    match escape {
        [
            _,
            b'u',
            b'd' | b'D',
            b'8' | b'9' | b'a' | b'A' | b'b' | b'B',
            ..,
        ] => 12,
        [_, b'u', ..] => 6,
        _ => 2,
    }
}

/// Bytes of the character at the end of a text that are not all of it.
fn cut_character(text: &[u8]) -> usize {
    let last = text
        .iter()
        .rev()
        .take(3)
        .position(|byte| byte & 0xc0 != 0x80)
        .map_or(0, |at| at + 1);
    let length = match text.len().checked_sub(last).and_then(|at| text.get(at)) {
        Some(0xc2..=0xdf) => 2,
        Some(0xe0..=0xef) => 3,
        Some(0xf0..=0xf4) => 4,
        _ => 0,
    };
    if last < length { last } else { 0 }
}

#[cfg(test)]
mod tests;
