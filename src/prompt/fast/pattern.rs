//! Patterns by which texts are cut into words, matched without a regex engine. The patterns of tokenizers are all made of
//! few parts: runs of characters of a class, choices of short texts, and "not before". A pattern of these parts is read here
//! and matched as an engine that backtracks does, greedily and in the order in which the ways are written; any other is
//! refused, and its tokenizer stays with the library.

use super::classes::{self, Bit, Classes, Names};

const BEYOND: &str = "its pattern has parts that are not known here";

/// One part of a way.
#[derive(Debug)]
enum Part {
    /// As many characters of a class as there are, at least and at most so many.
    Run { class: Bit, least: usize, most: usize, possessive: bool },
    /// The first of these that is there, each a class per character; or nothing where that will do.
    Choice { texts: Vec<Vec<Bit>>, optional: bool },
    /// No character of a class follows.
    NotBefore(Bit),
}

/// One way to match, and all classes that its first character may have.
#[derive(Debug)]
struct Way {
    first: Bit,
    parts: Vec<Part>,
}

/// A pattern as its ways, in their order.
#[derive(Debug)]
pub(super) struct Pattern {
    ways: Vec<Way>,
    /// The first way that a byte may begin.
    first: [u8; 256],
}

impl Pattern {
    /// Reads a pattern; or why it cannot be.
    pub(super) fn read(source: &str, names: &mut Names) -> Result<Self, &'static str> {
        let mut reader = Reader { rest: source, names, ignoring_case: false };
        let mut ways = Vec::new();
        loop {
            let parts = reader.way()?;
            // A match of nothing would have rules of its own.
            if parts.iter().all(|part| part.least() == 0) {
                return Err(BEYOND);
            }
            let mut first = 0;
            for part in &parts {
                first |= part.first();
                if part.least() > 0 {
                    break;
                }
            }
            ways.push(Way { first, parts });
            if reader.rest.is_empty() {
                return Ok(Self { ways, first: [0; 256] });
            }
            reader.expect("|")?;
        }
    }

    /// Every character of this class by itself, or all of a row together.
    pub(super) fn of_class(class: Bit, alone: bool) -> Self {
        let most = if alone { 1 } else { usize::MAX };
        let parts = vec![Part::Run { class, least: 1, most, possessive: true }];
        Self { ways: vec![Way { first: class, parts }], first: [0; 256] }
    }

    /// Notes by which bytes ways begin, and where a run never has to give anything back: before the end, before what may be left out, and before what
    /// cannot begin with a character of its class.
    pub(super) fn settle(&mut self, classes: &Classes) {
        for byte in 0..128 {
            let (bits, _) = classes.at(&[byte], 0);
            let first = self.ways.iter().position(|way| way.first & bits != 0).unwrap_or(self.ways.len());
            // More ways only cost time.
            self.first[usize::from(byte)] = u8::try_from(first).unwrap_or_default();
        }
        for way in &mut self.ways {
            for at in 0..way.parts.len() {
                let mut next = way.parts[at + 1..].iter();
                let left_out = |part: &Part| part.least() == 0 && !matches!(part, Part::NotBefore(_));
                let settled = match next.next() {
                    None => true,
                    Some(part) if part.least() > 0 => {
                        matches!(&way.parts[at], Part::Run { class, .. } if !classes.meet(*class, part.first()))
                    }
                    Some(part) => left_out(part) && next.all(left_out),
                };
                if let Part::Run { possessive, .. } = &mut way.parts[at] {
                    *possessive |= settled;
                }
            }
        }
    }

    /// Where the match that begins at a place ends.
    #[inline]
    pub(super) fn match_at(&self, classes: &Classes, text: &[u8], at: usize) -> Option<usize> {
        let (bits, _) = classes.at(text, at);
        let first = self.first[text.get(at).map_or(0, |byte| usize::from(*byte))];
        for way in &self.ways[usize::from(first)..] {
            if way.first & bits != 0
                && let Some(end) = rest(&way.parts, classes, text, at)
            {
                return Some(end);
            }
        }
        None
    }
}

