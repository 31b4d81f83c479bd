//! Values of an evaluation. Texts of the request and of the template are borrowed. Rare values
//! (tools, tool calls and documents) are minijinja values.

use std::cell::RefCell;
use std::rc::Rc;

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::prompt::conversation::{TemplateContent, TemplateField, TemplateMessage, TemplatePart};

/// The template or a value is not supported.
pub(super) struct UnsupportedError;

/// Result of an evaluation.
pub(super) type EvalResult<T> = Result<T, UnsupportedError>;

/// Value of a term.
#[derive(Clone)]
pub(super) enum TemplateValue<'a> {
    Undefined,
    None,
    Bool(bool),
    Int(i64),
    Text(&'a str),
    Owned(Rc<str>),
    Messages(MessageRange),
    /// A message, by its index.
    Message(usize),
    Parts(&'a [TemplatePart<'a>]),
    Part(&'a TemplatePart<'a>),
    List(Rc<[TemplateValue<'a>]>),
    /// A Jinja2 namespace.
    Namespace(Rc<RefCell<Vec<(&'a str, TemplateValue<'a>)>>>),
    /// The variable `loop`.
    Loop(LoopCounter),
    /// Any other value, or a text inside one.
    Other(Value),
}

/// Range of messages. It is kept small, because values are moved often.
#[derive(Clone, Copy)]
pub(super) struct MessageRange {
    from: u32,
    to: u32,
    backwards: bool,
}

/// Position in a loop: the variable `loop`.
#[derive(Clone, Copy)]
pub(super) struct LoopCounter {
    pub(super) index: u32,
    pub(super) length: u32,
    /// Iterated messages, if the loop iterates messages.
    pub(super) over: Option<MessageRange>,
}

impl LoopCounter {
    /// Returns the message at the distance `away` from the current one.
    pub(super) fn neighbor(self, away: i64) -> EvalResult<Option<usize>> {
        let over = self.over.ok_or(UnsupportedError)?;
        let place = i64::from(self.index) + away;
        Ok(if place < 0 { None } else { over.at(place) })
    }
}

impl MessageRange {
    pub(super) fn len(self) -> usize {
        (self.to - self.from) as usize
    }

    /// Returns the index of a message. Negative places count from the end.
    pub(super) fn at(self, place: i64) -> Option<usize> {
        let place = position(place, self.len())?;
        Some(if self.backwards {
            self.to as usize - 1 - place
        } else {
            self.from as usize + place
        })
    }

    /// Returns the number of leading messages up to and including the one at `index`; `None` if it
    /// depends on the number of messages.
    pub(super) fn leading_count(self, index: i64) -> Option<usize> {
        let index = usize::try_from(index).ok().filter(|_| !self.backwards)?;
        (self.from as usize).checked_add(index)?.checked_add(1)
    }

    /// Returns the iteration that starts after the first `count` messages; `None` if there is none.
    pub(super) fn iteration_after(self, count: usize) -> Option<u32> {
        let iteration = u32::try_from(count).ok()?.checked_sub(self.from)?;
        (!self.backwards && iteration as usize <= self.len()).then_some(iteration)
    }

    /// Returns the number of messages before an iteration; `None` if the range is reversed.
    pub(super) fn count_before(self, iteration: u32) -> Option<usize> {
        (!self.backwards).then_some(self.from as usize + iteration as usize)
    }

    pub(super) fn reversed(self) -> Self {
        Self {
            backwards: !self.backwards,
            ..self
        }
    }

    /// Returns the messages from `start` to `stop`, with the semantics of Python slices.
    pub(super) fn slice(self, start: Option<i64>, stop: Option<i64>) -> EvalResult<Self> {
        if self.backwards {
            return Err(UnsupportedError);
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

/// Resolves an index into a list. Negative indices count from the end.
pub(super) fn position(index: i64, length: usize) -> Option<usize> {
    let place = if index < 0 {
        length.checked_sub(index.unsigned_abs() as usize)?
    } else {
        index as usize
    };
    (place < length).then_some(place)
}

impl<'a> TemplateValue<'a> {
    /// Creates the list of all messages.
    pub(super) fn all(turns: &[TemplateMessage<'_>]) -> Self {
        Self::Messages(MessageRange {
            from: 0,
            to: turns.len() as u32,
            backwards: false,
        })
    }

    pub(super) fn owned(text: impl AsRef<str>) -> Self {
        Self::Owned(Rc::from(text.as_ref()))
    }

    /// Converts a minijinja value.
    pub(super) fn from_minijinja(value: Value) -> Self {
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

    /// Returns the text, if the value is a text.
    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Owned(text) => Some(text),
            Self::Other(value) => value.as_str(),
            _ => None,
        }
    }

    /// Returns the range, if the value is a range of messages.
    pub(super) fn messages(&self) -> Option<MessageRange> {
        match self {
            Self::Messages(messages) => Some(*messages),
            _ => None,
        }
    }

    pub(super) fn is_true(&self) -> EvalResult<bool> {
        Ok(match self {
            Self::Undefined | Self::None => false,
            Self::Bool(flag) => *flag,
            Self::Int(number) => *number != 0,
            Self::Text(text) => !text.is_empty(),
            Self::Owned(text) => !text.is_empty(),
            Self::Messages(messages) => messages.len() > 0,
            Self::Parts(parts) => !parts.is_empty(),
            Self::List(items) => !items.is_empty(),
            // Messages and parts are never empty.
            Self::Message(_) | Self::Part(_) => true,
            Self::Other(value) => value.is_true(),
            Self::Namespace(_) | Self::Loop(_) => return Err(UnsupportedError),
        })
    }

    /// Returns true for equal values. Returns an error if the comparison is not supported for their
    /// types.
    pub(super) fn equals(&self, other: &Self) -> EvalResult<bool> {
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
            _ => Err(UnsupportedError),
        }
    }

    pub(super) fn len(&self) -> EvalResult<usize> {
        match self {
            Self::Messages(messages) => Ok(messages.len()),
            Self::Parts(parts) => Ok(parts.len()),
            Self::List(items) => Ok(items.len()),
            Self::Other(value) if value.kind() == ValueKind::Seq => {
                value.len().ok_or(UnsupportedError)
            }
            // Python counts characters.
            _ => self
                .text()
                .map(|text| text.chars().count())
                .ok_or(UnsupportedError),
        }
    }
}

/// Returns a field of a message, or an undefined value. Returns an error for tool calls that were
/// omitted.
pub(super) fn message_field<'a>(
    turn: &'a TemplateMessage<'a>,
    key: &str,
) -> EvalResult<TemplateValue<'a>> {
    Ok(match key {
        "tool_calls" if turn.has_omitted_tool_calls => return Err(UnsupportedError),
        "role" => TemplateValue::Text(turn.role),
        "content" => match &turn.content {
            TemplateContent::Text(text) => TemplateValue::Text(text),
            TemplateContent::Message(text) => TemplateValue::Text(text),
            TemplateContent::Parts(parts) => TemplateValue::Parts(parts),
        },
        _ => {
            let found = turn.other_fields.iter().find(|(known, _)| *known == key);
            found.map_or(TemplateValue::Undefined, |(_, value)| {
                TemplateValue::from_minijinja(value.clone())
            })
        }
    })
}

/// Returns a field of a part, or an undefined value.
pub(super) fn part_field<'a>(part: &'a TemplatePart<'a>, key: &str) -> TemplateValue<'a> {
    match part.field(key) {
        None => TemplateValue::Undefined,
        Some(TemplateField::Text(text)) => TemplateValue::Text(text),
        Some(TemplateField::Value(value)) => TemplateValue::from_minijinja(value.clone()),
    }
}
