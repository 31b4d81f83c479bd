//! Values while a template is evaluated. Texts of the request and of the template are borrowed; what is rare (tools, their
//! calls, documents) stays the value that minijinja would see.

use std::cell::RefCell;
use std::rc::Rc;

use minijinja::Value;
use minijinja::value::ValueKind;

use super::GivenUp;
use crate::prompt::conversation::{Field, Piece, Said, Turn};

/// A value.
#[derive(Clone)]
pub(super) enum Val<'a> {
    Undefined,
    None,
    Bool(bool),
    Int(i64),
    Text(&'a str),
    Owned(Rc<str>),
    Messages(Messages),
    /// By its number.
    Message(usize),
    Parts(&'a [Piece<'a>]),
    Part(&'a Piece<'a>),
    List(Rc<[Val<'a>]>),
    Space(Rc<RefCell<Vec<(&'a str, Val<'a>)>>>),
    Counter(Counter),
    /// Anything else, and texts of it.
    Other(Value),
}

/// Some of the messages. In few bytes, as values are moved about all the time.
#[derive(Clone, Copy)]
pub(super) struct Messages {
    from: u32,
    to: u32,
    backwards: bool,
}

/// Where a loop is.
#[derive(Clone, Copy)]
pub(super) struct Counter {
    pub(super) index: u32,
    pub(super) length: u32,
    /// What it goes over, where that is messages.
    pub(super) over: Option<Messages>,
}

impl Counter {
    /// The message so many places away from the one at hand.
    pub(super) fn beside(self, away: i64) -> Result<Option<usize>, GivenUp> {
        let over = self.over.ok_or(GivenUp)?;
        let place = i64::from(self.index) + away;
        Ok(if place < 0 { None } else { over.at(place) })
    }
}

impl Messages {
    pub(super) fn len(self) -> usize {
        (self.to - self.from) as usize
    }

    /// The number of a message, from behind where it is negative.
    pub(super) fn at(self, place: i64) -> Option<usize> {
        let place = position(place, self.len())?;
        Some(if self.backwards {
            self.to as usize - 1 - place
        } else {
            self.from as usize + place
        })
    }

    pub(super) fn reversed(self) -> Self {
        Self {
            backwards: !self.backwards,
            ..self
        }
    }

    /// Those from `start` to `stop`, as Python counts.
    pub(super) fn cut(self, start: Option<i64>, stop: Option<i64>) -> Result<Self, GivenUp> {
        if self.backwards {
            return Err(GivenUp);
        }
        let length = self.len() as i64;
        let clamp = |place: i64| {
            if place < 0 {
                (length + place).max(0)
            } else {
                place.min(length)
            }
        };
        let start = clamp(start.unwrap_or(0));
        let stop = clamp(stop.unwrap_or(length)).max(start);
        Ok(Self {
            from: self.from + start as u32,
            to: self.from + stop as u32,
            backwards: false,
        })
    }
}

/// The place that an index means in a list of a length.
pub(super) fn position(index: i64, length: usize) -> Option<usize> {
    let place = if index < 0 {
        length.checked_sub(index.unsigned_abs() as usize)?
    } else {
        index as usize
    };
    (place < length).then_some(place)
}

impl<'a> Val<'a> {
    /// All messages.
    pub(super) fn all(turns: &[Turn<'_>]) -> Self {
        Self::Messages(Messages {
            from: 0,
            to: turns.len() as u32,
            backwards: false,
        })
    }

    pub(super) fn owned(text: impl AsRef<str>) -> Self {
        Self::Owned(Rc::from(text.as_ref()))
    }

    /// A value of minijinja, taken apart where it is simple.
    pub(super) fn of(value: Value) -> Self {
        match value.kind() {
            ValueKind::Undefined => Self::Undefined,
            ValueKind::None => Self::None,
            ValueKind::Bool => Self::Bool(value.is_true()),
            ValueKind::Number if value.is_integer() => {
                value.as_i64().map_or(Self::Other(value), Self::Int)
            }
            _ => Self::Other(value),
        }
    }

    /// The text, where it is one.
    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Owned(text) => Some(text),
            Self::Other(value) => value.as_str(),
            _ => None,
        }
    }

    /// The messages, where it is some of them.
    pub(super) fn messages(&self) -> Option<Messages> {
        match self {
            Self::Messages(messages) => Some(*messages),
            _ => None,
        }
    }

    pub(super) fn is_true(&self) -> Result<bool, GivenUp> {
        Ok(match self {
            Self::Undefined | Self::None => false,
            Self::Bool(flag) => *flag,
            Self::Int(number) => *number != 0,
            Self::Text(text) => !text.is_empty(),
            Self::Owned(text) => !text.is_empty(),
            Self::Messages(messages) => messages.len() > 0,
            Self::Parts(parts) => !parts.is_empty(),
            Self::List(items) => !items.is_empty(),
            // They always have some entry.
            Self::Message(_) | Self::Part(_) => true,
            Self::Other(value) => value.is_true(),
            Self::Space(_) | Self::Counter(_) => return Err(GivenUp),
        })
    }

    /// Whether two values are equal, where types say so beyond doubt.
    pub(super) fn equals(&self, other: &Self) -> Result<bool, GivenUp> {
        if let (Some(one), Some(other)) = (self.text(), other.text()) {
            return Ok(one == other);
        }
        let is_text = self.text().is_some() || other.text().is_some();
        match (self, other) {
            (Self::Int(one), Self::Int(other)) => Ok(one == other),
            (Self::Bool(one), Self::Bool(other)) => Ok(one == other),
            (Self::None, Self::None) => Ok(true),
            (Self::Undefined | Self::None | Self::Int(_) | Self::Bool(_), _) if is_text => {
                Ok(false)
            }
            (_, Self::Undefined | Self::None | Self::Int(_) | Self::Bool(_)) if is_text => {
                Ok(false)
            }
            (Self::None, Self::Int(_) | Self::Bool(_))
            | (Self::Int(_) | Self::Bool(_), Self::None) => Ok(false),
            _ => Err(GivenUp),
        }
    }

    pub(super) fn len(&self) -> Result<usize, GivenUp> {
        match self {
            Self::Messages(messages) => Ok(messages.len()),
            Self::Parts(parts) => Ok(parts.len()),
            Self::List(items) => Ok(items.len()),
            Self::Other(value) if value.kind() == ValueKind::Seq => value.len().ok_or(GivenUp),
            // In characters, as Python counts.
            _ => self.text().map(|text| text.chars().count()).ok_or(GivenUp),
        }
    }
}

/// An entry of a message; undefined where it has none of this name.
pub(super) fn of_message<'a>(turn: &'a Turn<'a>, key: &str) -> Val<'a> {
    match key {
        "role" => Val::Text(turn.role),
        "content" => match &turn.content {
            Said::Text(text) => Val::Text(text),
            Said::Parts(parts) => Val::Parts(parts),
        },
        _ => {
            let found = turn.rest.iter().find(|(known, _)| *known == key);
            found.map_or(Val::Undefined, |(_, value)| Val::of(value.clone()))
        }
    }
}

/// An entry of a part.
pub(super) fn of_part<'a>(part: &'a Piece<'a>, key: &str) -> Val<'a> {
    match part.field(key) {
        None => Val::Undefined,
        Some(Field::Text(text)) => Val::Text(text),
        Some(Field::Value(value)) => Val::of(value.clone()),
    }
}