/// Where the rest of a way ends.
#[inline]
fn rest(mut parts: &[Part], classes: &Classes, text: &[u8], mut at: usize) -> Option<usize> {
    while let Some((Part::Run { class, least, most, possessive: true }, after)) = parts.split_first() {
        let (end, enough) = match most {
            1 => {
                let (bits, length) = classes.at(text, at);
                if bits & class == 0 { (at, *least == 0) } else { (at + length, true) }
            }
            &usize::MAX if *least <= 1 => {
                let end = classes.all(text, at, *class);
                (end, end > at || *least == 0)
            }
            most => {
                let (end, count) = classes.run(text, at, *class, *most);
                (end, count >= *least)
            }
        };
        if !enough {
            return None;
        }
        (parts, at) = (after, end);
    }
    if parts.is_empty() { Some(at) } else { searched(parts, classes, text, at) }
}

/// The same where what a part took may have to be given back.
fn searched(parts: &[Part], classes: &Classes, text: &[u8], at: usize) -> Option<usize> {
    let (part, parts) = parts.split_first()?;
    match part {
        Part::Run { class, least, most, .. } => {
            let (mut end, mut count) = classes.run(text, at, *class, *most);
            if count < *least {
                return None;
            }
            loop {
                if let Some(found) = rest(parts, classes, text, end) {
                    return Some(found);
                }
                if count == *least {
                    return None;
                }
                (end, count) = (classes::before(text, end), count - 1);
            }
        }
        Part::Choice { texts, optional } => {
            let spelled = |of: &[Bit]| {
                of.iter().try_fold(at, |at, class| {
                    let (bits, length) = classes.at(text, at);
                    (bits & class != 0).then_some(at + length)
                })
            };
            let chosen = texts.iter().filter_map(|of| rest(parts, classes, text, spelled(of)?)).next();
            chosen.or_else(|| if *optional { rest(parts, classes, text, at) } else { None })
        }
        Part::NotBefore(class) => match classes.at(text, at).0 & class {
            0 => rest(parts, classes, text, at),
            _ => None,
        },
    }
}

impl Part {
    /// Characters that it takes at least.
    fn least(&self) -> usize {
        match self {
            Self::Run { least, .. } => *least,
            Self::Choice { optional: true, .. } | Self::NotBefore(_) => 0,
            Self::Choice { texts, .. } => texts.iter().map(Vec::len).min().unwrap_or(0),
        }
    }

    fn first(&self) -> Bit {
        match self {
            Self::Run { class, .. } => *class,
            Self::Choice { texts, .. } => texts.iter().filter_map(|text| text.first()).fold(0, |bits, bit| bits | bit),
            Self::NotBefore(_) => 0,
        }
    }
}

struct Reader<'a, 'n> {
    rest: &'a str,
    names: &'n mut Names,
    ignoring_case: bool,
}

