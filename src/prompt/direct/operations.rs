//! What is done with values: each says for which of them it is known to do what minijinja does, and gives up for all others.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::GivenUp;
use super::plan::{Kind, Operation};
use super::value::Val;
use crate::prompt::python::{self, DOUBT};

/// Writes a value as `{{ }}` does.
pub(super) fn print(value: &Val<'_>, out: &mut String) -> Result<(), GivenUp> {
    let Val::Other(other) = value else {
        return join(value, out);
    };
    let text = python::text(other);
    if text.contains(DOUBT) {
        return Err(GivenUp);
    }
    out.push_str(&text);
    Ok(())
}

/// Writes a value as `~` does.
pub(super) fn join(value: &Val<'_>, out: &mut String) -> Result<(), GivenUp> {
    match (value, value.text()) {
        (_, Some(text)) => out.push_str(text),
        (Val::Undefined, _) => {}
        (Val::Int(number), _) => out.push_str(&number.to_string()),
        _ => return Err(GivenUp),
    }
    Ok(())
}

/// A part of a text, borrowed where the text is.
pub(super) fn mapped<'a>(
    value: &Val<'a>,
    part: impl for<'t> Fn(&'t str) -> &'t str,
) -> Result<Val<'a>, GivenUp> {
    match value {
        Val::Text(text) => Ok(Val::Text(part(text))),
        _ => value
            .text()
            .map(|text| Val::owned(part(text)))
            .ok_or(GivenUp),
    }
}

pub(super) fn arithmetic<'a>(
    operation: Operation,
    left: &Val<'a>,
    right: &Val<'a>,
) -> Result<Val<'a>, GivenUp> {
    if let (Operation::Add, Some(left), Some(right)) = (operation, left.text(), right.text()) {
        return Ok(Val::owned([left, right].concat()));
    }
    let (Val::Int(left), Val::Int(right)) = (left, right) else {
        return Err(GivenUp);
    };
    let result = match operation {
        Operation::Add => left.checked_add(*right),
        Operation::Sub => left.checked_sub(*right),
        // Of negative numbers Python and others differ.
        Operation::Rem if *left >= 0 && *right > 0 => Some(left % right),
        Operation::Rem => None,
    };
    result.map(Val::Int).ok_or(GivenUp)
}

pub(super) fn is(value: &Val<'_>, kind: Kind) -> Result<bool, GivenUp> {
    Ok(match kind {
        Kind::Defined => !matches!(value, Val::Undefined),
        Kind::Undefined => matches!(value, Val::Undefined),
        Kind::None => matches!(value, Val::None),
        Kind::Text => value.text().is_some(),
        Kind::Mapping => match value {
            Val::Message(_) | Val::Part(_) => true,
            Val::Other(value) => value.kind() == ValueKind::Map,
            Val::Space(_) | Val::Counter(_) => return Err(GivenUp),
            _ => false,
        },
        Kind::Iterable => match value {
            Val::Messages(_) | Val::Message(_) | Val::Parts(_) | Val::Part(_) | Val::List(_) => {
                true
            }
            Val::None | Val::Int(_) | Val::Bool(_) => false,
            _ if value.text().is_some() => true,
            _ => return Err(GivenUp),
        },
        Kind::True => matches!(value, Val::Bool(true)),
        Kind::False => matches!(value, Val::Bool(false)),
    })
}

/// A value as minijinja has it.
pub(super) fn value_of(value: &Val<'_>) -> Result<Value, GivenUp> {
    match value {
        Val::Other(value) => Ok(value.clone()),
        Val::Int(number) => Ok(Value::from(*number)),
        Val::Bool(flag) => Ok(Value::from(*flag)),
        _ => value.text().map(Value::from).ok_or(GivenUp),
    }
}