impl<'a> Reader<'a, '_> {
    fn way(&mut self) -> Result<Vec<Part>, &'static str> {
        let mut parts = Vec::new();
        while !self.rest.is_empty() && !self.rest.starts_with('|') {
            let part = if self.took("(?!") {
                let class = self.class()?;
                self.expect(")")?;
                Part::NotBefore(class)
            } else if self.took("(?:") {
                self.choice(false)?
            } else if self.took("(?i:") {
                self.choice(true)?
            } else {
                let class = self.class()?;
                let (least, most, possessive) = self.times()?;
                Part::Run { class, least, most, possessive }
            };
            parts.push(part);
        }
        Ok(parts)
    }

    /// Short texts to choose from, behind the head of their group.
    fn choice(&mut self, ignoring_case: bool) -> Result<Part, &'static str> {
        self.ignoring_case = ignoring_case;
        let (mut texts, mut text) = (Vec::new(), Vec::new());
        loop {
            if self.took("|") {
                texts.push(std::mem::take(&mut text));
            } else if self.took(")") {
                texts.push(text);
                break;
            } else {
                text.push(self.class()?);
            }
        }
        self.ignoring_case = false;
        if texts.iter().any(Vec::is_empty) {
            return Err(BEYOND);
        }
        let optional = self.took("?");
        if self.rest.starts_with(['?', '*', '+', '{']) {
            return Err(BEYOND);
        }
        Ok(Part::Choice { texts, optional })
    }

    /// One character of a class, which is asked for as it is written.
    fn class(&mut self) -> Result<Bit, &'static str> {
        let rest = self.rest;
        let mut chars = rest.chars();
        let length = match chars.next().ok_or(BEYOND)? {
            '[' => bracket(rest)?,
            '\\' => match chars.next().ok_or(BEYOND)? {
                'p' | 'P' if rest[2..].starts_with('{') => rest.find('}').ok_or(BEYOND)? + 1,
                's' | 'S' | 'd' | 'D' | 'r' | 'n' | 't' => 2,
                escaped if escaped.is_ascii_punctuation() => 2,
                _ => return Err(BEYOND),
            },
            '(' | ')' | '{' | '}' | ']' | '.' | '^' | '$' | '?' | '*' | '+' | '|' => return Err(BEYOND),
            plain => plain.len_utf8(),
        };
        let (class, rest) = rest.split_at(length);
        self.rest = rest;
        if !self.ignoring_case {
            return self.names.regex(class);
        }
        // What is more than one character in another case cannot come of these.
        if !class.chars().all(|char| char.is_ascii_alphabetic() || matches!(char, '\'' | '[' | ']')) {
            return Err(BEYOND);
        }
        self.names.regex(&format!("(?i:{class})"))
    }

    /// How often what was read may be there, and whether all is taken that is.
    fn times(&mut self) -> Result<(usize, usize, bool), &'static str> {
        let (least, most) = if self.took("?") {
            (0, 1)
        } else if self.took("*") {
            (0, usize::MAX)
        } else if self.took("+") {
            (1, usize::MAX)
        } else if self.took("{") {
            return self.counted();
        } else {
            return Ok((1, 1, false));
        };
        let possessive = self.took("+");
        if self.rest.starts_with(['?', '*', '+', '{']) {
            return Err(BEYOND);
        }
        Ok((least, most, possessive))
    }

    fn counted(&mut self) -> Result<(usize, usize, bool), &'static str> {
        let (inner, rest) = self.rest.split_once('}').ok_or(BEYOND)?;
        self.rest = rest;
        let number = |text: &str| text.parse::<usize>().map_err(|_| BEYOND);
        let (least, most) = match inner.split_once(',') {
            None => (number(inner)?, number(inner)?),
            Some((least, "")) => (number(least)?, usize::MAX),
            Some((least, most)) => (number(least)?, number(most)?),
        };
        if least > most || self.rest.starts_with(['?', '*', '+', '{']) {
            return Err(BEYOND);
        }
        Ok((least, most, false))
    }

    fn took(&mut self, token: &str) -> bool {
        let rest = self.rest.strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, token: &str) -> Result<(), &'static str> {
        if self.took(token) { Ok(()) } else { Err(BEYOND) }
    }
}

/// How long the bracket is that a text begins with.
fn bracket(text: &str) -> Result<usize, &'static str> {
    let mut escaped = false;
    for (at, char) in text.char_indices().skip(1) {
        match char {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            // A class in a class, and a bracket that begins with one, have rules of their own.
            '[' => return Err(BEYOND),
            ']' if at == 1 || (at == 2 && text[1..].starts_with('^')) => return Err(BEYOND),
            ']' => return Ok(at + 1),
            _ => {}
        }
    }
    Err(BEYOND)
}
